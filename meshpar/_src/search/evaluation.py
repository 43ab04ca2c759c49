"""Evaluation of candidates: bounds first, then exact plans of those that may be better."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import MeshparError
from ..cost.device_computation import free_caches
from ..hardware.topology import Torus, joined, torus_of_slices
from ..layout import Layout
from ..mesh import planned_mesh
from ..passes import plan_without_passes, with_passes
from ..plan.assignment import AxisAssignment
from ..plan.checks import sizes_of_results
from ..plan.collective_records import TooLong
from ..plan.shard_shapes import shard_count
from ..plan_api import Plan
from ..progress import Counted
from ..units import format_memory, format_seconds
from .bounds import Breakdown, LowerBound, lower_bounds
from .options import SearchOptions
from .row import Row
from .space import Move, Point, Sizes, Space, as_layout, renamed
from .thresholds import POLICY


class LimitReached(Exception):
    """The limit of plans or the time limit is reached."""


class OutOfPatience(Exception):
    """Many candidates in a row gave a descent no gain."""


class _NoGain(Exception):
    """By its communication a candidate is expected to be no better than its parent."""


@dataclass(frozen=True)
class Settings:
    """What all evaluations of a search have in common.

    Attributes:
      topology: ``"v5p:8x8x8"``.
      options: of the search; an evaluation may have a part of ``options.max_plans``.
      keep_axes: axes whose names the caller gave, which results do not rename.
      progress: receives progress texts.
    """

    topology: str
    options: SearchOptions = field(default_factory=SearchOptions)
    keep_axes: frozenset[str] = frozenset()
    progress: Callable[[str], None] = lambda text: None


@dataclass(eq=False)
class Evaluation:
    """The evaluated candidates of one program. Candidates with equal assignments of axes share one plan.

    Attributes:
      base: a plan of the program, from which candidates are replanned.
      variant: the name of the program.
      space: the candidates; its program is rewritten for their stages if they have pipelines.
      max_plans: the largest number of plans.
      deadline: ``time.monotonic()`` after which no plan is begun; None: no limit.
      rival: the best candidate of another evaluation: candidates far from it are not planned.
      usable: bytes of a device that a peak may take.
      patience: number of plans without a gain after which a descent ends.
      rows: the candidates that were planned.
      names: names of known schemes and of the user's layouts.
      planned: number of plans.
      last_gain: (candidates, plans) tried when the descent had its last gain, or started, and the row; None outside a descent.
    """

    settings: Settings
    variant: str
    base: Plan
    space: Space
    max_plans: int
    deadline: float | None = None
    rival: Row | None = None
    rows: dict[Point, Row] = field(default_factory=dict, init=False)
    names: dict[Point, str] = field(default_factory=dict, init=False)
    planned: int = field(default=0, init=False)
    last_gain: tuple[int, int, Row] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert self.base.chip is not None
        self.chip, self.objective = self.base.chip, self.settings.options.objective
        self.usable = self.settings.options.memory_fraction * self.chip.per_device().hbm
        ops = sum(1 for _ in self.space.program.root.walk())
        self.patience = max(1, POLICY.patience_candidates * POLICY.patience_ops // max(POLICY.patience_ops, ops))
        self._patience = self.patience
        # By the key of equivalent candidates: the row, the error, or None for one that communicates too long under any limit.
        self._results: dict[Any, Row | MeshparError | None] = {}
        self._comm_seconds: dict[Any, float] = {}
        self._tried: set[Any] = set()
        self._near: set[Point] = set()  # not planned to the end: no better than their parent by a small margin
        self._breakdowns: dict[Point, Breakdown | None] = {}
        self._last_assignment: tuple[Point, AxisAssignment] | None = None
        self._tori: dict[Sizes, Torus] = {}
        self._best, self._best_point = self.rival, None
        self._rejected: set[tuple[Any, Move]] = set()

    # -- comparison

    def rank(self, row: Row) -> tuple[int, float, float]:
        """:meth:`Row.rank` by the objective of the search."""
        return row.rank(self.settings.options.objective)

    @property
    def best(self) -> Row:
        """The best candidate that was planned."""
        return self.rows[self.best_point]

    @property
    def best_point(self) -> Point:
        """The best candidate that was planned, as a point of the search."""
        return min(self.rows, key=lambda p: (self.rank(self.rows[p]), p.layout))

    def ties(self, fraction: float) -> list[Point]:
        """The candidates whose objective is at most by this fraction worse than the best one's, and that fit if it fits."""
        fits, metric, _ = self.rank(self.best)
        return [p for p, row in self.rows.items() if self.rank(row)[:2] <= (fits, (1 + fraction) * metric)]

    def is_near_best(self, row: Row) -> bool:
        """Whether its objective is at most ``POLICY.max_time_ratio`` times the best."""
        best = self._best
        if best is None or (best.fits and self.objective == "time"):
            return best is None or row.seconds <= POLICY.max_time_ratio * best.seconds
        return row.peak <= POLICY.max_time_ratio * best.peak

    def is_gain(self, row: Row, than: Row) -> bool:
        """Whether a row is better than another by more than ``POLICY.min_gain_fraction``."""
        fits, metric, _ = self.rank(than)
        return self.rank(row)[:2] < (fits, (1 - POLICY.min_gain_fraction) * metric)

    def only_time_counts(self, point: Point) -> bool:
        """Whether a candidate is better than a planned one only if its step is shorter."""
        return self.objective == "time" and self.rows[point].fits

    def equal_cost(self, one: Point, other: Point) -> bool:
        """Whether two candidates on the same mesh have the same step time and peak; ``one`` has been planned."""
        if self._equivalence_key(other) == self._equivalence_key(one):
            return True
        row = self.known(other) or self.uncounted(other)
        return row is not None and row.cost == self.rows[one].cost

    def known(self, point: Point) -> Row | None:
        """The row of a candidate that was planned, or that has the same assignment as a planned one; else None."""
        row = self._results.get(self._equivalence_key(point))
        return replace(row, mesh=point.mesh, layout=point.layout) if isinstance(row, Row) else None

    @property
    def planned_rows(self) -> list[Row]:
        """One row of each plan."""
        return [row for row in self._results.values() if isinstance(row, Row)]

    @property
    def errors(self) -> list[MeshparError]:
        """The errors of the candidates that have no plan, in the order in which they were tried."""
        return [error for error in self._results.values() if isinstance(error, MeshparError)]

    def error_of(self, point: Point) -> MeshparError | None:
        """Why a candidate has no plan; None: it has one, or was not planned to the end."""
        error = self._results.get(self._equivalence_key(point))
        return error if isinstance(error, MeshparError) else None

    def legal_plan(self, point: Point) -> Plan | None:
        """The plan of a candidate before passes; None: it has none."""
        with contextlib.suppress(MeshparError):
            return self._plan_without_passes(point)
        return None

    def uncounted(self, point: Point) -> Row | None:
        """The row of a candidate that is planned outside of the limits of the search, and not recorded; None: it has no plan."""
        plan = self.legal_plan(point)
        return plan and self._row(point, Plan.of(with_passes(plan)))

    # -- plans

    def plan(
        self,
        point: Point,
        parent: Breakdown | None = None,
        below_seconds: float = math.inf,
        max_comm_seconds: float = math.inf,
    ) -> Row | None:
        """The row of a candidate; None: it is illegal, far from the best, or no better than its parent.

        Args:
          parent: the breakdown of the candidate that it derives from, if it must be shorter than that.
          below_seconds: the step time that it has to beat.
          max_comm_seconds: the largest time of its communication.

        Raises:
          LimitReached: the limit of plans or of time is reached.
          OutOfPatience: the descent had no gain for too long.
        """
        if point in self.rows:
            return self.rows[point]
        key = self._equivalence_key(point)
        if key not in self._results:
            self._check_limits()
            self._tried.add(key)
            self.planned += 1
            try:
                plan, sent = self._plan_exactly(point, parent, below_seconds, max_comm_seconds)
            except MeshparError as e:
                self._results[key] = e.with_traceback(None)  # a traceback refers to the unfinished plan
            except (TooLong, _NoGain) as e:
                if isinstance(e, _NoGain):
                    self._near.add(point)
                if parent is None and max_comm_seconds == math.inf:
                    self._results[key] = None
                self._report_progress()
            else:
                self._record(key, point, plan, sent)
        row = self._results.get(key)
        if isinstance(row, Row):
            self.rows[point] = replace(row, mesh=point.mesh, layout=point.layout)
        return self.rows.get(point)

    def _check_limits(self) -> None:
        """Raises LimitReached or OutOfPatience if no further candidate may be planned."""
        if self.planned >= self.max_plans:
            raise LimitReached(f"stopped at {self.settings.options.max_plans} plans")
        if self.last_gain is not None:
            tried, planned, _ = self.last_gain
            if len(self._tried) >= tried + POLICY.patience_candidates or self.planned >= planned + self._patience:
                raise OutOfPatience
        if self.deadline is not None and time.monotonic() > self.deadline and self.planned:
            raise LimitReached("stopped at the time limit")

    def _record(self, key: Any, point: Point, plan: Plan, sent: float) -> None:
        """Store the row of a plan, and its breakdown if the search may continue from it; free its caches."""
        row = self._row(point, plan)
        rival = self._rival(point)
        if not self._has_breakdown(plan):
            self._breakdowns[point] = None
        elif self.last_gain is None and (rival is None or self.rank(row) < self.rank(self.rows[rival])):
            self._breakdowns[point] = Breakdown(plan, sent)
        elif self.last_gain is not None and self.is_gain(row, self.last_gain[2]):
            self._breakdowns[point] = Breakdown(plan, sent)
            self.last_gain = len(self._tried), self.planned, row
        self.rows[point] = self._results[key] = row
        free_caches(plan)
        if self._best is None or self.rank(row) < self.rank(self._best):
            self._best, self._best_point = row, point
        self._report_progress()

    def _row(self, point: Point, plan: Plan) -> Row:
        """The numbers of a candidate's plan."""
        assert plan.seconds is not None
        assert plan.time is not None
        peak = plan.memory.peak
        return Row(
            point.mesh,
            point.layout,
            plan.seconds,
            peak,
            float(plan.bytes_sent),
            peak <= self.usable,
            variant=self.variant,
            lowering=plan.lowering,
            schedule=plan.request.schedule if plan.pipelines else "",
            gather=plan.pipelines[0].gather if plan.pipelines else "",
            mfu=plan.time.mfu,
            undivided=self._undivided(point),
        )

    def _undivided(self, point: Point) -> str:
        """As :attr:`Row.undivided`."""
        assignment, sizes, program = self._assignment(point), dict(point.sizes), self.space.program
        for value in program.inputs:
            for rule, i in assignment.unused_optional_rules(value):
                shards, name, size = shard_count(rule.axes, sizes), program.dims(value)[i], value.shape[i]
                if program.cached(sizes_of_results).get(name, size) % shards:  # else only the input is left unsharded
                    return f"{name} of {size} is not divisible by {shards}"
        return ""

    def _report_progress(self) -> None:
        """Report the number of plans, and the cost, mesh and layout of the best."""
        best, point = self._best, self._best_point
        if best is not None and point is not None:
            point = renamed(point, self.settings.keep_axes)
            layout = as_layout(replace(r, optional=False) for r in point.rules)
            cost = f"{format_seconds(best.seconds)}, {format_memory(best.peak)}"
            program = f"{self.variant}: " if self.variant else ""
            text = f"{program}plan {self.planned}, {cost}: {point.mesh}: {layout}"
            self.settings.progress(Counted(text, self.planned, self.max_plans))

    def _plan_exactly(
        self, point: Point, parent: Breakdown | None, below_seconds: float, max_comm_seconds: float
    ) -> tuple[Plan, float]:
        """(the plan of a candidate, the seconds of its communication before passes).

        Raises:
          TooLong: its communication takes longer than ``max_comm_seconds``; than the best step by far, if it has no name under
            which results list it; or than is possible for a step not much longer than its parent's.
          _NoGain: its communication takes longer than is possible for a step below ``below_seconds``.
        """
        best, gains, key = self._best, math.inf, self._equivalence_key(point)
        if point not in self.names and best is not None and best.fits and self.objective == "time":
            max_comm_seconds = min(max_comm_seconds, POLICY.max_time_ratio * best.seconds)
        if parent is not None:
            error, gain = POLICY.other_mesh_error_fraction, POLICY.min_gain_fraction
            kernels = parent.lower_bound(self._assignment(point)).kernels
            slack = gain if dict(point.sizes) == parent.assignment.sizes else error
            longest = (1 + error) * (1 + POLICY.rejected_loss_fraction) * parent.seconds
            max_comm_seconds = min(max_comm_seconds, parent.max_comm_seconds(kernels, longest))
            gains = parent.max_comm_seconds(kernels, (1 + slack) / (1 - gain) * below_seconds)
        if (sent := self._comm_seconds.get(key, 0.0)) <= min(max_comm_seconds, gains):
            plan = self._plan_without_passes(point, max_comm_seconds)
            sent = self._comm_seconds[key] = plan.comm_seconds
            if sent <= gains:
                return Plan.of(with_passes(plan)), sent
        raise TooLong if sent > max_comm_seconds else _NoGain

    def _assignment(self, point: Point) -> AxisAssignment:
        if self._last_assignment is None or self._last_assignment[0] != point:
            self._last_assignment = point, AxisAssignment(self.space.program, Layout(point.layout), dict(point.sizes))
        return self._last_assignment[1]

    def _plan_without_passes(self, point: Point, max_comm_seconds: float = math.inf) -> Plan:
        topology = self.settings.topology
        mesh, layout = planned_mesh(point.mesh, topology), Layout(point.layout)
        request = replace(self.base.request, layout=layout, mesh=mesh, topology=topology)
        return Plan.of(plan_without_passes(self.base, request, max_comm_seconds))

    def _equivalence_key(self, point: Point) -> Any:
        """Equal for candidates with the same plan: the scopes of their rules and the axes of every value and op.

        Adjacent axes that are always used together are equivalent to one axis over the same devices.
        """
        assignment = self._assignment(point)
        groups, names = assignment.axes, [a for a, _ in point.sizes]
        entries = {entry for group in groups for entry in group}
        runs = [[names[0]]]
        for before, axis in itertools.pairwise(names):
            if not all(used_together(before, axis, entry) for entry in entries):
                runs.append([])
            runs[-1].append(axis)
        number = {run[0]: k for k, run in enumerate(runs)}
        short = {entry: tuple(number[a] for a in entry if a in number) for entry in entries}
        if point.sizes not in self._tori:
            self._tori[point.sizes] = torus_of_slices(dict(point.sizes), self.settings.topology)
        torus = self._tori[point.sizes]
        stages = tuple(tuple(stage for stage, _ in joined(s for a in run for s in torus[a])) for run in runs)
        return stages, assignment.named_scopes, tuple(tuple(short[e] for e in group) for group in groups)

    # -- bounds

    def lower_bound(self, point: Point, parent: Breakdown | None = None) -> Row:
        """A row of lower bounds on step time and peak, from the assignment and, if given, from the plan of another candidate."""
        assignment = self._assignment(point)
        seconds, peak = lower_bounds(assignment, self.chip)
        bound = LowerBound(0.0, 0.0, 0.0) if parent is None else parent.lower_bound(assignment)
        seconds, peak = max(seconds, bound.seconds), max(peak, bound.peak)
        return Row(point.mesh, point.layout, seconds, peak, 0.0, peak <= self.usable)

    def breakdown(self, point: Point) -> Breakdown | None:
        """The breakdown of a candidate that has been planned; None: its program is rewritten otherwise."""
        if point not in self._breakdowns:
            plan = self._plan_without_passes(point)
            has = self._has_breakdown(plan)
            self._breakdowns[point] = Breakdown(Plan.of(with_passes(plan)), plan.comm_seconds) if has else None
        return self._breakdowns[point]

    def _has_breakdown(self, plan: Plan) -> bool:
        """Whether bounds can be derived from a plan: it is a plan of the program of the candidates, not of a rewritten one, such
        as for a split that does not divide."""
        return plan.program is self.space.program

    def _rival(self, point: Point) -> Point | None:
        """The best candidate of the same name; of all if the candidate has no name."""
        name = self.names.get(point)
        others = [p for p in self.rows if name is None or self.names.get(p) == name]
        return min(others, key=lambda p: self.rank(self.rows[p]), default=None)

    def plan_scheme(self, point: Point) -> None:
        """Plan a known scheme if, by its bounds, it may be better than its rival, or is shorter than the best but does not fit."""
        rival = self._rival(point)
        if rival is None or point in self.rows:
            self.plan(point)
            return
        if point.uses_all_axes and rival.uses_all_axes:
            return  # they differ only in the order of devices
        parent, row, only_time = self.breakdown(rival), self.rows[rival], self.only_time_counts(rival)
        bound, best = self.lower_bound(point, parent), self._best
        hopeless = not bound.fits and best is not None and self.rank(bound) > self.rank(best)
        if not hopeless and (self.is_gain(bound, row) or (only_time and self.rank(bound) < self.rank(row))):
            self.plan(point, parent if only_time else None, row.seconds)
        elif not bound.fits and self.objective == "time" and best and best.fits and bound.seconds < best.seconds:
            self.plan(point)

    # -- descent

    def start_descent(self, at: Point, patience: int | None = None) -> None:
        """Start counting candidates without a gain; ``patience``: in place of the attribute."""
        self.last_gain = len(self._tried), self.planned, self.rows[at]
        self._patience = self.patience if patience is None else patience

    def rejected(self, at: Point) -> Callable[[Move], bool]:
        """A predicate: whether a move made another candidate much worse that fits, or does not fit, as this one."""
        fits = self.rank(self.rows[at])[0]
        return lambda move: (fits, move) in self._rejected

    def best_neighbour(self, at: Point, moves: Iterable[tuple[Move, Point]]) -> Point:
        """The best of the candidates that the moves lead to, if it is a gain; else ``at``."""
        row_at = best_row = self.rows[at]
        rank_at, rejected, only_time = self.rank(row_at), self.rejected(at), self.only_time_counts(at)
        best = at
        for move, point in moves:
            if rejected(move):
                continue
            row = self.rows.get(point) or self.lower_bound(point, self.breakdown(at))
            gains = self.is_gain(row, row_at)
            worth = gains and self.rank(row) <= self.rank(best_row)
            if worth and point not in self.rows:
                below = min((1 - POLICY.min_gain_fraction) * row_at.seconds, best_row.seconds)
                # a candidate that does not fit either may not be much longer
                limited = self.objective == "time" and not row.fits
                longest = POLICY.max_time_ratio * row_at.seconds if limited else math.inf
                row = self.plan(point, self.breakdown(at) if only_time or best_row.fits else None, below, longest)
            elif not gains:
                self._tried.add(self._equivalence_key(point))
            if row is None and point in self._near:
                continue
            if row is None or self.rank(row)[:2] > (rank_at[0], (1 + POLICY.rejected_loss_fraction) * rank_at[1]):
                self._rejected.add((rank_at[0], move))
            elif worth and self.is_gain(row, row_at):
                best, best_row = min((best, best_row), (point, row), key=lambda c: (self.rank(c[1]), c[0].layout))
        return best


def used_together(before: str, axis: str, entry: Sequence[str]) -> bool:
    """Whether an entry has ``axis`` right after ``before``, or neither of them."""
    if axis not in entry or before not in entry:
        return axis not in entry and before not in entry
    return entry.index(axis) == entry.index(before) + 1
