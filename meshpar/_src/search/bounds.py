"""Lower bounds on step time and peak memory of a candidate, without planning it.

The assignment of axes alone gives one bound: the matmuls take their time at the peak rate of the matrix units, and the arguments
are allocated. A plan that differs in a few rules gives a tighter one: its kernels, collectives and live arrays that depend only on
values and ops with unchanged axes are in the candidate as well. FLOPs, kernel times and live arrays
are as in :mod:`cost`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cost.fusion import Buffer, Kernel, Kind
from ..cost.kernel_time import kernel_times
from ..hardware.chips import Chip
from ..plan.assignment import AxisAssignment, GroupAssignment, Queries
from ..plan.shard_shapes import itemsize
from ..plan_api import Plan
from ..program.ir import Op, Program, Value


class _ProgramUnits:
    """The units of a program that an assignment gives axes to: its values, and its ops without bodies.

    Attributes:
      index: the number of each unit.
      flops: unit → FLOPs of a step on unsharded arrays, and the dtype of the matmul (None: inside an opaque kernel).
      arguments: (units, bytes) of the arguments in device memory.
    """

    def __init__(self, program: Program):
        """Number the values and ops of a program, and list the FLOPs of its matmuls and the bytes of its arguments."""
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.flops: dict[int, tuple[float, str | None]] = {}
        self._matmul_seconds: dict[Chip, np.ndarray] = {}
        self._indices: dict[Queries, np.ndarray] = {}
        self._split: dict[GroupAssignment, tuple[np.ndarray, np.ndarray]] = {}
        self._numbers: dict[tuple[tuple[str, ...], ...], int] = {}
        self._last: tuple[AxisAssignment, np.ndarray, np.ndarray] | None = None
        seen = dict.fromkeys(program.inputs)
        for op in program.root.walk():
            seen.update(dict.fromkeys(op.outs))
            for frame in op.frames:
                seen.update(dict.fromkeys(frame.ins()))
            if not op.frames and op.outs:
                self.ops.append(op)
        self.values = list(seen)
        self.index: dict[Value | Op, int] = {unit: k for k, unit in enumerate([*self.values, *self.ops])}
        arguments = [v for v in program.inputs if not v.on_host]
        self.arguments = (
            np.array([self.index[v] for v in arguments], int),
            np.array([v.aval.size * itemsize(v.aval) for v in arguments], float),
        )
        for op, count in program.root.walk_counted():
            if op.rule is None or op.rule.given is not None:
                continue
            if flops := op.primitive.flops(op.eqn):
                dtype = str(op.eqn.invars[0].aval.dtype) if op.primitive.matmul else None
                self.flops[self.index[op]] = count * flops, dtype

    def split(self, assignment: AxisAssignment) -> tuple[np.ndarray, np.ndarray]:
        """For each unit, (a number that identifies its axes under the assignment, its number of shards), as two integer
        arrays [units]."""
        if self._last is None or self._last[0] is not assignment:
            queries, sizes = assignment.queries, assignment.sizes
            if queries not in self._indices:
                indices = [*(queries.of_value[v] for v in self.values), *(queries.of_op[op][-1] for op in self.ops)]
                self._indices[queries] = np.array(indices, int)
            for group in assignment.groups:
                if group not in self._split:
                    known = [self._numbers.setdefault(axes, len(self._numbers)) for axes in group.axes]
                    counts = [math.prod(sizes[a] for a in {a for entry in axes for a in entry}) for axes in group.axes]
                    self._split[group] = np.array(known, int), np.array(counts, float)
            split, at = [self._split[group] for group in assignment.groups], self._indices[queries]
            numbers, shards = (np.concatenate(of)[at] for of in zip(*split, strict=True))
            self._last = assignment, numbers, shards
        return self._last[1:]

    def matmul_seconds(self, chip: Chip) -> np.ndarray:
        """Per unit: seconds of its matmuls in a step, unsharded, at the rate of the matrix units."""
        if chip not in self._matmul_seconds:
            device = chip.per_device()
            seconds = self._matmul_seconds[chip] = np.zeros(len(self.index))
            for unit, (flops, dtype) in self.flops.items():
                rate = device.flops if dtype is None else device.matmul_rate(dtype)
                seconds[unit] = flops / (rate * chip.compiler.matmul_efficiency)
        return self._matmul_seconds[chip]


def lower_bounds(assignment: AxisAssignment, chip: Chip) -> tuple[float, float]:
    """(seconds, bytes): lower bounds on the step time and on the peak memory of a device, of every plan with this
    assignment."""
    units = assignment.program.cached(_ProgramUnits)
    _, shards = units.split(assignment)
    arguments, sizes = units.arguments
    return float((units.matmul_seconds(chip) / shards).sum()), float((sizes / shards[arguments]).sum())


def matmul_seconds(program: Program, chip: Chip, ops: Collection[Op], slowdown: float) -> float:
    """Seconds of the matmuls of a step on one device, where those in ``ops`` take ``slowdown`` times as long."""
    units = program.cached(_ProgramUnits)
    seconds = units.matmul_seconds(chip)
    slow = [units.index[op] for op in ops if op in units.index]
    return float(seconds.sum() + (slowdown - 1) * seconds[slow].sum())


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Expected lower bounds of a plan: seconds of a step, seconds of its kernels, and bytes at the peak."""

    seconds: float
    kernels: float
    peak: float


