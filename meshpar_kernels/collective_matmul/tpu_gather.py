"""All-gather matmul on TPU: a received block is forwarded while it is multiplied; two HBM receive buffers for each
direction.

Semaphores: `recv_sem[direction, step % 2]` signals that the block of a ring step has arrived, `sent_sem[direction]`
that a send has read its source. `free_slots[direction]` is signalled by the receiver when it has multiplied and
forwarded a block; a sender waits for it before it writes into a receive buffer for the second time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
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


class Gathering(NamedTuple):
    """The order of a gather's grid steps: row tiles of this device's block, then of the pairs of blocks that arrive,
    then of the opposite device's block.

    Attributes:
      devices: of the ring.
      tiles: row tiles of a block.
    """

    devices: int
    tiles: int

    @property
    def steps(self) -> int:
        """Sends in each direction, including the send of the opposite block."""
        return full_hops(self.devices) + (self.devices % 2 == 0)

    def at(self, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(phase, direction (0: UP), row tile, tiles since the phase began) of grid step v."""
        u = jnp.maximum(v - self.tiles, 0)
        phase = jnp.where(v < self.tiles, 0, 1 + lax.div(u, 2 * self.tiles))
        q = jnp.where(v < self.tiles, v, lax.rem(u, 2 * self.tiles))
        return phase, lax.div(q, self.tiles), lax.rem(q, self.tiles), q

    def length(self, phase: jax.Array) -> jax.Array:
        """Number of grid steps of a phase."""
        single = (phase == 0) | ((phase == self.steps) & (self.devices % 2 == 0))
        return jnp.where(single, self.tiles, 2 * self.tiles)

    def row(self, v: jax.Array, rank: jax.Array) -> jax.Array:
        """Row tile of the result."""
        phase, direction, i, _ = self.at(v)
        away = jnp.where(direction == tpu.UP, -phase, phase)
        return tpu.block_at(rank, away, self.devices) * self.tiles + i


class _Messages(NamedTuple):
    """The copies to the neighbours: this device's block in the first ring step, then the blocks received in the step
    before.

    Attributes:
      order, cut: as in `_gather_kernel`.
      ring: the neighbours.
      x_ref, recv_buffer, sent_sem, recv_sem: refs of `_gather_kernel`.
    """

    order: Gathering
    cut: int
    ring: tpu.Ring
    x_ref: Any
    recv_buffer: Any
    sent_sem: Any
    recv_sem: Any

    def copy(self, direction: int, first: bool, half: bool, parity: Any) -> Any:
        """The copy in one direction in a step of this parity; with `half` the part of the opposite device's block."""
        source = self.x_ref if first else self.recv_buffer.at[direction, 1 - parity]
        target = self.recv_buffer.at[direction, parity]
        if half:
            part = pl.ds(0, self.cut) if direction == tpu.UP else pl.ds(self.cut, self.x_ref.shape[0] - self.cut)
            source, target = source.at[part], self.recv_buffer.at[tpu.UP, parity].at[part]
        return pltpu.make_async_remote_copy(
            source,
            target,
            self.sent_sem.at[direction],
            self.recv_sem.at[direction, parity],
            device_id=self.ring.receiver[direction],
        )

    def each(self, step: Any, act: Callable[[Any], None]) -> None:
        """`act` on the copies of a step."""
        parity = lax.rem(step, 2)
        full = full_hops(self.order.devices)

        def both(first: bool, half: bool) -> None:
            for direction in (tpu.UP, tpu.DOWN) if not half or self.cut < self.x_ref.shape[0] else (tpu.UP,):
                act(self.copy(direction, first, half, parity))

        for first in (True, False):
            of_kind = (step == 0) if first else (step > 0)
            if full and (first or full > 1):
                pl.when(of_kind & (step < full))(functools.partial(both, first, False))
            if self.order.steps > full and first == (full == 0):
                pl.when(of_kind & (step == full))(functools.partial(both, first, True))


def _load(x_ref, recv_buffer, tiles, tile_sem, at: tuple[Any, ...], slot: Any, act: Callable[[Any], None]) -> None:
    """`act` on the copy of a row tile to `tiles[slot]`: of x in phase 0, else of the receive buffer.

    Args:
      at: phase, direction and row tile, as from `Gathering.at`.
    """
    phase, direction, i, _ = at
    height = tiles.shape[1]
    row_slice = pl.ds(pl.multiple_of(i * height, height), height)

    @pl.when(phase == 0)
    def _():
        act(pltpu.make_async_copy(x_ref.at[row_slice], tiles.at[slot], tile_sem.at[slot]))

    @pl.when(phase > 0)
    def _():
        source = recv_buffer.at[direction, lax.rem(phase + 1, 2), row_slice]
        act(pltpu.make_async_copy(source, tiles.at[slot], tile_sem.at[slot]))


