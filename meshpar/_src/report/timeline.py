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
from ..cost.fusion import Computation, Kernel, line_of
from ..cost.kernel_time import kernel_times
from ..cost.kernels import computation_of
from ..cost.schedule import schedules, separate_collectives
from ..cost.time import time_of, unscheduled_seconds
from ..dims import format_dims
from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..plan.steps import Loop
from . import facts

FORWARD, BACKWARD, OPTIMIZER = PHASES = ("forward", "backward", "optimizer")
COMPUTE, LOOP, HOST = "compute", "loop", "host link"
"""Lanes of a timeline; the others are the networks of collectives (:func:`network_of`)."""
MAX_EVENTS = 400_000
"""Of a trace. A loop with more events is one event of it."""


@dataclass(slots=True)
class Span:
    """A bar of a timeline: a kernel, a collective, a copy to or from the host, or a loop with all its iterations.

    Attributes:
      lane: :data:`COMPUTE`, :data:`LOOP`, :data:`HOST`, or the network of a collective.
      start, seconds: from the start of a run of its computation.
      phase: one of :data:`PHASES`.
      detail: dims of its results, or of the tensor that it sends.
      exposed: seconds in which no kernel runs, because the next one waits for this collective or copy.
      bytes: a kernel's traffic to and from HBM, or the bytes that a device sends or copies in one call.
      cause: why it is sent.
      trips, body: of a loop, the number of iterations, and one of them.
    """

    lane: str
    name: str
    start: float
    seconds: float
    phase: str
    axes: tuple[str, ...] = ()
    detail: str = ""
    source: str = ""
    exposed: float = 0.0
    bytes: float = 0.0
    cause: str = ""
    trips: int = 1
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
        """(span, seconds from the start of the step) of all runs of all spans; the body of a loop with more than
        :data:`MAX_EVENTS` is left out."""
        for span in self.spans:
            yield span, start + span.start
            if span.body is not None and span.trips * sum(runs for _, runs in span.body.walk()) <= MAX_EVENTS:
                for k in range(span.trips):
                    yield from span.body.events(start + span.start + k * span.body.seconds)


@cached_on_plan
def timeline(plan: Plan) -> Timeline | None:
    """The timeline of a step; its end is ``plan.seconds``. None without a chip."""
    time = time_of(plan)
    if time is None:
        return None
    out = _timeline(plan, computation_of(plan), kernel_phases(plan))

    def add(name: str, axes: tuple[str, ...], seconds: float, detail: str, cause: str, source: str) -> None:
        """Add exposed seconds at the end."""
        last = out.spans[-1].phase if out.spans else FORWARD
        lane = network_of(plan, axes)
        out.spans.append(Span(lane, name, out.seconds, seconds, last, axes, detail, source, seconds, 0.0, cause))
        out.seconds += seconds

    for of, seconds in unscheduled_seconds(plan):
        if seconds and isinstance(of, Collective):
            add(of.op, of.axes, seconds, of.dims, of.explanation, of.location)
        elif seconds and not isinstance(of, Collective):
            add(f"exposed steps of a {of.choice} ring", of.axes, seconds, of.tensor, of.reason, line_of(of.origin))
    if time.seconds - out.seconds > 1e-9 * time.seconds:
        axis = max(plan.sizes, key=lambda a: sum(c.total_seconds for c in plan.collectives if a in c.axes))
        add("rest", (axis,), time.seconds - out.seconds, "", f"the collectives over {axis} share links", "")
    out.seconds = time.seconds
    return out


def network_of(plan: Plan, axes: tuple[str, ...]) -> str:
    """The network that collectives over some axes use, ``"DCN"`` if they leave a slice or node: the slowest one."""
    dims = {stage.dim for axis in axes for stage in plan.torus.get(axis, ()) if stage.size > 1}
    return "DCN" if "slice" in dims else "NVLink" if plan.chip is not None and plan.chip.switch else "ICI"


@cached_on_plan
def kernel_phases(plan: Plan) -> dict[Kernel, str]:
    """Kernel → its phase. The optimizer is what follows the last kernel of the backward pass, outside the loops of that pass."""
    pass_of, last = pass_of_kernel(plan), -1
    kernels = list(_in_order(plan, computation_of(plan)))
    for k, (kernel, _) in enumerate(kernels):
        if pass_of(kernel) == BACKWARD:
            last = k
    now, out = FORWARD, dict[Kernel, str]()
    ends = kernels[last][1] if last >= 0 else math.inf
    for kernel, outermost in kernels:
        now = pass_of(kernel) or (OPTIMIZER if outermost > ends else now)
        out[kernel] = now
    return out


def _in_order(plan: Plan, computation: Computation, outermost: int | None = None) -> Iterator[tuple[Kernel, int]]:
    """(kernel, index of the kernel of the program that it is in) in the order of the schedule, each loop before its bodies."""
    for k, kernel in enumerate(schedules(plan)[computation].kernels):
        index = k if outermost is None else outermost
        yield kernel, index
        for body in kernel.bodies:
            yield from _in_order(plan, body, index)


