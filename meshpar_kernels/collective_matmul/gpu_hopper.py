"""The fused matmuls on Hopper GPUs (sm_90a, Mosaic GPU): `wgmma` overlapped with copies over NVLink.

The grid has one thread block for each multiprocessor; block b computes the tiles b, b + num_sms, … of the result, in
the order of `gpu_order.Order`. A block has three warpgroups: two that multiply and one that loads. They share a ring of
shared-memory stages, with the protocol of `grouped_matmul.hopper`. In a gather a second warp of the loading warpgroup
sends this device's rows (`gpu_peers.push`), and the loading warp waits until the chunks of a tile's rows have arrived
before it loads them. In a scatter the multiplying warpgroups send partial results, and add the received ones to their
own in the last step.

All blocks must be resident at once: a block that waits for data of a remote block would otherwise keep other blocks
from starting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels._nvlink import DeviceGroup
from meshpar_kernels.collective_matmul import gpu_peers
from meshpar_kernels.collective_matmul.gpu_order import Order, share
from meshpar_kernels.grouped_matmul.gpu_parts import ROWS, smem
from meshpar_kernels.grouped_matmul.hopper import CONSUMERS, drain, drains, load_stages, multiply_stages

__all__ = ["CONSUMERS", "all_gather_matmul", "matmul_reduce_scatter"]

LOADING = CONSUMERS
"""Index of the loading warpgroup, after the multiplying ones."""

LOADER, SENDER = 0, 1
"""Warps of the loading warpgroup."""


def _walk(
    gpu: Any,
    order: Order,
    num_sms: int,
    stages: Any,
    load: Callable[..., Callable[..., None]],
    multiply: Callable[..., None],
    store: Callable[..., None],
    concurrent: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """The loop over this block's tiles, for the loading warpgroup and for the two multiplying warpgroups.

    Args:
      num_sms: thread blocks of the grid.
      stages: the barriers (`full`, `empty`), one of each for every stage.
      load: (ring step, row tile, column tile) → a function (K step, stage, barrier) that starts the copies of a stage.
      multiply: (accumulator, stage, warpgroup): issues the `wgmma`s of one stage.
      store: (tile number, ring step, row tile, column tile, accumulator, warpgroup): writes or sends a tile.
      concurrent: called by a second warp of the loading warpgroup, concurrently with the loading warp; None: no such
        warp.
    """
    full, empty = stages
    warpgroup = lax.axis_index("warpgroup")
    multiprocessor = lax.axis_index("multiprocessor")
    num_own = share(order.tiles, multiprocessor, num_sms)

    def each_tile(work: Callable[..., None]) -> None:
        """Call `work(tile number, ring step, row tile, column tile, K steps of the tiles before)` for each tile of this
        block."""

        def one(i: Any, step: Any) -> Any:
            number = multiprocessor + i * num_sms
            work(number, *order.at(number), step)
            return step + order.steps

        lax.fori_loop(0, num_own, one, jnp.int32(0))

    @pl.when(warpgroup == LOADING)
    def _():
        gpu.set_max_registers(40, action="decrease")

        def load_tile(_, step_index, row, column, step):
            load_stages(gpu, step, order.steps, order.tile.stages, full, empty, load(step_index, row, column))

        def load_tiles():
            each_tile(load_tile)
            if drains():
                drain(gpu, num_own * order.steps, order.tile.stages, empty)

        if concurrent is None:
            load_tiles()
            return
        other = concurrent

        @gpu.warp_map
        def _(warp):
            pl.when(warp == LOADER)(load_tiles)
            pl.when(warp == SENDER)(other)

    @pl.when(warpgroup < CONSUMERS)
    def _():
        gpu.set_max_registers(232, action="increase")

        def make_tile(number, step_index, row, column, step):
            """Compute one tile: allocate a float32 accumulator [ROWS, n] in registers, multiply all its stages, and
            store it."""

            def with_acc(acc):
                """Multiply all stages of the tile into `acc`, and store it."""

                def matmuls(_, slot):
                    multiply(acc, slot, warpgroup)

                multiply_stages(gpu, step, order.steps, order.tile.stages, full, empty, matmuls)
                store(number, step_index, row, column, acc[...], warpgroup)

            pl.run_scoped(with_acc, gpu.ACC((ROWS, order.tile.n), jnp.float32))

        each_tile(make_tile)


def _copy_weights(gpu: Any, order: Order, transposed: bool, w: Any, column: Any, i: Any, dst: Any, barrier: Any):
    """Start the TMA copy of the weights of K step `i` and column tile `column` into `dst`; `barrier` counts the
    arrival."""
    inner, outer = pl.ds(i * order.tile.k, order.tile.k), pl.ds(column * order.tile.n, order.tile.n)
    gpu.copy_gmem_to_smem(w.at[(outer, inner) if transposed else (inner, outer)], dst, barrier)


def _start_products(gpu: Any, transposed: bool, x_smem: Any, w_smem: Any, acc: Any, slot: Any, warpgroup: Any):
    """Issue acc += x · w for one stage, as one `wgmma`: the warpgroup's `ROWS` rows of x_smem[slot] times w_smem[slot].

    It is asynchronous: the caller waits with `wgmma_wait`.
    """
    weights = _compat.transpose_ref(w_smem.at[slot]) if transposed else w_smem.at[slot]
    gpu.wgmma(acc, x_smem.at[slot, pl.ds(warpgroup * ROWS, ROWS)], weights)


def _gather_kernel(
    x,
    w,
    out,
    recv_buffer: Any,
    staging,
    memory,
    sending,
    *,
    gpu,
    order: Order,
    axis: str,
    transposed: bool,
    num_sms: int,
):
    """The all-gather matmul, for one thread block: computes its tiles of out[block] = x of each device · w.

    Args:
      x: GMEM input [rows, K]: this device's block of rows.
      w: GMEM input [K, n], or [n, K] with `transposed`.
      out: GMEM output [A, rows, n].
      recv_buffer: GMEM output [A - 1, rows, K] that remote GPUs write; block h is multiplied in ring step h + 1. None
        for one device.
      staging: SMEM [CONSUMERS, 2, ROWS, columns], two slots for each multiplying warpgroup (`gpu_peers.write`).
      memory: (x stages, w stages, `full`, `empty`), from `_memory`.
      sending: (SMEM slots, barriers) of `gpu_peers.push`; empty for one device.
      gpu: the module `jax.experimental.pallas.mosaic_gpu`.
      axis: mesh axis over which the rows are sharded.
      num_sms: thread blocks of the grid.
    """
    tile, alone = order.tile, order.devices == 1
    x_smem, w_smem, full, empty = memory
    nvlink = DeviceGroup.of((axis,), (order.devices,))
    arrived: Any = None if alone else gpu_peers.counts(gpu, (order.devices - 1, order.row_tiles))

    def load(step_index, row, column):
        """Wait until the rows of a tile have arrived; return the function that starts the copies of its stages.

        Ring step 0 reads this device's own rows, and waits for nothing.
        """
        if arrived is not None:

            @pl.when(step_index > 0)
            def _():
                pl.semaphore_wait(arrived.at[step_index - 1, row], order.expected(row), decrement=False)

        def copies(i, slot, barrier):
            """Start the TMA copies of K step i of x and w into stage `slot`; both count at `barrier`."""
            src_slice = pl.ds(row * tile.m, tile.m), pl.ds(i * tile.k, tile.k)

            @pl.when(step_index == 0)
            def _():
                gpu.copy_gmem_to_smem(x.at[src_slice], x_smem.at[slot], barrier)

            if recv_buffer is not None:

                @pl.when(step_index > 0)
                def _():
                    gpu.copy_gmem_to_smem(recv_buffer.at[step_index - 1, *src_slice], x_smem.at[slot], barrier)

            _copy_weights(gpu, order, transposed, w, column, i, w_smem.at[slot], barrier)

        return copies

    def store(_, step_index, row, column, acc, warpgroup):
        """Write the warpgroup's `ROWS` rows of a tile, acc float32 [ROWS, tile.n], in the dtype of `out`."""
        value = acc.astype(out.dtype)
        step = staging.shape[-1]
        target = out.at[order.block(step_index, nvlink.rank), pl.ds(row * tile.m + warpgroup * ROWS, ROWS)]
        gpu_peers.write(
            gpu, target, column, tile.n, lambda left: value[:, left : left + step], staging.at[warpgroup]
        )  # fmt: skip

    multiply = functools.partial(_start_products, gpu, transposed, x_smem, w_smem)
    multiprocessor = lax.axis_index("multiprocessor")

    def push():
        slots, loaded = sending
        gpu_peers.push(gpu, order, nvlink, x, recv_buffer, slots, loaded, arrived, multiprocessor, num_sms)

    _walk(gpu, order, num_sms, (full, empty), load, multiply, store, None if alone else push)

    @pl.when(lax.axis_index("warpgroup") < CONSUMERS)
    def _():
        gpu.wait_smem_to_gmem(0)


