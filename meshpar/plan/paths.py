"""The cheapest path through the specs of one array: the search behind :mod:`meshpar.plan.resharding`, over axes that are numbers.

A* (Hart, Nilsson and Raphael, 1968). What a device lacks of its target shard it must receive, and in each of these collectives
every device sends as much as the most that any receives; so the largest lack of any device is a lower bound. Extents of dims
count only as far as axes can divide them, so the effort depends on neither the array nor the number of devices.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Literal

MOST_FREE = 4  # axes that may go anywhere in one all-to-all; in a search with more axes two

Ids = tuple[tuple[int, ...], ...]
"""A spec whose axes are numbers."""

Move = Literal["slice", "all-gather", "all-to-all", "collective-permute"]


def alike(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether one of them begins with the other."""
    n = min(len(a), len(b))
    return a[:n] == b[:n]


@lru_cache(maxsize=65536)
def cheapest_path(
    have: Ids, need: Ids, extents: tuple[int, ...], group: tuple[int, ...], most: int, effort: int
) -> tuple[tuple[tuple[Move, tuple[int, ...], Ids], ...] | None, bool]:
    """((op, its axes, the spec after it) of every step, or None; whether it sends no more than must be sent).

    Args:
      most: elements that a device may send.
      effort: moves that may be looked at.
    """
    space = _Space(need, extents, group)
    bound = space.lack(have)
    found: dict[Ids, tuple[int, int, int, int]] = {have: (0, 0, space.volume(have), 0)}
    came: dict[Ids, tuple[Ids, Move, tuple[int, ...]]] = {}
    done: set[Ids] = set()
    heap = [(bound, 0, space.volume(have), 0, 0, have)]
    looked = 0
    while heap and looked < effort:
        spec = heapq.heappop(heap)[-1]
        if spec in done:
            continue
        done.add(spec)
        if spec == need:
            break
        cost, collectives, peak, slices = found[spec]
        for sent, op, axes, after in space.moves(spec, most - cost):
            looked += 1
            if after in done:
                continue
            label = (
                cost + sent, collectives + (op != "slice"), max(peak, space.volume(after)), slices + (op == "slice"),
            )  # fmt: skip
            if after in found and found[after] <= label:
                continue
            total = label[0] + space.lack(after)
            if total > most:
                continue
            if after == need:
                most = total
            found[after] = label
            came[after] = spec, op, axes
            heapq.heappush(heap, (total, *label[1:], looked, after))
    if need not in found:
        return None, False
    path = []
    spec = need
    while spec != have:
        before, op, axes = came[spec]
        path.append((op, axes or space.swapped(before, spec), spec))
        spec = before
    return tuple(reversed(path)), found[need][0] == bound