def _timeline(plan: Plan, computation: Computation, phases: dict[Kernel, str]) -> Timeline:
    """The timeline of a run of a computation, from its schedule."""
    schedule, times = schedules(plan)[computation], kernel_times(plan)
    out = Timeline(schedule.seconds)

    def written(kernel: Kernel) -> str:
        """The dims of the arrays that a kernel writes."""
        return " | ".join(dict.fromkeys(format_dims(plan.program.dims(b.value)) for b in kernel.writes))

    for kernel, begin in zip(schedule.kernels, schedule.starts, strict=True):
        start, phase, source = begin, phases[kernel], line_of(kernel.origin)
        for body in kernel.bodies:
            trips, inner = 1 if body.trip_count is None else body.trip_count, _timeline(plan, body, phases)
            name = plan.loop_name(kernel.step) if isinstance(kernel.step, Loop) else kernel.origin_name
            seconds = trips * inner.seconds
            if seconds:
                out.spans.append(Span(LOOP, name, start, seconds, phase, (), "", source, trips=trips, body=inner))
            start += seconds
        if kernel in times:
            run, name = times[kernel], kernel.origin_name
            out.spans.append(
                Span(COMPUTE, name, start, run.seconds, phase, (), written(kernel), source, bytes=run.bytes)
            )
    busy = [(s.start, s.end) for s in out.spans]
    for t in schedule.transfers:
        c, end, step = t.collective, min(t.end, schedule.seconds), t.kernel.step
        in_ring = step is not None and c not in separate_collectives(step)
        exposed = 0.0 if in_ring else _idle_seconds(busy, t.start, end)
        lane, phase, seconds = network_of(plan, c.axes), phases[t.kernel], end - t.start
        out.spans.append(
            Span(lane, c.op, t.start, seconds, phase, c.axes, c.dims, c.location, exposed, c.bytes, c.explanation)
        )
    for copy in schedule.host_copies:
        name, exposed = f"copy to the {'host' if copy.to_host else 'device'}", _idle_seconds(busy, copy.start, copy.end)
        dims, source, seconds = written(copy.kernel), line_of(copy.kernel.origin), copy.end - copy.start
        phase = phases[copy.kernel]
        out.spans.append(Span(HOST, name, copy.start, seconds, phase, (), dims, source, exposed, copy.bytes))
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
    """(part, seconds) of the parts of the estimated step, longest first: compute, memory traffic, bubble, and exposed
    communication over each group of axes. Together they are ``plan.seconds``; empty without a chip."""
    line, time = timeline(plan), time_of(plan)
    if line is None or time is None:
        return []
    parts: dict[str, float] = defaultdict(float)
    idle = max((p.bubble for p in plan.pipelines), default=0.0)
    for op in time.ops:
        seconds, bubble = op.seconds * op.count, idle if op.count > 1 else 0.0  # in loops over ticks
        bound = "memory traffic" if op.traffic_seconds >= max(op.matmul_seconds, op.vector_seconds) else "compute"
        parts[bound] += seconds * (1 - bubble)
        parts["pipeline bubble"] += seconds * bubble
    for span, runs in line.walk():
        over = f"exposed communication over {'+'.join(span.axes)}" if span.axes else "copies to and from the host"
        parts[over] += span.exposed * runs
    return sorted(((name, n) for name, n in parts.items() if n > 0), key=lambda part: -part[1])


def trace_json(plan: Plan) -> str:
    """The timeline as a trace in the Chrome trace event format, which https://ui.perfetto.dev opens.

    Each lane is a thread. Collectives that overlap in a lane are on further threads of it.

    Raises:
      UnsupportedError: the plan has no times, since its chip is not known.
    """
    line, ends, events = timeline(plan), dict[str, list[float]](), list[dict[str, Any]]()
    if line is None:
        raise UnsupportedError(
            "a trace needs times, and the chip of this plan is not known", fixes=["plan with topology="]
        )
    threads: dict[tuple[str, int], int] = {}
    for span, start in sorted(line.events(), key=lambda event: event[1]):
        begin, end, row = round(1e9 * start), round(1e9 * (start + span.seconds)), 0
        if span.lane != LOOP:  # loops are nested
            free = ends.setdefault(span.lane, [])
            row = next((k for k, until in enumerate(free) if until <= begin), len(free))
            free[row : row + 1] = [end]
        thread = threads.setdefault((span.lane, row), len(threads) + 1)
        args: dict[str, Any] = {
            "dims": span.detail,
            "axes": "+".join(span.axes),
            "cause": span.cause,
            "source": span.source,
        }
        args.update(bytes=span.bytes, exposed_us=1e6 * span.exposed, iterations=span.trips if span.body else 0)
        shown = {key: value for key, value in args.items() if value}
        event = {"ph": "X", "name": span.name, "cat": span.phase, "pid": 1, "tid": thread, "args": shown}
        events.append({**event, "ts": begin / 1e3, "dur": (end - begin) / 1e3})
    head = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": facts.title(plan)}}]
    for (lane, row), thread in threads.items():
        label = f"{lane} ({row + 1})" if row else lane
        head.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": label}})
    return json.dumps({"traceEvents": [*head, *events], "displayTimeUnit": "ms"})
