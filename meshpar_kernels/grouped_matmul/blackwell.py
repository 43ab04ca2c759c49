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
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels.grouped_matmul.gpu_parts import (
    CLUSTER,
    GroupRows,
    Tile,
    activate,
    cluster_barrier,
    cluster_count,
    cluster_grid,
    copy_rows,
    index_in_cluster,
    mask_rows,
    rasterize,
    ring,
    smem,
)
from meshpar_kernels.grouped_matmul.hopper import drain, drains
from meshpar_kernels.grouped_matmul.problem import matmul_problem, padded_scale, transpose_problem
from meshpar_kernels.grouped_matmul.schedule import span_tile_steps

__all__ = ["grouped_matmul", "grouped_matmul_transpose", "multiply_tiles"]

LOADER, MULTIPLIER = 0, 1
"""Warps of the first warpgroup."""


def multiply_tiles(gpu, stages, slot_of, barriers, each_tile, copies, matmuls, *, cluster: int = 1, ready=None):
    """The loading warp and the multiplying warp: each iterates over all tiles of this block; returns nothing.

    The loading warp runs ahead, so operands of the next tile are in flight while a tile is multiplied.

    Args:
      stages: number of shared-memory stages.
      slot_of: number of tiles before → (accumulator slot, its TMEM ref).
      barriers: (`full`, `empty`, `done`, `read`), see the module.
      each_tile: calls its argument with (tile, K steps of the tile, K steps before, tiles before) for each tile; returns
        the numbers of all K steps and tiles.
      copies: (tile, i, stage, barrier): starts the loads of step i.
      matmuls: (tile, i, stage, accumulator): issues the matmuls of step i.
      cluster: blocks of a cluster; the first block issues the matmuls of both.
      ready: barriers, one for each stage, that the multiplying warp waits for instead of `full`.
    """
    full, empty, done, read = barriers
    loaded = full if ready is None else ready
    pair = _pair(cluster)

    def load_tile(tile, steps, step, used):
        """Start the loads of all steps of a tile, each into a stage that the matmuls have released (`empty`)."""
        del used

        def load(i, _):
            """Step i: wait until its stage is free (from the ring's second round on), and start the loads."""
            stage = ring(stages, step + i)

            @pl.when(step + i >= stages)
            def _():
                gpu.barrier_wait(empty.at[stage])

            copies(tile, i, stage, full.at[stage])

        lax.fori_loop(0, steps, load, None)

    def multiply_tile(tile, steps, step, used):
        """Issue the matmuls of all steps of a tile; have the tensor core report `empty` for each stage and `done` for
        the tile."""
        slot, total = slot_of(used)

        @pl.when((used >= 2) & (steps > 0))
        def _():
            gpu.barrier_wait(read.at[slot])

        def matmul(i, _):
            stage = ring(stages, step + i)
            gpu.barrier_wait(loaded.at[stage])
            matmuls(tile, i, stage, total)
            gpu.tcgen05_commit_arrive(empty.at[stage], **pair)

        lax.fori_loop(0, steps, matmul, None)

        @pl.when(steps > 0)
        def _():
            gpu.tcgen05_commit_arrive(done.at[slot], **pair)

    member = index_in_cluster(cluster)

    def load_tiles():
        step, _ = each_tile(load_tile)
        if cluster == 1 and drains():
            drain(gpu, step, stages, empty)

    def multiply_all():
        _, used = each_tile(multiply_tile)
        if cluster == 1 and drains():
            drain(gpu, used, 2, read)

    @gpu.warp_map
    def _(warp):
        pl.when(warp == LOADER)(load_tiles)
        multiplies = warp == MULTIPLIER
        pl.when(multiplies if cluster == 1 else multiplies & (member == 0))(multiply_all)


def _pair(cluster: int) -> dict[str, str]:
    """Keyword arguments of a matmul that both blocks of a cluster compute together, and of its reports; {} without
    clusters."""
    return {"collective_axis": CLUSTER} if cluster > 1 else {}


