"""What the seconds and the peak of a candidate are not below, known before it is planned.

By its assignment alone: its products take their time at the matrix unit's rate, and its arguments are held. Beside a
plan: what of its kernels, collectives and live arrays follows from answers that are the same is in the candidate as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cost.fusion import Buffer, Kernel
from ..cost.kernel_time import kernel_times
from ..hardware.chips import Chip
from ..plan.assignment import AxisAssignment, GroupAssignment, Queries
from ..plan.spec import itemsize
from ..plan_api import Plan
from ..program.ir import Op, Program, Value


class _Units:
    """The values of a program, and its ops without bodies.

    Attributes:
      place: of each among the answers.
      flops: by place: FLOPs of a step on whole arrays, dtype of the products (None: inside an opaque kernel).
      held: (place, bytes) of the arguments that devices hold.
    """

    def __init__(self, program: Program):
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.flops: dict[int, tuple[float, str | None]] = {}
        self._products_on: dict[Chip, np.ndarray] = {}
        self._places: dict[Queries, np.ndarray] = {}
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
        self.place: dict[Value | Op, int] = {unit: k for k, unit in enumerate([*self.values, *self.ops])}
        held = [v for v in program.inputs if not v.on_host]
        self.held = (
            np.array([self.place[v] for v in held], int),
            np.array([v.aval.size * itemsize(v.aval) for v in held], float),
        )
        for op, count in program.root.walk_counted():
            if op.rule is None or op.rule.given is not None:
                continue
            if flops := op.primitive.flops(op.eqn):
                dtype = str(op.eqn.invars[0].aval.dtype) if op.primitive.matmul else None
                self.flops[self.place[op]] = count * flops, dtype

    def split(self, assignment: AxisAssignment) -> tuple[np.ndarray, np.ndarray]:
        """How the assignment splits every value and op: a number for the axes of its dims, or factors, and in how many parts."""
        if self._last is None or self._last[0] is not assignment:
            asked, answered = assignment.queries(), assignment.group_assignments()
            if asked not in self._places:
                self._places[asked] = np.array(list(self._questions(assignment, asked)), int)
            for found in answered:
                if found not in self._split:
                    self._split[found] = self._numbered(found, assignment.sizes)
            numbers, parts = (np.concatenate(of) for of in zip(*map(self._split.__getitem__, answered), strict=True))
            places = self._places[asked]
            self._last = assignment, numbers[places], parts[places]
        return self._last[1:]

    def _numbered(self, found: GroupAssignment, sizes: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
        numbers = [self._numbers.setdefault(answer, len(self._numbers)) for answer in found.axes]
        parts = [math.prod(sizes[a] for a in {a for entry in answer for a in entry}) for answer in found.axes]
        return np.array(numbers, int), np.array(parts, float)

    def _questions(self, assignment: AxisAssignment, asked: Queries) -> Iterator[int]:
        """The question of each unit."""
        for value in self.values:
            explicit = value.explicit is not None
            question = (
                (value.explicit, None) if explicit else (assignment.value_items(value), assignment.scopes_of(value))
            )
            yield asked.index[question]
        yield from (asked.of_op[op][-1] for op in self.ops)

    def products(self, chip: Chip) -> np.ndarray:
        """By unit: seconds of a step that its products take at the rate of the matrix unit, undivided."""
        if chip not in self._products_on:
            device = chip.per_device()
            seconds = self._products_on[chip] = np.zeros(len(self.place))
            for place, (flops, dtype) in self.flops.items():
                rate = device.flops if dtype is None else device.matmul_rate(dtype)
                seconds[place] = flops / (rate * chip.compiler.matmul_efficiency)
        return self._products_on[chip]


def least_of(assignment: AxisAssignment, chip: Chip) -> tuple[float, float]:
    """(seconds, bytes of a device) that every plan has which is made by this assignment."""
    units = assignment.program.cached(_Units)
    _, parts = units.split(assignment)
    places, sizes = units.held
    return float((units.products(chip) / parts).sum()), float((sizes / parts[places]).sum())


@dataclass(frozen=True, slots=True)
class Least:
    """What a plan is expected not to be below: seconds, of these its kernels', and bytes at the peak."""

    seconds: float
    kernels: float
    peak: float


