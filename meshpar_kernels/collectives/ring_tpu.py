"""All-gathers and reduce-scatters on TPU (Mosaic) that follow a table: the rings of all torus dimensions at once, by remote
DMA from HBM to HBM."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._collective_ids import collective_id
from meshpar_kernels._numerics import cost
from meshpar_kernels.collectives.run_by_ppermute import rank_of, window
from meshpar_kernels.collectives.schedule_table import Table
from meshpar_kernels.collectives.tpu_one_shot_all_reduce import coordinates, entry_barrier

DEPTH = 2
"""Buffers, and pairs of semaphores, of a channel.

There is no signal for a free buffer: in a bidirectional ring a device is never more than one step ahead of its neighbours,
since each step waits for the data that they send in it (`never_overtakes`)."""

SEMAPHORES = 256
"""Largest number of DMA semaphores of a kernel."""


TILE_BYTES = 2 << 20
"""Most bytes of a block that is added at once."""


def _tile_bytes() -> int:
    """Most bytes of a block that is added at once on this chip: six are in VMEM."""
    return min(TILE_BYTES, _compat.tpu_vmem() // 32)


def unsupported(table: Table, part: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str, ...] = ()) -> Unsupported:
    """Why the kernel cannot follow a table with slots of this shape, [rows, columns], over these mesh axes."""
    reasons = _compat.ici_reasons(axes)
    if any((t.to < 0).any() for step in table.steps for t in step):
        reasons.append("an axis does not wrap around, and on a line not every device sends in every step")
    elif not never_overtakes(table):
        reasons.append("a device could send more than its receiver has room for")
    if 2 * DEPTH * table.channels > SEMAPHORES:
        reasons.append(f"{table.channels} lanes need more than {SEMAPHORES} semaphores")
    summed = (jnp.float32, jnp.bfloat16)
    if dtype not in (summed if table.kind != "all_gather" else (*summed, jnp.int8)):
        also = "" if table.kind != "all_gather" else ", and int8"
        reasons.append(f"x is {dtype}; the kernel takes float32 and bfloat16{also}")
    pack = 32 // jnp.dtype(dtype).itemsize
    if len(part) != 2 or part[0] % pack or part[1] % 128:
        reasons.append(f"a slot is {list(part)}, and must be [rows, columns] in multiples of {pack} and 128")
    elif table.kind != "all_gather" and part[1] * 32 > 2 * _tile_bytes():
        reasons.append(f"blocks of {pack} rows of {part[1]} columns do not fit {_compat.tpu_vmem() >> 20} MiB of VMEM")
    return Unsupported(reasons)


def never_overtakes(table: Table) -> bool:
    """Whether no device overwrites a receive buffer before the receiver has read it.

    A buffer is reused after `DEPTH` messages of its channel. The receives that every device waits for must imply that
    the receiver has read it.
    """
    ranks = np.arange(table.ranks)
    over = np.full((table.ranks, table.ranks), -1)  # [r, q]: the last step that q has finished, as far as r knows
    used: dict[int, list[int]] = {}
    for n, step in enumerate(table.steps):
        known = over.copy()
        for t in step:
            steps = used.setdefault(t.channel, [])
            if len(steps) >= DEPTH and (over[ranks, t.to] < steps[-DEPTH]).any():
                return False
            steps.append(n)
            known[t.to] = np.maximum(known[t.to], over)
        known[ranks, ranks] = n
        over = known
    return True


class _Plan:
    """A table in the form that the kernel uses.

    Attributes:
      rows: int32 [A, transfers · width], for each rank and transfer: start of the box that the rank sends, start of the
        box that it receives, and the ranks of receiver and sender.
      boxes: shape of each transfer's box.
      uses: for each transfer, how often its channel was used before.
      total: {channel: how often it is used}.
    """

    def __init__(self, table: Table):
        """Convert a table.

        Raises:
          ValueError: a transfer sends slots that are no box of the buffer.
        """
        shape = (*table.sizes, table.chunks)
        self.dims = len(shape)
        self.width = 2 * self.dims + 2
        self.boxes: list[tuple[int, ...]] = []
        self.transfers = [t for step in table.steps for t in step]
        rows, uses_of = [], dict.fromkeys(range(table.channels), 0)
        self.uses: list[int] = []
        for t in self.transfers:
            sent, recv_buffer = window(t.slots, shape), window(t.received(), shape)
            if sent is None or recv_buffer is None:
                raise ValueError("this table sends slots that are no boxes of the buffer")
            origin = np.argsort(t.to)
            rows.append(np.concatenate([sent.starts, recv_buffer.starts, t.to[:, None], origin[:, None]], axis=1))
            self.boxes.append(sent.sizes)
            self.uses.append(uses_of[t.channel])
            uses_of[t.channel] += 1
        self.total = uses_of
        self.rows = np.concatenate(rows, axis=1).astype(np.int32)

    def of(self, channel: int, use: int) -> int:
        """Index of the transfer that is use number `use` of a channel."""
        return next(k for k, t in enumerate(self.transfers) if t.channel == channel and self.uses[k] == use)


def _kernel(rows_ref, x_ref, buffer, *rest, table: Table, plan: _Plan, axes: tuple[str, ...]):
    """The collective of a table, without a grid: in each step starts all sends, then waits for all receives.

    An all-gather writes received boxes directly into the `buffer` of the receiver. A reduce-scatter writes them into
    the receive buffer of their channel, from which they are added to `buffer`, which begins as the device's own array.

    Args:
      rows_ref: scalar prefetch int32 [transfers · width]: this device's row of `_Plan.rows`.
      x_ref: HBM input: this device's blocks (all-gather), or aliased with `buffer` (reduce-scatter).
      buffer: HBM output [*sizes, chunks, rows, columns].
      rest: for a reduce-scatter one HBM receive buffer [DEPTH, *box, rows, columns] for each channel; scratch: a DMA
        semaphore for the copy of x, DMA semaphores [channels, DEPTH] for sends and for receives; for a reduce-scatter
        three VMEM buffers and their DMA semaphores (`_add`).
      axes: mesh axes of the group.
    """
    *recv_buffer, keep_sem, sent_sem, recv_sem = rest[: table.channels * (table.kind != "all_gather") + 3]
    adding = rest[len(recv_buffer) + 3 :]
    gathers = table.kind == "all_gather"
    dims, shape = plan.dims, (*table.sizes, table.chunks)

    def number_at(k: int, column: int):
        return rows_ref[k * plan.width + column]

    def device(k: int, receiving: bool):
        return coordinates(number_at(k, 2 * dims + receiving), axes, table.sizes)

    def block_ref(k: int, receiving: bool):
        """Ref of the box of transfer k in `buffer`: the received box, or the sent one."""
        index = []
        for d, (extent, full_extent) in enumerate(zip(plan.boxes[k], shape, strict=True)):
            start = 0 if extent == full_extent else number_at(k, receiving * dims + d)
            index.append(pl.ds(start, extent))
        return buffer.at[tuple(index)]

    def copy_of(k: int, receiving: bool):
        """The message of a transfer, as its sender or its receiver sees it."""
        channel, slot = plan.transfers[k].channel, plan.uses[k] % DEPTH
        target = block_ref(k, receiving) if gathers else recv_buffer[channel].at[slot]
        return pltpu.make_async_remote_copy(
            block_ref(k, receiving),
            target,
            sent_sem.at[channel, slot],
            recv_sem.at[channel, slot],
            device_id=device(k, receiving),
        )

    at = coordinates(rank_of(axes), axes, table.sizes)
    keep = pltpu.make_async_copy(x_ref, buffer.at[tuple(pl.ds(at[a], 1) for a in axes)], keep_sem) if gathers else None
    if keep is not None:
        keep.start()
    first = [plan.of(channel, 0) for channel in range(table.channels) if plan.total[channel]]
    entry_barrier([device(k, receiving) for k in first for receiving in (False, True)])
    if keep is not None:
        keep.wait()
    k = 0
    for step in table.steps:
        transfers_of_step = range(k, k + len(step))
        k += len(step)
        for n in transfers_of_step:
            channel, use = plan.transfers[n].channel, plan.uses[n]
            if use >= DEPTH:
                copy_of(plan.of(channel, use - DEPTH), False).wait_send()
            copy_of(n, False).start()
        for n in transfers_of_step:
            channel, use = plan.transfers[n].channel, plan.uses[n]
            copy_of(n, True).wait_recv()
            if not gathers:
                _add(block_ref(n, True), recv_buffer[channel].at[use % DEPTH], *adding)
    for channel, total in plan.total.items():
        for use in range(max(0, total - DEPTH), total):
            copy_of(plan.of(channel, use), False).wait_send()


def _rows_at_once(rows: int, columns: int, itemsize: int) -> int:
    """Most rows of a slot that fit a block of `_tile_bytes`, a multiple of the register tile's rows."""
    pack = 32 // itemsize
    fits = [n for n in range(pack, rows + 1, pack) if rows % n == 0 and n * columns * itemsize <= _tile_bytes()]
    return max(fits, default=pack)


