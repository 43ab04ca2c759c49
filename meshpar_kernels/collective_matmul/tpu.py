"""Products fused with their communication on TPU (Mosaic): remote DMA both ways round a ring while the matrix unit runs.

Both kernels walk over (row tile, column tile) of all blocks of rows, in the order in which a ring that runs both ways brings
or wants them. Weights, results and what lies still go through the pipeline of the grid; what travels is moved by hand:

- `all_gather_matmul`: a block that arrives is sent on, and multiplied meanwhile. Two buffers each way in HBM.
- `matmul_reduce_scatter`: a tile of a product is added to the sums that came for it, and sent on from VMEM at once, so that
  its way is hidden behind all tiles of both directions before its turn comes at the next device.

A sender waits for the receiver's word before it uses a buffer again. With an even number of devices the block of the device
opposite travels in two halves, one each way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._collective_ids import COLLECTIVE_IDS
from meshpar_kernels.collective_matmul.dots import Axes
from meshpar_kernels.collective_matmul.schedule import full_hops
from meshpar_kernels.collectives.ppermute import rank_of
from meshpar_kernels.collectives.tpu import coordinates, meet

__all__ = ["Tile", "all_gather_matmul", "matmul_reduce_scatter", "pick_tile", "unsupported"]

VMEM_BYTES = 48 << 20
"""On-chip memory to plan with: three quarters of the 64 MiB of a v5p or tpu7x core."""

BLOCK = (512, 2048, 512)
"""Most rows, contracted columns and columns of one product that the compiler schedules as a whole."""

TILES = 32
"""Most row tiles of a block: each has semaphores of its own."""

UP, DOWN = 0, 1


class Tile(NamedTuple):
    """Rows and columns of the result that one step of the grid makes."""

    m: int
    n: int


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def pick_tile(rows: int, k: int, n: int, devices: int, itemsize: int, vmem: int = VMEM_BYTES) -> Tile | None:
    """The tile that moves the fewest bytes between HBM and VMEM and fits; None if none does.

    A step holds all of K. The rows are fetched once; the weights once in all if one tile holds all their columns, else once
    for every row tile.

    Args:
      rows: of one device's block.
      k, n: contracted and resulting columns.
      devices: of the ring.
      itemsize: bytes of an element of the operands.
      vmem: bytes to plan with.
    """
    pack = 32 // itemsize
    heights = [t for t in range(pack, min(rows, 2048) + 1, pack) if rows % t == 0 and rows // t <= TILES]
    widths = [t for t in range(128, min(n, 4096) + 1, 128) if n % t == 0]
    best = None
    for tm in heights:
        for tn in widths:
            # two of each operand, two of the result, of what came and of what goes in float32, and one of sums
            held = 2 * itemsize * (tm * k + k * tn + tm * tn) + 4 * 5 * tm * tn
            if held > vmem:
                continue
            visits = devices * rows // tm
            moved = devices * rows * k + k * n * (1 if tn == n else visits)
            # a step itself costs about as much as 200 kB; the matrix unit loses 100 rows whenever it takes new weights, and
            # does about 500 operations while a byte is fetched
            lost = 2 * devices * rows * k * n / 500 * 100 / tm
            cost = (itemsize * moved + 2e5 * visits * (n // tn) + lost, held)
            if best is None or cost < best[0]:
                best = (cost, Tile(tm, tn))
    return None if best is None else best[1]


def unsupported(
    x: jax.Array, w: jax.Array, rows: int, k: int, n: int, devices: int, tile: Tile | None, out_dtype: Any
) -> Unsupported:
    """Why the kernels cannot take these operands.

    Args:
      x, w: the operands.
      rows, k, n: rows of a device's block, contracted and resulting columns.
      devices: of the ring.
      tile: what `pick_tile` found.
      out_dtype: of the result.
    """
    reasons = []
    if x.dtype != w.dtype or x.dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"the operands are {x.dtype} and {w.dtype}; the kernel takes float32 or bfloat16, both alike")
    if out_dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"the result is to be {jnp.dtype(out_dtype)}; the kernel makes float32 or bfloat16")
    if k % 128 or n % 128:
        reasons.append(f"K={k} and the {n} resulting columns must be multiples of 128")
    elif tile is None:
        reasons.append(
            f"no tile of a block of {rows} rows, K={k} and {n} columns fits {VMEM_BYTES >> 20} MiB of VMEM (tiles "
            f"divide the rows, in multiples of {32 // x.dtype.itemsize}, at most {TILES} of them, and the columns)"
        )
    return Unsupported(reasons)


def _multiply(x_ref, w_ref, total, transposed: bool, precision: Any) -> None:
    """total = x · w, in float32, by blocks that the compiler can schedule."""
    (rows, k), n = x_ref.shape, total.shape[1]

    def blocks(size: int, most: int, work: Callable[[Any, int], None]) -> None:
        number = _cdiv(size, most)
        length = size if number == 1 else _cdiv(_cdiv(size, number), 128) * 128
        whole = size // length
        if whole == 1:
            work(0, length)
        else:

            @pl.loop(0, whole)
            def _(b):
                work(pl.multiple_of(b * length, length), length)

        if size % length:
            work(whole * length, size % length)

    def product(here: Any, inner: Any, columns: Any) -> jax.Array:
        contract = ((1,), (1,)) if transposed else ((1,), (0,))
        right = w_ref[columns, inner] if transposed else w_ref[inner, columns]
        return lax.dot_general(
            x_ref[here, inner], right, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def strip(first_row: Any, height: int) -> None:
        def block(first_column: Any, width: int) -> None:
            here, columns = pl.ds(first_row, height), pl.ds(first_column, width)
            if k <= BLOCK[1]:
                total[here, columns] = product(here, slice(None), columns)
                return
            total[here, columns] = jnp.zeros((height, width), jnp.float32)

            def add(first: Any, length: int) -> None:
                total[here, columns] += product(here, pl.ds(first, length), columns)

            blocks(k, BLOCK[1], add)

        blocks(n, BLOCK[2], block)

    blocks(rows, BLOCK[0], strip)


def _w_spec(k: int, tn: int, transposed: bool) -> pl.BlockSpec:
    if transposed:
        return pl.BlockSpec((tn, k), lambda v, j, *_: (j, 0))
    return pl.BlockSpec((k, tn), lambda v, j, *_: (0, j))


class _Ring:
    """This device on the ring, inside a kernel."""

    def __init__(self, axes: tuple[str, ...], sizes: tuple[int, ...]):
        devices = math.prod(sizes)
        self.rank = rank_of(axes)
        above, below = lax.rem(self.rank + 1, devices), lax.rem(self.rank + (devices - 1), devices)
        neighbours = [coordinates(r, axes, sizes) for r in (above, below)]
        self.receiver = neighbours  # of what goes up, and of what goes down
        self.sender = neighbours[::-1]

    def meet(self) -> None:
        """Wait for both neighbours: their buffers are there."""
        meet(self.receiver)

    def say_free(self, credit, lane: int) -> None:
        """Tell a lane's sender that a buffer is free."""
        pl.semaphore_signal(
            credit.at[lane], 1, device_id=self.sender[lane]
        )  # fmt: skip


