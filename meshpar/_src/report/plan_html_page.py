"""A plan as one page: verdict, timeline, memory, rules and their effects, every collective and its cause, arguments."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from html import escape

import jax

from ..cost.decoding import decoding_of
from ..cost.memory import Memory, memory_of
from ..cost.time import time_of
from ..iterables import grouped
from ..plan.collectives import Collective
from ..plan.plan import Plan, ShardedArray
from ..units import format_bytes, format_memory, format_seconds, with_article
from . import facts
from .colours import AxisColours
from .data import memory_picture, plan_json, roofline_picture, shards_data, shards_place, timeline_picture
from .document import cell, page
from .facts import RuleEffect
from .layer import LAYER, layer_picture
from .pipeline import pipelines_html
from .sections import remedies, sections
from .tables import GROUP, Cell, Table, html_picture, key, number, prose
from .timeline import step_bounds, step_notes, step_shares
from .torus import torus_picture, torus_text

MAX_OPEN_COLLECTIVES = 12
"""Of a plan with more collectives, the tables of the rules are closed."""
NOT_ESTIMATED = "not estimated: no topology"
NOTHING_SENT = "<p>Each device sends nothing.</p>"
STEP_TIME = "All bars have the same scale. A collective over several axes has the colour of the first."
PIPELINE = "In a tick (a column), a stage has a slot for its forward pass (above) and its backward pass (below)."
RULES = (
    "Rules in order: an axis goes to the first rule whose dim is present{}. Point at a rule to highlight the arguments that "
    "it shards."
)
BY_COST = "; among the dims of an op, to the one with which the op sends the fewest bytes"
COLLECTIVES = "By the rule that causes them. Bytes are sent by each device. Click a heading to sort."
TIMELINE = (
    "Kernels wait for exposed communication; hidden communication (paler) overlaps with them. A loop with narrow iterations is one "
    "box, as high as the lane is busy. Drag, or use the buttons or the keys + − 0, to zoom; point at a box for its line."
)
MEMORY = (
    "Live bytes after each kernel of a step, by kind. The horizontal axis is the order of the kernels, not time: each has the same "
    "width, and the body of a loop is shown once. Point at it, or press the arrow keys, for a kernel."
)
ROOFLINE = "The line is the chip's limit, a grey circle a kernel; larger ones take longer. Recomputation is included."
"""The content of the sections of a page."""


def plan_page(plan: Plan) -> str:
    """The plan as a self-contained HTML document."""
    shown = page_sections(plan)
    links = "".join(f'<a href="#{_anchor(title)}">{escape(title)}</a>' for title, *_ in shown)
    data = plan_json(plan).replace("<", "\\u003c")
    body = [
        _head(plan),
        f'<nav aria-label="sections">{links}</nav>',
        cards(plan),
        *(_section(*section) for section in shown),
        f'<script type="application/json" id="plan">{data}</script>',
    ]
    return page(f"{facts.title(plan)}: {facts.layout_text(plan)}", "\n".join(body))


def page_sections(plan: Plan, most: int | None = None) -> list[tuple[str, str, str]]:
    """(title, HTML, explanation) of the sections of a plan that have content.

    Args:
      most: rows of the table of collectives of a rule; None: all.
    """
    colours = AxisColours(plan.sizes)
    every = [
        ("Step time", step_parts(plan, colours), STEP_TIME),
        ("Timeline", timeline_section(plan, colours), TIMELINE if plan.chip else ""),
        ("Pipeline", pipelines_html(plan), PIPELINE),
        ("Memory per device", memory_curve(plan), MEMORY),
        ("Roofline", roofline_picture(plan), ROOFLINE),
        ("Rules", rules_table(plan, colours), RULES.format(BY_COST * bool(plan.layout.by_cost))),
        ("Layer", layer_picture(plan, colours), LAYER),
        ("Axes on the chips", torus_picture(plan, colours), torus_text(plan)),
        ("Collectives", collectives_by_rule(plan, colours, most), COLLECTIVES),
        ("Arguments", tensors(plan, colours), "Choose an argument to see how it is sharded over the mesh."),
        *((section.title, section.html(), "") for section in (remedies(plan), *sections(plan))),
    ]
    return [section for section in every if section[1]]


def plan_cell(plan: Plan) -> str:
    """The plan for a notebook: metrics, rules, the largest collectives; no script."""
    colours = AxisColours(plan.sizes)
    rules = rules_table(plan, colours)
    collectives = collectives_table(plan.collectives, colours, timed=plan.chip is not None, most=6, sortable=False)
    return cell(f"{_head(plan)}{cards(plan)}{rules}{collectives}")


def _anchor(title: str) -> str:
    """The id of a section."""
    return title.lower().replace(" ", "-")


def _section(title: str, body: str, about: str) -> str:
    """A section whose heading is a link to itself."""
    text, at = f'<p class="dim">{escape(about)}</p>' if about else "", _anchor(title)
    link = f'<a class="anchor" href="#{at}" aria-label="link to this section: {escape(title)}">#</a>'
    return f'<section id="{at}"><h2>{escape(title)}{link}</h2>{text}{body}</section>'


# -- sections


def _head(plan: Plan) -> str:
    """The head of a plan's page: model and devices, verdict, then axes, layout, lowering, chip and JAX version."""
    where = f" of {escape(plan.topology)}" if plan.topology else ""
    on = f'<span class="dim">on {math.prod(plan.sizes.values())} devices{where}</span>'
    return f"<h1>{escape(facts.title(plan))} {on}</h1>{verdict(plan)}{facts_list(plan)}"


