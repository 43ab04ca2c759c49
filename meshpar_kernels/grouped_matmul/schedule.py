"""Tile steps: the list of (row tile, group) pairs that the kernels iterate over."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TileSteps(NamedTuple):
    """Tile steps in the order of the rows; each is a row tile and a group with rows in it.

    All int32. Only the first `number` entries of the [V] arrays are valid.

    Attributes:
      tile: [V] row tile.
      group: [V] index of the group in the local weights.
      start, end: [V] the group's rows [start, end) in the full array.
      live: [V] 1 for a group, 0 for rows of no local group, which become zero.
      number: [] number of tile steps.
    """

    tile: jax.Array
    group: jax.Array
    start: jax.Array
    end: jax.Array
    live: jax.Array
    number: jax.Array


def group_bounds(group_sizes: jax.Array, rows: int, group_offset: jax.Array | None, groups: int) -> jax.Array:
    """int32 [groups + 1]: first row of each local group, and the row after the last.

    Negative sizes count as 0, and sizes are clipped to a total of `rows`. Groups that `group_sizes` does not have,
    since the offset is out of range, are empty.
    """
    sizes = jnp.clip(group_sizes.astype(jnp.int32), 0, rows)
    if rows * group_sizes.shape[0] < 2**31:
        ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
    else:  # the sum of many oversized groups could overflow
        ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), sizes)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    if group_offset is None:
        if groups == group_sizes.shape[0]:
            return bounds
        group_offset = jnp.zeros((), jnp.int32)
    first = jnp.clip(group_offset.astype(jnp.int32), 0, group_sizes.shape[0])
    local = first + jnp.arange(groups + 1, dtype=jnp.int32)
    return bounds[jnp.minimum(local, group_sizes.shape[0])]


def _list(
    start: jax.Array, end: jax.Array, wanted: jax.Array, length: int, rows: int, tile: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """(segment, tile, start, end) of each tile step, and the number of steps.

    A segment that is `wanted` has at least one step.
    """
    tiles = -(-rows // tile)
    first = jnp.clip(start // tile, 0, tiles - 1)
    number = jnp.where(end > start, (end - 1) // tile - first + 1, wanted.astype(jnp.int32))
    until = jnp.cumsum(number, dtype=jnp.int32)
    tile_step = jnp.minimum(jnp.arange(length, dtype=jnp.int32), until[-1] - 1)
    segment = (tile_step[:, None] >= until[None, :]).sum(1, dtype=jnp.int32)
    in_group = segment[:, None] == jnp.arange(start.shape[0], dtype=jnp.int32)[None, :]

    def pick(values):
        """`values[segment]`; as a gather it would be one small program for each element on TPU."""
        return jnp.where(in_group, values[None, :], 0).sum(1, dtype=jnp.int32)

    tile_of = pick(first - (until - number)) + tile_step
    return segment, tile_of, pick(start), pick(end), until[-1]


def row_tile_steps(bounds: jax.Array, rows: int, tile: int) -> TileSteps:
    """Tile steps that cover every row of the result exactly once, for a result [M, N].

    Segments are the rows before the local groups, each group, and the rows after them. Empty segments have no steps, so
    there are at most ⌈rows / tile⌉ + groups + 1 tile steps.

    Args:
      bounds: from `group_bounds`.
      rows: M, at least 1.
      tile: rows of a tile.
    """
    groups = bounds.shape[0] - 1
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), bounds])
    end = jnp.concatenate([bounds, jnp.full(1, rows, jnp.int32)])
    length = -(-rows // tile) + groups + 1
    unwanted = jnp.zeros(groups + 2, bool)
    segment, tile_of, begin, stop, number = _list(start, end, unwanted, length, rows, tile)
    live = (segment > 0) & (segment <= groups)
    # Rows of no group fetch the weights of the adjacent group, which are loaded anyway.
    has_rows = end[1:-1] > start[1:-1]
    last = jnp.max(jnp.where(has_rows, jnp.arange(groups, dtype=jnp.int32), 0))
    first = jnp.argmax(has_rows).astype(jnp.int32)
    group = jnp.clip(segment - 1, first, last)
    return TileSteps(tile_of, group, begin, stop, live.astype(jnp.int32), number)


def group_tile_steps(bounds: jax.Array, rows: int, tile: int) -> TileSteps:
    """Tile steps that cover every group, an empty one once, for a result [G, K, N].

    At most ⌈rows / tile⌉ + groups tile steps.
    """
    groups = bounds.shape[0] - 1
    start, end = bounds[:-1], bounds[1:]
    length = -(-rows // tile) + groups
    wanted = jnp.ones(groups, bool)
    group, tile_of, begin, stop, number = _list(start, end, wanted, length, rows, tile)
    return TileSteps(tile_of, group, begin, stop, (stop > begin).astype(jnp.int32), number)


ALIGNMENT = 8
"""Rows of a tile of shared memory. TMA cuts the array in global memory into such tiles too, and copies only complete
tiles from the start of a window: so windows begin at multiples of it."""


class Spans(NamedTuple):
    """Tile steps whose tiles begin at any multiple of `ALIGNMENT` rows. All int32, [V]; only the first `number` entries
    are valid.

    Attributes:
      first: first row of the tile; the tile is inside the array if the array has `tile` rows.
      low, high: the rows [low, high) of the tile that belong to the tile step, counted from `first`.
      group: as in `TileSteps`.
      live: as in `TileSteps`.
      number: [1] number of tile steps.
    """

    first: jax.Array
    low: jax.Array
    high: jax.Array
    group: jax.Array
    live: jax.Array
    number: jax.Array


def span_tile_steps(bounds: jax.Array, rows: int, tile: int) -> Spans:
    """Tile steps that cover every row of the result once, for kernels whose loads begin at any multiple of `ALIGNMENT`
    rows.

    A group's tiles begin at the last multiple of `ALIGNMENT` before the group, or one tile before the end of the array,
    so at most its first and its last tile are incomplete. Segments as in `row_tile_steps`; at most ⌈(rows +
    (`ALIGNMENT` - 1) · (groups + 1)) / tile⌉ + groups + 1 tile steps.

    Args:
      bounds: from `group_bounds`.
      rows: M, at least 1; a multiple of `ALIGNMENT` if there is more than one tile.
      tile: rows of a tile, a multiple of `ALIGNMENT`.
    """
    groups = bounds.shape[0] - 1
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), bounds])
    end = jnp.concatenate([bounds, jnp.full(1, rows, jnp.int32)])
    length = -(-(rows + (ALIGNMENT - 1) * (groups + 1)) // tile) + groups + 1
    aligned = start // ALIGNMENT * ALIGNMENT
    until = jnp.cumsum(jnp.where(end > start, -(-(end - aligned) // tile), 0), dtype=jnp.int32)
    tile_step = jnp.minimum(jnp.arange(length, dtype=jnp.int32), until[-1] - 1)
    segment = (tile_step[:, None] >= until[None, :]).sum(1, dtype=jnp.int32)
    index = tile_step - jnp.where(segment > 0, until[jnp.maximum(segment - 1, 0)], 0)
    begin = aligned[segment] + index * tile
    row = jnp.minimum(begin, max(rows - tile, 0))
    live = (segment > 0) & (segment <= groups)
    return Spans(
        first=row,
        low=jnp.maximum(start[segment], begin) - row,
        high=jnp.minimum(end[segment], begin + tile) - row,
        group=jnp.clip(segment - 1, 0, groups - 1),
        live=live.astype(jnp.int32),
        number=until[-1:],
    )


def executed_rows(sizes: list[int], rows: int, tile: int, row_chunks: tuple[int, ...], pack: int) -> int:
    """Number of rows that the matrix unit multiplies for these groups, including the padding at group borders. Plain
    Python, for reports and tests.

    A tile of one group is multiplied in full. In another tile, only about the group's rows are multiplied: from the
    pack in which they begin, the largest of the ascending `row_chunks` repeatedly, then the smallest that covers the
    remainder.
    """
    total, start = 0, 0
    for size in sizes:
        end = min(start + size, rows)
        for first in range(start // tile * tile, end, tile):
            low, high = max(start, first) - first, min(end, first + tile) - first
            length = high - low // pack * pack
            if high - low == tile:
                total += tile
            elif high > low:
                rest = length % row_chunks[-1]
                total += length - rest + min((p for p in row_chunks if p >= rest), default=0) * (rest > 0)
        start = end
    return total
