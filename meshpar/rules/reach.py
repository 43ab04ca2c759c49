"""What part of a split dim each device reads for its part of the result, and how the parts are exchanged.

Plain integers: factor rules list from them what is sent, local forms send it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .rule import Kind, OpRule, Send


@dataclass(frozen=True, slots=True)
class Hop:
    """One permutation: some devices send a piece of their block.

    Attributes:
      pairs: (source, target).
      length: of the pieces, the longest that a target needs.
      starts: for every source, where in its block the piece begins.
      offsets: for every target, where in its window the piece goes (it may stand out at either end); past the end of the
        window for a device that gets none.
    """

    pairs: tuple[tuple[int, int], ...]
    length: int
    starts: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """How every device comes by a window of a split dim.

    Attributes:
      block: the size of a device's block; device p holds ``[p·block, (p+1)·block)``.
      starts: where each device's window begins; it may reach outside the array.
      length: of the windows.
      own: the piece of its own block that a device needs.
      hops: the permutations.
      gather: an all-gather sends no more than the permutations would, and is made instead.
    """

    block: int
    starts: tuple[int, ...]
    length: int
    own: Hop
    hops: tuple[Hop, ...]
    gather: bool

    @property
    def parts(self) -> int:
        return len(self.starts)

    @property
    def inside(self) -> bool:
        """No window reaches outside the array."""
        return min(self.starts) >= 0 and max(self.starts) + self.length <= self.parts * self.block

    @property
    def shift(self) -> int | None:
        """Where the windows begin in every device's block, if at the same place."""
        shifts = {s - p * self.block for p, s in enumerate(self.starts)}
        return shifts.pop() if len(shifts) == 1 else None

    def sends(self, shape: Sequence[int], dim: int, factor: int, dtype: Any, why: str) -> list[Send]:
        """What it sends of shards of this shape."""
        shape = tuple(shape)
        if self.gather:
            return [Send("all-gather", (factor,), shape, dtype, why)]
        pieces = [(*shape[:dim], hop.length, *shape[dim + 1 :]) for hop in self.hops]
        return [Send("collective-permute", (factor,), piece, dtype, why) for piece in pieces]


