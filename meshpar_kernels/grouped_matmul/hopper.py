"""Grouped matmul for Hopper GPUs (sm_90a, Mosaic GPU): TMA loads, `wgmma`, one loading and two multiplying warpgroups.

One thread block per multiprocessor iterates over tiles of the result. The loading warpgroup fills a ring of
shared-memory stages, and runs ahead into the next tile. Each of the two multiplying warpgroups accumulates half of the
tile in registers.

Barriers of a stage s:
- `full[s]` completes when all copies into the stage have landed (each copy arrives once, with its bytes). The
multiplying warpgroups wait for it before `wgmma` reads the stage.
- `empty[s]` completes when both multiplying warpgroups have arrived. Each arrives for the stage of step i once the
matmuls of step i are done, which it knows one step later (`wgmma_wait(1)`: all but the last are done); for a tile's
last stage it arrives after `wgmma_wait(0)`. The loading warpgroup waits for it before it overwrites the stage, from the
second use on.
- Both sides count steps over all tiles, so stage and phase agree although tiles differ in their number of steps.

In a cluster (`Tile.cluster`) two blocks compute adjacent tiles: with the same rows (in the transpose: of the same group
and the same columns of rhs), so both have the same steps, whatever the groups are. The operand that both tiles need is
loaded once: each block copies one half of it into the memory of both blocks, and the copy counts at `full` of both,
which wait for all bytes. So a stage may only be overwritten when both blocks have read it, and an arrival at `empty`
counts in both. One thread arrives at it for its warpgroup, whose other warps must have observed `full` before: the
matmuls imply it; without matmuls `commit_smem` does. A block ends when all its stages are free, since until then the
other block arrives at its barriers (`drain`).

Results are copied from registers to shared memory. `commit_smem` makes these writes visible to TMA and synchronizes the
warpgroup; then the copy to global memory starts. Before the staging memory is overwritten, `wait_smem_to_gmem` waits
until the copies have read it. Each warpgroup has its own staging memory, so neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels.grouped_matmul import gpu_common as parts
from meshpar_kernels.grouped_matmul.gpu_launch import launch_matmul, launch_transpose
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, TransposeProblem
from meshpar_kernels.grouped_matmul.schedule import Spans

CONSUMERS = 2
LOADER, SENDER = 0, 1
"""Warps of the loading warpgroup, where it has two roles."""


def load_stages(gpu: Any, step, steps, stages: int, full, empty, copies, base: int = 0) -> jax.Array:
    """Start the loads of the next `steps` steps, each into a stage that is free; return the step number after them.

    Args:
      step: number of steps before these, over all tiles.
      steps: steps to load.
      stages: slots of the ring.
      full, empty: barriers, one for each slot; waits for `empty` from the second use of a slot on.
      copies: (i, slot, barrier): starts the copies of step i into a slot, counted at the barrier.
      base: first slot of the ring in the stage buffers and barriers.
    """

    def one(i, step):
        """Step i: wait until its stage is free, and start the loads; the carry is the step number over all tiles."""
        slot = base + parts.ring(stages, step)

        @pl.when(step >= stages)
        def _():
            gpu.barrier_wait(empty.at[slot])

        copies(i, slot, full.at[slot])
        return step + 1

    return lax.fori_loop(0, steps, one, step)


def drains(cluster: int = 1) -> bool:
    """Whether a block waits for the last phases of its barriers before it ends: in clusters, since the other block arrives
    at them; and in JAX's GPU interpreter, which (jax 0.11.2) reports a phase that nobody waited for."""
    return cluster > 1 or _compat.interpreting_gpu()


def drain(gpu: Any, step, stages: int, empty, base: int = 0) -> None:
    """Wait until all stages are free. Then the other block of the cluster arrives at no barrier of this block any more,
    and this one may end.

    Args:
      step: steps loaded in total.
      stages, empty, base: as in `load_stages`.
    """

    def one(i, _):
        gpu.barrier_wait(empty.at[base + parts.ring(stages, step - 1 - i)])

    lax.fori_loop(0, jnp.minimum(step, stages), one, None)


