"""The time of a planned step on a chip: what each kernel computes and reads, what each collective sends, and what limits.

A kernel's products at the matrix unit's rate, its traffic with HBM, and the way of its elements through the vector units overlap
(:mod:`meshpar.cost.kernel_time`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan.collectives import Collective, duration, human
from ..plan.plan import Plan
from ..program.ir import Op
from .caching import cached_on_plan
from .collective_matmul import later_stage_seconds
from .flops import model_flops
from .fusion import Computation, line_of
from .kernel_time import kernel_times
from .kernels import computation_of
from .schedule import async_collectives, concurrent_matmuls, hidden_collectives, separate_collectives


@dataclass(slots=True)
class OpTime:
    """One kernel on one device.

    Attributes:
      name: the primitive whose result it is.
      flops: of its products, once, dims rounded up to the matrix unit.
      bytes: to and from HBM, once.
      seconds: once.
      count: how often it runs in a step; loops of unknown length count once.
      origin: its op.
    """

    name: str
    flops: float
    bytes: float
    seconds: float
    count: int
    origin: Op | None = None

    @property
    def source(self) -> str:
        """The user's line, ``file.py:12 (function)``."""
        return line_of(self.origin)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "flops": self.flops, "bytes": self.bytes, "seconds": self.seconds, "count": self.count,
                "source": self.source}  # fmt: skip


@dataclass(slots=True)
class Time:
    """Seconds of a step on one device (all do the same).

    Attributes:
      compute: all products at the matrix unit's rate.
      memory: all traffic at HBM's rate.
      communication: all collectives, one after the other, each by itself.
      seconds: the estimate: the kernels one after the other; collectives of
        weights and gradients, which wait for nothing else in their loop, behind the kernels of that loop as far as those last,
        if its programs go on beside them (``Plan.waits``; of a staged sum beside its first stage); the other collectives on
        top; of what runs in blocks, what its products do not hide.
      model_flops: of the products that the model asks for, on all devices together: without recomputation, without what
        devices do twice, nothing rounded up.
      ops: every kernel.
    """

    compute: float
    memory: float
    communication: float
    seconds: float
    model_flops: float
    peak_flops: float
    ops: list[OpTime] = field(default_factory=list, repr=False)
    bottleneck: str = ""

    @property
    def overlapped(self) -> float:
        """The lower bound: the longest of compute, memory and communication, the others hidden behind it."""
        return max(self.compute, self.memory, self.communication)

    @property
    def serial(self) -> float:
        """The upper bound: nothing overlaps."""
        return self.compute + self.memory + self.communication

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation at the estimate: ``model_flops / (seconds · peak FLOP/s of all devices)``."""
        return self.model_flops / (self.seconds * self.peak_flops) if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Seconds by part, bounds, estimate, utilisation, bottleneck, and the ten kernels that take longest."""
        top = sorted(self.ops, key=lambda o: -o.seconds * o.count)[:10]
        return {
            "compute": self.compute, "memory": self.memory, "communication": self.communication,
            "overlapped": self.overlapped, "serial": self.serial, "seconds": self.seconds, "mfu": self.mfu,
            "model_flops": self.model_flops, "bottleneck": self.bottleneck, "ops": [o.to_dict() for o in top],
        }  # fmt: skip


@cached_on_plan
def time_of(plan: Plan) -> Time | None:
    """The time of a step on the plan's chip; None: it is not known."""
    if plan.chip is None:
        return None
    ops: list[OpTime] = []
    compute = memory = 0.0
    for node, k in kernel_times(plan).items():
        compute += k.busy * k.count
        memory += k.moved * k.count
        name = node.products[0].op.name if node.products else node.name.rstrip("!")
        origin = node.products[0].op if node.products else node.op
        ops.append(OpTime(name, k.flops, k.bytes, k.seconds, k.count, origin))
    model = model_flops(plan)
    communication = sum((c.seconds or 0.0) * (c.count or 1) for c in plan.collectives)
    seconds = _estimate(plan)
    devices = 1
    for n in plan.sizes.values():
        devices *= n
    out = Time(compute, memory, communication, seconds, model, plan.chip.per_device().flops * devices, ops)
    out.bottleneck = _bottleneck(out, plan.collectives)
    return out