def verdict(plan: Plan) -> str:
    """Whether the plan fits, its step time and MFU, and the parts of that time, as HTML."""
    peak, time, chip = memory_of(plan).peak, time_of(plan), plan.chip
    if chip is None or time is None:
        return f'<p class="verdict">Each device needs {format_memory(peak)} and sends {format_bytes(plan.bytes_sent)} a step.</p>'
    tight = f'<b class="tight">Tight</b> (a search allows {100 * facts.USABLE_FRACTION:.0f} % of the memory)'
    fit = {"fits": "<b>Fits</b>", "tight": tight, "too large": '<b class="up">Does not fit</b>'}
    does = fit[facts.fit(peak, chip.per_device().hbm)]
    shares = step_shares(plan)
    bound = (
        f", bound by <b>{escape(step_bounds(plan)[0][0])}</b>: {escape(', '.join(shares))} of the step"
        if shares
        else ""
    )
    takes = facts.takes_text(facts.fits(plan)).capitalize()
    return (
        f'<p class="verdict">{does}: {format_memory(peak)} of {format_memory(chip.per_device().hbm)}. {takes} about '
        f"<b>{format_seconds(time.seconds)}</b> (MFU {100 * time.mfu:.0f} %){bound}.</p>"
    )


def facts_list(plan: Plan) -> str:
    """Mesh, lowering, chip, JAX version and layout of a plan, as a list."""
    chip = plan.chip
    memory = "not given" if chip is None else f"{escape(chip.name)}, {format_memory(chip.per_device().hbm)} per device"
    rows = [
        ("mesh", AxisColours(plan.sizes).sizes(plan.sizes).markup),
        ("inputs", escape(facts.inputs_text(plan))),
        ("lowering", escape(facts.lowering_text(plan))),
        ("chip", memory),
        ("JAX", escape(jax.__version__)),
        ("layout", f"<code>{escape(facts.layout_text(plan))}</code>"),
    ]
    listed = "".join(f"<div><dt>{name}</dt><dd>{of}</dd></div>" for name, of in rows if of)
    return f'<dl class="facts">{listed}</dl>'


