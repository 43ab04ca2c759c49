"""Programs evaluated in a wider dtype: what JAX makes of them when they are traced with x64; and what counts as rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshpar._src.verify.wide import in_wider, judge

RNG = np.random.default_rng(0)
X, Y, V = (RNG.normal(size=s).astype("f") for s in ((6, 4), (4, 6), (4,)))
PICKS = np.array([0, 3, 3, 9, -1], np.int32)


@jax.custom_vjp
def tripled(x):
    return x * 3


tripled.defvjp(lambda x: (x * 3, x), lambda x, g: (g * x,))


def loop(x, n):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1]) + c[1]), (0, x))[1]


def layers(w, x):
    return lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h * w), jnp.sum(h))), x, w)


CASES = {
    "matmul": (lambda x, y: x @ y / 3 + 0.1, X, Y),
    "einsum": (lambda x, y: jnp.einsum("ab,bc->", x, y), X, Y),
    "softmax": (lambda x: jax.nn.softmax(x) * jax.nn.logsumexp(x), X),
    "scan": (layers, X, V),
    "gradient of a scan": (jax.grad(lambda w, x: jnp.sum(layers(w, x)[0] ** 2)), X, V),
    "while": (lambda x: loop(x, 3), X),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda x: jnp.cos(x) / 7, x), X),
    "switch": (lambda x: lax.switch(7, [jnp.sin, jnp.cos, jnp.exp], x), X),
    "own derivative": (jax.grad(lambda x: jnp.sum(tripled(x) * jax.nn.silu(x))), X),
    "scatters": (lambda x, y: x.at[PICKS].add(y[0, 0]).at[1].multiply(y[1, 1] / 3).at[2].max(y[0, 2]), X, Y),
    "applied function": (lambda x: x.at[PICKS[:2]].apply(jnp.negative) / 3, X),
    "gather": (lambda x: jnp.take(x, PICKS, 0, mode="clip") / 7, X),
    "sorted": (lambda x: jnp.cumsum(jnp.sort(x / 3, 0), 0), X),
    "factors": (lambda x, y: lax.linalg.lu(y @ x)[0], X, Y),
    "window": (lambda x: lax.reduce_window(x / 3, np.float32(0), lax.add, (2, 2), (1, 1), "VALID"), X),
    "fft": (lambda x: jnp.fft.rfft(x / 3), X),
    "argmax": (lambda x: jnp.argmax(x, 1), X),
    "iota": (lambda x: x / (1 + lax.broadcasted_iota(x.dtype, x.shape, 0)), X),
    "standard deviation": (lambda x: jnp.std(x) * jnp.float32(0.1), X),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_x64_makes_of_it(name):
    fn, *xs = CASES[name]
    closed = jax.make_jaxpr(fn)(*xs)
    with jax.enable_x64(True):
        exact = jax.tree.leaves(jax.jit(fn)(*(np.asarray(x, np.float64) for x in xs)))
        found = jax.jit(in_wider(closed, np.dtype(np.float64)))(xs)
    for a, b, old in zip(found, exact, jax.tree.leaves(jax.jit(fn)(*xs)), strict=True):
        if jnp.issubdtype(b.dtype, jnp.inexact):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-7)  # constants of the program are float32
            np.testing.assert_allclose(a, old, rtol=1e-3, atol=1e-5)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("sharded", "unsharded", "exact", "rounding"),
    [
        ([1.0, 2.004], [1.0, 1.999], [1.0, 2.0], True),  # four times as far
        ([1.0, 2.1], [1.0, 1.999], [1.0, 2.0], False),
        ([1.0, 2.01], [1.0, 2.0], [1.0, 2.0], True),  # within 2 ulps of bfloat16, and the other happens to be exact
        ([1.0, 2.04], [1.0, 2.0], [1.0, 2.0], False),
        ([1.0, np.inf], [1.0, np.inf], [1.0, 2.0], True),  # both overflowed
        ([1.0, 2.0], [1.0, np.inf], [1.0, 2.0], True),
        ([1.0, np.inf], [1.0, 2.0], [1.0, 2.0], False),
        ([np.nan, 2.0], [1.0, 2.0], [1.0, 2.0], False),
        ([np.nan, 2.0], [np.nan, 2.0], [np.nan, 2.0], True),
        ([0.0, 2.0], [np.inf, 2.0], [np.inf, 2.0], False),
        ([3], [3], [3], True),
        ([4], [3], [3], False),
        ([4], [3], [4], True),
    ],
)
def test_what_is_rounding(sharded, unsharded, exact, rounding):
    a, b, e = (np.asarray(x, np.int32 if type(x[0]) is int else np.float64) for x in (sharded, unsharded, exact))
    assert judge([a, a], b, e, jnp.bfloat16).rounding == rounding
    assert not rounding or judge([b, a], b, e, jnp.bfloat16).rounding