def _ring_of(axis_name: Axes) -> tuple[tuple[str, ...], tuple[int, ...]]:
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return axes, tuple(lax.axis_size(a) for a in axes)


def _block_at(rank: jax.Array, away: jax.Array, devices: int) -> jax.Array:
    return lax.rem(rank + away + devices, jnp.int32(devices))


# --- gather, then multiply ---------------------------------------------------------------------------


class _Gathering(NamedTuple):
    """The order of a gather's visits: a row tile of this device's block, then of the pairs that arrive, then of the opposite
    one.

    Attributes:
      devices, tiles: of the ring, and row tiles of a block.
    """

    devices: int
    tiles: int

    @property
    def steps(self) -> int:
        """Sends each way, that of the opposite block included."""
        return full_hops(self.devices) + (self.devices % 2 == 0)

    def at(self, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Phase, way (0: what goes up), row tile, and tiles since the phase began, of a visit."""
        u = jnp.maximum(v - self.tiles, 0)
        phase = jnp.where(v < self.tiles, 0, 1 + lax.div(u, 2 * self.tiles))
        q = jnp.where(v < self.tiles, v, lax.rem(u, 2 * self.tiles))
        return phase, lax.div(q, self.tiles), lax.rem(q, self.tiles), q

    def length(self, phase: jax.Array) -> jax.Array:
        """Visits of a phase."""
        single = (phase == 0) | ((phase == self.steps) & (self.devices % 2 == 0))
        return jnp.where(single, self.tiles, 2 * self.tiles)

    def row(self, v: jax.Array, rank: jax.Array) -> jax.Array:
        """Row tile of the result."""
        phase, way, i, _ = self.at(v)
        away = jnp.where(way == UP, -phase, phase)
        return _block_at(rank, away, self.devices) * self.tiles + i


def _gather_kernel(
    rank_ref, x_ref, w_ref, out_ref, came, tiles, total, tile_sem, sent_sem, came_sem, credit,
    *, order: _Gathering, axes, sizes, transposed: bool, precision: Any, cut: int,
):  # fmt: skip
    """One (row tile, column tile).

    In phase p the blocks that came in step p-1 are sent on in step p, and multiplied meanwhile. `came[way, step % 2]`
    receives; `cut` rows of the opposite block go up, the rest down.
    """
    del rank_ref  # the block specs read it
    v, j = pl.program_id(0), pl.program_id(1)
    ring = _Ring(axes, sizes)
    rows, height = x_ref.shape[0], tiles.shape[1]
    full, steps = full_hops(order.devices), order.steps
    phase, way, i, q = order.at(v)

    def message(way: int, first: bool, half: bool, turn: Any):
        """What goes one way in a step: this device's block first, then what came before."""
        source = x_ref if first else came.at[way, 1 - turn]
        target = came.at[way, turn]
        if half:
            part = pl.ds(0, cut) if way == UP else pl.ds(cut, rows - cut)
            source, target = source.at[part], came.at[UP, turn].at[part]
        return pltpu.make_async_remote_copy(
            source, target, sent_sem.at[way], came_sem.at[way, turn],
            device_id=ring.receiver[way],
        )  # fmt: skip

    def each_message(step: Any, act: Callable[[Any], None]) -> None:
        """`act` on the messages of a step."""
        turn = lax.rem(step, 2)

        def some(first: bool, half: bool) -> None:
            ways = (UP, DOWN) if not half or cut < rows else (UP,)
            for one in ways:
                act(message(one, first, half, turn))

        for first in (True, False):
            of_kind = (step == 0) if first else (step > 0)
            if full and (first or full > 1):
                pl.when(of_kind & (step < full))(functools.partial(some, first, False))
            if steps > full and first == (full == 0):
                pl.when(of_kind & (step == full))(functools.partial(some, first, True))

    def load(way: Any, i: Any, phase: Any, turn: Any, act: Callable[[Any], None]) -> None:
        """`act` on the copy of a row tile to chip memory."""
        here = pl.ds(pl.multiple_of(i * height, height), height)

        @pl.when(phase == 0)
        def _():
            act(pltpu.make_async_copy(x_ref.at[here], tiles.at[turn], tile_sem.at[turn]))

        @pl.when(phase > 0)
        def _():
            source = came.at[way, lax.rem(phase + 1, 2), here]
            act(pltpu.make_async_copy(source, tiles.at[turn], tile_sem.at[turn]))

    def start(copy) -> None:
        copy.start()

    turn = lax.rem(v, 2)

    @pl.when(j == 0)
    def before():
        @pl.when(v == 0)
        def _():
            ring.meet()

        @pl.when(q == 0)
        def _():
            @pl.when(phase > 0)
            def _():
                each_message(phase - 1, lambda copy: copy.wait_recv())

            @pl.when((phase >= 2) & (phase < steps))
            def _():
                for one in (UP, DOWN):
                    pl.semaphore_wait(credit.at[one], 1)

            each_message(phase, start)
            load(way, i, phase, turn, start)

        load(way, i, phase, turn, lambda copy: copy.wait())

        @pl.when(q + 1 < order.length(phase))
        def _():
            _, next_way, next_i, _ = order.at(v + 1)
            load(next_way, next_i, phase, 1 - turn, start)

    _multiply(tiles.at[turn], w_ref, total, transposed, precision)
    out_ref[...] = total[...].astype(out_ref.dtype)

    @pl.when((q + 1 == order.length(phase)) & (j == pl.num_programs(1) - 1))
    def after():
        each_message(phase, lambda copy: copy.wait_send())

        @pl.when((phase >= 1) & (phase + 1 < steps))
        def _():
            for one in (UP, DOWN):
                ring.say_free(credit, one)


def all_gather_matmul(
    x: jax.Array, w: jax.Array, axis_name: Axes, *, tile: Tile, out_dtype: Any, transposed: bool, precision: Any
) -> jax.Array:
    """x[m, K] of all devices times w[K, n] ([n, K] with `transposed`) → [A·m, n]."""
    axes, sizes = _ring_of(axis_name)
    devices = math.prod(sizes)
    rows, k = x.shape
    n = w.shape[0] if transposed else w.shape[1]
    order = _Gathering(devices, rows // tile.m)
    itemsize = x.dtype.itemsize
    pack = 32 // itemsize
    cut = _cdiv(rows // 2, pack) * pack if devices > 2 else rows
    (rank,) = _compat.varying_over(axes, rank_of(axes))
    x, w = _compat.same_varying(x, w)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out, _ = pl.pallas_call(
        functools.partial(
            _gather_kernel, order=order, axes=axes, sizes=sizes, transposed=transposed, precision=precision, cut=cut
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(devices * order.tiles, n // tile.n),
            in_specs=[anywhere, _w_spec(k, tile.n, transposed)],
            out_specs=[
                pl.BlockSpec((tile.m, tile.n), lambda v, j, rank: (order.row(v, rank[0]), j)),
                anywhere,
            ],
            scratch_shapes=[
                pltpu.VMEM((2, tile.m, k), x.dtype),
                pltpu.VMEM(tile, jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SemaphoreType.REGULAR((2,)),
            ],
        ),
        out_shape=[
            _compat.out_struct((devices * rows, n), out_dtype, x, w),
            _compat.out_struct((2, 2, rows, k), x.dtype, x, w),  # in HBM, allotted by XLA; nobody reads it
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            collective_id=COLLECTIVE_IDS["all_gather_matmul"],
            vmem_limit_bytes=VMEM_BYTES + (8 << 20),
        ),
        cost_estimate=_cost(devices * rows, k, n, x.dtype, out_dtype, (devices - 1) * rows * k * itemsize),
        name="meshpar_all_gather_matmul",
    )(rank[None], x, w)
    return out


def _cost(rows: int, k: int, n: int, dtype: Any, out_dtype: Any, remote: int) -> pl.CostEstimate:
    return pl.CostEstimate(
        flops=2 * rows * k * n,
        transcendentals=0,
        bytes_accessed=dtype.itemsize * (rows * k + k * n) + jnp.dtype(out_dtype).itemsize * rows * n + remote,
        remote_bytes_transferred=remote,
    )


# --- multiply, then scatter --------------------------------------------------------------------------


class _Scattering(NamedTuple):
    """The order of a scatter's visits: the opposite block, whose sums have the longest way, pairs of nearer ones, and this
    device's own.

    Attributes:
      devices, tiles: of the ring, and row tiles of a block.
    """

    devices: int
    tiles: int

    @property
    def even(self) -> int:
        """1 if there is a device opposite."""
        return int(self.devices % 2 == 0)

    @property
    def messages(self) -> int:
        """Blocks sent each way; the first is the opposite one's half."""
        return full_hops(self.devices) + self.even

    @property
    def cut(self) -> int:
        """Row tiles of the opposite block that go up; the rest goes down."""
        return self.tiles if self.devices == 2 else _cdiv(self.tiles, 2)

    @property
    def own(self) -> int:
        """The first visit of this device's own block."""
        return (self.devices - 1) * self.tiles

    def at(self, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Number of the message, way and row tile of a visit; the number is `messages` for the own block."""
        u = jnp.maximum(v - self.even * self.tiles, 0)
        q = lax.rem(u, 2 * self.tiles)
        number, way, i = lax.div(u, 2 * self.tiles) + self.even, lax.div(q, self.tiles), lax.rem(q, self.tiles)
        if self.even:
            opposite = v < self.tiles
            number, i = jnp.where(opposite, 0, number), jnp.where(opposite, v, i)
            way = jnp.where(opposite, (v >= self.cut).astype(jnp.int32), way)
        return number, way, i

    def row(self, v: jax.Array, rank: jax.Array) -> jax.Array:
        """Row tile of x."""
        number, way, i = self.at(v)
        far = full_hops(self.devices) + self.even - number
        return _block_at(rank, jnp.where(way == UP, far, -far), self.devices) * self.tiles + i

    def came(self, number: jax.Array, way: int, i: jax.Array) -> jax.Array:
        """Whether sums come one way for row tile i of what is message `number` here."""
        some = number >= 1
        if not self.even:
            return some
        mine = i < self.cut if way == UP else i >= self.cut
        return some & ((number > 1) | mine)


def _scatter_kernel(
    rank_ref, x_ref, w_ref, out_ref, came, total, sums, leaving, sums_sem, sent_sem, came_sem, credit,
    *, order: _Scattering, axes, sizes, transposed: bool, precision: Any,
):  # fmt: skip
    """One (row tile, column tile): its product, and the sums that came for it, go on to the next device.

    `came[way, message % 2]` receives; `leaving` holds the last two tiles that were sent.
    """
    del rank_ref
    v, j = pl.program_id(0), pl.program_id(1)
    columns = pl.num_programs(1)
    ring = _Ring(axes, sizes)
    height, width = total.shape
    number, way, i = order.at(v)
    own = v >= order.own
    here = pl.ds(pl.multiple_of(i * height, height), height)
    there = pl.ds(pl.multiple_of(j * width, width), width)
    sent = v * columns + j
    turn = lax.rem(sent, 2)

    def out_copy(lane: int, slot: Any, turn: Any):
        """A tile on its way to the next device."""
        return pltpu.make_async_remote_copy(
            leaving.at[turn], came.at[lane, slot, here, there], sent_sem.at[turn], came_sem.at[lane, slot, i],
            device_id=ring.receiver[lane],
        )  # fmt: skip

    def wait_sent(turn: Any) -> None:
        out_copy(UP, 0, turn).wait_send()

    def in_copy(lane: int):
        return pltpu.make_async_copy(
            came.at[lane, lax.rem(number + 1, 2), here, there], sums.at[lane], sums_sem.at[lane]
        )

    @pl.when((v == 0) & (j == 0))
    def _():
        ring.meet()

    expected = [order.came(number, lane, i) & (own | (way == lane)) for lane in (UP, DOWN)]
    for lane in (UP, DOWN):

        @pl.when(expected[lane])
        def _(lane=lane):
            @pl.when(j == 0)
            def _():  # all columns of the row tile, which came in as many messages
                slot = lax.rem(number + 1, 2)
                row = came.at[lane, slot, here]
                pltpu.make_async_remote_copy(
                    row, row, sent_sem.at[0], came_sem.at[lane, slot, i],
                    device_id=ring.sender[lane],
                ).wait_recv()  # fmt: skip

            in_copy(lane).start()

    _multiply(x_ref, w_ref, total, transposed, precision)
    for lane in (UP, DOWN):

        @pl.when(expected[lane])
        def _(lane=lane):
            in_copy(lane).wait()
            total[...] += sums[lane].astype(jnp.float32)

    last = (i == order.tiles - 1) & (j == columns - 1)

    @pl.when(own)
    def _():
        out_ref[...] = total[...].astype(out_ref.dtype)

        @pl.when((v == order.own) & (j == 0))
        def _():
            for k in range(min(2, order.own * (out_columns := came.shape[3] // width))):
                wait_sent(lax.rem(jnp.int32(order.own * out_columns - 1 - k), 2))

    @pl.when(~own)
    def _():
        @pl.when(sent >= 2)
        def _():
            wait_sent(turn)

        leaving[turn] = total[...].astype(leaving.dtype)
        for lane in (UP, DOWN):

            @pl.when(way == lane)
            def _(lane=lane):
                if order.messages > 2:

                    @pl.when((number >= 2) & (i == 0) & (j == 0))
                    def _():
                        pl.semaphore_wait(credit.at[lane], 1)

                out_copy(lane, lax.rem(number, 2), turn).start()
                if order.messages > 2:

                    @pl.when(last & (number >= 1) & (number + 1 < order.messages))
                    def _():
                        ring.say_free(credit, lane)


def matmul_reduce_scatter(
    x: jax.Array, w: jax.Array, axis_name: Axes, *, tile: Tile, out_dtype: Any, wire_dtype: Any, transposed: bool,
    precision: Any,
) -> jax.Array:  # fmt: skip
    """x[M, k] times w[k, N] ([N, k] with `transposed`), summed over all devices → this one's rows, [M/A, N]."""
    axes, sizes = _ring_of(axis_name)
    devices = math.prod(sizes)
    whole, k = x.shape
    rows = whole // devices
    n = w.shape[0] if transposed else w.shape[1]
    order = _Scattering(devices, rows // tile.m)
    (rank,) = _compat.varying_over(axes, rank_of(axes))
    x, w = _compat.same_varying(x, w)

    def out_at(v, j, rank):
        own = v >= order.own  # until then the first tile stays, and nothing is written
        return jnp.where(own, v - order.own, 0), jnp.where(own, j, 0)

    out, _ = pl.pallas_call(
        functools.partial(
            _scatter_kernel, order=order, axes=axes, sizes=sizes, transposed=transposed, precision=precision
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(devices * order.tiles, n // tile.n),
            in_specs=[
                pl.BlockSpec((tile.m, k), lambda v, j, rank: (order.row(v, rank[0]), 0)),
                _w_spec(k, tile.n, transposed),
            ],
            out_specs=[pl.BlockSpec(tile, out_at), pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[
                pltpu.VMEM(tile, jnp.float32),
                pltpu.VMEM((2, *tile), wire_dtype),
                pltpu.VMEM((2, *tile), wire_dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2, 2, order.tiles)),
                pltpu.SemaphoreType.REGULAR((2,)),
            ],
        ),
        out_shape=[
            _compat.out_struct((rows, n), out_dtype, x, w),
            _compat.out_struct((2, 2, rows, n), wire_dtype, x, w),  # in HBM, allotted by XLA; nobody reads it
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            collective_id=COLLECTIVE_IDS["matmul_reduce_scatter"],
            vmem_limit_bytes=VMEM_BYTES + (8 << 20),
        ),
        cost_estimate=_cost(whole, k, n, x.dtype, out_dtype, (devices - 1) * rows * n * jnp.dtype(wire_dtype).itemsize),
        name="meshpar_matmul_reduce_scatter",
    )(rank[None], x, w)
    return out
