"""A plan compared with a trace of its step: planned and measured seconds of the step, of each collective and of each loop."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from ...errors import UnsupportedError
from ..compat.jax import pass_of
from ..cost.device_computation import computation_of
from ..cost.schedule import schedules
from ..cost.time import time_of
from ..hardware.collective_ops import collective_volume
from ..iterables import grouped
from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..plan.steps import Loop
from ..report.document import Document
from ..report.facts import kernels_of
from ..report.tables import Cell, Table, code, html_picture, number, ratio
from ..units import format_seconds
from .hlo import KINDS
from .hlo_text import Instruction, Module, arrays, byte_size
from .trace import Event, ProgramTrace, read_trace

MAX_ROWS = 24
"""Collectives that the terminal lists; pages list all."""
MAX_BARS = 8
"""Collectives that have bars."""
MAX_RATIO = 1.1
"""Of measured and planned seconds, above which a bar is red."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Planned and measured seconds of a part of a step, on one device.

    Attributes:
      name: of the step, or the name scope of a group of equal collectives (:meth:`plan.plan.Plan.scope_name`) or loops.
      runs: planned runs per step; None: not known.
      planned: seconds per step, by the plan; None: the plan has no times, since its chip is not known.
      measured: seconds per step, the mean over the devices of the trace, from the start of each run to its end; None: the trace has
        no such instruction.
    """

    name: str
    runs: int | None
    planned: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """measured / planned."""
        return self.measured / self.planned if self.measured is not None and self.planned else None


@dataclass(eq=False)
class PlanProfile(Document):
    """A plan and a trace of its step side by side. Print it, show it in a notebook, or save it.

    Attributes:
      plan: the plan.
      runs: the number of runs of the step in the trace.
      devices: the number of devices in the trace.
      step: the complete step.
      collectives: the planned collectives, those with the longest measured time first.
      loops: the loops, in program order.
      other: (instruction, seconds per step) of collectives in the trace that have none of the planned names: XLA added them.
    """

    plan: Plan
    runs: int
    devices: int
    step: Measured
    collectives: list[Measured]
    loops: list[Measured]
    other: list[tuple[str, float]]

    def to_json(self) -> str:
        """All rows as JSON; seconds per step."""
        rows = {name: [asdict(m) for m in getattr(self, name)] for name in ("collectives", "loops")}
        head = {"runs": self.runs, "devices": self.devices, "step": asdict(self.step)}
        return json.dumps({**head, **rows, "other": self.other})

    def __rich__(self) -> Any:
        parts: list[Any] = [Text(self._head(), style="bold")]
        for table in _tables(self):
            parts += [Text(), table.terminal(MAX_ROWS)]
        return Group(*parts)

    def _title(self) -> str:
        return f"{self.step.name}: planned and measured"

    def _html(self) -> str:
        tables = "".join(f"<h2>{escape(t.title)}</h2>{t.html(sortable=True)}" for t in _tables(self))
        return f"<h1>Planned and measured</h1><p>{escape(self._head())}</p>{_bars(self)}{tables}"

    def _head(self) -> str:
        devices = f"{self.devices} device{'s' * (self.devices != 1)}"
        missing = "; planned times need a known chip: use mp.hardware.calibrate, or plan with topology="
        hint = "" if self.plan.chip else missing
        return f"{self.runs} run{'s' * (self.runs != 1)} of the step on {devices}; seconds of a device per step{hint}"


def profile(plan: Plan, trace: str | Path) -> PlanProfile:
    """Compare a plan with a trace of its step.

    Args:
      trace: as in :func:`verify.trace.read_trace`.

    Raises:
      UnsupportedError: there is no such trace, or it has no run of the step.
    """
    programs = read_trace(trace)
    names = list(dict.fromkeys(map(plan.scope_name, plan.collectives)))
    loops = list(_planned_loops(plan))
    scopes = [*names, *(name for name, _, _, _ in loops)]

    def found(program: ProgramTrace) -> int:
        op_names = [i.op_name for i in program.module.instructions.values()]
        return sum(any(s in name for name in op_names) for s in scopes)

    program = max(programs, key=lambda p: (found(p), p.runs, len(p.events)))
    if scopes and not found(program):
        ran = ", ".join(sorted({p.name for p in programs}))
        raise UnsupportedError(
            f"{trace}: no program of the trace is this plan's step; the programs are {ran}",
            fixes=[
                "the plan of the step that ran: `step.plan(*args)`, under the same layout",
                'lowering="shard_map", whose collectives carry the names of the plan',
            ],
        )
    return _compared(plan, program, names, loops)


def planned_name(op_name: str, names: Sequence[str]) -> str | None:
    """The name scope of an instruction's op; None: it has none of these.

    The longest one: ``… | batch: data`` is also a part of ``… | batch: data+model``.
    """
    return max((n for n in names if n in op_name), key=len, default=None)


def names_of(plan: Plan, module: Module) -> dict[str, dict[str, float]]:
    """The planned collectives that instructions of the compiled program send.

    The name is in the op of the instruction or of its reduction computation. XLA combines small collectives of one kind over the
    same axes: one instruction has several arrays, and the name of one of them. The others are identified by their bytes, each with
    an array of its own. A reduce-scatter may be an all-reduce, of which a slice is used.

    Returns:
      Name of an instruction → name scope of a collective (:meth:`plan.plan.Plan.scope_name`) → its share of the bytes.
    """
    planned = grouped((plan.scope_name(c), c) for c in plan.collectives)
    out: dict[str, dict[str, float]] = {}
    for name, i in module.instructions.items():
        kind, op_name = _kind(i.opcode), i.op_name
        same = [n for n in planned if kind is None or n.startswith(kind)]
        alike = [n for n in planned if kind is not None and _may_be(n.split()[0], kind)]
        scope = planned_name(op_name, same) or planned_name(op_name, alike)
        if scope is None and kind is not None:
            scope = planned_name(_reduction(module, i), alike)
        if scope is not None and (kind or (i.opcode == "fusion" and scope.split()[0] in name.replace("_", "-"))):
            out[name] = {scope: 1.0}
    found = {scope for shares in out.values() for scope in shares}
    missing = [(scope, c) for scope, cs in planned.items() if scope not in found for c in cs]
    for name, shares in out.items():
        (own,) = shares
        i = module.instructions[name]
        kind = _kind(i.opcode) or ""
        sizes = [byte_size([a]) for a in arrays(i.shape)]
        free = list(sizes)  # arrays of the instruction that no collective has been found for
        if len(free) < 2:
            continue
        for scope, c in ((own, planned[own][0]), *missing):
            size = _result_bytes(plan, c, kind)
            at = next((k for k, n in enumerate(free) if abs(size - n) < 1), None)
            if at is None or not _may_be(c.op, kind) or not any(c.axes == other.axes for other in planned[own]):
                continue
            del free[at]
            if scope != own:
                shares[scope] = shares.get(scope, 0.0) + size / sum(sizes)
                shares[own] -= size / sum(sizes)
    return out


def _reduction(module: Module, i: Instruction) -> str:
    """JAX's name of the op that has the reduction computation of a collective; "" without one.

    The TPU compiler replaces some reduce-scatters by an all-reduce without an ``op_name``, whose reduction still has the name.
    """
    inner = module.computations.get(i.attribute("to_apply") or "")
    return next((x.op_name for x in inner or () if x.op_name), "")


def _may_be(planned: str, kind: str) -> bool:
    """Whether a planned collective may be an instruction of a kind."""
    return planned == kind or (planned == "reduce-scatter" and kind == "all-reduce")


def _result_bytes(plan: Plan, c: Collective, kind: str) -> float:
    """Bytes of a device's result of a collective that is an instruction of ``kind``."""
    group = math.prod(plan.sizes[a] for a in c.axes)
    volume = collective_volume(c.op, c.bytes, group)
    return volume / group if kind in ("reduce-scatter", "all-to-all") else volume


