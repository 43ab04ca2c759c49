"""Grouped matmul on NVIDIA GPUs (Mosaic GPU): which kernel, which tile, and what none of them takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.grouped_matmul import blackwell, hopper
from meshpar_kernels.grouped_matmul.gpu_parts import ROWS as PART
from meshpar_kernels.grouped_matmul.gpu_parts import Tile

__all__ = [
    "Tile",
    "grouped_matmul",
    "grouped_matmul_transpose",
    "make_tile",
    "make_transpose_tile",
    "pick_tile",
    "unsupported",
]

SMEM_BYTES = 232_448
"""Shared memory that one block may have: 227 KiB on Hopper and Blackwell."""

STAGING_BYTES = hopper.CONSUMERS * 2 * PART * 128 + 1024
"""Of that, what results leave through, and barriers."""

KERNELS = {9: hopper, 10: blackwell}
"""By the major number of the compute capability."""

MULTIPROCESSORS = {9: 132, 10: 148}
"""Blocks of the grid, each of which walks over tiles: the multiprocessors of an H100 or H200 with SXM and of a B200.
On a GPU with fewer, the last blocks come after the others."""

ROWS = hopper.CONSUMERS * PART
INNER = 64
"""Contracted elements of a stage: 128 bytes of bfloat16, the widest swizzle."""

MOST_STAGES = 6
DTYPES = (jnp.bfloat16, jnp.float16)
ALIGNMENT = 16
"""Bytes: the copy engine's rows begin at multiples of this."""


def grouped_matmul(*args: Any, **options: Any) -> jax.Array:
    """`grouped_matmul` of the kernel for the GPU that is traced for, on all multiprocessors."""
    major = _compat.gpu_architecture()[0]
    return KERNELS[major].grouped_matmul(*args, num_sms=MULTIPROCESSORS[major], **options)


def grouped_matmul_transpose(*args: Any, **options: Any) -> jax.Array:
    """`grouped_matmul_transpose` in the same way."""
    major = _compat.gpu_architecture()[0]
    return KERNELS[major].grouped_matmul_transpose(*args, num_sms=MULTIPROCESSORS[major], **options)


def pick_tile(n: int, itemsize: int, halves: int = 1) -> Tile:
    """The widest tile whose accumulators fit the registers and that leaves few columns empty.

    Args:
      n: columns of the result.
      itemsize: bytes of an element of the operands.
      halves: 2 for a result that needs two products (SwiGLU), else 1.
    """
    widths = [w for w in (256, 128, 64) if w * halves <= 256]
    width = next((w for w in widths if -(-n // w) * w <= 1.1 * n), widths[-1])
    return make_tile(ROWS, INNER, width, itemsize, halves)


def make_tile(m: int, k: int, n: int, itemsize: int, halves: int = 1) -> Tile:
    """A tile with as many stages as shared memory has room for."""
    stage = (m + halves * n) * k * itemsize
    return Tile(m, n, k, min(MOST_STAGES, (SMEM_BYTES - STAGING_BYTES) // max(stage, 1)))


def make_transpose_tile(tile: tuple[int, int, int], itemsize: int) -> Tile:
    """`(rows, K, N)` of one step of the transpose: a tile of [K, N] whose stages hold so many rows."""
    rows, k, n = tile
    return make_tile(k, rows, n, itemsize)


def unsupported(lhs: jax.Array, out_dtype: jnp.dtype, tile: Tile, halves: int = 1, **sizes: int) -> Unsupported:
    """Why the GPU kernels cannot take these operands.

    Args:
      lhs: one operand; the other has its dtype.
      sizes: lengths of the rows of the operands and of the result, by name.
    """
    reasons = []
    if lhs.dtype not in DTYPES:
        reasons.append(f"operands are {lhs.dtype}; the tensor cores take bfloat16 and float16 (TF32 is not float32)")
    if out_dtype not in (*DTYPES, jnp.float32):
        reasons.append(f"the result is {out_dtype}; the kernel writes bfloat16, float16 and float32")
    for name, size in sizes.items():
        if size * lhs.dtype.itemsize % ALIGNMENT:
            reasons.append(f"{name}={size}: rows of {size * lhs.dtype.itemsize} bytes are no multiple of {ALIGNMENT}")
    if tile.m != ROWS or tile.k % INNER or tile.n % 64 or not 0 < tile.n * halves <= 256:
        reasons.append(
            f"tile ({tile.m}, {tile.k}, {tile.n}): the kernel takes {ROWS} rows, multiples of {INNER} contracted "
            f"elements and of 64 columns, at most {256 // halves}"
        )
    elif tile.stages < 2:
        reasons.append(f"tile ({tile.m}, {tile.k}, {tile.n}): two stages of it do not fit shared memory")
    major, minor = _compat.gpu_architecture()
    if major not in KERNELS:
        known = " and ".join(f"sm_{number}0a" for number in KERNELS)
        reasons.append(f"the GPU is sm_{major}{minor}; there is a kernel for {known}")
    try:
        _compat.mosaic_gpu()
    except ImportError as error:
        reasons.append(f"jax.experimental.pallas.mosaic_gpu cannot be imported: {error}")
    return Unsupported(reasons)
