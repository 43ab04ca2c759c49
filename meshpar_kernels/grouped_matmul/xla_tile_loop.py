"""Grouped matmul as a loop over tile steps that any backend compiles: no dense fallback, no copy of the weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels._compat import same_varying
from meshpar_kernels._numerics import dot
from meshpar_kernels.grouped_matmul.activations import activate
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, TransposeProblem, dequantized, padded_scale
from meshpar_kernels.grouped_matmul.schedule import group_tile_steps, row_tile_steps


def row_tile(rows: int, groups: int) -> int:
    """Rows of a row tile: a power of two of about half the rows of a group, 8…256, for little padding at the group
    borders."""
    tile = 8
    while tile < 256 and 4 * tile * groups <= rows:
        tile *= 2
    return tile


def _pad_rows(x: jax.Array, tile: int) -> jax.Array:
    padding = -x.shape[0] % tile
    return jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1)) if padding else x


def grouped_matmul(p: MatmulProblem) -> jax.Array:
    """As `reference.grouped_matmul`: one small matmul for each row tile and group with rows in it.

    Quantized weights are dequantized for one group at a time, in the dtype of lhs.
    """
    rows = p.key.rows
    tile = row_tile(rows, p.key.groups)
    tile_steps = row_tile_steps(p.bounds(), rows, tile)
    lhs = _pad_rows(p.lhs, tile)
    scale = None if p.row_scale is None else padded_scale(p.row_scale, tile)

    def matrices(group):
        """The weights of one group, [K, N] of each rhs; quantized ones are dequantized in the dtype of lhs."""
        found = [lax.dynamic_index_in_dim(matrix, group, keepdims=False) for matrix in p.rhs]
        if not p.rhs_scale:
            return found
        scales = [lax.dynamic_index_in_dim(scale, group, keepdims=False) for scale in p.rhs_scale]
        return [dequantized(p, m, s, lhs.dtype) for m, s in zip(found, scales, strict=True)]

    def one(v, out):
        """Tile step v: compute the rows of its group in its row tile, and update them in `out`."""
        first = tile_steps.tile[v] * tile
        row = first + jnp.arange(tile)[:, None]
        in_group = (row >= tile_steps.start[v]) & (row < tile_steps.end[v])
        matmuls = [
            dot(lax.dynamic_slice_in_dim(lhs, first, tile), matrix, (1, 1 if p.transpose_rhs else 0))
            for matrix in matrices(tile_steps.group[v])
        ]
        value = activate(matmuls, p.activation)
        if scale is not None:
            value = value * lax.dynamic_slice_in_dim(scale, first, tile)[:, None]
        value = jnp.where(tile_steps.live[v] > 0, value, 0.0).astype(p.out_dtype)
        old = lax.dynamic_slice_in_dim(out, first, tile)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(in_group, value, old), first, 0)

    out = jnp.zeros((lhs.shape[0], p.key.n), p.out_dtype)
    return lax.fori_loop(0, tile_steps.number, one, _vary_like(out, lhs, *p.rhs, *p.rhs_scale))[:rows]


def grouped_matmul_transpose(p: TransposeProblem) -> jax.Array:
    """As `reference.grouped_matmul_transpose`, by tile steps; accumulated in float32 [G, K, N]."""
    rows = p.key.rows
    tile = row_tile(rows, p.groups)
    tile_steps = group_tile_steps(p.bounds(), rows, tile)
    lhs, rhs = _pad_rows(p.lhs, tile), _pad_rows(p.rhs, tile)
    scale = None if p.row_scale is None else padded_scale(p.row_scale, tile)

    def one(v, out):
        """Tile step v: add lhsᵀ · rhs of the rows of its group in its row tile to `out[group]`."""
        first = tile_steps.tile[v] * tile
        row = first + jnp.arange(tile)[:, None]
        in_group = (row >= tile_steps.start[v]) & (row < tile_steps.end[v])
        right = lax.dynamic_slice_in_dim(rhs, first, tile)
        if scale is not None:
            factor = lax.dynamic_slice_in_dim(scale, first, tile)[:, None]
            right = (right.astype(jnp.float32) * factor).astype(rhs.dtype)
        left = jnp.where(in_group, lax.dynamic_slice_in_dim(lhs, first, tile), 0)
        matmul = dot(left, jnp.where(in_group, right, 0), (0, 0))
        old = lax.dynamic_index_in_dim(out, tile_steps.group[v], keepdims=False)
        return lax.dynamic_update_index_in_dim(out, old + matmul, tile_steps.group[v], 0)

    out = jnp.zeros(p.out_shape, jnp.float32)
    return lax.fori_loop(0, tile_steps.number, one, _vary_like(out, lhs, rhs)).astype(p.out_dtype)


def _vary_like(out: jax.Array, *operands: jax.Array) -> jax.Array:
    """`out`, varying over the mesh axes of the operands: a loop's carry must have the varying axes of its result."""
    return same_varying(out, *operands)[0]
