"""Grouped matmul in plain `jax.numpy`: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels.grouped_matmul.schedule import group_bounds

__all__ = ["activate", "gather_rows", "grouped_matmul", "grouped_matmul_transpose", "precision"]


def precision(dtype: jnp.dtype) -> lax.Precision:
    """Float32 operands are multiplied as such; bfloat16 ones need no more than one pass."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def activate(product: jax.Array, activation: str | None) -> jax.Array:
    """Float32 [M, N] → [M, N], or [M, N/2] for "swiglu": silu(left half) · right half."""
    if activation is None:
        return product
    gate, up = jnp.split(product, 2, axis=-1)
    return jax.nn.silu(gate) * up


def gather_rows(lhs: jax.Array, indices: jax.Array | None) -> jax.Array:
    """`lhs[indices]`, with zeros where an index is out of range."""
    if indices is None:
        return lhs
    if lhs.shape[0] == 0:
        return jnp.zeros((indices.shape[0], lhs.shape[1]), lhs.dtype)
    here = (indices >= 0) & (indices < lhs.shape[0])
    return jnp.where(here[:, None], lhs[jnp.where(here, indices, 0)], 0)


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    lhs_indices: jax.Array | None,
    row_scale: jax.Array | None,
    *,
    transpose_rhs: bool,
    activation: str | None,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """One masked product for each group: G times the arithmetic. See
    `meshpar_kernels.grouped_matmul`."""
    lhs = gather_rows(lhs, lhs_indices)
    groups, rows = rhs.shape[0], lhs.shape[0]
    bounds = group_bounds(group_sizes, rows, group_offset, groups)
    row = jnp.arange(rows)[:, None]
    width = rhs.shape[1] if transpose_rhs else rhs.shape[2]

    def one(g, total):
        mine = (row >= bounds[g]) & (row < bounds[g + 1])
        weights = rhs[g].T if transpose_rhs else rhs[g]
        product = jnp.dot(
            jnp.where(mine, lhs, 0),
            weights,
            precision=precision(lhs.dtype),
            preferred_element_type=jnp.float32,
        )
        return jnp.where(mine, product, total)

    total = jnp.zeros((rows, width), jnp.float32)
    total = activate(lax.fori_loop(0, groups, one, total), activation)
    if row_scale is not None:
        mine = (row >= bounds[0]) & (row < bounds[-1])
        total = jnp.where(mine, total * row_scale[:, None], 0.0)
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
    """One masked product for each group. See `meshpar_kernels.grouped_matmul_transpose`."""
    rows = lhs.shape[0]
    bounds = group_bounds(group_sizes, rows, group_offset, groups)
    row = jnp.arange(rows)[:, None]
    if row_scale is not None:
        rhs = (rhs.astype(jnp.float32) * row_scale[:, None]).astype(rhs.dtype)

    def one(g):
        mine = (row >= bounds[g]) & (row < bounds[g + 1])
        return jnp.dot(
            jnp.where(mine, lhs, 0).T,
            jnp.where(mine, rhs, 0),
            precision=precision(lhs.dtype),
            preferred_element_type=jnp.float32,
        ).astype(out_dtype)

    return lax.map(one, jnp.arange(groups))
