"""Grouped matmul for Hopper GPUs (sm_90a, Mosaic GPU): TMA loads, `wgmma`, one loading and two
multiplying warpgroups.

One block per multiprocessor walks the tiles of the result. A ring of shared-memory stages lies between the
loading warpgroup, which runs ahead into the next tile, and the two multiplying ones, of which each holds
half of the tile in registers.

How a stage changes hands:
- `full[s]` completes when all copies of a stage have landed (each copy arrives once, with its bytes).
  The multiplying warpgroups wait for it before `wgmma` reads the stage.
- `empty[s]` completes when both multiplying warpgroups have arrived. Each arrives for the stage of step i
  after `wgmma_wait` says that the products of step i are done, which is one step later (`wgmma_wait(1)`: all
  but the last), and for a tile's last stage after `wgmma_wait(0)`. The loading warpgroup waits for it before
  it overwrites the stage, from the second use on.
- Both sides count steps over all tiles, so stage and phase agree although tiles differ in their steps.

How a result gets out: registers → shared memory; `commit_smem` makes these writes visible to the copy
engine and holds the warpgroup together; then the copy. Before the memory is written again,
`wait_smem_to_gmem` waits until the copies have read it. Each warpgroup has its own staging memory, so none
waits for the other.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels.grouped_matmul.schedule import group_bounds, visit_spans

__all__ = ["ROWS", "Tile", "grouped_matmul", "grouped_matmul_transpose"]

ROWS = 64
"""Rows of one `wgmma`, and of the part of a tile that one warpgroup holds."""

CONSUMERS = 2
BAND = 16
"""Visits that share a stretch of columns before the next: both operands of it stay in the L2 cache."""


class Tile(NamedTuple):
    """Rows and columns of the result's tile, contracted elements of a stage, and number of stages."""

    m: int
    n: int
    k: int
    stages: int