@functools.lru_cache(maxsize=4096)
def exchange(block: int, starts: tuple[int, ...], length: int) -> Exchange:
    """The exchange that sends least: by distance between source and target, or in as few permutations as can be.

    Args:
      block: the size of a device's block.
      starts: where each device's window begins.
      length: of the windows.
    """
    parts = len(starts)
    found: dict[tuple[int, int], tuple[int, int]] = {}  # (source, target) -> part of the source's block
    for target, start in enumerate(starts):
        first, last = max(start, 0), min(start + length, parts * block)
        for source in range(first // block, -(-last // block)) if first < last else ():
            found[source, target] = (max(first - source * block, 0), min(last - source * block, block))
    own = _hop([(p, p) for p in range(parts) if (p, p) in found], found, block, starts, length)
    edges = sorted((edge for edge in found if edge[0] != edge[1]), key=lambda e: (e[0] - e[1], e))
    rounds = [list(group) for _, group in itertools.groupby(edges, lambda e: e[0] - e[1])]
    hops = tuple(_hop(pairs, found, block, starts, length) for pairs in rounds)
    busiest = max((n for side in (0, 1) for n in Counter(e[side] for e in edges).values()), default=0)
    if len(rounds) > busiest:
        other = tuple(_hop(pairs, found, block, starts, length) for pairs in _coloured(edges))
        hops = min(hops, other, key=lambda found: sum(h.length for h in found))
    gather = bool(hops) and sum(h.length for h in hops) >= (parts - 1) * block
    return Exchange(block, starts, length, own, hops, gather)


def _hop(pairs: list[tuple[int, int]], found, block: int, starts: Sequence[int], length: int) -> Hop:
    size = max((found[e][1] - found[e][0] for e in pairs), default=0)
    first = [0] * len(starts)
    offsets = [length] * len(starts)
    for source, target in pairs:
        first[source] = min(found[source, target][0], block - size)
        offsets[target] = source * block + first[source] - starts[target]
    return Hop(tuple(pairs), size, tuple(first), tuple(offsets))


def _coloured(edges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
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
class Reach:
    """What every device reads of a dim that an op pads, dilates and looks at in steps.

    Attributes:
      window: the exchange that brings it.
      before: for every device, how many places of the dilated dim come before the first element of its window.
      extent: how many places of the dilated dim a device looks at.
      dilation: the distance between elements of the dilated dim.
    """

    window: Exchange
    before: tuple[int, ...]
    extent: int
    dilation: int


def reach(block: int, parts: int, step: int, extent: int, low: int = 0, dilation: int = 1) -> Reach:
    """Device p looks at the places ``[p·step - low, p·step - low + extent)`` of the dilated dim.

    Args:
      block: the size of a device's block of the dim.
      parts: how many devices split it.
      step: places between the first of one device and of the next.
      low: places that are padded before the first (negative: cut off).
      dilation: element i is at place ``i·dilation``; the places between are empty.
    """
    places = [p * step - low for p in range(parts)]
    starts = tuple(-(-a // dilation) for a in places)
    length = max(1, *((a + extent - 1) // dilation - s + 1 for a, s in zip(places, starts, strict=True)))
    before = tuple(s * dilation - a for a, s in zip(places, starts, strict=True))
    return Reach(exchange(block, starts, length), before, extent, dilation)


def sliding(
    block: int, parts: int, count: int, every: int, taps: int, apart: int, low: int, dilation: int = 1
) -> Reach:
    """Of windows that slide over a dim: a device has ``count`` of them, ``every`` places apart, of ``taps``, ``apart``."""
    return reach(block, parts, count * every, (count - 1) * every + (taps - 1) * apart + 1, low, dilation)


def scattered(block: int, parts: int, count: int, every: int, taps: int, low: int) -> tuple[Reach, Reach]:
    """For windows whose results are added back to what they look at: (windows, elements) that a device's block has to do with.

    ``count`` windows a device, ``every`` places apart, of ``taps``; the elements are those of the whole windows, and the block.
    """
    first = [(p * block + low - taps + 1) // every for p in range(parts)]
    last = [(p * block + low + block - 1) // every for p in range(parts)]
    length = max(b - a + 1 for a, b in zip(first, last, strict=True))
    extent = (length - 1) * every + max(taps, every)
    none = (0,) * parts
    windows = exchange(count, tuple(first), length)
    elements = exchange(block, tuple(a * every - low for a in first), extent)
    return Reach(windows, none, length, 1), Reach(elements, none, extent, 1)


def candidates(size: int, k: int, itemsize: int, index_size: int) -> int | None:
    """How many (value, index) pairs every device sends of ``size`` values to find k; None: sending all values is cheaper."""
    k = min(k, size)
    return k if k * (itemsize + index_size) < size * itemsize else None


def own_kind(eqn: Any) -> Kind:
    """``own``, or ``whole`` where blocks cannot be exchanged: random keys, and arrays without elements."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    plain = not any(jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) for a in avals)
    return "own" if plain and all(math.prod(a.shape) for a in avals) else "whole"


def exchanged(r: OpRule, eqn: Any, why: str) -> OpRule:
    """The rule, with what its exchanges send: dim after dim, so that what the first brought goes with the second (corners)."""

    def sends(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> list[Send]:
        found = []
        for i, local in enumerate(shapes):
            shape = list(local)
            for factor, dim, at in r.reaches_of(i):
                if parts[factor] > 1:
                    by = at(parts[factor]).window
                    found += by.sends(shape, dim, factor, np.dtype(eqn.invars[i].aval.dtype), why)
                    shape[dim] = by.length
        return found

    r.sends = sends if r.reaches else None
    return r
