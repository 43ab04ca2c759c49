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
        out.append(Text.assemble(("pipeline", "bold"), "  " + "\n    ".join(_facts(plan, p))))
        if schedule.microbatches > 1:
            out.append(Text(picture(schedule), style="dim"))
    return out


def bubble_text(plan: Plan, p: Pipeline) -> str:
    """The bubble of a pipeline: the idle slots of a stage as a fraction of its slots, and with a chip the seconds of the plan's
    pipelines in idle slots as a fraction of the step (:func:`step_bounds`)."""
    slots, parts = p.schedule.all_slots, dict(step_bounds(plan))
    step = f", {100 * parts[BUBBLE] / sum(parts.values()):.0f} % of the step" if BUBBLE in parts else ""
    share = f"{100 * p.bubble:.1f} % of the layers' time{step}"
    return f"bubble: a stage is idle in {round(p.bubble * slots)} of its {slots} slots, {share}"


def _facts(plan: Plan, p: Pipeline) -> tuple[str, ...]:
    """(layers, stages, microbatches and schedule; bubble; ticks, microbatches in flight and bytes) of a pipeline, as text."""
    rounds = f"{p.schedule.rounds} rounds, " if p.schedule.rounds > 1 else ""
    split = f"{p.stages} stages, {rounds}{_microbatches(p.microbatches)}"
    once = ", weights gathered once a step" if p.gather == "step" else ""
    return (
        f"{p.layers} {p.dim} over {'+'.join(p.axes)}: {split}, {p.schedule.name}",
        bubble_text(plan, p),
        f"{p.ticks} ticks, {_microbatches(p.in_flight)} in flight, {format_bytes(p.bytes_between_stages)} between stages{once}",
    )


def _microbatches(n: float) -> str:
    """``4 microbatches``, in the singular for 1."""
    return f"{n:g} microbatch{'es' * (n != 1)}"


def pipelines_html(plan: Plan) -> str:
    """Each pipeline with its numbers and its picture, as HTML; "" without pipelines."""
    out = ""
    for p in plan.pipelines:
        first, *others = map(escape, _facts(plan, p))
        out += f"<p><b>{first}</b><br>{'<br>'.join(others)}</p>" + (_slots(plan, p) if p.microbatches > 1 else "")
    return out


def _slots(plan: Plan, p: Pipeline) -> str:
    """The picture of the slots of each stage, with a line for each of its loops and a column per tick; None is an idle slot."""
    schedule, loops = p.schedule, []
    for i, start in enumerate(schedule.starts):
        ticks = range(start, start + schedule.slots(i))
        rows = [[schedule.slot(i, k, t) for t in ticks] for k in range(schedule.stages)]
        loops.append({"kind": KINDS[schedule.order[i]][1:], "start": start, "rows": rows})
    about = f"{p.stages} stages by {p.ticks} ticks of {schedule.name}; {bubble_text(plan, p)}"
    data = {"stages": p.stages, "ticks": p.ticks, "rounds": p.rounds, "loops": loops}
    return html_picture("drawPipeline", about, data)


def picture(schedule: Schedule) -> str:
    """A line per stage with a character per tick for the slots that are not idle: F forward, B backward, W weight gradients, X
    several of these, · none."""
    ticks = range(min(schedule.ticks, MAX_TICKS))
    cut = "…" if schedule.ticks > MAX_TICKS else ""
    lines = []
    for k in range(schedule.stages):
        active = ({KINDS[schedule.order[i]][0] for i in range(schedule.loops) if schedule.slot(i, k, t)} for t in ticks)
        marks = ["·" if not kinds else "X" if len(kinds) > 1 else kinds.pop() for kinds in active]
        lines.append(f"    stage {k:<3} " + "".join(marks) + cut)
    weights = ", W weight gradients, X several" if "W" in schedule.order else ", X both"
    return "\n".join([*lines, f"    one column per tick, slots in it: F forward, B backward{weights}, · none"])
