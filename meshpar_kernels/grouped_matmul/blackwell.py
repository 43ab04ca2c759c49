"""Grouped matmul for Blackwell GPUs (sm_100a, Mosaic GPU): TMA loads, `tcgen05`, accumulators in tensor memory.

One thread block (with clusters: one cluster) per multiprocessor iterates over tiles of the result, as on Hopper. One
warp loads and one issues the matmuls; a second warpgroup writes results. The accumulators have two slots in tensor
memory, so that one tile is multiplied while the tile before it is written.

Barriers:
- `full[s]` completes when all copies into stage s have landed; the multiplying warp waits for it.
- `empty[s]` completes when the matmuls that read stage s are done. The tensor core reports it (`tcgen05_commit_arrive`:
all matmuls that the warp issued before). The loading warp waits for it from the second use of a stage on. `full` and
`empty` count steps over all tiles.
- `done[a]` completes when the accumulator in slot a is complete, also reported by the tensor core; the writing
warpgroup waits for it.
- `read[a]` completes when the writing warpgroup has the accumulator in registers (`wait_load_tmem`). The multiplying
warp waits for it from the second use of a slot on. Tiles of no group use no slot, on either side.

The transpose kernel has a third warpgroup, which zeroes the rows of other groups in the first and the last stage of a
group. It too waits for `full` and arrives at `empty` for every stage. Where rows are zeroed, the multiplying warp waits
for `masked[s]`; `commit_smem` makes the zeros visible to the tensor core before.

In a cluster (`Tile.cluster`) the tensor cores of two blocks compute one tile together ("2-CTA"), with twice the rows.
Each block has half of the accumulator, and loads half of lhs and half of the columns of rhs; both tensor cores read
both halves of rhs. A warp of the first block issues the matmuls, so it waits for the loads of both blocks:
- `full` is a barrier of the first block, and counts the loads of both. In the transpose each block has its own `full`,
for which its masking warpgroup waits; that warpgroup arrives at `masked` in both blocks at every stage.
- `empty` and `done` complete in both blocks, by the report of the tensor core to both.
- `read` counts the writing warpgroups of both blocks. The blocks of a cluster end together, since their tensor memory
is freed together.

Limitation: there are no half tiles; the rows of an incomplete tile are multiplied as 128 (256 in a cluster).
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
from meshpar_kernels.grouped_matmul import gpu_common as parts
from meshpar_kernels.grouped_matmul.gpu_launch import launch_matmul, launch_transpose
from meshpar_kernels.grouped_matmul.hopper import drain, drains, load_stages
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, TransposeProblem
from meshpar_kernels.grouped_matmul.schedule import Spans

MULTIPLYING, WRITING, MASKING = 0, 1, 2
"""Indices of the warpgroups; a block has the third one where a kernel needs it."""

LOADER, MULTIPLIER = 0, 1
"""Warps of the first warpgroup."""


def acc_slot(acc: Any, used: Any) -> tuple[Any, Any]:
    """(accumulator slot, its half of the columns of the TMEM ref `acc`) of a tile after `used` live tiles."""
    slot, width = lax.rem(used, jnp.int32(2)), acc.shape[1] // 2
    return slot, acc.at[:, pl.ds(slot * width, width)]


def multiply_tiles(gpu, stages, acc, barriers, each: parts.Each, load, matmuls, *, cluster: int = 1, ready: Any = None):
    """The loading warp and the multiplying warp: each iterates over all tiles of this block; returns nothing.

    The loading warp runs ahead, so operands of the next tile are in flight while a tile is multiplied.

    Args:
      stages: number of shared-memory stages.
      acc: TMEM accumulators, see `acc_slot`.
      barriers: (`full`, `empty`, `done`, `read`), see the module.
      load: tile → `copies` of `load_stages`.
      matmuls: (tile, i, stage, accumulator): issues the matmuls of step i.
      cluster: blocks of a cluster; the first block issues the matmuls of both.
      ready: barriers, one for each stage, that the multiplying warp waits for instead of `full`.
    """
    full, empty, done, read = barriers
    loaded = full if ready is None else ready
    pair, member = _pair(cluster), parts.index_in_cluster(cluster)

    def load_tile(tile, steps, step, _):
        load_stages(gpu, step, steps, stages, full, empty, load(tile))

    def multiply_tile(tile, steps, step, used):
        """Issue the matmuls of all steps of a tile; have the tensor core report `empty` for each stage and `done` for
        the tile."""
        slot, total = acc_slot(acc, used)

        @pl.when((used >= 2) & (steps > 0))
        def _():
            gpu.barrier_wait(read.at[slot])

        def matmul(i, _):
            stage = parts.ring(stages, step + i)
            gpu.barrier_wait(loaded.at[stage])
            matmuls(tile, i, stage, total)
            gpu.tcgen05_commit_arrive(empty.at[stage], **pair)

        lax.fori_loop(0, steps, matmul, None)

        @pl.when(steps > 0)
        def _():
            gpu.tcgen05_commit_arrive(done.at[slot], **pair)

    def load_tiles():
        step, _ = each(load_tile)
        if cluster == 1 and drains():
            drain(gpu, step, stages, empty)

    def multiply_all():
        _, used = each(multiply_tile)
        if cluster == 1 and drains():
            drain(gpu, used, 2, read)

    @gpu.warp_map
    def _(warp):
        pl.when(warp == LOADER)(load_tiles)
        multiplies = warp == MULTIPLIER
        pl.when(multiplies if cluster == 1 else multiplies & (member == 0))(multiply_all)


def walk(
    gpu, tile: parts.Tile, acc, barriers, each: parts.Each, load, matmuls, write_tile, *, ready: Any = None, finish=None
):
    """The loops over this block's tiles, of the warpgroup that loads and multiplies and of the one that writes.

    Args:
      acc, barriers, load, matmuls, ready: as in `multiply_tiles`.
      write_tile: called by the writing warpgroup with the arguments that `each` gives.
      finish: called by the writing warpgroup after its last tile.
    """
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == MULTIPLYING)
    def _():
        how = {"cluster": tile.cluster, "ready": ready}
        multiply_tiles(gpu, tile.stages, acc, barriers, each, load, matmuls, **how)

    @pl.when(warpgroup == WRITING)
    def _():
        each(write_tile)
        if finish is not None:
            finish()
        gpu.wait_smem_to_gmem(0)


def read_accumulator(gpu, acc, used, barriers, write_total: Callable[[Any], None]) -> None:
    """Wait until the accumulator of a tile is complete, call `write_total(its TMEM ref)`, and release its slot (`read`)."""
    (slot, total), (*_, done, read) = acc_slot(acc, used), barriers
    gpu.barrier_wait(done.at[slot])
    write_total(total)
    gpu.wait_load_tmem()
    gpu.barrier_arrive(read.at[slot])


def load_columns(gpu, total, left: int, width: int) -> jax.Array:
    """Columns [left, left + width) of an accumulator, float32 [m, width] in registers."""
    return gpu.async_load_tmem(total.at[:, pl.ds(left, width)], layout=gpu.Layout.TCGEN05)


def _zeros(gpu, rows: int, width: int, dtype) -> jax.Array:
    return gpu.layout_cast(jnp.zeros((rows, width), dtype), gpu.Layout.TCGEN05)


def _pair(cluster: int) -> dict[str, str]:
    """Keyword arguments of a matmul that both blocks of a cluster compute together, and of its reports; {} without
    clusters."""
    return {"collective_axis": parts.CLUSTER} if cluster > 1 else {}


def _part(gpu, cluster: int, dim: int) -> dict[str, Any]:
    """Keyword arguments of a copy that the blocks of a cluster split along `dim`, counted at the first block's barrier;
    {} without clusters."""
    if cluster == 1:
        return {}
    return {"collective_axes": parts.CLUSTER, "leader_tracked": gpu.CopyPartition.PARTITIONED(dim)}


def _matmul_kernel(*refs, gpu, shape, tile, transpose_rhs, activation, num_rhs, scaled, num_sms):
    """The grouped matmul, for one thread block: out[rows of a group] = activation(lhs · rhs of the group), optionally
    times `scale`.

    Two warpgroups: 0 loads and multiplies (one warp each), 1 writes. The tiles of the result are (tile step, column
    tile); a tile step is a tile of rows of one group (`span_tile_steps`).

    Args:
      refs: inputs in GMEM: `Spans`, lhs [M, K], `num_rhs` arrays rhs [G, K, N] ([G, N, K] with `transpose_rhs`), scale
        float32 [M] if `scaled`; output in GMEM: [M, N]; scratch: lhs stages, rhs stages [stages, num_rhs, …],
        `row_staging`, TMEM accumulators [m, 2 · num_rhs · n], barriers `full`, `empty`, `done`, `read`.
      gpu, shape, transpose_rhs, activation, num_rhs, scaled, num_sms: as on Hopper.
      tile: tile sizes.
    """
    k, n = shape
    spans, (lhs, *refs) = Spans(*refs[:6]), refs[6:]
    rhs, refs = refs[:num_rhs], refs[num_rhs:]
    scale = refs.pop(0) if scaled else None
    out, lhs_smem, rhs_smem, staging, acc, *barriers = refs
    member = parts.index_in_cluster(tile.cluster)
    each = parts.each_row_tile(spans, pl.cdiv(n, tile.n), pl.cdiv(k, tile.k), num_sms, tile.cluster)

    def load(tile_at):
        """The function that starts the copies of K step i of a tile: lhs and each rhs."""
        tile_step, column = tile_at
        g, rows = spans.group[tile_step], pl.ds(spans.first[tile_step], tile.cluster * tile.m)
        outer, split = pl.ds(column * tile.n, tile.n), _part(gpu, tile.cluster, 0 if transpose_rhs else 1)

        def copies(i, stage, barrier):
            inner = pl.ds(i * tile.k, tile.k)
            gpu.copy_gmem_to_smem(lhs.at[rows, inner], lhs_smem.at[stage], barrier, **_part(gpu, tile.cluster, 0))
            src_slice = (g, outer, inner) if transpose_rhs else (g, inner, outer)
            for half, matrix in enumerate(rhs):
                gpu.copy_gmem_to_smem(matrix.at[src_slice], rhs_smem.at[stage, half], barrier, **split)

        return copies

    def matmuls(_, i, stage, total):
        """Issue total += lhs · rhs of one stage, for each rhs; K step 0 overwrites the accumulator."""
        for half in range(num_rhs):
            weights = rhs_smem.at[stage, half]
            weights = weights.T if transpose_rhs else weights
            dst = total.at[:, pl.ds(half * tile.n, tile.n)]
            gpu.tcgen05_mma(dst, lhs_smem.at[stage], weights, accumulate=i > 0, **_pair(tile.cluster))

    def values_of(row, total, left, width):
        """Columns [left, left + width) of the result of a tile, [m, width], with activation and scale applied."""
        value = parts.activate(
            [load_columns(gpu, total, half * tile.n + left, width) for half in range(num_rhs)], activation
        )
        if scaled:
            factor = _compat.load_gmem(scale, pl.ds(row, tile.m), gpu.Layout.TCGEN05.reduce(1))
            value = value * lax.broadcast_in_dim(factor, value.shape, [0])
        return value.astype(out.dtype)

    def write_tile(tile_at, steps, _, used):
        """Write this block's rows of a tile: its accumulator if the tile step is live, else zeros."""
        tile_step, column = tile_at
        row, begin, end = parts.rows_in(spans, tile_step, member * tile.m, tile.m)
        store = functools.partial(_store, gpu, out.at[pl.ds(row, tile.m)], column, begin, end, tile.n, staging)

        @pl.when(steps > 0)
        def _():
            read_accumulator(gpu, acc, used, barriers, lambda total: store(functools.partial(values_of, row, total)))

        @pl.when(steps == 0)
        def _():
            store(lambda left, width: _zeros(gpu, tile.m, width, out.dtype))

    walk(gpu, tile, acc, barriers, each, load, matmuls, write_tile)


