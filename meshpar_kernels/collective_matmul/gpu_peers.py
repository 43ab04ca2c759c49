"""Communication of the fused matmuls on GPUs, for Hopper and Blackwell: copies into the memory of remote GPUs, and
arrival semaphores.

TMA copies data from shared memory to the receive buffer of a remote GPU (`remote_ref`, over NVLink). A sender waits
until its copies are complete, not only until shared memory was read. Then it adds one to an arrival semaphore in the
memory of the remote GPU (release, system scope). The receiver waits until the semaphore has its final value (acquire).
Semaphores are zero at the start and only grow, and every buffer is written once in a launch, so no sender ever waits
for a receiver. XLA starts a launch on all devices only when the semaphores are zero.

The TMA descriptor of a remote buffer is made before the launch. So the code has one copy instruction for each remote
GPU, and executes one of them.

`gather` and `scatter` allocate the buffers and launch a kernel.
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
from meshpar_kernels._nvlink import DeviceGroup
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
    gpu: Any, order: Order, nvlink: DeviceGroup, x: Any, recv_buffer: Any, slots: Any, loaded: Any, arrived: Any,
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


def write(gpu: Any, target: Any, column: Any, width: int, columns: Callable[[int], jax.Array], staging: Any) -> None:
    """Write the columns of a tile to the result, through the two slots of `staging`.

    Args:
      target: GMEM [rows, n]: these rows of the result.
      column: column tile, in units of `width` columns.
      width: columns of the tile.
      columns: first column in the tile → values [rows, staging.shape[-1]], in the dtype of `staging`.
      staging: SMEM [2, rows, columns]. Before a slot is written, `wait_smem_to_gmem` waits until the copy out of it has
        read it.
    """
    step = staging.shape[-1]
    for c, left in enumerate(range(0, width, step)):
        fresh = c == 0 and (width // step) % 2  # an odd number of chunks: slot 0 may still be read for the tile before
        value = columns(left)
        gpu.wait_smem_to_gmem(0 if fresh else 1, wait_read_only=True)
        staging[c % 2] = value
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(staging.at[c % 2], target.at[:, pl.ds(column * width + left, step)])


def send(
    gpu: Any, order: Order, nvlink: DeviceGroup, recv_buffer: Any, step_index: Any, row: Any, column: Any,
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


def signal_tile(gpu: Any, order: Order, nvlink: DeviceGroup, summed: Any, number: Any, part: Any) -> None:
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
    gpu: Any, order: Order, recv_buffer: Any, target: Any, row: Any, column: Any, columns: Callable[[int], jax.Array],
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


def _launch(
    gpu: Any, kernel: Callable[..., None], x: jax.Array, w: jax.Array, order: Order, results: list[Any],
    scratch: tuple[Any, list[Any], list[Any]], *, warpgroups: int, num_sms: int, name: str, **options: Any,
) -> jax.Array:  # fmt: skip
    """Launch `kernel` on a grid of `num_sms` thread blocks; return its first result. One device gets no receive buffer
    and no `moving`.

    Args:
      results: shapes and dtypes of the result and of the receive buffer, which remote GPUs write.
      scratch: (staging, the kernel's own scratch, scratch for communication).
      warpgroups: of a thread block.
      options: further keyword arguments of the kernel.
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
    """SMEM for the two slots of `write`: [*parts, 2, rows of a part, columns], 128 bytes wide (or the tile's width if
    less)."""
    width = min(order.tile.n, 128 // jnp.dtype(out_dtype).itemsize)
    return smem(gpu, (*parts, 2, order.tile.m // math.prod(parts), width), out_dtype)


def gather(
    gpu: Any, kernel: Callable[..., None], memory: list[Any], x: jax.Array, w: jax.Array, order: Order, *,
    parts: tuple[int, ...], out_dtype: Any, **options: Any,
) -> jax.Array:  # fmt: skip
    """The all-gather matmul: x[m, K] of all devices times w → [A, m, n], by a kernel that sends with `push`.

    Args:
      kernel: called with the refs (x, w, result [A, m, n], receive buffer [A - 1, m, K] or None, staging of `write`,
        refs of `memory`, (slots, barriers) of `push`).
      memory: scratch of the kernel: shared memory, tensor memory and barriers.
      parts: (number of warpgroups that share the rows of a tile,), each with a staging buffer of its own; () for one
        staging buffer without a leading dim.
      options: warpgroups, num_sms, and further keyword arguments of the kernel.
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
    """The matmul reduce-scatter: x[A, M/A, k] times w → [M/A, N] of this device, by a kernel of `send`, `signal_tile`
    and `add_up`.

    Args:
      kernel: called with the refs (x, w, result [M/A, N], receive buffer [A - 1, M/A, N] or None, staging of `add_up`
        (for one device: of `write`), refs of `memory`, (slots, barriers) for partial results that are sent or
        received).
      memory, parts, options: as in `gather`.
      comm_dtype: dtype in which partial results are sent.
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
