"""Halo exchanges: which window of a split dim each device reads, and the collectives by which it gets the elements of other shards.

Windows and collectives are calculated as plain integers, so that factor rules can list the collectives in the plan, and local
forms send exactly these. Example: a convolution with 3 taps over 16 rows in 4 shards. Device p reads rows ``[4p - 1, 4p + 5)``:
its shard, one row of the shard before, and one of the shard after. That is two collective permutes of one row, between
neighbours.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..iterables import grouped
from .owned import is_positive_zero
from .spmd import Send, axis_index, exchange_sends, permute, table_entry

Edge = tuple[int, int]
"""(source, target): two devices along the axes of a split dim."""


@dataclass(frozen=True, slots=True)
class PermuteStep:
    """One collective permute of a halo exchange.

    Attributes:
      pairs: the (source, target) devices.
      length: number of elements along the split dim that each source sends: the most that any target needs.
      starts: for every source, the index in its shard at which the sent slice starts.
      offsets: for every target, the index in its window at which the received slice starts. The slice may extend over either end
        of the window; for a device that receives nothing, it is past the end.
    """

    pairs: tuple[Edge, ...]
    length: int
    starts: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HaloExchange:
    """The collectives that give every device its window of a split dim.

    Attributes:
      block: size of a shard; device p has the elements ``[p·block, (p+1)·block)``.
      starts: for every device, the element at which its window starts; windows may extend outside the array.
      length: size of a window.
      own: the elements of its own shard that each device needs, as a permute step that is not sent.
      steps: the collective permutes.
      gather: whether an all-gather is made instead, since it sends no more than the permutes.
    """

    block: int
    starts: tuple[int, ...]
    length: int
    own: PermuteStep
    steps: tuple[PermuteStep, ...]
    gather: bool

    @property
    def shards(self) -> int:
        """Number of shards of the dim."""
        return len(self.starts)

    @property
    def inside(self) -> bool:
        """Whether all windows are within the array."""
        return min(self.starts) >= 0 and max(self.starts) + self.length <= self.shards * self.block

    @property
    def shift(self) -> int | None:
        """The distance from the start of a device's shard to the start of its window; None if it differs between devices."""
        shifts = {s - p * self.block for p, s in enumerate(self.starts)}
        return shifts.pop() if len(shifts) == 1 else None

    @property
    def sent(self) -> tuple[PermuteStep | None, ...]:
        """Keys of the elements that each collective sends: permute steps without offsets of targets; None: an all-gather."""
        return (None,) if self.gather else tuple(replace(step, offsets=()) for step in self.steps)

    def sends(self, shape: Sequence[int], dim: int, factor: int, dtype: Any, why: str) -> list[Send]:
        """The collectives, for shards of this shape that are split along ``dim``, whose factor is ``factor``."""
        lengths = None if self.gather else [step.length for step in self.steps]
        return exchange_sends(shape, dim, factor, dtype, lengths, why)