def cards(plan: Plan) -> str:
    """The metrics of a plan: peak memory of a device, seconds and FLOP/s utilization, bytes sent."""
    memory, time, chip = memory_of(plan), time_of(plan), plan.chip
    meter, of = "", "(no chip is given)"
    if chip is not None:
        capacity = chip.per_device().hbm
        width, fit = min(100.0, 100 * memory.peak / capacity), facts.fit(memory.peak, capacity)
        meter = f'<div class="meter {fit}"><i style="width:{width:.1f}%"></i></div>'
        of = f"of {format_memory(capacity)} of {with_article(chip.name)}, estimated"
        of = f'<span class="up">does not fit</span>: {of}' if fit == "too large" else of
        if facts.padding_text(plan):
            of += f"; {format_memory(sum(memory.padding.values()))} of it are padding to tiles"
    shown = [("peak memory per device", format_memory(memory.peak), memory.peak, meter, of)]
    if copies := facts.host_copies(plan):
        shown.append(("in the host's memory per device", format_memory(memory.host), memory.host, "", escape(copies)))
    if time is not None:
        about = escape("; ".join(filter(None, (facts.time_bounds(time), facts.calibration_text(plan)))))
        shown.append(("step time, estimated", format_seconds(time.seconds), time.seconds, "", about))
        bound = f"bound by {escape(step_bounds(plan)[0][0])}" if time.seconds else ""
        shown.append(("of the peak FLOP/s", f"{100 * time.mfu:.0f} %", time.mfu, "", bound))
    else:
        shown.append(("step time", "–", 0.0, "", NOT_ESTIMATED))
    if decoding := decoding_of(plan):
        rate = decoding.tokens_per_second or 0.0
        shown.append(("tokens a second, estimated", f"{rate:,.0f}" if rate else "–", rate, "", escape(str(decoding))))
    took = f"in {format_seconds(plan.comm_seconds)}: " if chip is not None else ""
    kinds = facts.collective_groups(plan.collectives, lambda c: c.op)[:3]
    by_kind = ", ".join(f"{g.first.op} {format_bytes(g.bytes)}" for g in kinds)
    sent = plan.bytes_sent
    shown.append(("sent per device and step", format_bytes(sent), sent, "", took + by_kind))
    boxes = (
        f'<div class="card"><b data-v="{value!r}">{text}</b>{label}{bar}<div class="dim">{more}</div></div>'
        for label, text, value, bar, more in shown
    )
    return f'<div class="cards">{"".join(boxes)}</div>'


def step_parts(plan: Plan, colours: AxisColours) -> str:
    """The step time and its parts as bars of one scale, collectives in the colours of their axes; "" without an estimate."""
    time = time_of(plan)
    if time is None:
        return ""
    kernels = facts.kernel_seconds(time)
    exposed = time.seconds - kernels
    by_axes: dict[tuple[str, ...], float] = {(axis,): 0.0 for axis in plan.sizes}  # in the order of the legend
    for c in plan.collectives:
        by_axes[tuple(c.axes)] = by_axes.get(tuple(c.axes), 0.0) + c.total_seconds
    sent = [(colours.first(axes), n, f"collectives over {'+'.join(axes)}") for axes, n in by_axes.items() if n]
    waiting = "exposed communication" + " and copies to and from the host" * bool(time.to_host or time.to_device)
    rows = [
        ("step, estimated", time.seconds, [("ink", kernels, "kernels"), ("wait", exposed, waiting)]),
        ("matmuls alone", time.compute, [("ink", time.compute, "matmuls")]),
        ("memory traffic alone", time.memory, [("ink", time.memory, "memory traffic")]),
        ("vector units alone", time.vector, [("ink", time.vector, "elementwise ops, reductions and conversions")]),
        ("collectives alone", time.communication, sent),
    ]
    link = "copies over the link to the host"
    others = (
        (f"{facts.STARTS} alone", time.starts, "short kernels, beyond their work"),
        ("copies to the host alone", time.to_host, link),
        ("copies to the device alone", time.to_device, link),
    )
    rows += [(label, n, [("ink", n, of)]) for label, n, of in others if n]
    seconds = format_seconds(kernels), format_seconds(exposed)
    kinds = ("ink", f"kernels {seconds[0]}"), ("wait", f"exposed communication {seconds[1]}")
    notes = f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in step_notes(plan))}</ul>"
    parts = [row for row in rows if row[1]]  # GPUs, for example, have no vector units of their own
    return html_picture("drawParts", "the step time and its parts", parts) + legend(plan, colours, kinds) + notes