def _matmul_kernel(*refs, gpu, shape, tile, transpose_rhs, activation, num_rhs, scaled, num_sms):
    """The grouped matmul, for one thread block: out[rows of a group] = activation(lhs · rhs of the group), optionally
    times `scale`.

    Two warpgroups: 0 loads and multiplies (one warp each), 1 writes. The tiles of the result are (tile step, column
    tile); a tile step is a tile of rows of one group (`span_tile_steps`).

    Args:
      refs: inputs in GMEM: `first`, `low`, `high`, `group`, `live` int32 [tile steps], `number` int32 [1], lhs [M, K],
        `num_rhs` arrays rhs [G, K, N] ([G, N, K] with `transpose_rhs`), scale float32 [M] if `scaled`; output in GMEM:
        [M, N]; scratch: lhs stages, rhs stages [stages, num_rhs, …], (swizzled, plain) staging buffers in the same
        shared memory, TMEM accumulators [m, 2 · num_rhs · n], barriers `full`, `empty`, `done`, `read`.
      gpu: the module `jax.experimental.pallas.mosaic_gpu`.
      shape: (K, N).
      tile: tile sizes.
      activation: as in `reference.grouped_matmul`; with two rhs the first is the gate.
      num_rhs: 1, or 2 for a gated activation.
      scaled: whether rows are multiplied by `scale`.
      num_sms: multiprocessors to use.
    """
    k, n = shape
    first, low, high, group, live, number, lhs, *refs = refs
    rhs, refs = refs[:num_rhs], refs[num_rhs:]
    scale = refs.pop(0) if scaled else None
    out, lhs_smem, rhs_smem, (swizzled, plain), acc, full, empty, done, read = refs
    columns, stages = pl.cdiv(n, tile.n), tile.stages
    warpgroup = lax.axis_index("warpgroup")
    multiprocessor, member = lax.axis_index("multiprocessor"), index_in_cluster(tile.cluster)
    clusters = cluster_count(num_sms, tile.cluster)
    tile_steps = number[0]
    num_own = lax.div(tile_steps * columns - multiprocessor + (clusters - 1), jnp.int32(clusters))

    def slot_of(used):
        slot = lax.rem(used, jnp.int32(2))
        return slot, acc.at[:, pl.ds(slot * (num_rhs * tile.n), num_rhs * tile.n)]

    def each_tile(work):
        """Call `work((tile step, column tile), K steps, K steps before, live tiles before)` for each tile of this
        block.

        A tile of no group has 0 K steps; its result is zero.
        """

        def one(i, before):
            """The i-th tile of this block; the carry is (K steps, live tiles) before it."""
            step, used = before
            tile_step, column = rasterize(multiprocessor + i * clusters, tile_steps, columns)
            steps = live[tile_step] * pl.cdiv(k, tile.k)
            work((tile_step, column), steps, step, used)
            return step + steps, used + live[tile_step]

        return lax.fori_loop(0, num_own, one, (jnp.int32(0), jnp.int32(0)))

    def copies(tile_at, i, stage, barrier):
        """Start the TMA copies of K step i: lhs and each rhs into stage `stage`, counted at `barrier`."""
        tile_step, column = tile_at
        inner, g = pl.ds(i * tile.k, tile.k), group[tile_step]
        rows, outer = pl.ds(first[tile_step], tile.cluster * tile.m), pl.ds(column * tile.n, tile.n)
        gpu.copy_gmem_to_smem(lhs.at[rows, inner], lhs_smem.at[stage], barrier, **part(0))
        src_slice = (g, outer, inner) if transpose_rhs else (g, inner, outer)
        for half, matrix in enumerate(rhs):
            gpu.copy_gmem_to_smem(
                matrix.at[src_slice], rhs_smem.at[stage, half], barrier, **part(0 if transpose_rhs else 1)
            )

    def part(dim):
        """Keyword arguments of a copy that the blocks of a cluster split along `dim`, counted at the first block's
        barrier."""
        if tile.cluster == 1:
            return {}
        return {"collective_axes": CLUSTER, "leader_tracked": gpu.CopyPartition.PARTITIONED(dim)}

    def matmuls(_, i, stage, total):
        """Issue total += lhs · rhs of one stage, for each rhs; K step 0 overwrites the accumulator."""
        for half in range(num_rhs):
            weights = rhs_smem.at[stage, half]
            weights = _compat.transpose_ref(weights) if transpose_rhs else weights
            dst = total.at[:, pl.ds(half * tile.n, tile.n)]
            gpu.tcgen05_mma(dst, lhs_smem.at[stage], weights, accumulate=i > 0, **_pair(tile.cluster))

    def sums_of(row, total, left, width):
        """Columns [left, left + width) of the result of a tile, [m, width]: loaded from tensor memory, with activation
        and scale applied."""
        values = [
            gpu.async_load_tmem(total.at[:, pl.ds(half * tile.n + left, width)], layout=gpu.Layout.TCGEN05)
            for half in range(num_rhs)
        ]
        value = activate(values, activation)
        if scaled:
            factor = _compat.load_gmem(scale, pl.ds(row, tile.m), gpu.Layout.TCGEN05.reduce(1))
            value = value * lax.broadcast_in_dim(factor, value.shape, [0])
        return value.astype(out.dtype)

    def write(row, column, begin, end, values):
        """Write the rows [begin, end) of a tile to GMEM; `values(left, width)` returns its columns.

        A full tile goes through two swizzled slots, a partial one through the plain staging buffer (`copy_rows`); both
        are the same memory.
        """
        width = swizzled.shape[2]
        full_tile = (begin == 0) & (end == tile.m)
        target = out.at[pl.ds(row, tile.m)]
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
        for c, left in enumerate(range(0, tile.n, width)):
            dst = pl.ds(column * tile.n + left, width)
            value = values(left, width)

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
                copy_rows(gpu, plain, target, begin, end, dst, tile.m)

    def write_sums(row, column, begin, end, used):
        """Wait until the accumulator is complete, write the tile, and release the accumulator slot (`read`)."""
        slot, total = slot_of(used)
        gpu.barrier_wait(done.at[slot])
        write(row, column, begin, end, functools.partial(sums_of, row, total))
        gpu.wait_load_tmem()
        gpu.barrier_arrive(read.at[slot])

    def zeros(_, width):
        return gpu.layout_cast(jnp.zeros((tile.m, width), out.dtype), gpu.Layout.TCGEN05)

    def write_tile(tile_at, steps, step, used):
        """Write this block's rows of a tile: its accumulator if the tile step is live, else zeros."""
        del steps, step
        tile_step, column = tile_at
        row, alive, begin, end = first[tile_step], live[tile_step] > 0, low[tile_step], high[tile_step]
        if tile.cluster > 1:
            above = member * tile.m
            row, begin, end = row + above, jnp.clip(begin - above, 0, tile.m), jnp.clip(end - above, 0, tile.m)

        @pl.when(alive)
        def _():
            write_sums(row, column, begin, end, used)

        @pl.when(~alive)
        def _():
            write(row, column, begin, end, zeros)

    @pl.when(warpgroup == 0)
    def _():
        barriers = full, empty, done, read
        multiply_tiles(gpu, stages, slot_of, barriers, each_tile, copies, matmuls, cluster=tile.cluster)

    @pl.when(warpgroup == 1)
    def _():
        each_tile(write_tile)
        gpu.wait_smem_to_gmem(0)


