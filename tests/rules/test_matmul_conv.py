"""Ragged matmuls along split rows: equal to a loop over the groups in NumPy, and few bytes are sent. FLOPs of convolutions."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp
from meshpar._src.rules import PRIMITIVES

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
    def loss(w, x, sizes):
        return jnp.sum(lax.ragged_dot(x, w, sizes) ** 2)

    args = jnp.ones((4, 6, 8)), jnp.ones((16, 6)), jnp.array([1, 5, 0, 9])
    dims = {"x": "rows inner", "w": "_ inner out", "sizes": "_"}
    options = {"mesh": "data=4, model=2", "layout": "rows: data", "dims": dims}
    assert not mp.plan(lambda w, x, sizes: lax.ragged_dot(x, w, sizes), *args, **options).collectives
    gradient = mp.plan(jax.grad(loss), *args, **options)
    assert [(c.op, c.shape) for c in gradient.collectives] == [("all-reduce", (4, 6, 8))]


def test_batched_group_sizes_need_replicated_rows():
    args = jnp.ones((2, 16, 6)), jnp.ones((2, 4, 6, 8)), jnp.array([[1, 5, 0, 9], [4, 4, 4, 4]])
    dims = {"x": "_ rows inner", "w": "_ _ inner out", "sizes": "_ _"}
    step = mp.jit(
        lambda x, w, sizes: jax.vmap(lax.ragged_dot)(x, w, sizes),
        mesh="data=4, model=2",
        layout="rows: data",
        dims=dims,
    )
    np.testing.assert_allclose(step(*args), jax.vmap(lax.ragged_dot)(*args), atol=1e-5)


# -- FLOPs of convolutions


def convolution(x, w, stride=2, groups=1):
    how = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", **how)


@pytest.mark.parametrize(("window", "channels", "features", "groups"), [(3, 32, 32, 32), (1, 64, 2, 1), (3, 8, 16, 2)])
def test_each_gradient_of_a_strided_convolution_has_its_flops(window, channels, features, groups):
    """Also where the taps, or the channels, are fewer than the zeros that the stride puts between elements."""
    x, w = jnp.ones((2, 8, 8, channels)), jnp.ones((window, window, channels // groups, features))
    gradients = jax.grad(lambda x, w: (convolution(x, w, groups=groups) ** 2).sum(), argnums=(0, 1))
    eqns = [e for e in jax.make_jaxpr(gradients)(x, w).jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    taps = window**2 * channels // groups
    assert [PRIMITIVES[e.primitive.name].flops(e) for e in eqns] == 3 * [2 * (2 * 4 * 4) * taps * features]
