"""JAX's primitive harnesses through `mp.jit`: a sample of them, and the classification of outcomes."""

import random

import harnesses
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp


class Harness:
    def __init__(self, fun, *args, implemented=True):
        self.dyn_fun, self.args, self.implemented = fun, args, implemented

    def dyn_args_maker(self, rng):
        return self.args

    def filter(self, platform):
        return self.implemented


def refused(x):
    raise mp.errors.MeshparError("no", fixes=["do this"])


def test_outcomes():
    x = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    kept = []

    def changes(x):
        kept.append(x)
        return x * len(kept)

    def fails_the_second_time(x):
        kept.append(x)
        return {1: x}[len(kept)]

    def fails(x):
        raise ValueError("never")

    def refused_the_second_time(x):
        kept.append(x)
        return x if len(kept) == 1 else refused(x)

    def outcome(fn, **more):
        kept.clear()
        return harnesses.run_harness(Harness(fn, x, **more))[0]

    assert outcome(jnp.cumsum) == "right"
    assert outcome(changes) == "wrong"
    assert outcome(fails_the_second_time) == "foreign"
    assert outcome(fails) == "unrunnable"
    assert outcome(refused_the_second_time) == "refused"
    assert outcome(jnp.sin, implemented=False) == "unrunnable"


DIFFERENCES = [([1.0, 2.0], ""), ([1.0, 2.0 + 1e-12], ""), ([1.0, 2.001], "differs by 0.001")]
DIFFERENCES += [([1.0, np.nan], "differs by nan"), ([1, 2], "is int64"), ([[1.0, 2.0]], "is float64[1, 2]")]


@pytest.mark.parametrize(("found", "text"), DIFFERENCES)
def test_differences(found, text):
    said = harnesses.difference([np.array(found)], [np.array([1.0, 2.0])])
    assert text in said
    assert bool(text) == bool(said)


def test_integers_and_keys_are_compared_exactly():
    assert harnesses.difference([np.array([1, 3])], [np.array([1, 2])]) == "result 0: 1 of 2 elements differ"
    a, b = jax.random.key(0), jax.random.key(1)
    assert not harnesses.difference([a], [a])
    assert harnesses.difference([a], [b])


def test_a_sample_is_right():
    pytest.importorskip("absl")
    every = len(harnesses.all_harnesses())
    lines = harnesses.run_chunk(sorted(random.Random(0).sample(range(every), 8)))
    assert len(lines) == 8
    assert [x for x in lines if x["outcome"] not in ("right", "unrunnable")] == []
