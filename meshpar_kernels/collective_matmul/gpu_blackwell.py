"""The fused products on Blackwell GPUs (sm_100a, Mosaic GPU): `tcgen05` while NVLink brings or takes rows.

As on Hopper (`gpu_hopper`), with other roles. One warp loads, one starts the products, a warpgroup writes, sends or adds up; the
sums have two slots in tensor memory, so that a tile is multiplied while the one before leaves. A gather has a third
warpgroup, which sends this device's rows.

- `full[s]`: all copies of a stage have landed. `empty[s]`: its products are done, as the tensor core reports.
- `done[a]`: the sums of slot a are complete. `read[a]`: the writing warpgroup is done with them.
"""

from __future__ import annotations

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
from meshpar_kernels.grouped_matmul.gpu_parts import ring, smem

__all__ = ["all_gather_matmul", "matmul_reduce_scatter"]

LOADER, MULTIPLIER = 0, 1
"""Warps of the first warpgroup."""

MULTIPLYING, WRITER, SENDER = 0, 1, 2
"""Warpgroups."""


def _multiply_tile(
    gpu: Any, order: Order, w: Any, column: Any, step: Any, used: Any, memory: tuple[Any, ...],
    ready: Callable[[], None], copy_rows: Callable[..., None], transposed: bool,
) -> None:  # fmt: skip
    """The loads and the products of a tile; steps count from `step`, slots of sums from `used`."""
    x_smem, w_smem, sums, full, empty, done, read = memory
    tile = order.tile
    slot = lax.rem(used, jnp.int32(2))
    total = sums.at[:, pl.ds(slot * tile.n, tile.n)]

    @gpu.warp_map
    def _(warp):
        @pl.when(warp == LOADER)
        def _():
            ready()

            def load(i, _):
                stage = ring(tile.stages, step + i)

                @pl.when(step + i >= tile.stages)
                def _():
                    gpu.barrier_wait(empty.at[stage])

                inner, outer = pl.ds(i * tile.k, tile.k), pl.ds(column * tile.n, tile.n)
                copy_rows(inner, x_smem.at[stage], full.at[stage])
                gpu.copy_gmem_to_smem(
                    w.at[(outer, inner) if transposed else (inner, outer)], w_smem.at[stage], full.at[stage]
                )

            lax.fori_loop(0, order.steps, load, None)

        @pl.when(warp == MULTIPLIER)
        def _():
            @pl.when(used >= 2)
            def _():
                gpu.barrier_wait(read.at[slot])

            def product(i, _):
                stage = ring(tile.stages, step + i)
                gpu.barrier_wait(full.at[stage])
                weights = _compat.transpose_ref(w_smem.at[stage]) if transposed else w_smem.at[stage]
                gpu.tcgen05_mma(total, x_smem.at[stage], weights, accumulate=i > 0)
                gpu.tcgen05_commit_arrive(empty.at[stage])

            lax.fori_loop(0, order.steps, product, None)
            gpu.tcgen05_commit_arrive(done.at[slot])


def _walk(
    gpu: Any, order: Order, num_sms: int, memory: tuple[Any, ...], multiply: Callable[..., None],
    store: Callable[..., None],
) -> None:  # fmt: skip
    """The first two warpgroups' work.

    Args:
      multiply: (turn, row, column, step, tiles so far) → the loads and products of a tile.
      store: what writes a tile: (its number, turn, row, column, its sums in float32: first column, columns → values).
    """
    sums, done, read = memory[2], memory[-2], memory[-1]
    warpgroup = lax.axis_index("warpgroup")
    multiprocessor = lax.axis_index("multiprocessor")

    def one(i, _):
        number = multiprocessor + i * num_sms
        turn, row, column = order.at(number)

        @pl.when(warpgroup == MULTIPLYING)
        def _():
            multiply(turn, row, column, i * order.steps, i)

        @pl.when(warpgroup == WRITER)
        def _():
            slot = lax.rem(i, jnp.int32(2))
            gpu.barrier_wait(done.at[slot])

            def columns(left, width):
                there = sums.at[:, pl.ds(slot * order.tile.n + left, width)]
                return gpu.async_load_tmem(there, layout=gpu.Layout.TCGEN05)

            store(number, turn, row, column, columns)
            gpu.wait_load_tmem()
            gpu.barrier_arrive(read.at[slot])

    lax.fori_loop(0, share(order.tiles, multiprocessor, num_sms), one, None)


