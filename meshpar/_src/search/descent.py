"""The search: known schemes on every mesh, then coordinate descent from the best of them.

Coordinate descent changes one dim at a time: all axes are tried for its rule, before and after the other rules, until no dim gives
a gain, or nothing did for long. Dims with the same axes also move together, two dims exchange their axes, and the rules are tried
on other meshes. Separate rules for parameters and optimizer state are tried last, from the best candidate. Moves that made a
candidate much worse are not repeated, and several axes are not tried for a dim for which each alone was much worse. Lower bounds
(:mod:`search.bounds`) and the communication before passes prune most candidates; the others are planned exactly. The
search is deterministic: the same program, slice and options give the same result.

It runs in one process. A second one would have to import JAX and trace the program again, since a program cannot be pickled, and a
fork of a process in which JAX has threads may deadlock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import MeshError
from ..compat.jax import without_gc
from ..hardware.topology import parse_topology
from ..layout import BETWEEN_SLICES, Layout
from ..mesh import planned_mesh
from ..plan_api import Plan
from ..program.pipeline import SCHEDULES
from .bounds import matmul_seconds
from .evaluation import Evaluation, LimitReached, OutOfPatience, Settings
from .options import SearchOptions
from .pipeline_stages import STAGE, LayerStack, staged_meshes, staged_schemes, staged_space, verdict
from .result import CONVERGED, Search, quiet
from .row import Row
from .selection import Compile, search_result
from .space import Dim, Point, Sizes, Space, meshes
from .thresholds import POLICY


def search(
    bases: Mapping[str, Plan],
    topology: str,
    options: SearchOptions,
    compiled: Compile | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Search:
    """:func:`meshpar.search` for programs that have been planned once.

    Args:
      bases: name → a plan of the program on the topology; the name is "" if there is only one program.
      compiled: compiles a candidate, at full effort or not, and returns a summary; raises CompilerError if it cannot. None: nothing
        is compiled, whatever the options say.
      tell: progress callback.
    """
    where = parse_topology(topology)
    fixed_axes = set(options.fixed.axes)
    if options.mesh is None:
        candidates = meshes(where.devices, where.slices, options.max_axes)
        keep_axes = {BETWEEN_SLICES, *fixed_axes}
    else:
        candidates = [_sizes(options.mesh, topology)]
        keep_axes = {a for a, _ in candidates[0]}
    candidates = [sizes for sizes in candidates if fixed_axes <= {a for a, _ in sizes}]
    if not candidates:
        raise MeshError(
            f"fixed={str(options.fixed)!r} names axes that no candidate mesh has",
            axis=", ".join(sorted(fixed_axes)),
            fixes=["call the axes data, model, third (slice: over several slices)", "or give the mesh: mesh='…'"],
        )
    settings = Settings(topology, options, frozenset({STAGE, *keep_axes}), tell)
    counts = {name: _stage_counts(base, settings) for name, base in bases.items()}
    start, share = time.monotonic(), 1 - POLICY.stage_plans_fraction * any(counts.values())
    limit = options.time_limit
    deadline = None if limit is None else start + share * limit
    searched = []
    for name, base in bases.items():
        space = Space.of(base.program, candidates, options.fixed, options.forbid)
        most = math.ceil((share if counts[name] else 1) * options.max_plans)
        searched.append(Evaluation(settings, name, base, space, most, deadline))
    ended, refused, limited, staged, text = CONVERGED, list[str](), list[Evaluation](), list[Evaluation](), ""
    interrupt: KeyboardInterrupt | None = None

    def explore(evaluation: Evaluation) -> None:
        """Plan the layouts of the user's own and the known schemes, and descend from them."""
        for layout in options.layouts:
            refused.extend(_plan_user_layout(evaluation, layout))
        _plan_schemes(evaluation)
        if evaluation.rows:
            _descend(evaluation)

    with quiet(), without_gc():
        for evaluation in searched:
            try:
                explore(evaluation)
            except LimitReached as reached:
                ended = str(reached)
                limited.append(evaluation)
            except KeyboardInterrupt as e:
                ended, interrupt = "interrupted", e
                break
        searched = [evaluation for evaluation in searched if evaluation.rows] or searched
        if not searched[0].rows:
            raise interrupt or searched[0].errors[0]
        if interrupt is None:
            for evaluation in searched:
                evaluation.max_plans, evaluation.deadline = options.max_plans, start + limit if limit else None
            try:
                for evaluation in searched:
                    _search_stages(evaluation, counts[evaluation.variant], staged)
                for evaluation in limited if share < 1 else ():  # with the plans and the time that stages left
                    evaluation.max_plans -= sum(e.planned for e in staged if e.variant == evaluation.variant)
                    evaluation.last_gain = None
                    explore(evaluation)
                    ended = CONVERGED
            except LimitReached as reached:
                ended = str(reached)
            except KeyboardInterrupt:
                ended = "interrupted"
            text = _verdict(searched, staged, sorted({k for left in counts.values() for k in left}), ended)
        evaluations = [*searched, *(e for e in staged if e.rows)]
        return search_result(evaluations, ended, compiled, list(dict.fromkeys(refused)), text)


