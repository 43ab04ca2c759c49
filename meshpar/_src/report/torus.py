"""Where the mesh axes of a plan run on the chips of its slices or nodes, and the bytes on their links."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict

from ..hardware.topology import Stage, joined
from ..plan.collectives import stage_bytes_sent
from ..plan.plan import Plan
from .colours import AxisColours
from .facts import CollectiveGroup, collective_groups
from .tables import html_picture

TORUS = (
    "The group of the black chip along each axis, and the links of these groups; the wider a line, the more bytes pass its links. "
    "{wraps}Point at a row to see its axes alone, click a chip to see its "
    "groups. Bytes of a link are in the direction with more of them. The order of the axes of the mesh decides where they run."
)
MIN_SHARE = 0.001
"""Of the bytes of a plan, from which on collectives over several axes are listed."""


def torus_text(plan: Plan) -> str:
    """The content of the section; GPUs have no links that wrap around."""
    torus = plan.chip is None or plan.chip.torus
    return TORUS.format(wraps="A line that leaves the drawing returns at the opposite side. " if torus else "")


def torus_picture(plan: Plan, colours: AxisColours) -> str:
    """The place in which the axes and their collectives are drawn; "" if the devices have no known positions."""
    every = [part for stages in plan.torus.values() for s in stages for part in s.parts]
    extent = {d: math.prod(s.size for s in every if s.dim == d) for d in ("x", "y", "z", "core", "switch", "slice")}
    if not 1 < math.prod(extent.values()) == math.prod(plan.sizes.values()):
        return ""
    groups = {g.first.axes: g for g in collective_groups(plan.collectives, lambda c: c.axes)}
    listed = [axes for axes, g in groups.items() if len(axes) > 1 and g.bytes >= MIN_SHARE * plan.bytes_sent]
    rows = []
    for axes in (*((a,) for a, n in plan.sizes.items() if n > 1), *listed):
        group, used = (
            groups.get(axes, CollectiveGroup(())),
            [s for a in axes for part in plan.torus[a] for s in part.parts],
        )
        sent: dict[Stage, float] = defaultdict(float, {} if group.members else {s: 0.0 for s, _ in joined(used)})
        for c in group.members:
            for stage, size in stage_bytes_sent(c, plan.torus):
                sent[stage] += size * c.runs
        stages = [{**asdict(s), "bytes": link_bytes(s, size)} for s, size in sent.items()]
        colour = [colours.of[a] for a in axes]
        rows.append({"axes": axes, "colours": colour, "stages": stages, "sent": group.bytes, "seconds": group.seconds})
    chip = plan.chip
    rings = () if chip is None else chip.rings([extent[d] for d in "xyz"[: len(chip.torus)]])
    data = {"extent": extent, "rings": rings, "rows": rows, "timed": chip is not None}
    return html_picture("drawTorus", "mesh axes on the chips", data)


def link_bytes(stage: Stage, sent: float) -> float:
    """Bytes in the busiest direction of a link of a stage, if each device sends ``sent`` over its links.

    A ring has two ways around; on a line, nearly all bytes pass the last link in one direction. Groups that are interleaved along
    the dimension share its links.
    """
    return sent * stage.stride / (2 if stage.wraps else 1)