def _kind(opcode: str) -> str | None:
    """The kind of collective that an opcode is or starts."""
    return next((k for k in KINDS if opcode.startswith(k)), None)


def _compared(plan: Plan, program: ProgramTrace, names: Sequence[str], loops: Sequence[_PlannedLoop]) -> PlanProfile:
    """The comparison of a plan with the program of its step; ``names``: of its collectives."""
    per_step = 1 / (program.runs * len(program.devices))
    sent = names_of(plan, program.module)
    sending = {scope: 0.0 for shares in sent.values() for scope in shares}
    other: dict[str, float] = {}
    in_loops: dict[tuple[str, bool], float] = {}
    for name, seconds in _durations(program).items():
        i = program.module.instructions[name]
        for scope, share in sent.get(name, {}).items():
            sending[scope] += seconds * per_step * share
        if name not in sent and _kind(i.opcode):
            other[name] = seconds * per_step
        if i.opcode == "while":
            loop = _innermost(i.op_name), "transpose(" in i.op_name
            in_loops[loop] = in_loops.get(loop, 0.0) + seconds * per_step
    planned = plan.chip is not None
    rows = []
    for name in names:
        group = [c for c in plan.collectives if plan.scope_name(c) == name]
        runs = None if any(c.count is None for c in group) else sum(c.runs for c in group)
        seconds = sum(c.total_seconds for c in group) if planned else None
        rows.append(Measured(name, runs, seconds, sending.get(name)))
    rows.sort(key=lambda m: -(m.measured or 0.0))
    time = time_of(plan)
    step = Measured(program.name, 1, time.seconds if time else None, _span(program.events) / program.runs)
    measured = [
        Measured(f"{loop}, backward pass" if backward else loop, runs, seconds, in_loops.get((loop, backward)))
        for loop, backward, runs, seconds in loops
    ]
    added = sorted(other.items(), key=lambda o: -o[1])
    return PlanProfile(plan, program.runs, len(program.devices), step, rows, measured, added)


