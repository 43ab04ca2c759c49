"""What reports say about a plan beyond its own figures: what each rule does, one layer over time, the largest values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..cost.fusion import Computation, Kernel, line_of
from ..cost.kernels import computation_of
from ..cost.schedule import hidden_collectives
from ..cost.time import OpTime, Time, time_of
from ..dims import format_dims, path_matches
from ..hardware.calibration import EFFICIENCIES
from ..layout import SCOPES, Rule, Spec
from ..plan.collectives import Collective
from ..plan.plan import Plan, ShardedArray
from ..plan.steps import Reduce, Reshard
from ..program.ir import Op, Value
from ..units import format_seconds

Chip = tuple[str, tuple[str, ...]]
"""A dim for display: its name, and the axes that split it."""


@dataclass(slots=True)
class Effect:
    """What one rule does.

    Attributes:
      rule: its text.
      axes: its axes.
      tensors: how many arguments it splits.
      whole, local: their bytes, and what of them a device holds.
      values: how many values of the program it splits, arguments included.
      sent: bytes that a device sends in a step because of it: where it lost its axis to another rule, where what it splits is
        contracted.
      seconds: what that takes; 0 where no time is estimated.
    """

    rule: str
    axes: tuple[str, ...]
    tensors: int = 0
    whole: float = 0.0
    local: float = 0.0
    values: int = 0
    sent: float = 0.0
    seconds: float = 0.0


def effects(plan: Plan) -> list[Effect]:
    """One effect per rule, in the layout's order; a last one, without axes, for what is sent because of no single rule."""
    out = [Effect(str(r), r.axes) for r in plan.layout.rules]
    for h in plan.inputs:
        hit = {_rule_of(plan, name, axes, h.path, h.kind) for name, axes in chips_of(h) if axes} - {None}
        for k in hit:
            assert k is not None
            out[k].tensors += 1
            out[k].whole += whole_bytes(plan, h)
            out[k].local += h.bytes
    for value in _values(plan):
        for name, axes in value_chips(plan, value):
            k = _rule_of(plan, name, axes, value.path or "", value.kind) if axes else None
            if k is not None:
                out[k].values += 1
    other = Effect("other", ())
    for c in plan.collectives:
        at = [(c.cause.find(f"`{e.rule}`"), k) for k, e in enumerate(out) if f"`{e.rule}`" in c.cause]
        effect = out[min(at)[1]] if at else other
        effect.sent += c.total_bytes
        effect.seconds += step_seconds(c)
    return [*out, other] if other.sent else out


def step_seconds(c: Collective) -> float:
    """What a collective takes in a step; loops of unknown length count once."""
    return (c.seconds or 0.0) * (c.count or 1)


def kernel_seconds(time: Time) -> float:
    """The seconds of a step's estimate in which a kernel runs; in the rest it waits for what is sent."""
    return sum(op.seconds * op.count for op in time.ops)


def _rule_of(plan: Plan, name: str, axes: tuple[str, ...], path: str, kind: str | None) -> int | None:
    """The first rule that gives these axes to a dim of this name."""
    names = name.strip("()").split()  # a merged dim: (heads head_dim)
    for k, rule in enumerate(plan.layout.rules):
        if rule.dim in names and set(rule.axes) & set(axes) and _in_scope(rule, path, kind):
            return k
    return None


def _in_scope(rule: Rule, path: str, kind: str | None) -> bool:
    if rule.scope is None:
        return True
    return rule.scope == kind if rule.scope in SCOPES else path_matches(rule.scope, path)


def lowering_text(plan: Plan) -> str:
    """The lowering of a plan; under ``"jit"`` that its figures are estimates, and why ``"auto"`` chose it."""
    if plan.lowering != "jit":
        return plan.lowering
    because = f"; {plan.lowering_reason}" if plan.lowering_reason else ""
    return f"jit (estimate: XLA partitions this program{because})"


def _values(plan: Plan) -> Iterator[Value]:
    seen: set[int] = set()
    for v in (*plan.program.inputs, *(v for op in plan.program.root.walk() for v in op.outs)):
        if id(v) not in seen:
            seen.add(id(v))
            yield v


def value_chips(plan: Plan, value: Value) -> list[Chip]:
    """The dims of a value, with the axes that split them where it rests."""
    placed = plan.placements.get(value)
    spec: Spec = ((),) * len(value.shape) if placed is None else placed.stored.spec
    return [(plan.program.dim_name(value, i) or "_", tuple(axes)) for i, axes in enumerate(spec)]


def chips_of(h: ShardedArray) -> list[Chip]:
    """The dims of an argument or result, with the axes that split them."""
    return [(name or "_", axes) for name, axes in h.split]


def whole_bytes(plan: Plan, h: ShardedArray) -> float:
    """The bytes of all of an argument, were it in one piece."""
    parts = 1
    for _, axes in chips_of(h):
        for a in axes:
            parts *= plan.sizes[a]
    return h.bytes * parts


