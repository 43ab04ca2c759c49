"""A plan as one page: rules and their effects, mesh, loop timelines, memory, every collective and its cause, arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Sequence
from html import escape

import jax

from ..cost.decoding import decoding_of
from ..cost.memory import Memory, memory_of
from ..cost.time import time_of
from ..hardware.topology import Stage
from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..units import format_bytes, format_memory, format_seconds, memory_ticks, with_article
from . import facts
from .colours import AxisColours
from .data import plan_json
from .document import cell, page
from .facts import LoopTimeline, RuleEffect, Span
from .pipeline import pipelines_html
from .sections import sections
from .tables import GROUP, Cell, Table, code, key, number

KIND_COLOURS = ("c0", "c1", "c2", "c4", "c3", "cn", "c5")
MAX_OPEN_COLLECTIVES = 12
"""Of a plan with more collectives, the tables of the rules are closed."""
NOT_ESTIMATED = "not estimated: no topology"
NOTHING_SENT = "<p>Each device sends nothing.</p>"
STEP_TIME = "All bars have the same scale. The estimate overlaps kernels and collectives."
PIPELINE = "One column per tick: a stage runs its layers forward for one microbatch (above), backward for one (below), or both."
RULES = (
    "Rules in order: an axis goes to the first rule whose dim is present. Point at a rule to highlight the arguments that "
    "it shards."
)
COLLECTIVES = "By the rule that causes them. Bytes are sent by each device. Click a heading to sort."
LAYERS = (
    "The estimate of one iteration of each loop. Kernels run sequentially. Exposed collectives are drawn between kernels; "
    "hidden ones (paler) overlap with kernels, as the all-gather of a prefetched weight does. Point at a box, or press the "
    "arrow keys on it, for its line and sizes."
)
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
    return page(f"plan: {facts.layout_text(plan)}", "\n".join(body))


def page_sections(plan: Plan, most: int | None = None) -> list[tuple[str, str, str]]:
    """(title, HTML, explanation) of the sections of a plan that have content.

    Args:
      most: rows of the table of collectives of a rule; None: all.
    """
    colours = AxisColours(plan.sizes)
    every = [
        ("Step time", step_parts(plan, colours), STEP_TIME),
        ("Pipeline", pipelines_html(plan), PIPELINE),
        ("Rules", rules_table(plan, colours), RULES),
        ("Arguments", tensors(plan, colours), "Choose an argument to see how it is sharded over the mesh."),
        ("One layer", layers(plan, colours), ""),
        ("Memory per device", memory_curve(plan), "Over the ops of a step; each loop body once."),
        ("Collectives", collectives_by_rule(plan, colours, most), COLLECTIVES),
        ("Largest intermediate values", _values(plan, colours), ""),
        *((section.title, section.html(), "") for section in sections(plan)),
    ]
    return [section for section in every if section[1]]


def plan_cell(plan: Plan) -> str:
    """The plan for a notebook: metrics, rules, the largest collectives; no script."""
    colours = AxisColours(plan.sizes)
    rules = rules_table(plan, colours)
    collectives = collectives_table(plan, plan.collectives, colours, most=6, sortable=False)
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
    """The HTML of the head of a plan's page: devices, axes, layout, lowering, chip and JAX version."""
    where = f" of {escape(plan.topology)}" if plan.topology else ""
    return f"<h1>{math.prod(plan.sizes.values())} devices{where}</h1>{facts_list(plan)}"


def facts_list(plan: Plan) -> str:
    """Mesh, lowering, chip, JAX version and layout of a plan, as a list."""
    chip = plan.chip
    memory = "not given" if chip is None else f"{escape(chip.name)}, {format_memory(chip.per_device().hbm)} per device"
    rows = [
        ("mesh", AxisColours(plan.sizes).sizes(plan.sizes).markup),
        ("lowering", escape(facts.lowering_text(plan))),
        ("chip", memory),
        ("JAX", escape(jax.__version__)),
        ("layout", f"<code>{escape(facts.layout_text(plan))}</code>"),
    ]
    return '<dl class="facts">' + "".join(f"<div><dt>{name}</dt><dd>{of}</dd></div>" for name, of in rows) + "</dl>"


