"""The fused matmuls on NVIDIA GPUs with NVLink (Mosaic GPU): choice of kernel and tile, and reasons why none can run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._nvlink import machine_reasons
from meshpar_kernels.collective_matmul import gpu_blackwell, gpu_hopper, gpu_kernels
from meshpar_kernels.collective_matmul.dot_dims import Axes
from meshpar_kernels.collective_matmul.gpu_order import PIECE, BlockOrder
from meshpar_kernels.collective_matmul.gpu_peers import COLUMNS, SLOTS
from meshpar_kernels.grouped_matmul.gpu import DTYPES, INNER, MOST_STAGES, ROW_BYTES, SMEM_BYTES
from meshpar_kernels.grouped_matmul.gpu_common import ROWS, Tile, misaligned, tile_columns
from meshpar_kernels.grouped_matmul.schedule import ALIGNMENT

KERNELS = {9: gpu_hopper, 10: gpu_blackwell}
"""Major number of the compute capability → module of the loops of the kernels."""

HEIGHT = 2 * ROWS
"""Rows of a tile."""

RESERVED = 32
"""Multiprocessors (SMs) that the kernels leave free by default: the largest number of blocks of an NCCL collective.

Without free multiprocessors both could deadlock: the kernel on GPU 0 waits for blocks on GPU 1 that NCCL keeps from starting,
and NCCL on GPU 1 waits for its blocks on GPU 0, which the kernel keeps from starting."""

SPARE = 1024
"""Bytes of shared memory for barriers."""


def _tile(n: int, itemsize: int, taken: int) -> Tile:
    """The widest tile with few padding columns, with as many stages as fit in shared memory in addition to `taken`
    bytes."""
    width = next((w for w in (256, 128, 64) if -(-n // w) * w <= 1.1 * n), 64)
    stage = (HEIGHT + width) * INNER * itemsize
    return Tile(HEIGHT, width, INNER, min(MOST_STAGES, (SMEM_BYTES - SPARE - taken) // stage))


def gather_order(rows: int, k: int, n: int, devices: int, itemsize: int) -> BlockOrder:
    """Tiles of `all_gather_matmul` for blocks of `rows` rows; results are staged in two slots, 128 bytes of columns
    wide."""
    num_chunks = SLOTS * PIECE * PIECE * itemsize if devices > 1 else 0
    return BlockOrder(devices, rows, k, n, _tile(n, itemsize, 2 * HEIGHT * 128 + num_chunks), own_first=True)


def scatter_order(
    rows: int, k: int, n: int, devices: int, itemsize: int, *, comm_dtype: Any, out_dtype: Any
) -> BlockOrder:
    """Tile of `matmul_reduce_scatter` for blocks of `rows` rows; partial results have two slots in shared memory, results one."""
    taken = HEIGHT * COLUMNS * (2 * jnp.dtype(comm_dtype).itemsize + jnp.dtype(out_dtype).itemsize)
    return BlockOrder(
        devices, rows, k, n, _tile(n, itemsize, taken if devices > 1 else 2 * HEIGHT * 128), own_first=False
    )


def blocks_of(num_sms: int | None) -> int:
    """Thread blocks of the grid: `num_sms` if given, else all multiprocessors of an H100, H200 or B200 except
    `RESERVED`."""
    return num_sms or {10: 148}.get(_compat.gpu_architecture()[0], 132) - RESERVED


def all_gather_matmul(
    x: jax.Array, w: jax.Array, axis_name: Axes, order: BlockOrder, *, out_dtype: Any, transposed: bool,
    num_sms: int | None = None,
) -> jax.Array:  # fmt: skip
    """x[m, K] of all devices times w[K, n] ([n, K] with `transposed`) → [A·m, n], by `blocks_of(num_sms)`."""
    arch = KERNELS[_compat.gpu_architecture()[0]]
    options = {"out_dtype": out_dtype, "transposed": transposed, "num_sms": blocks_of(num_sms)}
    out = gpu_kernels.all_gather_matmul(arch, x, w, order, _axis(axis_name), **options)
    out = _compat.same_varying(out, x, w)[0]  # Mosaic GPU results lose their varying mesh axes
    return out.reshape(order.devices * order.rows, order.n)


def matmul_reduce_scatter(
    x: jax.Array, w: jax.Array, axis_name: Axes, order: BlockOrder, *, out_dtype: Any, comm_dtype: Any, transposed: bool,
    num_sms: int | None = None,
) -> jax.Array:  # fmt: skip
    """x[M, k] times w[k, N] ([N, k] with `transposed`), summed over all devices → this one's rows, [M/A, N]."""
    arch = KERNELS[_compat.gpu_architecture()[0]]
    options = {"out_dtype": out_dtype, "comm_dtype": comm_dtype, "transposed": transposed}
    blocks = x.reshape(order.devices, order.rows, order.k)
    out = gpu_kernels.matmul_reduce_scatter(
        arch, blocks, w, order, _axis(axis_name), num_sms=blocks_of(num_sms), **options
    )
    return _compat.same_varying(out, x, w)[0]


def _axis(axis_name: Axes) -> str:
    return axis_name if isinstance(axis_name, str) else axis_name[0]


def unsupported(
    x: jax.Array, w: jax.Array, axis_name: Axes, order: BlockOrder, *, transposed: bool = False,
    num_sms: int | None = None, **dtypes: Any,
) -> Unsupported:  # fmt: skip
    """Reasons why the GPU kernels cannot take these operands; empty if they can.

    Args:
      order: the tiles.
      transposed: w is [columns, K].
      num_sms: requested thread blocks; None: `blocks_of`.
      dtypes: dtypes of the result and of the partial results that are sent, by name.
    """
    reasons = []
    if x.dtype != w.dtype or x.dtype not in DTYPES:
        reasons.append(
            f"the operands are {x.dtype} and {w.dtype}; the tensor cores take bfloat16 or float16, both alike"
        )
    for name, dtype in dtypes.items():
        if dtype not in (*DTYPES, jnp.float32):
            reasons.append(f"{name} is {jnp.dtype(dtype)}; the kernel takes bfloat16, float16 and float32")
    for name, size in (("K", order.k), ("columns", order.n)):
        if size * x.dtype.itemsize % ROW_BYTES:
            reasons.append(f"{name}={size}: rows of {size * x.dtype.itemsize} bytes are no multiple of {ROW_BYTES}")
    columns = tile_columns(x.dtype.itemsize)
    narrow = [tile_columns(jnp.dtype(dtype).itemsize) for dtype in dtypes.values()]
    cuts = ALIGNMENT if transposed else columns, *narrow
    reasons += misaligned(rows=(order.rows, ALIGNMENT), K=(order.k, columns, ALIGNMENT), columns=(order.n, *cuts))
    if order.rows < 1 or order.k < 1 or order.n < 1:
        reasons.append("an operand is empty")
    if not isinstance(axis_name, str) and len(axis_name) > 1:
        reasons.append(f"axes {', '.join(map(repr, axis_name))}: the kernel works over one mesh axis")
    return Unsupported([*reasons, *machine_reasons(order.devices, (_axis(axis_name),), blocks_of(num_sms))])
