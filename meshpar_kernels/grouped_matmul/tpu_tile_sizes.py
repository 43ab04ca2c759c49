"""Tiles of the TPU kernels: the blocks of the operands that one grid step has in VMEM."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import cdiv

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, Problem
from meshpar_kernels.tuning_table import MatmulKey


def vmem_to_plan_with() -> int:
    """Bytes of VMEM that tiles may use: three quarters of a core's."""
    return _compat.tpu_vmem() * 3 // 4


ROW_CHUNKS = (16, 32, 64, 96, 128, 144, 160, 192, 256)
"""Numbers of rows that are multiplied at once in a tile that several groups share.

A matmul loads the weights into the matrix unit, however few its rows: on v5p 16 rows take a third of the cycles of
128, on v6e, with its larger units, 0.6 of them (scheduled bundles, [rows, 2048] times [2048, 512]). So the rows of a group
in a shared tile are multiplied at once, up to 256 rows, with little padding.
"""

BLOCK = (512, 2048, 512)
"""Largest (M, K, N) of one matmul, which the compiler schedules as one basic block.

Larger ones unroll into programs that take minutes to compile; smaller ones load weights into the
matrix unit more often than they use them (v6e: 60 % busy at 128 rows, 89 % at 512).
"""

TRANSPOSE_BLOCK = (512, 1024)
"""Largest (K, N) of one matmul of the transpose, as `BLOCK`; each matmul reads and writes its accumulator."""


SCALED_STEP = 512
"""Contracted columns whose separately scaled blocks are unrolled into one matmul."""


class Tile(NamedTuple):
    """Rows, K and N of the blocks that one grid step has in VMEM."""

    m: int
    k: int
    n: int


def pack(itemsize: int) -> int:
    """Rows that share a register; a matmul may begin at any multiple of it."""
    return 32 // itemsize


