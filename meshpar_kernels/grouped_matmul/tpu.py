"""Grouped matmul on TPU (Mosaic): a grid of visits, whose tiles the scalar core looks up."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.grouped_matmul.reference import precision
from meshpar_kernels.grouped_matmul.schedule import group_bounds, visit_groups, visit_rows

__all__ = [
    "Tile",
    "grouped_matmul",
    "grouped_matmul_transpose",
    "pick_tile",
    "pick_transpose_tile",
    "unsupported",
]

VMEM_BYTES = 48 << 20
"""On-chip memory that a kernel may plan with: three quarters of the 64 MiB of a v5p or tpu7x
core."""

CHUNK = 128
"""Rows multiplied at once in a tile that several groups share."""

BLOCK = (512, 2048, 512)
"""Most rows, contracted columns and columns of one product that the compiler schedules as a whole.

Larger ones unroll into programs that take minutes to compile; smaller ones load weights into the
matrix unit more often than they use them (v6e: 60 % busy at 128 rows, 89 % at 512).
"""

TRANSPOSE_BLOCK = (512, 1024)
"""As `BLOCK`, for the most K and N of the transpose, which reads and writes its sums each time."""


class Tile(NamedTuple):
    """Rows, K and N that one step of the grid holds in VMEM."""

    m: int
    k: int
    n: int


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _divisors(size: int, most: int) -> list[int]:
    """Multiples of 128 that divide `size`, up to `most`, and `size` itself: the legal block
    widths."""
    return [d for d in range(128, min(size, most + 1), 128) if size % d == 0] + [size]


def _row_tiles(rows: int) -> list[int]:
    """Row tiles to choose from: whole chunks, or one tile for few rows."""
    if rows <= CHUNK:
        return [_cdiv(rows, 16) * 16]
    return [t for t in (128, 256, 512) if t < 2 * rows]


def pick_tile(
    rows: int, k: int, n: int, groups: int, itemsize: int, halves: int, vmem: int = VMEM_BYTES
) -> Tile | None:
    """The tile that moves the fewest bytes between HBM and VMEM and fits; None if none does.

    A step holds all of K: so a group's weights are fetched once, and lhs once for each tile of
      columns.
    A step itself costs about as much as 200 kB.

    Args:
      rows, k, n, groups: sizes; n is the width of the result.
      itemsize: bytes of an element of lhs, rhs and out.
      halves: 2 for a result that needs two products (SwiGLU), else 1.
      vmem: bytes to plan with.
    """
    best = None
    for tm in _row_tiles(rows):
        visits = _cdiv(rows, tm) + groups - 1
        for tn in _divisors(n, 4096):
            held = 2 * itemsize * (tm * k + halves * k * tn + tm * tn)
            held += 4 * halves * min(tm, BLOCK[0]) * min(tn, BLOCK[2]) * (2 if k > BLOCK[1] else 1)
            if held > vmem:
                continue
            moved = rows * k * (n // tn) + groups * k * n * halves
            cost = (itemsize * moved + 2e5 * visits * (n // tn), held)
            if best is None or cost < best[0]:
                best = (cost, Tile(tm, k, tn))
    return None if best is None else best[1]


def pick_transpose_tile(rows: int, k: int, n: int, groups: int, itemsize: int, vmem: int = VMEM_BYTES) -> Tile | None:
    """As `pick_tile`, for [M, K]ᵀ[M, N] → [G, K, N]: the sums of a [k, n] tile stay in VMEM."""
    best = None
    for tm in _row_tiles(rows):
        visits = _cdiv(rows, tm) + groups
        for tk in _divisors(k, 4096):
            for tn in _divisors(n, 4096):
                held = 2 * itemsize * (tm * tk + tm * tn + tk * tn) + 4 * tk * tn
                held += 4 * min(tk, TRANSPOSE_BLOCK[0]) * min(tn, TRANSPOSE_BLOCK[1])
                if held > vmem:
                    continue
                moved = rows * (k * (n // tn) + n * (k // tk)) + groups * k * n
                steps = visits * (k // tk) * (n // tn)
                cost = (itemsize * moved + 2e5 * steps, held)
                if best is None or cost < best[0]:
                    best = (cost, Tile(tm, tk, tn))
    return None if best is None else best[1]


def unsupported(lhs: jax.Array, rhs: jax.Array, n: int, tile: Tile | None, halves: int = 1) -> Unsupported:
    """Why the TPU kernels cannot take these operands; `tile` is what `pick_…` found."""
    reasons = []
    if lhs.dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"operands are {lhs.dtype}; the kernel takes float32 and bfloat16")
    if halves == 2 and n % 128:
        reasons.append(f"the two halves of rhs, {n} columns each, are no multiple of 128 columns")
    if tile is None:
        reasons.append(
            f"no tile of lhs{list(lhs.shape)} and rhs{list(rhs.shape)} fits "
            f"{VMEM_BYTES >> 20} MiB of VMEM (a size that is no multiple of 128 is not split)"
        )
    return Unsupported(reasons)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def _by_chunks(low: jax.Array, high: jax.Array, rows: int, work) -> None:
    """`work(first, size, whole)` on blocks of the tile if [low, high) fills it, else on its
    chunks."""
    chunk = min(CHUNK, rows)
    whole = (low <= 0) & (high >= rows)

    @pl.when(whole)
    def _():
        _blocks(rows, BLOCK[0], lambda first, size: work(first, size, True))

    @pl.when(~whole)
    def _():
        def one(c, _):
            work(pl.multiple_of(c * chunk, chunk), chunk, False)
            return 0

        # `lax.div`, not `//`, which asks for the sign, and that asks the host for its TPU
        first = lax.div(jnp.maximum(low, 0), chunk)
        last = lax.div(jnp.minimum(high, rows) + (chunk - 1), chunk)
        lax.fori_loop(first, last, one, 0)


def _blocks(size: int, most: int, work) -> None:
    """`work(first, length)` on about equal blocks of 0…size: a loop, and what is left over."""
    number = _cdiv(size, most)
    length = size if number == 1 else _cdiv(_cdiv(size, number), 128) * 128
    number = size // length

    def one(b, _):
        work(pl.multiple_of(b * length, length), length)
        return 0

    if number == 1:
        work(0, length)
    else:
        lax.fori_loop(0, number, one, 0)
    if size % length:
        work(number * length, size % length)


def _row_mask(first, size: int, low: jax.Array, high: jax.Array) -> jax.Array:
    row = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return (row >= low) & (row < high)


def _matmul_kernel(tile_of, group_of, start, end, live, *refs, transpose_rhs: bool, halves: int, scaled: bool):
    """One visit: rows [start, end) of a tile against the weights of one group."""
    del group_of  # the block specs read it
    refs = list(refs)
    lhs_ref = refs.pop(0)
    rhs_refs = [refs.pop(0) for _ in range(halves)]
    scale_ref = refs.pop(0) if scaled else None
    out_ref, *sums = refs
    (rows, k), n = lhs_ref.shape, out_ref.shape[1]
    visit = pl.program_id(1)
    low = start[visit] - tile_of[visit] * rows
    high = end[visit] - tile_of[visit] * rows

    def product(half, here, inner, columns):
        weights = rhs_refs[half].at[0]
        if transpose_rhs:
            return _dot(lhs_ref[here, inner], weights[columns, inner], (1, 1))
        return _dot(lhs_ref[here, inner], weights[inner, columns], (1, 0))

    def multiply(first_row, size, whole):
        here = pl.ds(first_row, size)

        def one_block(first_column, width):
            columns = pl.ds(first_column, width)
            if sums:
                totals = [total.at[:size, :width] for total in sums]
                for total in totals:
                    total[...] = jnp.zeros_like(total)

                def add(first, length):
                    for half, total in enumerate(totals):
                        total[...] += product(half, here, pl.ds(first, length), columns)

                _blocks(k, BLOCK[1], add)
                products = [total[...] for total in totals]
            else:
                products = [product(half, here, slice(None), columns) for half in range(halves)]
            value = products[0] if halves == 1 else jax.nn.silu(products[0]) * products[1]
            if scale_ref is not None:
                value = value * scale_ref[:, here].T
            value = value.astype(out_ref.dtype)
            if not whole:
                mine = _row_mask(first_row, size, low, high)
                value = jnp.where(mine, value, out_ref[here, columns])
            out_ref[here, columns] = value

        _blocks(n, BLOCK[2], one_block)

    @pl.when(live[visit] > 0)
    def _():
        _by_chunks(low, high, rows, multiply)

    @pl.when(live[visit] == 0)
    def _():
        mine = _row_mask(0, rows, low, high)
        out_ref[...] = jnp.where(mine, jnp.zeros_like(out_ref), out_ref[...])


def _scale_row(row_scale: jax.Array, rows: int, tile: int) -> jax.Array:
    """[M] → float32 [1, ⌈M / tile⌉·tile]; as a column it would fill 128 lanes."""
    padded = jnp.pad(row_scale.astype(jnp.float32), (0, -rows % tile))
    return padded.reshape(1, -1)


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
) -> jax.Array:
    """As `reference.grouped_matmul`, without indices.

    Grid: columns of the result, visits. Rows of a tile that one group fills go through the matrix
      unit
    in large blocks; a tile that groups share goes by chunks, only those with rows of the visit's
    group.
    """
    rows, k = lhs.shape
    groups = rhs.shape[0]
    halves = 1 if activation is None else 2
    n = (rhs.shape[1] if transpose_rhs else rhs.shape[2]) // halves
    tm, _, tn = tile
    steps_n = _cdiv(n, tn)
    visits = visit_rows(group_bounds(group_sizes, rows, group_offset, groups), rows, tm)

    def rhs_spec(half):
        first = half * steps_n
        if transpose_rhs:
            return pl.BlockSpec((1, tn, k), lambda i, v, t, g, *_: (g[v], i + first, 0))
        return pl.BlockSpec((1, k, tn), lambda i, v, t, g, *_: (g[v], 0, i + first))

    in_specs = [pl.BlockSpec((tm, k), lambda i, v, t, *_: (t[v], 0))]
    in_specs += [rhs_spec(half) for half in range(halves)]
    operands = [lhs, *[rhs] * halves]
    if row_scale is not None:
        in_specs.append(pl.BlockSpec((1, tm), lambda i, v, t, *_: (0, t[v])))
        operands.append(_scale_row(row_scale, rows, tm))
    sums = pltpu.VMEM((min(tm, BLOCK[0]), min(tn, BLOCK[2])), jnp.float32)
    itemsize = lhs.dtype.itemsize
    return pl.pallas_call(
        functools.partial(
            _matmul_kernel,
            transpose_rhs=transpose_rhs,
            halves=halves,
            scaled=row_scale is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(steps_n, visits.number),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((tm, tn), lambda i, v, t, *_: (t[v], i)),
            scratch_shapes=[sums] * (halves if k > BLOCK[1] else 0),
        ),
        out_shape=_compat.out_struct((rows, n), out_dtype, lhs, rhs),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES + (8 << 20)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * k * n * halves,
            transcendentals=rows * n * (halves - 1),
            bytes_accessed=itemsize * (steps_n * rows * k + rhs.size) + out_dtype.itemsize * rows * n,
        ),
        name="meshpar_grouped_matmul",
    )(*visits[:5], *operands)


def _transpose_kernel(tile_of, group_of, start, end, live, *refs, scaled: bool):
    """One visit: adds lhsᵀ·rhs of the rows [start, end) of a tile to the sums of one group."""
    lhs_ref, rhs_ref, *scale_ref, out_ref, total = refs
    rows = lhs_ref.shape[0]
    visit, visits = pl.program_id(2), pl.num_programs(2)
    low = start[visit] - tile_of[visit] * rows
    high = end[visit] - tile_of[visit] * rows
    before = group_of[jnp.maximum(visit - 1, 0)]
    after = group_of[jnp.minimum(visit + 1, visits - 1)]

    @pl.when((visit == 0) | (before != group_of[visit]))
    def _():
        total[...] = jnp.zeros_like(total)

    def multiply(first_row, size, whole):
        here = pl.ds(first_row, size)

        def one_strip(first_k, height):
            left = lhs_ref[here, pl.ds(first_k, height)]
            if not whole:
                left = jnp.where(_row_mask(first_row, size, low, high), left, jnp.zeros_like(left))

            def one_block(first_n, width):
                right = rhs_ref[here, pl.ds(first_n, width)]
                if scaled:
                    factor = scale_ref[0][:, here].T
                    right = (right.astype(jnp.float32) * factor).astype(rhs_ref.dtype)
                if not whole:
                    mine = _row_mask(first_row, size, low, high)
                    right = jnp.where(mine, right, jnp.zeros_like(right))
                there = (pl.ds(first_k, height), pl.ds(first_n, width))
                total[there] += _dot(left, right, (0, 0))

            _blocks(rhs_ref.shape[1], TRANSPOSE_BLOCK[1], one_block)

        _blocks(lhs_ref.shape[1], TRANSPOSE_BLOCK[0], one_strip)

    @pl.when(live[visit] > 0)
    def _():
        _by_chunks(low, high, rows, multiply)

    @pl.when((visit == visits - 1) | (after != group_of[visit]))
    def _():
        out_ref[0] = total[...].astype(out_ref.dtype)


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
) -> jax.Array:
    """As `reference.grouped_matmul_transpose`. Grid: K, columns, visits; one tile of sums in
    VMEM."""
    rows, k = lhs.shape
    n = rhs.shape[1]
    tm, tk, tn = tile
    visits = visit_groups(group_bounds(group_sizes, rows, group_offset, groups), rows, tm)
    in_specs = [
        pl.BlockSpec((tm, tk), lambda i, j, v, t, *_: (t[v], i)),
        pl.BlockSpec((tm, tn), lambda i, j, v, t, *_: (t[v], j)),
    ]
    operands = [lhs, rhs]
    if row_scale is not None:
        in_specs.append(pl.BlockSpec((1, tm), lambda i, j, v, t, *_: (0, t[v])))
        operands.append(_scale_row(row_scale, rows, tm))
    steps_k, steps_n = _cdiv(k, tk), _cdiv(n, tn)
    return pl.pallas_call(
        functools.partial(_transpose_kernel, scaled=row_scale is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(steps_k, steps_n, visits.number),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, tk, tn), lambda i, j, v, t, g, *_: (g[v], i, j)),
            scratch_shapes=[pltpu.VMEM((tk, tn), jnp.float32)],
        ),
        out_shape=_compat.out_struct((groups, k, n), out_dtype, lhs, rhs),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES + (8 << 20),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * k * n,
            transcendentals=0,
            bytes_accessed=lhs.dtype.itemsize * rows * (steps_n * k + steps_k * n)
            + out_dtype.itemsize * groups * k * n,
        ),
        name="meshpar_grouped_matmul_transpose",
    )(*visits[:5], *operands)
