"""Grouped matmul of 8-bit operands with block scales for Hopper GPUs (sm_90a, Mosaic GPU).

The schedule of `hopper`: one loading and two multiplying warpgroups, a ring of shared-memory stages, tiles of one
group each. A stage has `BLOCK` contracted elements, which share a scale in each row of lhs and in each block of rhs. Its
matmul starts from zero accumulators, which are multiplied by the two scales and added to float32 totals in registers
(DeepGEMM's promotion). While one warpgroup does that, the other multiplies.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.grouped_matmul.gpu_common import ROWS, Tile, each_row_tile, ring, row_staging, smem
from meshpar_kernels.grouped_matmul.gpu_launch import launch
from meshpar_kernels.grouped_matmul.hopper import CONSUMERS, row_parts, walk
from meshpar_kernels.grouped_matmul.schedule import ALIGNMENT, Spans, group_bounds, span_tile_steps

BLOCK = 128
"""Contracted elements, and columns of rhs, of a scale."""

TILE = Tile(CONSUMERS * ROWS, BLOCK, BLOCK, 6)
"""One scale of rhs for a stage, and 64 accumulators and 64 totals in the registers of a thread."""


def unsupported(lhs: jax.Array, out_dtype: Any) -> Unsupported:
    """Reasons why the kernel cannot multiply these operands; empty if it can."""
    reasons = []
    if lhs.shape[0] == 0:
        reasons.append("lhs has no rows")
    if out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        reasons.append(f"the result is {out_dtype}; the kernel writes bfloat16, float16 and float32")
    return Unsupported([*reasons, *_compat.mosaic_reasons((9,))])


def _kernel(*refs, gpu: Any, shape: tuple[int, int], tile: Tile, num_sms: int, acc_dtype: Any):
    """The grouped matmul, for one thread block.

    Args:
      refs: inputs in GMEM: `Spans`, lhs [M, K], lhs_scale float32 [K / BLOCK, rows], rhs [G, N, K], rhs_scale float32
        [G, N / BLOCK, K / BLOCK]; output in GMEM: [M, N]; scratch: lhs stages [stages, m, k], rhs stages [stages, n, k],
        `row_staging` of each multiplying warpgroup, barriers `full` and `empty`.
      shape: (K, N).
      acc_dtype: of the accumulators of the tensor cores.
      gpu, tile, num_sms: as in `hopper`.
    """
    k, n = shape
    spans, (lhs, lhs_scale, rhs, rhs_scale, out, *scratch) = Spans(*refs[:6]), refs[6:]
    lhs_smem, rhs_smem, staging, full, empty = scratch
    part = pl.ds(lax.axis_index("warpgroup") * ROWS, ROWS)

    def load(tile_at):
        """The function that starts the copies of K step i of a tile."""
        tile_step, column = tile_at
        row, g = spans.first[tile_step], spans.group[tile_step]

        def copies(i, slot, barrier):
            inner = pl.ds(i * tile.k, tile.k)
            gpu.copy_gmem_to_smem(lhs.at[pl.ds(row, tile.m), inner], lhs_smem.at[slot], barrier)
            gpu.copy_gmem_to_smem(rhs.at[g, pl.ds(column * tile.n, tile.n), inner], rhs_smem.at[slot], barrier)

        return copies

    def multiply(tile_at, row, steps, step, write_part):
        tile_step, column = tile_at
        g = spans.group[tile_step]

        def stage(i, total):
            """total + the product of stage i times its scales, in float32 [ROWS, n]."""
            slot = ring(tile.stages, step + i)
            factor = _compat.load_gmem(lhs_scale, (i, pl.ds(row, ROWS)), gpu.Layout.WGMMA.reduce(1))
            factor = factor * rhs_scale[g, column, i]
            gpu.barrier_wait(full.at[slot])

            def accumulate(acc):
                gpu.wgmma(acc, lhs_smem.at[slot, part], rhs_smem.at[slot].T)
                gpu.wgmma_wait(0)
                return acc[...]

            matmul = pl.run_scoped(accumulate, gpu.ACC((ROWS, tile.n), acc_dtype))
            gpu.barrier_arrive(empty.at[slot])
            return total + matmul.astype(jnp.float32) * lax.broadcast_in_dim(factor, total.shape, [0])

        zeros = gpu.layout_cast(jnp.zeros((ROWS, tile.n), jnp.float32), gpu.Layout.WGMMA)
        write_part(lax.fori_loop(0, steps, stage, zeros))

    each = each_row_tile(spans, n // tile.n, k // tile.k, num_sms, 1)
    walk(gpu, tile, (full, empty), each, load, row_parts(gpu, spans, tile, (full, empty), staging, out, multiply))


def grouped_matmul(
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    *,
    out_dtype: Any,
    num_sms: int | None = None,
) -> jax.Array:
    """As `scaled.scaled_grouped_matmul`, for operands without reasons from `unsupported`."""
    gpu = _compat.mosaic_gpu()
    tile, num_rows = TILE, lhs.shape[0]
    more = -num_rows % ALIGNMENT
    lhs = jnp.pad(lhs, ((0, more), (0, 0))) if more else lhs
    (rows, k), (groups, n, _) = lhs.shape, rhs.shape
    bounds = group_bounds(group_sizes, rows, group_offset, groups)
    scale = jnp.pad(lhs_scale.T, ((0, 0), (0, -(-rows // tile.m) * tile.m - num_rows)))
    out_dtype = jnp.dtype(out_dtype)
    acc_dtype = jnp.int32 if lhs.dtype == jnp.int8 else jnp.float32
    scratch = [
        smem(gpu, (tile.stages, tile.m, tile.k), lhs.dtype),
        smem(gpu, (tile.stages, tile.n, tile.k), rhs.dtype),
        [row_staging(gpu, ROWS, tile.n, out_dtype)] * CONSUMERS,
        gpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        gpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages),
    ]
    out = launch(
        _kernel, _compat.out_struct((rows, n), out_dtype, lhs, rhs), scratch,
        (*span_tile_steps(bounds, rows, tile.m), lhs, scale, rhs, rhs_scale), warpgroups=CONSUMERS + 1,
        num_sms=_compat.multiprocessors() if num_sms is None else num_sms, name="scaled_grouped_matmul",
        approx_math=True, shape=(k, n), tile=tile, acc_dtype=acc_dtype,
    )  # fmt: skip
    return _compat.same_varying(out, lhs, rhs)[0][:num_rows]  # Mosaic GPU results lose their varying mesh axes
