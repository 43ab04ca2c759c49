"""Candidates as results show them: one row for each kind of layout, no needless axes or question marks, axes named by what they
shard.

The functions of this module replace a candidate by one with the same cost that is easier to read, and that :func:`meshpar.jit`
accepts.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from ..layout import Rule
from .evaluation import Evaluation, used_together
from .naming import axis_names, renamed
from .policy import POLICY
from .row import Row
from .space import Point, Space


@dataclass(frozen=True)
class Candidate:
    """A planned candidate of one program of a search."""

    row: Row
    evaluation: Evaluation
    space: Space
    point: Point

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for candidates with the same kind of layout: each dim with the name of the axis that shards it first, whatever the
        sizes and the number of the axes are. Scoped rules do not count."""
        names = axis_names(self.point.sizes, self.point.rules)
        first = {(r.dim, names[r.axes[0]].rstrip("0123456789")) for r in self.point.rules if r.axes and r.scope is None}
        return self.row.variant, self.row.schedule, self.row.gather, frozenset(first)


def one_per_kind(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates without those that differ little from an earlier one.

    Those are of the same kind, with step time and peak within ``POLICY.same_row_fraction``. Of such candidates one with a name is
    shown, else the one with the fewest axes; the first candidate of all, and those with names, are always shown.
    """
    shown: list[Candidate] = []
    by_kind: dict[object, list[int]] = {}
    for candidate in candidates:
        similar = by_kind.setdefault(candidate.kind, [])
        at = next((k for k in similar if _similar(shown[k].row, candidate.row)), None)
        if at is None or (candidate.row.name and (at == 0 or shown[at].row.name)):
            similar.append(len(shown))
            shown.append(candidate)
        elif at > 0 and _simplicity(candidate) < _simplicity(shown[at]):
            shown[at] = candidate
    return shown


def _simplicity(candidate: Candidate) -> tuple[bool, int]:
    """(whether it has no name, its number of axes): smaller for the candidate to show."""
    return not candidate.row.name, len(candidate.point.sizes)


def _similar(one: Row, other: Row) -> bool:
    """Whether the costs of two rows differ by at most ``POLICY.same_row_fraction``."""
    most = 1 + POLICY.same_row_fraction
    return one.fits == other.fits and all(
        max(x, y) <= most * min(x, y) for x, y in ((one.seconds, other.seconds), (one.peak, other.peak))
    )


def as_shown(candidate: Candidate, keep: Collection[str]) -> Row:
    """The row of a candidate with axes renamed, and without question marks where it is legal without them; a layout of the user's
    own is unchanged.

    Args:
      keep: axes that are not renamed.
    """
    if candidate.row.name == "yours":
        return candidate.row
    rules = without_marks(candidate.evaluation, candidate.point, len(candidate.space.fixed))
    point = renamed(replace(candidate.point, rules=rules), keep)
    return replace(candidate.row, mesh=point.mesh, layout=point.layout)


def without_marks(evaluation: Evaluation, point: Point, fixed: int) -> tuple[Rule, ...]:
    """The rules of a candidate, not marked ``?`` where the candidate is legal and costs the same without the mark.

    Args:
      fixed: number of rules that stay as they are.
    """

    def plain(rules: Sequence[Rule], at: Collection[int]) -> tuple[Rule, ...] | None:
        """The rules without the marks of those at the positions ``at``; None: not the same candidate."""
        new = tuple(replace(r, optional=False) if k in at else r for k, r in enumerate(rules))
        other = replace(point, rules=new)
        return new if evaluation.equal_cost(point, other) and evaluation.is_legal(other) else None

    marked = [k for k, r in enumerate(point.rules) if k >= fixed and r.optional]
    rules = plain(point.rules, marked)
    if rules is None:
        rules = point.rules
        for k in marked:
            rules = plain(rules, [k]) or rules
    return rules


def with_merged_axes(candidate: Candidate, keep: Collection[str], may_plan: bool) -> Candidate:
    """The candidate with one axis in place of two that all rules use together, if its cost is at most
    ``POLICY.same_row_fraction`` larger: an axis with the size of both may have other places in the torus.

    Args:
      keep: axes that are not merged.
      may_plan: merged axes are planned if they were not yet.
    """
    if candidate.row.name == "yours":
        return candidate
    evaluation, limit = candidate.evaluation, 1 + POLICY.same_row_fraction
    for point in _mergers(candidate.point, keep):
        row = evaluation.known(point) or (evaluation.uncounted(point) if may_plan else None)
        old = candidate.row
        if row and row.fits == old.fits and row.seconds <= limit * old.seconds and row.peak <= limit * old.peak:
            row = replace(row, name=old.name)
            return with_merged_axes(Candidate(row, evaluation, candidate.space, point), keep, may_plan)
    return candidate


def _mergers(point: Point, keep: Collection[str]) -> Iterator[Point]:
    """Yields the points in which one axis replaces two that every rule uses one after the other, or not at all; the new axis in the
    place of either of them."""
    names = [a for a, _ in point.sizes if a not in keep]
    size = dict(point.sizes)
    for major, minor in itertools.permutations(names, 2):
        if not all(used_together(major, minor, r.axes) for r in point.rules):
            continue
        rules = tuple(replace(r, axes=tuple(a for a in r.axes if a != minor)) for r in point.rules)
        for gone, place in ((minor, major), (major, minor)):
            sizes = tuple(
                (major, size[major] * size[minor]) if a == place else (a, n) for a, n in point.sizes if a != gone
            )
            yield Point(sizes, rules)
