"""The schedule of a step as a tree of spans, for pages and for trace viewers, and what bounds the step."""

from __future__ import annotations

import bisect
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...errors import UnsupportedError
from ..cost.buffer_roles import pass_of_kernel
from ..cost.caching import cached_on_plan
from ..cost.device_computation import computation_of
from ..cost.fusion import Computation, Kernel, line_of
from ..cost.kernel_time import KernelTime, kernel_times
from ..cost.schedule import schedules, separate_collectives
from ..cost.time import time_of, unscheduled_seconds
from ..dims import format_dims
from ..iterables import grouped_by
from ..plan.causes import name_of
from ..plan.plan import Plan
from ..plan.steps import Loop
from ..units import format_seconds
from . import facts

FORWARD, BACKWARD, OPTIMIZER = PHASES = ("forward", "backward", "optimizer")
COMPUTE, LOOP, HOST = "compute", "loop", "host link"
"""Lanes of a timeline; the others are the networks of collectives (:func:`network_of`)."""
BUBBLE = "pipeline bubble"
"""Part of a step: the idle slots of its pipelines."""
MIN_SHARE = 0.02
"""Of the step's time, of the parts that a verdict lists."""
MAX_EVENTS = 400_000
"""Of a loop in a trace. A loop with more events is one event."""
ARGUMENTS = ("dims", "axes", "bytes", "exposed", "cause", "source", "trips")
"""Attributes of a span that are arguments of its event in a trace."""


@dataclass(slots=True)
class Span:
    """A bar of a timeline: a kernel, a collective, a copy to or from the host, or a loop with all its iterations.

    Attributes:
      lane: :data:`COMPUTE`, :data:`LOOP`, :data:`HOST`, or the network of a collective.
      start, seconds: from the start of a run of its computation.
      phase: one of :data:`PHASES`.
      axes: of a collective.
      dims: of its results, or of the tensor that it sends.
      source: the user's line, and the part of the model.
      bytes: a kernel's traffic to and from HBM, or the bytes that a device sends or copies in one call.
      cause: why it is sent.
      exposed: seconds in which no kernel runs, because the next one waits for this collective or copy.
      trips, body: of a loop, the number of iterations, and one of them.
    """

    lane: str
    name: str
    start: float
    seconds: float
    phase: str
    axes: tuple[str, ...] = ()
    dims: str = ""
    source: str = ""
    bytes: float = 0.0
    cause: str = ""
    exposed: float = 0.0
    trips: int = 0
    body: Timeline | None = None

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(slots=True)
class Timeline:
    """One run of the program, or one iteration of a loop: kernels run sequentially, and hidden collectives overlap with them.

    Attributes:
      seconds: of the run.
      spans: kernels and loops in the order in which they run, then collectives and copies.
    """

    seconds: float
    spans: list[Span] = field(default_factory=list)

    def walk(self, runs: int = 1) -> Iterator[tuple[Span, int]]:
        """(span, runs in a step) of all spans at any depth."""
        for span in self.spans:
            yield span, runs
            if span.body is not None:
                yield from span.body.walk(runs * span.trips)

    def events(self, start: float = 0.0) -> Iterator[tuple[Span, float]]:
        """(span, seconds from the start of the step) of all runs of all spans, without the bodies of loops with more than
        :data:`MAX_EVENTS`."""
        for span in self.spans:
            yield span, start + span.start
            if span.body is not None and span.trips * sum(runs for _, runs in span.body.walk()) <= MAX_EVENTS:
                for k in range(span.trips):
                    yield from span.body.events(start + span.start + k * span.body.seconds)


@cached_on_plan
def timeline(plan: Plan) -> Timeline | None:
    """The timeline of a step; its end is ``plan.seconds``. Exposed time that is not in the schedule is at its end. None without a
    chip."""
    time = time_of(plan)
    if time is None:
        return None
    out = timeline_of(plan, computation_of(plan))
    for name, axes, cause, origin, seconds in unscheduled_seconds(plan):
        lane, source = network_of(plan, axes), line_of(origin)
        out.spans.append(Span(lane, name, out.seconds, seconds, OPTIMIZER, axes, "", source, 0.0, cause, seconds))
        out.seconds += seconds
    out.seconds = time.seconds
    return out


def network_of(plan: Plan, axes: tuple[str, ...]) -> str:
    """The slowest network that collectives over axes use: ``"DCN"`` if they leave a slice, ``node network"`` if a node of GPUs."""
    dims = {stage.dim for axis in axes for stage in plan.torus.get(axis, ()) if stage.size > 1}
    between, within = ("node network", "NVLink") if plan.chip is not None and plan.chip.switch else ("DCN", "ICI")
    return between if "slice" in dims else within


