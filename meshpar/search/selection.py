"""The result of evaluated candidates: the choice among ties, the Pareto front, simplified layouts, compilation of the best."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from ..errors import CompilerError
from .evaluation import Evaluation
from .policy import POLICY
from .presentation import Candidate, as_shown, one_per_kind, with_merged_axes
from .result import Search
from .row import Row
from .space import Point, Space

Compile = Callable[[Row, bool], str]
"""Compiles a candidate, at full effort or not; returns a summary."""


def search_result(
    searched: Sequence[tuple[Evaluation, Space]], ended: str, memory_fraction: float, verify: int, compiled: Compile | None,
    refused: Sequence[str], keep_axes: Collection[str] = (), stages: str = "",
) -> Search:  # fmt: skip
    """The result of a search: the chosen candidate first, then the others by rank.

    Args:
      keep_axes: axes whose names the caller gave.
      stages: whether stages pay.
    """
    first = searched[0][0]
    ranked = _distinct(searched)
    choice = _choice(first, [c.row for c in ranked])
    chosen = next(_simplified(c) for c in ranked if c.row is choice)
    distinct = one_per_kind([chosen, *(c for c in ranked if c.row is not choice)])
    may_plan = ended != "interrupted"
    merged = [with_merged_axes(c, keep_axes, may_plan and c is chosen) for c in distinct]
    merged[1:] = sorted(merged[1:], key=lambda c: first.rank(c.row))
    rows = _with_front([as_shown(c, keep_axes) for c in one_per_kind(merged)])
    best = rows[0]
    if verify and compiled is not None and best.fits:
        rows, best = _compiled(rows, verify, compiled)
    return Search(
        first.topology,
        first.objective,
        memory_fraction,
        best,
        tuple(r for k, r in enumerate(rows) if k < POLICY.max_rows or r.name or r.front),
        sum(evaluation.planned for evaluation, _ in searched),
        ended,
        tuple(refused),
        first.usable,
        {evaluation.variant: evaluation.base for evaluation, _ in reversed(searched)},
        stages,
    )


def _distinct(searched: Sequence[tuple[Evaluation, Space]]) -> list[Candidate]:
    """The candidates by rank; one of all that have the same mesh and cost: a named one, else the one with the shortest layout."""

    def text_key(row: Row) -> tuple[Any, ...]:
        return not row.name, len(row.layout), row.layout

    rows: dict[tuple[Any, ...], Candidate] = {}
    for evaluation, space in searched:
        for point, row in evaluation.rows.items():
            row = replace(row, name=_scheme_name(evaluation.names.get(point, ""), point))
            key = (row.variant, row.mesh, row.seconds, row.peak, row.sent)
            if key not in rows or text_key(row) < text_key(rows[key].row):
                rows[key] = Candidate(row, evaluation, space, point)
    rank = searched[0][0].rank
    return sorted(rows.values(), key=lambda c: (rank(c.row), c.row.layout, c.row.variant))


def _choice(evaluation: Evaluation, ranked: Sequence[Row]) -> Row:
    """The candidate with the fewest rules, then the fewest axes in them, among those that tie with the best one; of equal ones a
    known scheme.

    Estimates may be wrong: of candidates that tie in time, one that uses at most half of the memory is preferred. A candidate is
    not chosen if another one is better by ``POLICY.min_gain_fraction`` in time and needs less than ``POLICY.max_peak_fraction``
    of its memory.
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
        (row for row in ties if not is_dominated(row)),
        key=lambda row: (row.rules, row.uses, not row.name, row.peak if best.fits else 0.0, row.seconds, row.layout),
    )


def _with_front(rows: Sequence[Row]) -> list[Row]:
    """The rows, each marked whether it is on the Pareto front of step time and peak."""
    smallest, front = float("inf"), set()
    for row in sorted(rows, key=lambda r: (r.seconds, r.peak)):
        if row.peak < smallest:
            front.add((row.variant, row.mesh, row.layout, *row.stages.values()))
            smallest = row.peak
    return [replace(r, front=(r.variant, r.mesh, r.layout, *r.stages.values()) in front) for r in rows]


def _simplified(candidate: Candidate) -> Candidate:
    """The candidate without the rules that do not change its cost; without the name of a scheme if an axis of it is then unused."""
    evaluation, point = candidate.evaluation, candidate.point
    rules = list(point.rules)
    for rule in rules[len(candidate.space.fixed) :][::-1]:
        fewer = [r for r in rules if r is not rule]
        if evaluation.equal_cost(point, replace(point, rules=tuple(fewer))):
            rules = fewer
    point = replace(point, rules=tuple(rules))
    row = replace(candidate.row, layout=point.layout, name=_scheme_name(candidate.row.name, point))
    return replace(candidate, point=point, row=row)


def _scheme_name(name: str, point: Point) -> str:
    """The name of a candidate: ``"yours"`` for a layout of the user, or that of the scheme whose rules use all axes; else ``""``.

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
