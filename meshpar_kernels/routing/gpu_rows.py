"""Gathering and adding up of rows on Hopper and Blackwell GPUs (Mosaic GPU).

A thread block is one warpgroup; block b computes the rows b, b + blocks, … of the result, a slab of columns at a time. Each
thread loads 16 bytes of the chosen rows, whose loads are independent, and adds them up in float32 registers. There are no
barriers and there is no shared memory; a multiprocessor runs as many blocks as its registers hold, which hides latencies.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._mosaic_gpu_launch import launch_blocks

THREADS = 128
WIDTH = 2048
"""Largest number of columns of a slab: 16 float32 sums for each thread."""

BLOCKS = 16
"""Thread blocks for each multiprocessor."""


def unsupported(x: jax.Array, index: jax.Array) -> Unsupported:
    """Reasons why the kernel cannot gather these rows; empty if it can."""
    reasons = []
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        reasons.append(f"rows are {x.dtype}; the kernel takes float32, bfloat16 and float16")
    if x.shape[1] % THREADS or not x.size or not index.size:
        reasons.append(
            f"x{list(x.shape)}, index{list(index.shape)}: the kernel takes multiples of {THREADS} columns, not 0"
        )
    if index.shape[1] > 32:
        reasons.append(f"k={index.shape[1]} rows to sum are more than 32: they are unrolled")
    return Unsupported([*reasons, *_compat.mosaic_reasons((9, 10))])


def _kernel(index, *refs, gpu: Any, shape: tuple[int, int, int], k: int, width: int, vector: int, blocks: int):
    """The rows of one thread block.

    Args:
      index: GMEM int32 [rows · k]: rows of x; none where it is out of range.
      refs: optionally GMEM float32 [rows · k], factors; GMEM input x [limit, columns]; GMEM output [rows, columns].
      shape: (rows, limit, columns).
      width, vector: columns of a slab, and of a load of a thread.
      blocks: thread blocks of the grid.
    """
    *weight, x, out = refs
    rows, limit, columns = shape
    block = lax.axis_index("block")
    layout = gpu.Layout.WG_STRIDED((width,), vector)

    def one(i, _):
        """Row i of this block."""
        row = block + i * blocks
        chosen = [index[row * k + j] for j in range(k)]
        factor = [weight[0][row * k + j] for j in range(k)] if weight else []

        def slab(c, _):
            selected = pl.ds(c * width, width)
            total = gpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
            for j, source in enumerate(chosen):
                inside = (source >= 0) & (source < limit)
                term = _compat.load_gmem(x, (jnp.where(inside, source, 0), selected), layout).astype(jnp.float32)
                term = term * factor[j] if weight else term
                total = total + jnp.where(inside, term, jnp.zeros_like(term))
            out[row, selected] = total.astype(out.dtype)

        lax.fori_loop(0, columns // width, slab, None)

    lax.fori_loop(0, lax.div(rows - block + (blocks - 1), jnp.int32(blocks)), one, None)


def gather_sum(x: jax.Array, index: jax.Array, weight: jax.Array | None) -> jax.Array:
    """As `reference.gather_sum`, for operands without reasons from `unsupported`: rows are read once, summed in float32
    registers, and written once."""
    (rows, k), (limit, columns) = index.shape, x.shape
    vector = next(v for v in (16 // x.dtype.itemsize, 4, 2, 1) if columns % (THREADS * v) == 0)
    step = THREADS * vector
    width = max(w for w in range(step, max(WIDTH, step) + 1, step) if columns % w == 0)
    operands = [index.reshape(-1).astype(jnp.int32)]
    operands += [] if weight is None else [weight.reshape(-1).astype(jnp.float32)]
    return launch_blocks(
        _kernel, "gather_sum", _compat.out_struct((rows, columns), x.dtype, x, index), *operands, x,
        blocks=min(rows, BLOCKS * _compat.multiprocessors()), shape=(rows, limit, columns), k=k, width=width, vector=vector,
    )  # fmt: skip
