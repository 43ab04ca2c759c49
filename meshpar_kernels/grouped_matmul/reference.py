"""Grouped matmul in plain `jax.numpy`: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels._numerics import precision
from meshpar_kernels.grouped_matmul.activations import activate
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, TransposeProblem, dequantized


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