def _scatter_kernel(
    x,
    w,
    out,
    recv_buffer: Any,
    staging,
    memory,
    moving,
    *,
    gpu,
    order: Order,
    axis: str,
    transposed: bool,
    num_sms: int,
):
    """The matmul reduce-scatter, for one thread block: computes its tiles of x[block] · w for all blocks.

    A partial tile of another device's rows is sent to that device. In the last ring step the block is this device's
    own: the received partial tiles are added to it, and the sum is written to `out`.

    Args:
      x: GMEM input [A, rows, k].
      w: GMEM input [k, N], or [N, k] with `transposed`.
      out: GMEM output [rows, N]: this device's rows of the sum.
      recv_buffer: GMEM output [A - 1, rows, N] that remote GPUs write: block t has the partial results that were sent
        in ring step t. None for one device.
      staging: SMEM for `out`: [CONSUMERS, ROWS, columns]; for one device [CONSUMERS, 2, ROWS, columns].
      memory: (x stages, w stages, `full`, `empty`), from `_memory`.
      moving: (SMEM [CONSUMERS, 2, ROWS, columns], 2 · CONSUMERS barriers) for partial results that are sent or
        received; empty for one device.
      gpu: the module `jax.experimental.pallas.mosaic_gpu`.
      axis: mesh axis over which the rows of the result are scattered.
      num_sms: thread blocks of the grid.
    """
    tile, alone = order.tile, order.devices == 1
    x_smem, w_smem, full, empty = memory
    nvlink = DeviceGroup.of((axis,), (order.devices,))
    summed: Any = None if alone else gpu_peers.counts(gpu, (order.parts, order.column_tiles))

    def load(step_index, row, column):
        """The function that starts the TMA copies of the stages of a tile of x[block] · w."""
        block = order.block(step_index, nvlink.rank)

        def copies(i, slot, barrier):
            src_slice = pl.ds(row * tile.m, tile.m), pl.ds(i * tile.k, tile.k)
            gpu.copy_gmem_to_smem(x.at[block, *src_slice], x_smem.at[slot], barrier)
            _copy_weights(gpu, order, transposed, w, column, i, w_smem.at[slot], barrier)

        return copies

    def store(number, step_index, row, column, acc, warpgroup):
        """Send the warpgroup's `ROWS` rows of a tile, or, in the last ring step, add the received partial results and
        write the sum.

        First it signals the receiver of the tile before that this tile has arrived (`gpu_peers.signal_tile`).
        """
        first = row * tile.m + warpgroup * ROWS
        target = out.at[pl.ds(first, ROWS)]
        step = staging.shape[-1]

        def columns(left):
            return acc[:, left : left + step]

        if recv_buffer is None or summed is None:
            full_tile = staging.at[warpgroup]
            gpu_peers.write(gpu, target, column, tile.n, lambda left: columns(left).astype(out.dtype), full_tile)
            return
        travelling, landed = moving[0].at[warpgroup], moving[1]
        gpu_peers.signal_tile(gpu, order, nvlink, summed, number - num_sms, warpgroup)

        @pl.when(step_index < order.devices - 1)
        def _():
            gpu_peers.send(gpu, order, nvlink, recv_buffer, step_index, first, column, columns, travelling)

        @pl.when(step_index == order.devices - 1)
        def _():
            part = row * (tile.m // ROWS) + warpgroup
            pl.semaphore_wait(summed.at[part, column], order.devices - 1, decrement=False)
            gpu_peers.add_up(
                gpu, order, recv_buffer, target, first, column, columns, travelling,
                lambda slot: landed.at[warpgroup * 2 + slot], staging.at[warpgroup], gpu.Layout.WGMMA,
            )  # fmt: skip

    multiply = functools.partial(_start_products, gpu, transposed, x_smem, w_smem)
    _walk(gpu, order, num_sms, (full, empty), load, multiply, store)
    warpgroup = lax.axis_index("warpgroup")
    multiprocessor = lax.axis_index("multiprocessor")

    @pl.when(warpgroup < CONSUMERS)
    def _():
        if summed is not None:
            last = multiprocessor + (share(order.tiles, multiprocessor, num_sms) - 1) * num_sms
            gpu_peers.signal_tile(gpu, order, nvlink, summed, last, warpgroup)
        gpu.wait_smem_to_gmem(0)


def _memory(gpu: Any, order: Order, transposed: bool, dtype: Any) -> list[Any]:
    """Scratch of a kernel: stages of x and w in shared memory, and the barriers `full` and `empty`, one for each stage."""
    tile = order.tile
    w_tile = (tile.n, tile.k) if transposed else (tile.k, tile.n)
    return [
        smem(gpu, (tile.stages, tile.m, tile.k), dtype),
        smem(gpu, (tile.stages, *w_tile), dtype),
        gpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        gpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages),
    ]


