"""The seconds of a planned step on a chip, with the totals of compute, HBM traffic and communication.

The estimate is the length of the schedule of kernels and collectives (:mod:`cost.schedule`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..program.ir import Op
from .caching import cached_on_plan
from .device_computation import computation_of
from .flops import model_flops
from .kernel_time import KernelTime, kernel_times
from .schedule import host_seconds, schedules, separate_collectives


@dataclass(slots=True)
class Time:
    """Seconds of a step on one device; every device does the same.

    Attributes:
      compute: of all matmuls, at the matrix unit's rate.
      memory: of all traffic, at HBM's rate.
      vector: of the vector units, in all kernels (elementwise ops, reductions, conversions).
      starts: of the starts of kernels that are shorter than the shortest one of the chip (:attr:`KernelTime.start_seconds`).
      communication: of all collectives, sequentially.
      to_host, to_device: of the copies to the host, and of those to the device, over the link between them (0.0 if its rate is not
        known). The link carries both directions concurrently.
      busiest_axis: of the collectives over one mesh axis, sequentially, for the axis with the most. They share links, so no
        schedule of a step is shorter.
      seconds: the estimate of the step: the length of its schedule (:func:`cost.schedule.schedules`), and the exposed
        seconds of collective matmuls (rings).
      model_flops: of the matmuls that the model needs, on all devices together, without recomputation, redundant work and
        rounding up.
      peak_flops: FLOP/s of all devices together.
      ops: every kernel.
    """

    compute: float
    memory: float
    vector: float
    starts: float
    communication: float
    busiest_axis: float
    seconds: float
    model_flops: float
    peak_flops: float
    ops: list[KernelTime] = field(default_factory=list, repr=False)
    to_host: float = 0.0
    to_device: float = 0.0

    @property
    def overlapped(self) -> float:
        """The lower bound: the longest of compute, memory traffic, the collectives over one mesh axis, and the copies to the host
        or to the device; the others are hidden."""
        return max(self.compute, self.memory, self.busiest_axis, self.to_host, self.to_device)

    @property
    def serial(self) -> float:
        """The upper bound: nothing overlaps, neither kernels, collectives and copies nor the units of a kernel."""
        work = self.compute + self.memory + self.vector + self.starts
        return work + self.communication + self.to_host + self.to_device

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation at the estimate: ``model_flops / (seconds · peak FLOP/s of all devices)``."""
        return self.model_flops / (self.seconds * self.peak_flops) if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Seconds by part, bounds, estimate, utilisation, and the ten kernels that take longest."""
        parts = ("compute", "memory", "vector", "starts", "communication", "to_host", "to_device")
        keys = (*parts, "overlapped", "serial", "seconds", "mfu", "model_flops")
        top = sorted(self.ops, key=lambda o: -o.seconds * o.count)[:10]
        return {**{key: getattr(self, key) for key in keys}, "ops": [o.to_dict() for o in top]}


@cached_on_plan
def time_of(plan: Plan) -> Time | None:
    """The time of a step on the plan's chip; None without a chip."""
    if plan.chip is None:
        return None
    ops = list(kernel_times(plan).values())
    units = ("matmul_seconds", "traffic_seconds", "vector_seconds", "start_seconds")
    compute, memory, vector, starts = (sum(getattr(k, unit) * k.count for k in ops) for unit in units)
    busiest_axis, _ = _busiest_axis(plan.collectives)
    unscheduled = math.fsum(seconds for *_, seconds in unscheduled_seconds(plan))
    seconds = schedules(plan)[computation_of(plan)].seconds + unscheduled
    peak_flops = plan.chip.per_device().flops * math.prod(plan.sizes.values())
    to_host, to_device = (
        host_seconds(plan, sum(t.total_bytes for t in plan.transfers if t.to == to)) for to in ("host", "device")
    )
    work = compute, memory, vector, starts, plan.comm_seconds, busiest_axis
    return Time(*work, seconds, model_flops(plan), peak_flops, ops, to_host, to_device)


def _busiest_axis(collectives: Iterable[Collective]) -> tuple[float, str]:
    """Seconds of the collectives over each mesh axis, sequentially: the largest, and its axis. One over several axes counts for
    each of them."""
    seconds: dict[str, list[float]] = {}
    for c in collectives:
        for axis in c.axes:
            seconds.setdefault(axis, []).append(c.total_seconds)
    return max(((sum(of), axis) for axis, of in seconds.items()), default=(0.0, ""))


def unscheduled_seconds(plan: Plan) -> Iterator[tuple[str, tuple[str, ...], str, Op | None, float]]:
    """(name, axes, cause, op, seconds) of the times that a step's estimate adds to its schedule: the exposed seconds of rings, of
    collectives that no kernel of it sends, and the time that the collectives over one axis take longer than all of these."""
    seconds = [schedules(plan)[computation_of(plan)].seconds]
    for o in plan.overlaps:
        if o.choice != "xla" and o.exposed is not None:
            seconds.append(o.exposed[o.choice] * (o.count or 1))
            yield f"exposed part of a {o.choice}", o.axes, o.reason, o.origin, seconds[-1]
    scheduled = {t.collective for s in schedules(plan).values() for t in s.transfers}
    for c in (c for step in plan.body.all_steps for c in separate_collectives(step) if c not in scheduled):
        seconds.append(c.total_seconds)
        yield c.op, c.axes, c.explanation, c.origin, seconds[-1]
    busiest, axis = _busiest_axis(plan.collectives)
    if (rest := busiest - math.fsum(seconds)) > 0:
        yield "waits for links", (axis,), f"all collectives over {axis} share links", None, rest