# -- values


@dataclass(slots=True)
class Largest:
    """Values alike in dims and dtype: how many kernels write one, its bytes on a device, a line that makes it."""

    chips: list[Chip]
    shape: tuple[int, ...]
    dtype: str
    times: int
    bytes: float
    source: str


def largest_values(plan: Plan, most: int = 12) -> list[Largest]:
    """The largest values between the arguments and the results that a device writes to its memory."""
    found: dict[Any, Largest] = {}
    for node in _kernels(computation_of(plan)):
        for item in node.writes:
            v = item.value
            if v.path is not None:
                continue
            chips = value_chips(plan, v)
            key = (format_dims(n for n, _ in chips), v.shape, str(v.aval.dtype))
            if key not in found:
                found[key] = Largest(chips, v.shape, str(v.aval.dtype), 0, item.bytes, line_of(v.op))
            found[key].times += 1
    return sorted(found.values(), key=lambda x: -x.bytes)[:most]


def _kernels(region: Computation) -> Iterator[Kernel]:
    for node in region.kernels:
        yield node
        for body in node.bodies:
            yield from _kernels(body)


# -- one layer


@dataclass(slots=True)
class Span:
    """A kernel or a collective in a loop body; seconds from the beginning of the body.

    ``waits``: a collective that kernels wait for, or that waits for them.
    """

    lane: str
    name: str
    start: float
    seconds: float
    axes: tuple[str, ...] = ()
    detail: str = ""
    source: str = ""
    waits: bool = False


@dataclass(slots=True)
class Body:
    """One iteration of a loop, as the estimate has it: kernels one after the other, collectives beside them where they can be."""

    trips: int
    source: str
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of one iteration."""
        return max((s.start + s.seconds for s in self.spans), default=0.0)


def waited_for(plan: Plan) -> str:
    """The collectives beside which programs for the chip do not go on, with their seconds of a step; "" if it has none."""
    chip = plan.chip
    if chip is None:
        return ""
    ringed = {c for step in plan.body.all_steps if isinstance(step, Reshard | Reduce) and step.ring for c in step.sends}
    mine = [c for c in plan.collectives if not plan.is_async(c.op) and c not in ringed]
    if not mine:
        return ""
    kinds = " and ".join(f"{op}s" for op in sorted({c.op for c in mine}))
    return f"programs for {chip.name} wait for {kinds}: {format_seconds(sum(map(step_seconds, mine)))}"


def rates(plan: Plan) -> str:
    """What was measured of the devices that the plan is priced with; "" where it is the chip table."""
    chip = plan.chip
    if chip is None or not chip.calibration:
        return ""
    parts = zip(("products", "memory traffic", "links"), (getattr(chip.compiler, k) for k in EFFICIENCIES), strict=True)
    return (
        f"calibrated on {chip.calibration}: {', '.join(f'{what} {part:.2g}' for what, part in parts)} of the peak rate"
    )


def bodies(plan: Plan, most: int = 2) -> list[Body]:
    """The loops that take longest, in program order, each as one iteration; none where no time is estimated."""
    time = time_of(plan)
    if time is None:
        return []
    took: dict[Op | None, list[OpTime]] = {}
    for op in time.ops:
        took.setdefault(op.origin, []).append(op)
    found = [_body(plan, node, body, took) for node, body in _loops(computation_of(plan))]
    ranked = sorted((b for b in found if b.seconds), key=lambda b: -b.seconds * b.trips)[:most]
    return [b for b in found if any(b is r for r in ranked)]


def _loops(region: Computation) -> Iterator[tuple[Kernel, Computation]]:
    for node in region.kernels:
        for body in node.bodies:
            if (body.trip_count or 1) > 1:
                yield node, body
            yield from _loops(body)


def _body(plan: Plan, node: Kernel, region: Computation, took: dict[Op | None, list[OpTime]]) -> Body:
    out = Body(region.trip_count or 1, node.source)
    hidden = hidden_collectives(plan)
    busy = linked = 0.0
    for kernel in region.kernels:
        origin = kernel.matmuls[0].op if kernel.matmuls else kernel.op
        if kernel.name == "move!":
            for c in () if kernel.step is None else kernel.step.sends:
                seconds, waits = c.seconds or 0.0, c not in hidden
                start = max(busy, linked) if waits else linked
                linked = start + seconds
                busy = linked if waits else busy
                out.spans.append(Span("links", c.op, start, seconds, c.axes, c.dims, c.source, waits))
            continue
        here = took.get(origin)
        if here:
            op = here.pop(0)
            dims = " | ".join(dict.fromkeys(format_dims(plan.program.dims(item.value)) for item in kernel.writes))
            out.spans.append(Span("compute", op.name, busy, op.seconds, (), dims, op.source))
            busy += op.seconds
    return out