def _smem(gpu: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory laid out in swizzled tiles, as `wgmma` reads and TMA writes without bank conflicts."""
    swizzle = gpu.find_swizzle(shape[-1] * jnp.dtype(dtype).itemsize * 8)
    tiling = (8, swizzle // jnp.dtype(dtype).itemsize)
    return gpu.SMEM(shape, dtype, transforms=(gpu.TilingTransform(tiling), gpu.SwizzleTransform(swizzle)))


def _copy_rows(gpu: Any, source: Any, target: Any, low: jax.Array, high: jax.Array, columns: Any, rows: int) -> None:
    """Copy the rows [low, high) of shared memory: one copy for each bit of their number, since a copy's shape is
    fixed when it is compiled."""
    number = high - low
    length = 1 << (rows.bit_length() - 1)
    while length:
        here = low

        @pl.when((number & length) != 0)
        def _(here=here, length=length):
            gpu.copy_smem_to_gmem(source.at[pl.ds(here, length)], target.at[pl.ds(here, length), columns])

        low = low + (number & length)
        length //= 2


def _ring(stages: int, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(stages))


def _load(gpu: Any, step, steps, stages: int, full, empty, copies) -> jax.Array:
    """Fill the stages of `steps` steps, from step number `step` on; `copies(i, slot)` starts those of step i."""

    def one(i, step):
        slot = _ring(stages, step)

        @pl.when(step >= stages)
        def _():
            gpu.barrier_wait(empty.at[slot])

        copies(i, slot, full.at[slot])
        return step + 1

    return lax.fori_loop(0, steps, one, step)


def _multiply(gpu: Any, step, steps, stages: int, full, empty, products) -> jax.Array:
    """Multiply as the stages fill; `products(i, slot)` starts the products of step i."""

    def one(i, step):
        slot = _ring(stages, step)
        gpu.barrier_wait(full.at[slot])
        products(i, slot)
        gpu.wgmma_wait(1)

        @pl.when(i > 0)
        def _():
            gpu.barrier_arrive(empty.at[_ring(stages, step - 1)])

        return step + 1

    step = lax.fori_loop(0, steps, one, step)
    gpu.wgmma_wait(0)

    @pl.when(steps > 0)
    def _():
        gpu.barrier_arrive(empty.at[_ring(stages, step - 1)])

    return step


def _skip(gpu: Any, step, steps, stages: int, full, empty) -> jax.Array:
    """Let the stages of a tile pass."""

    def one(_, step):
        slot = _ring(stages, step)
        gpu.barrier_wait(full.at[slot])
        gpu.barrier_arrive(empty.at[slot])
        return step + 1

    return lax.fori_loop(0, steps, one, step)


def _place(tile: jax.Array, visits: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    """Visit and column tile of the tile with this number: `BAND` visits go through all columns together."""
    band = lax.div(tile, jnp.int32(BAND * columns))
    height = jnp.minimum(BAND, visits - band * BAND)
    rest = tile - band * (BAND * columns)
    column = lax.div(rest, height)
    return band * BAND + (rest - column * height), column


def _matmul_kernel(*refs, gpu, shape, tile, transpose_rhs, halves, scaled, num_sms):
    rows, k, n = shape
    first, low, high, group, live, number, lhs, rhs, *refs = refs
    scale = refs.pop(0) if scaled else None
    out, lhs_smem, rhs_smem, staging, full, empty = refs
    columns = pl.cdiv(n, tile.n)
    warpgroup = lax.axis_index("warpgroup")
    multiprocessor = lax.axis_index("multiprocessor")
    visits = number[0]
    tiles = visits * columns
    mine = lax.div(tiles - multiprocessor + (num_sms - 1), jnp.int32(num_sms))

    def each_tile(work):
        def one(i, step):
            visit, column = _place(multiprocessor + i * num_sms, visits, columns)
            return work(visit, column, live[visit] * pl.cdiv(k, tile.k), step)

        lax.fori_loop(0, mine, one, jnp.int32(0))

    @pl.when(warpgroup == CONSUMERS)
    def _():
        gpu.set_max_registers(40, action="decrease")

        def load(visit, column, steps, step):
            row, g = first[visit], group[visit]

            def copies(i, slot, barrier):
                inner = pl.ds(i * tile.k, tile.k)
                gpu.copy_gmem_to_smem(lhs.at[pl.ds(row, tile.m), inner], lhs_smem.at[slot], barrier)
                for half in range(halves):
                    outer = pl.ds(half * n + column * tile.n, tile.n)
                    here = (g, outer, inner) if transpose_rhs else (g, inner, outer)
                    gpu.copy_gmem_to_smem(rhs.at[here], rhs_smem.at[slot, half], barrier)

            return _load(gpu, step, steps, tile.stages, full, empty, copies)

        each_tile(load)

    @pl.when(warpgroup < CONSUMERS)
    def _():
        gpu.set_max_registers(232, action="increase")
        part = pl.ds(warpgroup * ROWS, ROWS)

        def compute(visit, column, steps, step):
            row = first[visit] + warpgroup * ROWS
            begin = jnp.clip(low[visit] - warpgroup * ROWS, 0, ROWS)
            end = jnp.clip(high[visit] - warpgroup * ROWS, 0, ROWS)

            def products(sums):
                def start(_, slot):
                    for half, total in enumerate(sums):
                        weights = rhs_smem.at[slot, half]
                        weights = _compat.transpose_ref(weights) if transpose_rhs else weights
                        gpu.wgmma(total, lhs_smem.at[slot, part], weights)

                return start

            def with_sums(*sums):
                _multiply(gpu, step, steps, tile.stages, full, empty, products(sums))
                values = [total[...] for total in sums]
                value = values[0] if halves == 1 else values[0] / (1.0 + jnp.exp(-values[0])) * values[1]
                if scaled:
                    factor = _compat.load_gmem(scale, pl.ds(row, ROWS), gpu.Layout.WGMMA.reduce(1))
                    factor = jnp.where(live[visit] > 0, factor, 0.0)
                    value = value * lax.broadcast_in_dim(factor, value.shape, [0])
                for w, (swizzled, plain) in enumerate(staging):

                    @pl.when(warpgroup == w)
                    def _(swizzled=swizzled, plain=plain):
                        _store(gpu, value, out, row, column, begin, end, swizzled, plain)

            @pl.when(end > begin)
            def _():
                pl.run_scoped(with_sums, *[gpu.ACC((ROWS, tile.n), jnp.float32)] * halves)

            @pl.when(end <= begin)
            def _():
                _skip(gpu, step, steps, tile.stages, full, empty)

            return step + steps

        each_tile(compute)
        gpu.wait_smem_to_gmem(0)


def _store(gpu: Any, value, out, row, column, begin, end, swizzled, plain) -> None:
    """Write the rows [begin, end) of a warpgroup's part: by fixed copies if it is whole."""
    slots, _, width = swizzled.shape
    value = value.astype(out.dtype)
    whole = (begin == 0) & (end == ROWS)
    target = out.at[pl.ds(row, ROWS)]
    gpu.wait_smem_to_gmem(0, wait_read_only=True)
    chunks = [(c, value[:, c * width : (c + 1) * width]) for c in range(value.shape[1] // width)]

    @pl.when(whole)
    def _():
        for c, chunk in chunks:
            slot = swizzled.at[c % slots]
            if c >= slots:
                gpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            slot[...] = chunk
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(slot, target.at[:, pl.ds(column * value.shape[1] + c * width, width)])

    @pl.when(~whole)
    def _():
        for c, chunk in chunks:
            if c:
                gpu.wait_smem_to_gmem(0, wait_read_only=True)
            plain[...] = chunk
            gpu.commit_smem()
            there = pl.ds(column * value.shape[1] + c * width, width)
            _copy_rows(gpu, plain, target, begin, end, there, ROWS)


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    row_scale: jax.Array | None,
    *,
    transpose_rhs: bool,
    activation: str | None,
    out_dtype: jnp.dtype,
    tile: Tile,
    num_sms: int = 132,
) -> jax.Array:
    """As `reference.grouped_matmul`, without indices, for at least `tile.m` rows.

    Tiles begin at a group's first row (`visit_spans`), so none holds rows of two groups; a warpgroup whose
    half of a tile has no row of the group does not multiply.
    """
    gpu = _compat.mosaic_gpu()
    rows, k = lhs.shape
    halves = 1 if activation is None else 2
    n = (rhs.shape[1] if transpose_rhs else rhs.shape[2]) // halves
    groups = rhs.shape[0]
    spans = visit_spans(group_bounds(group_sizes, rows, group_offset, groups), rows, tile.m)
    width = min(tile.n, 128 // out_dtype.itemsize)
    rhs_tile = (tile.n, tile.k) if transpose_rhs else (tile.k, tile.n)
    operands = [*spans, lhs, rhs]
    if row_scale is not None:
        operands.append(row_scale.astype(jnp.float32))
    kernel = functools.partial(
        _matmul_kernel,
        gpu=gpu,
        shape=(rows, k, n),
        tile=tile,
        transpose_rhs=transpose_rhs,
        halves=halves,
        scaled=row_scale is not None,
        num_sms=num_sms,
    )
    return gpu.kernel(
        kernel,
        out_type=_compat.out_struct((rows, n), out_dtype, lhs, rhs),
        scratch_types=[
            _smem(gpu, (tile.stages, tile.m, tile.k), lhs.dtype),
            _smem(gpu, (tile.stages, halves, *rhs_tile), rhs.dtype),
            [gpu.RefUnion(_smem(gpu, (2, ROWS, width), out_dtype), gpu.SMEM((ROWS, width), out_dtype))] * CONSUMERS,
            gpu.Barrier(num_arrivals=1 + halves, num_barriers=tile.stages),
            gpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages),
        ],
        grid=(num_sms,),
        grid_names=("multiprocessor",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="meshpar_grouped_matmul",
        compiler_params=gpu.CompilerParams(
            approx_math=True, lowering_semantics=gpu.LoweringSemantics.Lane
        ),
    )(*operands)