def cards(plan: Plan) -> str:
    """The metrics of a plan: peak memory of a device, seconds and FLOP/s utilization, bytes sent."""
    memory, time, chip = memory_of(plan), time_of(plan), plan.chip
    meter, of = "", "(no chip is given)"
    if chip is not None:
        capacity, over = chip.per_device().hbm, facts.fits(plan) is False
        width = min(100.0, 100 * memory.peak / capacity)
        meter = f'<div class="meter{" over" * over}"><i style="width:{width:.1f}%"></i></div>'
        of = f"of {format_memory(capacity)} of {with_article(chip.name)}, estimated"
        of = f'<span class="up">does not fit</span>: {of}' if over else of
        if facts.padding_text(plan):
            of += f"; {format_memory(sum(memory.padding.values()))} of it are padding to tiles"
    shown = [("peak memory per device", format_memory(memory.peak), memory.peak, meter, of)]
    if copies := facts.host_copies(plan):
        shown.append(("in the host's memory per device", format_memory(memory.host), memory.host, "", escape(copies)))
    if time is not None:
        below = (facts.time_bounds(time), facts.blocking_collectives(plan), facts.calibration_text(plan))
        about = escape("; ".join(filter(None, below)))
        shown.append(("step time, estimated", format_seconds(time.seconds), time.seconds, "", about))
        bottleneck = f"largest part: {escape(time.bottleneck.split(':')[0])}"
        shown.append(("of the peak FLOP/s", f"{100 * time.mfu:.0f} %", time.mfu, "", bottleneck))
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
    by_colour: dict[str, float] = {}
    for c in plan.collectives:
        kind = colours.first(c.axes)
        by_colour[kind] = by_colour.get(kind, 0.0) + c.total_seconds
    waiting = "exposed communication" + " and copies to and from the host" * bool(time.to_host or time.to_device)
    rows = [
        ("step, estimated", time.seconds, [("ink", kernels, "kernels"), ("wait", exposed, waiting)]),
        ("matmuls alone", time.compute, [("ink", time.compute, "matmuls")]),
        ("memory traffic alone", time.memory, [("ink", time.memory, "memory traffic")]),
        ("vector units alone", time.vector, [("ink", time.vector, "elementwise ops, reductions and conversions")]),
        ("collectives alone", time.communication, [(kind, n, "collectives") for kind, n in by_colour.items()]),
    ]
    copies = (("copies to the host alone", time.to_host), ("copies to the device alone", time.to_device))
    rows += [(label, n, [("ink", n, "copies over the link to the host")]) for label, n in copies if n]
    longest = max(value for _, value, _ in rows) or 1.0

    def bar(kind: str, n: float, of: str) -> str:
        title = escape(f"{of}: {format_seconds(n)}")
        return f'<i class="{kind}" style="width:{100 * n / longest:.2f}%" title="{title}"></i>' if n > 0 else ""

    out = "".join(
        f'<div><span>{label}</span><span class="track">{"".join(bar(*s) for s in segments)}</span>'
        f'<span class="n">{format_seconds(value)}</span></div>'
        for label, value, segments in rows
    )
    seconds = format_seconds(kernels), format_seconds(exposed)
    kinds = ("ink", f"kernels {seconds[0]}"), ("wait", f"exposed communication {seconds[1]}")
    return f'<div class="parts">{out}</div>{legend(plan, colours, kinds)}'


def legend(plan: Plan, colours: AxisColours, kinds: Iterable[tuple[str, str]]) -> str:
    """The legend of the colours of bars: ``kinds`` (CSS class, text), then the mesh axes of collectives."""
    used = [a for a in plan.sizes if any(c.axes and c.axes[0] == a for c in plan.collectives)]
    rows = [*kinds, *((colours.of[a], f"collectives over {a}") for a in used)]
    several = any(len(c.axes) > 1 for c in plan.collectives)
    return key(rows, "<span>over several axes: the colour of the first</span>" * several)