def _sizes(mesh: str, topology: str) -> Sizes:
    """The axes of a mesh of the user's over a topology, with their sizes."""
    return tuple(dict(planned_mesh(mesh, topology).shape).items())


def _staged_meshes(settings: Settings, stages: int) -> list[Sizes]:
    """The candidate meshes with an axis of so many stages; of a mesh of the user's, it, if its axis ``stage`` has this size."""
    if settings.options.mesh is not None:
        sizes = _sizes(settings.options.mesh, settings.topology)
        return [sizes] if dict(sizes).get(STAGE) == stages else []
    where = parse_topology(settings.topology)
    return staged_meshes(stages, where.devices, where.slices, min(2, settings.options.max_axes))


def _stage_counts(base: Plan, settings: Settings) -> dict[int, float]:
    """Number of stages → lower bound of the step, for the numbers to search, the smallest bound first; empty: none."""
    stack, chip, devices = LayerStack.of(base.program), base.chip, parse_topology(settings.topology).devices
    given = {rule.dim for rule in settings.options.fixed.rules if rule.scope is None}
    if stack is None or chip is None or not given.union(settings.options.forbid).isdisjoint(stack.dims):
        return {}
    bounds = {
        k: matmul_seconds(base.program.traced, chip, stack.ops, stack.slowdown(k)) / devices
        for k in stack.stage_counts(devices)
        if _staged_meshes(settings, k)
    }
    return dict(sorted(bounds.items(), key=lambda item: (item[1], item[0]))[: POLICY.max_stage_counts])


def _search_stages(evaluation: Evaluation, counts: dict[int, float], staged: list[Evaluation]) -> None:
    """Search the layouts of a program with stages, after those without; evaluations with rows are appended to ``staged``.

    Numbers of stages are tried in the order of the lower bounds of their steps, until none may be better than the best candidate;
    the first one is always tried, so that the result can compare the two. Of the best candidate, the other schedules, weights that
    are gathered once a step, and several rounds are planned as well.

    Args:
      counts: of :func:`_stage_counts`; the numbers that were tried, or need not be, are removed.

    Raises:
      LimitReached: the limit of plans or of time is reached.
    """
    stack, settings = LayerStack.of(evaluation.space.program), evaluation.settings
    best, own = evaluation.best, list[Evaluation]()

    def staged_evaluation(base: Plan, among: Sequence[Sizes], rounds: int = 1) -> Evaluation | None:
        """The evaluation of the layouts on meshes with stages, without candidates; None: the layers cannot be stages."""
        assert stack is not None
        space = staged_space(base, stack, settings, among, rounds)
        left = evaluation.max_plans - evaluation.planned - sum(e.planned for e in own)
        return space and Evaluation(settings, evaluation.variant, base, space, left, evaluation.deadline, best)

    for k, bound in [*counts.items()]:
        if own and best.fits and settings.options.objective == "time" and bound >= best.seconds:
            counts.clear()
            break
        tried = staged_evaluation(evaluation.base, _staged_meshes(settings, k))
        if tried is None:
            del counts[k]
            continue
        try:
            ranks = {point: tried.rank(tried.lower_bound(point)) for point in staged_schemes(tried.space)}
            for point in sorted(ranks, key=ranks.__getitem__):
                tried.plan_scheme(point)
            del counts[k]
        finally:
            if tried.rows:
                own.append(tried)
                staged.append(tried)
                best = min(best, tried.best, key=tried.rank)
    if not own or stack is None:
        return
    other = min(own, key=lambda e: min(map(e.rank, e.rows.values())))
    row = other.best
    if row.fits < best.fits or (row.fits == best.fits and row.seconds > POLICY.max_stage_ratio * best.seconds):
        return
    _descend_from(other, other.best_point, other.space.shared, set(), POLICY.stage_patience)

    def better(base: Plan, rounds: int) -> Evaluation | None:
        """The evaluation of the best candidate in so many rounds, with the options of ``base``; None: it is no better."""
        start = other.best_point
        again = staged_evaluation(base, [start.sizes], rounds)
        if again is None:
            return None
        own.append(again)
        staged.append(again)
        again.plan(replace(start, rules=(*again.space.fixed, *other.space.free(start))))
        return again if again.rows and other.is_gain(again.best, other.best) else None

    for changes in [{"gather": "step"}, *({"schedule": name} for name in SCHEDULES)]:
        if any(getattr(other.base.request, name) != value for name, value in changes.items()):
            base = replace(other.base, request=replace(other.base.request, **changes))
            other = better(base, 1) or other
    for rounds in stack.rounds(dict(other.best_point.sizes)[STAGE]):
        again = better(other.base, rounds)
        if again is None:
            break
        other = again


