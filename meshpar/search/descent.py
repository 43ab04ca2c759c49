"""Search: the known schemes on every mesh, then descent from the best of them, one dim after the other; every figure is a plan's.

Coordinate descent: all axes, before and behind the other rules, are tried for one dim while the others stay, then for the next,
until nothing improves, or nothing did for long; dims that ask for the same axes also move together, and the rules also go to other
meshes. What weights have rules of their own for is tried last, from the best of all. Moves that lost much are not tried again, nor
several axes for a dim where each alone lost much. Nothing is random: the same program, slice and options give the same answer.

All of it runs in one process: another one would have to import JAX and trace the program again, which no pickle carries, and a
fork of a process in which JAX has threads may never end.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..compat.jax import without_gc
from ..cost.memo import released
from ..errors import CompilerError, MeshError, MeshparError, UnsupportedError
from ..hardware.topology import parse_topology
from ..layout import Layout, Rule
from ..mesh import planned_mesh
from ..passes import walked_again, with_passes
from ..plan import plan as record
from ..plan.claims import Claims
from ..plan.collectives import duration, human
from ..plan.planner import TooLong
from ..planned import Plan
from .answer import Objective, Search, quiet
from .bounds import Pieces, least_of
from .row import Row
from .space import Move, Point, Sizes, Space, as_layout, meshes

TIE = 0.03
"""Of the seconds: layouts that differ by less are as good as each other; the one of fewer rules is better to read."""
SAME = 0.002
"""Of the seconds, or of the peak: by no more may what is chosen be longer, or larger, than a known scheme or the user's own."""
STARTS = 3
"""From how many of the best candidates, and of the shortest though they do not fit, the descent starts."""
BETTER = 0.005
"""By which part a candidate must be better than the one at which the descent is."""
LOST = 0.1
"""A move that made the step longer by more is not tried again, from no other candidate."""
PATIENCE = 40
"""After so many plans in a row that are no gain over where it is, a descent ends."""
FAR = 1.5
"""Times the seconds of the best: schemes that take longer are not descended from, nor tried with their axes swapped; what sends for
longer is planned no further. (The passes hid or saved at most 0.27 of what was to be sent, of 800 candidates.)"""


NOTHING = "no candidate near the best is better"


class _Stop(Exception):
    """No more candidates are to be planned."""


class _Enough(Exception):
    """Many plans brought nothing."""