def rules_table(plan: Plan, colours: AxisColours) -> str:
    """The arguments and values that each rule shards, and the bytes and seconds of the collectives that it causes."""
    timed, effects = plan.chip is not None, facts.rule_effects(plan)
    most = max((e.collectives.bytes for e in effects), default=0.0) or 1.0
    rows = []
    for e in effects:
        sent, seconds = e.collectives.bytes, e.collectives.seconds
        bar = f'<i class="bar {colours.first(e.axes)}" style="width:{100 * sent / most:.1f}%"></i>'
        name = f' <span class="scheme dim">{e.parallelism}</span>' if e.parallelism else ""
        size = '<span class="up">no effect</span>' if e.axes and not e.values and not sent else e.size_text or "–"
        row = [
            Cell("", markup=_rule(e, colours) + name),
            Cell(str(len(e.arguments.members) or ""), css="n more"),
            Cell("", markup=size, css="n more"),
            Cell(str(e.values or ""), css="n more"),
            number(format_bytes(sent) if sent else "–", sent, bar),
            number(format_seconds(seconds) if seconds else "", seconds),
        ]
        rows.append(row[: 5 + timed])
    columns = [("rule", ""), ("arguments", "n more"), ("global → per device", "n more"), ("values", "n more")]
    columns += [("sent", "n"), ("time", "n")][: 1 + timed]
    return Table(columns, rows, attributes=[f'data-rule="{k}"' for k in range(len(effects))]).html()


def _rule(e: RuleEffect, colours: AxisColours) -> str:
    """A rule with its axes in colour."""
    if e.rule is None:
        return '<span class="dim">no single rule</span>'
    return f"{colours.axes(e.axes).markup} <code>{escape(str(e.rule))}</code>"


def tensors(plan: Plan, colours: AxisColours) -> str:
    """The table of arguments, and the place where the page's script draws how the chosen one is sharded over the mesh."""
    torus = "".join(
        f"<li>{escape(axis)}: {' × '.join(_stage(s) for stage in stages for s in stage.parts)}</li>"
        for axis, stages in plan.torus.items()
        if stages
    )
    placement = f"<h3>physical placement of the mesh</h3><ul>{torus}</ul>" if torus else ""
    mesh = escape(json.dumps([[a, n, colours.of[a]] for a, n in plan.sizes.items()]))
    drawing = f'<div class="drawing" data-mesh="{mesh}"></div>'
    return f'<div class="tensors"><div>{_arguments(plan, colours)}</div><div>{drawing}{placement}</div></div>'


def _stage(stage: Stage) -> str:
    if not stage.dim:
        return str(stage.size)
    kind = {"slice": "over DCN", "switch": "on the switch", "core": "in the chip"}.get(stage.dim)
    return f"{stage.size} {kind or f'along {stage.dim}, a ' + ('ring' if stage.wraps else 'line')}"


def memory_curve(plan: Plan) -> str:
    """Live bytes over the ops of a step, the capacity of the device, and the peak by kind with its largest arrays."""
    memory, chip = memory_of(plan), plan.chip
    curve = [size for _, size, _ in memory.curve]
    if not curve:
        return ""
    capacity = chip.per_device().hbm if chip is not None else math.inf
    top = memory.peak * 1.12 or 1.0
    if capacity < 3 * memory.peak:
        top = max(top, capacity * 1.05)

    def left(k: int) -> float:
        return 100 * k / max(1, len(curve) - 1)

    def down(size: float) -> float:
        return 100 - 100 * size / top

    line = " ".join(f"{left(k):.2f},{down(size):.2f}" for k, size in enumerate(curve))
    limit = ""
    if capacity <= top:
        style = 'stroke="var(--bad)" stroke-dasharray="6 5" vector-effect="non-scaling-stroke"'
        limit = f'<line x1="0" x2="100" y1="{down(capacity):.2f}" y2="{down(capacity):.2f}" {style}/>'
    ticks = "".join(
        f'<span class="tick" style="top:{down(size):.1f}%">{text}</span>' for size, text in memory_ticks(top)
    )
    at = left(curve.index(max(curve)))
    side = f"right:{100 - at:.1f}%" if at > 50 else f"left:{at:.1f}%"
    where = f"{side};top:{down(memory.peak):.1f}%;transform:translateY(-112%)"
    mark = f'<span class="mark" style="{where}">{format_memory(memory.peak)}</span>'
    svg = (
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="live bytes over the ops of a step">'
        f'<polygon points="0,100 {line} 100,100" fill="var(--a0)" opacity=".18"/>'
        f'<polyline points="{line}" fill="none" stroke="var(--a0)" stroke-width="1.5" vector-effect="non-scaling-stroke"/>'
        f"{limit}</svg>"
    )
    source = f" at {memory.peak_source}" if memory.peak_source else ""
    padding = facts.padding_text(plan)
    about = f'<p class="dim">{escape(padding)}</p>' if padding else ""
    return (
        f'<div class="plot">{ticks}{svg}{mark}</div><h3>the peak{escape(source)}</h3>{_peak_kinds(memory)}'
        f"{about}{_peak_arrays(memory, bool(padding))}"
    )


