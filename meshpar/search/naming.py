"""Names of mesh axes by the dims that they shard.

A search calls the axes of its meshes ``data``, ``model`` and ``third``, whatever its rules give them; results have other names.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..layout import Rule
from .space import Point, Sizes

BATCH = frozenset({"batch"})
EXPERTS = frozenset({"expert", "experts"})
SEQUENCE = frozenset({"seq", "kv_seq", "sequence", "length", "context"})
"""Names of the dims after which an axis is called ``data``, ``expert`` or ``context``; axes of other dims are called ``model``."""
WITH_DATA = frozenset({"batch", "embed"})
"""Dims that an axis called ``data`` shards in the usual schemes."""


def axis_names(sizes: Sizes, rules: Sequence[Rule], keep: Collection[str] = ()) -> dict[str, str]:
    """Old name → new name of every axis, by the dims that the rules give it.

    One of the axes of ``batch`` is ``data``: the one with the fewest dims of other kinds, then the largest. Axes of experts are
    ``expert``, axes of the sequence ``context``, axes of other dims ``model``, axes without a rule ``idle``. A further axis of
    ``batch`` alone is ``replica`` where ``data`` shards weights too, else ``data2``. A second axis of a kind has a number.

    Args:
      keep: axes whose names do not change.
    """
    carried = {a: {r.dim for r in rules if a in r.axes} for a, _ in sizes}
    free = [a for a, _ in sizes if a not in keep]
    size = dict(sizes)
    batch = [a for a in free if carried[a] & BATCH]
    data = min(batch, key=lambda a: (len(carried[a] - WITH_DATA), -size[a], free.index(a)), default=None)

    def kind(axis: str) -> str:
        """The name of an axis by the dims that it shards, without a number."""
        dims = carried[axis]
        if axis == data:
            return "data"
        if dims & EXPERTS:
            return "expert"
        if dims == BATCH and data is not None and carried[data] != BATCH:
            return "replica"
        if dims & BATCH and dims <= WITH_DATA:
            return "data"
        if dims and dims <= SEQUENCE | BATCH:
            return "context"
        return "model" if dims else "idle"

    names, taken = {a: a for a in keep if a in size}, set(keep)
    for axis in sorted(free, key=lambda a: a != data):
        text = kind(axis)
        number = next(k for k in itertools.count(1) if (text if k == 1 else f"{text}{k}") not in taken)
        names[axis] = text if number == 1 else f"{text}{number}"
        taken.add(names[axis])
    return names


def renamed(point: Point, keep: Collection[str] = ()) -> Point:
    """The same candidate with axes named by :func:`axis_names`."""
    names = axis_names(point.sizes, point.rules, keep)
    return Point(
        tuple((names[a], n) for a, n in point.sizes),
        tuple(replace(r, axes=tuple(names[a] for a in r.axes)) for r in point.rules),
    )