class _Evaluation:
    """The candidates that were planned.

    Attributes:
      base: a plan of the program, which the others are made from; ``variant``: what the program is called.
      usable: bytes of a device that may be used.
      rows: by candidate; those with equal answers to the claims share one.
      named: what candidates are called; illegal: the errors of those that have no plan; far: those that were planned in part.
      gained: how many candidates had been tried when the descent had its last gain, or began; None: there is none.
    """

    def __init__(
        self, variant: str, base: Plan, topology: str, objective: Objective, margin: float, most: int, until: float | None,
        tell: Callable[[str], None],
    ):  # fmt: skip
        assert base.chip is not None
        self.variant = variant
        self.base, self.topology, self.most, self.until, self.tell = base, topology, most, until, tell
        self.objective: Objective = objective
        self.usable = margin * base.chip.per_device().hbm
        self.rows: dict[Point, Row] = {}
        self.named: dict[Point, str] = {}
        self.illegal: dict[Point, MeshparError] = {}
        self.far: set[Point] = set()
        self.planned = 0
        self._same: dict[Any, Point] = {}
        self._tried: set[Any] = set()
        self._pieces: tuple[Point, Pieces] | None = None
        self._best: Row | None = None
        self._least: Row | None = None  # of the present descent
        self.gained: int | None = None
        self._lost: set[tuple[Any, Move]] = set()

    def key(self, row: Row) -> tuple[Any, ...]:
        """Less is better."""
        if not row.fits:
            return (1, row.peak, row.seconds)
        return (0, row.seconds, row.peak) if self.objective == "time" else (0, row.peak, row.seconds)

    def near(self, row: Row) -> bool:
        """Whether something is to be begun with it: what it would be chosen for is at most :data:`FAR` times that of the best."""
        best = self._best
        if best is None or (best.fits and self.objective == "time"):
            return best is None or row.seconds <= FAR * best.seconds
        return row.peak <= FAR * best.peak

    def __call__(self, point: Point) -> Row | None:
        """The row of a candidate; None: it is illegal, or far from the best.

        Raises:
          _Stop: the limit is reached.
        """
        if point in self.rows or point in self.illegal or point in self.far:
            return self.rows.get(point)
        same = self._class(point)
        if same in self._same:
            first = self._same[same]
            if first in self.rows:
                self.rows[point] = replace(self.rows[first], layout=point.layout)
            elif first in self.far:
                self.far.add(point)
            else:
                self.illegal[point] = self.illegal[first]
            return self.rows.get(point)
        if self.planned >= self.most:
            raise _Stop(f"stopped at {self.most} plans")
        if self.gained is not None and len(self._tried) >= self.gained + PATIENCE:
            raise _Enough
        if self.until is not None and time.monotonic() > self.until and self.planned:
            raise _Stop("stopped at the time limit")
        self._same[same] = point
        self._tried.add(same)
        self.planned += 1
        try:
            plan = self._plan(point)
        except MeshparError as e:
            self.illegal[point] = e.with_traceback(None)  # which holds all of the unfinished plan
            return None
        except TooLong:
            self.far.add(point)
            return None
        assert plan.seconds is not None
        peak = plan.memory.peak
        row = self.rows[point] = Row(
            point.mesh,
            point.layout,
            plan.seconds,
            peak,
            float(plan.bytes_sent),
            peak <= self.usable,
            variant=self.variant,
        )
        if self.gained is not None and self._gains(row, self._least):
            self.gained, self._least, self._pieces = len(self._tried), row, (point, Pieces(plan))
        released(plan)
        if self.planned % 16 == 0:
            gc.collect(0)
        if self._best is None or self.key(row) < self.key(self._best):
            self._best = row
        best = self._best
        of = f"{self.variant}: " * bool(self.variant)
        self.tell(f"{of}{duration(best.seconds)}, {human(best.peak)}: {best.mesh}: {best.layout}; plan {self.planned}")
        return row

    def _plan(self, point: Point) -> Plan:
        """The plan of a candidate.

        Raises:
          TooLong: it sends for much longer than the best takes, and has no name under which it is to be seen.
        """
        best, most = self._best, math.inf
        if point not in self.named and best is not None and best.fits and self.objective == "time":
            most = FAR * best.seconds
        return Plan.of(with_passes(self._walked(point, most)))

    def _walked(self, point: Point, most: float = math.inf) -> record.Plan:
        where = planned_mesh(point.mesh, self.topology)
        return walked_again(self.base, layout=Layout(point.layout), mesh=where, topology=self.topology, most=most)

    def alike(self, one: Point, other: Point) -> bool:
        """Whether two candidates on a mesh have the same seconds and peak."""
        if (same := self._class(other)) == self._class(one):
            return True
        have, row = self.rows[one], self.rows.get(self._same.get(same, other))
        if row is None:
            try:
                plan = self._plan(other)
            except (MeshparError, TooLong):
                return False
            return (plan.seconds, plan.memory.peak) == (have.seconds, have.peak)
        return (row.seconds, row.peak) == (have.seconds, have.peak)

    def legal(self, point: Point) -> bool:
        """Whether a candidate has a plan."""
        try:
            self._walked(point)
        except MeshparError:
            return False
        return True

    def _class(self, point: Point) -> Any:
        """What candidates with the same plan share: the scopes that their rules name, and the answers of the claims."""
        claims = Claims(self.base.program, Layout(point.layout), dict(point.sizes))
        return point.sizes, claims.named_scopes, claims.answers()

    def least(self, point: Point, beside: Point | None = None) -> Row:
        """What a candidate is not below.

        Args:
          beside: a candidate that was planned, on the same mesh.
        """
        assert self.base.chip is not None
        layout, sizes = Layout(point.layout), dict(point.sizes)
        seconds, peak = least_of(Claims(self.base.program, layout, sizes), self.base.chip)
        if beside is not None and beside.sizes == point.sizes:
            if self._pieces is None or self._pieces[0] != beside:
                self._pieces = beside, Pieces(Plan.of(with_passes(self._walked(beside))))
            pieces = self._pieces[1]
            left = pieces.least(Claims(pieces.program, layout, sizes))
            seconds, peak = max(seconds, left[0]), max(peak, left[1])
        return Row(point.mesh, point.layout, seconds, peak, 0.0, peak <= self.usable)

    def worth(self, point: Point) -> bool:
        """Whether a candidate may be better than the best of its name, or of all; or is short, though it does not fit."""
        name, best = self.named.get(point), self._best
        others = [row for p, row in self.rows.items() if name is None or self.named.get(p) == name]
        if best is None or not others or point in self.rows:
            return True
        least = self.least(point)
        if self.key(least) < min(map(self.key, others)):
            return True
        return not least.fits and best.fits and self.objective == "time" and least.seconds < best.seconds

    def _gains(self, row: Row, than: Row | None) -> bool:
        """Whether it is better by more than :data:`BETTER`."""
        if than is None:
            return True
        (first, figure, _), (other, old, _) = self.key(row), self.key(than)
        return first < other or (first == other and figure < (1 - BETTER) * old)

    def begins(self, at: Point) -> None:
        """A descent begins at a candidate."""
        self.gained, self._least = len(self._tried), self.rows[at]

    def lost(self, at: Point) -> Callable[[Move], bool]:
        """Which moves lost much from a candidate that fits, or does not, as this one."""
        state = self.key(self.rows[at])[0]
        return lambda move: (state, move) in self._lost

    def better(self, at: Point, moves: Iterable[tuple[Move, Point]]) -> Point:
        """The best of the candidates that some moves lead to, if it is better than another by more than :data:`BETTER`; else that
        one."""
        now, lost = self.key(self.rows[at]), self.lost(at)
        found: list[tuple[tuple[Any, ...], str, Point]] = []
        for move, point in moves:
            if lost(move):
                continue
            row = self.rows.get(point) or self.least(point, at)
            if (worth := self._gains(row, self.rows[at])) and point not in self.rows:
                row = self(point)
            elif not worth:
                self._tried.add(self._class(point))
            if row is None or (key := self.key(row))[0] > now[0] or (key[0] == now[0] and key[1] > (1 + LOST) * now[1]):
                self._lost.add((now[0], move))
            elif worth:
                found.append((key, point.layout, point))
        best = min(found, key=lambda f: f[:2])[2] if found else at
        return best if self._gains(self.rows[best], self.rows[at]) else at


