"""The seconds of a planned step on a chip, with the totals of compute, HBM traffic and communication, and the bottleneck.

The estimate runs the kernels (:mod:`meshpar.cost.kernel_time`) in order, with the collectives of :mod:`meshpar.cost.schedule` in
flight; other collectives add the part of their time that stays exposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..program.ir import Op
from ..units import format_bytes, format_seconds
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
      name: the primitive that computes its result.
      flops: of the matmuls of one run, dims rounded up to the matrix unit.
      bytes: read from and written to HBM in one run.
      seconds: of one run.
      count: runs in a step; a loop of unknown length counts once.
      origin: the op of the program that it computes.
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
    """Seconds of a step on one device; every device does the same.

    Attributes:
      compute: of all matmuls, at the matrix unit's rate.
      memory: of all traffic, at HBM's rate.
      communication: of all collectives, sequentially.
      seconds: the estimate of the step. Kernels run sequentially. Asynchronous collectives of weights and gradients
        (``Plan.is_async``) are hidden by the kernels of their loop body as far as these last; the other collectives add their
        seconds, less those of concurrent matmuls; a collective matmul (ring) adds its exposed seconds.
      model_flops: of the matmuls that the model needs, on all devices together, without recomputation, redundant work and
        rounding up.
      peak_flops: FLOP/s of all devices together.
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
    """The time of a step on the plan's chip; None without a chip."""
    if plan.chip is None:
        return None
    ops: list[OpTime] = []
    compute = memory = 0.0
    for kernel, k in kernel_times(plan).items():
        compute += k.matmul_seconds * k.count
        memory += k.traffic_seconds * k.count
        name = kernel.matmuls[0].op.name if kernel.matmuls else kernel.name.rstrip("!")
        origin = kernel.matmuls[0].op if kernel.matmuls else kernel.op
        ops.append(OpTime(name, k.flops, k.bytes, k.seconds, k.count, origin))
    model = model_flops(plan)
    communication = sum((c.seconds or 0.0) * (c.count or 1) for c in plan.collectives)
    seconds = _estimate(plan)
    peak_flops = plan.chip.per_device().flops * math.prod(plan.sizes.values())
    out = Time(compute, memory, communication, seconds, model, peak_flops, ops)
    out.bottleneck = _bottleneck(out, plan.collectives)
    return out


def _estimate(plan: Plan) -> float:
    """Seconds of a step: kernels with the collectives that they hide, and the exposed seconds of all others."""
    exposed = sum(
        o.exposed[o.choice] * (o.count or 1) for o in plan.overlaps if o.choice != "xla" and o.exposed is not None
    )
    hidden = hidden_collectives(plan)
    exposed_part = {move.step: m.exposed for moves in concurrent_matmuls(plan).values() for move, m in moves.items()}
    for step in plan.body.all_steps:
        for c in separate_collectives(step):
            if c not in hidden:
                exposed += (c.seconds or 0.0) * (c.count or 1) * exposed_part.get(step, 1.0)
    return exposed + _run_seconds(plan, computation_of(plan))


def _run_seconds(plan: Plan, computation: Computation) -> float:
    """Seconds of one run of a computation: its kernels, with the asynchronous collectives of weights and gradients in flight.

    The links send one of these at a time. A prefetched weight is sent from the start of the matmul before the last one, and the
    next kernel blocks on it. A gradient is sent during the next matmul; the matmul after that blocks on it, and so does the end of
    the computation. Large gradients next to short matmuls are therefore exposed, however long the loop is. Later stages of a
    staged reduce-scatter block the kernels (:func:`later_stage_seconds`).
    """
    times, hidden = kernel_times(plan), hidden_collectives(plan)
    overlapped = async_collectives(plan)[computation]
    now = links_free = 0.0
    starts = [0.0, 0.0]  # of the last two matmuls
    sent: list[float] = []  # ends of the gradients' collectives that started since the last matmul
    awaited: list[float] = []  # ... and of those before, on which the next matmul blocks
    for kernel in computation.kernels:
        for body in kernel.bodies:
            now += _run_seconds(plan, body) * (1 if body.trip_count is None else body.trip_count)
        if kernel.name == "move!" and kernel.step is not None:
            for c in separate_collectives(kernel.step):
                if c not in hidden:
                    continue
                seconds, blocking = c.seconds or 0.0, later_stage_seconds(plan, c)
                if overlapped[kernel].prefetched:
                    links_free = max(links_free, starts[0]) + seconds
                    now = max(now, links_free)
                else:
                    links_free = max(links_free, now) + seconds - blocking
                    sent.append(links_free)
                    now += blocking
        if kernel in times:
            if kernel.matmuls:
                now = max([now, *awaited])
                awaited, sent = sent, []
                starts = [starts[1], now]
            now += times[kernel].seconds
    return max(now, links_free)


def _bottleneck(time: Time, collectives: Sequence[Collective]) -> str:
    """A sentence: the largest of compute, HBM traffic and communication, with its largest collective and cause, or kernel."""
    parts = {"communication": time.communication, "compute": time.compute, "memory traffic": time.memory}
    name, most = max(parts.items(), key=lambda x: x[1])
    if most == 0:
        return "nothing to do"
    others = ", ".join(f"{k} {format_seconds(v)}" for k, v in parts.items() if k != name)
    if name == "communication":
        groups: dict[Any, float] = {}
        for c in collectives:
            key = (c.op, c.axes, c.cause)
            groups[key] = groups.get(key, 0.0) + (c.seconds or 0.0) * (c.count or 1)
        (op, axes, cause), seconds = max(groups.items(), key=lambda x: x[1])
        return (f"communication: {format_seconds(most)} of collectives ({others}); most of it, "
                f"{format_seconds(seconds)}, is {op} over "
                f"{'+'.join(axes)}: {cause}")  # fmt: skip
    if name == "compute":
        top = max(time.ops, key=lambda o: o.flops * o.count)
        return f"compute: {format_seconds(most)} of matmuls ({others}); the largest is {top.name} at {top.source}"
    top = max(time.ops, key=lambda o: o.bytes * o.count)
    return (f"memory traffic: {format_seconds(most)} ({others}); most of it, {format_bytes(top.bytes * top.count)}, "
            f"by {top.name} at "
            f"{top.source}")  # fmt: skip
