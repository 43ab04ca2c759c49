"""The result of evaluated candidates: the choice among ties, the Pareto front, compilation of the best, and the rows shown.

A candidate is shown as one with the same cost that is easier to read, and that :func:`meshpar.jit` accepts: without needless rules,
axes and question marks, its axes named by the dims that they shard. Of each kind of layout one row is shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import CompilerError
from ..layout import Rule
from .evaluation import Evaluation, used_together
from .result import Search
from .row import Row
from .space import Point, axis_names, renamed
from .thresholds import POLICY

Compile = Callable[[Row, bool], str]
"""Compiles a candidate, at full effort or not; returns a summary."""


@dataclass(frozen=True)
class Candidate:
    """A planned candidate of one program of a search."""

    row: Row
    evaluation: Evaluation
    point: Point

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for candidates with the same kind of layout: each dim with the name of the axis that shards it first, whatever the
        sizes and the number of the axes are. Scoped rules do not count."""
        names = axis_names(self.point.sizes, self.point.rules)
        first = {(r.dim, names[r.axes[0]].rstrip("0123456789")) for r in self.point.rules if r.axes and r.scope is None}
        return self.row.variant, self.row.schedule, self.row.gather, frozenset(first)


def search_result(
    searched: Sequence[Evaluation], ended: str, compiled: Compile | None, refused: Sequence[str], stages: str = ""
) -> Search:
    """The result of a search: the chosen candidate first, then the others by rank.

    Args:
      compiled: compiles as many of the best candidates as the options say.
      stages: whether stages pay.
    """
    first = searched[0]
    settings, keep = first.settings, first.settings.keep_axes
    options = settings.options
    ranked = _distinct(searched)
    choice = _choice(first, [c.row for c in ranked])
    chosen = next(_simplified(c) for c in ranked if c.row is choice)
    distinct = one_per_kind([chosen, *(c for c in ranked if c.row is not choice)])
    may_plan = ended != "interrupted"
    merged = [with_merged_axes(c, keep, may_plan and c is chosen) for c in distinct]
    merged[1:] = sorted(merged[1:], key=lambda c: first.rank(c.row))
    rows = _with_front([as_shown(c, keep) for c in one_per_kind(merged)])
    best = rows[0]
    if compiled is not None and options.verify and best.fits:
        rows, best = _compiled(rows, options.verify, compiled)
    return Search(
        settings.topology,
        options.objective,
        options.memory_fraction,
        best,
        rows=tuple(r for k, r in enumerate(rows) if k < POLICY.max_rows or r.name or r.front),
        planned=sum(evaluation.planned for evaluation in searched),
        ended=ended,
        refused=tuple(refused),
        usable=first.usable,
        _bases={evaluation.variant: evaluation.base for evaluation in reversed(searched)},
        stages=stages,
        illegal=sum(len(evaluation.errors) for evaluation in searched),
        points=tuple(row.cost for evaluation in searched for row in evaluation.planned_rows),
    )


def _distinct(searched: Sequence[Evaluation]) -> list[Candidate]:
    """The candidates by rank; one of all that have the same mesh and cost: a named one, else the one with the shortest layout."""

    def text_key(row: Row) -> tuple[Any, ...]:
        return not row.name, len(row.layout), row.layout

    rows: dict[tuple[Any, ...], Candidate] = {}
    for evaluation in searched:
        for point, row in evaluation.rows.items():
            row = replace(row, name=_scheme_name(evaluation.names.get(point, ""), point))
            key = (row.variant, row.mesh, row.seconds, row.peak, row.sent)
            if key not in rows or text_key(row) < text_key(rows[key].row):
                rows[key] = Candidate(row, evaluation, point)
    rank = searched[0].rank
    return sorted(rows.values(), key=lambda c: (rank(c.row), c.row.layout, c.row.variant))


