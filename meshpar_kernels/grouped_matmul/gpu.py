"""Grouped matmul on NVIDIA GPUs (Mosaic GPU): choice of kernel and tile, and the reasons why neither kernel can run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.grouped_matmul import blackwell, hopper
from meshpar_kernels.grouped_matmul.gpu_parts import ROWS as PART
from meshpar_kernels.grouped_matmul.gpu_parts import Tile, misaligned, tile_columns
from meshpar_kernels.grouped_matmul.schedule import ALIGNMENT
from meshpar_kernels.tuning import Config

SMEM_BYTES = 232_448
"""Bytes of shared memory that one thread block may use: 227 KiB on Hopper and Blackwell."""

STAGING_BYTES = hopper.CONSUMERS * 2 * PART * 128 + 1024
"""Bytes of shared memory for staged results and barriers."""

KERNELS = {9: hopper, 10: blackwell}
"""Major number of the compute capability → module of the kernels."""

ROWS = hopper.CONSUMERS * PART
INNER = 64
"""Contracted elements of a stage: 128 bytes of bfloat16, the widest swizzle."""

MOST_STAGES = 6
DTYPES = (jnp.bfloat16, jnp.float16)
ROW_BYTES = 16
"""Alignment of the rows that TMA copies, in bytes."""


def _whole_tiles(rows: int, *arrays: jax.Array | None) -> list[Any]:
    """The arrays padded with zero rows, so that TMA can cut them into tiles; the arrays themselves if no rows are
    added."""
    more = -rows % ALIGNMENT
    return [x if x is None or not more else jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)]) for x in arrays]


def _aligned(size: int) -> int:
    """The size, rounded up to a multiple of `INNER` where TMA cannot cut it into tiles of shared memory."""
    fits = size % ALIGNMENT == 0 and (size <= INNER or size % INNER == 0)
    return size if fits else -(-size // INNER) * INNER


def padded_sizes(
    lhs: jax.Array, out_dtype: jnp.dtype, *, k: int, n: int, transpose_rhs: bool = False, transposes: bool = False
) -> tuple[int, int]:
    """(K, N) with which the kernel runs: as they are, or padded with zeros where TMA cannot cut the operands or the result.

    Padding copies weights of misaligned sizes in every call. The alternative is a loop of a few hundred small matmuls
    with a data-dependent trip count.

    Args:
      lhs, out_dtype, k, n, transpose_rhs: as in `matmul_unsupported`.
      transposes: k and n are of the transpose.
    """
    if not _cut_reasons(lhs.dtype.itemsize, out_dtype.itemsize, k, n, transpose_rhs, transposes):
        return k, n
    return _aligned(k), _aligned(n)


def _cut_reasons(itemsize: int, out_itemsize: int, k: int, n: int, transpose_rhs: bool, transposes: bool) -> list[str]:
    """Reasons why TMA cannot cut the operands or the result, by the sizes and alignment of their rows."""
    columns = tile_columns(itemsize)
    cut = ALIGNMENT if transpose_rhs else columns  # of the weights' dim of N
    reasons = misaligned(K=(k, columns, ALIGNMENT), N=(n, columns if transposes else cut, tile_columns(out_itemsize)))
    rows = {"K": k * itemsize, "rhs": (k if transpose_rhs else n) * itemsize, "the result": n * out_itemsize}
    reasons += [
        f"{name}: rows of {b} bytes are no multiple of {ROW_BYTES}" for name, b in rows.items() if b % ROW_BYTES
    ]
    return reasons


def _pad(x: jax.Array, *sizes: int) -> jax.Array:
    """x with zeros after its last dims, up to these sizes."""
    before = x.ndim - len(sizes)
    more = [(0, 0)] * before + [(0, n - old) for n, old in zip(sizes, x.shape[before:], strict=True)]
    return jnp.pad(x, more) if any(n for _, n in more) else x


def _run(name: str, *operands: Any, num_sms: int | None, **options: Any) -> jax.Array:
    kernel = getattr(KERNELS[_compat.gpu_architecture()[0]], name)
    out = kernel(*operands, num_sms=_compat.multiprocessors() if num_sms is None else num_sms, **options)
    return _compat.same_varying(out, *jax.tree.leaves(operands))[0]  # Mosaic GPU results lose their varying mesh axes


def grouped_matmul(
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    row_scale: jax.Array | None,
    *,
    num_sms: int | None = None,
    **options: Any,
) -> jax.Array:
    """`grouped_matmul` by the kernel for the GPU that kernels traced now are for, on `num_sms` multiprocessors; None:
    all. K and N are padded if necessary (`padded_sizes`)."""
    (rows, k), transposed = lhs.shape, options["transpose_rhs"]
    n = rhs[0].shape[1 if transposed else 2]
    padded_k, padded_n = padded_sizes(lhs, options["out_dtype"], k=k, n=n, transpose_rhs=transposed)
    lhs, row_scale = _whole_tiles(rows, _pad(lhs, padded_k), row_scale)
    rhs = [_pad(m, *((padded_n, padded_k) if transposed else (padded_k, padded_n))) for m in rhs]
    out = _run("grouped_matmul", lhs, rhs, group_sizes, group_offset, row_scale, num_sms=num_sms, **options)
    return out[:rows, :n]


def grouped_matmul_transpose(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    row_scale: jax.Array | None,
    *,
    num_sms: int | None = None,
    **options: Any,
) -> jax.Array:
    """`grouped_matmul_transpose` by the kernel for the GPU that kernels traced now are for; `num_sms` as in
    `grouped_matmul`."""
    k, n = lhs.shape[1], rhs.shape[1]
    padded_k, padded_n = padded_sizes(lhs, options["out_dtype"], k=k, n=n, transposes=True)
    lhs, rhs, row_scale = _whole_tiles(lhs.shape[0], _pad(lhs, padded_k), _pad(rhs, padded_n), row_scale)
    out = _run("grouped_matmul_transpose", lhs, rhs, group_sizes, group_offset, row_scale, num_sms=num_sms, **options)
    return out[:, :k, :n]


def with_tile(config: Config, n: int, num_rhs: int = 1, *, transposes: bool = False) -> Config:
    """The configuration with the widest tile whose accumulators fit the registers and that leaves few columns empty.

    Args:
      n: columns of the result.
      num_rhs: matrices of each group, 1 or 2.
      transposes: it is of the transpose.
    """
    widths = [w for w in (256, 128, 64) if w * num_rhs <= _most_columns(config.pingpong)]
    width = next((w for w in widths if -(-n // w) * w <= 1.1 * n), widths[-1])
    return dataclasses.replace(config, tile=(INNER, ROWS, width) if transposes else (ROWS, INNER, width))


def _most_columns(pingpong: bool | None) -> int:
    """Most columns of a tile: the accumulators of `ROWS` of its rows fill the registers of the warpgroups that share a
    tile."""
    return 256 // hopper.CONSUMERS if pingpong else 256


def make_tile(config: Config, itemsize: int, num_rhs: int = 1, *, transposes: bool = False) -> Tile:
    """The kernel's tile of a configuration with a `tile`. If `stages` is None: as many as fit in shared memory, at most
    `MOST_STAGES`.

    Args:
      itemsize: bytes of an element of the operands.
      num_rhs, transposes: as in `with_tile`. In the transpose a tile is of [K, N], and a stage has rows.
    """
    assert config.tile is not None
    m, k, n = config.tile
    if transposes:
        m, k = k, m
    cluster, stages = config.cluster or 1, config.stages
    if stages is None:
        stages = min(MOST_STAGES, _stages(m, k, n, itemsize, num_rhs, cluster))
        stages -= stages % hopper.CONSUMERS if config.pingpong else 0
    return Tile(m, n, k, stages, cluster, bool(config.pingpong))


def _stages(m: int, k: int, n: int, itemsize: int, num_rhs: int, cluster: int) -> int:
    """Number of stages that fit in shared memory. A block of a Blackwell cluster loads only its part of the columns of
    a tile."""
    columns = n // cluster if _compat.gpu_architecture()[0] == 10 else n
    return (SMEM_BYTES - STAGING_BYTES) // max((m + num_rhs * columns) * k * itemsize, 1)


def matmul_unsupported(
    lhs: jax.Array, out_dtype: jnp.dtype, tile: Tile, num_rhs: int, *, k: int, n: int, transpose_rhs: bool
) -> Unsupported:
    """Reasons why the GPU kernels cannot multiply these operands; empty if they can.

    Args:
      lhs: one operand, whose rows are padded for the kernel; the other has its dtype.
      num_rhs: matrices of each group, 1 or 2.
      k, n: contracted elements, and columns of the result.
    """
    reasons = _cut_reasons(lhs.dtype.itemsize, out_dtype.itemsize, k, n, transpose_rhs, False)
    if tile.pingpong:
        reasons.append("pingpong: the kernel of grouped_matmul_transpose has it")
    return _unsupported(lhs, out_dtype, tile, num_rhs, reasons)


def transpose_unsupported(lhs: jax.Array, out_dtype: jnp.dtype, tile: Tile, *, k: int, n: int) -> Unsupported:
    """Reasons why the GPU kernels cannot run the transpose, with a result of [G, k, n]; empty if they can."""
    reasons = _cut_reasons(lhs.dtype.itemsize, out_dtype.itemsize, k, n, False, True)
    return _unsupported(lhs, out_dtype, tile, 1, reasons)


def _unsupported(lhs: jax.Array, out_dtype: jnp.dtype, tile: Tile, num_rhs: int, reasons: list[str]) -> Unsupported:
    """`reasons`, and the reasons common to the matmul and its transpose."""
    if lhs.dtype not in DTYPES:
        reasons.append(f"operands are {lhs.dtype}; the tensor cores take bfloat16 and float16 (TF32 is not float32)")
    if out_dtype not in (*DTYPES, jnp.float32):
        reasons.append(f"the result is {out_dtype}; the kernel writes bfloat16, float16 and float32")
    most, fewest = _most_columns(tile.pingpong), 4 if tile.pingpong else 2
    if tile.m != ROWS or tile.k % INNER or tile.n % 64 or not 0 < tile.n * num_rhs <= most:
        reasons.append(
            f"tile ({tile.m}, {tile.k}, {tile.n}): the kernel takes {ROWS} rows, multiples of {INNER} contracted "
            f"elements and of 64 columns, at most {most // num_rhs}{' with pingpong' * tile.pingpong}"
        )
    elif (fitting := _stages(tile.m, tile.k, tile.n, lhs.dtype.itemsize, num_rhs, tile.cluster)) < fewest:
        number = {2: "two", 4: "four"}[fewest]
        reasons.append(f"tile ({tile.m}, {tile.k}, {tile.n}): {number} stages of it do not fit shared memory")
    elif not fewest <= tile.stages <= fitting:
        reasons.append(
            f"{tile.stages} stages: the kernel takes {fewest} to {fitting} of tile ({tile.m}, {tile.k}, {tile.n})"
        )
    elif tile.pingpong and tile.stages % hopper.CONSUMERS:
        reasons.append(f"{tile.stages} stages: with pingpong each of two warpgroups has half of them")
    if tile.cluster not in (1, 2):
        reasons.append(f"a cluster of {tile.cluster} blocks: the kernel takes 1 or 2")
    major, minor = _compat.gpu_architecture()
    if major == 10 and tile.cluster > 1 and tile.n % 128:
        reasons.append(f"{tile.n} columns for a cluster of 2 blocks: each loads half of them, a multiple of 64")
    if major != 9 and tile.pingpong:
        reasons.append(f"pingpong: on sm_{major}{minor} no warpgroup multiplies; the kernel of sm_90a has it")
    if major not in KERNELS:
        known = " and ".join(f"sm_{number}0a" for number in KERNELS)
        reasons.append(f"the GPU is sm_{major}{minor}; there is a kernel for {known}")
    try:
        _compat.mosaic_gpu()
    except ImportError as error:
        reasons.append(f"jax.experimental.pallas.mosaic_gpu cannot be imported: {error}")
    return Unsupported(reasons)