def multiply_stages(gpu: Any, step, steps, stages: int, full, empty, matmuls, base: Any = 0) -> jax.Array:
    """Multiply `steps` stages as they fill, and release them; all matmuls are done on return. Returns the step number
    after them.

    Args:
      matmuls: (i, slot): issues the `wgmma`s of step i.
      step, steps, stages, full, empty, base: as in `load_stages`.
    """

    def one(i, step):
        """Step i: issue its matmuls, wait for the matmuls of the step before, and release that step's stage."""
        slot = base + parts.ring(stages, step)
        gpu.barrier_wait(full.at[slot])
        matmuls(i, slot)
        gpu.wgmma_wait(1)

        @pl.when(i > 0)
        def _():
            gpu.barrier_arrive(empty.at[base + parts.ring(stages, step - 1)])

        return step + 1

    step = lax.fori_loop(0, steps, one, step)
    gpu.wgmma_wait(0)

    @pl.when(steps > 0)
    def _():
        gpu.barrier_arrive(empty.at[base + parts.ring(stages, step - 1)])

    return step


def skip(gpu: Any, step, steps, stages: int, full, empty, cluster: int) -> jax.Array:
    """Release the stages of a tile without multiplying them: this warpgroup's half of the tile has no row of the group."""

    def one(_, step):
        """Wait for one stage and release it."""
        slot = parts.ring(stages, step)
        gpu.barrier_wait(full.at[slot])
        if cluster > 1:  # one thread arrives, for all
            gpu.commit_smem()
        gpu.barrier_arrive(empty.at[slot])
        return step + 1

    return lax.fori_loop(0, steps, one, step)


def walk(
    gpu: Any, tile: parts.Tile, barriers: tuple[Any, Any], each: parts.Each, load: Callable[[Any], Callable[..., None]],
    compute: Callable[..., None], concurrent: Callable[[], None] | None = None,
    finish: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """The loops over this block's tiles, of the loading warpgroup and of the two multiplying warpgroups.

    Args:
      barriers: `full` and `empty`, see the module.
      load: tile → `copies` of `load_stages`.
      compute: called by each multiplying warpgroup with the arguments that `each` gives.
      concurrent: called by a second warp of the loading warpgroup, concurrently with the loading warp; None: no such
        warp.
      finish: called by each multiplying warpgroup after its last tile.
    """
    full, empty = barriers
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == CONSUMERS)
    def _():
        gpu.set_max_registers(40, action="decrease")

        def load_tile(tile_at, steps, step, _):
            load_stages(gpu, step, steps, tile.stages, full, empty, load(tile_at))

        def load_tiles():
            loaded, _ = each(load_tile)
            if drains(tile.cluster):
                drain(gpu, loaded, tile.stages, empty)

        if concurrent is None:
            load_tiles()
            return
        other = concurrent

        @gpu.warp_map
        def _(warp):
            pl.when(warp == LOADER)(load_tiles)
            pl.when(warp == SENDER)(other)

    @pl.when(warpgroup < CONSUMERS)
    def _():
        gpu.set_max_registers(232, action="increase")
        each(compute)
        if finish is not None:
            finish()
        gpu.wait_smem_to_gmem(0)


