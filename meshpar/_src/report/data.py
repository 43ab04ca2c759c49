"""A plan as JSON, for programs and for the downloads of its page."""

from __future__ import annotations

import json
from typing import Any

from ..cost.decoding import decoding_of
from ..cost.memory import memory_of
from ..cost.time import time_of
from ..hardware.calibration import EFFICIENCIES
from ..plan.plan import Plan


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