def search(
    bases: Mapping[str, Plan], topology: str, *, fixed: Any = "", forbid: str | Sequence[str] = (), mesh: str | None = None,
    objective: Objective = "time", margin: float = 0.85, axes: int = 3, most: int = 400, seconds: float | None = None,
    layouts: Iterable[Any] = (), verify: int = 0, compiled: Callable[[Row, bool], str] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Search:  # fmt: skip
    """As :func:`meshpar.search`, of programs that were planned once.

    Args:
      bases: name → a plan of a program on that slice; the name is "" where there is one.
      compiled: compiles a candidate at full effort or not, and says what came out; raises CompilerError where it does not.
      tell: is told how far it is.
    """
    where = parse_topology(topology)
    if objective not in ("time", "memory"):
        raise UnsupportedError(f"objective={objective!r}: it is 'time' or 'memory'")
    if not 0 < margin <= 1:
        raise UnsupportedError(
            f"margin={margin!r}: it is the part of the memory that may be used, above 0 and at most 1"
        )
    if most < 1:
        raise UnsupportedError(f"most={most!r}: a search plans at least one candidate")
    given: list[Sizes] = meshes(where.devices, where.slices, axes)
    if mesh is not None:
        planned = planned_mesh(mesh, topology)
        given = [tuple(dict(planned.shape).items())]
    held = Layout(fixed)
    wanted = {a for r in held.rules for a in r.axes}
    given = [sizes for sizes in given if wanted <= {a for a, _ in sizes}]
    if not given:
        raise MeshError(
            f"fixed={str(held)!r} names axes that no mesh tried has", axis=", ".join(sorted(wanted)),
            fixes=["call the axes data, model, third (slice: over several slices)", "or give the mesh: mesh='…'"],
        )  # fmt: skip
    whole = forbid.replace(",", " ").split() if isinstance(forbid, str) else forbid
    until = None if seconds is None else time.monotonic() + seconds
    searched = [
        (_Evaluation(name, base, topology, objective, margin, most, until, tell), Space.of(base.program, held, whole))
        for name, base in bases.items()
    ]
    ended, refused = NOTHING, list[str]()
    interrupt: KeyboardInterrupt | None = None
    with quiet(), without_gc():
        for evaluate, space in searched:
            try:
                for text in layouts:
                    refused += _plan_yours(evaluate, Layout(text), given)
                _begin(evaluate, space, given)
                if evaluate.rows:
                    _descend(evaluate, space, given)
            except _Stop as stop:
                ended = str(stop)
            except KeyboardInterrupt as e:
                ended, interrupt = "interrupted", e
                break
        searched = [(evaluate, space) for evaluate, space in searched if evaluate.rows] or searched
        if not searched[0][0].rows:
            raise interrupt or next(iter(searched[0][0].illegal.values()))
        return _answer(searched, ended, margin, verify, compiled, list(dict.fromkeys(refused)))


def _plan_yours(evaluate: _Evaluation, layout: Layout, given: Sequence[Sizes]) -> list[str]:
    """Plan a layout of the user's own on the meshes that have its axes and no others; why it could not be, if on none.

    Raises:
      UnsupportedError: one that is resolved by cost.
    """
    if layout.resolve != "order":
        raise UnsupportedError(
            f"{layout!r}: a search reads rules in order", fixes=["give its text", "or plan it by itself with mp.plan"]
        )
    axes = {a for r in layout.rules for a in r.axes}
    points = [Point(sizes, layout.rules) for sizes in given if {a for a, _ in sizes} == axes]
    evaluate.named.update(dict.fromkeys(points, "yours"))
    rows = [evaluate(p) for p in points]
    if any(rows):
        return []
    why = str(evaluate.illegal[points[0]]).splitlines()[0] if points else "no mesh tried has its axes and no others"
    return [f"`{layout}` could not be planned: {why}"]


def _begin(evaluate: _Evaluation, space: Space, given: Sequence[Sizes]) -> None:
    """Plan the known schemes on the meshes with as many axes, the better ones with axes swapped too; where that leaves none, what
    is fixed alone."""
    for sizes in given:
        for name, point in space.presets(sizes):
            evaluate.named.setdefault(point, name.replace("_", " "))
            if evaluate.worth(point):
                evaluate(point)
    for point in list(evaluate.rows):
        for same, other in space.swapped(point):
            if (same not in evaluate.rows or evaluate.near(evaluate.rows[same])) and evaluate.worth(other):
                evaluate(other)
    if not evaluate.rows:
        evaluate(space.point(given[0], ()))


def _descend(evaluate: _Evaluation, space: Space, given: Sequence[Sizes]) -> None:
    """Descend from those that would be the best if they fitted, then from the best that do, one a mesh; then from the best found;
    then, with rules of weights alone as well, from the best found by then."""
    rows = evaluate.rows
    ranked = sorted(rows, key=lambda p: evaluate.key(rows[p]))
    best_on: dict[tuple[int, ...], Point] = {}
    for point in ranked:  # one a mesh, whatever the order of its axes
        best_on.setdefault(tuple(sorted(n for _, n in point.sizes)), point)
    shortest = rows[ranked[0]].seconds
    large = [p for p in rows if not rows[p].fits and rows[p].seconds < shortest and rows[ranked[0]].fits]
    large.sort(key=lambda p: (rows[p].seconds, rows[p].peak))
    whole = [dim for dim in space.dims if dim[1] is None]
    for start in dict.fromkeys([*large[:STARTS], *list(best_on.values())[:STARTS]]):
        if evaluate.near(rows[start]):
            with contextlib.suppress(_Enough):
                _from(evaluate, space, given, start, whole)
    for dims in (whole, [*(dim for dim in space.dims if dim[1] is not None), *whole]):
        first, most, _ = min(map(evaluate.key, rows.values()))
        ends = [p for p in rows if evaluate.key(rows[p])[:2] <= (first, (1 + BETTER) * most)]
        # of meshes over which the step is as long those of two axes leave most to be tried, three are two cut further
        end = min(ends, key=lambda p: (abs(len(p.sizes) - 2), evaluate.key(rows[p]), p.layout))
        with contextlib.suppress(_Enough):
            _from(evaluate, space, given, end, dims)


def _from(
    evaluate: _Evaluation, space: Space, given: Sequence[Sizes], at: Point, dims: Sequence[tuple[str, str | None]]
) -> None:
    """Descend from a candidate: other meshes, one of these dims after the other, those with the same axes together.

    Raises:
      _Enough: nothing was gained for long.
    """
    evaluate.begins(at)
    before = None
    while at != before:
        before = at
        if not evaluate.rows[at].fits:  # the one change that makes it fit best, whichever dim it is of
            at = evaluate.better(
                at, (move for dim in space.dims for move in space.neighbours(at, dim, evaluate.lost(at)))
            )
        at = evaluate.better(at, ((("mesh", p), p) for p in space.other_meshes(at, given)))
        for dim in dims:
            at = evaluate.better(at, space.neighbours(at, dim, evaluate.lost(at)))
        at = evaluate.better(at, space.together(at))


def _answer(
    searched: Sequence[tuple[_Evaluation, Space]], ended: str, margin: float, verify: int,
    compiled: Callable[[Row, bool], str] | None, refused: Sequence[str],
) -> Search:  # fmt: skip
    """Candidates with the same plan become one: the shortest text, then the alphabet; the best of the ties has fewest rules."""
    evaluate = searched[0][0]
    rows: dict[tuple[Any, ...], tuple[Callable[[], Row], Row]] = {}
    for each, space in searched:
        for point, found in each.rows.items():
            row = replace(found, name=each.named.get(point, ""))
            same = (row.variant, row.mesh, row.seconds, row.peak, row.sent)
            have = rows.get(same)
            if have is None or (not row.name, len(row.layout), row.layout) < (
                not have[1].name,
                len(have[1].layout),
                have[1].layout,
            ):
                rows[same] = (functools.partial(_plainer, each, space, point, row), row)
    ranked = sorted(rows.values(), key=lambda f: (evaluate.key(f[1]), f[1].layout, f[1].variant))
    least = ranked[0][1]
    known = [row for _, row in ranked if row.name and row.fits == least.fits]
    ties = [f for f in ranked if f[1].fits == least.fits and f[1].seconds <= (1 + TIE) * least.seconds]
    if evaluate.objective == "memory" or not least.fits:
        most = min([(1 + TIE) * least.peak, *((1 + SAME) * row.peak for row in known)])
        ties = [f for f in ties if f[1].peak <= most]
    else:  # estimates may be wrong: one of them that fills no more than half of the memory is safer
        most = min([(1 + TIE) * least.seconds, *((1 + SAME) * row.seconds for row in known)])
        ties = [f for f in ties if f[1].seconds <= most]
        ties = [f for f in ties if f[1].peak <= evaluate.usable / 2] or ties
    ties.sort(key=lambda f: (f[1].rules, f[1].peak if least.fits else 0.0, f[1].seconds, f[1].layout))
    choice = ties[0][0]()
    others = [row for _, row in ranked if row is not ties[0][1]]
    every = [choice, *others]
    smallest = float("inf")
    front = set()
    for row in sorted(every, key=lambda r: (r.seconds, r.peak)):
        if row.peak < smallest:
            front.add((row.variant, row.mesh, row.layout))
            smallest = row.peak
    every = [replace(r, front=(r.variant, r.mesh, r.layout) in front) for r in every]
    best = every[0]
    if verify and compiled is not None and best.fits:
        every, best = _verified(every, verify, compiled)
    kept = [r for k, r in enumerate(every) if k < 64 or r.name or r.front]
    return Search(
        evaluate.topology,
        evaluate.objective,
        margin,
        best,
        tuple(kept),
        sum(each.planned for each, _ in searched),
        ended,
        tuple(refused),
        evaluate.usable,
        {each.variant: each.base for each, _ in searched},
    )


def _plainer(evaluate: _Evaluation, space: Space, point: Point, row: Row) -> Row:
    """A candidate without the rules, and the question marks, that change nothing."""

    def same(rules: Sequence[Rule]) -> bool:
        return evaluate.alike(point, replace(point, rules=tuple(rules)))

    rules = list(point.rules)
    for rule in rules[len(space.fixed) :][::-1]:
        left = [r for r in rules if r is not rule]
        if same(left):
            rules = left
    for k in range(len(space.fixed), len(rules)):
        plain = [replace(r, optional=False) if i == k else r for i, r in enumerate(rules)]
        if same(plain) and evaluate.legal(replace(point, rules=tuple(plain))):
            rules = plain
    return replace(row, layout=str(as_layout(rules)))


def _verified(rows: list[Row], verify: int, compiled: Callable[[Row, bool], str]) -> tuple[list[Row], Row]:
    """Compile the best at full effort, those after it at the fast one; a candidate that does not compile is passed over."""
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
