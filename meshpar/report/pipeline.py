"""Pipelines of a plan in the terminal: their numbers, and a picture of the slots of every stage at every tick."""

from __future__ import annotations

from rich.text import Text

from ..plan.plan import Plan
from ..program.pipeline import Schedule
from ..units import format_bytes

MAX_TICKS = 96
"""Ticks that a picture shows."""


def pipeline_section(plan: Plan) -> list[Text]:
    """Each pipeline with its picture; empty without pipelines."""
    out: list[Text] = []
    for p in plan.pipelines:
        schedule = p.schedule
        text = (
            f"  {p.layers} {p.dim} over {'+'.join(p.axes)}: {p.stages} stages, {p.microbatches} microbatches, {schedule.name}\n"
            f"    {p.ticks} ticks, bubble {100 * p.bubble:.1f} %, {p.in_flight:g} microbatches in flight, "
            f"{format_bytes(p.bytes_between_stages)} between stages"
        )
        out.append(Text.assemble(("pipeline", "bold"), text))
        if schedule.microbatches > 1:
            out.append(Text(picture(schedule), style="dim"))
    return out


def picture(schedule: Schedule) -> str:
    """A line per stage with a character per tick: F a forward slot, B a backward slot, X both, · neither."""
    ticks = range(min(schedule.ticks, MAX_TICKS))
    cut = "…" if schedule.ticks > MAX_TICKS else ""
    lines = []
    for k in range(schedule.stages):
        active = [tuple(schedule.slot(i, k, t) is not None for i in range(schedule.loops)) for t in ticks]
        marks = {(True,): "F", (False,): "·", (True, False): "F", (False, True): "B", (True, True): "X"}
        lines.append(f"    stage {k:<3} " + "".join(marks.get(slots, "·") for slots in active) + cut)
    return "\n".join([*lines, "    one column per tick: F forward, B backward, X both, · idle"])