def row_parts(
    gpu: Any, spans: Spans, tile: parts.Tile, barriers: tuple[Any, Any], staging: Sequence[Any], out: Any,
    multiply: Callable[..., None],
) -> Callable[..., None]:  # fmt: skip
    """`compute` of `walk` for a grouped matmul: each warpgroup computes `ROWS` rows of a tile, and writes those that belong
    to the group. If none does, it releases the stages without multiplying them.

    Args:
      staging: for each multiplying warpgroup, as in `store`.
      multiply: (tile, first row of the part, K steps, K steps before, write): multiplies the stages, and calls
        `write(value)` with the float32 result [ROWS, tile.n].
    """
    full, empty = barriers
    warpgroup = lax.axis_index("warpgroup")

    def compute(tile_at, steps, step, _):
        """Multiply and write this warpgroup's part of one tile."""
        tile_step, column = tile_at
        row, begin, end = parts.rows_in(spans, tile_step, warpgroup * parts.ROWS, parts.ROWS)

        def write_part(value):
            for w, (swizzled, plain) in enumerate(staging):

                @pl.when(warpgroup == w)
                def _(swizzled=swizzled, plain=plain):
                    store(gpu, value, out, row, column, begin, end, swizzled, plain)

        @pl.when(end > begin)
        def _():
            multiply(tile_at, row, steps, step, write_part)

        @pl.when(end <= begin)
        def _():
            skip(gpu, step, steps, tile.stages, full, empty, tile.cluster)

    return compute


def _shared(tile: parts.Tile) -> dict[str, Any]:
    """Arguments of a multicast copy of a tile that the blocks of a cluster share: each block loads one part for all."""
    return {"collective_axes": parts.CLUSTER} if tile.cluster > 1 else {}


def _matmul_kernel(*refs, gpu, shape, tile, transpose_rhs, activation, num_rhs, scaled, num_sms):
    """The grouped matmul, for one thread block: out[rows of a group] = activation(lhs · rhs of the group), optionally
    times `scale`.

    Warpgroups 0 and 1 multiply `ROWS` rows of a tile each; warpgroup 2 loads. The tiles of the result are (tile step,
    column tile); a tile step is a tile of rows of one group (`span_tile_steps`).

    Args:
      refs: inputs in GMEM: `Spans`, lhs [M, K], `num_rhs` arrays rhs [G, K, N] ([G, N, K] with `transpose_rhs`), scale
        float32 [M] if `scaled`; output in GMEM: [M, N]; scratch: lhs stages [stages, m, k], rhs stages [stages,
        num_rhs, …], `row_staging` of each multiplying warpgroup, barriers `full` and `empty`.
      gpu: the module `jax.experimental.pallas.mosaic_gpu`.
      shape: (K, N).
      tile: tile sizes; m = 2 · ROWS.
      activation: as in `reference.grouped_matmul`; with two rhs the first is the gate.
      num_rhs: 1, or 2 for a gated activation.
      scaled: whether rows are multiplied by `scale`.
      num_sms: multiprocessors to use.
    """
    k, n = shape
    spans, (lhs, *refs) = Spans(*refs[:6]), refs[6:]
    rhs, refs = refs[:num_rhs], refs[num_rhs:]
    scale = refs.pop(0) if scaled else None
    out, lhs_smem, rhs_smem, staging, full, empty = refs
    part = pl.ds(lax.axis_index("warpgroup") * parts.ROWS, parts.ROWS)
    each = parts.each_row_tile(spans, pl.cdiv(n, tile.n), pl.cdiv(k, tile.k), num_sms, tile.cluster, adjacent=True)

    def load(tile_at):
        """The function that starts the copies of K step i of a tile: a slice of lhs and of each rhs."""
        tile_step, column = tile_at
        row, g = spans.first[tile_step], spans.group[tile_step]

        def copies(i, slot, barrier):
            inner = pl.ds(i * tile.k, tile.k)
            gpu.copy_gmem_to_smem(lhs.at[pl.ds(row, tile.m), inner], lhs_smem.at[slot], barrier, **_shared(tile))
            outer = pl.ds(column * tile.n, tile.n)
            src_slice = (g, outer, inner) if transpose_rhs else (g, inner, outer)
            for half, matrix in enumerate(rhs):
                gpu.copy_gmem_to_smem(matrix.at[src_slice], rhs_smem.at[slot, half], barrier)

        return copies

    def multiply(tile_at, row, steps, step, write_part):
        def with_sums(*acc):
            """Multiply the tile into the accumulators `acc`, one for each rhs; apply activation and scale; write the
            result."""

            def matmuls(_, slot):
                """Issue acc += lhs · rhs of one stage, for each rhs."""
                for half, total in enumerate(acc):
                    weights = rhs_smem.at[slot, half]
                    weights = weights.T if transpose_rhs else weights
                    gpu.wgmma(total, lhs_smem.at[slot, part], weights)

            multiply_stages(gpu, step, steps, tile.stages, full, empty, matmuls)
            value = parts.activate([total[...] for total in acc], activation)
            if scaled:
                factor = _compat.load_gmem(scale, pl.ds(row, parts.ROWS), gpu.Layout.WGMMA.reduce(1))
                factor = jnp.where(spans.live[tile_at[0]] > 0, factor, 0.0)
                value = value * lax.broadcast_in_dim(factor, value.shape, [0])
            write_part(value)

        pl.run_scoped(with_sums, *[gpu.ACC((parts.ROWS, tile.n), jnp.float32)] * num_rhs)

    walk(gpu, tile, (full, empty), each, load, row_parts(gpu, spans, tile, (full, empty), staging, out, multiply))


