"""Where the mesh axes of a plan run on the chips of its slices or nodes, and what the links carry: a drawing and a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import Any

from ..hardware.topology import Stage, joined
from ..plan.collectives import Collective, stage_bytes_sent
from ..plan.plan import Plan
from ..units import format_bytes, format_seconds
from .colours import AxisColours
from .facts import CollectiveGroup, collective_groups
from .tables import Cell, Table, html_picture, number

TORUS = (
    "The links of one group of each axis; the wider a line, the more bytes pass its links. A line that leaves the drawing "
    "returns at the opposite side. Point at a row to see its axes alone, click a chip to see its groups. The order of the axes "
    "of the mesh decides where they run."
)
"""The content of the section."""
MIN_SHARE = 0.001
OFF_TORUS = {"slice": "over DCN", "switch": "on the switch", "core": "in the chip"}


def torus_html(plan: Plan, colours: AxisColours) -> str:
    """The table of the axes with their collectives, and the data of the drawing; "" if the devices have no known positions.

    Collectives over several axes have a row if they send at least ``MIN_SHARE`` of the bytes.
    """
    every = [part for stages in plan.torus.values() for s in stages for part in s.parts]
    extent = {d: math.prod(s.size for s in every if s.dim == d) for d in ("x", "y", "z", "core", "switch", "slice")}
    if math.prod(extent.values()) != math.prod(plan.sizes.values()) or math.prod(extent.values()) == 1:
        return ""
    groups = {
        g.first.axes: g
        for g in collective_groups(plan.collectives, lambda c: c.axes)
        if len(g.first.axes) == 1 or g.bytes >= MIN_SHARE * plan.bytes_sent
    }
    rows, drawn, attributes = [], [], []
    for axes in dict.fromkeys((*((a,) for a, n in plan.sizes.items() if n > 1), *groups)):
        group = groups.get(axes, CollectiveGroup(()))
        stages = stage_traffic(plan, axes, group.members)
        loads = [(link_bytes(s, sent), _stage_text(s)) for s, sent in stages.items()]
        most = max((load for load, _ in loads), default=0.0)
        where = "<br>".join(f"{escape(text)}: {format_bytes(load)} each way" for load, text in loads)
        of = number(format_bytes(group.bytes), group.bytes), number(format_bytes(most), most, css="more")
        time = [number(format_seconds(group.seconds), group.seconds)] * (plan.chip is not None)
        rows.append([colours.axes(axes), Cell("", markup=where), *of, *time])
        attributes.append(f'data-row="{len(drawn)}" tabindex="0"')
        drawn.append({"axes": axes, "colour": colours.first(axes), "stages": list(_stages(stages))})
    chip = plan.chip
    torus = () if chip is None else chip.rings([extent[d] for d in "xyz"[: len(chip.torus)]])
    label = "; ".join(f"{'+'.join(row['axes'])}: {', '.join(s['text'] for s in row['stages'])}" for row in drawn)
    picture = html_picture("drawTorus", label, {"extent": extent, "rings": torus, "rows": drawn})
    columns = [("axes", ""), ("placement", ""), ("sent", "n"), ("busiest link", "n more"), ("time", "n")]
    table = Table(columns[: 4 + (chip is not None)], rows, attributes=attributes).html()
    return f'<div class="torus">{picture}{table}</div>'


def stage_traffic(plan: Plan, axes: tuple[str, ...], collectives: tuple[Collective, ...]) -> dict[Stage, float]:
    """Stage of a group of axes → bytes that a device sends over its links in a step; the sum is that of the collectives."""
    every = [s for a in axes for part in plan.torus[a] for s in part.parts]
    out = {} if collectives else {s: 0.0 for s, _ in joined(every)}
    for c in collectives:
        for stage, sent in stage_bytes_sent(c, plan.torus):
            out[stage] = out.get(stage, 0.0) + sent * c.runs
    return out


def link_bytes(stage: Stage, sent: float) -> float:
    """Bytes in the busiest direction of a link of a stage, if each device sends ``sent`` over its links.

    A ring has two ways around; on a line, nearly all bytes pass the last link in one direction. Groups that are interleaved along
    the dimension share its links.
    """
    return sent * stage.stride / (2 if stage.wraps else 1)


def _stages(stages: dict[Stage, float]) -> Iterator[dict[str, Any]]:
    """The stages as JSON data, with bytes on each link; without those whose order of devices along the torus is not known."""
    for s, sent in stages.items():
        if s.fills or not s.dim:
            continue
        load = link_bytes(s, sent)
        text = f"{_stage_text(s)}: {format_bytes(load)} each way on a link"
        yield {"dim": s.dim, "size": s.size, "stride": s.stride, "wraps": s.wraps, "bytes": load, "text": text}


def _stage_text(stage: Stage) -> str:
    """``2 along y, a line``; ``8 along y, a ring, 2 chips apart: 2 groups share each link``."""
    if stage.fills:
        return f"{stage.size} in a ring through {' × '.join(_stage_text(part) for part in stage.fills)}"
    if not stage.on_torus:
        return f"{stage.size} {OFF_TORUS[stage.dim]}"
    if not stage.dim:
        return f"{stage.size}"
    kind = "a ring" if stage.wraps else "a line"
    apart = f", {stage.stride} chips apart: {stage.stride} groups share each link" if stage.stride > 1 else ""
    return f"{stage.size} along {stage.dim}, {kind}{apart}"