class _Space:
    """The specs of one array: what they hold, what they lack of a target, and what leads out of them."""

    def __init__(self, need: Ids, extents: tuple[int, ...], group: tuple[int, ...]):
        self.need, self.extents, self.group = need, extents, group
        self.elements = math.prod(extents)
        self.count, self.lack, self.permuted = cache(self._count), cache(self._lack), cache(self._permuted)
        self.target = [self.count(entry) for entry in need]
        self.wanted = self.elements // math.prod(self.target)
        self.needed = {a for entry in need for a in entry}

    def _count(self, entry: tuple[int, ...]) -> int:
        return math.prod(self.group[a] for a in entry)

    def volume(self, spec: Ids) -> int:
        """Elements of a shard."""
        return self.elements // math.prod(map(self.count, spec))

    def _lack(self, spec: Ids) -> int:
        """The most elements of its target shard that any device does not hold: where two axes split a dim at one place, all."""
        common = 1
        for entry, want, parts in zip(spec, self.need, self.target, strict=True):
            if entry != want and not alike(entry, want):
                return self.wanted
            common *= max(self.count(entry), parts)
        return self.wanted - self.elements // common

    def moves(self, spec: Ids, most: int) -> Iterator[tuple[int, Move, tuple[int, ...], Ids]]:
        """(elements sent, op, axes, spec after) of everything that can be done next and costs no more than ``most``."""
        counts = [self.count(entry) for entry in spec]
        volume = self.elements // math.prod(counts)
        yield from self.slices(spec, counts)
        for i, entry in enumerate(spec):
            for k in range(len(entry)):
                gone = entry[k:]
                sent = volume * (self.count(gone) - 1)
                if sent <= most:
                    yield sent, "all-gather", gone, (*spec[:i], entry[:k], *spec[i + 1 :])
        after = max(0, self.wanted - volume)  # what is lacking at least once shards are of this size
        if volume + after <= most:
            for t in self.permuted(tuple(counts)):
                if t != spec:
                    yield volume, "collective-permute", (), t
        yield from self.exchanges(spec, counts, volume, most - after)

    def slices(self, spec: Ids, counts: Sequence[int]) -> Iterator[tuple[int, Literal["slice"], tuple[int, ...], Ids]]:
        used = {a for entry in spec for a in entry}
        idle: set[int] = set()
        for a, size in enumerate(self.group):
            if a in used or (a not in self.needed and size in idle):
                continue
            if a not in self.needed:
                idle.add(size)  # idle axes of one size are alike
            for i, entry in enumerate(spec):
                if self.extents[i] % (counts[i] * size) == 0:
                    yield 0, "slice", (a,), (*spec[:i], (*entry, a), *spec[i + 1 :])

    def _permuted(self, counts: tuple[int, ...]) -> list[Ids]:
        """Every spec with these numbers of shards."""

        def fill(i: int, left: tuple[int, ...], entry: tuple[int, ...], parts: int, spec: Ids) -> Iterator[Ids]:
            if i == len(counts):
                yield spec
            elif parts == counts[i]:
                yield from fill(i + 1, left, (), 1, (*spec, entry))
            else:
                for k, a in enumerate(left):
                    if counts[i] % (parts * self.group[a]) == 0:
                        yield from fill(i, left[:k] + left[k + 1 :], (*entry, a), parts * self.group[a], spec)

        return list(fill(0, tuple(range(len(self.group))), (), 1, ()))

    def swapped(self, a: Ids, b: Ids) -> tuple[int, ...]:
        """The axes that do not stand for the same digits of the same dim in both specs."""
        places = []
        for spec in (a, b):
            places.append({(x, i, self.count(e[:k])) for i, e in enumerate(spec) for k, x in enumerate(e)})
        return tuple(sorted({x for x, _, _ in places[0] ^ places[1]}))

    def exchanges(
        self, spec: Ids, counts: Sequence[int], volume: int, most: int
    ) -> Iterator[tuple[int, Literal["all-to-all"], tuple[int, ...], Ids]]:
        for taken in itertools.product(*[range(len(entry) + 1) for entry in spec]):
            gain = [i for i, k in enumerate(taken) if k == 0]
            if not gain or len(gain) == len(spec):
                continue
            moved = tuple(a for entry, k in zip(spec, taken, strict=True) if k for a in entry[len(entry) - k :])
            size = self.count(moved)
            sent = volume * (size - 1) // size
            if sent > most:
                continue
            kept = tuple(entry[: len(entry) - k] for entry, k in zip(spec, taken, strict=True))
            for new in self.arrivals(moved, gain, len(spec)):
                if not any(self.extents[i] % (counts[i] * self.count(new[i])) for i in gain):
                    yield sent, "all-to-all", moved, tuple(map(tuple.__add__, kept, new))

    def arrivals(self, moved: tuple[int, ...], gain: Sequence[int], rank: int) -> Iterator[Ids]:
        """The ways in which moved axes may come to dims: all of them where there are few, else those that lead on.

        Those send an axis to the dim that needs it, if that takes part, in the order in which it is needed there; the other axes
        go to one dim together.
        """
        if len(moved) <= (2 if len(self.group) > MOST_FREE else MOST_FREE):
            for homes in itertools.product(gain, repeat=len(moved)):
                new = [tuple(a for a, home in zip(moved, homes, strict=True) if home == i) for i in range(rank)]
                yield from itertools.product(*map(itertools.permutations, new))
            return
        homes = {a: i for i in gain for a in self.need[i]}
        rest = tuple(a for a in moved if a not in homes)
        new = [tuple(a for a in self.need[i] if a in moved) if i in gain else () for i in range(rank)]
        for i in gain if rest else gain[:1]:
            yield (*new[:i], new[i] + rest, *new[i + 1 :])