def store(gpu: Any, value, out, row, column, begin, end, swizzled, plain) -> None:
    """Write the rows [begin, end) of a warpgroup's part of a tile, in the dtype of `out`.

    Args:
      value: float32 registers [ROWS, tile.n].
      row, column: first row of the part in `out`; column tile.
      swizzled, plain: `row_staging`, for a full part and for a partial one.
    """
    value = value.astype(out.dtype)
    target = out.at[pl.ds(row, parts.ROWS)]
    full_tile = (begin == 0) & (end == parts.ROWS)
    gpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(full_tile)
    def _():
        parts.write(gpu, target, column, value.shape[1], columns_of(value, swizzled), swizzled)

    @pl.when(~full_tile)
    def _():
        for chunk, dst in parts.chunks(value, column, plain.shape[1]):
            gpu.wait_smem_to_gmem(0, wait_read_only=True)
            _compat.store_smem(plain, chunk)
            gpu.commit_smem()
            parts.copy_rows(gpu, plain, target, begin, end, dst, parts.ROWS)


def columns_of(value: jax.Array, staging: Any) -> Callable[[int], jax.Array]:
    """First column → the columns of `value` that `staging` has room for."""
    return lambda left: value[:, left : left + staging.shape[-1]]


def grouped_matmul(p: MatmulProblem, *, tile: parts.Tile, num_sms: int) -> jax.Array:
    """As `reference.grouped_matmul`.

    Tiles begin with a group, rounded down to where a copy may begin (`span_tile_steps`). A warpgroup whose half of a
    tile has no row of the group does not multiply. The rows of other groups in a tile are not written.
    """
    gpu = _compat.mosaic_gpu()
    rhs_tile = (tile.n, tile.k) if p.transpose_rhs else (tile.k, tile.n)
    scratch = [
        parts.smem(gpu, (tile.stages, tile.m, tile.k), p.lhs.dtype),
        parts.smem(gpu, (tile.stages, len(p.rhs), *rhs_tile), p.lhs.dtype),
        [parts.row_staging(gpu, parts.ROWS, tile.n, p.out_dtype)] * CONSUMERS,
        gpu.Barrier(num_arrivals=1 + len(p.rhs), num_barriers=tile.stages),
        parts.cluster_barrier(gpu, tile.cluster, num_arrivals=CONSUMERS, num_barriers=tile.stages),
    ]
    return launch_matmul(
        _matmul_kernel, scratch, p, height=tile.m, tile=tile, warpgroups=CONSUMERS + 1, num_sms=num_sms
    )