def fitting(row_chunks: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """The row chunks that a tile of `rows` rows can use; none is longer than the tile."""
    return (*(size for size in row_chunks if size < min(rows, row_chunks[-1])), min(rows, row_chunks[-1]))


def _widths(size: int, most: int, cores: int) -> list[int]:
    """Block widths to choose from: multiples of 128 that divide `size`, or divide it about evenly if none does; `size`
    itself; and the least width that gives each core a block."""
    if size % 128 == 0:
        parts = [size // d for d in range(128, size, 128) if size % d == 0] + [cores]
    else:
        parts = list(range(2, cdiv(size, 128) + 1))
    found = {cdiv(cdiv(size, n), 128) * 128 for n in parts}
    return sorted({d for d in found if d <= min(most, size)} | {size})


def _serialized_steps(steps: int, cores: int) -> float:
    """Factor by which `steps` grid steps take longer on `cores` cores than if they could be shared evenly."""
    return cores * cdiv(steps, cores) / steps


class Steps(NamedTuple):
    """Largest K and N of one `dot_general` within a tile, and the units of which they are multiples."""

    most_k: int
    unit_k: int
    most_n: int
    unit_n: int


def steps(k: int, n: int, blocks: int, block: int, transpose_scale: bool) -> Steps:
    """The `Steps` of a tile. With blocks of K that have scales of their own, a matmul is within a block; with blocks of
    columns as well.

    Args:
      k, n: of the tile.
      blocks, block: number of the blocks, and elements of one.
      transpose_scale: the blocks are blocks of columns.
    """
    _, most_k, most_n = BLOCK
    if blocks <= 1:
        return Steps(most_k, 128, most_n, 128)
    common, most = math.gcd(block, n if transpose_scale else k), most_n if transpose_scale else most_k
    unit = max(d for d in range(128, most + 1, 128) if common % d == 0)
    if transpose_scale:
        return Steps(most_k, 128, unit, unit)
    return Steps(max(min(SCALED_STEP, most), unit), unit, most_n, 128)


def _row_tiles(rows: int) -> list[int]:
    """Row tiles to choose from, or one tile for few rows."""
    if rows <= 128:
        return [cdiv(rows, 16) * 16]
    return [t for t in (128, 256, 512) if t < 2 * rows]


def cheapest(candidates: Iterable[tuple[float, int, Any]]) -> Any:
    """The tile of the least cost, and of the fewest bytes of VMEM at this cost; None if none fits `vmem_to_plan_with`.

    Args:
      candidates: (cost, bytes of VMEM, tile).
    """
    vmem = vmem_to_plan_with()
    return min((c for c in candidates if c[1] <= vmem), key=lambda c: c[:2], default=(0.0, 0, None))[2]


def pick_tile(sizes: MatmulKey, itemsize: int, rhs_itemsize: int | None = None, scale_bytes: int = 0) -> Tile | None:
    """The tile that fits VMEM and moves the fewest bytes between HBM and VMEM; None if no tile fits.

    A grid step of a matmul has all of K in VMEM: so a group's weights are fetched once, and lhs once for each column
    tile. In the transpose the accumulator of a [k, n] tile stays in VMEM. A grid step itself costs about as much as 200
    kB. If two cores of a chip share a kernel, each has its own column tiles (in the transpose tiles of K, or of N if K
    has too few): a single one would leave one core idle.

    Args:
      itemsize: bytes of an element of lhs, rhs and out.
      rhs_itemsize: bytes of an element of quantized weights, which are converted part by part; None: as lhs's.
      scale_bytes: bytes of the scales of one group's matrix.
    """
    if sizes.transposes:
        return cheapest(_transpose_tiles(sizes, itemsize))
    return cheapest(_matmul_tiles(sizes, itemsize, rhs_itemsize, scale_bytes))


def _matmul_tiles(
    sizes: MatmulKey, itemsize: int, rhs_itemsize: int | None, scale_bytes: int
) -> Iterator[tuple[float, int, Tile]]:
    """The `candidates` of a matmul; arguments as of `pick_tile`."""
    rows, k, n, groups, halves, cores = *sizes.shape, sizes.matrices, _compat.tpu_cores()
    converted = rhs_itemsize is not None
    rhs_itemsize = itemsize if rhs_itemsize is None else rhs_itemsize
    for tm in _row_tiles(rows):
        visits = cdiv(rows, tm) + groups - 1
        for tn in _widths(n, 4096, cores):
            steps = cdiv(n, tn)
            height, inner, width = min(tm, BLOCK[0]), min(k, BLOCK[1]), min(tn, BLOCK[2])
            held = 2 * itemsize * tm * k + 2 * (rhs_itemsize * halves * k * tn + itemsize * tm * tn)
            held += 4 * halves * height * width * (2 if k > BLOCK[1] or converted else 1)
            if converted:  # in float32 before the conversion
                held += 2 * halves * scale_bytes + (4 + itemsize) * inner * width
            if itemsize == 4:  # each float32 block becomes three of bfloat16
                held += 6 * halves * cdiv(tn, width) * inner * (height + width)
            moved = itemsize * rows * k * steps + groups * halves * (rhs_itemsize * k * n + scale_bytes)
            each = 2e5 * visits * steps / cores
            yield (moved + each) * _serialized_steps(steps, cores), held, Tile(tm, k, tn)


def _transpose_tiles(sizes: MatmulKey, itemsize: int) -> Iterator[tuple[float, int, Tile]]:
    """The `candidates` of a transpose; arguments as of `pick_tile`."""
    rows, k, n, groups, cores = *sizes.shape, _compat.tpu_cores()
    for tm in _row_tiles(rows):
        visits = cdiv(rows, tm) + groups
        for tk, tn in itertools.product(_widths(k, 4096, cores), _widths(n, 4096, cores)):
            held = 2 * itemsize * (tm * tk + tm * tn + tk * tn) + 4 * tk * tn
            held += 4 * min(tk, TRANSPOSE_BLOCK[0]) * min(tn, TRANSPOSE_BLOCK[1])
            steps_k, steps_n = cdiv(k, tk), cdiv(n, tn)
            shared = steps_k if steps_k > 1 else steps_n  # the compiler splits the first parallel dim of the grid
            moved = rows * (k * steps_n + n * steps_k) + groups * k * n
            each = 2e5 * visits * steps_k * steps_n / cores
            yield (itemsize * moved + each) * _serialized_steps(shared, cores), held, Tile(tm, tk, tn)


def unsupported(p: Problem, tile: Tile | None) -> Unsupported:
    """Reasons why the TPU kernels cannot run this problem with this tile, a result of `pick_tile`; empty if they can."""
    reasons = []
    if isinstance(p, MatmulProblem):
        blocks = p.rhs_scale[0].shape[1] if p.rhs_scale else 1
        block = (p.key.n if p.transpose_scale else p.key.k) // blocks
        if blocks > 1 and block % 128:
            reasons.append(f"blocks of {block} elements have scales of their own; the kernel takes multiples of 128")
        if p.transpose_rhs and p.key.n == 1:
            reasons.append("rhs has one column and comes transposed, which the compiler cannot multiply by")
    if p.lhs.dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"operands are {p.lhs.dtype}; the kernel takes float32 and bfloat16")
    if tile is not None and tile.m % 16:
        reasons.append(f"a tile of {tile.m} rows is no multiple of 16 rows")
    if tile is None:
        rhs = p.rhs[0] if isinstance(p, MatmulProblem) else p.rhs
        reasons.append(
            f"no tile of lhs{list(p.lhs.shape)} and rhs{list(rhs.shape)} fits "
            f"{vmem_to_plan_with() >> 20} MiB of VMEM (K is not split)"
        )
    return Unsupported(reasons)
