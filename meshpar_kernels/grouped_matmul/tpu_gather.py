"""Gather of lhs rows inside the grouped matmul kernel on TPU: one DMA for each row, from HBM into the tile that is
multiplied.

There are buffers for two tiles. In the first tile step of a row tile the copies of the next tile's rows are started;
then the kernel waits for this tile's own rows. So rows are copied while the tile before them is multiplied; only for
the first row tile of each column tile nothing is overlapped.

Two bfloat16 rows share 32-bit words in HBM, and a copy moves 32-bit words, so it moves twice the bytes needed; the
right half is selected in VMEM. Indices out of range copy some row, which is replaced by zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels.grouped_matmul.tpu_tiles import cdiv
from meshpar_kernels.routing.tpu_gather import as_words

__all__ = ["OPERANDS", "SCRATCH", "GatherRefs", "gather_tile", "operands", "scratch", "specs"]

OPERANDS, SCRATCH = 4, 4
"""Number of fields of `GatherRefs` that are operands of the kernel, and number that are scratch."""

UNROLL = 8
"""Copies started in one loop iteration: the rows of one register, so that their addresses are offsets from one address."""

STRIP = 16
"""Rows unpacked at once."""

LANES = 512
"""Columns unpacked at once."""


class GatherRefs(NamedTuple):
    """The refs of the kernel that the gather uses: `OPERANDS` inputs, then `SCRATCH` scratch buffers.

    Attributes:
      now, following: SMEM int32 [1, 1, tile]: rows of `source` to fetch for this row tile and for the next one.
      index: VMEM int32 [1, 1, tile]: the indices of this row tile.
      source: HBM [T, K], or its int32 words [⌈T/2⌉, K] (two bfloat16 rows in one).
      buffer: VMEM [2, tile, K]: two row tiles as fetched; int32 words for bfloat16.
      arrived: DMA semaphores, one for each buffer.
      column: VMEM int32 [tile, 1]: the indices as a column.
      rows: VMEM [tile, K]: the gathered row tile.
    """

    now: Any
    following: Any
    index: Any
    source: Any
    buffer: Any
    arrived: Any
    column: Any
    rows: Any


def operands(lhs: jax.Array, indices: jax.Array, tile: int) -> list[jax.Array]:
    """The inputs of the gather: the rows to fetch by tile (twice, for this and the next tile), the indices by tile, and
    lhs.

    The rows are computed before the kernel, since the scalar core's work for each copy limits the rate of copies. In
    the interpreter lhs is passed as int32 words, since the interpreter cannot bitcast a ref of bfloat16.
    """
    packed = lhs.dtype == jnp.bfloat16
    tiles = cdiv(indices.shape[0], tile)
    padded = jnp.pad(indices.astype(jnp.int32), (0, tiles * tile - indices.shape[0]), constant_values=-1)
    blocks = padded.reshape(tiles, 1, tile)
    fetched = jnp.clip(blocks, 0, lhs.shape[0] - 1) >> int(packed)
    if packed and lhs.shape[0] % 2:
        lhs = jnp.pad(lhs, ((0, 1), (0, 0)))
    return [fetched, fetched, blocks, as_words(lhs) if packed and _compat.interpreting() else lhs]


def specs(rows: int, tile: int) -> list[pl.BlockSpec]:
    """Block specs of `operands`, for a grid (column tile, tile step) whose first prefetched scalars are the row tile of
    each tile step."""
    last = cdiv(rows, tile) - 1
    shape = (1, 1, tile)
    return [
        pl.BlockSpec(shape, lambda i, v, t, *_: (t[v], 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec(shape, lambda i, v, t, *_: (jnp.minimum(t[v] + 1, last), 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec(shape, lambda i, v, t, *_: (t[v], 0, 0)),
        pl.BlockSpec(memory_space=pl.ANY),
    ]


def scratch(tile: int, k: int, dtype: Any) -> list[Any]:
    """The scratch buffers of `GatherRefs`, for row tiles [tile, k] of this dtype."""
    word = jnp.int32 if dtype == jnp.bfloat16 else dtype
    return [
        pltpu.VMEM((2, tile, k), word),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((tile, 1), jnp.int32),
        pltpu.VMEM((tile, k), dtype),
    ]


def gather_tile(refs: GatherRefs, tile_step: jax.Array, tile_of: Any, limit: int, tiles: int) -> Any:
    """The VMEM ref [tile, K] with the gathered rows of this row tile.

    In the first tile step of a row tile it starts the copies of the next tile's rows, waits for this tile's rows, and
    unpacks them.

    Args:
      tile_of: row tile of each tile step, ascending without gaps.
      limit: T, rows of lhs. Rows with an index outside of [0, T) become zero.
      tiles: row tiles of the result.
    """
    row_slice = tile_of[tile_step]
    tile = refs.rows.shape[0]
    packed = refs.rows.dtype == jnp.bfloat16
    source = refs.source.bitcast(jnp.int32) if packed and refs.source.dtype != jnp.int32 else refs.source

    def fetch(indices, slot):
        """Start one DMA for each row of a tile, from `source` to `buffer[slot]`; `UNROLL` copies in one loop iteration."""

        def some(block, _):
            """Start the copies of `UNROLL` rows."""
            first = pl.multiple_of(block * UNROLL, UNROLL)
            targets = refs.buffer.at[slot, pl.ds(first, UNROLL)]
            for j in range(UNROLL):
                row = source.at[pl.ds(indices[0, 0, first + j], 1)]
                pltpu.make_async_copy(row, targets.at[pl.ds(j, 1)], refs.arrived.at[slot]).start()
            return 0

        lax.fori_loop(0, tile // UNROLL, some, 0)

    def put_in_order(slot):
        """Copy `buffer[slot]` to `rows`: select the half of each packed word for bfloat16, and zero the rows of invalid
        indices."""

        def strip(s, _):
            """Unpack `STRIP` rows."""
            column_slice = pl.ds(pl.multiple_of(s * STRIP, STRIP), STRIP)
            index = refs.column[column_slice]
            known = (index >= 0) & (index < limit)
            for left in range(0, refs.rows.shape[1], LANES):
                lanes = slice(left, min(left + LANES, refs.rows.shape[1]))
                value = refs.buffer[slot, column_slice, lanes]
                if packed:
                    value = jnp.where((index & 1) > 0, value & jnp.int32(-65536), value << 16)
                    value = lax.bitcast_convert_type(value, jnp.float32)
                refs.rows[column_slice, lanes] = jnp.where(known, value, 0.0).astype(refs.rows.dtype)
            return 0

        lax.fori_loop(0, tile // STRIP, strip, 0)

    @pl.when((tile_step == 0) | (tile_of[jnp.maximum(tile_step - 1, 0)] != row_slice))
    def _():
        slot = lax.rem(row_slice, 2)

        @pl.when(tile_step == 0)
        def _():
            fetch(refs.now, slot)

        @pl.when(row_slice + 1 < tiles)
        def _():
            fetch(refs.following, 1 - slot)

        refs.column[...] = refs.index[0].T
        pltpu.make_async_copy(refs.buffer.at[slot], refs.buffer.at[slot], refs.arrived.at[slot]).wait()
        put_in_order(slot)

    return refs.rows
