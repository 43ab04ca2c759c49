"""Collective matmuls on a bidirectional ring of `ppermute`s: a block is sent while the block before it is multiplied.

The decomposition is from Wang et al., "Overlap communication with dependent computation via decomposition in large deep
learning models" (ASPLOS 2023). Each direction carries full blocks half of the way round, so that matmuls keep the size
of a block; a block too small for the matrix unit is multiplied together with its neighbours. Nothing is transposed or
reshaped: blocks are slices of operands and of results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels.collective_matmul.dot_dims import Axes, Dot, accumulator_dtype, block_of, place_of
from meshpar_kernels.collective_matmul.schedule import full_hops, split_rows

TILE = 256
"""Rows of a matmul at which the matrix unit is fully used: smaller blocks are multiplied together."""
UNROLLED = 16
"""Largest number of hops in each direction of an unrolled ring; longer rings are loops."""


def gather_dots(
    x: jax.Array,
    others: Sequence[jax.Array],
    dots: Sequence[Dot],
    axis_name: Axes,
    dim: int,
    *,
    keep: bool = False,
    tile: int = TILE,
) -> list[jax.Array]:
    """Matmuls of an operand that is gathered over a mesh axis; its blocks are multiplied as they arrive.

    Equal to ``[dot(lax.all_gather(x, axis_name, axis=dim, tiled=True), other), …]``; one ring serves all matmuls.

    Args:
      x: this device's block; blocks are ordered along ``dim`` by device.
      others: the second operand of every matmul, unsharded along the dim that it shares with ``dim``.
      dots: dimension numbers of each matmul; ``side`` says which operand ``x`` is. ``dim`` may be a free, contracting
        or batch dim, a different one in every matmul. Contracted blocks are accumulated in float32.
      axis_name: one mesh axis, or several as one, the first major.
      keep: return the gathered operand as well, after the matmuls.
      tile: least number of rows of a matmul; smaller blocks are multiplied together.

    Returns:
      The matmuls, each in the dtype of its `lax.dot_general`.
    """
    x, *others = _compat.same_varying(x, *others)
    devices, rows = lax.axis_size(axis_name), x.shape[dim]
    if devices == 1:
        return [dot.of(x, other) for dot, other in zip(dots, others, strict=True)] + [x] * keep
    me = lax.axis_index(axis_name)
    accumulators: list[_Blocks | _FullSum] = [_FullSum(x, dim, devices)] * keep
    accumulators[:0] = [_Blocks(dot, x, other, dim, devices) for dot, other in zip(dots, others, strict=True)]
    totals = [s.empty() for s in accumulators]

    def multiply(totals: list[jax.Array], blocks: list[tuple[jax.Array, Any]]) -> list[jax.Array]:
        """`totals` with these blocks multiplied in; blocks: (block, distance of its device from this one on the ring)."""
        placed = [(block, _modulo(me + away, devices) * rows) for block, away in blocks]
        return [s.add(total, placed, tile) for s, total in zip(accumulators, totals, strict=True)]

    up, down = _neighbours(devices)
    hop_up = functools.partial(lax.ppermute, axis_name=axis_name, perm=up)
    hop_down = functools.partial(lax.ppermute, axis_name=axis_name, perm=down)
    hops = full_hops(devices)
    last = split_rows(devices, rows)
    together = max(1, math.ceil(tile / (2 * min(s.rows for s in accumulators))))  # pairs of blocks in one matmul

    waiting: list[tuple[jax.Array, Any]] = [(x, 0)]
    above = below = x  # the blocks that are forwarded next
    if hops <= UNROLLED:
        for s in range(1, hops + 1):
            below, above = hop_up(below), hop_down(above)
            if len(waiting) >= 2 * together - 1 or (s == 1 and together == 1):
                totals, waiting = multiply(totals, waiting), []
            waiting += [(below, -s), (above, s)]
    else:
        totals, waiting = multiply(totals, waiting), []
        below, above = hop_up(below), hop_down(above)

        def body(s: Any, carry: Any) -> Any:
            below, above, totals = carry
            nxt = hop_up(below), hop_down(above)
            return (*nxt, multiply(totals, [(below, -s), (above, s)]))

        below, above, totals = lax.fori_loop(1, hops, body, (below, above, totals))
        waiting = [(below, -hops), (above, hops)]
    if devices % 2 == 0:
        if last is None:
            opposite = hop_up(below)
        else:
            first = hop_up(lax.slice_in_dim(below, 0, last[0], axis=dim))
            second = hop_down(lax.slice_in_dim(above, last[0], rows, axis=dim))
            opposite = lax.concatenate([first, second], dim)
        totals = multiply(totals, waiting)
        waiting = [(opposite, devices // 2)]
    totals = multiply(totals, waiting)
    return [s.result(total) for s, total in zip(accumulators, totals, strict=True)]


class _FullSum:
    """Accumulator of the gathered operand itself: blocks are written to their offsets along `dim`."""

    def __init__(self, x: jax.Array, dim: int, devices: int):
        self.x, self.dim = x, dim
        self.shape = tuple(n * devices if d == dim else n for d, n in enumerate(x.shape))
        self.rows = TILE

    def empty(self) -> jax.Array:
        return _compat.same_varying(lax.empty(self.shape, self.x.dtype), self.x)[0]

    def add(self, total: jax.Array, blocks: list[tuple[jax.Array, Any]], tile: int) -> jax.Array:
        del tile
        for block, start in blocks:
            total = lax.dynamic_update_slice_in_dim(total, block, start, self.dim)
        return total

    def result(self, total: jax.Array) -> jax.Array:
        return total


class _Blocks:
    """Accumulator of one matmul of a gathered operand, computed block by block.

    Depending on the role of `dim`, a block is added to the total (contracted dim), or written to its offset (free or
    batch dim).
    """

    def __init__(self, dot: Dot, x: jax.Array, other: jax.Array, dim: int, devices: int):
        """Determine the role of `dim`, and the shape and dtype of the accumulator.

        Args:
          dot: the matmul; `dot.side` says which operand x is.
          x: a block of the gathered operand.
          other: the other operand.
          dim: gathered dim of x.
          devices: of the ring.
        """
        ranks = (x.ndim, other.ndim) if dot.side == 0 else (other.ndim, x.ndim)
        self.dot, self.other, self.dim, self.x = dot, other, dim, x
        self.role, self.at = place_of(dot, dot.side, dim, ranks)
        full_shape = tuple(n * devices if d == dim else n for d, n in enumerate(x.shape))
        pair = (full_shape, other.shape) if dot.side == 0 else (other.shape, full_shape)
        dtype = dot.dtype(x, other) if dot.side == 0 else dot.dtype(other, x)
        self.shape, self.dtype = dot.shape(*pair), dtype
        self.saved = accumulator_dtype(dtype) if self.role == "contract" else dtype
        alike = dot.dimension_numbers[0][dot.side] if self.role == "contract" else _free(dot, dot.side, x.ndim)
        self.rows = max(1, math.prod(x.shape[d] for d in alike))

    def empty(self) -> jax.Array:
        made = lax.full(self.shape, 0, self.saved) if self.role == "contract" else lax.empty(self.shape, self.saved)
        return _compat.same_varying(made, self.x)[0]

    def add(self, total: jax.Array, blocks: list[tuple[jax.Array, Any]], tile: int) -> jax.Array:
        """`total` with these (block, offset) included; blocks with fewer than `tile` rows are multiplied together."""
        if len(blocks) > 1 and self.rows < tile and self.role != "batch":
            return self._together(total, blocks)
        for block, start in blocks:
            total = self._one(total, block, start)
        return total

    def _one(self, total: jax.Array, block: jax.Array, start: Any) -> jax.Array:
        """`total` with one block included; `start`: its offset along the gathered dim."""
        other = self.other
        if self.role != "free":
            other = lax.dynamic_slice_in_dim(other, start, block.shape[self.dim], self.at)
        if self.role == "contract":
            return total + self.dot.of(block, other, self.saved)
        out = self.at
        if self.role == "batch":
            out = self.dot.dimension_numbers[1][self.dot.side].index(self.dim)
        return lax.dynamic_update_slice_in_dim(total, self.dot.of(block, other), start, out)

    def _together(self, total: jax.Array, blocks: list[tuple[jax.Array, Any]]) -> jax.Array:
        """`total` with several (block, offset) included, concatenated to one matmul."""
        joined = lax.concatenate([b for b, _ in blocks], self.dim)
        rows = blocks[0][0].shape[self.dim]
        if self.role == "contract":
            others = [lax.dynamic_slice_in_dim(self.other, s, rows, self.at) for _, s in blocks]
            return total + self.dot.of(joined, lax.concatenate(others, self.at), self.saved)
        matmul = self.dot.of(joined, self.other)
        for k, (_, start) in enumerate(blocks):
            part = lax.slice_in_dim(matmul, k * rows, (k + 1) * rows, axis=self.at)
            total = lax.dynamic_update_slice_in_dim(total, part, start, self.at)
        return total

    def result(self, total: jax.Array) -> jax.Array:
        return lax.convert_element_type(total, self.dtype)


def dot_scatter(
    lhs: jax.Array, rhs: jax.Array, dot: Dot, axis_name: Axes, dim: int, *, comm_dtype: Any = None, tile: int = TILE
) -> jax.Array:
    """A matmul reduce-scattered over a mesh axis along a dim of the result, block by block as it is computed.

    Equal to ``lax.psum_scatter(dot(lhs, rhs), axis_name, scatter_dimension=dim, tiled=True)``, summed in float32.

    Args:
      lhs, rhs: this device's part of the operands.
      dot: dimension numbers of the matmul (``side`` is ignored).
      axis_name: one mesh axis, or several as one, the first major.
      dim: a free or batch dim of the result.
      comm_dtype: dtype to which blocks, and at every ring step partial results, are rounded, as in a reduce-scatter of that dtype;
        None: float32 (the result's own dtype if that is wider, or no float).
      tile: least number of rows of a matmul.

    Raises:
      ValueError: the dim does not divide over the devices.
    """
    dtype = dot.dtype(lhs, rhs)
    return dots_scatter([(lhs, rhs)], [dot], [dim], axis_name, dim, dtype, comm_dtype=comm_dtype, tile=tile)


def dots_scatter(
    operands: Sequence[tuple[jax.Array, jax.Array]],
    dots: Sequence[Dot],
    dims: Sequence[int],
    axis_name: Axes,
    dim: int,
    dtype: Any,
    *,
    finish: Callable[[list[jax.Array]], jax.Array] | None = None,
    comm_dtype: Any = None,
    tile: int = TILE,
) -> jax.Array:
    """A function of several matmuls, reduce-scattered over a mesh axis: :func:`dot_scatter` of a sum of matmuls.

    Args:
      operands: (lhs, rhs) of every matmul.
      dots: dimension numbers of every matmul.
      dims: for every matmul, the dim of its result that is scattered.
      axis_name: one mesh axis, or several as one, the first major.
      dim: the scattered dim of the result of `finish`.
      dtype: of the result.
      finish: blocks of the matmuls → a block of the result; linear in all of them, e.g. a sum of transposes. None:
        their sum.
      comm_dtype, tile: as in :func:`dot_scatter`.

    Raises:
      ValueError: the dim does not divide over the devices.
    """
    finish = finish or (lambda blocks: functools.reduce(lax.add, blocks))
    flat = iter(_compat.same_varying(*(x for pair in operands for x in pair)))
    operands = list(zip(flat, flat, strict=True))
    devices, wide_dtype = lax.axis_size(axis_name), accumulator_dtype(dtype)
    if devices == 1:
        full_shape = finish([dot(lhs, rhs, wide_dtype) for dot, (lhs, rhs) in zip(dots, operands, strict=True)])
        return lax.convert_element_type(full_shape, dtype)
    wire = wide_dtype if comm_dtype is None else jnp.dtype(comm_dtype)
    own = _Contributions(operands, dots, dims, dim, axis_name, finish, wire, tile)

    def wide(x: jax.Array) -> jax.Array:
        return lax.convert_element_type(x, wide_dtype)

    def sent(x: jax.Array) -> jax.Array:
        return lax.convert_element_type(x, wire)

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        return wide(x) + wide(y)

    up, down = _neighbours(devices)

    def hop(x: jax.Array, perm: list[tuple[int, int]]) -> jax.Array:
        return wide(lax.ppermute(sent(x), axis_name, perm))

    hops = full_hops(devices)
    if devices == 2:
        return lax.convert_element_type(add(hop(own.block(1), up), own.block(0)), dtype)
    if devices % 2 == 0:
        opposite = own.block(devices // 2)
        last = split_rows(devices, own.rows)
        if last is None:
            going_up = add(hop(opposite, up), own.block(hops))
            going_down = own.block(-hops)
        else:
            first = hop(lax.slice_in_dim(opposite, 0, last[0], axis=dim), up)
            second = hop(lax.slice_in_dim(opposite, last[0], own.rows, axis=dim), down)
            going_up = _onto(wide(own.block(hops)), first, dim, 0)
            going_down = _onto(wide(own.block(-hops)), second, dim, last[0])
    else:
        going_up, going_down = own.block(hops), own.block(-hops)

    def on(away: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pair = own.block(away, carry), own.block(-away, carry)  # overlapped with the sends of the blocks before
        return sent(add(hop(carry[0], up), pair[0])), sent(add(hop(carry[1], down), pair[1]))

    carry = (sent(going_up), sent(going_down))
    if hops <= UNROLLED:
        for s in range(hops - 1, 0, -1):
            carry = on(s, carry)
    else:
        carry = lax.fori_loop(0, hops - 1, lambda k, c: on(hops - 1 - k, c), carry)
    return lax.convert_element_type(add(add(hop(carry[0], up), own.block(0, carry)), hop(carry[1], down)), dtype)


class _Contributions:
    """This device's contributions to the blocks of all devices; small blocks are computed several at a time.

    Attributes:
      rows: of a block, along the scattered dim.
    """

    def __init__(self, operands, dots, dims, dim: int, axis_name: Axes, finish, dtype: Any, tile: int):
        """Arguments as of `dots_scatter`; `dtype` of the matmuls. Raises ValueError if a dim does not divide."""
        self.operands, self.dots, self.dim, self.finish, self.dtype = operands, dots, dim, finish, dtype
        self.devices = lax.axis_size(axis_name)
        shapes = [dot.shape(lhs.shape, rhs.shape) for dot, (lhs, rhs) in zip(dots, operands, strict=True)]
        for shape, d in zip(shapes, dims, strict=True):
            if shape[d] % self.devices:
                raise ValueError(
                    f"dot_scatter: dim {d} of the result {list(shape)} does not divide over {self.devices} devices"
                )
        self.rows = shapes[0][dims[0]] // self.devices
        self.rank = lax.axis_index(axis_name)
        ranks = [(a.ndim, b.ndim) for a, b in operands]
        self.owners = [block_of(dot, d, r) for dot, d, r in zip(dots, dims, ranks, strict=True)]
        alike = min(_rows(*of, self.rows) for of in zip(dots, self.owners, operands, strict=True))
        small = alike < tile and all(len(owner) == 1 for owner in self.owners)
        self.at_once = math.ceil(tile / max(alike, 1)) if small else 1
        # Distances of the blocks on the ring, in the order of computation: the farthest first, this device's own last.
        hops = full_hops(self.devices)
        self.order = [self.devices // 2] * (self.devices % 2 == 0)
        self.order += [away for s in range(hops, 0, -1) for away in (s, -s)] + [0]
        self.ready: dict[int, jax.Array] = {}

    def block(self, away: Any, after: Sequence[jax.Array] = ()) -> jax.Array:
        """The contribution to the block of the device at distance `away` on the ring.

        Args:
          after: arrays that must be computed before; without them a compiler computes the blocks of all hops at once,
            and holds them in memory.
        """
        if full_hops(self.devices) > UNROLLED:
            return self._blocks([away], ())[0]
        if away not in self.ready:
            k = self.order.index(away) // self.at_once * self.at_once
            batch = self.order[k : k + self.at_once]
            self.ready.update(zip(batch, self._blocks(batch, after), strict=True))
        return self.ready.pop(away)

    def _blocks(self, away: Sequence[Any], after: Sequence[jax.Array]) -> list[jax.Array]:
        """The contributions to the blocks of the devices at these distances, computed in one matmul."""
        starts = [_modulo(self.rank + a, self.devices) * self.rows for a in away]
        made = []
        pairs = lax.optimization_barrier((self.operands, list(after)))[0] if after else self.operands
        for dot, owner, pair in zip(self.dots, self.owners, pairs, strict=True):
            cut = list(pair)
            for side, d in owner:
                blocks = [lax.dynamic_slice_in_dim(cut[side], s, self.rows, d) for s in starts]
                cut[side] = blocks[0] if len(blocks) == 1 else lax.concatenate(blocks, d)
            made.append(dot(cut[0], cut[1], self.dtype))
        block = self.finish(made)
        if len(starts) == 1:
            return [block]
        return [lax.slice_in_dim(block, k * self.rows, (k + 1) * self.rows, axis=self.dim) for k in range(len(starts))]


def _rows(dot: Dot, owner: list[tuple[int, int]], pair: tuple[jax.Array, jax.Array], rows: int) -> int:
    """Rows of the matmul that computes one block."""
    side, owned = owner[0]
    return math.prod(rows if d == owned else pair[side].shape[d] for d in _free(dot, side, pair[side].ndim))


def _onto(part: jax.Array, arrived: jax.Array, dim: int, start: int) -> jax.Array:
    """`part` with `arrived` added to its slice from `start` on along `dim`."""
    rows = part.shape[dim]
    stop = start + arrived.shape[dim]
    chunks = [lax.slice_in_dim(part, 0, start, axis=dim)] * (start > 0)
    chunks.append(lax.slice_in_dim(part, start, stop, axis=dim) + arrived)
    chunks += [lax.slice_in_dim(part, stop, rows, axis=dim)] * (stop < rows)
    return lax.concatenate(chunks, dim)


def _free(dot: Dot, side: int, rank: int) -> list[int]:
    """The dims of an operand that are neither contracted nor batch dims."""
    contract, batch = dot.dimension_numbers
    return [d for d in range(rank) if d not in contract[side] and d not in batch[side]]


def _modulo(position: Any, devices: int) -> Any:
    """An index on the ring, -devices ≤ position < 2 · devices, modulo devices: int32, also if x64 makes ``position``
    int64."""
    return lax.rem(lax.convert_element_type(position, jnp.int32) + jnp.int32(devices), jnp.int32(devices))


def _neighbours(devices: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(source, target) of a hop up and of a hop down."""
    up = [(i, (i + 1) % devices) for i in range(devices)]
    return up, [(j, i) for i, j in up]
