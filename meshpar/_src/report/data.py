"""A plan as JSON, for programs and for the downloads of its page; and the data that the script of the page draws."""

from __future__ import annotations

import json
import math
from html import escape
from typing import Any

from ..cost.decoding import decoding_of
from ..cost.memory import memory_by_role, memory_of
from ..cost.time import time_of
from ..hardware.calibration import EFFICIENCIES
from ..plan.plan import Plan
from ..units import format_bytes, format_memory, format_seconds, memory_ticks
from .colours import ROLE_CLASSES, AxisColours
from .facts import location_of_op, title
from .timeline import COMPUTE, HOST, LOOP, Span, Timeline, kernel_phases, timeline


def plan_json(plan: Plan) -> str:
    """The plan as JSON; :meth:`meshpar.Plan.to_json` describes it."""
    time, decoding = time_of(plan), decoding_of(plan)
    records = ("inputs", "outputs", "constants", "collectives", "arrivals", "transfers")
    named, total, _ = plan.program.coverage()
    return json.dumps(
        {
            "mesh": plan.sizes,
            "topology": plan.topology,
            "chip": None if plan.chip is None else plan.chip.name,
            "calibration": calibration_rates(plan),
            "layout": str(plan.layout),
            "lowering": {
                "lowering": plan.lowering,
                "asked": plan.request.lowering,
                "reason": plan.lowering_reason,
                "estimate": plan.lowering == "jit",
            },
            **{name: [record.to_dict() for record in getattr(plan, name)] for name in records},
            "memory": memory_of(plan).to_dict(),
            "time": None if time is None else time.to_dict(),
            "decoding": None if decoding is None else decoding.to_dict(),
            "overlap": [o.to_dict() for o in plan.overlaps],
            "options": plan.options.to_dict(),
            "joins": [str(j) for j in plan.joins],
            "notes": list(plan.notes),
            "dims": {"named": named, "all": total, "unnamed": plan.unnamed},
        }
    )


def calibration_rates(plan: Plan) -> dict[str, Any] | None:
    """The calibration used: the devices it was measured on, and the fractions of peak rates; None: the chip table."""
    if plan.chip is None or not plan.chip.calibration:
        return None
    return {"measured_on": plan.chip.calibration, **{k: getattr(plan.chip.compiler, k) for k in EFFICIENCIES}}


def drawing(name: str, label: str, data: Any) -> str:
    """The place in which the function ``name`` of the page's script draws some data; ``label``: for screen readers."""
    text = json.dumps(data).replace("<", "\\u003c")
    script = f'<script type="application/json">{text}</script>'
    return f'<div class="picture" data-draw="{name}" data-label="{escape(label)}">{script}</div>'


def timeline_drawing(plan: Plan, colours: AxisColours) -> str:
    """The timeline of a step; "" without a chip. A loop has one iteration, which the script repeats."""
    line = timeline(plan)
    if line is None:
        return ""
    used = dict.fromkeys(span.lane for span, _ in line.walk())
    lanes = [
        COMPUTE,
        *sorted(lane for lane in used if lane not in (COMPUTE, LOOP, HOST)),
        *([HOST] if HOST in used else []),
    ]

    def run(of: Timeline) -> dict[str, Any]:
        return {"seconds": of.seconds, "spans": [span(s) for s in of.spans]}

    def span(s: Span) -> dict[str, Any]:
        out = {"lane": s.lane, "at": s.start, "s": s.seconds, "name": s.name, "tip": _tip(s), "phase": s.phase}
        if s.body is not None:
            return {**out, "trips": s.trips, "body": run(s.body)}
        return {**out, "exposed": s.exposed, "css": colours.first(s.axes) if s.axes else "ink", "dims": s.detail}

    what = f"timeline of a step of {title(plan)}: {format_seconds(line.seconds)}"
    return drawing("drawTimeline", what, {**run(line), "lanes": lanes})


def _tip(s: Span) -> str:
    """The lines of the tooltip of a timeline's box: name, seconds, dims and bytes, cause with its rule, source line."""
    if s.body is not None:
        times = f"{format_seconds(s.seconds)} = {s.trips} × {format_seconds(s.body.seconds)}"
        return "\n".join(filter(None, (f"{s.name}: {times}", s.source)))
    over = f" over {'+'.join(s.axes)}" if s.axes else ""
    wait = "" if s.lane == COMPUTE else f", {format_seconds(s.exposed)} exposed" if s.exposed else ", hidden"
    of = {COMPUTE: "of HBM traffic", HOST: "per device"}.get(s.lane, "sent per device")
    traffic = f"{format_bytes(s.bytes)} {of}" if s.bytes else ""
    head = f"{s.name}{over}: {format_seconds(s.seconds)}{wait}"
    return "\n".join(filter(None, (head, s.detail or "(scalar)", traffic, s.cause, s.source)))


def memory_drawing(plan: Plan) -> str:
    """Live bytes by role after each kernel of a step, with its phase, and the capacity of the device."""
    memory, chip, phases = memory_of(plan), plan.chip, kernel_phases(plan)
    capacity = chip.per_device().hbm if chip is not None else math.inf
    top = memory.peak * 1.12 or 1.0
    if capacity < 3 * memory.peak:
        top = max(top, capacity * 1.05)
    stacks = memory_by_role(plan)
    roles = [role for role in ROLE_CLASSES if any(stack[role] > 0 for stack in stacks)]
    points = [
        {
            "phase": phases[node],
            "name": node.origin_name,
            "source": node.source,
            "bytes": [stack[role] for role in roles],
        }
        for (_, _, node), stack in zip(memory.points, stacks, strict=True)
    ]
    capacity_text = "" if math.isinf(capacity) else format_memory(capacity)
    data = {"roles": [[role, ROLE_CLASSES[role]] for role in roles], "points": points, "top": top}
    data |= {"ticks": memory_ticks(top), "peakText": format_memory(memory.peak), "capacityText": capacity_text}
    data["capacity"] = None if math.isinf(capacity) else capacity
    return drawing("drawMemory", f"live bytes over the ops of a step; the peak is {format_memory(memory.peak)}", data)


def roofline_drawing(plan: Plan, most: int = 12) -> str:
    """FLOPs per byte and FLOP/s of the step and of the lines with the longest time; "" without a chip, or without matmuls."""
    time, chip = time_of(plan), plan.chip
    if time is None or chip is None:
        return ""
    groups: dict[str, list[float]] = {}
    for op in time.ops:
        name = f"{op.name} at {location_of_op(op.origin)}"
        group = groups.setdefault(name, [0.0, 0.0, 0.0])
        for k, amount in enumerate((op.flops, op.bytes, op.seconds)):
            group[k] += amount * op.count
    step = [sum(group[k] for group in groups.values()) for k in range(2)]
    if not all(step):
        return ""
    longest = sorted(groups.items(), key=lambda g: -g[1][2])
    shown = [[name, *group] for name, group in longest if group[0] and group[1]][:most]
    device = chip.per_device()
    points = [["the step", *step, time.seconds], *shown]
    data = {"flops": device.flops, "bandwidth": device.hbm_bandwidth, "chip": chip.name, "points": points}
    reached = f"{100 * step[0] / (time.seconds * device.flops):.0f} % of the peak FLOP/s"
    return drawing("drawRoofline", f"roofline of the step: {step[0] / step[1]:.0f} FLOPs per byte, {reached}", data)