def _store(gpu, target, column, begin, end, width: int, staging, values) -> None:
    """Write the rows [begin, end) of a tile to GMEM.

    Args:
      target: GMEM [m, N]: the rows of the tile.
      column, width: column tile, and its columns.
      staging: `row_staging`: a full tile goes through the two swizzled slots, a partial one through the plain memory.
      values: (left, number of columns) → values [m, columns] in the dtype of the result.
    """
    swizzled, plain = staging
    rows, step = plain.shape
    full_tile = (begin == 0) & (end == rows)
    gpu.wait_smem_to_gmem(0, wait_read_only=True)
    for c, left in enumerate(range(0, width, step)):
        dst = pl.ds(column * width + left, step)
        value = values(left, step)

        @pl.when(full_tile)
        def _(value=value, c=c, dst=dst):
            gpu.wait_smem_to_gmem(1, wait_read_only=True)
            swizzled[c % 2] = value
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(swizzled.at[c % 2], target.at[:, dst])

        @pl.when(~full_tile)
        def _(value=value, dst=dst):
            gpu.wait_smem_to_gmem(0, wait_read_only=True)
            _compat.store_smem(plain, value)
            gpu.commit_smem()
            parts.copy_rows(gpu, plain, target, begin, end, dst, rows)


def grouped_matmul(p: MatmulProblem, *, tile: parts.Tile, num_sms: int) -> jax.Array:
    """As `hopper.grouped_matmul`."""
    gpu = _compat.mosaic_gpu()
    own = tile.n // tile.cluster
    rhs_tile = (own, tile.k) if p.transpose_rhs else (tile.k, own)
    tensor_core = {"num_arrivals": 1, "orders_tensor_core": True}
    scratch = [
        parts.smem(gpu, (tile.stages, tile.m, tile.k), p.lhs.dtype),
        parts.smem(gpu, (tile.stages, len(p.rhs), *rhs_tile), p.lhs.dtype),
        parts.row_staging(gpu, tile.m, tile.n, p.out_dtype),
        gpu.TMEM((tile.m, 2 * len(p.rhs) * tile.n), jnp.float32, collective=tile.cluster > 1),
        gpu.Barrier(num_arrivals=1 + len(p.rhs), num_barriers=tile.stages),
        gpu.Barrier(num_barriers=tile.stages, **tensor_core),
        gpu.Barrier(num_barriers=2, **tensor_core),
        parts.cluster_barrier(gpu, tile.cluster, num_barriers=2, **tensor_core),
    ]
    return launch_matmul(
        _matmul_kernel, scratch, p, height=tile.cluster * tile.m, tile=tile, warpgroups=2, num_sms=num_sms
    )


