"""Lookups at constant indices along a sharded dim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowered import same

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
MESHES = ["data=2, model=2, idle=2"]
INDICES = np.array([[3, 1], [2, 5]])


@pytest.mark.parametrize("fn", [lambda x: x[:, jnp.asarray(INDICES)], lambda x: x[jnp.asarray(INDICES)]])
def test_constant_indices_of_two_dims(fn):
    for of in (fn, jax.grad(lambda x: jnp.sum(jnp.sin(fn(x))))):
        same(of, X, layout="rows: data; columns: model", dims={"x": "rows columns"}, meshes=MESHES)


@pytest.mark.parametrize("index", [-1, 16, 3], ids=["negative", "past the end", "in bounds"])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_constant_indices_out_of_bounds(index, mode):
    """``lax.gather`` does not count negative indices from the end, as ``jnp`` does."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    rows = np.array([[2], [index], [5], [0]], np.int32)

    def fn(x):
        return lax.gather(x, jnp.asarray(rows), numbers, (1, 8), mode=mode, fill_value=0.5)

    position = np.clip(index, 0, 15)
    expected = X[[2, position, 5, 0]].copy()
    if mode == "fill" and position != index:
        expected[1] = 0.5
    np.testing.assert_array_equal(jax.jit(fn)(X), expected)
    same(fn, X, layout="rows: data", dims={"x": "rows columns"}, meshes=MESHES)
