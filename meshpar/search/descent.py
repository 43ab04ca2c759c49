"""Search: the known schemes on every mesh, then descent from the best of them, one dim after the other; every figure is a plan's.

Coordinate descent: all axes, before and behind the other rules, are tried for one dim while the others stay, then for the next,
until nothing improves, or nothing did for long; dims that ask for the same axes also move together, two dims take each other's, and
the rules also go to other meshes. What weights have rules of their own for is tried last, from the best of all. Moves that lost
much are not tried again, nor several axes for a dim where each alone lost much. Only candidates that may be better by the pieces
of the plan that they are made from (:mod:`meshpar.search.bounds`), and by what the walk over the program sends, are planned to the
end. Nothing is random: the same program, slice and options give the same answer.

All of it runs in one process: another one would have to import JAX and trace the program again, which no pickle carries, and a
fork of a process in which JAX has threads may never end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..compat.jax import without_gc
from ..cost.caching import free_caches
from ..errors import CompilerError, MeshError, MeshparError, UnsupportedError
from ..hardware.topology import Torus, joined, parse_topology, torus_of_slices
from ..layout import Layout, Rule
from ..mesh import planned_mesh
from ..passes import plan_without_passes, with_passes
from ..plan import plan as record
from ..plan.assignment import AxisAssignment
from ..plan.collective_records import TooLong
from ..plan_api import Plan
from ..units import format_memory, format_seconds
from .answer import Objective, Search, quiet
from .bounds import Least, Pieces, least_of
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
OFF = 0.08
"""Part by which the seconds expected of a candidate on another mesh may be above those that it is to take less than. (Of 490
neighbours of candidates of Llama 3, Mixtral, DeepSeek-V3 and ResNet-50 those that were shorter by over half a percent were expected
to take at most 1.04 times the seconds of the one beside them on another mesh, and as many on the same one.)"""
PATIENCE = 40
"""After so many candidates in a row that are no gain over where it is, a descent ends."""
OPS = 2000
"""Ops of the largest program of which so many are planned; of a larger one, whose plans take longer, fewer are."""
FAR = 1.5
"""Times the seconds of the best: schemes that take longer are not descended from, nor tried with their axes swapped; what sends for
longer is planned no further. (The passes hid or saved at most 0.27 of what was to be sent, of 800 candidates.)"""


NOTHING = "no candidate near the best is better"


class _Stop(Exception):
    """No more candidates are to be planned."""


class _Enough(Exception):
    """Many plans brought nothing."""


class _NoGain(Exception):
    """By what it sends a candidate is expected to be no better than the one that it was made from."""


class _Evaluation:
    """The candidates that were planned.

    Attributes:
      base: a plan of the program, which the others are made from; ``variant``: what the program is called.
      usable: bytes of a device that may be used.
      patience: of :data:`PATIENCE` candidates how many may be planned for a program of this size.
      rows: by candidate; those with equal answers to the assignment share one.
      named: what candidates are called; illegal: the errors of those that have no plan; far: those that were planned in part;
        idle: those of them that were no better than another, by little. What a class of candidates sends is in ``_sends``.
      gained: how many candidates had been tried, and planned, when the descent had its last gain, or began; None: there is none.
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
        self.patience = max(1, PATIENCE * OPS // max(OPS, sum(1 for _ in base.program.root.walk())))
        self.rows: dict[Point, Row] = {}
        self.named: dict[Point, str] = {}
        self.illegal: dict[Point, MeshparError] = {}
        self.far: set[Point] = set()
        self.idle: set[Point] = set()
        self.planned = 0
        self._same: dict[Any, Point] = {}
        self._sends: dict[Any, float] = {}
        self._tried: set[Any] = set()
        self._pieces: dict[Point, Pieces] = {}
        self._claimed: tuple[Point, AxisAssignment] | None = None
        self._tori: dict[Sizes, Torus] = {}
        self._best: Row | None = None
        self._least: Row | None = None  # of the present descent
        self.gained: tuple[int, int] | None = None
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

    def __call__(
        self, point: Point, beside: Pieces | None = None, under: float = math.inf, most: float = math.inf
    ) -> Row | None:
        """The row of a candidate; None: it is illegal, far from the best, or no better than the one that it was made from.

        Args:
          beside: of the one that it was made from, if it is to be shorter; under: seconds that it is to take less than.
          most: seconds that it may send for.

        Raises:
          _Stop: the limit is reached.
        """
        if point in self.rows or point in self.illegal or point in self.far:
            return self.rows.get(point)
        same = self._class(point)
        if same in self._same:
            first = self._same[same]
            if first in self.rows:
                self.rows[point] = replace(self.rows[first], mesh=point.mesh, layout=point.layout)
            elif first in self.far:
                self.far.add(point)
            else:
                self.illegal[point] = self.illegal[first]
            return self.rows.get(point)
        if self.planned >= self.most:
            raise _Stop(f"stopped at {self.most} plans")
        if self.gained is not None:
            tried, planned = self.gained
            if len(self._tried) >= tried + PATIENCE or self.planned >= planned + self.patience:
                raise _Enough
        if self.until is not None and time.monotonic() > self.until and self.planned:
            raise _Stop("stopped at the time limit")
        self._same[same] = point
        self._tried.add(same)
        self.planned += 1
        try:
            plan, sent = self._plan(point, beside, under, most)
        except MeshparError as e:
            self.illegal[point] = e.with_traceback(None)  # which holds all of the unfinished plan
            return None
        except (TooLong, _NoGain) as e:
            if isinstance(e, _NoGain):
                self.idle.add(point)
            if beside is None and most == math.inf:
                self.far.add(point)
            else:
                del self._same[same]
            self._tell()
            return None
        assert plan.seconds is not None
        peak = plan.memory.peak
        row = Row(
            point.mesh,
            point.layout,
            plan.seconds,
            peak,
            float(plan.bytes_sent),
            peak <= self.usable,
            variant=self.variant,
            lowering=plan.lowering,
        )
        rival = self._rival(point)
        if self.gained is None and (rival is None or self.key(row) < self.key(self.rows[rival])):
            self._pieces[point] = Pieces(plan, sent)
        elif self.gained is not None and self._gains(row, self._least):
            self._pieces[point] = Pieces(plan, sent)
            self.gained, self._least = (len(self._tried), self.planned), row
        self.rows[point] = row
        free_caches(plan)
        if self._best is None or self.key(row) < self.key(self._best):
            self._best = row
        self._tell()
        return row

    def _tell(self) -> None:
        best, of = self._best, f"{self.variant}: " * bool(self.variant)
        if best is not None:
            self.tell(
                f"{of}{format_seconds(best.seconds)}, {format_memory(best.peak)}: {best.mesh}: {best.layout}; plan {self.planned}"
            )

    def _plan(
        self, point: Point, beside: Pieces | None = None, under: float = math.inf, most: float = math.inf
    ) -> tuple[Plan, float]:
        """The plan of a candidate, and the seconds of what the walk alone sends.

        Raises:
          TooLong: it sends for longer than ``most``; for much longer than the best takes, and has no name under which it is to be
            seen; or than it may to be not much longer than the one beside it.
          _NoGain: it sends for longer than it may to take less than ``under``.
        """
        best, gains, same = self._best, math.inf, self._class(point)
        if point not in self.named and best is not None and best.fits and self.objective == "time":
            most = min(most, FAR * best.seconds)
        if beside is not None:
            kernels = beside.least(self._assignment(point)).kernels
            off = BETTER if dict(point.sizes) == beside.assignment.sizes else OFF
            most = min(most, beside.most_sent(kernels, (1 + OFF) * (1 + LOST) * beside.seconds))
            gains = beside.most_sent(kernels, (1 + off) / (1 - BETTER) * under)
        if (sent := self._sends.get(same, 0.0)) <= min(most, gains):
            walked = self._walked(point, most)
            sent = self._sends[same] = _sent(walked)
            if sent <= gains:
                return Plan.of(with_passes(walked)), sent
        raise TooLong if sent > most else _NoGain

    def _assignment(self, point: Point) -> AxisAssignment:
        if self._claimed is None or self._claimed[0] != point:
            self._claimed = point, AxisAssignment(self.base.program, Layout(point.layout), dict(point.sizes))
        return self._claimed[1]

    def _walked(self, point: Point, most: float = math.inf) -> record.Plan:
        where = planned_mesh(point.mesh, self.topology)
        return plan_without_passes(
            self.base, layout=Layout(point.layout), mesh=where, topology=self.topology, most=most
        )

    def alike(self, one: Point, other: Point) -> bool:
        """Whether two candidates on a mesh have the same seconds and peak."""
        if (same := self._class(other)) == self._class(one):
            return True
        have, row = self.rows[one], self.rows.get(self._same.get(same, other))
        if row is None:
            try:
                walked = self._walked(other)
            except MeshparError:
                return False
            if not math.isclose(_sent(walked), self._sends.get(self._class(one), math.nan)):
                return False
            plan = Plan.of(with_passes(walked))
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
        """What candidates with the same plan share: the scopes that their rules name, and the answers of the assignment.

        Axes that lie one behind the other, and are used so wherever one of them is, are as one that lies where they do.
        """
        assignment = self._assignment(point)
        answers, names = assignment.assignments(), [a for a, _ in point.sizes]
        entries = {entry for answer in answers for entry in answer}
        runs = [[names[0]]]
        for before, axis in itertools.pairwise(names):
            if all(_follows(axis, before, entry) for entry in entries):
                runs[-1].append(axis)
            else:
                runs.append([axis])
        place = {run[0]: k for k, run in enumerate(runs)}
        short = {entry: tuple(place[a] for a in entry if a in place) for entry in entries}
        if point.sizes not in self._tori:
            self._tori[point.sizes] = torus_of_slices(dict(point.sizes), self.topology)
        torus = self._tori[point.sizes]
        stages = tuple(tuple(stage for stage, _ in joined(s for a in run for s in torus[a])) for run in runs)
        return stages, assignment.named_scopes, tuple(tuple(short[e] for e in answer) for answer in answers)

    def least(self, point: Point, beside: Pieces | None = None) -> Row:
        """What a candidate is not below, by its assignment and by the pieces of another."""
        assert self.base.chip is not None
        assignment = self._assignment(point)
        seconds, peak = least_of(assignment, self.base.chip)
        left = Least(0.0, 0.0, 0.0) if beside is None else beside.least(assignment)
        seconds, peak = max(seconds, left.seconds), max(peak, left.peak)
        return Row(point.mesh, point.layout, seconds, peak, 0.0, peak <= self.usable)

    def pieces(self, point: Point) -> Pieces:
        """Of a candidate that was planned."""
        if point not in self._pieces:
            walked = self._walked(point)
            self._pieces[point] = Pieces(Plan.of(with_passes(walked)), _sent(walked))
        return self._pieces[point]

    def shorter(self, than: Point) -> bool:
        """Whether a candidate is better than one that was planned only if it takes fewer seconds."""
        return self.objective == "time" and self.rows[than].fits

    def _rival(self, point: Point) -> Point | None:
        """The best of its name, or of all where it has none."""
        name = self.named.get(point)
        others = [p for p in self.rows if name is None or self.named.get(p) == name]
        return min(others, key=lambda p: self.key(self.rows[p]), default=None)

    def begin(self, point: Point) -> None:
        """Plan a candidate if it may be better than the best of its name, or of all; or is short, though it does not fit."""
        rival = self._rival(point)
        if rival is None or point in self.rows:
            self(point)
            return
        if point.in_one and rival.in_one:
            return  # devices are numbered otherwise, no more
        pieces, row, shorter = self.pieces(rival), self.rows[rival], self.shorter(rival)
        least, best = self.least(point, pieces), self._best
        hopeless = not least.fits and best is not None and self.key(least) > self.key(best)
        if not hopeless and (self._gains(least, row) or (shorter and self.key(least) < self.key(row))):
            self(point, pieces if shorter else None, row.seconds)
        elif (
            self.objective == "time"
            and best is not None
            and best.fits
            and not least.fits
            and least.seconds < best.seconds
        ):
            self(point)

    def _gains(self, row: Row, than: Row | None) -> bool:
        """Whether it is better by more than :data:`BETTER`."""
        if than is None:
            return True
        (first, figure, _), (other, old, _) = self.key(row), self.key(than)
        return first < other or (first == other and figure < (1 - BETTER) * old)

    def begins(self, at: Point) -> None:
        """A descent begins at a candidate."""
        self.gained, self._least = (len(self._tried), self.planned), self.rows[at]

    def lost(self, at: Point) -> Callable[[Move], bool]:
        """Which moves lost much from a candidate that fits, or does not, as this one."""
        state = self.key(self.rows[at])[0]
        return lambda move: (state, move) in self._lost

    def better(self, at: Point, moves: Iterable[tuple[Move, Point]]) -> Point:
        """The best of the candidates that some moves lead to, if it is better than another by more than :data:`BETTER`; else that
        one."""
        here = least = self.rows[at]
        now, lost, shorter = self.key(here), self.lost(at), self.shorter(at)
        best = at
        for move, point in moves:
            if lost(move):
                continue
            row = self.rows.get(point) or self.least(point, self.pieces(at))
            gains = self._gains(row, here)
            worth = gains and self.key(row) <= self.key(least)
            if worth and point not in self.rows:
                under = min((1 - BETTER) * here.seconds, least.seconds)
                # what fits as little may not be much longer either
                most = FAR * here.seconds if self.objective == "time" and not row.fits else math.inf
                row = self(point, self.pieces(at) if shorter or least.fits else None, under, most)
            elif not gains:
                self._tried.add(self._class(point))
            if row is None and point in self.idle:
                continue
            if row is None or (key := self.key(row))[0] > now[0] or (key[0] == now[0] and key[1] > (1 + LOST) * now[1]):
                self._lost.add((now[0], move))
            elif worth and self._gains(row, here) and (key, point.layout) < (self.key(least), best.layout):
                best, least = point, row
        return best


def _follows(axis: str, before: str, entry: Sequence[str]) -> bool:
    """Whether an axis stands right behind another, or neither is there."""
    if axis not in entry or before not in entry:
        return axis not in entry and before not in entry
    return entry.index(axis) == entry.index(before) + 1


def _sent(plan: record.Plan) -> float:
    """Seconds of what a plan sends, one after the other."""
    return sum((c.seconds or 0.0) * (c.count or 1) for c in plan.collectives)


def search(
    bases: Mapping[str, Plan], topology: str, *, fixed: Any = "", forbid: str | Sequence[str] = (), mesh: str | None = None,
    objective: Objective = "time", memory_fraction: float = 0.85, max_axes: int = 3, max_plans: int = 400,
    time_limit: float | None = None,
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
        raise UnsupportedError(
            f"objective={objective!r}: it is 'time' or 'memory'",
            fixes=['objective="time": the shortest step; objective="memory": the smallest peak'],
        )
    if not 0 < memory_fraction <= 1:
        raise UnsupportedError(
            f"memory_fraction={memory_fraction!r}: it is the part of the memory that may be used, above 0 and at most 1",
            fixes=["memory_fraction=0.85"],
        )
    if max_plans < 1:
        raise UnsupportedError(
            f"max_plans={max_plans!r}: a search plans at least one candidate", fixes=["max_plans=400"]
        )
    given: list[Sizes] = meshes(where.devices, where.slices, max_axes)
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
    until = None if time_limit is None else time.monotonic() + time_limit
    searched = [
        (
            _Evaluation(name, base, topology, objective, memory_fraction, max_plans, until, tell),
            Space.of(base.program, held, whole),
        )
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
        return _answer(searched, ended, memory_fraction, verify, compiled, list(dict.fromkeys(refused)))


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
    known: dict[Point, Row] = {}
    for sizes in given:
        for name, point in space.presets(sizes):
            evaluate.named.setdefault(point, name.replace("_", " "))
            known[point] = evaluate.least(point)
    for point in sorted(known, key=lambda p: evaluate.key(known[p])):
        evaluate.begin(point)
    for point in list(evaluate.rows):
        for same, other in space.swapped(point):
            if same not in evaluate.rows or evaluate.near(evaluate.rows[same]):
                evaluate.begin(other)
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
    starts: dict[tuple[float, float], Point] = {}
    for point in best_on.values():  # one of those that are the same
        same = rows[point].seconds, rows[point].peak
        starts[same] = min(starts.get(same, point), point, key=lambda p: abs(len(p.sizes) - 2))
    shortest = rows[ranked[0]].seconds
    large = [p for p in rows if not rows[p].fits and rows[p].seconds < shortest and rows[ranked[0]].fits]
    large.sort(key=lambda p: (rows[p].seconds, rows[p].peak))
    whole = [dim for dim in space.dims if dim[1] is None]
    begun, seen = set[tuple[float, float]](), set[tuple[float, float]]()  # by figures: axes may be called otherwise
    for start in dict.fromkeys([*large[:STARTS], *list(starts.values())[:STARTS]]):
        row, best = rows[start], min(rows.values(), key=evaluate.key)
        if evaluate.near(row) and (row.fits or not best.fits or row.seconds < best.seconds):
            begun.add((row.seconds, row.peak))
            with contextlib.suppress(_Enough):
                _from(evaluate, space, given, start, whole, seen)
    for dims in (whole, [*(dim for dim in space.dims if dim[1] is not None), *whole]):
        first, most, _ = min(map(evaluate.key, rows.values()))
        ends = [p for p in rows if evaluate.key(rows[p])[:2] <= (first, (1 + BETTER) * most)]
        # of meshes over which the step is as long those of two axes leave most to be tried, three are two cut further
        end = min(ends, key=lambda p: (abs(len(p.sizes) - 2), evaluate.key(rows[p]), p.layout))
        if dims is whole and (rows[end].seconds, rows[end].peak) in begun:
            continue
        with contextlib.suppress(_Enough):
            _from(evaluate, space, given, end, dims, set())


def _from(
    evaluate: _Evaluation, space: Space, given: Sequence[Sizes], at: Point, dims: Sequence[tuple[str, str | None]],
    seen: set[tuple[float, float]],
) -> None:  # fmt: skip
    """Descend from a candidate: other meshes, one of these dims after the other, those with the same axes together.

    Args:
      seen: (seconds, peak) of where other descents went on from; this one ends where it comes to one, and adds its own.

    Raises:
      _Enough: nothing was gained for long.
    """
    evaluate.begins(at)
    mine = set[tuple[float, float]]()

    def goes_on(at: Point) -> bool:
        """Whether no other descent was there; the start may be where one was."""
        here = evaluate.rows[at].seconds, evaluate.rows[at].peak
        new = not mine or here in mine or here not in seen
        mine.add(here)
        return new

    before = None
    try:
        while at != before and goes_on(at):
            before = at
            if not evaluate.rows[at].fits:  # the one change that makes it fit best, whichever dim it is of
                every = (move for dim in space.dims for move in space.neighbours(at, dim, evaluate.lost(at)))
                at = evaluate.better(at, every)
            at = evaluate.better(at, ((("mesh", p), p) for p in space.other_meshes(at, given)))
            if not goes_on(at):
                return
            for dim in dims:
                at = evaluate.better(at, space.neighbours(at, dim, evaluate.lost(at)))
            at = evaluate.better(at, space.together(at))
            at = evaluate.better(at, space.exchanged(at))
    finally:
        seen |= mine


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