def _gather_kernel(
    x, w, out, came: Any, staging, memory, sending, *, gpu, order: Order, axis: str, transposed: bool, num_sms: int
):
    tile, alone = order.tile, order.devices == 1
    peers = Peers.of((axis,), (order.devices,))
    arrived: Any = None if alone else gpu_peers.counts(gpu, (order.devices - 1, order.row_tiles))

    def multiply(turn, row, column, step, used):
        def ready():
            if arrived is not None:

                @pl.when(turn > 0)
                def _():
                    pl.semaphore_wait(arrived.at[turn - 1, row], order.expected(row), decrement=False)

        def copy_rows(inner, there, barrier):
            here = pl.ds(row * tile.m, tile.m), inner

            @pl.when(turn == 0)
            def _():
                gpu.copy_gmem_to_smem(x.at[here], there, barrier)

            if came is not None:

                @pl.when(turn > 0)
                def _():
                    gpu.copy_gmem_to_smem(came.at[turn - 1, *here], there, barrier)

        _multiply_tile(gpu, order, w, column, step, used, memory, ready, copy_rows, transposed)

    def store(_, turn, row, column, columns):
        target = out.at[order.block(turn, peers.rank), pl.ds(row * tile.m, tile.m)]
        width = staging.shape[-1]
        gpu_peers.write(gpu, target, column, tile.n, lambda left: columns(left, width).astype(out.dtype), staging)

    _walk(gpu, order, num_sms, memory, multiply, store)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == WRITER)
    def _():
        gpu.wait_smem_to_gmem(0)

    if not alone:

        @pl.when(warpgroup == SENDER)
        def _():
            slots, loaded = sending
            multiprocessor = lax.axis_index("multiprocessor")
            gpu_peers.push(gpu, order, peers, x, came, slots, loaded, arrived, multiprocessor, num_sms)


def _scatter_kernel(
    x, w, out, came: Any, staging, memory, moving, *, gpu, order: Order, axis: str, transposed: bool, num_sms: int
):
    tile, alone = order.tile, order.devices == 1
    peers = Peers.of((axis,), (order.devices,))
    summed: Any = None if alone else gpu_peers.counts(gpu, (order.row_tiles, order.column_tiles))

    def multiply(turn, row, column, step, used):
        def copy_rows(inner, there, barrier):
            here = order.block(turn, peers.rank), pl.ds(row * tile.m, tile.m), inner
            gpu.copy_gmem_to_smem(x.at[here], there, barrier)

        _multiply_tile(gpu, order, w, column, step, used, memory, lambda: None, copy_rows, transposed)

    def store(number, turn, row, column, columns):
        first = row * tile.m
        target = out.at[pl.ds(first, tile.m)]
        width = staging.shape[-1]
        if came is None or summed is None:
            gpu_peers.write(gpu, target, column, tile.n, lambda left: columns(left, width).astype(out.dtype), staging)
            return
        travelling, landed = moving
        gpu_peers.tell(gpu, order, peers, summed, number - num_sms, 0)

        @pl.when(turn < order.devices - 1)
        def _():
            gpu_peers.send(
                gpu, order, peers, came, turn, first, column, lambda left: columns(left, width), travelling
            )  # fmt: skip

        @pl.when(turn == order.devices - 1)
        def _():
            pl.semaphore_wait(summed.at[row, column], order.devices - 1, decrement=False)
            gpu_peers.add_up(
                gpu, order, came, target, first, column, lambda left: columns(left, width), travelling,
                lambda slot: landed.at[slot], staging, gpu.Layout.TCGEN05,
            )  # fmt: skip

    _walk(gpu, order, num_sms, memory, multiply, store)
    multiprocessor = lax.axis_index("multiprocessor")

    @pl.when(lax.axis_index("warpgroup") == WRITER)
    def _():
        if summed is not None:
            last = multiprocessor + (share(order.tiles, multiprocessor, num_sms) - 1) * num_sms
            gpu_peers.tell(gpu, order, peers, summed, last, 0)
        gpu.wait_smem_to_gmem(0)


def _memory(gpu: Any, order: Order, transposed: bool, dtype: Any) -> list[Any]:
    """Stages, sums, and their barriers, as `_multiply_tile` takes them."""
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
