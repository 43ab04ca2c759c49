"""Sending and receiving of the fused matmuls on GPUs, for Hopper and Blackwell: copies into peer memory, and arrival semaphores.

Data is copied from shared memory by TMA to the peer's receive buffer (`remote_ref`, over NVLink). A sender waits until
its copies are complete (not only read), then adds one to an arrival semaphore in the peer's memory (release, system scope); the
receiver waits until the semaphore has its final value (acquire). Semaphores are zero at the start, only grow, and every
buffer is written once in a launch, so no sender ever waits for a receiver. XLA lets all devices begin a launch together, after
the counts are zero.

The TMA descriptor of a peer's buffer is made before the launch, so there is one copy instruction for each peer, and one of
them is executed.

`gather` and `scatter` run a kernel with the memory that this needs around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels._nvlink import Peers
from meshpar_kernels.collective_matmul.gpu_order import PIECE, Order, share
from meshpar_kernels.grouped_matmul.gpu_parts import ring, smem

__all__ = [
    "AHEAD",
    "COLUMNS",
    "LAG",
    "SLOTS",
    "add_up",
    "counts",
    "gather",
    "push",
    "scatter",
    "send",
    "signal_tile",
    "write",
]

AHEAD = 1
"""Pieces that are fetched before the one that is sent."""

LAG = 2
"""Copies to a peer in flight before the oldest is waited for."""

COLUMNS = 64
"""Columns of partial results that are sent or added up at a time."""

SLOTS = AHEAD + LAG + 1
"""A slot is reused when the copy out of it, `AHEAD + LAG + 1` chunks earlier, is complete."""


def counts(gpu: Any, shape: tuple[int, ...]) -> Any:
    """Counts in the memory of the device, one for all multiprocessors."""
    return pl.get_global(gpu.SemaphoreType.REGULAR(shape))


def push(
    gpu: Any, order: Order, peers: Peers, x: Any, recv_buffer: Any, slots: Any, loaded: Any, arrived: Any,
    multiprocessor: Any, multiprocessors: int,
) -> None:  # fmt: skip
    """Send this device's rows to all others, as one warp or warpgroup of each multiprocessor.

    Args:
      x: [rows, K].
      recv_buffer: [A - 1, rows, K], of which hop h writes block h at the receiver.
      slots, loaded: [SLOTS, PIECE, PIECE] of shared memory, and barriers.
      arrived: semaphores [A - 1, row tiles] that count chunks.
    """
    num_own = share((order.devices - 1) * order.num_chunks, multiprocessor, multiprocessors)

    def part(i: Any) -> tuple[Any, Any, Any, Any]:
        hop, row, column = order.chunk(multiprocessor + i * multiprocessors)
        return hop, row, pl.ds(row * PIECE, PIECE), pl.ds(column * PIECE, PIECE)

    def one(i: Any, _: Any) -> None:
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
                    dst = gpu.remote_ref(recv_buffer, peers.device(order.receiver(h, peers.rank)))
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
            pl.semaphore_signal(count, 1, device_id=peers.device(order.receiver(hop, peers.rank)))

    lax.fori_loop(0, num_own + AHEAD + LAG, one, None)


def write(gpu: Any, target: Any, column: Any, width: int, columns: Callable[[int], jax.Array], staging: Any) -> None:
    """Write a tile's columns through the two slots of `staging`.

    Args:
      target: [rows, n] of the result.
      column: of the tile, in tiles of `width` columns.
      columns: first column in the tile → as many columns as a slot has.
    """
    step = staging.shape[-1]
    for c, left in enumerate(range(0, width, step)):
        fresh = c == 0 and (width // step) % 2  # the slots' turns do not go on from the tile before
        value = columns(left)
        gpu.wait_smem_to_gmem(0 if fresh else 1, wait_read_only=True)
        staging[c % 2] = value
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(staging.at[c % 2], target.at[:, pl.ds(column * width + left, step)])


def send(
    gpu: Any, order: Order, peers: Peers, recv_buffer: Any, step_index: Any, row: Any, column: Any,
    columns: Callable[[int], jax.Array], staging: Any,
) -> None:  # fmt: skip
    """Send a tile's sums to the device whose rows they are of.

    Args:
      recv_buffer: [A - 1, rows, n], of which turn t writes block t at the receiver.
      row: the first, in the block.
      columns: first column in the tile → as many columns as a slot has, in float32.
      staging: [2, height, columns] of shared memory, from which all copies of the tile before are complete (`signal_tile`).
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
                peer = gpu.remote_ref(recv_buffer, peers.device(order.block(t, peers.rank)))
                gpu.copy_smem_to_gmem(staging.at[c % 2], peer.at[t, *dst])


def signal_tile(gpu: Any, order: Order, peers: Peers, summed: Any, number: Any, part: Any) -> None:
    """Signal the receiver of tile `number` that the tile has arrived, if the tile exists and was sent.

    Args:
      summed: counts [parts of a block, column tiles] of senders.
      part: which part of a tile's rows.
    """
    step_index, row, column = order.at(jnp.maximum(number, 0))

    @pl.when((number >= 0) & (step_index < order.devices - 1))
    def _():
        gpu.wait_smem_to_gmem(0)
        high = summed.shape[0] // order.row_tiles
        receiver = order.block(step_index, peers.rank)
        pl.semaphore_signal(summed.at[row * high + part, column], 1, device_id=peers.device(receiver))


