"""Seconds of every collective of a plan, where its chip is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..hardware.collective_time import seconds_of
from ..plan.collectives import volume_of

if TYPE_CHECKING:
    from ..plan.plan import Plan


def price(plan: Plan) -> None:
    """Fill in the seconds of every collective of a plan, where its chip is known."""
    chip = plan.chip
    if chip is None:
        return
    memo: dict[Any, float] = {}
    for c in plan.collectives:
        if c.seconds is not None:  # of a ring
            continue
        key = (c.op, c.axes, c.bytes, c.algorithm)
        if key not in memo:
            stages = [s for a in c.axes for s in plan.torus[a]]
            memo[key] = seconds_of(c.op, volume_of(c, plan.sizes), stages, chip, c.algorithm)
        c.seconds = memo[key]
