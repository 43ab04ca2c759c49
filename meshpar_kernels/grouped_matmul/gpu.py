"""Grouped matmul on NVIDIA GPUs (Mosaic GPU): choice of kernel and tile, and the reasons why neither kernel can run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.config import Config
from meshpar_kernels.grouped_matmul import blackwell, hopper
from meshpar_kernels.grouped_matmul.gpu_common import ROWS as PART
from meshpar_kernels.grouped_matmul.gpu_common import Tile, misaligned, tile_columns
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, Problem
from meshpar_kernels.grouped_matmul.schedule import ALIGNMENT
from meshpar_kernels.tuning_table import MatmulKey

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


def _pad(x: jax.Array, *sizes: int) -> jax.Array:
    """x with zeros after its last dims, up to these sizes; x itself if they are its own."""
    before = x.ndim - len(sizes)
    more = [(0, 0)] * before + [(0, n - old) for n, old in zip(sizes, x.shape[before:], strict=True)]
    return jnp.pad(x, more) if any(n for _, n in more) else x


def _aligned(size: int) -> int:
    """The size, rounded up to a multiple of `INNER` where TMA cannot cut it into tiles of shared memory."""
    fits = size % ALIGNMENT == 0 and (size <= INNER or size % INNER == 0)
    return size if fits else -(-size // INNER) * INNER


def padded_sizes(p: Problem) -> MatmulKey:
    """The sizes with which the kernel runs: K and N as they are, or padded with zeros where TMA cannot cut the operands or
    the result.

    Padding copies weights of misaligned sizes in every call. The alternative is a loop of a few hundred small matmuls
    with a data-dependent trip count.
    """
    if not _cut_reasons(p, p.key):
        return p.key
    return dataclasses.replace(p.key, k=_aligned(p.key.k), n=_aligned(p.key.n))


def _cut_reasons(p: Problem, sizes: MatmulKey) -> list[str]:
    """Reasons why TMA cannot cut the operands or the result, padded to these sizes, by the sizes and alignment of their
    rows."""
    k, n, itemsize, out_itemsize = sizes.k, sizes.n, p.lhs.dtype.itemsize, p.out_dtype.itemsize
    columns = tile_columns(itemsize)
    cut = ALIGNMENT if sizes.transposed else columns  # of the weights' dim of N
    narrow = tile_columns(out_itemsize)
    reasons = misaligned(K=(k, columns, ALIGNMENT), N=(n, columns if sizes.transposes else cut, narrow))
    rows = {"K": k * itemsize, "rhs": (k if sizes.transposed else n) * itemsize, "the result": n * out_itemsize}
    reasons += [
        f"{name}: rows of {b} bytes are no multiple of {ROW_BYTES}" for name, b in rows.items() if b % ROW_BYTES
    ]
    return reasons


def run(p: Problem, *, tile: Tile, num_sms: int | None = None) -> jax.Array:
    """The matmul or the transpose by the kernel of the GPU architecture that is traced for: pads K and N if necessary
    (`padded_sizes`) and the rows to a multiple of `ALIGNMENT`, launches the kernel on `num_sms` multiprocessors (None: all),
    and slices off the padding."""
    sizes = padded_sizes(p)
    rows, k, n = -(-sizes.rows // ALIGNMENT) * ALIGNMENT, sizes.k, sizes.n
    if isinstance(p, MatmulProblem):
        rhs = tuple(_pad(m, *((n, k) if p.transpose_rhs else (k, n))) for m in p.rhs)
    else:
        rhs = _pad(p.rhs, rows, n)
    row_scale = None if p.row_scale is None else _pad(p.row_scale, rows)
    padded = dataclasses.replace(p, lhs=_pad(p.lhs, rows, k), rhs=rhs, row_scale=row_scale)
    kernel = getattr(KERNELS[_compat.gpu_architecture()[0]], sizes.op)
    out = kernel(padded, tile=tile, num_sms=_compat.multiprocessors() if num_sms is None else num_sms)
    out = _compat.same_varying(out, *jax.tree.leaves(p))[0]  # Mosaic GPU results lose their varying mesh axes
    return out[tuple(map(slice, p.out_shape))]


def with_tile(config: Config, sizes: MatmulKey) -> Config:
    """The configuration with the widest tile whose accumulators fit the registers and that leaves few columns empty."""
    n = sizes.n
    widths = [w for w in (256, 128, 64) if w * sizes.matrices <= _most_columns(config.pingpong)]
    width = next((w for w in widths if -(-n // w) * w <= 1.1 * n), widths[-1])
    return dataclasses.replace(config, tile=(INNER, ROWS, width) if sizes.transposes else (ROWS, INNER, width))


def _most_columns(pingpong: bool | None) -> int:
    """Most columns of a tile: the accumulators of `ROWS` of its rows fill the registers of the warpgroups that share a
    tile."""
    return 256 // hopper.CONSUMERS if pingpong else 256


def make_tile(config: Config, itemsize: int, sizes: MatmulKey) -> Tile:
    """The kernel's tile of a configuration with a `tile`. If `stages` is None: as many as fit in shared memory, at most
    `MOST_STAGES`.

    Args:
      itemsize: bytes of an element of the operands.
      sizes: of the matmul; or of the transpose, where a tile is of [K, N], and a stage has rows.
    """
    assert config.tile is not None
    m, k, n = config.tile
    if sizes.transposes:
        m, k = k, m
    cluster, stages = config.cluster or 1, config.stages
    if stages is None:
        stages = min(MOST_STAGES, _stages(m, k, n, itemsize, sizes.matrices, cluster))
        stages -= stages % hopper.CONSUMERS if config.pingpong else 0
    return Tile(m, n, k, stages, cluster, bool(config.pingpong))


def _stages(m: int, k: int, n: int, itemsize: int, num_rhs: int, cluster: int) -> int:
    """Number of stages that fit in shared memory. A block of a Blackwell cluster loads only its part of the columns of
    a tile."""
    columns = n // cluster if _compat.gpu_architecture()[0] == 10 else n
    return (SMEM_BYTES - STAGING_BYTES) // max((m + num_rhs * columns) * k * itemsize, 1)


def unsupported(p: Problem, tile: Tile) -> Unsupported:
    """Reasons why the GPU kernels cannot run this problem with this tile; empty if they can."""
    reasons, num_rhs, out_dtype = _cut_reasons(p, padded_sizes(p)), p.key.matrices, p.out_dtype
    if isinstance(p, MatmulProblem):
        if p.rhs_scale:
            reasons.insert(0, f"rhs is {p.rhs[0].dtype} with scales; the kernel takes weights of lhs's dtype")
        if tile.pingpong:
            reasons.append("pingpong: the kernel of grouped_matmul_transpose has it")
    if p.lhs.dtype not in DTYPES:
        reasons.append(f"operands are {p.lhs.dtype}; the tensor cores take bfloat16 and float16 (TF32 is not float32)")
    if out_dtype not in (*DTYPES, jnp.float32):
        reasons.append(f"the result is {out_dtype}; the kernel writes bfloat16, float16 and float32")
    most, fewest = _most_columns(tile.pingpong), 4 if tile.pingpong else 2
    if tile.m != ROWS or tile.k % INNER or tile.n % 64 or not 0 < tile.n * num_rhs <= most:
        reasons.append(
            f"tile ({tile.m}, {tile.k}, {tile.n}): the kernel takes {ROWS} rows, multiples of {INNER} contracted "
            f"elements and of 64 columns, at most {most // num_rhs}{' with pingpong' * tile.pingpong}"
        )
    elif (fitting := _stages(tile.m, tile.k, tile.n, p.lhs.dtype.itemsize, num_rhs, tile.cluster)) < fewest:
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
    return Unsupported([*reasons, *_compat.mosaic_reasons(KERNELS)])
