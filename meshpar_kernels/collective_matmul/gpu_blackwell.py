"""The fused matmuls on Blackwell GPUs (sm_100a, Mosaic GPU): `tcgen05` overlapped with copies over NVLink.

The grid and the order of tiles are as on Hopper (`gpu_hopper`); the roles of the warps differ. One warp loads and one
issues the matmuls. A second warpgroup writes, sends or adds up tiles. The accumulators have two slots in tensor memory,
so that one tile is multiplied while the tile before it is written or sent. A gather has a third warpgroup, which sends
this device's rows.

The protocol of stages and accumulator slots is the protocol of `grouped_matmul.blackwell`.
"""

from __future__ import annotations

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
from meshpar_kernels.grouped_matmul.blackwell import multiply_tiles
from meshpar_kernels.grouped_matmul.gpu_parts import smem

__all__ = ["all_gather_matmul", "matmul_reduce_scatter"]

MULTIPLYING, WRITER, SENDER = 0, 1, 2
"""Indices of the warpgroups."""


def _walk(
    gpu: Any, order: Order, num_sms: int, memory: tuple[Any, ...], transposed: bool, w: Any,
    copy_rows: Callable[..., None], store: Callable[..., None],
) -> None:  # fmt: skip
    """The loop over this block's tiles, for the warpgroups `MULTIPLYING` and `WRITER`.

    Args:
      num_sms: thread blocks of the grid.
      memory: (x stages, w stages, TMEM accumulators [m, 2 · n], barriers `full`, `empty`, `done`, `read`), from
        `_memory`.
      copy_rows: (ring step, row tile, K step, stage, barrier): starts the TMA copy of a stage of x, once its rows have
        arrived.
      store: (tile number, ring step, row tile, column tile, columns): writes or sends a tile; `columns(first, width)`
        loads float32 columns of its accumulator into registers.
    """
    x_smem, w_smem, acc, full, empty, done, read = memory
    tile = order.tile
    warpgroup = lax.axis_index("warpgroup")
    multiprocessor = lax.axis_index("multiprocessor")

    def slot_of(used):
        slot = lax.rem(used, jnp.int32(2))
        return slot, acc.at[:, pl.ds(slot * tile.n, tile.n)]

    def each_tile(work):
        """Call `work((tile number, ring step, row tile, column tile), K steps, K steps before, tiles before)` for each
        tile of this block."""

        def one(i, _):
            number = multiprocessor + i * num_sms
            work((number, *order.at(number)), order.steps, i * order.steps, i)

        num_own = share(order.tiles, multiprocessor, num_sms)
        lax.fori_loop(0, num_own, one, None)
        return num_own * order.steps, num_own

    def copies(tile_at, i, stage, barrier):
        _, step_index, row, column = tile_at
        copy_rows(step_index, row, i, x_smem.at[stage], barrier)
        inner, outer = pl.ds(i * tile.k, tile.k), pl.ds(column * tile.n, tile.n)
        gpu.copy_gmem_to_smem(w.at[(outer, inner) if transposed else (inner, outer)], w_smem.at[stage], barrier)

    def matmuls(_, i, stage, total):
        weights = _compat.transpose_ref(w_smem.at[stage]) if transposed else w_smem.at[stage]
        gpu.tcgen05_mma(total, x_smem.at[stage], weights, accumulate=i > 0)

    def write_tile(tile_at, steps, step, used):
        """Wait until the accumulator is complete, store the tile, and release the accumulator slot (`read`)."""
        del steps, step
        slot, total = slot_of(used)
        gpu.barrier_wait(done.at[slot])

        def columns(left, width):
            return gpu.async_load_tmem(total.at[:, pl.ds(left, width)], layout=gpu.Layout.TCGEN05)

        store(*tile_at, columns)
        gpu.wait_load_tmem()
        gpu.barrier_arrive(read.at[slot])

    @pl.when(warpgroup == MULTIPLYING)
    def _():
        multiply_tiles(gpu, tile.stages, slot_of, (full, empty, done, read), each_tile, copies, matmuls)

    @pl.when(warpgroup == WRITER)
    def _():
        each_tile(write_tile)


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
      staging: SMEM [2, m, columns], the two slots of `gpu_peers.write`.
      memory: as in `_walk`.
      sending: (SMEM slots, barriers) of `gpu_peers.push`; empty for one device.
      gpu: the module `jax.experimental.pallas.mosaic_gpu`.
      axis: mesh axis over which the rows are sharded.
      num_sms: thread blocks of the grid.
    """
    tile, alone = order.tile, order.devices == 1
    nvlink = DeviceGroup.of((axis,), (order.devices,))
    arrived: Any = None if alone else gpu_peers.counts(gpu, (order.devices - 1, order.row_tiles))

    def copy_rows(step_index, row, i, dst, barrier):
        """Start the copy of the rows of K step i into `dst`: of x in ring step 0, else of the receive buffer.

        The first K step of a received tile waits until all chunks of the tile's rows have arrived.
        """
        src_slice = pl.ds(row * tile.m, tile.m), pl.ds(i * tile.k, tile.k)

        @pl.when(step_index == 0)
        def _():
            gpu.copy_gmem_to_smem(x.at[src_slice], dst, barrier)

        if recv_buffer is not None and arrived is not None:

            @pl.when((step_index > 0) & (i == 0))
            def _():
                pl.semaphore_wait(arrived.at[step_index - 1, row], order.expected(row), decrement=False)

            @pl.when(step_index > 0)
            def _():
                gpu.copy_gmem_to_smem(recv_buffer.at[step_index - 1, *src_slice], dst, barrier)

    def store(_, step_index, row, column, columns):
        target = out.at[order.block(step_index, nvlink.rank), pl.ds(row * tile.m, tile.m)]
        width = staging.shape[-1]
        gpu_peers.write(gpu, target, column, tile.n, lambda left: columns(left, width).astype(out.dtype), staging)

    _walk(gpu, order, num_sms, memory, transposed, w, copy_rows, store)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == WRITER)
    def _():
        gpu.wait_smem_to_gmem(0)

    if not alone:

        @pl.when(warpgroup == SENDER)
        def _():
            slots, loaded = sending
            multiprocessor = lax.axis_index("multiprocessor")
            gpu_peers.push(gpu, order, nvlink, x, recv_buffer, slots, loaded, arrived, multiprocessor, num_sms)


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
      staging: SMEM for `out`: [m, columns]; for one device [2, m, columns].
      memory: as in `_walk`.
      moving: (SMEM [2, m, columns], two barriers) for partial results that are sent or received; empty for one device.
      gpu: the module `jax.experimental.pallas.mosaic_gpu`.
      axis: mesh axis over which the rows of the result are scattered.
      num_sms: thread blocks of the grid.
    """
    tile, alone = order.tile, order.devices == 1
    nvlink = DeviceGroup.of((axis,), (order.devices,))
    summed: Any = None if alone else gpu_peers.counts(gpu, (order.row_tiles, order.column_tiles))

    def copy_rows(step_index, row, i, dst, barrier):
        src_slice = order.block(step_index, nvlink.rank), pl.ds(row * tile.m, tile.m), pl.ds(i * tile.k, tile.k)
        gpu.copy_gmem_to_smem(x.at[src_slice], dst, barrier)

    def store(number, step_index, row, column, columns):
        """Send a tile, or, in the last ring step, add the received partial results to it and write the sum.

        First it signals the receiver of the tile before that this tile has arrived (`gpu_peers.signal_tile`).
        """
        first = row * tile.m
        target = out.at[pl.ds(first, tile.m)]
        width = staging.shape[-1]
        if recv_buffer is None or summed is None:
            gpu_peers.write(gpu, target, column, tile.n, lambda left: columns(left, width).astype(out.dtype), staging)
            return
        travelling, landed = moving
        gpu_peers.signal_tile(gpu, order, nvlink, summed, number - num_sms, 0)

        @pl.when(step_index < order.devices - 1)
        def _():
            gpu_peers.send(
                gpu, order, nvlink, recv_buffer, step_index, first, column, lambda left: columns(left, width), travelling
            )  # fmt: skip

        @pl.when(step_index == order.devices - 1)
        def _():
            pl.semaphore_wait(summed.at[row, column], order.devices - 1, decrement=False)
            gpu_peers.add_up(
                gpu, order, recv_buffer, target, first, column, lambda left: columns(left, width), travelling,
                lambda slot: landed.at[slot], staging, gpu.Layout.TCGEN05,
            )  # fmt: skip

    _walk(gpu, order, num_sms, memory, transposed, w, copy_rows, store)
    multiprocessor = lax.axis_index("multiprocessor")

    @pl.when(lax.axis_index("warpgroup") == WRITER)
    def _():
        if summed is not None:
            last = multiprocessor + (share(order.tiles, multiprocessor, num_sms) - 1) * num_sms
            gpu_peers.signal_tile(gpu, order, nvlink, summed, last, 0)
        gpu.wait_smem_to_gmem(0)


