"""The kernels of the fused matmuls on GPUs, for Hopper and Blackwell.

The grid has one thread block for each multiprocessor; block b computes the tiles b, b + num_sms, … of the result, in
the order of `gpu_order.BlockOrder`. The modules `gpu_hopper` and `gpu_blackwell` have the loops over these tiles (`walk`), with
the roles of a block's warps. In a gather one warp or warpgroup sends this device's rows (`gpu_peers.push`).

All blocks must be resident at once: a block that waits for data of a remote block would otherwise keep other blocks
from starting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels._nvlink import DeviceGroup
from meshpar_kernels.collective_matmul import gpu_peers
from meshpar_kernels.collective_matmul.gpu_hopper import Roles
from meshpar_kernels.collective_matmul.gpu_order import PIECE, BlockOrder
from meshpar_kernels.grouped_matmul.gpu_common import share, smem, staging_columns, write
from meshpar_kernels.grouped_matmul.gpu_launch import launch


def _loads(
    gpu: Any, order: BlockOrder, transposed: bool, w: Any, memory: list[Any], rows_of: Callable[..., Any]
) -> Any:
    """`Roles.load`: the copies of x and w.

    Args:
      rows_of: (ring step, row tile) → function (K step, dst, barrier) that starts the copy of a stage of x.
    """
    (x_smem, w_smem, *_), tile = memory, order.tile

    def load(tile_at):
        _, step_index, row, column = tile_at
        copy_rows = rows_of(step_index, row)

        def copies(i, slot, barrier):
            """Start the TMA copies of K step i of x and w into stage `slot`; both count at `barrier`."""
            copy_rows(i, x_smem.at[slot], barrier)
            inner, outer = pl.ds(i * tile.k, tile.k), pl.ds(column * tile.n, tile.n)
            gpu.copy_gmem_to_smem(w.at[(outer, inner) if transposed else (inner, outer)], w_smem.at[slot], barrier)

        return copies

    return load


class FusedRefs(NamedTuple):
    """The refs of a kernel.

    Attributes:
      x: GMEM input, [rows, K] of this device (gather), or [A, rows, k] (scatter).
      w: GMEM input [K, n], or [n, K] with `transposed`.
      out: GMEM output, [A, rows, n] (gather), or this device's rows of the sum, [rows, N] (scatter).
      recv_buffer: GMEM output [A - 1, rows, K] (gather) or [A - 1, rows, N] (scatter) that remote GPUs write. None for one
        device.
      staging: SMEM for `out`: for each part the two slots of `write`, [PARTS, 2, rows of a part, columns]; for a scatter
        over several devices [PARTS, rows of a part, columns].
      memory: refs of `arch.memory`.
      moving: (SMEM slots, barriers) for communication; empty for one device.
    """

    x: Any
    w: Any
    out: Any
    recv_buffer: Any
    staging: Any
    memory: list[Any]
    moving: list[Any]


def _gather_kernel(refs: FusedRefs, *, gpu, arch, order: BlockOrder, axis: str, transposed: bool, num_sms: int):
    """The all-gather matmul, for one thread block: computes its tiles of out[block] = x of each device · w. Block h of the
    receive buffer is multiplied in ring step h + 1.

    Args:
      refs: `moving` is of `gpu_peers.push`.
      gpu: the module `jax.experimental.pallas.mosaic_gpu`.
      arch: `gpu_hopper` or `gpu_blackwell`.
      axis: mesh axis over which the rows are sharded.
      num_sms: thread blocks of the grid.
    """
    x, w, out, recv_buffer, staging, memory, sending = refs
    tile, alone = order.tile, order.devices == 1
    nvlink = DeviceGroup.of((axis,), (order.devices,))
    arrived: Any = None if alone else gpu_peers.counts(gpu, (order.devices - 1, order.row_tiles))
    multiprocessor = lax.axis_index("multiprocessor")  # not available in a function of one warp

    def rows_of(step_index, row):
        """Wait until the rows of a tile have arrived; return the function that starts the copies of its stages.

        Ring step 0 reads this device's own rows, and waits for nothing.
        """
        if arrived is not None:

            @pl.when(step_index > 0)
            def _():
                pl.semaphore_wait(arrived.at[step_index - 1, row], order.expected(row), decrement=False)

        def copy_rows(i, dst, barrier):
            src_slice = pl.ds(row * tile.m, tile.m), pl.ds(i * tile.k, tile.k)

            @pl.when(step_index == 0)
            def _():
                gpu.copy_gmem_to_smem(x.at[src_slice], dst, barrier)

            if recv_buffer is not None:

                @pl.when(step_index > 0)
                def _():
                    gpu.copy_gmem_to_smem(recv_buffer.at[step_index - 1, *src_slice], dst, barrier)

        return copy_rows

    def store(_, step_index, row, column, part, columns):
        """Write a part of the rows of a tile, in the dtype of `out`."""
        height, width = staging.shape[2:]
        target = out.at[order.block(step_index, nvlink.rank), pl.ds(row * tile.m + part * height, height)]
        values = functools.partial(_as_dtype, columns, width, out.dtype)
        write(gpu, target, column, tile.n, values, staging.at[part])

    def push():
        slots, loaded = sending
        gpu_peers.push(gpu, order, nvlink, x, recv_buffer, slots, loaded, arrived, multiprocessor, num_sms)

    load = _loads(gpu, order, transposed, w, memory, rows_of)
    roles = Roles(load, store, push=None if alone else push)
    arch.walk(gpu, order, num_sms, memory, transposed, roles)


def _as_dtype(columns: Callable[[int, int], jax.Array], width: int, dtype: Any, left: int) -> jax.Array:
    return columns(left, width).astype(dtype)


def _scatter_kernel(refs: FusedRefs, *, gpu, arch, order: BlockOrder, axis: str, transposed: bool, num_sms: int):
    """The matmul reduce-scatter, for one thread block: computes its tiles of x[block] · w for all blocks.

    A partial tile of another device's rows is sent to that device. In the last ring step the block is this device's
    own: the received partial tiles are added to it, and the sum is written to `out`. Block t of the receive buffer has the
    partial results that were sent in ring step t.

    Args:
      refs: `moving` has SMEM [PARTS, 2, rows of a part, columns] for partial results that are sent or received, and
        2 · PARTS barriers.
      gpu, arch, num_sms: as in `_gather_kernel`.
      axis: mesh axis over which the rows of the result are scattered.
    """
    x, w, out, recv_buffer, staging, memory, moving = refs
    tile, parts, alone = order.tile, arch.PARTS, order.devices == 1
    nvlink = DeviceGroup.of((axis,), (order.devices,))
    summed: Any = None if alone else gpu_peers.counts(gpu, (order.row_tiles * parts, order.column_tiles))

    def rows_of(step_index, row):
        block = order.block(step_index, nvlink.rank)

        def copy_rows(i, dst, barrier):
            src_slice = block, pl.ds(row * tile.m, tile.m), pl.ds(i * tile.k, tile.k)
            gpu.copy_gmem_to_smem(x.at[src_slice], dst, barrier)

        return copy_rows

    def store(number, step_index, row, column, part, columns):
        """Send a part of the rows of a tile, or, in the last ring step, add the received partial results and write the
        sum.

        First it signals the receiver of the tile before that this tile has arrived (`gpu_peers.signal_tile`).
        """
        height, width = staging.shape[-2:]
        first = row * tile.m + part * height
        target = out.at[pl.ds(first, height)]
        if recv_buffer is None or summed is None:
            values = functools.partial(_as_dtype, columns, width, out.dtype)
            write(gpu, target, column, tile.n, values, staging.at[part])
            return
        travelling, landed = moving[0].at[part], moving[1]
        gpu_peers.signal_tile(gpu, order, nvlink, summed, number - num_sms, part)

        def own(left):
            return columns(left, width)

        @pl.when(step_index < order.devices - 1)
        def _():
            gpu_peers.send(gpu, order, nvlink, recv_buffer, step_index, first, column, own, travelling)

        @pl.when(step_index == order.devices - 1)
        def _():
            pl.semaphore_wait(summed.at[row * parts + part, column], order.devices - 1, decrement=False)
            gpu_peers.add_up(
                gpu, order, recv_buffer, target, first, column, own, travelling,
                lambda slot: landed.at[part * 2 + slot], staging.at[part], getattr(gpu.Layout, arch.LAYOUT),
            )  # fmt: skip

    def finish(part):
        """Signal the receiver of the last tile that it has arrived."""
        if summed is not None:
            multiprocessor = lax.axis_index("multiprocessor")
            last = multiprocessor + (share(order.tiles, multiprocessor, num_sms) - 1) * num_sms
            gpu_peers.signal_tile(gpu, order, nvlink, summed, last, part)

    roles = Roles(_loads(gpu, order, transposed, w, memory, rows_of), store, finish)
    arch.walk(gpu, order, num_sms, memory, transposed, roles)


def _launch(
    arch: Any, kernel: Callable[..., None], x: jax.Array, w: jax.Array, order: BlockOrder, results: list[Any], staging: Any,
    moving: list[Any], *, transposed: bool, **options: Any,
) -> jax.Array:  # fmt: skip
    """Launch `kernel`; return its first result. One device gets no receive buffer and no `moving`.

    Args:
      results: shapes and dtypes of the result and of the receive buffer, which remote GPUs write.
      staging, moving: scratch for results, and for communication.
      options: options of `launch`, and further keyword arguments of the kernel.
    """
    alone, memory = order.devices == 1, arch.memory(_compat.mosaic_gpu(), order, transposed, x.dtype)

    def body(x: Any, w: Any, out: Any, *refs: Any, **options: Any) -> None:
        recv_buffer, staging, *rest = (None, *refs) if alone else refs
        own, moving = rest[: len(memory)], rest[len(memory) :]
        refs = FusedRefs(x, w, out, recv_buffer, staging, own, moving)
        kernel(refs, arch=arch, order=order, transposed=transposed, **options)

    found = launch(
        body, results[0] if alone else results, [staging, *memory, *([] if alone else moving)], (x, w),
        warpgroups=arch.warpgroups(kernel is _gather_kernel and not alone), **options,
    )  # fmt: skip
    return found if alone else found[0]


def _staging(gpu: Any, arch: Any, order: BlockOrder, out_dtype: Any) -> Any:
    """SMEM for the two slots of `write` of each part: [PARTS, 2, rows of a part, columns]."""
    width = staging_columns(order.tile.n, out_dtype)
    return smem(gpu, (arch.PARTS, 2, order.tile.m // arch.PARTS, width), out_dtype)


def all_gather_matmul(
    arch: Any, x: jax.Array, w: jax.Array, order: BlockOrder, axis: str, *, out_dtype: Any, **options: Any
) -> jax.Array:
    """x[m, K] of all devices times w[K, n] ([n, K] with `transposed`) → [A, m, n].

    Args:
      arch: `gpu_hopper` or `gpu_blackwell`.
      options: transposed and num_sms.
    """
    gpu, (rows, k) = _compat.mosaic_gpu(), x.shape
    out = _compat.out_struct((order.devices, rows, order.n), out_dtype, x, w)
    recv_buffer = _compat.out_struct((order.devices - 1, rows, k), x.dtype, x, w)
    slots = gpu_peers.SLOTS
    moving = [gpu.SMEM((slots, PIECE, PIECE), x.dtype), gpu.Barrier(num_barriers=slots)]
    return _launch(
        arch, _gather_kernel, x, w, order, [out, recv_buffer], _staging(gpu, arch, order, out_dtype), moving,
        name="all_gather_matmul", axis=axis, **options,
    )  # fmt: skip


def matmul_reduce_scatter(
    arch: Any,
    x: jax.Array,
    w: jax.Array,
    order: BlockOrder,
    axis: str,
    *,
    out_dtype: Any,
    comm_dtype: Any,
    **options: Any,
) -> jax.Array:
    """x[A, M/A, k] times w[k, N] ([N, k] with `transposed`), summed over all devices → this one's rows, [M/A, N].

    Args:
      arch, options: as in `all_gather_matmul`.
      comm_dtype: dtype in which partial results are sent.
    """
    gpu, parts = _compat.mosaic_gpu(), arch.PARTS
    out = _compat.out_struct((order.rows, order.n), out_dtype, x, w)
    recv_buffer = _compat.out_struct((order.devices - 1, order.rows, order.n), comm_dtype, x, w)
    shape = order.tile.m // parts, gpu_peers.COLUMNS
    moving = [smem(gpu, (parts, 2, *shape), comm_dtype), gpu.Barrier(num_barriers=2 * parts)]
    alone = order.devices == 1
    staging = _staging(gpu, arch, order, out_dtype) if alone else smem(gpu, (parts, *shape), out_dtype)
    return _launch(
        arch, _scatter_kernel, x, w, order, [out, recv_buffer], staging, moving, name="matmul_reduce_scatter", axis=axis,
        **options,
    )  # fmt: skip