def _verdict(searched: Sequence[Evaluation], staged: Sequence[Evaluation], untried: Sequence[int], ended: str) -> str:
    """Whether stages pay, and the numbers of stages that were not tried because the search ended, as text; "" without either."""
    texts = []
    if any(e.rows for e in staged):
        rank = searched[0].rank
        without, best = (min((row for e in of for row in e.rows.values()), key=rank) for of in (searched, staged))
        texts.append(verdict(without, best))
    if untried:
        counts = " or ".join(map(str, untried))
        texts.append(f"not all layouts with {counts} stages were tried: {ended}")
    return "; ".join(texts)


def _plan_user_layout(evaluation: Evaluation, layout: Layout) -> list[str]:
    """Plan a layout of the user's own on the meshes with exactly its axes; returns a message if none of them has a plan."""
    among = [sizes for sizes in evaluation.space.meshes if {a for a, _ in sizes} == set(layout.axes)]
    points = [Point(sizes, layout.rules) for sizes in among]
    evaluation.names.update(dict.fromkeys(points, "yours"))
    rows = [evaluation.plan(p) for p in points]
    if any(rows):
        return []
    why = str(evaluation.error_of(points[0])).splitlines()[0] if points else "no candidate mesh has exactly its axes"
    return [f"`{layout}` could not be planned: {why}"]


def _plan_schemes(evaluation: Evaluation) -> None:
    """Plan the known schemes on the meshes with as many axes, the better ones also with axes swapped.

    If none of them has a plan, the fixed rules alone.
    """
    space, bounds = evaluation.space, dict[Point, Row]()
    for sizes in space.meshes:
        for name, point in space.presets(sizes):
            evaluation.names.setdefault(point, name)
            bounds[point] = evaluation.lower_bound(point)
    several = space.meshes[0][0][0] == BETWEEN_SLICES  # HSDP, the default layout over several slices, comes first
    for point in sorted(bounds, key=lambda p: (several and evaluation.names[p] != "hsdp", evaluation.rank(bounds[p]))):
        evaluation.plan_scheme(point)
    for point in list(evaluation.rows):
        for same, other in space.swapped(point):
            if same not in evaluation.rows or evaluation.is_near_best(evaluation.rows[same]):
                evaluation.plan_scheme(other)
    if not evaluation.rows:
        evaluation.plan(space.point(space.meshes[0], ()))


def _descend(evaluation: Evaluation) -> None:
    """Descend from the shortest schemes that do not fit, from the best that fit, and from the best candidate of these descents.

    The descent from the best candidate also has separate rules for parameters and optimizer state. A last one starts from the
    candidate with the fewest rules that ties with the best.
    """
    rows, shared = evaluation.rows, evaluation.space.shared
    started, visited, starts = set[tuple[float, float]](), set[tuple[float, float]](), list[Point]()
    for start in _starts(evaluation):
        row, best = rows[start], evaluation.best
        if evaluation.is_near_best(row) and (row.fits or not best.fits or row.seconds < best.seconds):
            started.add(row.cost)
            starts.append(start)
            _descend_from(evaluation, start, shared, visited)
    _descend_from_ties(evaluation, starts)
    scoped = [dim for dim in evaluation.space.dims if dim[1] is not None]
    for dims in (shared, [*scoped, *shared]):
        best = evaluation.ties(POLICY.min_gain_fraction)
        # of equally good meshes the one with two axes: one axis leaves little to vary, three are two that are divided further
        start = min(best, key=lambda p: (abs(len(p.sizes) - 2), evaluation.rank(rows[p]), p.layout))
        if dims is shared and rows[start].cost in started:
            continue
        started.add(rows[start].cost)
        _descend_from(evaluation, start, dims, set())
    # of the candidates that tie with the best, the one with the fewest rules: the result prefers it
    ties = evaluation.ties(POLICY.tie_fraction)
    start = min(ties, key=lambda p: (len(p.rules), evaluation.rank(rows[p]), p.layout))
    if rows[start].cost not in started:
        _descend_from(evaluation, start, shared, set())


