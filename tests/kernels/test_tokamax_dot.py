"""`implementation="tokamax"`: values and gradients against NumPy's float64 and the reference, and the errors. tokamax runs XLA's
`ragged_dot` on CPUs."""

import importlib.util

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest

from meshpar_kernels import grouped_matmul
from meshpar_kernels.grouped_matmul import tokamax_dot

installed = pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")
SIZES = jnp.asarray([9, 0, 11, 6])
M, K, N, G = 32, 16, 24, 4


def operands():
    rng = np.random.default_rng(3)
    lhs, rhs, scale = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((M, K), (G, K, N), (M,)))
    return lhs.at[26:].set(jnp.nan), rhs, scale.at[26:].set(jnp.nan)


@installed
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_values_equal_the_definition(transpose_rhs):
    lhs, rhs, scale = operands()
    given = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    got = grouped_matmul(lhs, given, SIZES, transpose_rhs=transpose_rhs, row_scale=scale, implementation="tokamax")
    want = oracle.grouped_matmul(lhs, rhs, np.asarray(SIZES), row_scale=scale)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@installed
def test_gradients_equal_the_reference():
    lhs, rhs, scale = operands()
    up = rhs[::-1]

    def pull(implementation):
        def matmul(lhs, rhs, up, scale):
            how = {"row_scale": scale, "activation": "silu", "implementation": implementation}
            return grouped_matmul(lhs, (rhs, up), SIZES, **how)

        return jax.jit(lambda: jax.vjp(matmul, lhs, rhs, up, scale)[1](jnp.cos(jnp.arange(M * N).reshape(M, N) * 1.0)))

    for got, want in zip(pull("tokamax")(), pull("reference")(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("there", "arguments", "message"),
    [
        (False, {}, r'pip install "meshpar\[tokamax\]" .*Python 3.12 and jax 0.11.1'),
        (True, {"group_offset": 1}, "group_offset"),
        (True, {"rhs": jnp.zeros((G, K, N), jnp.int8), "rhs_scale": jnp.ones((G, N))}, "rhs_scale"),
    ],
)
def test_what_it_cannot_take(monkeypatch, there, arguments, message):
    monkeypatch.setattr(tokamax_dot, "_installed", lambda: there)
    lhs, rhs, _ = operands()
    options = {"rhs": rhs, "out_dtype": jnp.float16} | arguments  # not in JAX's cache
    with pytest.raises(NotImplementedError, match=message):
        grouped_matmul(lhs, group_sizes=SIZES, implementation="tokamax", **options)
