"""Tile order of the fused matmuls on GPUs, and the blocks that devices send to each other: plain arithmetic.

With an NVLink switch every device reaches every other one at full speed, so data is sent to its receiver directly, not
round a ring. In ring step t, device r multiplies block (r + t) mod A, so that in no step two devices multiply the same
block or send to the same device. A gather begins with the device's own block, which needs no transfer; a scatter ends
with it, when the partial results of the other devices have arrived.

The same functions serve the kernels, with traced integers, and their tests, with integer arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import cdiv

from meshpar_kernels.grouped_matmul.gpu_common import Each, Tile, each_tile, rasterize

PIECE = 64
"""Rows and columns of one chunk that a gather sends: 8 KiB in bfloat16."""


class BlockOrder(NamedTuple):
    """The tiles of a matmul whose rows are sharded over the devices.

    Attributes:
      devices: A.
      rows: rows of a block.
      k, n: contracted elements, and columns of the result.
      tile: tile sizes of the result, and contracted elements of a stage.
      own_first: begin with the device's own block (gather), else with the next device's (scatter).
    """

    devices: int
    rows: int
    k: int
    n: int
    tile: Tile
    own_first: bool

    @property
    def row_tiles(self) -> int:
        """Row tiles of a block."""
        return cdiv(self.rows, self.tile.m)

    @property
    def column_tiles(self) -> int:
        return cdiv(self.n, self.tile.n)

    @property
    def steps(self) -> int:
        """K steps (stages) of a tile."""
        return cdiv(self.k, self.tile.k)

    @property
    def tiles(self) -> int:
        """Tiles of all blocks."""
        return self.devices * self.row_tiles * self.column_tiles

    def at(self, number: Any) -> tuple[Any, Any, Any]:
        """(ring step, row tile in the block, column tile) of the tile with this index."""
        each = self.row_tiles * self.column_tiles
        step_index = lax.div(number, jnp.int32(each))
        row, column = rasterize(number - step_index * each, jnp.int32(self.row_tiles), self.column_tiles)
        return step_index, row, column

    def each(self, num_sms: int) -> Each:
        """`each_tile` for the tiles (index, ring step, row tile, column tile) of this block, of a grid of `num_sms`."""
        return each_tile(self.tiles, num_sms, lambda number: ((number, *self.at(number)), self.steps, 1))

    def block(self, step_index: Any, rank: Any) -> Any:
        """Rank of the device whose block of rows the device of rank `rank` multiplies in a ring step."""
        return lax.rem(rank + step_index + (0 if self.own_first else 1), jnp.int32(self.devices))

    # -- a gather's sends: hop h delivers the block that the receiver multiplies in step h + 1

    @property
    def num_chunks(self) -> int:
        """Chunks [PIECE, PIECE] of a block."""
        return cdiv(self.rows, PIECE) * cdiv(self.k, PIECE)

    def chunk(self, number: Any) -> tuple[Any, Any, Any]:
        """(hop, row chunk, column chunk) of the chunk with this index, among all that a device sends."""
        across = cdiv(self.k, PIECE)
        hop = lax.div(number, jnp.int32(self.num_chunks))
        rest = number - hop * self.num_chunks
        row = lax.div(rest, jnp.int32(across))
        return hop, row, rest - row * across

    def receiver(self, hop: Any, rank: Any) -> Any:
        """Rank of the device that multiplies this device's block in step ``hop + 1``."""
        return lax.rem(rank + (self.devices - 1 - hop), jnp.int32(self.devices))

    def expected(self, row: Any) -> Any:
        """Number of chunks that cover the rows of a tile: the count at which its arrival semaphore is complete."""
        high = self.tile.m // PIECE
        return jnp.minimum(high, cdiv(self.rows, PIECE) - row * high) * cdiv(self.k, PIECE)