def _transpose_kernel(*refs, gpu, shape, tile, num_sms):
    """The transposed grouped matmul, for one thread block: out[g] = lhs[rows of g]ᵀ · rhs[rows of g]; the rows are the
    contracted dim.

    Warpgroups 0 and 1 multiply, warpgroup 2 loads. The first and the last stage of a group may have rows of other
    groups. The multiplying warpgroups zero them in both operands (0 · NaN is NaN): each zeroes its own columns of lhs
    and its share of rhs, and makes the zeros visible to the tensor cores (`commit_smem`). If both multiply one tile,
    each waits at `masked` for the other. Then the stage is multiplied and released as any other.

    Ping-pong (`tile.pingpong`): each multiplying warpgroup computes every other tile alone, from a ring of half of the
    stages. The loading warpgroup fills the two rings in the order of the tiles, and nothing else orders their matmuls:
    while one warpgroup writes a tile, the stages of the other are full.

    Args:
      refs: inputs in GMEM: group bounds int32 [G + 1], lhs [M, K], rhs [M, N]; output in GMEM: [G, K, N]; scratch: lhs
        stages [stages, k, m], rhs stages [stages, k, n], staging [CONSUMERS, 2, ROWS, columns], barriers `full`,
        `empty`, `masked`.
      gpu: the module `jax.experimental.pallas.mosaic_gpu`.
      shape: (K, N, G).
      tile: tile sizes; `tile.k` rows are one step.
      num_sms: multiprocessors to use.
    """
    k, n, groups = shape
    bounds, lhs, rhs, out, lhs_smem, rhs_smem, staging, full, empty, masked = refs
    rings = CONSUMERS if tile.pingpong else 1
    stages, together = tile.stages // rings, CONSUMERS // rings
    high, wide = pl.cdiv(pl.cdiv(k, tile.m), tile.cluster), pl.cdiv(n, tile.n)  # of clusters
    warpgroup = lax.axis_index("warpgroup")
    multiprocessor, member = lax.axis_index("multiprocessor"), parts.index_in_cluster(tile.cluster)
    clusters = parts.cluster_count(num_sms, tile.cluster)
    tiles = groups * high * wide
    num_own = parts.share(tiles, multiprocessor, clusters)

    def tile_at(i):
        """(group, first column of lhs, column tile of rhs, `GroupRows`) of the i-th tile of this block; no steps after
        the last tile."""
        number = jnp.minimum(multiprocessor + i * clusters, tiles - 1)
        group, strip, column, rows = parts.transpose_tile(bounds, number, high, wide, tile.k)
        rows = rows._replace(steps=jnp.where(i < num_own, rows.steps, 0))
        return group, (strip * tile.cluster + member) * tile.m, column, rows

    @pl.when(warpgroup == CONSUMERS)
    def _():
        gpu.set_max_registers(40, action="decrease")

        def load(i, step, base):
            """Load all stages of the i-th tile into the ring that begins at slot `base`; return the step number after
            it."""
            _, left, column, rows = tile_at(i)

            def copies(i, slot, barrier):
                """Start the TMA copies of step i, [tile.k rows, columns] of lhs and of rhs, into a slot."""
                src_slice = pl.ds(rows.first + i * tile.k, tile.k)
                gpu.copy_gmem_to_smem(lhs.at[src_slice, pl.ds(left, tile.m)], lhs_smem.at[slot], barrier)
                right = rhs.at[src_slice, pl.ds(column * tile.n, tile.n)]
                gpu.copy_gmem_to_smem(right, rhs_smem.at[slot], barrier, **_shared(tile))

            return load_stages(gpu, step, rows.steps, stages, full, empty, copies, base)

        def one(round_index, loaded):
            return tuple(load(round_index * rings + r, step, r * stages) for r, step in enumerate(loaded))

        rounds = lax.div(num_own + (rings - 1), jnp.int32(rings))
        loaded = lax.fori_loop(0, rounds, one, (jnp.int32(0),) * rings)
        for r, step in enumerate(loaded):
            if drains(tile.cluster):
                drain(gpu, step, stages, empty, r * stages)

    @pl.when(warpgroup < CONSUMERS)
    def _():
        gpu.set_max_registers(232, action="increase")
        r = warpgroup if rings > 1 else 0
        part = warpgroup if rings == 1 else 0
        height = tile.m // together

        def compute(round_index, step):
            """Multiply and write this warpgroup's part of one tile; return the step number after it."""
            group, left, column, rows = tile_at(round_index * rings + r)

            def with_sums(total):
                """Multiply all steps of the tile into the float32 accumulator `total` [height, n], and write the
                result."""

                def start(i, slot):
                    """Zero the rows of other groups in the stage of step i, then issue total += lhsᵀ · rhs."""
                    columns = lhs_smem.at[slot, :, pl.ds(part * height, height)]
                    low, high = rows.span(i, tile.k)

                    @pl.when((low > 0) | (high < tile.k))
                    def _():
                        _mask_stage(gpu, columns, rhs_smem.at[slot], low, high, part, together, masked)

                    gpu.wgmma(total, columns.T, rhs_smem.at[slot])

                multiply_stages(gpu, step, rows.steps, stages, full, empty, start, r * stages)
                value = total[...].astype(out.dtype)
                for above in range(0, height, parts.ROWS):
                    target = out.at[group, pl.ds(left + part * height + above, parts.ROWS)]
                    values = columns_of(value[above : above + parts.ROWS], staging)
                    parts.write(gpu, target, column, tile.n, values, staging.at[warpgroup])

            pl.run_scoped(with_sums, gpu.ACC((height, tile.n), jnp.float32))
            return step + rows.steps

        lax.fori_loop(0, lax.div(num_own - r + (rings - 1), jnp.int32(rings)), compute, jnp.int32(0))
        gpu.wait_smem_to_gmem(0)


