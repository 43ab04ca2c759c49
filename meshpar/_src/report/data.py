"""A plan as JSON, for programs and for the downloads of its page; and the data that the script of the page draws."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from typing import Any

from ..cost.decoding import decoding_of
from ..cost.memory import memory_by_role, memory_of
from ..cost.time import time_of
from ..hardware.calibration import EFFICIENCIES
from ..plan.plan import Plan, ShardedArray
from ..units import format_seconds
from .colours import ROLE_CLASSES, AxisColours
from .facts import argument_dims, location_of_op, title
from .tables import html_picture
from .timeline import COMPUTE, LOOP, kernel_phases, step_bounds, timeline


def shards_place(plan: Plan, colours: AxisColours, h: ShardedArray | None = None) -> str:
    """The place in which the script of the page draws an argument: how it is sharded over the mesh; None: the chosen one."""
    mesh = escape(json.dumps([[a, n, colours.of[a]] for a, n in plan.sizes.items()]))
    fixed = "" if h is None else f' data-path="{escape(h.path)}" data-cut="{shards_data(h)}"'
    return f'<div class="drawing" data-mesh="{mesh}"{fixed}></div>'


def shards_data(h: ShardedArray) -> str:
    """Name, size and axes of each dim, as JSON in an attribute of a page."""
    split = zip(argument_dims(h), h.shape, strict=True)
    return escape(json.dumps([[name, n, list(axes)] for (name, axes), n in split]))


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
            "donated": [plan.inputs[i].path for i in sorted(plan.donated)],
            "memory": memory_of(plan).to_dict(),
            "time": None if time is None else {**time.to_dict(), "bounds": dict(step_bounds(plan))},
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


def timeline_picture(plan: Plan, colours: AxisColours) -> str:
    """The timeline of a step; "" without a chip. A loop has one iteration, which the script repeats."""
    line = timeline(plan)
    if line is None:
        return ""
    lanes = {COMPUTE, *(span.lane for span, _ in line.walk())} - {LOOP}
    tree = asdict(line, dict_factory=lambda items: {key: value for key, value in items if value not in ("", (), None)})
    data = {**tree, "lanes": sorted(lanes, key=lambda lane: (lane != COMPUTE, lane)), "colours": colours.of}
    return html_picture("drawTimeline", f"timeline of a step of {title(plan)}: {format_seconds(line.seconds)}", data)


def memory_picture(plan: Plan) -> str:
    """Live bytes by role after each kernel of a step, with its phase, and the capacity of the device."""
    phases, stacks = kernel_phases(plan), memory_by_role(plan)
    roles = [role for role in ROLE_CLASSES if any(stack[role] > 0 for stack in stacks)]
    points = [
        [phases[node], node.name, node.source, *(round(stack[role]) for role in roles)]
        for (_, _, node), stack in zip(memory_of(plan).points, stacks, strict=True)
    ]
    capacity = None if plan.chip is None else plan.chip.per_device().hbm
    data = {"roles": [[role, ROLE_CLASSES[role]] for role in roles], "points": points, "capacity": capacity}
    return html_picture("drawMemory", "live bytes over the kernels of a step", data)


def roofline_picture(plan: Plan) -> str:
    """FLOPs, bytes of HBM traffic and seconds in a step of each line with matmuls, and of the step; "" without a chip."""
    time, chip = time_of(plan), plan.chip
    if time is None or chip is None:
        return ""
    device, ops = chip.per_device(), [o for o in time.ops if o.bytes]
    points = [(location_of_op(o.origin), o.flops * o.count, o.bytes * o.count, o.seconds * o.count) for o in ops]
    data = {"chip": chip.name, "flops": device.flops, "bandwidth": device.hbm_bandwidth, "seconds": time.seconds}
    return html_picture("drawRoofline", "roofline of the step", {**data, "points": points}) if time.compute else ""
