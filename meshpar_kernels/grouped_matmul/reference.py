"""Grouped matmul in plain `jax.numpy`: the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels._arithmetic import precision
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, TransposeProblem

QUANTIZED = (jnp.int8, jnp.float8_e4m3fn)
"""Dtypes of weights with scales."""

ACTIVATIONS: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda x: x,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,  # with tanh
    "relu": jax.nn.relu,
}


def activate(matmuls: Sequence[jax.Array], activation: str | None) -> jax.Array:
    """From the float32 matmuls [M, N] with each matrix: act(first), times the second if there are two."""
    value = ACTIVATIONS[activation](matmuls[0])
    return value if len(matmuls) == 1 else value * matmuls[1]


def gather_rows(lhs: jax.Array, indices: jax.Array | None) -> jax.Array:
    """`lhs[indices]`, with zeros where an index is out of range."""
    if indices is None:
        return lhs
    if lhs.shape[0] == 0:
        return jnp.zeros((indices.shape[0], lhs.shape[1]), lhs.dtype)
    in_range = (indices >= 0) & (indices < lhs.shape[0])
    return jnp.where(in_range[:, None], lhs[jnp.where(in_range, indices, 0)], 0)


def dequantized(p: MatmulProblem, matrix: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """One group's matrix times its scales, rounded to `dtype`.

    Args:
      matrix: [K, N], or [N, K] with `p.transpose_rhs`.
      scale: [B, N], of B blocks of K; or, with `p.transpose_scale`, [B, K], of B blocks of N.
    """
    blocks, width = scale.shape
    factors = jnp.broadcast_to(scale[:, None], (blocks, matrix.size // (blocks * width), width)).reshape(-1, width)
    factors = factors if p.transpose_rhs == p.transpose_scale else factors.T
    return (matrix.astype(jnp.float32) * factors).astype(dtype)


def grouped_matmul(p: MatmulProblem) -> jax.Array:
    """One masked matmul for each group: G times the arithmetic. See `meshpar_kernels.grouped_matmul`."""
    lhs = p.lhs.astype(jnp.float32) if p.rhs_scale else p.lhs
    bounds, row = p.bounds(), jnp.arange(p.key.rows)[:, None]

    def matrices(g):
        if not p.rhs_scale:
            return [matrix[g] for matrix in p.rhs]
        return [dequantized(p, m[g], s[g], jnp.float32) for m, s in zip(p.rhs, p.rhs_scale, strict=True)]

    def one(g, totals):
        """`totals`, one float32 [M, N] for each rhs, with the rows of group g set to lhs · rhs[g]."""
        in_group = (row >= bounds[g]) & (row < bounds[g + 1])
        matmuls = [
            jnp.dot(
                jnp.where(in_group, lhs, 0),
                matrix.T if p.transpose_rhs else matrix,
                precision=precision(lhs.dtype),
                preferred_element_type=jnp.float32,
            )
            for matrix in matrices(g)
        ]
        return [jnp.where(in_group, matmul, total) for matmul, total in zip(matmuls, totals, strict=True)]

    totals = [jnp.zeros(p.out_shape, jnp.float32)] * len(p.rhs)
    total = activate(lax.fori_loop(0, p.key.groups, one, totals), p.activation)
    if p.row_scale is not None:
        in_group = (row >= bounds[0]) & (row < bounds[-1])
        total = jnp.where(in_group, total * p.row_scale[:, None], 0.0)
    return total.astype(p.out_dtype)


def grouped_matmul_transpose(p: TransposeProblem) -> jax.Array:
    """One masked matmul for each group. See `meshpar_kernels.grouped_matmul_transpose`."""
    bounds, row, rhs = p.bounds(), jnp.arange(p.key.rows)[:, None], p.scaled_rhs()

    def one(g):
        """[K, N]: lhsᵀ · rhs over the rows of group g."""
        in_group = (row >= bounds[g]) & (row < bounds[g + 1])
        return jnp.dot(
            jnp.where(in_group, p.lhs, 0).T,
            jnp.where(in_group, rhs, 0),
            precision=precision(p.lhs.dtype),
            preferred_element_type=jnp.float32,
        ).astype(p.out_dtype)

    return lax.map(one, jnp.arange(p.groups))
