"""Grouped matmul of 8-bit operands with block scales for Hopper GPUs (sm_90a, Mosaic GPU).

The schedule of `hopper`: one loading and two multiplying warpgroups, a ring of shared-memory stages, tiles of one
group each. A stage has `BLOCK` contracted elements, which share a scale in each row of lhs and in each block of rhs. Its
matmul starts from zero accumulators, which are multiplied by the two scales and added to float32 totals in registers
(DeepGEMM's promotion). While one warpgroup does that, the other multiplies.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.grouped_matmul import hopper
from meshpar_kernels.grouped_matmul.gpu_parts import ROWS, Tile, rasterize, ring, smem
from meshpar_kernels.grouped_matmul.hopper import CONSUMERS, drain, drains, load_stages
from meshpar_kernels.grouped_matmul.problem import matmul_problem
from meshpar_kernels.grouped_matmul.schedule import ALIGNMENT, span_tile_steps

__all__ = ["BLOCK", "TILE", "grouped_matmul", "unsupported"]

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
    major, minor = _compat.gpu_architecture()
    if major != 9:
        reasons.append(f"the GPU is sm_{major}{minor}; there is a kernel for sm_90a")
    try:
        _compat.mosaic_gpu()
    except ImportError as error:
        reasons.append(f"jax.experimental.pallas.mosaic_gpu cannot be imported: {error}")
    return Unsupported(reasons)


def _kernel(*refs, gpu: Any, shape: tuple[int, int], tile: Tile, num_sms: int, acc_dtype: Any):
    """The grouped matmul, for one thread block.

    Args:
      refs: inputs in GMEM: `first`, `low`, `high`, `group`, `live` int32 [tile steps], `number` int32 [1], lhs [M, K],
        lhs_scale float32 [K / BLOCK, rows], rhs [G, N, K], rhs_scale float32 [G, N / BLOCK, K / BLOCK]; output in GMEM:
        [M, N]; scratch: lhs stages [stages, m, k], rhs stages [stages, n, k], (swizzled, plain) staging buffers of each
        multiplying warpgroup, barriers `full` and `empty`.
      shape: (K, N).
      acc_dtype: of the accumulators of the tensor cores.
      gpu, tile, num_sms: as in `hopper`.
    """
    k, n = shape
    first, low, high, group, live, number, lhs, lhs_scale, rhs, rhs_scale, out, *scratch = refs
    lhs_smem, rhs_smem, staging, full, empty = scratch
    columns, blocks = n // tile.n, k // tile.k
    warpgroup, multiprocessor = lax.axis_index("warpgroup"), lax.axis_index("multiprocessor")
    tile_steps = number[0]
    num_own = lax.div(tile_steps * columns - multiprocessor + (num_sms - 1), jnp.int32(num_sms))

    def each_tile(work):
        """Call `work(tile step, column tile, K steps, steps before)` for each tile of this block; it returns the steps
        after it. A tile of no group has 0 K steps."""

        def one(i, step):
            tile_step, column = rasterize(multiprocessor + i * num_sms, tile_steps, columns)
            return work(tile_step, column, live[tile_step] * blocks, step)

        return lax.fori_loop(0, num_own, one, jnp.int32(0))

    @pl.when(warpgroup == CONSUMERS)
    def _():
        gpu.set_max_registers(40, action="decrease")

        def load(tile_step, column, steps, step):
            """Load all stages of a tile."""
            row, g = first[tile_step], group[tile_step]

            def copies(i, slot, barrier):
                inner = pl.ds(i * tile.k, tile.k)
                gpu.copy_gmem_to_smem(lhs.at[pl.ds(row, tile.m), inner], lhs_smem.at[slot], barrier)
                gpu.copy_gmem_to_smem(rhs.at[g, pl.ds(column * tile.n, tile.n), inner], rhs_smem.at[slot], barrier)

            return load_stages(gpu, step, steps, tile.stages, full, empty, copies)

        loaded = each_tile(load)
        if drains():
            drain(gpu, loaded, tile.stages, empty)

    @pl.when(warpgroup < CONSUMERS)
    def _():
        gpu.set_max_registers(232, action="increase")
        part = pl.ds(warpgroup * ROWS, ROWS)

        def compute(tile_step, column, steps, step):
            """Multiply this warpgroup's `ROWS` rows of a tile, and write those that belong to the group."""
            row = first[tile_step] + warpgroup * ROWS
            begin = jnp.clip(low[tile_step] - warpgroup * ROWS, 0, ROWS)
            end = jnp.clip(high[tile_step] - warpgroup * ROWS, 0, ROWS)
            g = group[tile_step]

            def multiply(i, total):
                """total + the product of stage i times its scales, in float32 [ROWS, n]."""
                slot = ring(tile.stages, step + i)
                factor = _compat.load_gmem(lhs_scale, (i, pl.ds(row, ROWS)), gpu.Layout.WGMMA.reduce(1))
                factor = factor * rhs_scale[g, column, i]
                gpu.barrier_wait(full.at[slot])

                def accumulate(acc):
                    gpu.wgmma(acc, lhs_smem.at[slot, part], _compat.transpose_ref(rhs_smem.at[slot]))
                    gpu.wgmma_wait(0)
                    return acc[...]

                matmul = pl.run_scoped(accumulate, gpu.ACC((ROWS, tile.n), acc_dtype))
                gpu.barrier_arrive(empty.at[slot])
                return total + matmul.astype(jnp.float32) * lax.broadcast_in_dim(factor, total.shape, [0])

            @pl.when(end > begin)
            def _():
                zeros = gpu.layout_cast(jnp.zeros((ROWS, tile.n), jnp.float32), gpu.Layout.WGMMA)
                value = lax.fori_loop(0, steps, multiply, zeros)
                for w, (swizzled, plain) in enumerate(staging):

                    @pl.when(warpgroup == w)
                    def _(swizzled=swizzled, plain=plain):
                        hopper.store(gpu, value, out, row, column, begin, end, swizzled, plain)

            @pl.when(end <= begin)
            def _():
                hopper.skip(gpu, step, steps, tile.stages, full, empty, 1)

            return step + steps

        each_tile(compute)
        gpu.wait_smem_to_gmem(0)


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
    rows, k, n, _, bounds = matmul_problem(lhs.shape[0], rhs, group_sizes, group_offset, transpose_rhs=True)
    scale = jnp.pad(lhs_scale.T, ((0, 0), (0, -(-rows // tile.m) * tile.m - num_rows)))
    out_dtype = jnp.dtype(out_dtype)
    acc_dtype = jnp.int32 if lhs.dtype == jnp.int8 else jnp.float32
    width = 128 // out_dtype.itemsize
    num_sms = _compat.multiprocessors() if num_sms is None else num_sms
    out = gpu.kernel(
        functools.partial(_kernel, gpu=gpu, shape=(k, n), tile=tile, num_sms=num_sms, acc_dtype=acc_dtype),
        out_type=_compat.out_struct((rows, n), out_dtype, lhs, rhs),
        scratch_types=[
            smem(gpu, (tile.stages, tile.m, tile.k), lhs.dtype),
            smem(gpu, (tile.stages, tile.n, tile.k), rhs.dtype),
            [gpu.RefUnion(smem(gpu, (2, ROWS, width), out_dtype), gpu.SMEM((ROWS, width), out_dtype))] * CONSUMERS,
            gpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
            gpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages),
        ],
        grid=(num_sms,),
        grid_names=("multiprocessor",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="meshpar_scaled_grouped_matmul",
        compiler_params=gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics.Lane),
    )(*span_tile_steps(bounds, rows, tile.m), lhs, scale, rhs, rhs_scale)
    return _compat.same_varying(out, lhs, rhs)[0][:num_rows]  # Mosaic GPU results lose their varying mesh axes