def _add(into, new, old_ref, new_ref, sum_ref, sems) -> None:
    """into += new, both [*box, rows, columns] in HBM, by blocks in VMEM: the next block is read and the last one
    written while one is added.

    Args:
      old_ref, new_ref, sum_ref: VMEM [2, rows of a block, columns].
      sems: DMA semaphores [3, 2]: reads of `into`, reads of `new`, writes, for two blocks each.
    """
    *box, rows, _ = new.shape
    step = old_ref.shape[1]
    blocks = math.prod(box) * (rows // step)

    def part(ref, i):
        """Ref of block i of `into` or of `new`: [rows of a block, columns]."""
        index: list[Any] = [pl.ds(lax.rem(i, rows // step) * step, step)]
        i = lax.div(i, rows // step)
        for extent in reversed(box):
            index.insert(0, lax.rem(i, extent))
            i = lax.div(i, extent)
        return ref.at[tuple(index)]

    def reads(i):
        """The two copies that fetch block i to VMEM."""
        slot = lax.rem(i, 2)
        return (
            pltpu.make_async_copy(part(into, i), old_ref.at[slot], sems.at[0, slot]),
            pltpu.make_async_copy(part(new, i), new_ref.at[slot], sems.at[1, slot]),
        )

    def write(i):
        slot = lax.rem(i, 2)
        return pltpu.make_async_copy(sum_ref.at[slot], part(into, i), sems.at[2, slot])

    for copy in reads(jnp.int32(0)):
        copy.start()

    @pl.loop(0, blocks)
    def one(i):
        """Loop body: fetch block i + 1, add block i in float32, and start writing it."""

        @pl.when(i + 1 < blocks)
        def _():
            for copy in reads(i + 1):
                copy.start()

        for copy in reads(i):
            copy.wait()

        @pl.when(i >= 2)
        def _():
            write(i - 2).wait()

        slot = lax.rem(i, 2)
        total = old_ref[slot].astype(jnp.float32) + new_ref[slot].astype(jnp.float32)
        sum_ref[slot] = total.astype(sum_ref.dtype)
        write(i).start()

    for i in range(max(0, blocks - 2), blocks):
        write(jnp.int32(i)).wait()


def _call(table: Table, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Run the kernel of a table; returns [*sizes, chunks, rows, columns].

    Args:
      x: [1, …, 1, chunks, rows, columns] of this device for an all-gather, [*sizes, chunks, rows, columns] for a
        reduce-scatter.
      axes: mesh axes of the group.
    """
    plan = _Plan(table)
    gathers = table.kind == "all_gather"
    part = x.shape[-2:]
    shape = (*table.sizes, table.chunks, *part)
    nbytes = math.prod(shape) * x.dtype.itemsize
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    outs = [_compat.out_struct(shape, x.dtype, x)]
    if not gathers:  # one receive buffer for each channel, allocated by XLA as scratch outputs
        for channel in range(table.channels):
            box = plan.boxes[plan.of(channel, 0)]
            outs.append(_compat.out_struct((DEPTH, *box, *part), x.dtype, x))
    tile = (2, _rows_at_once(part[0], part[1], x.dtype.itemsize), part[1])
    adding = [] if gathers else [pltpu.VMEM(tile, x.dtype)] * 3 + [pltpu.SemaphoreType.DMA((3, 2))]
    name = f"ring_{table.kind}"
    own_rows = jnp.asarray(plan.rows)[rank_of(axes)]
    (own_rows,) = _compat.varying_over(axes, own_rows)
    out = pl.pallas_call(
        functools.partial(_kernel, table=table, plan=plan, axes=axes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(),
            in_specs=[anywhere],
            out_specs=[anywhere] * len(outs),
            scratch_shapes=[
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((table.channels, DEPTH)),
                pltpu.SemaphoreType.DMA((table.channels, DEPTH)),
                *adding,
            ],
        ),
        out_shape=outs,
        input_output_aliases={} if gathers else {1: 0},
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id(name, axes), vmem_limit_bytes=_compat.tpu_vmem_limit()
        ),
        cost_estimate=cost(
            0 if gathers else nbytes // x.dtype.itemsize,
            2 * nbytes if gathers else 5 * nbytes,
            remote=nbytes // table.ranks * (table.ranks - 1),
        ),
        name=f"meshpar_{name}",
    )(own_rows, _compat.one_slice(name, axes, x))
    return out[0]


def all_gather(table: Table, parts: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[chunks, rows, columns] of this device → [slots, rows, columns] of all devices."""
    local = parts.reshape(*[1] * len(table.sizes), *parts.shape)
    return _call(table, local, axes).reshape(table.slots, *parts.shape[1:])


def reduce_scatter(table: Table, slots: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[slots, rows, columns] → the same shape, with the reduced blocks in the device's own slots; the other slots
    contain partial results.

    Partial results in bfloat16 are rounded once at every hop.
    """
    shape = (*table.sizes, table.chunks, *slots.shape[1:])
    return _call(table, slots.reshape(shape), axes).reshape(slots.shape)
