"""Shared by the Hopper and the Blackwell kernels: tile sizes, loops over tiles, and writing of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels.grouped_matmul.schedule import ALIGNMENT, Spans

ROWS = 64
"""Rows of one `wgmma`, and rows that one warpgroup masks at a time."""

RASTER_GROUP = 16
"""Row tiles that are computed for all columns before the next row tiles, so that operands stay in the L2 cache."""

CLUSTER = "cluster"
"""Axis of the blocks of a cluster."""

GELU = 2 * math.sqrt(2 / math.pi)


class Tile(NamedTuple):
    """Tile sizes of a GPU kernel: the tile of the result that a thread block computes at a time.

    Attributes:
      m, n: rows and columns of the tile.
      k: contracted elements of one stage.
      stages: stages in shared memory.
      cluster: thread blocks of a cluster, 1 or 2. The two blocks compute adjacent tiles, and load their common operand
        once.
      pingpong: Hopper's transpose only: each of the two multiplying warpgroups has a tile of its own, and one
        multiplies while the other writes.
    """

    m: int
    n: int
    k: int
    stages: int
    cluster: int = 1
    pingpong: bool = False


def cluster_count(num_sms: int, cluster: int) -> int:
    """Number of clusters of `cluster` thread blocks on `num_sms` multiprocessors, at least one."""
    return max(num_sms // cluster, 1)


def cluster_barrier(gpu: Any, cluster: int, **options: Any) -> Any:
    """A barrier at which each arrival counts in every block of the cluster."""
    return gpu.Barrier(**options) if cluster == 1 else gpu.ClusterBarrier(collective_axes=(CLUSTER,), **options)


def index_in_cluster(cluster: int) -> Any:
    """Index of this thread block in its cluster: int32 on the axis `CLUSTER`; 0 without clusters."""
    return lax.axis_index(CLUSTER) if cluster > 1 else 0


def activate(matmuls: Sequence[jax.Array], activation: str | None) -> jax.Array:
    """`activations.activate` in operations that both compilers support: exponentials, which may overflow to a quotient of 0."""
    x = matmuls[0]
    if activation == "relu":
        x = jnp.maximum(x, 0.0)
    elif activation is not None:  # gelu: (1 + tanh(u)) / 2 is the logistic function of 2u
        slope = x if activation == "silu" else GELU * (x + 0.044715 * x * x * x)
        x = x / (1.0 + jnp.exp(-slope))
    return x if len(matmuls) == 1 else x * matmuls[1]


def smem(gpu: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory laid out in swizzled tiles, as `wgmma` reads and TMA writes without bank conflicts.

    A copy to or from it must begin at a multiple of the tile, in rows and columns, in global memory too (`ALIGNMENT`): else the
    engine silently loads zeros and drops stores, which neither the compiler nor JAX's interpreter reports.
    """
    swizzle = gpu.find_swizzle(shape[-1] * jnp.dtype(dtype).itemsize * 8)
    tiling = (ALIGNMENT, swizzle // jnp.dtype(dtype).itemsize)
    return gpu.SMEM(shape, dtype, transforms=(gpu.TilingTransform(tiling), gpu.SwizzleTransform(swizzle)))


def tile_columns(itemsize: int) -> int:
    """Columns of a tile of shared memory: 128 bytes, the widest swizzle."""
    return 128 // itemsize


def misaligned(**sizes: tuple[int, ...]) -> list[str]:
    """Reasons why TMA cannot cut arrays into the tiles of shared memory; empty if it can. A dim longer than a tile must
    be a multiple of it.

    Args:
      sizes: by name of a dim: (its elements, elements of the tiles that it is cut into).
    """
    found = []
    for name, (size, *tiles) in sizes.items():
        bad = [tile for tile in tiles if size > tile and size % tile]
        if bad:
            found.append(f"{name}={size} is no multiple of {max(bad)}, by which the copy engine cuts it")
    return found


def copy_rows(gpu: Any, source: Any, target: Any, low: jax.Array, high: jax.Array, columns: Any, rows: int) -> None:
    """Copy the rows [low, high) from shared to global memory.

    A copy has a static shape, so the code has one copy for each bit of the number of rows, and executes those with the
    bit set.

    Args:
      source: SMEM [rows, width].
      target: GMEM [rows, n].
      columns: slice of the columns of `target`.
    """
    number = high - low
    length = 1 << (rows.bit_length() - 1)
    while length:
        src_slice = low

        @pl.when((number & length) != 0)
        def _(src_slice=src_slice, length=length):
            gpu.copy_smem_to_gmem(source.at[pl.ds(src_slice, length)], target.at[pl.ds(src_slice, length), columns])

        low = low + (number & length)
        length //= 2


def ring(stages: int, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(stages))


def rasterize(tile: jax.Array, tile_steps: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    """(tile step, column tile) of the tile with this index: `RASTER_GROUP` tile steps are computed for all columns
    before the next.

    Args:
      tile: index, below tile_steps · columns.
      tile_steps: number of tile steps (row tiles).
      columns: number of column tiles.
    """
    raster_group = lax.div(tile, jnp.int32(RASTER_GROUP * columns))
    height = jnp.minimum(RASTER_GROUP, tile_steps - raster_group * RASTER_GROUP)
    rest = tile - raster_group * (RASTER_GROUP * columns)
    column = lax.div(rest, height)
    return raster_group * RASTER_GROUP + (rest - column * height), column


def share(total: Any, index: Any, number: int) -> Any:
    """Number of the indices 0…total-1 that one of `number` thread blocks handles, if they are dealt round-robin."""
    return lax.div(total - index + (number - 1), jnp.int32(number))


Each = Callable[[Callable[..., None]], tuple[Any, Any]]
"""Calls its argument with (tile, K steps, K steps before, live tiles before) for each tile of this block, and returns the
numbers of all its K steps and live tiles."""


def each_tile(total: Any, clusters: int, tile_at: Callable[[Any], tuple[Any, Any, Any]]) -> Each:
    """The loop over the tiles of this block, a function that any of its warps may call.

    Args:
      total: tiles of all blocks.
      clusters: thread blocks, or clusters, among which the tiles are dealt round-robin.
      tile_at: index of a tile → (tile, its K steps, 1 if it has any, else 0).
    """
    multiprocessor = lax.axis_index("multiprocessor")
    num_own = share(total, multiprocessor, clusters)

    def each(work: Callable[..., None]) -> tuple[Any, Any]:
        def one(i: Any, before: tuple[Any, Any]) -> tuple[Any, Any]:
            """The i-th tile of this block; the carry is (K steps, live tiles) before it."""
            step, used = before
            tile, steps, live = tile_at(multiprocessor + i * clusters)
            work(tile, steps, step, used)
            return step + steps, used + live

        return lax.fori_loop(0, num_own, one, (jnp.int32(0), jnp.int32(0)))

    return each


def each_row_tile(spans: Spans, columns: int, steps: int, num_sms: int, cluster: int, adjacent: bool = False) -> Each:
    """`each_tile` for the tiles (tile step, column tile) of a grouped matmul. A tile of no group has 0 K steps; its result
    is zero.

    Args:
      spans: from `span_tile_steps`, in GMEM.
      columns, steps: column tiles, and K steps of a tile.
      adjacent: the blocks of a cluster compute adjacent column tiles; else they compute one tile together.
    """
    tile_steps, member = spans.number[0], index_in_cluster(cluster)
    columns = -(-columns // cluster) if adjacent else columns

    def tile_at(number: Any) -> tuple[Any, Any, Any]:
        tile_step, column = rasterize(number, tile_steps, columns)
        live = spans.live[tile_step]
        return (tile_step, column * cluster + member if adjacent else column), live * steps, live

    return each_tile(tile_steps * columns, cluster_count(num_sms, cluster), tile_at)


def rows_in(spans: Spans, tile_step: Any, above: Any, height: int) -> tuple[Any, Any, Any]:
    """(first row of a part of a tile, begin, end): the rows [begin, end) of the part belong to the tile's group.

    Args:
      above: rows of the tile before the part.
      height: rows of the part.
    """
    begin, end = (jnp.clip(bound[tile_step] - above, 0, height) for bound in (spans.low, spans.high))
    return spans.first[tile_step] + above, begin, end


def chunks(value: jax.Array, column: jax.Array, width: int) -> list[tuple[jax.Array, Any]]:
    """[(columns of `value`, as many as the staging buffer has; their slice in the result)] of column tile `column`."""
    total = value.shape[1]
    return [(value[:, c : c + width], pl.ds(column * total + c, width)) for c in range(0, total, width)]


def write(gpu: Any, target: Any, column: Any, width: int, columns: Callable[[int], jax.Array], staging: Any) -> None:
    """Write the columns of a tile to the result, through the two slots of `staging`.

    Args:
      target: GMEM [rows, n]: these rows of the result.
      column: column tile, in units of `width` columns.
      width: columns of the tile.
      columns: first column in the tile → values [rows, staging.shape[-1]], in the dtype of `staging`.
      staging: SMEM [2, rows, columns]. Before a slot is written, `wait_smem_to_gmem` waits until the copy out of it has
        read it.
    """
    step = staging.shape[-1]
    for c, left in enumerate(range(0, width, step)):
        fresh = c == 0 and (width // step) % 2  # an odd number of chunks: slot 0 may still be read for the tile before
        value = columns(left)
        gpu.wait_smem_to_gmem(0 if fresh else 1, wait_read_only=True)
        staging[c % 2] = value
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(staging.at[c % 2], target.at[:, pl.ds(column * width + left, step)])


def mask_rows(gpu: Any, values: Any, low: jax.Array, high: jax.Array) -> None:
    """Zero the rows outside [low, high) of a stage [rows, columns] in shared memory."""
    rows, columns = values.shape
    row = gpu.broadcasted_iota(jnp.int32, (rows, ROWS), 0, layout=gpu.Layout.WGMMA)
    for left in range(0, columns, ROWS):
        part = values.at[:, pl.ds(left, ROWS)]
        dst = gpu.layout_cast(part[...], gpu.Layout.WGMMA)
        part[...] = jnp.where((row >= low) & (row < high), dst, jnp.zeros_like(dst))


class GroupRows(NamedTuple):
    """The rows of one group, and how the steps of the transpose kernel cover them.

    Attributes:
      first: row where the first step begins: the group's first row, rounded down to a multiple of `ALIGNMENT`.
      low, end: the group's rows are [first + low, first + end).
      steps: number of steps; 0 for an empty group.
    """

    first: jax.Array
    low: jax.Array
    end: jax.Array
    steps: jax.Array

    @classmethod
    def of(cls, bounds: Any, group: jax.Array, step: int) -> GroupRows:
        """The rows of `group`, from the group bounds int32 [G + 1] in memory, in steps of `step` rows."""
        start, stop = bounds[group], bounds[group + 1]
        first = lax.div(start, jnp.int32(ALIGNMENT)) * ALIGNMENT
        steps = lax.div(stop - first + (step - 1), jnp.int32(step))
        return cls(first, start - first, stop - first, jnp.where(stop > start, steps, 0))

    def span(self, i: jax.Array, step: int) -> tuple[jax.Array, jax.Array]:
        """The group's rows [low, high) in step i. `low > 0` or `high < step` if the step has rows of other groups too."""
        return jnp.maximum(self.low - i * step, 0), jnp.minimum(self.end - i * step, step)


def transpose_tile(bounds: Any, number: Any, high: int, wide: int, step: int) -> tuple[Any, Any, Any, GroupRows]:
    """(group, strip of K, column tile, rows) of the tile with this index, of groups with `high` · `wide` tiles.

    Args:
      bounds: group bounds int32 [G + 1] in GMEM.
      step: rows of a step.
    """
    group = lax.div(number, jnp.int32(high * wide))
    strip, column = rasterize(number - group * (high * wide), jnp.int32(high), wide)
    return group, strip, column, GroupRows.of(bounds, group, step)


def staging_columns(n: int, dtype: Any) -> int:
    """Columns of the staging memory of results: 128 bytes, or the `n` columns of the tile if they are fewer."""
    return min(n, 128 // jnp.dtype(dtype).itemsize)


def row_staging(gpu: Any, rows: int, n: int, dtype: Any) -> Any:
    """(two swizzled slots, a plain one) of `rows` rows of a tile of n columns, in the same shared memory: for full tiles,
    and for `copy_rows`."""
    width = staging_columns(n, dtype)
    return gpu.RefUnion(smem(gpu, (2, rows, width), dtype), gpu.SMEM((rows, width), dtype))
