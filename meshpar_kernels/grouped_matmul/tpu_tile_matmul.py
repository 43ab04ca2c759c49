"""Cuts the matmul of one tile step of the TPU kernels into `dot_general`s that the compiler schedules as one basic block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import cdiv
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import body
from meshpar_kernels.grouped_matmul import tpu_tile_sizes as tpu_tiles
from meshpar_kernels.grouped_matmul.problem import Problem, padded_scale
from meshpar_kernels.grouped_matmul.schedule import TileSteps


def call_by_tile_steps(
    kernel: Callable[..., None], name: str, p: Problem, tile_steps: TileSteps, grid: tuple[Any, ...],
    operands: list[tuple[jax.Array, pl.BlockSpec]], out_spec: pl.BlockSpec, scratch: list[Any], cost: pl.CostEstimate,
) -> jax.Array:  # fmt: skip
    """Run a kernel over (parallel grid dims, tile steps). Its first refs are the scalar-prefetched fields of `tile_steps`.

    If there are row scales, they are the last input, and a column [rows, 1] of VMEM for them the last scratch.

    Args:
      grid: the parallel grid dims.
      operands: arrays with their block specs; the first block of the first one has the rows of a tile.
    """
    arrays, specs = map(list, zip(*operands, strict=True))
    if p.row_scale is not None:
        tm = specs[0].block_shape[0]
        arrays.append(padded_scale(p.row_scale, tm)[None])  # as a column it would fill 128 lanes
        specs.append(pl.BlockSpec((1, tm), lambda *at: (0, at[len(grid) + 1][at[len(grid)]])))
        scratch = [*scratch, pltpu.VMEM((tm, 1), jnp.float32)]
    semantics: Any = (*["parallel"] * len(grid), "arbitrary")
    return pl.pallas_call(
        body(kernel),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(*grid, tile_steps.number),
            in_specs=specs,
            out_specs=out_spec,
            scratch_shapes=scratch,
        ),
        out_shape=_compat.out_struct(p.out_shape, p.out_dtype, *(x for x, _ in operands)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=_compat.tpu_vmem_limit()),
        cost_estimate=cost,
        name=f"meshpar_{name}",
    )(*tile_steps[:5], *arrays)


def by_rows(low: jax.Array, high: jax.Array, rows: int, row_chunks: tuple[int, ...], pack: int, work) -> None:
    """Cover the rows [low, high) of a tile with matmuls of few different sizes.

    Calls `work(first, size, begin)` for a matmul of the rows [first, first + size), of which the rows from `begin` on
    were not computed before. If the tile has one group, it is cut into large blocks, and `begin` is None: no row needs
    a mask. Else the largest of `row_chunks` is repeated, from the pack in which the group begins, while the remainder
    exceeds the next smaller size; then the smallest size that covers the remainder follows. A matmul that would exceed
    the tile begins earlier.

    Args:
      low, high: rows of the group, relative to the first row of the tile; may be outside of it.
      rows: rows of the tile, a multiple of `pack`.
      row_chunks: row counts of a matmul, ascending, each a multiple of `pack`.
      pack: rows that share registers: a matmul begins at a multiple of it.
    """
    full_tile = (low <= 0) & (high >= rows)

    @pl.when(full_tile)
    def _():
        in_blocks(rows, tpu_tiles.BLOCK[0], lambda first, size: work(first, size, None))

    @pl.when(~full_tile)
    def _():
        sizes = tpu_tiles.fitting(row_chunks, rows)
        # `lax.div`, not `//`, whose sign handling requires a local TPU while tracing
        begin = lax.div(jnp.maximum(low, 0), pack) * pack
        length = jnp.minimum(high, rows) - begin
        most = sizes[-1]
        repeats = lax.div(length + (most - 1 - (0, *sizes)[-2]), most)

        def cover(begin, size):
            work(pl.multiple_of(jnp.minimum(begin, rows - size), pack), size, begin)

        def one(c, _):
            cover(begin + c * most, most)
            return 0

        lax.fori_loop(0, repeats, one, 0)
        after = begin + repeats * most
        rest = length - repeats * most
        for smaller, size in zip((0, *sizes), sizes[:-1], strict=False):

            @pl.when((rest > smaller) & (rest <= size))
            def _(size=size):
                cover(after, size)


def in_blocks(size: int, most: int, work, unit: int = 128) -> None:
    """Call `work(first, length)` on about equal blocks of 0…size, multiples of `unit`: a loop, and one call for the remainder."""
    number = cdiv(size, most)
    length = size if number == 1 else cdiv(cdiv(size, number), unit) * unit
    number = size // length

    def one(b, _):
        work(pl.multiple_of(b * length, length), length)
        return 0

    if number == 1:
        work(0, length)
    else:
        lax.fori_loop(0, number, one, 0)
    if size % length:
        work(number * length, size % length)


def row_mask(first, size: int, low: jax.Array, high: jax.Array) -> jax.Array:
    row = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return (row >= low) & (row < high)
