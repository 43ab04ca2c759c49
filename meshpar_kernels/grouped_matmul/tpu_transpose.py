"""The transpose of grouped matmul on TPU (Mosaic): the accumulator of one group stays in VMEM over the group's tile
steps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import cdiv
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels._numerics import cost, dot
from meshpar_kernels.grouped_matmul import tpu_tile_sizes as tpu_tiles
from meshpar_kernels.grouped_matmul.problem import TransposeProblem
from meshpar_kernels.grouped_matmul.schedule import group_tile_steps
from meshpar_kernels.grouped_matmul.tpu_tile_matmul import by_rows, call_by_tile_steps, in_blocks, row_mask
from meshpar_kernels.grouped_matmul.tpu_tile_sizes import Tile


def _transpose_kernel(tile_of, group_of, start, end, live, *refs, scaled: bool):
    """One grid step: adds lhsᵀ · rhs of the rows [start, end) of a row tile to the sum of one group.

    The last grid dim iterates over tile steps; the last tile step of a group writes the group's sum.

    Args:
      tile_of, group_of: scalar prefetch int32 [tile steps]: row tile and group.
      start, end: scalar prefetch int32 [tile steps]: the group's rows in the row tile, counted over all rows.
      live: scalar prefetch int32 [tile steps]: 1, or 0 if there is nothing to add.
      refs: inputs in VMEM: lhs [rows, K block], rhs [rows, N block], with `scaled` the row scales [1, rows]; output [1,
        K block, N block]; scratch: float32 accumulator [K block, N block], with `scaled` [rows, 1] for the row scales.
    """
    refs = list(refs)
    scale_column = refs.pop() if scaled else None
    lhs_ref, rhs_ref, *scale_ref, out_ref, total = refs
    rows = lhs_ref.shape[0]
    tile_step, tile_steps = pl.program_id(2), pl.num_programs(2)
    low = start[tile_step] - tile_of[tile_step] * rows
    high = end[tile_step] - tile_of[tile_step] * rows
    before = group_of[jnp.maximum(tile_step - 1, 0)]
    after = group_of[jnp.minimum(tile_step + 1, tile_steps - 1)]

    @pl.when((tile_step == 0) | (before != group_of[tile_step]))
    def _():
        total[...] = jnp.zeros_like(total)

    def multiply(first_row, size, begin):
        """Add `size` rows from `first_row` on to the sum; with `begin` only rows of the group from `begin` on count."""
        row_slice = pl.ds(first_row, size)
        in_group = None if begin is None else row_mask(first_row, size, jnp.maximum(low, begin), high)

        def one_strip(first_k, height):
            """Add to `height` rows of the accumulator from `first_k` on (a slice of K)."""
            left = lhs_ref[row_slice, pl.ds(first_k, height)]
            if in_group is not None:
                left = jnp.where(in_group, left, jnp.zeros_like(left))

            def one_block(first_n, width):
                """Add to `width` columns of the accumulator from `first_n` on (a slice of N)."""
                right = rhs_ref[row_slice, pl.ds(first_n, width)]
                if scale_column is not None:
                    right = (right.astype(jnp.float32) * scale_column[row_slice]).astype(rhs_ref.dtype)
                if in_group is not None:
                    right = jnp.where(in_group, right, jnp.zeros_like(right))
                column_slice = (pl.ds(first_k, height), pl.ds(first_n, width))
                total[column_slice] += dot(left, right, (0, 0))

            in_blocks(rhs_ref.shape[1], tpu_tiles.TRANSPOSE_BLOCK[1], one_block)

        in_blocks(lhs_ref.shape[1], tpu_tiles.TRANSPOSE_BLOCK[0], one_strip)

    @pl.when(live[tile_step] > 0)
    def _():
        if scale_column is not None:
            scale_column[...] = scale_ref[0][...].T
        by_rows(low, high, rows, tpu_tiles.ROW_CHUNKS, tpu_tiles.pack(lhs_ref.dtype.itemsize), multiply)

    @pl.when((tile_step == tile_steps - 1) | (after != group_of[tile_step]))
    def _():
        out_ref[0] = total[...].astype(out_ref.dtype)


def grouped_matmul_transpose(p: TransposeProblem, *, tile: Tile) -> jax.Array:
    """As `reference.grouped_matmul_transpose`. Grid: (tiles of K, tiles of N, tile steps); one accumulator tile in
    VMEM."""
    rows, k, n, _ = p.key.shape
    tm, tk, tn = tile
    tile_steps = group_tile_steps(p.bounds(), rows, tm)
    operands = [
        (p.lhs, pl.BlockSpec((tm, tk), lambda i, j, v, t, *_: (t[v], i))),
        (p.rhs, pl.BlockSpec((tm, tn), lambda i, j, v, t, *_: (t[v], j))),
    ]
    steps_k, steps_n = cdiv(k, tk), cdiv(n, tn)
    nbytes = p.lhs.dtype.itemsize * rows * (steps_n * k + steps_k * n) + p.out_dtype.itemsize * p.groups * k * n
    return call_by_tile_steps(
        functools.partial(_transpose_kernel, scaled=p.row_scale is not None), "grouped_matmul_transpose", p, tile_steps,
        (steps_k, steps_n), operands, pl.BlockSpec((1, tk, tn), lambda i, j, v, t, g, *_: (g[v], i, j)),
        [pltpu.VMEM((tk, tn), jnp.float32)], cost(2 * rows * k * n, nbytes),
    )  # fmt: skip