def add_up(
    gpu: Any, order: Order, recv_buffer: Any, target: Any, row: Any, column: Any, columns: Callable[[int], jax.Array],
    arriving: Any, landed: Any, staging: Any, layout: Any,
) -> None:  # fmt: skip
    """Add the partial results of the other devices to this device's own, in the same order in every run; write the result.

    Args:
      recv_buffer: as `send` wrote it.
      target: [rows, n] of the result, from this tile's first row on.
      row, columns: as in `send`.
      arriving, landed: [2, height, columns] of shared memory, and as many barriers.
      staging: [height, columns] of shared memory, for the result.
      layout: of the values in registers.
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


def _launch(
    gpu: Any, kernel: Callable[..., None], x: jax.Array, w: jax.Array, order: Order, results: list[Any],
    scratch: tuple[Any, list[Any], list[Any]], *, warpgroups: int, num_sms: int, name: str, **options: Any,
) -> jax.Array:  # fmt: skip
    """Run a kernel; a device that is alone has no buffer for others, and moves nothing.

    Args:
      results: the result, and the receive buffer that peers write to.
      scratch: staging, the kernel's own memory, and what moving needs.
      options: of the kernel.
    """
    staging, memory, moving = scratch
    alone = order.devices == 1

    def body(x: Any, w: Any, out: Any, *refs: Any) -> None:
        recv_buffer, staging, *rest = (None, *refs) if alone else refs
        own, moving = rest[: len(memory)], rest[len(memory) :]
        kernel(x, w, out, recv_buffer, staging, own, moving, gpu=gpu, order=order, num_sms=num_sms, **options)

    found = gpu.kernel(
        body,
        out_type=results[0] if alone else results,
        scratch_types=[staging, *memory, *([] if alone else moving)],
        grid=(num_sms,),
        grid_names=("multiprocessor",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane),
    )(x, w)
    return found if alone else found[0]


def _staging(gpu: Any, order: Order, parts: tuple[int, ...], out_dtype: Any) -> Any:
    """The two slots of `write`, 128 bytes wide, for each part of a tile's rows."""
    width = min(order.tile.n, 128 // jnp.dtype(out_dtype).itemsize)
    return smem(gpu, (*parts, 2, order.tile.m // math.prod(parts), width), out_dtype)


def gather(
    gpu: Any, kernel: Callable[..., None], memory: list[Any], x: jax.Array, w: jax.Array, order: Order, *,
    parts: tuple[int, ...], out_dtype: Any, **options: Any,
) -> jax.Array:  # fmt: skip
    """x[m, K] of all devices times w → [A, m, n], by a kernel that sends with `push`.

    Args:
      kernel: (x, w, result, [A - 1, m, K] of the others' rows or None, the staging of `write`, the refs of `memory`, slots and
        barriers of `push`).
      memory: of shared and tensor memory, and barriers: the kernel's own.
      parts: how many warpgroups share the rows of a tile, each with a staging of its own; () for one without a leading dim.
      options: warpgroups, num_sms, and further arguments of the kernel.
    """
    rows, k = x.shape
    out = _compat.out_struct((order.devices, rows, order.n), out_dtype, x, w)
    recv_buffer = _compat.out_struct((order.devices - 1, rows, k), x.dtype, x, w)
    moving = [gpu.SMEM((SLOTS, PIECE, PIECE), x.dtype), gpu.Barrier(num_barriers=SLOTS)]
    scratch = _staging(gpu, order, parts, out_dtype), memory, moving
    return _launch(gpu, kernel, x, w, order, [out, recv_buffer], scratch, name="meshpar_all_gather_matmul", **options)


def scatter(
    gpu: Any, kernel: Callable[..., None], memory: list[Any], x: jax.Array, w: jax.Array, order: Order, *,
    parts: tuple[int, ...], out_dtype: Any, comm_dtype: Any, **options: Any,
) -> jax.Array:  # fmt: skip
    """x[A, M/A, k] times w, reduce-scattered → [M/A, N] of this device, by a kernel that uses `send`, `signal_tile`, `add_up`.

    Args:
      kernel: (x, w, result, [A - 1, M/A, N] of received partial results or None, the staging of `add_up` or, alone, of `write`, the
        refs of `memory`, slots and barriers of partial results that are sent or received).
      memory, parts, options: as in `gather`.
    """
    out = _compat.out_struct((order.rows, order.n), out_dtype, x, w)
    recv_buffer = _compat.out_struct((order.devices - 1, order.rows, order.n), comm_dtype, x, w)
    height = order.tile.m // math.prod(parts)
    moving = [
        smem(gpu, (*parts, 2, height, COLUMNS), comm_dtype), gpu.Barrier(num_barriers=2 * math.prod(parts))
    ]  # fmt: skip
    alone = order.devices == 1
    staging = _staging(gpu, order, parts, out_dtype) if alone else smem(gpu, (*parts, height, COLUMNS), out_dtype)
    scratch = staging, memory, moving
    return _launch(
        gpu, kernel, x, w, order, [out, recv_buffer], scratch, name="meshpar_matmul_reduce_scatter", **options
    )