def _gather_kernel(*refs, order: Gathering, axes, sizes, transposed: bool, precision: Any, cut: int, keep: bool):
    """One grid step: multiplies one row tile by one column tile of the weights.

    The grid is (row tiles of all blocks in the order of `Gathering`, column tiles). In phase p the blocks that were
    received in ring step p - 1 are multiplied, and forwarded in ring step p at the same time.

    Args:
      refs: scalar prefetch int32 [1], the rank, which the block specs read; inputs: HBM [rows, K], this device's block, and
        VMEM [K, columns], or [columns, K] with `transposed`, the weights; outputs: VMEM [tile rows, columns], HBM
        [2 directions, 2, rows, K], the receive buffer, of which ring step s writes [direction, s % 2], and with `keep` VMEM
        [tile rows, K] for the gathered rows; scratch: VMEM [2, tile rows, K], float32 accumulator, DMA semaphores [2] for
        row tiles, [2] for sends, [2, 2] for receives, free-slot semaphores [2].
      order: order of the grid steps.
      axes, sizes: mesh axes of the ring, and their sizes.
      cut: rows of the opposite device's block that are sent up; the rest is sent down.
    """
    _, x_ref, w_ref, out_ref, recv_buffer, *rest = refs
    saved = rest[:keep]
    tiles, acc, tile_sem, sent_sem, recv_sem, free_slots = rest[keep:]
    v, j = pl.program_id(0), pl.program_id(1)
    ring = tpu.Ring(axes, sizes)
    messages = _Messages(order, cut, ring, x_ref, recv_buffer, sent_sem, recv_sem)
    load = functools.partial(_load, x_ref, recv_buffer, tiles, tile_sem)
    at = phase, _, _, q = order.at(v)
    parity = lax.rem(v, 2)

    @pl.when(j == 0)
    def before():
        """At the first column tile: start the sends of a phase, wait for this row tile, and prefetch the next one."""

        @pl.when(v == 0)
        def _():
            ring.entry_barrier()

        @pl.when(q == 0)
        def _():
            @pl.when(phase > 0)
            def _():
                messages.each(phase - 1, lambda copy: copy.wait_recv())

            @pl.when((phase >= 2) & (phase < order.steps))
            def _():
                for one in (tpu.UP, tpu.DOWN):
                    pl.semaphore_wait(free_slots.at[one], 1)

            messages.each(phase, lambda copy: copy.start())
            load(at, parity, lambda copy: copy.start())

        load(at, parity, lambda copy: copy.wait())
        for rows_ref in saved:
            rows_ref[...] = tiles[parity]

        @pl.when(q + 1 < order.length(phase))
        def _():
            load((phase, *order.at(v + 1)[1:]), 1 - parity, lambda copy: copy.start())

    tpu.multiply(tiles.at[parity], w_ref, acc, transposed, precision)
    out_ref[...] = acc[...].astype(out_ref.dtype)

    @pl.when((q + 1 == order.length(phase)) & (j == pl.num_programs(1) - 1))
    def after():
        """At the end of a phase: wait until its sends have read their sources, and release the receive buffers."""
        messages.each(phase, lambda copy: copy.wait_send())

        @pl.when((phase >= 1) & (phase + 1 < order.steps))
        def _():
            for one in (tpu.UP, tpu.DOWN):
                ring.release_slot(free_slots, one)


def all_gather_matmul(
    x: jax.Array, w: jax.Array, axis_name: Axes, *, tile: tpu.Tile, out_dtype: Any, transposed: bool, precision: Any,
    keep: bool = False,
) -> list[jax.Array]:  # fmt: skip
    """x[m, K] of all devices times w[K, n] ([n, K] with `transposed`) → [A·m, n]; with `keep` also the rows, [A·m, K]."""
    axes, sizes = axes_and_sizes(axis_name)
    devices = math.prod(sizes)
    rows, k = x.shape
    n = w.shape[0] if transposed else w.shape[1]
    order = Gathering(devices, rows // tile.m)
    itemsize = x.dtype.itemsize
    pack = 32 // itemsize
    cut = cdiv(rows // 2, pack) * pack if devices > 2 else rows
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def tall(width: int, column: Callable[[Any], Any]) -> pl.BlockSpec:
        return pl.BlockSpec((tile.m, width), lambda v, j, rank: (order.row(v, rank[0]), column(j)))

    out, _, *saved = tpu.run(
        functools.partial(
            _gather_kernel, order=order, axes=axes, sizes=sizes, transposed=transposed, precision=precision, cut=cut,
            keep=keep,
        ),
        "all_gather_matmul",
        x,
        w,
        axes,
        grid=(devices * order.tiles, n // tile.n),
        in_specs=[anywhere, tpu.weights_spec(k, tile.n, transposed)],
        out_specs=[tall(tile.n, lambda j: j), anywhere, *[tall(k, lambda j: 0)] * keep],
        scratch=[
            pltpu.VMEM((2, tile.m, k), x.dtype),
            pltpu.VMEM(tile, jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.REGULAR((2,)),
        ],
        results=[
            ((devices * rows, n), out_dtype),
            ((2, 2, rows, k), x.dtype),  # the receive buffer, which the caller does not read
            *[((devices * rows, k), x.dtype)] * keep,
        ],
        cost=tpu.cost_of(devices * rows, k, n, x.dtype, out_dtype, (devices - 1) * rows * k * itemsize),
    )  # fmt: skip
    return [out, *saved]
