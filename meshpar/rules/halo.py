"""Halos: the window of a split dim that each device needs, the exchange that brings it, and that exchange inside a ``shard_map``.

What is sent is worked out in plain integers: factor rules list it for the plan, and local forms send just that.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .spmd import Send, axis_index, permute, table_entry


@dataclass(frozen=True, slots=True)
class PermuteStep:
    """One collective permute of a halo exchange.

    Attributes:
      pairs: (source, target).
      length: size of the pieces along the split dim: the longest that some target needs.
      starts: for every source, where in its block the piece begins.
      offsets: for every target, where in its window the piece goes (it may stand out at either end); past the end of the
        window for a device that gets none.
    """

    pairs: tuple[tuple[int, int], ...]
    length: int
    starts: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HaloExchange:
    """The collectives that give every device its window of a split dim.

    Attributes:
      block: size of a device's block; device p holds ``[p·block, (p+1)·block)``.
      starts: where each device's window begins; it may reach outside the array.
      length: size of the windows.
      own: the piece of its own block that a device needs, as a permute step that sends nothing.
      steps: the collective permutes.
      gather: an all-gather sends no more than the permutes would, and is made instead.
    """

    block: int
    starts: tuple[int, ...]
    length: int
    own: PermuteStep
    steps: tuple[PermuteStep, ...]
    gather: bool

    @property
    def parts(self) -> int:
        """Over how many devices the dim is split."""
        return len(self.starts)

    @property
    def inside(self) -> bool:
        """True if no window reaches outside the array."""
        return min(self.starts) >= 0 and max(self.starts) + self.length <= self.parts * self.block

    @property
    def shift(self) -> int | None:
        """Where the windows begin, counted from the begin of a device's block; None where that differs by device."""
        shifts = {s - p * self.block for p, s in enumerate(self.starts)}
        return shifts.pop() if len(shifts) == 1 else None

    def sends(self, shape: Sequence[int], dim: int, factor: int, dtype: Any, why: str) -> list[Send]:
        """The collectives for shards of this shape, of which `dim` is split."""
        shape = tuple(shape)
        if self.gather:
            return [Send("all-gather", (factor,), shape, dtype, why)]
        pieces = [(*shape[:dim], step.length, *shape[dim + 1 :]) for step in self.steps]
        return [Send("collective-permute", (factor,), piece, dtype, why) for piece in pieces]