def _descend_from_ties(evaluation: Evaluation, starts: Sequence[Point]) -> None:
    """Descend from candidates that are as good as the best, and shard other dims or have more axes.

    A descent takes gains only. It cannot pass through a candidate that is no better, from which others are: with `expert` sharded
    in place of `mlp`, or with the same shards by three axes in place of two, of which a rule may then have one.
    """
    rows = evaluation.rows

    def same_plan(point: Point) -> tuple[Any, ...]:
        return rows[point].cost, len(point.sizes)

    def dims_of(point: Point) -> frozenset[str]:
        return frozenset(rule.dim for rule in point.rules)

    plans, kinds = {same_plan(p) for p in starts}, {dims_of(p) for p in starts}
    for _ in range(POLICY.max_ties):
        ties = evaluation.ties(POLICY.tie_fraction)
        others = [p for p in ties if same_plan(p) not in plans and (dims_of(p) not in kinds or len(p.sizes) > 2)]
        if not others:
            return
        start = min(others, key=lambda p: (dims_of(p) in kinds, evaluation.rank(rows[p]), p.layout))
        plans.add(same_plan(start))
        kinds.add(dims_of(start))
        patience = min(evaluation.patience, POLICY.tie_patience)
        _descend_from(evaluation, start, evaluation.space.shared, set(), patience)


def _starts(evaluation: Evaluation) -> list[Point]:
    """The shortest candidates that do not fit, then the best of every mesh (whatever the order of its axes)."""
    rows = evaluation.rows
    ranked = sorted(rows, key=lambda p: evaluation.rank(rows[p]))
    best_on: dict[tuple[int, ...], Point] = {}
    for point in ranked:
        best_on.setdefault(tuple(sorted(n for _, n in point.sizes)), point)
    distinct: dict[tuple[float, float], Point] = {}
    for point in best_on.values():  # of candidates with equal cost the one whose mesh is closest to two axes
        cost = rows[point].cost
        distinct[cost] = min(distinct.get(cost, point), point, key=lambda p: abs(len(p.sizes) - 2))
    best = rows[ranked[0]]
    large = [p for p in rows if not rows[p].fits and rows[p].seconds < best.seconds and best.fits]
    large.sort(key=lambda p: rows[p].cost)
    return list(dict.fromkeys([*large[: POLICY.max_starts], *list(distinct.values())[: POLICY.max_starts]]))


def _descend_from(
    evaluation: Evaluation,
    at: Point,
    dims: Sequence[Dim],
    visited: set[tuple[float, float]],
    patience: int | None = None,
) -> None:
    """Descend from a candidate: other meshes, each of the dims, then dims with the same axes together, until nothing changes, or
    nothing was gained for long.

    Args:
      visited: costs at which other descents were; this one stops at such a cost, and adds its own.
      patience: number of plans without a gain after which it ends; default: the evaluation's.
    """
    evaluation.start_descent(at, patience)
    space, own = evaluation.space, set[tuple[float, float]]()

    def is_new(at: Point) -> bool:
        """Whether no other descent was at this cost; a start may be at one."""
        cost = evaluation.rows[at].cost
        new = not own or cost in own or cost not in visited
        own.add(cost)
        return new

    before = None
    try:
        while at != before and is_new(at):
            before = at
            if not evaluation.rows[at].fits:  # the single change, of any dim, that reduces the peak most
                every = (move for dim in space.dims for move in space.neighbours(at, dim, evaluation.rejected(at)))
                at = evaluation.best_neighbour(at, every)
            at = evaluation.best_neighbour(at, ((("mesh", p), p) for p in space.other_meshes(at)))
            if not is_new(at):
                return
            for dim in dims:
                at = evaluation.best_neighbour(at, space.neighbours(at, dim, evaluation.rejected(at)))
            at = evaluation.best_neighbour(at, space.together(at))
            at = evaluation.best_neighbour(at, space.exchanged(at))
    except OutOfPatience:
        pass
    finally:
        visited |= own
