"""Cuts the matmul of one tile step of the TPU kernels into `dot_general`s that the compiler schedules as one basic block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels.grouped_matmul import tpu_tiles
from meshpar_kernels.grouped_matmul.reference import precision
from meshpar_kernels.grouped_matmul.tpu_tiles import cdiv


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """a · b contracted over dims (contract[0], contract[1]), accumulated and returned in float32."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


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