def _estimate(plan: Plan) -> float:
    """The step: what its loops take on a clock, what collectives of their own leave exposed, what rings do."""
    exposed = sum(
        o.exposed[o.choice] * (o.count or 1) for o in plan.overlaps if o.choice != "xla" and o.exposed is not None
    )
    where = hidden_collectives(plan)
    parts = {node.step: b.exposed for found in concurrent_matmuls(plan).values() for node, b in found.items()}
    for step in plan.body.every:
        for c in separate_collectives(step):
            if c not in where:
                exposed += (c.seconds or 0.0) * (c.count or 1) * parts.get(step, 1.0)
    return exposed + _clock(plan, computation_of(plan))


def _clock(plan: Plan, region: Computation) -> float:
    """Seconds of one run of a region's kernels and of what hidden_collectives behind them.

    Collectives that hide go one after the other. What is sent for ahead is on its way from when the product before the last one
    began, and the next kernel waits for it. A gradient is sent while the next product runs; the one after that waits for it,
    and so does the loop's end (:func:`meshpar.cost.schedule.kernel_schedules`). So large gradients beside short products are
    exposed,     however long their loop is.
    """
    took, where, flights = kernel_times(plan), hidden_collectives(plan), async_collectives(plan)[region]
    now = links = 0.0
    begun = [0.0, 0.0]  # when the last two products began
    sent: list[float] = []  # when gradients arrive that are under way: before the last product, and since
    waiting: list[float] = []
    for node in region.kernels:
        for body in node.regions:
            now += _clock(plan, body) * (1 if body.trips is None else body.trips)
        if node.name == "move!" and node.step is not None:
            for c in separate_collectives(node.step):
                if c not in where:
                    continue
                seconds, late = c.seconds or 0.0, later_stage_seconds(plan, c)
                if flights[node].prefetched:
                    links = max(links, begun[0]) + seconds
                    now = max(now, links)
                else:
                    links = max(links, now) + seconds - late
                    sent.append(links)
                    now += late
        if node in took:
            if node.products:
                now = max([now, *waiting])
                waiting, sent = sent, []
                begun = [begun[1], now]
            now += took[node].seconds
    return max(now, links)


def _bottleneck(time: Time, collectives: Sequence[Collective]) -> str:
    """What limits, in words, with the largest collective and its cause, or the largest kernel."""
    parts = {"communication": time.communication, "compute": time.compute, "memory traffic": time.memory}
    name, most = max(parts.items(), key=lambda x: x[1])
    if most == 0:
        return "nothing to do"
    others = ", ".join(f"{k} {duration(v)}" for k, v in parts.items() if k != name)
    if name == "communication":
        groups: dict[Any, float] = {}
        for c in collectives:
            key = (c.op, c.axes, c.cause)
            groups[key] = groups.get(key, 0.0) + (c.seconds or 0.0) * (c.count or 1)
        (op, axes, cause), seconds = max(groups.items(), key=lambda x: x[1])
        return (f"communication: {duration(most)} of collectives ({others}); most of it, {duration(seconds)}, is {op} over "
                f"{'+'.join(axes)}: {cause}")  # fmt: skip
    if name == "compute":
        top = max(time.ops, key=lambda o: o.flops * o.count)
        return f"compute: {duration(most)} of products ({others}); the largest is {top.name} at {top.source}"
    top = max(time.ops, key=lambda o: o.bytes * o.count)
    return (f"memory traffic: {duration(most)} ({others}); most of it, {human(top.bytes * top.count)}, by {top.name} at "
            f"{top.source}")  # fmt: skip