def grouped_matmul(
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    row_scale: jax.Array | None,
    *,
    transpose_rhs: bool,
    activation: str | None,
    out_dtype: jnp.dtype,
    tile: Tile,
    num_sms: int,
) -> jax.Array:
    """As `reference.grouped_matmul`, without indices; tiles as on Hopper (`span_tile_steps`)."""
    gpu = _compat.mosaic_gpu()
    rows, k, n, _, bounds = matmul_problem(lhs.shape[0], rhs[0], group_sizes, group_offset, transpose_rhs=transpose_rhs)
    num_rhs = len(rhs)
    width = min(tile.n, 128 // out_dtype.itemsize)
    own = tile.n // tile.cluster
    rhs_tile = (own, tile.k) if transpose_rhs else (tile.k, own)
    operands = [*span_tile_steps(bounds, rows, tile.cluster * tile.m), lhs, *rhs]
    if row_scale is not None:
        operands.append(padded_scale(row_scale, tile.cluster * tile.m))
    tensor_core = {"num_arrivals": 1, "orders_tensor_core": True}
    return gpu.kernel(
        functools.partial(
            _matmul_kernel,
            gpu=gpu,
            shape=(k, n),
            tile=tile,
            transpose_rhs=transpose_rhs,
            activation=activation,
            num_rhs=num_rhs,
            scaled=row_scale is not None,
            num_sms=num_sms,
        ),
        out_type=_compat.out_struct((rows, n), out_dtype, lhs, *rhs),
        scratch_types=[
            smem(gpu, (tile.stages, tile.m, tile.k), lhs.dtype),
            smem(gpu, (tile.stages, num_rhs, *rhs_tile), lhs.dtype),
            gpu.RefUnion(smem(gpu, (2, tile.m, width), out_dtype), gpu.SMEM((tile.m, width), out_dtype)),
            gpu.TMEM((tile.m, 2 * num_rhs * tile.n), jnp.float32, collective=tile.cluster > 1),
            gpu.Barrier(num_arrivals=1 + num_rhs, num_barriers=tile.stages),
            gpu.Barrier(num_barriers=tile.stages, **tensor_core),
            gpu.Barrier(num_barriers=2, **tensor_core),
            cluster_barrier(gpu, tile.cluster, num_barriers=2, **tensor_core),
        ],
        **cluster_grid(num_sms, tile.cluster),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="meshpar_grouped_matmul",
        compiler_params=gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics.Lane),
    )(*operands)


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
    bounds, lhs, rhs, out, lhs_smem, rhs_smem, staging, acc, full, empty, done, read, masked = refs
    high, wide, stages = pl.cdiv(k, tile.cluster * tile.m), pl.cdiv(n, tile.n), tile.stages
    warpgroup, pair = lax.axis_index("warpgroup"), _pair(tile.cluster)
    multiprocessor, member = lax.axis_index("multiprocessor"), index_in_cluster(tile.cluster)
    clusters = cluster_count(num_sms, tile.cluster)
    num_own = lax.div(groups * high * wide - multiprocessor + (clusters - 1), jnp.int32(clusters))

    def slot_of(used):
        slot = lax.rem(used, jnp.int32(2))
        return slot, acc.at[:, pl.ds(slot * tile.n, tile.n)]

    def each_tile(work):
        """Call `work((group, strip of this block, column tile, `GroupRows`), steps, steps before, live tiles before)`
        for each tile."""

        def one(i, before):
            """The i-th tile of this block; the carry is (steps, live tiles) before it."""
            step, used = before
            number = multiprocessor + i * clusters
            group = lax.div(number, jnp.int32(high * wide))
            strip, column = rasterize(number - group * (high * wide), jnp.int32(high), wide)
            rows = GroupRows.of(bounds, group, tile.k)
            work((group, strip * tile.cluster + member, column, rows), rows.steps, step, used)
            return step + rows.steps, used + (rows.steps > 0).astype(jnp.int32)

        return lax.fori_loop(0, num_own, one, (jnp.int32(0), jnp.int32(0)))

    def copies(tile_at, i, stage, barrier):
        """Start the TMA copies of step i, [tile.k rows, columns] of lhs and of rhs, into stage `stage`."""
        _, strip, column, rows = tile_at
        src_slice = pl.ds(rows.first + i * tile.k, tile.k)
        gpu.copy_gmem_to_smem(lhs.at[src_slice, pl.ds(strip * tile.m, tile.m)], lhs_smem.at[stage], barrier)
        own = tile.n // tile.cluster
        right = rhs.at[src_slice, pl.ds((column * tile.cluster + member) * own, own)]
        gpu.copy_gmem_to_smem(right, rhs_smem.at[stage], barrier)

    def matmuls(tile_at, i, stage, total):
        """Issue total += lhsᵀ · rhs of one stage, after its rows of other groups were zeroed."""
        if not pair:
            low, high = tile_at[-1].span(i, tile.k)

            @pl.when((low > 0) | (high < tile.k))
            def _():
                gpu.barrier_wait(masked.at[stage])

        left = _compat.transpose_ref(lhs_smem.at[stage])
        gpu.tcgen05_mma(total, left, rhs_smem.at[stage], accumulate=i > 0, **pair)

    def mask_tile(tile_at, steps, step, used):
        """Zero the rows of other groups in all stages of a tile, and arrive at `masked` and `empty`; run by warpgroup
        2."""
        del steps, used
        rows = tile_at[-1]

        def one(i, _):
            """Step i: zero the rows of other groups in its stage, if there are any, and signal it."""
            stage = ring(stages, step + i)
            low, high = rows.span(i, tile.k)
            gpu.barrier_wait(full.at[stage])

            @pl.when((low > 0) | (high < tile.k))
            def _():
                mask_rows(gpu, lhs_smem.at[stage], low, high)
                mask_rows(gpu, rhs_smem.at[stage], low, high)
                gpu.commit_smem()
                if not pair:
                    gpu.barrier_arrive(masked.at[stage])

            if pair:
                gpu.barrier_arrive(masked.at[stage])
            gpu.barrier_arrive(empty.at[stage])

        lax.fori_loop(0, rows.steps, one, None)

    def write(target, column, values):
        """Write a tile [m, n] to GMEM through the two slots of `staging`; `values(left, width)` returns its columns."""
        width = staging.shape[2]
        odd = tile.n // width % 2  # odd number of chunks: slot 0 may still be read for the tile before
        for c, left in enumerate(range(0, tile.n, width)):
            gpu.wait_smem_to_gmem(0 if c == 0 and odd else 1, wait_read_only=True)
            staging[c % 2] = values(left, width)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(staging.at[c % 2], target.at[:, pl.ds(column * tile.n + left, width)])

    def write_sums(target, column, used):
        """Wait until the accumulator is complete, write the tile, and release the accumulator slot (`read`)."""
        slot, total = slot_of(used)
        gpu.barrier_wait(done.at[slot])

        def values(left, width):
            dst = total.at[:, pl.ds(left, width)]
            return gpu.async_load_tmem(dst, layout=gpu.Layout.TCGEN05).astype(out.dtype)

        write(target, column, values)
        gpu.wait_load_tmem()
        gpu.barrier_arrive(read.at[slot])

    def zeros(_, width):
        return gpu.layout_cast(jnp.zeros((tile.m, width), out.dtype), gpu.Layout.TCGEN05)

    def write_tile(tile_at, steps, step, used):
        """Write a tile of the result: its accumulator, or zeros if the group is empty."""
        del step
        group, strip, column, _ = tile_at
        target = out.at[group, pl.ds(strip * tile.m, tile.m)]

        @pl.when(steps > 0)
        def _():
            write_sums(target, column, used)

        @pl.when(steps == 0)
        def _():
            write(target, column, zeros)

    @pl.when(warpgroup == 0)
    def _():
        barriers, how = (full, empty, done, read), {"cluster": tile.cluster, "ready": masked if pair else None}
        multiply_tiles(gpu, stages, slot_of, barriers, each_tile, copies, matmuls, **how)

    @pl.when(warpgroup == 1)
    def _():
        each_tile(write_tile)
        gpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == 2)
    def _():
        each_tile(mask_tile)