def _peak_kinds(memory: Memory) -> str:
    """The kinds of arrays at the peak, as one bar with a legend."""
    sizes = sorted(memory.by_kind.items(), key=lambda x: -x[1])
    kinds = [(colour, f"{kind} {format_memory(n)}", n) for (kind, n), colour in zip(sizes, KIND_COLOURS, strict=False)]
    bars = "".join(
        f'<i class="{colour}" style="flex:{n / memory.peak:.4f} 0 0" title="{escape(text)}"></i>'
        for colour, text, n in kinds
    )
    return f'<div class="stack">{bars}</div>{key((colour, text) for colour, text, _ in kinds)}'


def _peak_arrays(memory: Memory, padding: bool) -> str:
    """The largest arrays at the peak as a table, with a column for their ``padding``."""
    columns = [("array", ""), ("kind", ""), ("per device", "n"), ("padding", "n")][: 3 + padding]
    rows = []
    for name, size, kind, pad in memory.largest[:8]:
        row = [Cell(name, css="mono"), Cell(kind), number(format_memory(size), size)]
        rows.append(row + [number(format_memory(pad) if pad else "", pad)] * padding)
    return f"<h3>its largest arrays</h3>{Table(columns, rows).html()}" if rows else ""


def layers(plan: Plan, colours: AxisColours) -> str:
    """The HTML of the timelines of one iteration, for the loops with the longest time."""
    if time_of(plan) is None:
        return f'<p class="dim">{NOT_ESTIMATED}</p>'
    timelines = facts.loop_timelines(plan)
    if not timelines:
        return '<p class="dim">the program has no loop over layers</p>'
    kinds = (("ink", "kernels"), ("c0 hidden", "paler: hidden, overlaps with kernels"))
    about = f'<p class="dim">{LAYERS}</p>'
    return about + "".join(_layer(t, colours) for t in timelines) + legend(plan, colours, kinds)


def _layer(timeline: LoopTimeline, colours: AxisColours) -> str:
    """One loop timeline: a lane of kernels, a lane of collectives, and one of copies to and from the host if there are any."""
    total = timeline.seconds
    lanes = {"compute": "kernels", "links": "collectives", "host": "copies to and from the host"}
    boxes = dict.fromkeys(("compute", "links", *(s.lane for s in timeline.spans)), "")
    for s in timeline.spans:
        if s.seconds < 4e-4 * total:
            continue
        where = f"left:{100 * s.start / total:.2f}%;width:{100 * s.seconds / total:.2f}%"
        hidden = " hidden" if s.lane != "compute" and not s.exposed else ""
        label = escape(f"{s.name} {s.detail}") if s.seconds > 0.03 * total else ""
        kind, tip = colours.first(s.axes) if s.axes else "ink", escape(_tip(s))
        boxes[s.lane] += f'<i class="{kind}{hidden}" style="{where}" role="img" aria-label="{tip}">{label}</i>'
    title = f"{format_seconds(total)} × {timeline.trips}" + (f", {timeline.source}" if timeline.source else "")
    busy = {lane: sum(s.seconds for s in timeline.spans if s.lane == lane) for lane in boxes}
    times = ", ".join(f"{lanes[lane]} {format_seconds(seconds)}" for lane, seconds in busy.items())
    rows = "".join(f'<div class="lane" aria-label="{lanes[lane]}">{of}</div>' for lane, of in boxes.items())
    ticks = "".join(f"<span>{text}</span>" for text in ("0", format_seconds(total / 2), format_seconds(total)))
    return f'<h3>{escape(title)}: {times}</h3><div class="wide"><div class="time">{rows}</div><div class="axis">{ticks}</div></div>'