def legend(plan: Plan, colours: AxisColours, kinds: Iterable[tuple[str, str]]) -> str:
    """The legend of the colours of bars: ``kinds`` (CSS class, text), then the mesh axes of collectives."""
    used = sorted({c.axes for c in plan.collectives if c.axes}, key=lambda axes: [*map([*plan.sizes].index, axes)])
    same = grouped((colours.first(axes), "+".join(axes)) for axes in used)
    return key([*kinds, *((colour, f"collectives over {', '.join(axes)}") for colour, axes in same.items())])


def rules_table(plan: Plan, colours: AxisColours) -> str:
    """The arguments and values that each rule shards, and the bytes and seconds of the collectives that it causes."""
    timed, effects = plan.chip is not None, facts.rule_effects(plan)
    totals = [sum(e.collectives.bytes for e in effects), sum(e.collectives.seconds for e in effects)]

    def cost(text: str, n: float, total: float, css: str) -> Cell:
        return number(text, n, f'<i class="bar {css}" style="width:{100 * n / (total or 1.0):.1f}%"></i>')

    rows = []
    for e in effects:
        sent, seconds, css = e.collectives.bytes, e.collectives.seconds, colours.first(e.axes)
        name = f' <span class="scheme dim">{e.parallelism}</span>' if e.parallelism else ""
        why = f' title="{escape(e.unused)}"'
        size = f'<span class="up"{why}>no effect</span>' if e.axes and not e.values and not sent else e.size_text or "–"
        row = [
            Cell("", markup=_rule(e, colours) + name),
            Cell(str(len(e.arguments.members) or ""), css="n more"),
            Cell("", markup=size, css="n more"),
            Cell(str(e.values or ""), css="n more"),
            cost(format_bytes(sent) if sent else "–", sent, totals[0], css),
            cost(format_seconds(seconds) if seconds else "", seconds, totals[1], css),
        ]
        rows.append(row[: 5 + timed])
    total = [Cell("total"), *[Cell("", css="n more")] * 3, number(format_bytes(totals[0]), totals[0])]
    rows.append([*total, number(format_seconds(totals[1]), totals[1])][: 5 + timed])
    columns = [("rule", ""), ("arguments", "n more"), ("global → per device", "n more"), ("values", "n more")]
    columns += [("sent", "n"), ("time", "n")][: 1 + timed]
    return Table(columns, rows, attributes=[*(f'data-rule="{k}"' for k in range(len(effects))), 'class="total"']).html()


def _rule(e: RuleEffect, colours: AxisColours) -> str:
    """A rule with its axes in colour."""
    if e.rule is None:
        return '<span class="dim">no single rule</span>'
    return f"{colours.axes(e.axes).markup} <code>{escape(str(e.rule))}</code>"


def tensors(plan: Plan, colours: AxisColours) -> str:
    """The table of arguments, and the place where the page's script draws how the chosen one is sharded over the mesh."""
    return f'<div class="tensors"><div>{_arguments(plan, colours)}</div><div>{shards_place(plan, colours)}</div></div>'


def memory_curve(plan: Plan) -> str:
    """Live bytes over the ops of a step by role, the capacity of the device, and the peak with its largest arrays."""
    memory, padding = memory_of(plan), facts.padding_text(plan)
    about = f'<p class="dim">{escape(padding)}</p>' if padding else ""
    return memory_picture(plan) + about + _peak_arrays(memory, bool(padding)) if memory.points else ""


def _peak_arrays(memory: Memory, padding: bool) -> str:
    """The largest arrays at the peak as a table, with a column for their ``padding``."""
    columns = [("array", ""), ("kind", ""), ("per device", "n"), ("padding", "n")][: 3 + padding]
    rows = []
    for name, size, kind, pad in memory.largest[:8]:
        row = [Cell(name, css="mono"), Cell(kind), number(format_memory(size), size)]
        rows.append(row + [number(format_memory(pad) if pad else "", pad)] * padding)
    return f"<h3>its largest arrays</h3>{Table(columns, rows).html()}" if rows else ""