def _mask_tile(gpu, tile: parts.Tile, operands, full, empty, masked, tile_at, steps, step, _) -> None:
    """Zero the rows of other groups in all stages of a tile, and arrive at `masked` and `empty`.

    Args:
      operands: stages of lhs and of rhs.
      tile_at: the last element is the tile's `GroupRows`.
      steps, step: steps of the tile, and of the tiles before.
    """

    def one(i, _):
        """Step i: zero the rows of other groups in its stage, if there are any, and signal it."""
        stage = parts.ring(tile.stages, step + i)
        low, high = tile_at[-1].span(i, tile.k)
        gpu.barrier_wait(full.at[stage])

        @pl.when((low > 0) | (high < tile.k))
        def _():
            for operand in operands:
                parts.mask_rows(gpu, operand.at[stage], low, high)
            gpu.commit_smem()
            if tile.cluster == 1:
                gpu.barrier_arrive(masked.at[stage])

        if tile.cluster > 1:
            gpu.barrier_arrive(masked.at[stage])
        gpu.barrier_arrive(empty.at[stage])

    lax.fori_loop(0, steps, one, None)


def _transpose_kernel(*refs, gpu, shape, tile, num_sms):
    """The transposed grouped matmul, for one thread block: out[g] = lhs[rows of g]ᵀ · rhs[rows of g]; the rows are the
    contracted dim.

    Three warpgroups: 0 loads and multiplies (one warp each), 1 writes, 2 zeroes the rows of other groups in a group's
    first and last stage. The tiles of the result are (group, strip of m elements of K, column tile).

    Args:
      refs: inputs in GMEM: group bounds int32 [G + 1], lhs [M, K], rhs [M, N]; output in GMEM: [G, K, N]; scratch: lhs
        stages [stages, k, m], rhs stages, staging [2, m, columns], TMEM accumulators [m, 2 · n], barriers `full`,
        `empty`, `done`, `read`, `masked`.
      gpu: the module `jax.experimental.pallas.mosaic_gpu`.
      shape: (K, N, G).
      tile: tile sizes; `tile.k` rows are one step.
      num_sms: multiprocessors to use.
    """
    k, n, groups = shape
    bounds, lhs, rhs, out, lhs_smem, rhs_smem, staging, acc, *barriers, masked = refs
    full, empty = barriers[:2]
    high, wide = pl.cdiv(k, tile.cluster * tile.m), pl.cdiv(n, tile.n)
    pair, member = _pair(tile.cluster), parts.index_in_cluster(tile.cluster)

    def tile_at(number):
        """(group, strip of this block, column tile, `GroupRows`) of a tile."""
        group, strip, column, rows = parts.transpose_tile(bounds, number, high, wide, tile.k)
        live = (rows.steps > 0).astype(jnp.int32)
        return (group, strip * tile.cluster + member, column, rows), rows.steps, live

    each = parts.each_tile(groups * high * wide, parts.cluster_count(num_sms, tile.cluster), tile_at)

    def load(tile_at):
        """The function that starts the copies of step i of a tile: [tile.k rows, columns] of lhs and of rhs."""
        _, strip, column, rows = tile_at
        own = tile.n // tile.cluster

        def copies(i, stage, barrier):
            src_slice = pl.ds(rows.first + i * tile.k, tile.k)
            gpu.copy_gmem_to_smem(lhs.at[src_slice, pl.ds(strip * tile.m, tile.m)], lhs_smem.at[stage], barrier)
            right = rhs.at[src_slice, pl.ds((column * tile.cluster + member) * own, own)]
            gpu.copy_gmem_to_smem(right, rhs_smem.at[stage], barrier)

        return copies

    def matmuls(tile_at, i, stage, total):
        """Issue total += lhsᵀ · rhs of one stage, after its rows of other groups were zeroed."""
        if not pair:
            low, high = tile_at[-1].span(i, tile.k)

            @pl.when((low > 0) | (high < tile.k))
            def _():
                gpu.barrier_wait(masked.at[stage])

        left = lhs_smem.at[stage].T
        gpu.tcgen05_mma(total, left, rhs_smem.at[stage], accumulate=i > 0, **pair)

    def write_tile(tile_at, steps, _, used):
        """Write a tile of the result: its accumulator, or zeros if the group is empty."""
        group, strip, column, _ = tile_at
        target, width = out.at[group, pl.ds(strip * tile.m, tile.m)], staging.shape[-1]

        def store(values):
            parts.write(gpu, target, column, tile.n, values, staging)

        @pl.when(steps > 0)
        def _():
            read_accumulator(
                gpu,
                acc,
                used,
                barriers,
                lambda total: store(lambda left: load_columns(gpu, total, left, width).astype(out.dtype)),
            )

        @pl.when(steps == 0)
        def _():
            store(lambda left: _zeros(gpu, tile.m, width, out.dtype))

    walk(gpu, tile, acc, barriers, each, load, matmuls, write_tile, ready=masked if pair else None)

    @pl.when(lax.axis_index("warpgroup") == MASKING)
    def _():
        each(functools.partial(_mask_tile, gpu, tile, (lhs_smem, rhs_smem), full, empty, masked))


