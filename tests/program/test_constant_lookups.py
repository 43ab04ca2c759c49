"""Lookups at constant indices along a sharded dim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowered import same

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
INDICES = np.array([[3, 1], [2, 5]])


@pytest.mark.parametrize("fn", [lambda x: x[:, jnp.asarray(INDICES)], lambda x: x[jnp.asarray(INDICES)]])
def test_constant_indices_of_two_dims(fn):
    same(fn, X, layout="rows: data; columns: model", dims={"x": "rows columns"})
    same(
        jax.grad(lambda x: jnp.sum(jnp.sin(fn(x)))), X, layout="rows: data; columns: model", dims={"x": "rows columns"}
    )
