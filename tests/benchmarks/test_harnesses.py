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


def test_numbers_dtypes_and_keys_are_compared():
    for found, text in (([1.0, 2.0 + 1e-12], ""), ([1.0, np.nan], "differs by nan"), ([1, 2], "is int64")):
        said = harnesses.difference([np.array(found)], [np.array([1.0, 2.0])])
        assert text in said
        assert bool(text) == bool(said)
    assert harnesses.difference([jax.random.key(0)], [jax.random.key(1)])


def test_a_sample_is_right():
    pytest.importorskip("absl")
    every = len(harnesses.all_harnesses())
    lines = harnesses.run_chunk(sorted(random.Random(0).sample(range(every), 8)))
    assert len(lines) == 8
    assert [x for x in lines if x["outcome"] not in ("right", "unrunnable")] == []