@functools.lru_cache(maxsize=4096)
def halo_exchange(block: int, starts: tuple[int, ...], length: int) -> HaloExchange:
    """The :class:`HaloExchange` that gives every device its window with the fewest elements sent.

    It is the cheapest of: one collective permute per distance between devices, the smallest number of permutes, and an
    all-gather. ``halo_exchange(4, (-1, 3, 7, 11), 6)``, one row of each neighbour, has two steps of length 1: from
    device p to p - 1, and to p + 1.

    Args:
      block: size of a shard.
      starts: for every device, the element at which its window starts.
      length: size of a window.
    """
    shards = len(starts)
    slices: dict[Edge, tuple[int, int]] = {}  # the slice of the source's shard that the target needs
    for target, start in enumerate(starts):
        first, last = max(start, 0), min(start + length, shards * block)
        for source in range(first // block, -(-last // block)) if first < last else ():
            slices[source, target] = (max(first - source * block, 0), min(last - source * block, block))

    def step(pairs: Sequence[Edge]) -> PermuteStep:
        """The permute step for these (source, target) pairs, in which all sources send as many elements as the longest
        slice has."""
        size = max((slices[e][1] - slices[e][0] for e in pairs), default=0)
        sent_from, offsets = [0] * shards, [length] * shards
        for source, target in pairs:
            sent_from[source] = min(slices[source, target][0], block - size)
            offsets[target] = source * block + sent_from[source] - starts[target]
        return PermuteStep(tuple(pairs), size, tuple(sent_from), tuple(offsets))

    own = step([(p, p) for p in range(shards) if (p, p) in slices])
    lengths = {(s, t): last - first for (s, t), (first, last) in slices.items() if s != t}
    steps = tuple(map(step, cheapest_permutes(lengths, lambda e: e[0] - e[1])))
    gather = bool(steps) and sum(s.length for s in steps) >= (shards - 1) * block
    return HaloExchange(block, starts, length, own, steps, gather)


def cheapest_permutes(lengths: Mapping[Edge, int], distance: Callable[[Edge], int]) -> list[list[Edge]]:
    """The (source, target) pairs of the collective permutes that send the fewest elements: one permute per distance, or the
    fewest permutes.

    Args:
      lengths: pair → number of elements that the target needs; every source of a permute sends as many as the longest.
    """
    edges = sorted(lengths)
    by_distance = grouped((distance(edge), edge) for edge in edges)
    choices = [by_distance[d] for d in sorted(by_distance)], edge_coloring(edges)
    return min(choices, key=lambda permutes: sum(max(lengths[e] for e in pairs) for pairs in permutes))


def edge_coloring(edges: Sequence[Edge]) -> list[list[Edge]]:
    """The fewest sets of (source, target) pairs in which no device sends or receives twice.

    The edge coloring of a bipartite graph by alternating paths (König): as many sets as the device with the most partners has.
    ``[(0, 1), (0, 2), (1, 2)]`` needs two sets, ``[(0, 1), (1, 2)]`` and ``[(0, 2)]``.
    """
    partners: dict[tuple[str, int], dict[int, int]] = {}  # (side, device) -> color -> the device on the other side

    def free_color(node: tuple[str, int]) -> int:
        used = partners.setdefault(node, {})
        return next(c for c in itertools.count() if c not in used)

    for source, target in edges:
        left, right = ("source", source), ("target", target)
        a, b = free_color(left), free_color(right)
        if a != b:  # make `a` free at the target: exchange the colors along the path that leaves it by `a`
            path, node, color = [], right, a
            while color in partners.setdefault(node, {}):
                partner = ("source" if node[0] == "target" else "target", partners[node][color])
                path.append((node, partner, color))
                node, color = partner, a + b - color
            for one, other, color in path:
                del partners[one][color], partners[other][color]
            for one, other, color in path:
                partners[one][a + b - color], partners[other][a + b - color] = other[1], one[1]
        partners[left][a], partners[right][a] = target, source
    sources = [(device, by_color) for (side, device), by_color in partners.items() if side == "source"]
    sets = grouped((color, (source, target)) for source, by_color in sources for color, target in by_color.items())
    return [sorted(sets[c]) for c in sorted(sets)]


@dataclass(frozen=True, slots=True)
class ShardWindow:
    """The window that each device reads of a split dim which an op pads and dilates.

    Positions count in the padded and dilated dim, elements in the array: element i is at position ``i·dilation``,
    after padding.

    Attributes:
      exchange: the exchange of the elements in the windows.
      before: for every device, the number of positions of its window before the first element of ``exchange``.
      extent: number of positions of a window.
      dilation: the distance between elements.
    """

    exchange: HaloExchange
    before: tuple[int, ...]
    extent: int
    dilation: int


def shard_window(block: int, shards: int, step: int, extent: int, low: int = 0, dilation: int = 1) -> ShardWindow:
    """The window in which device p reads the positions ``[p·step - low, p·step - low + extent)`` of a padded and dilated dim.

    Args:
      block: size of a shard.
      shards: number of shards.
      step: positions from the first one of a device to the first one of the next.
      extent: number of positions that a device reads.
      low: padding before element 0 (negative: positions that are removed).
      dilation: element i is at position ``i·dilation``; the positions between have no element.
    """
    positions = [p * step - low for p in range(shards)]
    starts = tuple(-(-a // dilation) for a in positions)
    length = max(1, *((a + extent - 1) // dilation - s + 1 for a, s in zip(positions, starts, strict=True)))
    before = tuple(s * dilation - a for a, s in zip(positions, starts, strict=True))
    return ShardWindow(halo_exchange(block, starts, length), before, extent, dilation)


def sliding_window(
    block: int, shards: int, count: int, stride: int, taps: int, tap_dilation: int, low: int, dilation: int = 1
) -> ShardWindow:
    """The window in which a device reads the positions of ``count`` sliding windows, one every ``stride`` positions.

    Each has ``taps`` elements, at distances of ``tap_dilation``. A convolution with 3 taps over 4 rows per shard, and one row of
    padding (``sliding_window(4, 4, 4, 1, 3, 1, 1)``), reads 6 positions from ``4p - 1``. The other arguments are as in
    :func:`shard_window`.
    """
    return shard_window(
        block, shards, count * stride, (count - 1) * stride + (taps - 1) * tap_dilation + 1, low, dilation
    )


def scatter_windows(
    block: int, shards: int, count: int, stride: int, taps: int, low: int
) -> tuple[ShardWindow, ShardWindow]:
    """For the gradient of a pooling, which adds the value of each sliding window to an element in it.

    Args:
      block: elements per device.
      shards: number of shards.
      count: sliding windows per device, one every ``stride`` positions, each of ``taps`` positions.
      low: padding before element 0.

    Returns:
      (the sliding windows that overlap a device's shard, the elements of these windows and of the shard).
    """
    # the first window that overlaps the shard; if it starts inside, the one before, so that the elements include the shard
    begins = [p * block + low for p in range(shards)]
    first = [min(-((taps - 1 - b) // stride), b // stride) for b in begins]
    last = [(p * block + low + block - 1) // stride for p in range(shards)]
    length = max(b - a + 1 for a, b in zip(first, last, strict=True))
    extent = (length - 1) * stride + max(taps, stride)
    none = (0,) * shards
    windows = halo_exchange(count, tuple(first), length)
    elements = halo_exchange(block, tuple(a * stride - low for a in first), extent)
    return ShardWindow(windows, none, length, 1), ShardWindow(elements, none, extent, 1)


# -- inside a shard_map


@dataclass(eq=False, slots=True)
class Exchanged:
    """The elements of other shards that were received in the body that is being traced, which later ops use again.

    Attributes:
      windows: ``id`` of an array that :func:`fetch_window` returned → the array, and its key: the array of which it is a window,
        dim and exchange.
      received: (key of an array, key of its elements that are sent) → the array, and the received elements.
    """

    windows: dict[int, tuple[Any, Hashable]] = field(default_factory=dict)
    received: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)

    def name(self, x: Any) -> Hashable:
        """The key of an array: equal for windows that are equal."""
        return self.windows[id(x)][1] if id(x) in self.windows else id(x)


_EXCHANGED: ContextVar[Exchanged | None] = ContextVar("_EXCHANGED", default=None)


@contextmanager
def reusing(exchanged: Exchanged) -> Iterator[None]:
    """A context in which :func:`fetch_window` exchanges equal elements of an array once."""
    token = _EXCHANGED.set(exchanged)
    try:
        yield
    finally:
        _EXCHANGED.reset(token)


def _received(x: Any, key: Hashable, receive: Callable[[], Any]) -> Any:
    """The result of ``receive``, or of an earlier call for the same array and key."""
    known = _EXCHANGED.get()
    if known is None:
        return receive()
    key = (known.name(x), key)
    if key not in known.received:
        known.received[key] = x, receive()  # x stays alive, so that no other array has its id
    return known.received[key][1]


def fetch_window(x: Any, dim: int, axes: Sequence[str], exchange: HaloExchange, fill: Any = 0) -> Any:
    """As :func:`_fetch_window`; the window is recorded if it is only filled with zeros."""
    window, known = _fetch_window(x, dim, axes, exchange, fill), _EXCHANGED.get()
    if known is not None and isinstance(fill, int) and fill == 0 and window is not x:
        known.windows[id(window)] = window, (known.name(x), tuple(axes), dim, exchange)
    return window


def _fetch_window(x: Any, dim: int, axes: Sequence[str], exchange: HaloExchange, fill: Any) -> Any:
    """Exchange halos, and return this device's window of a split dim.

    Args:
      x: the shard, of size ``exchange.block`` along ``dim``.
      axes: the axes over which the dim is split, major to minor.
      exchange: device p gets the elements ``[starts[p], starts[p] + length)`` of the array.
      fill: the value outside the array.

    Returns:
      An array of size ``exchange.length`` along ``dim``.
    """
    is_zero = isinstance(fill, int | float | np.ndarray | np.generic) and is_positive_zero(fill)
    fill = jnp.asarray(fill, x.dtype)
    device = axis_index(axes)
    if exchange.gather:
        shard = x
        x = _received(x, (dim, tuple(axes)), lambda: lax.all_gather(shard, tuple(axes), axis=dim, tiled=True))
        low = max(0, -min(exchange.starts))
        high = max(0, max(exchange.starts) + exchange.length - x.shape[dim])
        x = _padded(x, dim, fill, low, high)
        return lax.dynamic_slice_in_dim(x, table_entry(exchange.starts, device) + low, exchange.length, dim)
    distances = [step.pairs[0][0] - step.pairs[0][1] for step in exchange.steps]
    by_distance = all(s - t == d for step, d in zip(exchange.steps, distances, strict=True) for s, t in step.pairs)
    if exchange.shift is not None and by_distance and len(set(distances)) == len(distances):
        steps = dict(zip(distances, exchange.steps, strict=True))
        out = _concatenated(x, dim, axes, exchange, fill, exchange.shift, steps)
        if is_zero or exchange.inside:  # a device that is not the target of a permute receives zeros
            return out
        element = lax.broadcasted_iota(np.int32, out.shape, dim) + table_entry(exchange.starts, device)
        return jnp.where((element >= 0) & (element < exchange.shards * exchange.block), out, fill)
    # a received slice extends over an end of the window by less than its length; one that was not sent is past the end
    margin = max(exchange.own.length, *(step.length for step in exchange.steps), 0)
    shape = (*x.shape[:dim], exchange.length + 2 * margin, *x.shape[dim + 1 :])
    out = lax.broadcast(fill, shape)
    for step in (exchange.own, *exchange.steps):
        if not step.length:
            continue

        def part_of(step: PermuteStep = step) -> Any:
            return lax.dynamic_slice_in_dim(x, table_entry(step.starts, device), step.length, dim)

        if step is exchange.own:
            part = part_of()
        else:
            key = (dim, tuple(axes), step.pairs, step.length, step.starts)
            part = _received(x, key, lambda step=step, part_of=part_of: permute(part_of(), axes, step.pairs))
        out = lax.dynamic_update_slice_in_dim(out, part, table_entry(step.offsets, device) + margin, dim)
    return lax.slice_in_dim(out, margin, margin + exchange.length, axis=dim)


def _concatenated(
    x: Any,
    dim: int,
    axes: Sequence[str],
    exchange: HaloExchange,
    fill: Any,
    shift: int,
    steps: Mapping[int, PermuteStep],
) -> Any:
    """A device's window, if all windows start at one offset from their device's shard: slices of adjacent shards, concatenated.

    Args:
      shift: the offset, ``exchange.shift``.
      steps: distance between source and target → permute.
    """
    parts = []
    for d in range(shift // exchange.block, (shift + exchange.length - 1) // exchange.block + 1):
        first, last = max(shift, d * exchange.block), min(shift + exchange.length, (d + 1) * exchange.block)
        if d == 0:
            parts.append(lax.slice_in_dim(x, first, last, axis=dim))
        elif d in steps:
            start, stop, pairs = first - d * exchange.block, last - d * exchange.block, steps[d].pairs
            sent = functools.partial(lax.slice_in_dim, x, start, stop, axis=dim)
            key = (dim, tuple(axes), pairs, start, stop)
            parts.append(_received(x, key, lambda sent=sent, pairs=pairs: permute(sent(), axes, pairs)))
        else:
            parts.append(lax.broadcast(fill, (*x.shape[:dim], last - first, *x.shape[dim + 1 :])))
    return lax.concatenate(parts, dim) if len(parts) > 1 else parts[0]


def _padded(x: Any, dim: int, fill: Any, low: int, high: int, interior: int = 0) -> Any:
    """An array that is padded along one dim, as by ``lax.pad``."""
    if (low, high, interior) == (0, 0, 0):
        return x
    return lax.pad(x, fill, [(low, high, interior) if d == dim else (0, 0, 0) for d in range(x.ndim)])


def dilate(x: Any, dim: int, axes: Sequence[str], window: ShardWindow, fill: Any) -> Any:
    """A device's window of a padded and dilated dim, from its elements ``x``; ``fill`` at the positions without an
    element.

    ``axes`` split the dim ``dim``.

    Elements ``[a, b]`` with ``dilation=2``, ``before=(1, …)`` and ``extent=4`` give ``[fill, a, fill, b]``.
    """
    if window.dilation == 1 and x.shape[dim] == window.extent:
        return x
    interior = window.dilation - 1
    high = max(0, window.extent - (x.shape[dim] - 1) * window.dilation - 1)
    x = _padded(x, dim, jnp.asarray(fill, x.dtype), interior, high, interior)
    first = tuple(interior - b for b in window.before)
    return lax.dynamic_slice_in_dim(x, table_entry(first, axis_index(axes)), window.extent, dim)