class Breakdown:
    """The step time and the peak of a plan by parts, each with the units (values and ops) that it depends on.

    Attributes:
      kernels: seconds of its kernels.
      sent: seconds of its collectives before passes, run sequentially.
      hidden: the seconds of these collectives by which the step is not longer.
    """

    def __init__(self, plan: Plan, sent: float):
        """Split the step time and the peak of ``plan``; ``sent``: seconds of its collectives before passes, run
        sequentially."""
        assert plan.seconds is not None
        assert plan.chip is not None
        self.program, self.chip, self.seconds, self.peak = plan.program, plan.chip, plan.seconds, plan.memory.peak
        self.assignment = AxisAssignment(plan.program, plan.requested_layout, plan.sizes)
        self._units = plan.program.cached(_ProgramUnits)
        self._axes, self._shards = self._units.split(self.assignment)
        index = self._units.index
        every = [*_time_parts(plan), *_memory_parts(plan)]
        kernels = sum(part.seconds for part in every if part.scales)
        self.kernels, self.sent, self.hidden = kernels, sent, max(0.0, sent + kernels - self.seconds)
        found = ((part, sorted({index[u] for u in part.units if u in index})) for part in every)
        parts, units = zip(*((part, own) for part, own in found if own), strict=True)
        self._part_units = np.concatenate(units)
        self._part_starts = np.cumsum([0, *map(len, units[:-1])])
        self._seconds, self._sizes = (np.array([getattr(p, of) for p in parts], float) for of in ("seconds", "size"))
        self._scales = np.array([p.scales for p in parts], bool)
        matmuls = [(k, index[op]) for k, part in enumerate(parts) for op in part.matmuls if op in index]
        self._matmul_parts, self._matmul_units = np.array(matmuls, int).reshape(-1, 2).T

    def lower_bound(self, assignment: AxisAssignment) -> LowerBound:
        """Expected lower bounds of a plan of the same program with another assignment.

        Parts without a changed unit are kept. The compute of a kernel and the size of an array shrink at most by the factor by
        which one of their units is sharded further; collectives may vanish.
        """
        axes, shards = self._units.split(assignment)
        changed = (axes != self._axes) if assignment.sizes == self.assignment.sizes else np.ones(len(axes), bool)
        touched = np.logical_or.reduceat(changed[self._part_units], self._part_starts)
        ratio = np.minimum.reduceat((self._shards / shards)[self._part_units], self._part_starts)
        ratio = np.minimum(ratio, 1.0) * self._scales
        matmuls = (self._units.matmul_seconds(self.chip) / shards)[self._matmul_units]
        least = np.bincount(self._matmul_parts, matmuls, minlength=len(ratio))
        saved = (self._seconds - np.maximum(ratio * self._seconds, least * self._scales)) * touched
        kernels = self.kernels - float(saved[self._scales].sum())
        peak = self.peak - float(((1 - ratio) * self._sizes)[touched].sum())
        return LowerBound(max(self.seconds - float(saved.sum()), kernels), kernels, peak)

    def max_comm_seconds(self, kernels: float, seconds: float) -> float:
        """The largest time of collectives with which a step with these kernels is expected to take at most ``seconds``.

        It is expected to hide as much as this plan, and ``CompilerModel.max_hidden_fraction`` of further communication.
        """
        exposed = seconds - kernels + self.hidden
        if exposed <= self.sent:
            return exposed
        return self.sent + (exposed - self.sent) / (1 - self.chip.compiler.max_hidden_fraction)


@dataclass(frozen=True, slots=True)
class _Part:
    """One term of the step time in seconds (a kernel, a collective), or of the peak in bytes (a live array).

    Attributes:
      units: the values and ops that it depends on.
      matmuls: ops whose matmuls it contains.
      scales: it exists under every assignment, only its size depends on it; False for communication.
    """

    seconds: float
    size: float
    units: Iterable[Any]
    matmuls: Sequence[Op] = ()
    scales: bool = True


def _time_parts(plan: Plan) -> Iterator[_Part]:
    """The parts of a plan's step time: kernels, collectives, exposed communication of rings and fused kernels."""
    for kernel, time in kernel_times(plan).items():
        opaque = kernel.op is not None and kernel.traits.nested_flops is not None
        matmuls = [run.op for run in kernel.matmuls] or ([kernel.op] if opaque and kernel.op is not None else [])
        yield _Part(time.seconds * time.count, 0.0, _units_of(kernel), matmuls, kernel.kind is not Kind.MOVE)
    for step in plan.body.all_steps:
        for c in step.sends:
            values = [s.value for s in (*step.reads, *step.makes)]
            yield _Part(c.total_seconds, 0.0, [c.origin, *values], scales=False)
    for o in plan.overlaps:
        if o.exposed is not None and o.choice != "xla" and o.origin is not None:
            units = [o.origin, *o.origin.ins, *o.origin.outs]
            yield _Part(o.exposed[o.choice] * (o.count or 1), 0.0, units, scales=False)


def _memory_parts(plan: Plan) -> Iterator[_Part]:
    for buffer, size in plan.memory.live:
        kernel = buffer.made_by
        ops = [] if kernel is None else [kernel.op, getattr(kernel.step, "op", None)]
        yield _Part(0.0, size, [buffer.value, *ops], scales=kernel is None or kernel.kind is not Kind.MOVE)


def _units_of(kernel: Kernel) -> list[Any]:
    """The values and ops that a kernel's time depends on: buffers that it reads or writes, and everything fused in between."""
    units: set[Any] = {kernel.op, *(run.op for run in kernel.matmuls)}
    reads, seen = set(kernel.reads), set[Buffer]()
    todo: list[Buffer] = [*kernel.writes, *kernel.ins, *reads]
    while todo:
        buffer = todo.pop()
        units.add(buffer.value)
        if buffer.made_by is not None and buffer not in reads and buffer not in seen:
            units.add(buffer.made_by.op)
            todo += buffer.made_by.ins
        seen.add(buffer)
    return list(units)
