"""The fused matmuls on Hopper GPUs (sm_90a, Mosaic GPU): `wgmma` overlapped with copies over NVLink.

One block of threads on every multiprocessor walks the tiles of the result (`gpu_order`). A loading warpgroup and two multiplying
ones have stages of shared memory between them, which change hands as in `grouped_matmul.hopper`. In a gather another warp of the
loading warpgroup sends this device's rows (`gpu_peers.push`), and the loading one waits for the chunks of a tile's rows before it
loads them. A scatter's multiplying warpgroups send partial results and add up the received ones in the last step.

All blocks must be resident at once: a block that waits for a peer's block would otherwise keep other blocks from starting.
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
from meshpar_kernels._nvlink import Peers
from meshpar_kernels.collective_matmul import gpu_peers
from meshpar_kernels.collective_matmul.gpu_order import Order, share
from meshpar_kernels.grouped_matmul.gpu_parts import ROWS, smem
from meshpar_kernels.grouped_matmul.hopper import CONSUMERS, load_stages, multiply_stages

__all__ = ["CONSUMERS", "all_gather_matmul", "matmul_reduce_scatter"]

LOADING = CONSUMERS
"""The warpgroup after the multiplying ones."""

LOADER, SENDER = 0, 1
"""Its warps."""


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
    """The loading and the multiplying warpgroups' work.

    Args:
      stages: the barriers `full` and `empty`.
      load: (step index, row, column) → a function (K step, slot, barrier) that starts the copies of a stage.
      multiply: (accumulator, slot, warpgroup) → issues the `wgmma`s of one stage.
      store: writes a tile: (tile number, step, row, column, accumulator, warpgroup).
      concurrent: run by a second warp concurrently with the loading warp.
    """
    full, empty = stages
    warpgroup = lax.axis_index("warpgroup")
    multiprocessor = lax.axis_index("multiprocessor")
    num_own = share(order.tiles, multiprocessor, num_sms)

    def each_tile(work: Callable[..., None]) -> None:
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

        if concurrent is None:
            each_tile(load_tile)
            return
        other = concurrent

        @gpu.warp_map
        def _(warp):
            pl.when(warp == LOADER)(lambda: each_tile(load_tile))
            pl.when(warp == SENDER)(other)

    @pl.when(warpgroup < CONSUMERS)
    def _():
        gpu.set_max_registers(232, action="increase")

        def make_tile(number, step_index, row, column, step):
            def with_acc(acc):
                def matmuls(_, slot):
                    multiply(acc, slot, warpgroup)

                multiply_stages(gpu, step, order.steps, order.tile.stages, full, empty, matmuls)
                store(number, step_index, row, column, acc[...], warpgroup)

            pl.run_scoped(with_acc, gpu.ACC((ROWS, order.tile.n), jnp.float32))

        each_tile(make_tile)


def _copy_weights(gpu: Any, order: Order, transposed: bool, w: Any, column: Any, i: Any, dst: Any, barrier: Any):
    inner, outer = pl.ds(i * order.tile.k, order.tile.k), pl.ds(column * order.tile.n, order.tile.n)
    gpu.copy_gmem_to_smem(w.at[(outer, inner) if transposed else (inner, outer)], dst, barrier)


def _start_products(gpu: Any, transposed: bool, x_smem: Any, w_smem: Any, acc: Any, slot: Any, warpgroup: Any):
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
    tile, alone = order.tile, order.devices == 1
    x_smem, w_smem, full, empty = memory
    peers = Peers.of((axis,), (order.devices,))
    arrived: Any = None if alone else gpu_peers.counts(gpu, (order.devices - 1, order.row_tiles))

    def load(step_index, row, column):
        if arrived is not None:

            @pl.when(step_index > 0)
            def _():
                pl.semaphore_wait(arrived.at[step_index - 1, row], order.expected(row), decrement=False)

        def copies(i, slot, barrier):
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
        value = acc.astype(out.dtype)
        step = staging.shape[-1]
        target = out.at[order.block(step_index, peers.rank), pl.ds(row * tile.m + warpgroup * ROWS, ROWS)]
        gpu_peers.write(
            gpu, target, column, tile.n, lambda left: value[:, left : left + step], staging.at[warpgroup]
        )  # fmt: skip

    multiply = functools.partial(_start_products, gpu, transposed, x_smem, w_smem)
    multiprocessor = lax.axis_index("multiprocessor")

    def push():
        slots, loaded = sending
        gpu_peers.push(gpu, order, peers, x, recv_buffer, slots, loaded, arrived, multiprocessor, num_sms)

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
    tile, alone = order.tile, order.devices == 1
    x_smem, w_smem, full, empty = memory
    peers = Peers.of((axis,), (order.devices,))
    summed: Any = None if alone else gpu_peers.counts(gpu, (order.parts, order.column_tiles))

    def load(step_index, row, column):
        block = order.block(step_index, peers.rank)

        def copies(i, slot, barrier):
            src_slice = pl.ds(row * tile.m, tile.m), pl.ds(i * tile.k, tile.k)
            gpu.copy_gmem_to_smem(x.at[block, *src_slice], x_smem.at[slot], barrier)
            _copy_weights(gpu, order, transposed, w, column, i, w_smem.at[slot], barrier)

        return copies

    def store(number, step_index, row, column, acc, warpgroup):
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
        gpu_peers.signal_tile(gpu, order, peers, summed, number - num_sms, warpgroup)

        @pl.when(step_index < order.devices - 1)
        def _():
            gpu_peers.send(gpu, order, peers, recv_buffer, step_index, first, column, columns, travelling)

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
            gpu_peers.signal_tile(gpu, order, peers, summed, last, warpgroup)
        gpu.wait_smem_to_gmem(0)


def _memory(gpu: Any, order: Order, transposed: bool, dtype: Any) -> list[Any]:
    """Stages of both operands, and their barriers."""
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
