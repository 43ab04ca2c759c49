"""Values that the rewritten program represents by another array: indexed views, collapsed views and padded dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...compat.jax import Atom
from ...rules.exchange_along_dim import ANY, ZERO


class PaddedDim(NamedTuple):
    """A dim of ``size`` elements that is padded to the next multiple of the ``shards`` it is split into."""

    size: int
    shards: int

    @property
    def padded_size(self) -> int:
        """``PaddedDim(15, 4).padded_size`` is 16."""
        return -(-self.size // self.shards) * self.shards

    @property
    def is_padded(self) -> bool:
        return self.size != self.padded_size


@dataclass(frozen=True, slots=True)
class DimIndices:
    """The elements of a source dim that a view consists of.

    Attributes:
      table: for every element of the view, its index in the source dim; :data:`~rules.exchange_along_dim.ZERO` for a zero.
      shards: number of shards of the source dim.
    """

    table: np.ndarray
    shards: int

    @property
    def divides(self) -> bool:
        """Whether the dim of the view can be split evenly over the shards of the source."""
        return len(self.table) % self.shards == 0

    def take(self, table: np.ndarray) -> DimIndices:
        """The indices of a view of this view: element i of the new view is element ``table[i]`` of this one."""
        return DimIndices(np.append(self.table, [ANY, ZERO])[table], self.shards)  # -1 and -2 are ZERO and ANY


@dataclass(slots=True)
class IndexedView:
    """Elements of an array along some dims: ``source[table]`` along each of them.

    Attributes:
      source: the atom of the array in the rewritten jaxpr.
      indices: by dim; all elements of the other dims.
      made_by: the site of the op of the program that makes the value, and the position of its result; None: the value is the first
        elements of ``source``, which is padded.
      composed: the table combines several ops of the program, and one rearrangement of ``source`` replaces all of them.
      atom: the value itself, once an op has needed it.
    """

    source: Any
    indices: dict[int, DimIndices]
    made_by: tuple[Any, int] | None = None
    composed: bool = False
    atom: Atom | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(
            len(self.indices[d].table) if d in self.indices else n for d, n in enumerate(self.source.aval.shape)
        )

    @property
    def divides(self) -> bool:
        """Whether every dim of the view can be split as the source is."""
        return all(dim.divides for dim in self.indices.values())


@dataclass(slots=True)
class CollapsedView:
    """A reshape of an array that only merges adjacent dims.

    Attributes:
      source: the atom of the array in the rewritten jaxpr.
      groups: for every dim of the view, the sizes of the source dims that it merges.
      atom: the value itself, once an op has needed it.
    """

    source: Any
    groups: tuple[tuple[int, ...], ...]
    atom: Atom | None = None

    def source_dims(self, dims: Sequence[int]) -> tuple[int, ...]:
        """The source dims that some dims of the view merge: with groups ``((2,), (3, 4))``, dim 1 merges dims 1 and 2."""
        starts = np.cumsum([0, *map(len, self.groups)]).tolist()
        return tuple(k for d in dims for k in range(starts[d], starts[d + 1]))


View = IndexedView | CollapsedView


Scope = dict[Any, Any]
"""Variable of a jaxpr → its view, or its atom in the rewritten jaxpr; by default the variable itself."""


def padded_dims(view: View | None) -> dict[int, PaddedDim]:
    """Dim → its padding, for the dims of a view that have to be padded before an op can read it in shards.

    Empty for a view that divides and that the program makes by an op of its own, and for anything but an :class:`IndexedView`.
    """
    if not isinstance(view, IndexedView) or (view.made_by is not None and view.divides):
        return {}
    return {d: PaddedDim(len(dim.table), dim.shards) for d, dim in view.indices.items()}


def collapsed_groups(shape: Sequence[int], collapsed: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """For every dim of a shape, the sizes of the dims of another shape that it merges.

    ``collapsed_groups((2, 3, 4), (2, 12))`` is ``((2,), (3, 4))``. None if a dim is split, no dims are merged,
    or there are no elements.
    """
    remaining, groups = list(shape), []
    for n in collapsed:
        group: list[int] = []
        while math.prod(group) < n and remaining:
            group.append(remaining.pop(0))
        if math.prod(group) != n or (not group and n != 1):
            return None
        groups.append(tuple(group))
    if any(n != 1 for n in remaining) or not groups or 0 in shape:
        return None
    groups[-1] = (*groups[-1], *remaining)
    return tuple(groups) if any(sum(n > 1 for n in g) > 1 for g in groups) else None
