"""Communication of the fused matmuls on GPUs, for Hopper and Blackwell: copies into the memory of remote GPUs, and
arrival semaphores.

TMA copies data from shared memory to the receive buffer of a remote GPU (`remote_ref`, over NVLink). A sender waits
until its copies are complete, not only until shared memory was read. Then it adds one to an arrival semaphore in the
memory of the remote GPU (release, system scope). The receiver waits until the semaphore has its final value (acquire).
Semaphores are zero at the start and only grow, and every buffer is written once in a launch, so no sender ever waits
for a receiver. XLA starts a launch on all devices only when the semaphores are zero.

The TMA descriptor of a remote buffer is made before the launch. So the code has one copy instruction for each remote
GPU, and executes one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels._nvlink import DeviceGroup
from meshpar_kernels.collective_matmul.gpu_order import PIECE, BlockOrder
from meshpar_kernels.grouped_matmul.gpu_common import ring, share

AHEAD = 1
"""Chunks that are prefetched before the chunk that is sent."""

LAG = 2
"""Copies to remote GPUs in flight before the sender waits for the oldest."""

COLUMNS = 64
"""Columns of partial results that are sent or added at once."""

SLOTS = AHEAD + LAG + 1
"""Shared-memory slots of `push`. A slot is reused after `SLOTS` chunks, when the copy out of it is complete."""


def counts(gpu: Any, shape: tuple[int, ...]) -> Any:
    """Arrival semaphores of this shape in global memory (GMEM), shared by all multiprocessors; zero at the start of a
    launch."""
    return pl.get_global(gpu.SemaphoreType.REGULAR(shape))


def push(
    gpu: Any, order: BlockOrder, nvlink: DeviceGroup, x: Any, recv_buffer: Any, slots: Any, loaded: Any, arrived: Any,
    multiprocessor: Any, multiprocessors: int,
) -> None:  # fmt: skip
    """Send this device's rows to all other devices; one warp or warpgroup of each multiprocessor calls it.

    The rows are cut into chunks [PIECE, PIECE]; a multiprocessor sends every `multiprocessors`-th chunk. A chunk is
    fetched `AHEAD` iterations before it is sent, and signalled `LAG` iterations after that, when its copy is complete.

    Args:
      x: GMEM [rows, K].
      recv_buffer: GMEM [A - 1, rows, K]; hop h writes block h at the receiver.
      slots, loaded: SMEM [SLOTS, PIECE, PIECE], and one barrier for each slot, which counts the arrival of a fetched
        chunk.
      arrived: semaphores [A - 1, row tiles] at the receiver; each counts the chunks of the rows of a tile.
      multiprocessor, multiprocessors: index of this one, and their number.
    """
    num_own = share((order.devices - 1) * order.num_chunks, multiprocessor, multiprocessors)

    def part(i: Any) -> tuple[Any, Any, Any, Any]:
        """(hop, row chunk, row slice, column slice) of the i-th chunk of this multiprocessor."""
        hop, row, column = order.chunk(multiprocessor + i * multiprocessors)
        return hop, row, pl.ds(row * PIECE, PIECE), pl.ds(column * PIECE, PIECE)

    def one(i: Any, _: Any) -> None:
        """Iteration i: fetch chunk i, send chunk i - AHEAD, and signal chunk i - AHEAD - LAG; numbers without a chunk
        are skipped."""

        @pl.when(i < num_own)
        def _():
            _, _, rows, columns = part(i)
            slot = ring(SLOTS, i)
            gpu.copy_gmem_to_smem(x.at[rows, columns], slots.at[slot], loaded.at[slot])

        now = i - AHEAD

        @pl.when((now >= 0) & (now < num_own))
        def _():
            hop, _, rows, columns = part(now)
            slot = ring(SLOTS, now)
            gpu.barrier_wait(loaded.at[slot])
            for h in range(order.devices - 1):

                @pl.when(hop == h)
                def _(h=h):
                    dst = gpu.remote_ref(recv_buffer, nvlink.device(order.receiver(h, nvlink.rank)))
                    gpu.copy_smem_to_gmem(slots.at[slot], dst.at[h, rows, columns])

            gpu.wait_smem_to_gmem(LAG)

        @pl.when(now >= num_own)
        def _():
            gpu.wait_smem_to_gmem(0)

        done = now - LAG

        @pl.when(done >= 0)
        def _():
            hop, row, _, _ = part(done)
            count = arrived.at[hop, lax.div(row, jnp.int32(order.tile.m // PIECE))]
            pl.semaphore_signal(count, 1, device_id=nvlink.device(order.receiver(hop, nvlink.rank)))

    lax.fori_loop(0, num_own + AHEAD + LAG, one, None)


def send(
    gpu: Any, order: BlockOrder, nvlink: DeviceGroup, recv_buffer: Any, step_index: Any, row: Any, column: Any,
    columns: Callable[[int], jax.Array], staging: Any,
) -> None:  # fmt: skip
    """Send the partial sums of a tile to the device that owns its rows. The copies are asynchronous; `signal_tile`
    waits for them.

    Args:
      recv_buffer: GMEM [A - 1, rows, n]; ring step t writes block t at the receiver.
      step_index: ring step, below A - 1.
      row: first row of the tile in its block.
      column: column tile.
      columns: first column in the tile → float32 values [height, staging.shape[-1]].
      staging: SMEM [2, height, columns] in the dtype that is sent. All copies of the tile before must be complete
        (`signal_tile`).
    """
    _, height, step = staging.shape
    for c, left in enumerate(range(0, order.tile.n, step)):
        value = columns(left).astype(staging.dtype)
        gpu.wait_smem_to_gmem(1, wait_read_only=True)
        staging[c % 2] = value
        gpu.commit_smem()
        dst = pl.ds(row, height), pl.ds(column * order.tile.n + left, step)
        for t in range(order.devices - 1):

            @pl.when(step_index == t)
            def _(t=t, c=c, dst=dst):
                receiver = gpu.remote_ref(recv_buffer, nvlink.device(order.block(t, nvlink.rank)))
                gpu.copy_smem_to_gmem(staging.at[c % 2], receiver.at[t, *dst])


def signal_tile(gpu: Any, order: BlockOrder, nvlink: DeviceGroup, summed: Any, number: Any, part: Any) -> None:
    """Signal the receiver of tile `number` that the tile has arrived, if there is such a tile and it was sent.

    Waits until all copies of this warpgroup are complete. Does nothing for a negative `number` and for tiles of this
    device's own block.

    Args:
      summed: semaphores [parts of a block, column tiles] at the receiver; each counts senders.
      part: part of the tile's rows that this warpgroup sends.
    """
    step_index, row, column = order.at(jnp.maximum(number, 0))

    @pl.when((number >= 0) & (step_index < order.devices - 1))
    def _():
        gpu.wait_smem_to_gmem(0)
        high = summed.shape[0] // order.row_tiles
        receiver = order.block(step_index, nvlink.rank)
        pl.semaphore_signal(summed.at[row * high + part, column], 1, device_id=nvlink.device(receiver))


def add_up(
    gpu: Any, order: BlockOrder, recv_buffer: Any, target: Any, row: Any, column: Any, columns: Callable[[int], jax.Array],
    arriving: Any, landed: Any, staging: Any, layout: Any,
) -> None:  # fmt: skip
    """Add the partial results of the other devices to this device's own in a fixed order, in float32, and write the
    result.

    The caller has waited for the arrival semaphore of the tile. Received columns are fetched through two slots: one is
    fetched while the other is added.

    Args:
      recv_buffer: GMEM [A - 1, rows, n], written by `send` on the other devices.
      target: GMEM [height, n] of the result: the rows of this tile.
      row, column, columns: as in `send`.
      arriving, landed: SMEM [2, height, columns]; slot → the barrier that counts its arrival.
      staging: SMEM [height, columns] for the result.
      layout: Mosaic GPU layout of the values in registers.
    """
    _, height, step = arriving.shape
    others = order.devices - 1
    pairs = order.tile.n // step * others

    def fetch(number: Any) -> None:
        """Start the copy of the columns, and of the sender, with this number."""
        group = lax.div(number, jnp.int32(others))
        dst = pl.ds(column * order.tile.n + group * step, step)
        slot = lax.rem(number, jnp.int32(2))
        gpu.copy_gmem_to_smem(
            recv_buffer.at[number - group * others, pl.ds(row, height), dst], arriving.at[slot], landed(slot)
        )

    fetch(jnp.int32(0))
    for c, left in enumerate(range(0, order.tile.n, step)):

        def add(sender: Any, value: jax.Array, c: int = c) -> jax.Array:
            """Add the columns of one sender, after the fetch of the next columns has been started."""
            number = c * others + sender

            @pl.when(number + 1 < pairs)
            def _():
                gpu.commit_smem()
                fetch(number + 1)

            slot = lax.rem(number, jnp.int32(2))
            gpu.barrier_wait(landed(slot))
            return value + gpu.layout_cast(arriving[slot], layout).astype(jnp.float32)

        value = lax.fori_loop(0, others, add, gpu.layout_cast(columns(left), layout))
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = value.astype(staging.dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(staging, target.at[:, pl.ds(column * order.tile.n + left, step)])
