"""Matmul reduce-scatter on TPU: a result tile is added to the received partial tile, and sent from VMEM to the next
device at once.

So the transfer of a tile is hidden behind all tiles, of both directions, that the next device computes before it needs
this one.

Semaphores: `recv_sem[direction, message % 2, row tile]` signals that the columns of a row tile have arrived;
`sent_sem[parity]` that the send of a tile has read its source. `free_slots[direction]` is signalled by the receiver
when it has read a message; a sender waits for it from the third message on.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import cdiv
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels.collective_matmul import tpu_common as tpu
from meshpar_kernels.collective_matmul.dot_dims import Axes
from meshpar_kernels.collective_matmul.schedule import full_hops
from meshpar_kernels.collectives.run_by_ppermute import axes_and_sizes


class Scattering(NamedTuple):
    """The order of a scatter's grid steps: the opposite device's block, whose partial results travel farthest, pairs of
    nearer blocks, this device's block.

    Attributes:
      devices: of the ring.
      tiles: row tiles of a block.
    """

    devices: int
    tiles: int

    @property
    def even(self) -> int:
        """1 if the number of devices is even, so that one device is opposite to this one; else 0."""
        return int(self.devices % 2 == 0)

    @property
    def messages(self) -> int:
        """Blocks sent in each direction; the first is half of the opposite block."""
        return full_hops(self.devices) + self.even

    @property
    def cut(self) -> int:
        """Row tiles of the opposite device's block that are sent up; the rest is sent down."""
        return self.tiles if self.devices == 2 else cdiv(self.tiles, 2)

    @property
    def own(self) -> int:
        """First index of this device's own block on the first grid dim."""
        return (self.devices - 1) * self.tiles

    def at(self, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(message number, direction, row tile) of a grid step; the number is `messages` for the device's own block."""
        u = jnp.maximum(v - self.even * self.tiles, 0)
        q = lax.rem(u, 2 * self.tiles)
        number, direction, i = lax.div(u, 2 * self.tiles) + self.even, lax.div(q, self.tiles), lax.rem(q, self.tiles)
        if self.even:
            opposite = v < self.tiles
            number, i = jnp.where(opposite, 0, number), jnp.where(opposite, v, i)
            direction = jnp.where(opposite, (v >= self.cut).astype(jnp.int32), direction)
        return number, direction, i

    def row(self, v: jax.Array, rank: jax.Array) -> jax.Array:
        """Row tile of x."""
        number, direction, i = self.at(v)
        far = full_hops(self.devices) + self.even - number
        return tpu.block_at(rank, jnp.where(direction == tpu.UP, far, -far), self.devices) * self.tiles + i

    def receives(self, number: jax.Array, direction: int, i: jax.Array) -> jax.Array:
        """bool: whether partial results arrive in one direction for row tile i of message `number`."""
        some = number >= 1
        if not self.even:
            return some
        mine = i < self.cut if direction == tpu.UP else i >= self.cut
        return some & ((number > 1) | mine)


class ScatterRefs(NamedTuple):
    """The refs of `_scatter_kernel`, in its order.

    Attributes:
      rank: scalar prefetch int32 [1]; the block specs read it.
      x: VMEM input [tile rows, k].
      w: VMEM input [k, columns], or [columns, k] with `transposed`.
      out: VMEM output [tile rows, columns]; written for this device's own block.
      recv_buffer: HBM output [2 directions, 2, rows, N]; message m writes [direction, m % 2].
      acc: VMEM scratch, float32 [tile rows, columns].
      partials: VMEM scratch [2 directions, tile rows, columns]: received partial tiles.
      leaving: VMEM scratch [2, tile rows, columns]: the last two tiles that were sent.
      partials_sem, sent_sem, recv_sem: DMA semaphores [2], [2] and [2, 2, row tiles].
      free_slots: free-slot semaphores [2].
    """

    rank: Any
    x: Any
    w: Any
    out: Any
    recv_buffer: Any
    acc: Any
    partials: Any
    leaving: Any
    partials_sem: Any
    sent_sem: Any
    recv_sem: Any
    free_slots: Any


class _Tile(NamedTuple):
    """The partial tile of one grid step, and its copies.

    Attributes:
      refs: of the kernel.
      ring: the neighbours.
      number, i: message and row tile.
      parity: of the number of tiles sent before.
      rows, columns: slices of the result.
    """

    refs: ScatterRefs
    ring: tpu.Ring
    number: Any
    i: Any
    parity: Any
    rows: Any
    columns: Any

    def outgoing(self, channel: int, slot: Any) -> Any:
        """The remote copy of the tile to the next device."""
        return pltpu.make_async_remote_copy(
            self.refs.leaving.at[self.parity],
            self.refs.recv_buffer.at[channel, slot, self.rows, self.columns],
            self.refs.sent_sem.at[self.parity],
            self.refs.recv_sem.at[channel, slot, self.i],
            device_id=self.ring.receiver[channel],
        )

    def wait_sent(self, parity: Any) -> None:
        """Block until the last tile of this parity has left."""
        self._replace(parity=parity).outgoing(tpu.UP, 0).wait_send()

    def wait_received(self, channel: int) -> None:
        """Block until all column tiles of the row tile have arrived, each of which was sent on its own."""
        slot = lax.rem(self.number + 1, 2)
        row = self.refs.recv_buffer.at[channel, slot, self.rows]
        pltpu.make_async_remote_copy(
            row,
            row,
            self.refs.sent_sem.at[0],
            self.refs.recv_sem.at[channel, slot, self.i],
            device_id=self.ring.sender[channel],
        ).wait_recv()

    def incoming(self, channel: int) -> Any:
        """The copy of the received partial tile from the receive buffer to VMEM."""
        return pltpu.make_async_copy(
            self.refs.recv_buffer.at[channel, lax.rem(self.number + 1, 2), self.rows, self.columns],
            self.refs.partials.at[channel],
            self.refs.partials_sem.at[channel],
        )

    def send(self, channel: int, order: Scattering, first: Any, last: Any) -> None:
        """Send the tile, which is in `leaving`; wait for a free slot with the first tile of a message, and release the
        received message after the last one."""
        if order.messages > 2:

            @pl.when((self.number >= 2) & first)
            def _():
                pl.semaphore_wait(self.refs.free_slots.at[channel], 1)

        self.outgoing(channel, lax.rem(self.number, 2)).start()
        if order.messages > 2:

            @pl.when(last & (self.number >= 1) & (self.number + 1 < order.messages))
            def _():
                self.ring.release_slot(self.refs.free_slots, channel)


def _scatter_kernel(*refs, order: Scattering, axes, sizes, transposed: bool, precision: Any):
    """One grid step: the matmul of a (row tile, column tile) plus the received partial tile, sent to the next device or
    written to the result.

    The grid is (row tiles of all blocks in the order of `Scattering`, column tiles).

    Args:
      refs: `ScatterRefs`.
      order: order of the grid steps.
      axes, sizes: mesh axes of the ring, and their sizes.
    """
    r = ScatterRefs(*refs)
    v, j = pl.program_id(0), pl.program_id(1)
    columns = pl.num_programs(1)
    ring = tpu.Ring(axes, sizes)
    height, width = r.acc.shape
    number, direction, i = order.at(v)
    own = v >= order.own
    rows, column_slice = (pl.ds(pl.multiple_of(at * size, size), size) for at, size in ((i, height), (j, width)))
    sent = v * columns + j
    tile = _Tile(r, ring, number, i, lax.rem(sent, 2), rows, column_slice)

    @pl.when((v == 0) & (j == 0))
    def _():
        ring.entry_barrier()

    expected = [order.receives(number, channel, i) & (own | (direction == channel)) for channel in (tpu.UP, tpu.DOWN)]
    for channel in (tpu.UP, tpu.DOWN):

        @pl.when(expected[channel])
        def _(channel=channel):
            pl.when(j == 0)(lambda: tile.wait_received(channel))
            tile.incoming(channel).start()

    tpu.multiply(r.x, r.w, r.acc, transposed, precision)
    for channel in (tpu.UP, tpu.DOWN):

        @pl.when(expected[channel])
        def _(channel=channel):
            tile.incoming(channel).wait()
            r.acc[...] += r.partials[channel].astype(jnp.float32)

    last = (i == order.tiles - 1) & (j == columns - 1)

    @pl.when(own)
    def _():
        r.out[...] = r.acc[...].astype(r.out.dtype)

        @pl.when((v == order.own) & (j == 0))
        def _():
            before = order.own * (r.recv_buffer.shape[3] // width)
            for k in range(min(2, before)):
                tile.wait_sent(lax.rem(jnp.int32(before - 1 - k), 2))

    @pl.when(~own)
    def _():
        @pl.when(sent >= 2)
        def _():
            tile.wait_sent(tile.parity)

        r.leaving[tile.parity] = r.acc[...].astype(r.leaving.dtype)
        for channel in (tpu.UP, tpu.DOWN):

            @pl.when(direction == channel)
            def _(channel=channel):
                tile.send(channel, order, (i == 0) & (j == 0), last)


def matmul_reduce_scatter(
    x: jax.Array, w: jax.Array, axis_name: Axes, *, tile: tpu.Tile, out_dtype: Any, comm_dtype: Any, transposed: bool,
    precision: Any,
) -> jax.Array:  # fmt: skip
    """x[M, k] times w[k, N] ([N, k] with `transposed`), summed over all devices → this one's rows, [M/A, N]."""
    axes, sizes = axes_and_sizes(axis_name)
    devices = math.prod(sizes)
    full, k = x.shape
    rows = full // devices
    n = w.shape[0] if transposed else w.shape[1]
    order = Scattering(devices, rows // tile.m)

    def out_at(v, j, rank):
        own = v >= order.own  # before, the output block is the first tile, which is not written
        return jnp.where(own, v - order.own, 0), jnp.where(own, j, 0)

    sent = (devices - 1) * rows * n * jnp.dtype(comm_dtype).itemsize
    out, _ = tpu.run(
        functools.partial(
            _scatter_kernel, order=order, axes=axes, sizes=sizes, transposed=transposed, precision=precision
        ),
        "matmul_reduce_scatter",
        x,
        w,
        axes,
        grid=(devices * order.tiles, n // tile.n),
        in_specs=[
            pl.BlockSpec((tile.m, k), lambda v, j, rank: (order.row(v, rank[0]), 0)),
            tpu.weights_spec(k, tile.n, transposed),
        ],
        out_specs=[pl.BlockSpec(tile, out_at), pl.BlockSpec(memory_space=pl.ANY)],
        scratch=[
            pltpu.VMEM(tile, jnp.float32),
            pltpu.VMEM((2, *tile), comm_dtype),
            pltpu.VMEM((2, *tile), comm_dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2, 2, order.tiles)),
            pltpu.SemaphoreType.REGULAR((2,)),
        ],
        results=[((rows, n), out_dtype), ((2, 2, rows, n), comm_dtype)],  # the second is the receive buffer
        cost=tpu.cost_of(full, k, n, x.dtype, out_dtype, sent),
    )
    return out