@cached_on_plan
def kernel_phases(plan: Plan) -> dict[Kernel, str]:
    """Kernel → its phase. The optimizer is what follows the backward pass, outside the loops of that pass."""
    kernels = list(_in_order(plan, computation_of(plan)))
    end = max((index for kernel, index in kernels if pass_of_kernel(kernel) == BACKWARD), default=math.inf)
    now, out = FORWARD, dict[Kernel, str]()
    for kernel, index in kernels:
        out[kernel] = now = OPTIMIZER if index > end else pass_of_kernel(kernel) or now
    return out


def _in_order(plan: Plan, computation: Computation, outermost: int | None = None) -> Iterator[tuple[Kernel, int]]:
    """(kernel, index of the kernel of the program that it is in) in the order of the schedule, each loop before its bodies."""
    for k, kernel in enumerate(schedules(plan)[computation].kernels):
        index = k if outermost is None else outermost
        yield kernel, index
        for body in kernel.bodies:
            yield from _in_order(plan, body, index)


def timeline_of(plan: Plan, computation: Computation) -> Timeline:
    """The timeline of a run of a computation, from its schedule; the spans of its transfers are in their order."""
    schedule, times, phases = schedules(plan)[computation], kernel_times(plan), kernel_phases(plan)
    out = Timeline(schedule.seconds)

    def written(kernel: Kernel) -> str:
        """The dims of the arrays that a kernel writes."""
        return " | ".join(dict.fromkeys(format_dims(plan.program.dims(b.value)) for b in kernel.writes))

    for kernel, begin in zip(schedule.kernels, schedule.starts, strict=True):
        now, phase, source = begin, phases[kernel], line_of(kernel.origin)
        for body in kernel.bodies:
            inner, trips = timeline_of(plan, body), 1 if body.trip_count is None else body.trip_count
            name = plan.loop_name(kernel.step) if isinstance(kernel.step, Loop) else kernel.origin_name
            loop = Span(LOOP, name, now, trips * inner.seconds, phase, source=source, trips=trips, body=inner)
            out.spans += [loop] if loop.seconds else []
            now = loop.end
        if kernel in times:
            run, name = times[kernel], kernel.origin_name
            out.spans.append(Span(COMPUTE, name, now, run.seconds, phase, (), written(kernel), source, run.bytes))
    busy = [(s.start, s.end) for s in out.spans]
    for t in schedule.transfers:
        c, step, end = t.collective, t.kernel.step, min(t.end, schedule.seconds)
        waits = 0.0 if step is not None and c not in separate_collectives(step) else _idle_seconds(busy, t.start, end)
        where = network_of(plan, c.axes), c.op, t.start, end - t.start, phases[t.kernel]
        out.spans.append(Span(*where, c.axes, c.dims, c.location, c.bytes, c.explanation, waits))
    for copy in schedule.host_copies:
        name, waits = f"copy to the {'host' if copy.to_host else 'device'}", _idle_seconds(busy, copy.start, copy.end)
        where = HOST, name, copy.start, copy.end - copy.start, phases[copy.kernel]
        source = line_of(copy.kernel.origin)
        out.spans.append(Span(*where, (), written(copy.kernel), source, copy.bytes, exposed=waits))
    return out


def _idle_seconds(busy: list[tuple[float, float]], start: float, end: float) -> float:
    """Seconds of an interval in which nothing runs; they become busy, so that no later collective is charged for them.

    Args:
      busy: disjoint intervals in order.
    """
    k, idle, now = max(0, bisect.bisect(busy, (start, math.inf)) - 1), [], start
    while now < end:
        begin, until = busy[k] if k < len(busy) else (math.inf, math.inf)
        if begin > now:
            idle.append((now, min(begin, end)))
        now, k = max(now, until), k + 1
    for interval in idle:
        bisect.insort(busy, interval)
    return math.fsum(b - a for a, b in idle)


def step_bounds(plan: Plan) -> list[tuple[str, float]]:
    """(part, seconds) of the parts of the estimated step, longest first: kernels by the unit that bounds them, the bubble of
    pipelines, and exposed communication over each group of axes. Together they are ``plan.seconds``; empty without a chip."""
    line, time = timeline(plan), time_of(plan)
    if line is None or time is None:
        return []
    parts: dict[str, float] = defaultdict(float)
    idle = max((p.bubble for p in plan.pipelines), default=0.0)
    for op in time.ops:
        seconds, bubble = op.seconds * op.count, idle if op.count > 1 else 0.0  # in loops over ticks
        parts[_unit(op)] += seconds * (1 - bubble)
        parts[BUBBLE] += seconds * bubble
    for span, runs in line.walk():
        over = f"exposed communication over {'+'.join(span.axes)}" if span.axes else "copies to and from the host"
        parts[over] += span.exposed * runs
    return sorted(((name, n) for name, n in parts.items() if n > 0), key=lambda part: -part[1])