def _tip(s: Span) -> str:
    """The lines of the tooltip of a timeline's box: name, seconds, dims and bytes, cause with its rule, source line."""
    over = f" over {'+'.join(s.axes)}" if s.axes else ""
    kind = "" if s.lane != "links" else ", exposed" if s.exposed else ", hidden"
    of = {"compute": "of HBM traffic", "links": "sent per device", "host": "per device"}
    traffic = f"{format_bytes(s.bytes)} {of[s.lane]}"
    lines = (f"{s.name}{over}: {format_seconds(s.seconds)}{kind}", s.detail or "(scalar)", traffic, s.cause, s.source)
    return "\n".join(filter(None, lines))


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
                f"{collectives_table(plan, e.collectives.members, colours, most)}</details>"
            )
    return f'<div class="by-rule">{out}</div>' if out else NOTHING_SENT


def collectives_table(
    plan: Plan, of: Sequence[Collective], colours: AxisColours, most: int | None = None, sortable: bool = True
) -> str:
    """Some collectives, in the order of :func:`collective_groups`; those that are alike in everything shown are one row.

    Args:
      most: number of rows; None: all.
      sortable: headings sort the rows.
    """
    timed = plan.chip is not None

    def alike(c: Collective) -> Hashable:
        return c.op, c.axes, c.dims, c.dtype, c.bytes, c.explanation, facts.location_of_layers(c)

    def row(group: facts.CollectiveGroup) -> list[Cell]:
        c = group.first
        op = Cell(c.op, markup=f"<b>{c.op}</b><br>{colours.axes(c.axes).markup}")
        dims = f'<code>{escape(c.dims or "(scalar)")}</code><br><span class="dim">{escape(c.dtype)}</span>'
        cause = f"{escape(c.explanation)}<br><code>{escape(group.location)}</code>"
        return [op, *group.cells()[: 3 + timed], Cell("", markup=dims), Cell("", markup=cause, css="why")]

    columns = [("collective", ""), ("total", "n"), ("calls", "n"), ("per call", "n more"), *[("time", "n")] * timed]
    columns += [("dims", ""), ("why, and where", "")]
    table = Table(columns, [row(group) for group in facts.collective_groups(of, alike)])
    return table.html(most, sortable) if table.rows else NOTHING_SENT


def _arguments(plan: Plan, colours: AxisColours) -> str:
    """The table of arguments by kind, with dims, shape, count and bytes."""
    rows: list[list[Cell]] = []
    attributes = []
    for label, every, groups in facts.argument_groups(
        plan, lambda h: (tuple(facts.argument_dims(h)), h.shape, h.dtype)
    ):
        rows.append([Cell(label), Cell("", css="more"), *every.cells()])
        attributes.append(GROUP)
        for group in groups:
            first = group.members[0]
            others = ", ".join(h.path for h in group.members[1:])
            summary = f"<summary>and {len(group.members) - 1} more</summary>"
            more = f"<details>{summary}<code>{escape(others)}</code></details>" if others else ""
            dims = f'{colours.dims(group.dims).markup}<br><code class="path">{escape(first.path)}</code>{more}'
            split = zip(group.dims, first.shape, strict=True)
            cut = escape(json.dumps([[name, n, list(axes)] for (name, axes), n in split]))
            rules = " ".join(map(str, facts.rules_of(plan, first)))
            rows.append([Cell("", markup=dims), Cell(group.shape, css="mono more"), *group.cells()])
            attributes.append(f'data-rules="{rules}" data-cut="{cut}"')
    columns = [("dims", ""), ("shape", "more"), ("tensors", "n more"), ("global", "n more"), ("per device", "n")]
    return Table(columns, rows, attributes=attributes).html()


def _values(plan: Plan, colours: AxisColours) -> str:
    """The table of the largest intermediate values, or ""."""
    rows = [
        [
            colours.dims(v.dims),
            Cell(facts.shape_text(v.dtype, v.shape), css="mono more"),
            number(str(v.kernels), v.kernels, css="more"),
            number(format_memory(v.bytes), v.bytes),
            code(v.source),
        ]
        for v in facts.largest_values(plan)
    ]
    columns = [("dims", ""), ("shape", "more"), ("kernels that write one", "n more"), ("per device", "n")]
    return Table([*columns, ("first created at", "")], rows).html() if rows else ""
