"""Grouped matmul in plain `jax.numpy`: the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels.grouped_matmul.schedule import group_bounds


def precision(dtype: jnp.dtype) -> lax.Precision:
    """Float32 operands are multiplied as such; bfloat16 ones need no more than one pass."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


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


def dequantized(
    matrix: jax.Array, scale: jax.Array, dtype: jnp.dtype, *, transpose_rhs: bool, transpose_scale: bool
) -> jax.Array:
    """One group's matrix times its scales, rounded to `dtype`.

    Args:
      matrix: [K, N], or [N, K] with `transpose_rhs`.
      scale: [B, N], of B blocks of K; or, with `transpose_scale`, [B, K], of B blocks of N.
    """
    blocks, width = scale.shape
    factors = jnp.broadcast_to(scale[:, None], (blocks, matrix.size // (blocks * width), width)).reshape(-1, width)
    factors = factors if transpose_rhs == transpose_scale else factors.T
    return (matrix.astype(jnp.float32) * factors).astype(dtype)


def grouped_matmul(
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    lhs_indices: jax.Array | None,
    row_scale: jax.Array | None,
    rhs_scale: Sequence[jax.Array] = (),
    *,
    transpose_rhs: bool,
    activation: str | None,
    out_dtype: jnp.dtype,
    transpose_scale: bool = False,
) -> jax.Array:
    """One masked matmul for each group: G times the arithmetic. See `meshpar_kernels.grouped_matmul`."""
    lhs = gather_rows(lhs, lhs_indices)
    if rhs_scale:
        lhs = lhs.astype(jnp.float32)
    groups, rows = rhs[0].shape[0], lhs.shape[0]
    bounds = group_bounds(group_sizes, rows, group_offset, groups)
    row = jnp.arange(rows)[:, None]
    width = rhs[0].shape[1] if transpose_rhs else rhs[0].shape[2]

    def matrices(g):
        if not rhs_scale:
            return [matrix[g] for matrix in rhs]
        how = {"transpose_rhs": transpose_rhs, "transpose_scale": transpose_scale}
        return [dequantized(m[g], s[g], jnp.float32, **how) for m, s in zip(rhs, rhs_scale, strict=True)]

    def one(g, totals):
        """`totals`, one float32 [M, N] for each rhs, with the rows of group g set to lhs · rhs[g]."""
        in_group = (row >= bounds[g]) & (row < bounds[g + 1])
        matmuls = [
            jnp.dot(
                jnp.where(in_group, lhs, 0),
                matrix.T if transpose_rhs else matrix,
                precision=precision(lhs.dtype),
                preferred_element_type=jnp.float32,
            )
            for matrix in matrices(g)
        ]
        return [jnp.where(in_group, matmul, total) for matmul, total in zip(matmuls, totals, strict=True)]

    totals = [jnp.zeros((rows, width), jnp.float32)] * len(rhs)
    total = activate(lax.fori_loop(0, groups, one, totals), activation)
    if row_scale is not None:
        in_group = (row >= bounds[0]) & (row < bounds[-1])
        total = jnp.where(in_group, total * row_scale[:, None], 0.0)
    return total.astype(out_dtype)


def grouped_matmul_transpose(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    row_scale: jax.Array | None,
    *,
    groups: int,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """One masked matmul for each group. See `meshpar_kernels.grouped_matmul_transpose`."""
    rows = lhs.shape[0]
    bounds = group_bounds(group_sizes, rows, group_offset, groups)
    row = jnp.arange(rows)[:, None]
    if row_scale is not None:
        rhs = (rhs.astype(jnp.float32) * row_scale[:, None]).astype(rhs.dtype)

    def one(g):
        """[K, N]: lhsᵀ · rhs over the rows of group g."""
        in_group = (row >= bounds[g]) & (row < bounds[g + 1])
        return jnp.dot(
            jnp.where(in_group, lhs, 0).T,
            jnp.where(in_group, rhs, 0),
            precision=precision(lhs.dtype),
            preferred_element_type=jnp.float32,
        ).astype(out_dtype)

    return lax.map(one, jnp.arange(groups))