@functools.lru_cache(maxsize=4096)
def halo_exchange(block: int, starts: tuple[int, ...], length: int) -> HaloExchange:
    """The exchange that sends least: one permute for each distance between source and target, or as few permutes as can be.

    Args:
      block: size of a device's block.
      starts: where each device's window begins.
      length: size of the windows.
    """
    parts = len(starts)
    found: dict[tuple[int, int], tuple[int, int]] = {}  # (source, target) -> part of the source's block
    for target, start in enumerate(starts):
        first, last = max(start, 0), min(start + length, parts * block)
        for source in range(first // block, -(-last // block)) if first < last else ():
            found[source, target] = (max(first - source * block, 0), min(last - source * block, block))
    own = _permute_step([(p, p) for p in range(parts) if (p, p) in found], found, block, starts, length)
    edges = sorted((edge for edge in found if edge[0] != edge[1]), key=lambda e: (e[0] - e[1], e))
    rounds = [list(group) for _, group in itertools.groupby(edges, lambda e: e[0] - e[1])]
    steps = tuple(_permute_step(pairs, found, block, starts, length) for pairs in rounds)
    busiest = max((n for side in (0, 1) for n in Counter(e[side] for e in edges).values()), default=0)
    if len(rounds) > busiest:
        other = tuple(_permute_step(pairs, found, block, starts, length) for pairs in coloured(edges))
        steps = min(steps, other, key=lambda found: sum(h.length for h in found))
    gather = bool(steps) and sum(h.length for h in steps) >= (parts - 1) * block
    return HaloExchange(block, starts, length, own, steps, gather)


def _permute_step(pairs: list[tuple[int, int]], found, block: int, starts: Sequence[int], length: int) -> PermuteStep:
    size = max((found[e][1] - found[e][0] for e in pairs), default=0)
    first = [0] * len(starts)
    offsets = [length] * len(starts)
    for source, target in pairs:
        first[source] = min(found[source, target][0], block - size)
        offsets[target] = source * block + first[source] - starts[target]
    return PermuteStep(tuple(pairs), size, tuple(first), tuple(offsets))


def coloured(edges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """As few sets of pairs as there can be in which nobody sends twice or receives twice.

    Edge colouring of a bipartite graph by alternating paths (König): as many sets as the busiest device has partners.
    """
    colours: dict[tuple[str, int], dict[int, int]] = {}  # (side, device) -> colour -> partner

    def free(node: tuple[str, int]) -> int:
        used = colours.setdefault(node, {})
        return next(c for c in itertools.count() if c not in used)

    for source, target in edges:
        left, right = ("source", source), ("target", target)
        a, b = free(left), free(right)
        if a != b:  # make `a` free at the target: exchange the colours along the path that leaves it by `a`
            path, node, colour = [], right, a
            while colour in colours.setdefault(node, {}):
                partner = ("source" if node[0] == "target" else "target", colours[node][colour])
                path.append((node, partner, colour))
                node, colour = partner, a + b - colour
            for one, other, colour in path:
                del colours[one][colour], colours[other][colour]
            for one, other, colour in path:
                colours[one][a + b - colour], colours[other][a + b - colour] = other[1], one[1]
        colours[left][a], colours[right][a] = target, source
    sets: dict[int, list[tuple[int, int]]] = {}
    for (side, device), partners in colours.items():
        for colour, partner in partners.items() if side == "source" else ():
            sets.setdefault(colour, []).append((device, partner))
    return [sorted(sets[c]) for c in sorted(sets)]


@dataclass(frozen=True, slots=True)
class ShardWindow:
    """What every device reads of a split dim that an op pads and dilates.

    Attributes:
      exchange: how a device comes by the elements in its window.
      before: for every device, how many places of the dilated dim come before the first element of its window.
      extent: how many places of the dilated dim a device reads.
      dilation: the distance between elements of the dilated dim.
    """

    exchange: HaloExchange
    before: tuple[int, ...]
    extent: int
    dilation: int


def shard_window(block: int, parts: int, step: int, extent: int, low: int = 0, dilation: int = 1) -> ShardWindow:
    """Device p reads the places ``[p·step - low, p·step - low + extent)`` of the dilated dim.

    Args:
      block: size of a device's block of the dim.
      parts: how many devices split it.
      step: places between the first one of a device and that of the next.
      extent: how many places a device reads.
      low: places that are padded before the first (negative: cut off).
      dilation: element i is at place ``i·dilation``; the places between are empty.
    """
    places = [p * step - low for p in range(parts)]
    starts = tuple(-(-a // dilation) for a in places)
    length = max(1, *((a + extent - 1) // dilation - s + 1 for a, s in zip(places, starts, strict=True)))
    before = tuple(s * dilation - a for a, s in zip(places, starts, strict=True))
    return ShardWindow(halo_exchange(block, starts, length), before, extent, dilation)


def sliding_window(
    block: int, parts: int, count: int, every: int, taps: int, apart: int, low: int, dilation: int = 1
) -> ShardWindow:
    """For windows that slide over a dim: what a device reads for its ``count`` windows, ``every`` places apart, each of
    ``taps`` elements that are ``apart`` places apart."""
    return shard_window(block, parts, count * every, (count - 1) * every + (taps - 1) * apart + 1, low, dilation)


def scatter_windows(
    block: int, parts: int, count: int, every: int, taps: int, low: int
) -> tuple[ShardWindow, ShardWindow]:
    """For windows whose results are added to the elements they were made from (the gradient of a pooling).

    Args:
      block: elements of a device.
      parts: number of devices.
      count: windows of a device, ``every`` places apart, each of ``taps`` elements.
      low: places that are padded before the first element.

    Returns:
      (the windows that touch a device's block, the elements of these windows and of the block).
    """
    # the first window that reaches the block; where it begins inside of it, the one before, so that the elements have the block
    begins = [p * block + low for p in range(parts)]
    first = [min(-((taps - 1 - b) // every), b // every) for b in begins]
    last = [(p * block + low + block - 1) // every for p in range(parts)]
    length = max(b - a + 1 for a, b in zip(first, last, strict=True))
    extent = (length - 1) * every + max(taps, every)
    none = (0,) * parts
    windows = halo_exchange(count, tuple(first), length)
    elements = halo_exchange(block, tuple(a * every - low for a in first), extent)
    return ShardWindow(windows, none, length, 1), ShardWindow(elements, none, extent, 1)


# -- inside a shard_map


def fetch_window(x: Any, dim: int, axes: Sequence[str], by: HaloExchange, fill: Any = 0) -> Any:
    """Exchange halos: each device's window of a split dim.

    Args:
      x: the shard; ``by.block`` along the dim.
      axes: that split the dim, major to minor.
      by: the exchange; device p gets ``[starts[p], starts[p] + length)`` of the whole dim.
      fill: the value outside the array.

    Returns:
      An array of size ``by.length`` along the dim.
    """
    zero = isinstance(fill, int | float | np.ndarray | np.generic) and not np.any(fill)
    fill = jnp.asarray(fill, x.dtype)
    here = axis_index(axes)
    if by.gather:
        x = lax.all_gather(x, tuple(axes), axis=dim, tiled=True)
        low = max(0, -min(by.starts))
        high = max(0, max(by.starts) + by.length - x.shape[dim])
        x = _padded(x, dim, fill, low, high)
        return lax.dynamic_slice_in_dim(x, table_entry(by.starts, here) + low, by.length, dim)
    shift = by.shift
    distances = [step.pairs[0][0] - step.pairs[0][1] for step in by.steps]
    by_distance = all(s - t == d for step, d in zip(by.steps, distances, strict=True) for s, t in step.pairs)
    if shift is not None and by_distance and len(set(distances)) == len(distances):
        out = _joined(x, dim, axes, by, fill, shift, dict(zip(distances, by.steps, strict=True)))
        if zero or by.inside:  # who gets nothing gets zeros
            return out
        place = lax.broadcasted_iota(np.int32, out.shape, dim) + table_entry(by.starts, here)
        return jnp.where((place >= 0) & (place < by.parts * by.block), out, fill)
    # A piece stands out of the window by less than its length; one that nobody sent goes past its end.
    margin = max(by.own.length, *(step.length for step in by.steps), 0)
    shape = (*x.shape[:dim], by.length + 2 * margin, *x.shape[dim + 1 :])
    out = lax.broadcast(fill, shape)
    for step in (by.own, *by.steps):
        if not step.length:
            continue
        piece = lax.dynamic_slice_in_dim(x, table_entry(step.starts, here), step.length, dim)
        if step is not by.own:
            piece = permute(piece, axes, step.pairs)
        out = lax.dynamic_update_slice_in_dim(out, piece, table_entry(step.offsets, here) + margin, dim)
    return lax.slice_in_dim(out, margin, margin + by.length, axis=dim)


def _joined(
    x: Any, dim: int, axes: Sequence[str], by: HaloExchange, fill: Any, shift: int, steps: dict[int, PermuteStep]
) -> Any:
    """The window, where it begins at the same place of every block: pieces of neighbouring blocks, concatenated."""
    pieces = []
    for d in range(shift // by.block, (shift + by.length - 1) // by.block + 1):
        first, last = max(shift, d * by.block), min(shift + by.length, (d + 1) * by.block)
        if d == 0:
            pieces.append(lax.slice_in_dim(x, first, last, axis=dim))
        elif d in steps:
            piece = lax.slice_in_dim(x, first - d * by.block, last - d * by.block, axis=dim)
            pieces.append(permute(piece, axes, steps[d].pairs))
        else:
            pieces.append(lax.broadcast(fill, (*x.shape[:dim], last - first, *x.shape[dim + 1 :])))
    return lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]


def _padded(x: Any, dim: int, fill: Any, low: int, high: int, inner: int = 0) -> Any:
    if (low, high, inner) == (0, 0, 0):
        return x
    return lax.pad(x, fill, [(low, high, inner) if d == dim else (0, 0, 0) for d in range(x.ndim)])


def dilate(x: Any, dim: int, axes: Sequence[str], by: ShardWindow, fill: Any) -> Any:
    """The places of the dilated dim that a device reads, from the elements in its window; ``fill`` between elements."""
    if by.dilation == 1 and x.shape[dim] == by.extent:
        return x
    room = by.dilation - 1
    high = max(0, by.extent - (x.shape[dim] - 1) * by.dilation - 1)
    x = _padded(x, dim, jnp.asarray(fill, x.dtype), room, high, room)
    first = tuple(room - b for b in by.before)
    return lax.dynamic_slice_in_dim(x, table_entry(first, axis_index(axes)), by.extent, dim)