_PlannedLoop = tuple[str, bool, int | None, float | None]
"""(name scope, whether it is of a backward pass, iterations per step, seconds per step) of a group of loops."""


def _planned_loops(plan: Plan) -> Iterable[_PlannedLoop]:
    """The loops of a plan; those with the same name scope in the same pass are one group."""
    groups: dict[tuple[str, bool], tuple[int | None, float | None]] = {}
    seconds = _loop_seconds(plan) if plan.chip is not None else {}
    for step, runs in plan.body.walk():
        if not isinstance(step, Loop):
            continue
        key = plan.loop_name(step), pass_of(step.op.eqn) == "backward"
        trips = step.inner[-1].trip_count
        before = groups.get(key, (0, 0.0 if seconds else None))
        iterations = None if trips is None or before[0] is None else before[0] + runs * trips
        took = None if before[1] is None else before[1] + seconds.get(id(step.op), 0.0) * runs
        groups[key] = iterations, took
    return [(*key, *group) for key, group in groups.items()]


def _loop_seconds(plan: Plan) -> dict[int, float]:
    """The id of each loop's op → planned seconds of one run with all iterations."""
    out: dict[int, float] = defaultdict(float)
    lengths = schedules(plan)
    for kernel in kernels_of(computation_of(plan)):
        for body in kernel.bodies:
            out[id(kernel.origin)] += lengths[body].seconds * (body.trip_count or 1)
    return out


def _innermost(op_name: str) -> str:
    """The name scope of the innermost loop in the name of a loop's instruction; "" without one."""
    scopes = re.findall(r"(?<![^/(])(loop(?: over [^/()]+)?)\)*(?=/)", op_name)
    return scopes[-1] if scopes else ""


def _durations(program: ProgramTrace) -> dict[str, float]:
    """Instruction → seconds of all its runs on all devices. An asynchronous one is counted at its start, until its end."""
    out: dict[str, float] = {}
    pending: dict[tuple[str, str], list[Event]] = {}
    for event in sorted(program.events, key=lambda e: e.start):
        opcode = program.module.instructions[event.name].opcode
        key = event.device, event.name.replace("-done", "-start")
        if opcode.endswith("-done") and pending.get(key):
            begun = pending[key].pop(0)
            out[begun.name] += event.end - begun.end
            continue
        out[event.name] = out.get(event.name, 0.0) + event.end - event.start
        if opcode.endswith("-start"):
            pending.setdefault(key, []).append(event)
    return out


def _span(events: Sequence[Event]) -> float:
    """The mean over devices of the seconds in which a device runs an instruction."""
    busy = 0.0
    by_device = sorted(events, key=lambda e: (e.device, e.start))
    for _, group in itertools.groupby(by_device, key=lambda e: e.device):
        end = float("-inf")
        for event in group:
            busy += max(0.0, event.end - max(end, event.start))
            end = max(end, event.end)
    return busy / len({e.device for e in events})


# -- as tables


def _bars(p: PlanProfile) -> str:
    """Planned and measured seconds as pairs of bars of one scale: of the step, of the loops, and of the longest collectives."""
    every = (p.step, *p.loops, *p.collectives[:MAX_BARS])
    rows = [(m.name, m.planned, m.measured) for m in every if m.planned and m.measured is not None]
    return html_picture("drawPairs", "planned and measured seconds", {"rows": rows, "ratio": MAX_RATIO}) if rows else ""


def _tables(p: PlanProfile) -> list[Table]:
    """The tables of a report; empty ones are left out."""

    def seconds(x: float | None) -> Cell:
        return number("–" if x is None else format_seconds(x), x or 0.0)

    def row(m: Measured) -> list[Cell]:
        calls = number("?" if m.runs is None else f"{m.runs}", m.runs or 0)
        return [code(m.name), calls, seconds(m.planned), seconds(m.measured), ratio(m.measured, m.planned)]

    columns = [("", ""), ("calls a step", "n"), ("planned", "n"), ("measured", "n"), ("ratio", "n")]
    other = [[code(name), seconds(x)] for name, x in p.other]
    tables = [
        Table(columns, [row(p.step), *map(row, p.loops)], "Step and loops"),
        Table(columns, list(map(row, p.collectives)), "Collectives"),
        Table([("", ""), ("measured", "n")], other, "Collectives without a planned name: added by XLA"),
    ]
    return [table for table in tables if table.rows]
