"""Pipelines of a plan in the terminal and in its page: their numbers, and a picture of the slots of every stage at every tick."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from html import escape

from rich.text import Text

from ..plan.plan import Plan
from ..program.pipeline import Pipeline, Schedule
from ..units import format_bytes
from .tables import key

MAX_TICKS = 96
"""Ticks that a picture in the terminal shows."""
MAX_NUMBERED_TICKS = 64
"""Ticks of a picture in a page whose slots have the numbers of their microbatches; longer ones are drawn as bars."""
KINDS = {
    "F": ("F", 0, "forward"),
    "R": ("F", 0, "recomputed forward"),
    "B": ("B", 1, "backward"),
    "W": ("W", 2, "weight gradients"),
}
"""Of the slots of a loop, by its letter in the order of a schedule: character in the terminal, color in a page, name."""
CELL_WIDTH, CELL_HEIGHT, ROW_GAP = 20, 13, 4
"""Of a slot in a page's picture, and between the rows of two stages, in pixels."""


def pipeline_section(plan: Plan) -> list[Text]:
    """Each pipeline with its picture; empty without pipelines."""
    out: list[Text] = []
    for p in plan.pipelines:
        schedule = p.schedule
        out.append(Text.assemble(("pipeline", "bold"), "  {}\n    {}".format(*_facts(p))))
        if schedule.microbatches > 1:
            out.append(Text(picture(schedule), style="dim"))
    return out


def _facts(p: Pipeline) -> tuple[str, str]:
    """(layers, stages, microbatches and schedule; ticks, bubble, microbatches in flight and bytes) of a pipeline, as text."""
    rounds = f"{p.schedule.rounds} rounds, " if p.schedule.rounds > 1 else ""
    once = ", weights gathered once a step" if p.gather == "step" else ""
    return (
        f"{p.layers} {p.dim} over {'+'.join(p.axes)}: {p.stages} stages, {rounds}{p.microbatches} microbatches, {p.schedule.name}",
        f"{p.ticks} ticks, bubble {100 * p.bubble:.1f} %, {p.in_flight:g} microbatches in flight, "
        f"{format_bytes(p.bytes_between_stages)} between stages{once}",
    )


def pipelines_html(plan: Plan) -> str:
    """Each pipeline with its numbers and its picture, as HTML; "" without pipelines."""
    out = ""
    for p in plan.pipelines:
        first, second = _facts(p)
        out += f"<p><b>{escape(first)}</b><br>{escape(second)}</p>" + (picture_html(p) if p.microbatches > 1 else "")
    shown = "FBW" if any("W" in p.schedule.order for p in plan.pipelines) else "FB"
    used = [KINDS[letter] for letter in shown]
    numbers = "<span>numbers: microbatches</span>" * ("<text" in out)
    legend = key([*((f"p{color}", name) for _, color, name in used), ("idle", "idle")], numbers)
    return out + legend if "<svg" in out else out


def picture_html(p: Pipeline) -> str:
    """A row per stage with a line for each of its loops, and a column per tick, as SVG; an empty place is an idle slot."""
    schedule, height = p.schedule, p.schedule.loops * CELL_HEIGHT + ROW_GAP
    numbered = schedule.ticks <= MAX_NUMBERED_TICKS
    rows, labels = "", ""
    for k in range(schedule.stages):
        top = k * height
        labels += f'<span style="height:{height}px">stage {k}</span>'
        for i in range(schedule.loops):
            start, y = schedule.starts[i], top + CELL_HEIGHT * i
            count = schedule.slots(i)
            x, width = start * CELL_WIDTH, count * CELL_WIDTH
            rows += f'<rect class="idle" x="{x}" y="{y}" width="{width}" height="{CELL_HEIGHT - 1}"/>'
            slots = [(t, slot) for t in range(start, start + count) if (slot := schedule.slot(i, k, t)) is not None]
            rows += "".join(_cells(schedule, k, i, slots, y, numbered))
    width, tall = schedule.ticks * CELL_WIDTH, schedule.stages * height
    about = f"{p.stages} stages by {p.ticks} ticks of {p.schedule.name}, bubble {100 * p.bubble:.1f} %"
    size = f"width:{width}px" if numbered else "width:100%"
    svg = (
        f'<svg viewBox="0 0 {width} {tall}" preserveAspectRatio="none" role="img" aria-label="{escape(about)}" '
        f'style="height:{tall}px;{size}">{rows}</svg>'
    )
    scroll = f'<div class="wide" tabindex="0" role="region" aria-label="slots of the stages at each tick">{svg}</div>'
    return f'<div class="slots"><div aria-hidden="true">{labels}</div>{scroll}</div>'


def _cells(
    schedule: Schedule, stage: int, loop: int, slots: list[tuple[int, tuple[int, int]]], y: int, numbered: bool
) -> Iterator[str]:
    """A bar for each run of consecutive slots; ``numbered``: for each slot, with the number of its microbatch and a tooltip."""
    _, color, of = KINDS[schedule.order[loop]]
    for _, run in itertools.groupby(enumerate(slots), lambda item: item[0] if numbered else item[1][0] - item[0]):
        ticks, items = zip(*(slot for _, slot in run), strict=True)
        x, width, (microbatch, group) = ticks[0] * CELL_WIDTH, len(ticks) * CELL_WIDTH, items[0]
        late = title = label = ""
        if numbered:
            late = " late" * (group % 2)  # a darker color in every second round
            text = f"stage {stage}, tick {ticks[0]}: {of} slot of microbatch {microbatch}"
            title = f"<title>{text}{f', round {group}' if schedule.rounds > 1 else ''}</title>"
            label = f'<text x="{x + CELL_WIDTH / 2 - 0.5}" y="{y + CELL_HEIGHT - 4}">{microbatch}</text>'
        rect = f'<rect x="{x}" y="{y}" width="{width - numbered}" height="{CELL_HEIGHT - 1}"/>'
        yield f'<g class="p{color}{late}">{title}{rect}{label}</g>'


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