def timeline_section(plan: Plan, colours: AxisColours) -> str:
    """The timeline of the step, with the legend of its colours."""
    if time_of(plan) is None:
        return f'<p class="dim">{NOT_ESTIMATED}</p>'
    kinds = (
        ("ink", "kernels"),
        ("wait", "exposed: kernels wait"),
        ("c0 hidden", "paler: hidden, overlaps with kernels"),
    )
    return timeline_picture(plan, colours) + legend(plan, colours, kinds)


def collectives_by_rule(plan: Plan, colours: AxisColours, most: int | None = None) -> str:
    """The collectives of each rule as a table that can be opened, the rules that send most first.

    Args:
      most: rows of each table; None: all.
    """
    out = ""
    for k, e in sorted(enumerate(facts.rule_effects(plan)), key=lambda item: -item[1].collectives.bytes):
        if e.collectives.members:
            total, calls, _, seconds = (cell.text for cell in e.collectives.cells())
            took = f", {seconds}" if plan.chip is not None else ""
            opened = " open" * (len(plan.collectives) <= MAX_OPEN_COLLECTIVES)
            out += (
                f'<details class="of-rule" id="sent-{k}" data-rule="{k}"{opened}><summary>{_rule(e, colours)} '
                f'<span class="n">{total}{took}, {calls} calls</span></summary>'
                f"{collectives_table(e.collectives.members, colours, plan.chip is not None, most)}</details>"
            )
    return f'<div class="by-rule">{out}</div>' if out else NOTHING_SENT


def collectives_table(
    of: Sequence[Collective], colours: AxisColours, timed: bool, most: int | None = None, sortable: bool = True
) -> str:
    """Some collectives, in the order of :func:`collective_groups`; those that are alike in everything shown are one row.

    Args:
      timed: they have seconds.
      most: number of rows; None: all.
      sortable: headings sort the rows.
    """

    def alike(c: Collective) -> Hashable:
        return c.op, c.axes, c.dims, c.dtype, c.bytes, c.explanation, facts.location_of_op(c.origin)

    def row(group: facts.CollectiveGroup) -> list[Cell]:
        c = group.first
        op = Cell(c.op, markup=f"<b>{c.op}</b><br>{colours.axes(c.axes).markup}")
        dims = f'<code>{escape(c.dims or "(scalar)")}</code><br><span class="dim">{escape(c.dtype)}</span>'
        cause = f"{prose(c.explanation)}<br><code>{escape(group.location)}</code>"
        return [op, *group.cells()[: 3 + timed], Cell("", markup=dims), Cell("", markup=cause, css="why")]

    columns = [("collective", ""), ("total", "n"), ("calls", "n"), ("per call", "n more"), *[("time", "n")] * timed]
    columns += [("dims", ""), ("why, and where", "")]
    table = Table(columns, [row(group) for group in facts.collective_groups(of, alike)])
    return table.html(most, sortable) if table.rows else NOTHING_SENT


def _arguments(plan: Plan, colours: AxisColours) -> str:
    """The table of arguments by kind, with dims, shape, count and bytes."""
    rows: list[list[Cell]] = []
    attributes = []

    def alike(h: ShardedArray) -> Hashable:
        return tuple(facts.argument_dims(h)), h.shape, h.dtype

    for label, every, groups in facts.argument_groups(plan, alike):
        rows.append([Cell(label), Cell("", css="more"), *every.cells()])
        attributes.append(GROUP)
        for group in groups:
            first = group.members[0]
            others = ", ".join(h.path for h in group.members[1:])
            summary = f"<summary>and {len(group.members) - 1} more</summary>"
            more = f"<details>{summary}<code>{escape(others)}</code></details>" if others else ""
            dims = f'{colours.dims(group.dims).markup}<br><code class="path">{escape(first.path)}</code>{more}'
            rules = " ".join(map(str, facts.rules_of(plan, first)))
            rows.append([Cell("", markup=dims), Cell(group.shape, css="mono more"), *group.cells()])
            attributes.append(f'data-rules="{rules}" data-cut="{shards_data(first)}"')
    columns = [("dims", ""), ("shape", "more"), ("tensors", "n more"), ("global", "n more"), ("per device", "n")]
    return Table(columns, rows, attributes=attributes).html()