def grouped_matmul_transpose(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    row_scale: jax.Array | None,
    *,
    groups: int,
    out_dtype: jnp.dtype,
    tile: Tile,
    num_sms: int,
) -> jax.Array:
    """As `reference.grouped_matmul_transpose`; `tile` and row_scale as on Hopper."""
    gpu = _compat.mosaic_gpu()
    _, k, n, *_, bounds = transpose_problem(lhs, rhs, group_sizes, group_offset, groups=groups)
    if row_scale is not None:
        rhs = (rhs.astype(jnp.float32) * row_scale.astype(jnp.float32)[:, None]).astype(rhs.dtype)
    width = min(tile.n, 128 // out_dtype.itemsize)
    return gpu.kernel(
        functools.partial(_transpose_kernel, gpu=gpu, shape=(k, n, groups), tile=tile, num_sms=num_sms),
        out_type=_compat.out_struct((groups, k, n), out_dtype, lhs, rhs),
        scratch_types=[
            smem(gpu, (tile.stages, tile.k, tile.m), lhs.dtype),
            smem(gpu, (tile.stages, tile.k, tile.n // tile.cluster), rhs.dtype),
            smem(gpu, (2, tile.m, width), out_dtype),
            gpu.TMEM((tile.m, 2 * tile.n), jnp.float32, collective=tile.cluster > 1),
            gpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
            gpu.Barrier(num_arrivals=2, num_barriers=tile.stages, orders_tensor_core=True),
            gpu.Barrier(num_arrivals=1, num_barriers=2, orders_tensor_core=True),
            cluster_barrier(gpu, tile.cluster, num_arrivals=1, num_barriers=2, orders_tensor_core=True),
            cluster_barrier(
                gpu, tile.cluster, num_arrivals=1, num_barriers=tile.stages, orders_tensor_core=tile.cluster > 1
            ),
        ],
        **cluster_grid(num_sms, tile.cluster),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="meshpar_grouped_matmul_transpose",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane),
    )(bounds, lhs, rhs)