def _choice(evaluation: Evaluation, ranked: Sequence[Row]) -> Row:
    """The simplest candidate (:attr:`Row.complexity`) among those that tie with the best one; of equal ones a
    known scheme.

    Estimates may be wrong: of candidates that tie in time, one that uses at most half of the usable memory is preferred. Where none
    does, a candidate is not chosen if another one is better by ``POLICY.min_gain_fraction`` in time and needs less than
    ``POLICY.max_peak_fraction`` of its memory.
    """
    best = ranked[0]
    known = [row for row in ranked if row.name and row.fits == best.fits]
    tie, slack = 1 + POLICY.tie_fraction, 1 + POLICY.scheme_slack_fraction
    ties = [row for row in ranked if row.fits == best.fits and row.seconds <= tie * best.seconds]
    if evaluation.objective == "memory" or not best.fits:
        limit = min([tie * best.peak, *(slack * row.peak for row in known)])
        ties = [row for row in ties if row.peak <= limit]
    else:
        limit = min([tie * best.seconds, *(slack * row.seconds for row in known)])
        ties = [row for row in ties if row.seconds <= limit]
        ties = [row for row in ties if row.peak <= evaluation.usable / 2] or ties

    def is_dominated(row: Row) -> bool:
        faster = [other for other in ties if other.seconds < (1 - POLICY.min_gain_fraction) * row.seconds]
        return any(other.peak < POLICY.max_peak_fraction * row.peak for other in faster)

    return min(
        (row for row in ties if row.peak <= evaluation.usable / 2 or not is_dominated(row)),
        key=lambda row: (row.complexity, not row.name, row.peak if best.fits else 0.0, row.seconds, row.layout),
    )


def _with_front(rows: Sequence[Row]) -> list[Row]:
    """The rows, each marked whether it is on the Pareto front of step time and peak."""
    smallest, front = float("inf"), set[Row]()
    for row in sorted(rows, key=lambda r: (r.seconds, r.peak)):
        if row.peak < smallest:
            front.add(row)
            smallest = row.peak
    return [replace(row, front=row in front) for row in rows]


def _simplified(candidate: Candidate) -> Candidate:
    """The candidate without the rules that do not change its cost; without the name of a scheme if an axis of it is then unused."""
    evaluation, point = candidate.evaluation, candidate.point
    rules = list(point.rules)
    for rule in evaluation.space.free(point)[::-1]:
        fewer = [r for r in rules if r is not rule]
        if evaluation.equal_cost(point, replace(point, rules=tuple(fewer))):
            rules = fewer
    point = replace(point, rules=tuple(rules))
    row = replace(candidate.row, layout=point.layout, name=_scheme_name(candidate.row.name, point))
    return replace(candidate, point=point, row=row)


def _scheme_name(name: str, point: Point) -> str:
    """The name of a candidate: ``"yours"`` for a layout of the user, or of the scheme whose rules use all axes; else ``""``.

    A scheme does not use all axes if the program lacks a dim of it: without ``seq`` no candidate is context parallel.
    """
    used = {a for r in point.rules for a in r.axes}
    return name if name == "yours" or all(a in used for a, n in point.sizes if n > 1) else ""


def _compiled(rows: list[Row], verify: int, compiled: Compile) -> tuple[list[Row], Row]:
    """(the rows with the compiler's summaries, the best row that compiles): it at full effort, later rows at fast
    effort."""
    best: Row | None = None
    left = verify
    for k, row in enumerate(rows):
        if left == 0 or not row.fits:
            break
        left -= 1
        try:
            rows[k] = replace(row, compiled=compiled(row, best is None))
        except CompilerError as e:
            rows[k] = replace(row, compiled=f"refused: {str(e).splitlines()[0]}")
            left += best is None
            continue
        best = best or rows[k]
    return rows, best or rows[0]


