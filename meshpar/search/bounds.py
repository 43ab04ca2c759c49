"""What the seconds and the peak of a candidate are not below, known before it is planned.

By the answers of its claims alone: its products take their time at the matrix unit's rate, and its arguments are held. Beside a
plan: what of its kernels, collectives and live arrays follows from answers that are the same is in the candidate as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from ..cost.flops import OPAQUE, opaque_flops, product_flops
from ..cost.fusion import PRODUCTS, Item, Node
from ..cost.kernel_time import kernel_times
from ..hardware.chips import Chip
from ..plan.claims import Asked, Claims
from ..plan.spec import itemsize
from ..planned import Plan
from ..program.ir import Frame, Op, Program, Value

Answers = tuple[tuple[tuple[str, ...], ...], ...]
"""Of the values and ops of a program: the axes of every dim, or factor."""


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
        self._getters: dict[Asked, Callable[[Any], Answers]] = {}
        seen = dict.fromkeys(program.inputs)
        for op in program.root.walk():
            seen.update(dict.fromkeys(op.outs))
            for frame in op.frames:
                seen.update(dict.fromkeys(frame.ins()))
            if not op.frames and op.outs:
                self.ops.append(op)
        self.values = list(seen)
        self.place: dict[Value | Op, int] = {unit: k for k, unit in enumerate([*self.values, *self.ops])}
        self.held = [(self.place[v], float(v.aval.size * itemsize(v.aval))) for v in program.inputs if not v.on_host]
        self._products(program.root, 1)

    def _products(self, frame: Frame, count: int) -> None:
        for op in frame.ops:
            for inner in op.frames:
                self._products(inner, count * (1 if inner.trips is None else inner.trips))
            if op.rule is None or op.rule.given is not None:
                continue
            if op.name in PRODUCTS:
                self.flops[self.place[op]] = count * product_flops(op.eqn), str(op.eqn.invars[0].aval.dtype)
            elif op.name in OPAQUE and (flops := opaque_flops(op)):
                self.flops[self.place[op]] = count * flops, None

    def answers(self, claims: Claims) -> Answers:
        asked = claims.asked()
        if asked not in self._getters:
            known = {question: k for k, question in enumerate(asked.questions)}

            def place(unit: Value | Op) -> int:
                if isinstance(unit, Op):
                    return asked.of[unit][-1]
                if unit.explicit is not None:
                    return known[unit.explicit, None]
                return known[claims.value_items(unit), claims.scopes_of(unit)]

            self._getters[asked] = itemgetter(*map(place, [*self.values, *self.ops]), 0)
        return self._getters[asked](claims.answers())


def answers_of(claims: Claims) -> Answers:
    """How the claims split every value and op of their program."""
    return claims.program.once(_Units).answers(claims)


def least_of(claims: Claims, chip: Chip) -> tuple[float, float]:
    """(seconds, bytes of a device) that every plan has which is made by these claims."""
    units, found = claims.program.once(_Units), answers_of(claims)
    products = _products(claims, chip)
    return sum(map(products, units.flops)), sum(size / _parts(found[k], claims) for k, size in units.held)


def _parts(answer: tuple[tuple[str, ...], ...], claims: Claims) -> int:
    total = 1
    for axis in {a for entry in answer for a in entry}:
        total *= claims.sizes[axis]
    return total


def _products(claims: Claims, chip: Chip) -> Callable[[int], float]:
    """Seconds of a step that the products of the op at a place take at the rate of the matrix unit."""
    units, found, device = claims.program.once(_Units), answers_of(claims), chip.per_device()

    def seconds(place: int) -> float:
        flops, dtype = units.flops.get(place, (0.0, None))
        rate = device.flops if dtype is None else device.matmul_rate(dtype)
        return flops / _parts(found[place], claims) / (rate * chip.matmul_efficiency) if flops else 0.0

    return seconds


class Pieces:
    """What the seconds and the peak of a plan consist of: each piece with the values and ops that it follows from."""

    def __init__(self, plan: Plan):
        assert plan.seconds is not None
        assert plan.chip is not None
        self.program, self.chip, self.seconds, self.peak = plan.program, plan.chip, plan.seconds, plan.memory.peak
        self.answers = answers_of(Claims(plan.program, plan.asked, plan.sizes))
        place = plan.program.once(_Units).place
        self._of: list[tuple[float, float, tuple[int, ...]]] = []
        self._users: dict[int, list[int]] = {}
        for seconds, size, products, found in (*_seconds(plan), *_peak(plan)):
            for unit in {place[u] for u in found if u in place}:
                self._users.setdefault(unit, []).append(len(self._of))
            self._of.append((seconds, size, tuple(place[op] for op in products if op in place)))

    def least(self, claims: Claims) -> tuple[float, float]:
        """(seconds, bytes at the peak) of what is in every plan as well that is made by these claims, of the same program."""
        touched: set[int] = set()
        for k, (mine, new) in enumerate(zip(self.answers, answers_of(claims), strict=True)):
            if mine is not new and mine != new:
                touched.update(self._users.get(k, ()))
        products = _products(claims, self.chip)
        seconds, peak = self.seconds, self.peak
        for k in touched:
            was, size, ops = self._of[k]
            seconds -= was - min(was, sum(map(products, ops)))
            peak -= size
        return seconds, peak


_Piece = tuple[float, float, Sequence[Op], Sequence[Any]]


def _seconds(plan: Plan) -> Iterator[_Piece]:
    for node, took in kernel_times(plan).items():
        products = [run.op for run in node.products] or (
            [node.op] if node.op is not None and node.name in OPAQUE else []
        )
        yield took.seconds * took.count, 0.0, products, _computed(node)
    for step in plan.body.every:
        for c in step.sends:
            yield (
                (c.seconds or 0.0) * (c.count or 1),
                0.0,
                (),
                [c.origin, *(s.value for s in (*step.reads, *step.makes))],
            )
    for o in plan.overlaps:
        if o.exposed is not None and o.choice != "xla" and o.origin is not None:
            yield o.exposed[o.choice] * (o.count or 1), 0.0, (), [o.origin, *o.origin.ins, *o.origin.outs]


def _peak(plan: Plan) -> Iterator[_Piece]:
    for item, size in plan.memory.live:
        node = item.node
        made = [] if node is None else [node.op, getattr(node.step, "op", None)]
        yield 0.0, size, (), [item.value, *made]


def _computed(node: Node) -> list[Any]:
    """What a kernel's time follows from: what it reads, computes on the way, and writes."""
    units: dict[Any, None] = dict.fromkeys([node.op, *(run.op for run in node.products)])
    reads = set(node.reads)
    todo: list[Item] = [*node.writes, *node.ins, *reads]
    seen: set[Item] = set()
    while todo:
        item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        units[item.value] = None
        if item.node is not None and item not in reads:
            units[item.node.op] = None
            todo += item.node.ins
    return list(units)
