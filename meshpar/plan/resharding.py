"""Relayout: the collectives that bring a value from one spec to another with the fewest bytes on the wire.

A shortest path through the specs of one array, over all axes of the mesh at once. Between specs lead:

- a *slice*: an unused axis is appended to a dim; every device keeps its part, and nothing is sent;
- an *all-gather* over the last axes of a dim;
- an *all-to-all*: the last axes of some dims become the last axes of other dims;
- a *permute*: shards keep their shape, and devices swap them, so that a dim may be split over other axes, or over the same
  ones in another order.

An axis of 4 may move in parts of 2, written ``data:(1)2`` (the major half) and ``data:(2)2``: the axis, in parentheses the
number of devices in the parts before it, and its size.

The idea of searching over specs is that of Rink et al., "Memory-efficient array redistribution through portable collective
communication" (2021), which bounds the memory and minimises time; this one minimises bytes, then steps, then memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..layout import Spec
from .collectives import wire_bytes
from .paths import Move, alike, cheapest_path

MOST_PARTS = 5  # axes and parts of axes in the wider search
MOST_MOVES = 20_000  # looked at by the first search; by the wider one, a fifteenth of that


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a relayout.

    Attributes:
      op: a collective, or ``"slice"``, which sends nothing.
      axes: what it runs over, major to minor: axes, or parts of them.
      group: how many devices exchange with one another: the product of the sizes of ``axes``.
      before, after: the specs between which it leads; they may hold parts of axes, and hold no axes of size 1.
    """

    op: Move
    axes: tuple[str, ...]
    group: int
    before: Spec
    after: Spec

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims whose axes it changes."""
        return tuple(i for i, (a, b) in enumerate(zip(self.before, self.after, strict=True)) if a != b)

    def bytes(self, shape: Sequence[int], itemsize: float, sizes: Mapping[str, int]) -> float:
        """Bytes that each device sends, of an array of this global shape."""
        if self.op == "slice":
            return 0.0
        spec = self.after if self.op == "all-gather" else self.before
        return wire_bytes(self.op, float(itemsize * math.prod(shard(shape, spec, sizes))), self.group)


def relayout(have: Spec, need: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """The steps that bring an array from one spec to another: fewest bytes sent, then fewest collectives, then least memory.

    Args:
      have, need: of every dim, its axes, major to minor.
      shape: the global shape; a dim that a spec does not divide counts as padded.
      sizes: axis → size of the whole mesh: axes in neither spec may share the work.
    """
    if have == need:
        return ()
    return _relayout(have, need, tuple(shape), tuple(sizes.items()))


def relayout_bytes(have: Spec, need: Spec, shape: Sequence[int], itemsize: float, sizes: Mapping[str, int]) -> float:
    """Bytes that each device sends in a relayout."""
    return sum(s.bytes(shape, itemsize, sizes) for s in relayout(have, need, shape, sizes))


def part_of(axis: str) -> tuple[str, int, int] | None:
    """``"data:(2)4"`` → ``("data", 2, 4)``: axis, devices in the parts before, size; None for a whole axis."""
    name, colon, rest = axis.partition(":(")
    if not colon:
        return None
    before, _, size = rest.partition(")")
    return name, int(before), int(size)


def axis_size(axis: str, sizes: Mapping[str, int]) -> int:
    """The size of an axis or of a part of one."""
    part = part_of(axis)
    return sizes[axis] if part is None else part[2]


def whole_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """The axes that these axes and parts belong to."""
    return tuple(dict.fromkeys(axis.partition(":(")[0] for axis in axes))


def shard(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a shard, where the spec may hold parts of axes; uneven shards rounded up."""
    return tuple(-(-n // math.prod(axis_size(a, sizes) for a in entry)) for n, entry in zip(shape, spec, strict=True))


@lru_cache(maxsize=65536)
def _relayout(have: Spec, need: Spec, shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...]) -> tuple[Step, ...]:
    sizes = dict(mesh)
    have, need = (tuple(tuple(a for a in entry if sizes[a] > 1) for entry in spec) for spec in (have, need))
    place = {a: i for i, entry in enumerate(need) for a in entry}
    moves = any(place.get(a, i) != i for i, entry in enumerate(have) for a in entry)
    if not moves and all(alike(h, n) for h, n in zip(have, need, strict=True)):
        return _along(have, need, sizes)
    used = list(dict.fromkeys(a for spec in (have, need) for entry in spec for a in entry))
    dims = [i for i, (h, n) in enumerate(zip(have, need, strict=True)) if h or n]
    steps = _straight(have, need, sizes)
    found, least = _searched(have, need, shape, sizes, dims, [(a, (sizes[a],)) for a in used], steps)
    steps = found or steps
    if least:
        return steps
    # Something cheaper may be had with a dim that is not split, with an axis that is idle, or with parts of axes.
    every = math.prod(sizes.values())
    spare = sorted(
        (i for i, n in enumerate(shape) if i not in dims and n > 1), key=lambda i: -math.gcd(shape[i], every)
    )
    extents = {sizes[a] for a in used}
    parts: list[tuple[str, tuple[int, ...]]] = [(a, _parts(sizes[a], extents)) for a in used]
    if sum(len(p) for _, p in parts) > MOST_PARTS:
        parts = [(a, (sizes[a],)) for a in used]
    room = MOST_PARTS - sum(len(p) for _, p in parts)
    idle = [a for a, n in sizes.items() if n > 1 and a not in used]
    if idle and room:  # rather one that can stand for an axis in use
        a = min(idle, key=lambda a: (sizes[a] not in extents, -sizes[a]))
        of = _parts(sizes[a], extents)
        parts.append((a, of if len(of) <= room else (sizes[a],)))
    if spare or len(parts) > len(used) or any(len(p) > 1 for _, p in parts):
        found, _ = _searched(have, need, shape, sizes, sorted([*dims, *spare[:1]]), parts, steps, wider=True)
    return found or steps


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    """How many entries they begin with alike."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _along(have: Spec, need: Spec, sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """Where every dim only gains or only loses its last axes: slices, which make the shard small, then all-gathers."""
    steps: list[Step] = []
    now = have
    for op in ("slice", "all-gather"):
        for i, (h, n) in enumerate(zip(have, need, strict=True)):
            axes = n[len(h) :] if op == "slice" else h[len(n) :]
            if axes:
                after = (*now[:i], n, *now[i + 1 :])
                steps.append(Step(op, axes, math.prod(sizes[a] for a in axes), now, after))
                now = after
    return tuple(steps)


def _straight(have: Spec, need: Spec, sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """Every axis that can go straight to its place in an all-to-all of its own does; then the rest is gathered, and cut."""
    place = {a: i for i, entry in enumerate(need) for a in entry}
    steps: list[Step] = []
    now, going = have, True
    while going:
        going = False
        for i, entry in enumerate(now):
            j = place.get(entry[-1], i) if entry else i
            if j != i and need[j][: len(now[j]) + 1] == (*now[j], entry[-1]):
                moved = {i: entry[:-1], j: (*now[j], entry[-1])}
                after = tuple(moved.get(d, e) for d, e in enumerate(now))
                steps.append(Step("all-to-all", entry[-1:], sizes[entry[-1]], now, after))
                now, going = after, True
                break
    kept = tuple(h[: _common(h, n)] for h, n in zip(now, need, strict=True))
    return (*steps, *_along(now, kept, sizes), *_along(kept, need, sizes))


def _parts(size: int, others: Iterable[int]) -> tuple[int, ...]:
    """An axis in the size of the largest smaller axis that divides it, and the rest."""
    by = max((n for n in others if n < size and size % n == 0), default=size)
    return (by, size // by) if by < size else (size,)


def _searched(
    have: Spec, need: Spec, shape: Sequence[int], sizes: Mapping[str, int], dims: Sequence[int],
    parts: Sequence[tuple[str, tuple[int, ...]]], known: Sequence[Step], wider: bool = False,
) -> tuple[tuple[Step, ...] | None, bool]:  # fmt: skip
    """(the cheapest steps that touch these dims and axes, whether none can be cheaper).

    Args:
      parts: axes, and the sizes of the parts in which they may move.
      known: None is returned where nothing is found that sends no more than this, or in the wider search, that sends less.
    """
    ids: dict[str, tuple[int, ...]] = {}
    names: list[str] = []
    group: list[int] = []
    for axis, of in parts:
        ids[axis] = tuple(range(len(names), len(names) + len(of)))
        for k, size in enumerate(of):
            names.append(axis if len(of) == 1 else f"{axis}:({math.prod(of[:k])}){size}")
            group.append(size)
    start, goal = (tuple(tuple(i for a in spec[d] for i in ids[a]) for d in dims) for spec in (have, need))
    extents = []
    for d, h, n in zip(dims, start, goal, strict=True):
        both = math.lcm(math.prod(group[i] for i in h), math.prod(group[i] for i in n))
        extents.append(math.gcd(-(-shape[d] // both) * both, math.prod(group)))
    extent = dict(zip(dims, extents, strict=True))
    most = math.ceil(sum(s.bytes([extent.get(d, 1) for d in range(len(shape))], 1, sizes) for s in known)) - wider
    effort = MOST_MOVES // 15 if wider else MOST_MOVES
    path, least = cheapest_path(start, goal, tuple(extents), tuple(group), most, effort)
    if path is None:
        return None, False
    specs = []
    for entries in (start, *(after for _, _, after in path)):
        named = {d: tuple(names[i] for i in entry) for d, entry in zip(dims, entries, strict=True)}
        specs.append(tuple(named.get(d, ()) for d in range(len(shape))))
    steps = []
    for (op, moved, _), before, after in zip(path, specs, specs[1:], strict=False):
        steps.append(Step(op, tuple(names[i] for i in moved), math.prod(group[i] for i in moved), before, after))
    return tuple(steps), least