class Pieces:
    """What the seconds and the peak of a plan consist of: each piece with the values and ops that it follows from.

    Attributes:
      sent: seconds that what the walk sends takes, one after the other; hidden: of these, what the step is not longer for.
    """

    def __init__(self, plan: Plan, sent: float):
        """Of a plan and of what the walk alone sends for it."""
        assert plan.seconds is not None
        assert plan.chip is not None
        self.program, self.chip, self.seconds, self.peak = plan.program, plan.chip, plan.seconds, plan.memory.peak
        self.assignment = AxisAssignment(plan.program, plan.requested_layout, plan.sizes)
        self._units = plan.program.cached(_Units)
        self._answers, self._parts = self._units.split(self.assignment)
        place = self._units.place
        pieces: list[_Piece] = []
        users: list[int] = []
        starts: list[int] = []
        products: list[tuple[int, int]] = []
        kernels = 0.0
        for piece in (*_seconds(plan), *_peak(plan)):
            kernels += piece.seconds if piece.scales else 0.0
            units = {place[u] for u in piece.units if u in place}
            if units:
                starts.append(len(users))
                users += sorted(units)
                products += ((len(pieces), place[op]) for op in piece.products if op in place)
                pieces.append(piece)
        self.kernels, self.sent, self.hidden = kernels, sent, max(0.0, sent + kernels - self.seconds)
        self._users, self._starts = np.array(users, int), np.array(starts, int)
        self._took, self._sizes = (
            np.array([p.seconds for p in pieces], float),
            np.array([p.size for p in pieces], float),
        )
        self._scale = np.array([p.scales for p in pieces], bool)
        self._makers, self._made = np.array(products, int).reshape(-1, 2).T

    def least(self, assignment: AxisAssignment) -> Least:
        """What is in every plan as well that is made by this assignment, of the same program.

        What a kernel computes, and an array, get smaller by no more than what they follow from is split further.
        """
        answers, parts = self._units.split(assignment)
        changed = (
            (answers != self._answers) if assignment.sizes == self.assignment.sizes else np.ones(len(answers), bool)
        )
        touched = np.logical_or.reduceat(changed[self._users], self._starts)
        left = np.minimum(np.minimum.reduceat((self._parts / parts)[self._users], self._starts), 1.0) * self._scale
        products = (self._units.products(self.chip) / parts)[self._made]
        least = np.bincount(self._makers, products, minlength=len(left))
        less = (self._took - np.maximum(left * self._took, least * self._scale)) * touched
        kernels = self.kernels - float(less[self._scale].sum())
        peak = self.peak - float(((1 - left) * self._sizes)[touched].sum())
        return Least(max(self.seconds - float(less.sum()), kernels), kernels, peak)

    def most_sent(self, kernels: float, seconds: float) -> float:
        """How long a step of these kernels may send if it is to take no longer: it is expected to hide as much as this one, and
        ``CompilerModel.max_hidden_fraction`` of what it sends beyond."""
        free = seconds - kernels + self.hidden
        return (
            free if free <= self.sent else self.sent + (free - self.sent) / (1 - self.chip.compiler.max_hidden_fraction)
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Seconds, or bytes at the peak.

    Attributes:
      units: the values and ops that it follows from.
      products: ops whose products it makes.
      scales: it is there whatever these claim, as large as they are.
    """

    seconds: float
    size: float
    units: Iterable[Any]
    products: Sequence[Op] = ()
    scales: bool = True


def _seconds(plan: Plan) -> Iterator[_Piece]:
    for node, took in kernel_times(plan).items():
        products = [run.op for run in node.matmuls] or (
            [node.op] if node.op is not None and node.name == node.op.name and node.op.primitive.nested_flops else []
        )
        yield _Piece(took.seconds * took.count, 0.0, _computed(node), products, node.name != "move!")
    for step in plan.body.all_steps:
        for c in step.sends:
            values = [s.value for s in (*step.reads, *step.makes)]
            yield _Piece((c.seconds or 0.0) * (c.count or 1), 0.0, [c.origin, *values], scales=False)
    for o in plan.overlaps:
        if o.exposed is not None and o.choice != "xla" and o.origin is not None:
            units = [o.origin, *o.origin.ins, *o.origin.outs]
            yield _Piece(o.exposed[o.choice] * (o.count or 1), 0.0, units, scales=False)


def _peak(plan: Plan) -> Iterator[_Piece]:
    for item, size in plan.memory.live:
        node = item.made_by
        made = [] if node is None else [node.op, getattr(node.step, "op", None)]
        yield _Piece(0.0, size, [item.value, *made], scales=node is None or node.name != "move!")


def _computed(node: Kernel) -> list[Any]:
    """What a kernel's time follows from: what it reads, computes on the way, and writes."""
    units: dict[Any, None] = dict.fromkeys([node.op, *(run.op for run in node.matmuls)])
    reads = set(node.reads)
    todo: list[Buffer] = [*node.writes, *node.ins, *reads]
    seen: set[Buffer] = set()
    while todo:
        item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        units[item.value] = None
        if item.made_by is not None and item not in reads:
            units[item.made_by.op] = None
            todo += item.made_by.ins
    return list(units)