def all_gather_matmul(
    x: jax.Array, w: jax.Array, order: Order, axis: str, *, transposed: bool, **options: Any
) -> jax.Array:
    """x[m, K] of all devices times w[K, n] ([n, K] with `transposed`) → [A, m, n]; options of `gpu_peers.gather`."""
    gpu = _compat.mosaic_gpu()
    return gpu_peers.gather(
        gpu, _gather_kernel, _memory(gpu, order, transposed, x.dtype), x, w, order,
        parts=(CONSUMERS,), warpgroups=CONSUMERS + 1, axis=axis, transposed=transposed, **options,
    )  # fmt: skip


def matmul_reduce_scatter(
    x: jax.Array, w: jax.Array, order: Order, axis: str, *, transposed: bool, **options: Any
) -> jax.Array:
    """x[A, M/A, k] times w[k, N] ([N, k] with `transposed`), summed over all devices → this one's rows, [M/A, N]; options of
    `gpu_peers.scatter`."""
    gpu = _compat.mosaic_gpu()
    return gpu_peers.scatter(
        gpu, _scatter_kernel, _memory(gpu, order, transposed, x.dtype), x, w, order,
        parts=(CONSUMERS,), warpgroups=CONSUMERS + 1, axis=axis, transposed=transposed, **options,
    )  # fmt: skip
