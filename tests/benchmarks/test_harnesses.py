"""JAX's primitive harnesses through `mp.jit`: a sample of them, and the comparison of results."""

import random

import harnesses
import jax
import numpy as np
import pytest


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
