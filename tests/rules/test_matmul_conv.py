"""Matmuls of ragged groups along split rows: equal to a loop over the groups in NumPy, and few bytes are sent."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp

RNG = np.random.default_rng(0)
SIZES = {
    "even": [4, 4, 4, 4],
    "empty groups": [0, 7, 0, 9],
    "one group has all": [0, 0, 16, 0],
    "rows beyond the groups": [3, 1, 2, 5],
    "no rows": [0, 0, 0, 0],
}


def ragged(x, w, sizes):
    out, start = np.zeros((len(x), w.shape[2])), 0
    for g, n in enumerate(sizes):
        out[start : start + n] = x[start : start + n] @ w[g]
        start += n
    return out


def ragged_gradients(x, w, sizes, ct):
    dx, dw, start = np.zeros(x.shape), np.zeros(w.shape), 0
    for g, n in enumerate(sizes):
        rows = slice(start, start + n)
        dx[rows], dw[g] = ct[rows] @ w[g].T, x[rows].T @ ct[rows]
        start += n
    return dx, dw


@pytest.mark.parametrize(
    ("name", "layout"), covering.each(SIZES, ["rows: data", "rows: data; out: model", "rows: data; inner: model"])
)
def test_split_rows_of_a_ragged_matmul(name, layout):
    sizes = SIZES[name]
    x, w, ct = (RNG.normal(size=s).astype(np.float32) for s in ((16, 6), (4, 6, 8), (16, 8)))

    def step(x, w, sizes, ct):
        out, back = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
        return out, *back(ct)

    dims = {"x": "rows inner", "w": "_ inner out", "sizes": "_", "ct": "rows out"}
    fn = mp.jit(step, mesh="data=4, model=2", layout=layout, dims=dims)
    args = x, w, np.array(sizes, np.int32), ct
    expected = ragged(x, w, sizes), *ragged_gradients(x, w, sizes, ct)
    for found, want in zip(fn(*args), expected, strict=True):
        np.testing.assert_allclose(found, want, atol=1e-5)


def test_rows_of_a_ragged_matmul_stay_split():
    fn = mp.jit(
        lambda x, w, sizes: lax.ragged_dot(x, w, sizes),
        mesh="data=4, model=2",
        layout="rows: data",
        dims={"x": "rows inner", "w": "_ inner out", "sizes": "_"},
    )
    args = jnp.ones((16, 6)), jnp.ones((4, 6, 8)), jnp.array([1, 5, 0, 9])
    assert not fn.plan(*args).collectives
    gradient = mp.plan(
        jax.grad(lambda w, x: jnp.sum(lax.ragged_dot(x, w, jnp.array([1, 5, 0, 9])) ** 2)),
        args[1], args[0], mesh="data=4, model=2", layout="rows: data", dims={"w": "_ inner out", "x": "rows inner"},
    )  # fmt: skip
    assert [(c.op, c.shape) for c in gradient.collectives] == [("all-reduce", (4, 6, 8))]


def test_batched_group_sizes_need_replicated_rows():
    x, w, sizes = jnp.ones((2, 16, 6)), jnp.ones((2, 4, 6, 8)), jnp.array([[1, 5, 0, 9], [4, 4, 4, 4]])

    def fn(x, w, sizes):
        return jax.vmap(lax.ragged_dot)(x, w, sizes)

    step = mp.jit(
        fn,
        mesh="data=4, model=2",
        layout="rows: data",
        dims={"x": "_ rows inner", "w": "_ _ inner out", "sizes": "_ _"},
    )
    np.testing.assert_allclose(step(x, w, sizes), fn(x, w, sizes), atol=1e-5)