def _unit(op: KernelTime) -> str:
    """The unit that bounds a kernel."""
    units = {"memory traffic": op.traffic_seconds, "matmuls": op.matmul_seconds, "vector units": op.vector_seconds}
    units[facts.STARTS] = op.start_seconds
    return max(units, key=units.__getitem__)


def slowest_kernel(plan: Plan) -> str:
    """The kernel that takes longest in a step, with its runs in all layers: ``the matmul in MLP/up (mlp.py:12), 3.1 ms in 32 calls,
    9 % of the step, bound by matmuls``; "" without a chip or a kernel."""
    time = time_of(plan)
    if time is None or not time.ops:
        return ""

    def place(o: KernelTime) -> tuple[str, str]:
        return (o.origin and name_of(o.origin)) or o.name, facts.location_of_op(o.origin)

    sums = ((sum(o.seconds * o.count for o in group), group) for group in grouped_by(time.ops, place))
    seconds, group = max(sums, key=lambda found: found[0])
    op, calls = group[0].origin, sum(o.count for o in group)
    name, at = (group[0].name, "") if op is None else (name_of(op), facts.location_of_op(op))
    where = f" {'in' if op and op.module else 'at'} {at}" if at else ""
    runs, share = f"{calls} call{'s' * (calls > 1)}", f"{100 * seconds / time.seconds:.0f} % of the step"
    return f"{name}{where}, {format_seconds(seconds)} in {runs}, {share}, bound by {_unit(group[0])}"


def step_notes(plan: Plan) -> list[str]:
    """The notes of a report about the estimate of a step: its parts, the slowest kernel, synchronous collectives, how exact it is;
    empty without a chip."""
    time, slowest = time_of(plan), slowest_kernel(plan)
    notes = (
        f"if nothing overlaps: {facts.parts_text(time)}" if time else "",
        f"slowest kernel: {slowest}" * bool(slowest),
        facts.blocking_collectives(plan),
        facts.calibration_text(plan),
        facts.accuracy_text(plan),
    )
    return [note for note in notes if note]


def step_shares(plan: Plan) -> list[str]:
    """``"matmuls 68 %"`` for each of :func:`step_bounds` from :data:`MIN_SHARE` of the step on, longest first."""
    bounds = step_bounds(plan)
    seconds = sum(n for _, n in bounds)
    return [f"{name} {100 * n / seconds:.0f} %" for name, n in bounds if n >= MIN_SHARE * seconds]


def trace_json(plan: Plan) -> str:
    """The timeline as a trace in the Chrome trace event format, which https://ui.perfetto.dev opens.

    Each lane is a thread. Collectives that overlap in a lane are on further threads of it.

    Raises:
      UnsupportedError: the plan has no times, since its chip is not known.
    """
    line, ends, threads = timeline(plan), defaultdict[str, list[int]](list), dict[str, int]()
    if line is None:
        text = "a trace needs times, and the chip of this plan is not known"
        raise UnsupportedError(text, fixes=["plan with topology="])
    events: list[dict[str, Any]] = []
    for span, start in sorted(line.events(), key=lambda event: event[1]):
        begin, end, row = round(1e9 * start), round(1e9 * (start + span.seconds)), 0
        if span.lane != LOOP:  # loops are nested
            free = ends[span.lane]
            row = next((k for k, until in enumerate(free) if until <= begin), len(free))
            free[row : row + 1] = [end]
        thread = threads.setdefault(f"{span.lane} ({row + 1})" if row else span.lane, len(threads) + 1)
        args = {key: value for key in ARGUMENTS if (value := getattr(span, key))}
        event = {"ph": "X", "name": span.name, "cat": span.phase, "pid": 1, "tid": thread, "args": args}
        events.append({**event, "ts": begin / 1e3, "dur": (end - begin) / 1e3})
    names = [("process_name", 0, facts.title(plan)), *(("thread_name", k, lane) for lane, k in threads.items())]
    events += [{"ph": "M", "name": kind, "pid": 1, "tid": k, "args": {"name": name}} for kind, k, name in names]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