def one_per_kind(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates without those that differ little from an earlier one.

    Those are of the same kind, with step time and peak within ``POLICY.same_row_fraction``. Of such candidates the first is shown,
    which is the best; those with names are always shown, in place of one without a name that takes as long.
    """
    shown: list[Candidate] = []
    by_kind: dict[object, list[int]] = {}
    for candidate in candidates:
        similar = by_kind.setdefault(candidate.kind, [])
        at = next((k for k in similar if _similar(shown[k].row, candidate.row)), None)
        least = (1 - POLICY.min_gain_fraction) * candidate.row.seconds
        if at is None or (candidate.row.name and (at == 0 or shown[at].row.name or shown[at].row.seconds < least)):
            similar.append(len(shown))
            shown.append(candidate)
        elif candidate.row.name:
            shown[at] = candidate
    return shown


def _similar(one: Row, other: Row) -> bool:
    """Whether the costs of two rows differ by at most ``POLICY.same_row_fraction``."""
    most, pairs = 1 + POLICY.same_row_fraction, zip(one.cost, other.cost, strict=True)
    return one.fits == other.fits and all(max(pair) <= most * min(pair) for pair in pairs)


def as_shown(candidate: Candidate, keep: Collection[str]) -> Row:
    """The row of a candidate with axes renamed, and without question marks where it is legal without them; a layout of the user's
    own is unchanged.

    Args:
      keep: axes that are not renamed.
    """
    if candidate.row.name == "yours":
        return candidate.row
    rules = without_marks(candidate.evaluation, candidate.point)
    point = renamed(replace(candidate.point, rules=rules), keep)
    return replace(candidate.row, mesh=point.mesh, layout=point.layout)


def without_marks(evaluation: Evaluation, point: Point) -> tuple[Rule, ...]:
    """The rules of a candidate, not marked ``?`` where the candidate is legal and costs the same without the mark. Fixed rules stay
    as they are."""

    def plain(rules: Sequence[Rule], at: Collection[int]) -> tuple[Rule, ...] | None:
        """The rules without the marks of those at the positions ``at``; None: not the same candidate."""
        new = tuple(replace(r, optional=False) if k in at else r for k, r in enumerate(rules))
        other = replace(point, rules=new)
        return new if evaluation.equal_cost(point, other) and evaluation.legal_plan(other) else None

    marked = [k for k, r in enumerate(point.rules) if k >= len(evaluation.space.fixed) and r.optional]
    rules = plain(point.rules, marked)
    if rules is None:
        rules = point.rules
        for k in marked:
            rules = plain(rules, [k]) or rules
    return rules


def with_merged_axes(candidate: Candidate, keep: Collection[str], may_plan: bool) -> Candidate:
    """The candidate with one axis in place of two that all rules use together, if its cost is no larger: an axis with the size of
    both may have other places in the torus.

    Args:
      keep: axes that are not merged.
      may_plan: merged axes are planned if they were not yet, and may cost ``POLICY.same_row_fraction`` more.
    """
    if candidate.row.name == "yours":
        return candidate
    evaluation, limit = candidate.evaluation, 1 + POLICY.same_row_fraction * may_plan
    for point in _mergers(candidate.point, keep):
        row = evaluation.known(point) or (evaluation.uncounted(point) if may_plan else None)
        old = candidate.row
        if row and row.fits == old.fits and row.seconds <= limit * old.seconds and row.peak <= limit * old.peak:
            row = replace(row, name=old.name)
            return with_merged_axes(Candidate(row, evaluation, point), keep, may_plan)
    return candidate


def _mergers(point: Point, keep: Collection[str]) -> Iterator[Point]:
    """Yields the points in which one axis replaces two that every rule uses one after the other, or not at all; the new axis in the
    place of either of them."""
    size = dict(point.sizes)
    names = [a for a in size if a not in keep]
    for major, minor in itertools.permutations(names, 2):
        if not all(used_together(major, minor, r.axes) for r in point.rules):
            continue
        rules = tuple(replace(r, axes=tuple(a for a in r.axes if a != minor)) for r in point.rules)
        merged = major, size[major] * size[minor]
        for gone, place in ((minor, major), (major, minor)):
            sizes = (merged if a == place else (a, n) for a, n in point.sizes if a != gone)
            yield Point(tuple(sizes), rules)