def _memory(gpu: Any, order: Order, transposed: bool, dtype: Any) -> list[Any]:
    """Scratch buffers for stages and accumulators, and their barriers, in the order of `_walk`'s `memory`."""
    tile = order.tile
    w_tile = (tile.n, tile.k) if transposed else (tile.k, tile.n)
    tensor_core = {"num_arrivals": 1, "orders_tensor_core": True}
    return [
        smem(gpu, (tile.stages, tile.m, tile.k), dtype),
        smem(gpu, (tile.stages, *w_tile), dtype),
        gpu.TMEM((tile.m, 2 * tile.n), jnp.float32),
        gpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        gpu.Barrier(num_barriers=tile.stages, **tensor_core),
        gpu.Barrier(num_barriers=2, **tensor_core),
        gpu.Barrier(num_barriers=2, **tensor_core),
    ]


def all_gather_matmul(
    x: jax.Array, w: jax.Array, order: Order, axis: str, *, transposed: bool, **options: Any
) -> jax.Array:
    """x[m, K] of all devices times w[K, n] ([n, K] with `transposed`) → [A, m, n]; options of `gpu_peers.gather`."""
    gpu = _compat.mosaic_gpu()
    return gpu_peers.gather(
        gpu, _gather_kernel, _memory(gpu, order, transposed, x.dtype), x, w, order,
        parts=(), warpgroups=2 if order.devices == 1 else 3, axis=axis, transposed=transposed, **options,
    )  # fmt: skip


def matmul_reduce_scatter(
    x: jax.Array, w: jax.Array, order: Order, axis: str, *, transposed: bool, **options: Any
) -> jax.Array:
    """x[A, M/A, k] times w[k, N] ([N, k] with `transposed`), summed over all devices → this one's rows, [M/A, N]; options of
    `gpu_peers.scatter`."""
    gpu = _compat.mosaic_gpu()
    return gpu_peers.scatter(
        gpu, _scatter_kernel, _memory(gpu, order, transposed, x.dtype), x, w, order,
        parts=(), warpgroups=2, axis=axis, transposed=transposed, **options,
    )  # fmt: skip
