"""Codes and scales of the operands of matmuls, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from scaled_simulation import BLOCK, encoded

import meshpar as mp
from meshpar._src.layers.scaled_matmul import FORMATS, blocks_along, power


@pytest.mark.parametrize(
    ("shape", "dims", "block", "want"),
    [
        ((64, 128), (1,), 32, {1: 32}),
        ((4, 8, 16), (1, 2), 32, {1: 2, 2: 16}),
        ((4, 8, 16), (2, 1), 32, {1: 8, 2: 4}),
        ((2, 4, 4), (0, 1, 2), 32, {0: 2, 1: 4, 2: 4}),
        ((8, 24), (0, 1), 32, None),
        ((64, 16), (1,), 32, None),
        ((64, 16), (), 1, {}),
    ],
)
def test_blocks_of_consecutive_elements(shape, dims, block, want):
    assert blocks_along(shape, dims, block) == want


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", BLOCK)
def test_codes_times_scales(name, gradient):
    """Of values of all magnitudes, and zeros."""
    b = BLOCK[name]
    x = normal(np.random.default_rng(0), 64, 96) * np.exp2(np.linspace(-60, 40, 64, dtype=np.float32))[:, None]
    x[::7] = 0
    q = jax.jit(lambda x: FORMATS[name].encode(x, {1: b}, "x", gradient))(x)
    common = 1 if q.exponent is None else np.asarray(power(q.exponent))
    np.testing.assert_array_equal(np.asarray(q.values, np.float32) * common, encoded(name, x, (1, b), gradient))


def test_stochastic_rounding_has_no_bias():
    """The mean of the codes of many equal elements is near the element; rounding to the nearest gives one code."""
    x = jnp.full((4096, 16), 0.3).at[:, 0].set(1.0)
    means = []
    for gradient in (True, False):
        q = jax.jit(lambda x, gradient=gradient: FORMATS["nvfp4"].encode(x, {1: 16}, "x", gradient))(x)
        means.append(float(q.values[:, 1:].astype(jnp.float32).mean() * power(q.exponent)))
    assert means[0] == pytest.approx(0.3, rel=2e-3)
    assert abs(means[1] - 0.3) > 0.01


@pytest.mark.parametrize("name", BLOCK)
@pytest.mark.parametrize("einsum", ["bse,emh->bsmh", "bshd,hdm->bsm", "gbse,gem->gbsm", "hdm,bsdh->bsm", "em,bse->msb"])
def test_values_and_gradients_of_all_dimension_numbers(name, einsum):
    """Are those of the plain matmul up to the error of the format."""
    sizes, rng = {"b": 2, "s": 32, "e": 64, "m": 64, "h": 2, "d": 32, "g": 2}, np.random.default_rng(0)
    first, second = einsum.partition("->")[0].split(",")
    x, w = (first, second) if "b" in first else (second, first)
    arrays = {"w": normal(rng, *(sizes[c] for c in w))}, normal(rng, *(sizes[c] for c in x))

    def loss(p, x):
        y = jnp.einsum(einsum, *((x, p["w"]) if "b" in first else (p["w"], x)))
        return (y * jnp.sin(jnp.arange(y.size).reshape(y.shape))).sum()

    exact = jax.jit(jax.grad(loss, (0, 1)))(*arrays)
    got = jax.jit(jax.grad(mp.train.Precision(name)(loss), (0, 1)))(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) < {"float8": 0.08, "mxfp8": 0.06, "nvfp4": 0.35}[name] * np.linalg.norm(b)