def _mask_stage(gpu: Any, columns, rhs, low, high, part, together: int, masked) -> None:
    """Zero the rows outside [low, high) of a stage: this warpgroup's own columns of lhs and its share of rhs. On return
    the tensor cores see the zeros of all warpgroups that multiply the stage.

    Args:
      columns, rhs: SMEM [k, height], [k, n].
      part, together: index of this warpgroup among those that multiply the tile, and their number.
      masked: barrier at which they wait for each other.
    """
    parts.mask_rows(gpu, columns, low, high)
    for first in range(0, rhs.shape[1], together * parts.ROWS):
        begin = first + part * parts.ROWS

        @pl.when(begin < rhs.shape[1])
        def _(begin=begin):
            parts.mask_rows(gpu, rhs.at[:, pl.ds(begin, parts.ROWS)], low, high)

    gpu.commit_smem()
    if together > 1:
        gpu.barrier_arrive(masked)
        gpu.barrier_wait(masked)


def grouped_matmul_transpose(p: TransposeProblem, *, tile: parts.Tile, num_sms: int) -> jax.Array:
    """As `reference.grouped_matmul_transpose`."""
    gpu = _compat.mosaic_gpu()
    readers = 1 if tile.pingpong else CONSUMERS  # of a stage
    scratch = [
        parts.smem(gpu, (tile.stages, tile.k, tile.m), p.lhs.dtype),
        parts.smem(gpu, (tile.stages, tile.k, tile.n), p.rhs.dtype),
        parts.smem(gpu, (CONSUMERS, 2, parts.ROWS, parts.staging_columns(tile.n, p.out_dtype)), p.out_dtype),
        gpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        parts.cluster_barrier(gpu, tile.cluster, num_arrivals=readers, num_barriers=tile.stages),
        gpu.Barrier(num_arrivals=CONSUMERS),
    ]
    return launch_transpose(_transpose_kernel, scratch, p, tile=tile, warpgroups=CONSUMERS + 1, num_sms=num_sms)
