"""Pipelines of a plan in the terminal and in its page: their numbers, and a picture of the slots of every stage at every tick."""

from __future__ import annotations

from html import escape

from rich.text import Text

from ..plan.plan import Plan
from ..program.pipeline import Pipeline, Schedule
from ..units import format_bytes
from .tables import html_picture
from .timeline import BUBBLE, step_bounds

MAX_TICKS = 96
"""Ticks that a picture in the terminal shows."""
KINDS = {
    "F": ("F", 0, "forward"),
    "R": ("F", 0, "recomputed forward"),
    "B": ("B", 1, "backward"),
    "W": ("W", 2, "weight gradients"),
}
"""Of the slots of a loop, by its letter in the order of a schedule: character in the terminal, color in a page, name."""


def pipeline_section(plan: Plan) -> list[Text]:
    """Each pipeline with its picture; empty without pipelines."""
    out: list[Text] = []
    for p in plan.pipelines:
        schedule = p.schedule
        out.append(Text.assemble(("pipeline", "bold"), "  {}\n    {}".format(*_facts(plan, p))))
        if schedule.microbatches > 1:
            out.append(Text(picture(schedule), style="dim"))
    return out


def _facts(plan: Plan, p: Pipeline) -> tuple[str, str]:
    """(layers, stages, microbatches and schedule; ticks, bubble, microbatches in flight and bytes) of a pipeline, as text.

    The bubble is the idle slots: of all slots of a stage, and, with a chip, of the step.
    """
    schedule, bounds, several = p.schedule, dict(step_bounds(plan)), "es" * (p.microbatches > 1)
    idle, slots = 100 * p.bubble, sum(map(schedule.slots, range(schedule.loops)))
    share = f", {100 * bounds[BUBBLE] / plan.seconds:.0f} % of the step" if BUBBLE in bounds else ""
    count = f"{p.rounds} rounds, " * (p.rounds > 1) + f"{p.microbatches} microbatch{several}"
    once = ", weights gathered once a step" if p.gather == "step" else ""
    return (
        f"{p.layers} {p.dim} over {'+'.join(p.axes)}: {p.stages} stages, {count}, {schedule.name}",
        f"{p.ticks} ticks; bubble: {p.bubble * slots:.0f} of the {slots} slots of a stage are idle ({idle:.1f} %){share}; "
        f"{p.in_flight:g} microbatch{several} in flight, {format_bytes(p.bytes_between_stages)} between stages{once}",
    )


def pipelines_html(plan: Plan) -> str:
    """Each pipeline with its numbers and its picture, as HTML; "" without pipelines."""
    out = ""
    for p in plan.pipelines:
        facts = "<p><b>{}</b><br>{}</p>".format(*map(escape, _facts(plan, p)))
        out += facts + (_slots(p) if p.microbatches > 1 else "")
    return out


def _slots(p: Pipeline) -> str:
    """The picture of the slots of each stage, with a line for each of its loops and a column per tick; None is an idle slot."""
    schedule, loops = p.schedule, []
    for i, start in enumerate(schedule.starts):
        ticks = range(start, start + schedule.slots(i))
        rows = [[schedule.slot(i, k, t) for t in ticks] for k in range(schedule.stages)]
        loops.append({"kind": KINDS[schedule.order[i]][1:], "start": start, "rows": rows})
    about = f"{p.stages} stages by {p.ticks} ticks of {schedule.name}, {100 * p.bubble:.1f} % of the slots are idle"
    data = {"stages": p.stages, "ticks": p.ticks, "rounds": p.rounds, "loops": loops}
    return html_picture("drawPipeline", about, data)


def picture(schedule: Schedule) -> str:
    """A line per stage with a character per tick: F forward, B backward, W weight gradients, X several of these, · no slot."""
    ticks = range(min(schedule.ticks, MAX_TICKS))
    cut = "…" if schedule.ticks > MAX_TICKS else ""
    lines = []
    for k in range(schedule.stages):
        active = ({KINDS[schedule.order[i]][0] for i in range(schedule.loops) if schedule.slot(i, k, t)} for t in ticks)
        marks = ["·" if not kinds else "X" if len(kinds) > 1 else kinds.pop() for kinds in active]
        lines.append(f"    stage {k:<3} " + "".join(marks) + cut)
    weights = ", W weight gradients, X several" if "W" in schedule.order else ", X both"
    return "\n".join([*lines, f"    one column per tick: F forward, B backward{weights}, · idle"])
