"""Shared parts of the fused matmuls on TPU (Mosaic): tile sizes, the matmul of a tile, and the ring.

Remote DMA runs in both directions of a ring, concurrently with the matrix unit. The kernels iterate over (row tile,
column tile) of all blocks of rows, in the order in which the ring delivers or needs them. Operands that stay on a
device go through the pipeline of the grid; blocks that are sent are copied by explicit DMA. Before it reuses a receive
buffer, a sender waits for a free-slot semaphore that the receiver signals. With an even number of devices the block of
the opposite device is sent in two halves, one in each direction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._collective_ids import collective_id
from meshpar_kernels._numerics import cost
from meshpar_kernels.collective_matmul.dot_dims import Axes
from meshpar_kernels.collectives.run_by_ppermute import rank_of
from meshpar_kernels.collectives.tpu_one_shot_all_reduce import coordinates, entry_barrier
from meshpar_kernels.grouped_matmul.tpu_tile_matmul import in_blocks
from meshpar_kernels.grouped_matmul.tpu_tile_sizes import BLOCK, cheapest, vmem_to_plan_with

TILES = 32
"""Largest number of row tiles of a block: each has semaphores of its own."""

UP, DOWN = 0, 1


class Tile(NamedTuple):
    """Rows and columns of the result that one grid step computes."""

    m: int
    n: int


def pick_tile(rows: int, k: int, n: int, devices: int, itemsize: int, keep: bool = False) -> Tile | None:
    """The tile that fits VMEM and has the least modelled cost; None if no tile fits.

    The cost has the bytes moved between HBM and VMEM, a constant for each grid step, and the loss of the matrix unit at
    small m. A grid step has all of K in VMEM. The rows are fetched once. The weights are fetched once in total if one
    tile has all their columns, else once for every row tile.

    Args:
      rows: of one device's block.
      k, n: contracted and resulting columns.
      devices: of the ring.
      itemsize: bytes of an element of the operands.
      keep: the kernel also writes the gathered rows.
    """
    pack = 32 // itemsize
    heights = [t for t in range(pack, min(rows, 2048) + 1, pack) if rows % t == 0 and rows // t <= TILES]
    widths = [t for t in range(128, min(n, 4096) + 1, 128) if n % t == 0]
    candidates = []
    for tm, tn in itertools.product(heights, widths):
        # two buffers of each operand and of the result, two float32 ones each for received and sent tiles, one accumulator
        held = 2 * itemsize * (tm * k * (1 + keep) + k * tn + tm * tn) + 4 * 5 * tm * tn
        visits = devices * rows // tm
        moved = devices * rows * k + k * n * (1 if tn == n else visits)
        # a grid step costs about as much as 200 kB of traffic; loading new weights costs the matrix unit the time of 100
        # rows; it computes about 500 operations while a byte is fetched
        lost = 2 * devices * rows * k * n / 500 * 100 / tm
        candidates.append((itemsize * moved + 2e5 * visits * (n // tn) + lost, held, Tile(tm, tn)))
    return cheapest(candidates)


def unsupported(
    x: jax.Array,
    w: jax.Array,
    rows: int,
    k: int,
    n: int,
    devices: int,
    tile: Tile | None,
    out_dtype: Any,
    axes: Axes = (),
) -> Unsupported:
    """Reasons why the kernels cannot take these operands; empty if they can.

    Args:
      x, w: the operands.
      rows, k, n: rows of a device's block, contracted and resulting columns.
      devices: of the ring.
      tile: result of `pick_tile`.
      out_dtype: of the result.
      axes: mesh axes of the ring.
    """
    reasons = _compat.ici_reasons((axes,) if isinstance(axes, str) else axes)
    if devices > 1 and _compat.tpu_cores() > 1:
        reasons.append(f"a {_compat.device_kind()} has {_compat.tpu_cores()} TensorCores; the kernel multiplies on one")
    if x.dtype != w.dtype or x.dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"the operands are {x.dtype} and {w.dtype}; the kernel takes float32 or bfloat16, both alike")
    if out_dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"the result is to be {jnp.dtype(out_dtype)}; the kernel makes float32 or bfloat16")
    if k % 128 or n % 128:
        reasons.append(f"K={k} and the {n} resulting columns must be multiples of 128")
    elif tile is None:
        reasons.append(
            f"no tile of a block of {rows} rows, K={k} and {n} columns fits {vmem_to_plan_with() >> 20} MiB of VMEM (tiles "
            f"divide the rows, in multiples of {32 // x.dtype.itemsize}, at most {TILES} of them, and the columns)"
        )
    return Unsupported(reasons)


def multiply(x_ref, w_ref, acc, transposed: bool, precision: Any) -> None:
    """acc = x · w in float32, for refs in VMEM, by `dot_general`s of at most `BLOCK`; w is [n, K] with `transposed`."""
    (rows, k), n = x_ref.shape, acc.shape[1]

    def partial_product(row_slice: Any, inner: Any, columns: Any) -> jax.Array:
        """float32 x[row_slice, inner] · w[inner, columns]."""
        contract = (((1,), (1 if transposed else 0,)), ((), ()))
        left, right = x_ref[row_slice, inner], w_ref[columns, inner] if transposed else w_ref[inner, columns]
        return lax.dot_general(left, right, contract, precision=precision, preferred_element_type=jnp.float32)

    def strip(first_row: Any, height: int) -> None:
        """Compute the rows [first_row, first_row + height) of acc, block of columns by block of columns."""

        def block(first_column: Any, width: int) -> None:
            """Compute `width` columns of these rows from `first_column` on, over all of K."""
            row_slice, columns = pl.ds(first_row, height), pl.ds(first_column, width)
            if k <= BLOCK[1]:
                acc[row_slice, columns] = partial_product(row_slice, slice(None), columns)
                return
            acc[row_slice, columns] = jnp.zeros((height, width), jnp.float32)

            def add(first: Any, length: int) -> None:
                acc[row_slice, columns] += partial_product(row_slice, pl.ds(first, length), columns)

            in_blocks(k, BLOCK[1], add)

        in_blocks(n, BLOCK[2], block)

    in_blocks(rows, BLOCK[0], strip)


def weights_spec(k: int, tn: int, transposed: bool) -> pl.BlockSpec:
    if transposed:
        return pl.BlockSpec((tn, k), lambda v, j, *_: (j, 0))
    return pl.BlockSpec((k, tn), lambda v, j, *_: (0, j))


class Ring:
    """This device's rank and neighbours on the ring, inside a kernel.

    Attributes:
      rank: int32 scalar.
      receiver, sender: mesh coordinates of the device that this one sends to, and receives from, in the directions (UP,
        DOWN).
    """

    def __init__(self, axes: tuple[str, ...], sizes: tuple[int, ...]):
        """The ring over these mesh axes, the first major, of these sizes."""
        devices = math.prod(sizes)
        self.rank = rank_of(axes)
        above, below = lax.rem(self.rank + 1, devices), lax.rem(self.rank + (devices - 1), devices)
        neighbours = [coordinates(r, axes, sizes) for r in (above, below)]
        self.receiver = neighbours  # in direction UP, and in direction DOWN
        self.sender = neighbours[::-1]

    def entry_barrier(self) -> None:
        """Block until both neighbours have entered the kernel, so that their buffers can be written."""
        entry_barrier(self.receiver)

    def release_slot(self, free_slots, channel: int) -> None:
        """Signal the sender of a channel that a receive slot is free."""
        pl.semaphore_signal(free_slots.at[channel], 1, device_id=self.sender[channel])


def block_at(rank: jax.Array, away: jax.Array, devices: int) -> jax.Array:
    return lax.rem(rank + away + devices, jnp.int32(devices))


def cost_of(rows: int, k: int, n: int, dtype: Any, out_dtype: Any, remote: int) -> pl.CostEstimate:
    """Cost of x [rows, k] · w [k, n] with `remote` bytes sent to other devices."""
    nbytes = dtype.itemsize * (rows * k + k * n) + jnp.dtype(out_dtype).itemsize * rows * n + remote
    return cost(2 * rows * k * n, nbytes, remote=remote)


def run(
    kernel: Callable[..., None], name: str, x: jax.Array, w: jax.Array, axes: tuple[str, ...], *, grid: tuple[int, int],
    in_specs: Sequence[pl.BlockSpec], out_specs: Sequence[pl.BlockSpec], scratch: Sequence[Any],
    results: Sequence[tuple[tuple[int, ...], Any]], cost: pl.CostEstimate,
) -> list[jax.Array]:  # fmt: skip
    """Run a kernel on every device of the ring. Its first ref is the scalar-prefetched rank of the device, which the
    block specs read.

    Args:
      name: name of the public function; it determines the collective id.
      axes: mesh axes of the ring.
      grid: (tile steps over rows, column tiles).
      results: (shape, dtype) of each output. Receive buffers are outputs too, so that XLA allocates them in HBM.

    Returns:
      All outputs.
    """
    (rank,) = _compat.varying_over(axes, rank_of(axes))
    x, w = _compat.same_varying(_compat.one_slice(name, axes, x), w)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch
        ),
        out_shape=[_compat.out_struct(shape, dtype, x, w) for shape, dtype in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            collective_id=collective_id(name, axes),
            vmem_limit_bytes=_compat.tpu_vmem_limit(),
        ),
        cost_estimate=cost,
        name=f"meshpar_{name}",
    )(rank[None], x, w)