def grouped_matmul_transpose(p: TransposeProblem, *, tile: parts.Tile, num_sms: int) -> jax.Array:
    """As `hopper.grouped_matmul_transpose`."""
    gpu = _compat.mosaic_gpu()
    pair = tile.cluster > 1
    scratch = [
        parts.smem(gpu, (tile.stages, tile.k, tile.m), p.lhs.dtype),
        parts.smem(gpu, (tile.stages, tile.k, tile.n // tile.cluster), p.rhs.dtype),
        parts.smem(gpu, (2, tile.m, parts.staging_columns(tile.n, p.out_dtype)), p.out_dtype),
        gpu.TMEM((tile.m, 2 * tile.n), jnp.float32, collective=pair),
        gpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        gpu.Barrier(num_arrivals=2, num_barriers=tile.stages, orders_tensor_core=True),
        gpu.Barrier(num_arrivals=1, num_barriers=2, orders_tensor_core=True),
        parts.cluster_barrier(gpu, tile.cluster, num_arrivals=1, num_barriers=2, orders_tensor_core=True),
        parts.cluster_barrier(gpu, tile.cluster, num_arrivals=1, num_barriers=tile.stages, orders_tensor_core=pair),
    ]
    return launch_transpose(_transpose_kernel, scratch, p, tile=tile, warpgroups=3, num_sms=num_sms)
