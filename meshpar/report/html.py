"""A plan as one page: mesh, rules and what each does, tensors, a layer over time, memory, every collective and its cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

from rich.text import Text

from ..cost.memory import memory_of
from ..cost.time import time_of
from ..hardware.topology import Stage
from ..plan.collectives import Collective
from ..plan.plan import Plan, ShardedArray
from ..units import format_bytes, format_memory, format_seconds
from .facts import (
    Body,
    Chip,
    Effect,
    bodies,
    chips_of,
    effects,
    kernel_seconds,
    largest_values,
    lowering_text,
    rates,
    step_seconds,
    waited_for,
    whole_bytes,
)  # fmt: skip
from .text import KINDS, notes, overlaps

COLOURS = 6
KIND_COLOURS = ("c0", "c1", "c2", "c4", "c3", "cn", "c5")
NOT_ESTIMATED = "not estimated: no topology"


def page(title: str, body: str) -> str:
    """A self-contained HTML document: styles and script inline, nothing from the network."""
    css, js = (_inline(name) for name in ("page.css", "page.js"))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{css}</style></head>\n"
        f'<body><main class="mp page">{body}</main><script>{js}</script></body></html>\n'
    )


def style() -> str:
    """The styles of pages, for a cell of a notebook."""
    return f"<style>{plain_style()}</style>"


def plain_style() -> str:
    """The styles of pages."""
    return _inline("page.css")


def _inline(name: str) -> str:
    return resources.files("meshpar.report").joinpath(name).read_text("utf8")


def plan_page(plan: Plan) -> str:
    """The plan as a self-contained HTML document."""
    ink = Ink(plan)
    did = effects(plan)
    parts = [
        _head(plan, ink),
        cards(plan),
        _section(
            "A step by part", step_parts(plan, ink), "All bars have one scale; the estimate overlaps what can overlap."
        ),
        _section(
            "Layout", rules_table(plan, did, ink), "Rules in order: an axis goes to the first whose dim is present."
        ),
        _section("Mesh", _mesh(plan, ink)),
        _section("One layer", layers(plan, ink)),
        _section("Memory of a device", memory_of_device(plan), "Over the ops of a step, loop bodies once."),
        _section(
            "Collectives", collectives_table(plan, ink), "Bytes are sent by each device. Click a heading to sort."
        ),
        _section("Arguments", _tensors(plan, ink)),
        _section("Largest values between", _values(plan, ink)),
        *([_section("Products beside collectives", _list(overlaps(plan, every=True)))] if plan.overlaps else []),
        _section("To know", notes_list(plan)),
    ]
    return page(f"plan: {plan.layout or 'nothing split'}", "\n".join(p for p in parts if p))


def plan_cell(plan: Plan) -> str:
    """The plan for a notebook: figures, rules, the largest collectives; no script."""
    ink = Ink(plan)
    body = _head(plan, ink) + cards(plan) + rules_table(plan, effects(plan), ink)
    return f'<div class="mp">{style()}{body}{collectives_table(plan, ink, most=6)}</div>'


class Ink:
    """The colour of every axis."""

    def __init__(self, plan: Plan):
        self.of = {a: f"c{k % COLOURS}" for k, a in enumerate(plan.sizes)}

    def axes(self, axes: Iterable[str]) -> str:
        return "".join(f'<span class="chip on {self.of.get(a, "cn")}">{escape(a)}</span>' for a in axes)

    def chips(self, chips: Iterable[Chip]) -> str:
        """Dims, those that are split in the colour of their (first) axis."""
        out = []
        for name, axes in chips:
            if axes:
                text = f"{escape(name)}:{escape('+'.join(axes))}"
                out.append(f'<span class="chip on {self.of.get(axes[0], "cn")}">{text}</span>')
            else:
                out.append(f'<span class="chip">{escape(name)}</span>')
        return "".join(out) or '<span class="dim">scalar</span>'


def _section(title: str, body: str, about: str = "") -> str:
    text = f'<p class="dim">{escape(about)}</p>' if about and body else ""
    return f"<section><h2>{escape(title)}</h2>{text}{body}</section>" if body else ""


def table(heads: Sequence[tuple[str, str]], rows: Iterable[str], sortable: bool = False) -> str:
    """A table that scrolls in itself; ``heads`` are (title, classes: ``n`` for numbers, ``more`` for what narrow screens lack)."""
    cells = "".join(
        f'<th scope="col"{f""" class="{kind}" """.rstrip() if kind else ""}>'
        + (f"<button>{escape(h)}</button>" if sortable and h else escape(h)) + "</th>"
        for h, kind in heads
    )  # fmt: skip
    kind = ' class="sort"' if sortable else ""
    return f'<div class="wide"><table{kind}><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def number(text: str, value: float, bar: str = "") -> str:
    """A cell with a number that sorts by its value; perhaps a bar below it."""
    return f'<td class="n" data-v="{value:.6g}">{escape(text)}{bar}</td>'


# -- the parts


def _head(plan: Plan, ink: Ink) -> str:
    devices = math.prod(plan.sizes.values())
    axes = " ".join(f'<span class="chip on {ink.of[a]}">{escape(a)} {n}</span>' for a, n in plan.sizes.items())
    where = f" of {escape(plan.topology)}" if plan.topology else ""
    layout = f'<p class="mono">{escape(str(plan.layout) or "(nothing split)")}</p>'
    return f"<h1>{devices} devices{where}</h1><p>{axes}</p>{layout}{lowering(plan)}"


def lowering(plan: Plan) -> str:
    """The lowering of a plan, as a line."""
    return f'<p class="dim">lowering: {escape(lowering_text(plan))}</p>'


def cards(plan: Plan) -> str:
    """The figures of a plan: memory of its device, seconds and utilisation, bytes sent."""
    memory, time, chip = memory_of(plan), time_of(plan), plan.chip
    room = chip.per_device().hbm if chip is not None else None
    meter, of = "", "(no chip is named)"
    if room and chip is not None:
        over = " over" if memory.peak > room else ""
        meter = f'<div class="meter{over}"><i style="width:{min(100.0, 100 * memory.peak / room):.1f}%"></i></div>'
        of = f"of {format_memory(room)} of a {chip.name}, estimated"
        of = f'<span class="up">does not fit</span>: {of}' if over else of
    shown = [("at the peak, on each device", format_memory(memory.peak), memory.peak, meter, of)]
    if time is not None:
        bounds = f"{format_seconds(time.overlapped)} if all overlaps, {format_seconds(time.serial)} if nothing does"
        below = "; ".join(filter(None, (bounds, waited_for(plan), rates(plan))))
        shown.append(("a step, estimated", format_seconds(time.seconds), time.seconds, "", escape(below)))
        longest = f"{escape(time.bottleneck.split(':')[0])} takes longest"
        shown.append(("of the peak FLOP/s", f"{100 * time.mfu:.0f} %", time.mfu, "", longest))
    else:
        shown.append(("time of a step", "–", 0.0, "", NOT_ESTIMATED))
    took = f"in {format_seconds(sum(map(step_seconds, plan.collectives)))}: " if plan.chip is not None else ""
    sent = plan.bytes_sent
    shown.append(("sent by each device in a step", format_bytes(sent), sent, "", f"{took}{_kinds_sent(plan)}"))
    return '<div class="cards">' + "".join(
        f'<div class="card"><b data-v="{value!r}">{text}</b>{what}{bar}<div class="dim">{more}</div></div>'
        for what, text, value, bar, more in shown
    ) + "</div>"  # fmt: skip


def step_parts(plan: Plan, ink: Ink) -> str:
    """The estimate of a step and what it is made of, as bars of one scale; collectives in the colours of their axes."""
    time = time_of(plan)
    if time is None:
        return ""
    kernels = kernel_seconds(time)
    linked: dict[str, float] = {}
    for c in plan.collectives:
        kind = ink.of.get(c.axes[0], "cn") if c.axes else "cn"
        linked[kind] = linked.get(kind, 0.0) + step_seconds(c)
    rows = [
        ("a step, estimated", time.seconds, [("ink", kernels, "kernels"), ("wait", time.seconds - kernels, "waits for links")]),
        ("products alone", time.compute, [("ink", time.compute, "products")]),
        ("memory traffic alone", time.memory, [("ink", time.memory, "memory traffic")]),
        ("collectives alone", time.communication, [(kind, n, "collectives") for kind, n in linked.items()]),
    ]  # fmt: skip
    most = max(value for _, value, _ in rows) or 1.0
    out = ""
    for label, value, pieces in rows:
        bars = "".join(
            f'<i class="{kind}" style="width:{100 * n / most:.2f}%" title="{escape(f"{what}: {format_seconds(n)}")}"></i>'
            for kind, n, what in pieces
            if n > 0
        )
        out += f'<div><span>{label}</span><span class="track">{bars}</span><span class="n">{format_seconds(value)}</span></div>'
    key = (f'<div class="key"><span class="ink"><i></i>kernels {format_seconds(kernels)}</span><span '
           f'class="wait"><i></i>waits for links '
           f"{format_seconds(time.seconds - kernels)}</span></div>")  # fmt: skip
    return f'<div class="parts">{out}</div>{key}'


def _kinds_sent(plan: Plan) -> str:
    kinds: dict[str, float] = {}
    for c in plan.collectives:
        kinds[c.op] = kinds.get(c.op, 0.0) + c.total_bytes
    return ", ".join(f"{k} {format_bytes(n)}" for k, n in sorted(kinds.items(), key=lambda x: -x[1])[:3])


def rules_table(plan: Plan, did: list[Effect], ink: Ink) -> str:
    """What each rule splits and sends."""
    timed = plan.chip is not None
    most = max((e.sent for e in did), default=0.0) or 1.0
    rows = []
    for e in did:
        kind = ink.of.get(e.axes[0], "cn") if e.axes else "cn"
        bar = f'<i class="bar {kind}" style="width:{100 * e.sent / most:.1f}%"></i>'
        if e.axes:
            text = f"{ink.axes(e.axes)} <code>{escape(e.rule)}</code>"
        else:
            text = f"<code>{escape(e.rule)}</code>" if e.rule != "other" else '<span class="dim">no single rule</span>'
        split = f"{format_memory(e.whole)} → {format_memory(e.local)}" if e.tensors else "–"
        if e.axes and not e.values and not e.sent:
            split = '<span class="up">nothing</span>'
        rows.append(
            f'<tr><td>{text}</td><td class="n more">{e.tensors or ""}</td><td class="n">{split}</td>'
            f'<td class="n more">{e.values or ""}</td>{number(format_bytes(e.sent) if e.sent else "–", e.sent, bar)}'
            + (number(format_seconds(e.seconds) if e.sent else "", e.seconds) if timed else "") + "</tr>"
        )  # fmt: skip
    heads = [
        ("rule", ""),
        ("splits arguments", "n more"),
        ("from, to", "n"),
        ("values in all", "n more"),
        ("sends", "n"),
    ]
    return table(heads + [("in", "n")] * timed, rows)


def _mesh(plan: Plan, ink: Ink) -> str:
    """Devices as a grid, the first axis to the right, the second downwards, at most 32 × 16 of them drawn."""
    axes = [(a, n) for a, n in plan.sizes.items() if n > 1]
    if not axes:
        return ""
    (across, n), (down, m) = axes[0], axes[1] if len(axes) > 1 else ("", 1)
    columns, lines = min(n, 32), min(m, 16)
    first, second = f"var(--{ink.of[across].replace('c', 'a')})", f"var(--{ink.of.get(down, 'cn').replace('c', 'a')})"

    def cell(i: int, j: int) -> str:
        colour, faint = (first, "") if j == 0 else (second, "" if i == 0 else ' opacity=".35"')
        return f'<rect x="{26 + 9 * i}" y="{18 + 9 * j}" width="7" height="7" rx="1.5" fill="{colour}"{faint}/>'

    cells = "".join(cell(i, j) for i in range(columns) for j in range(lines))
    middle = 18 + 4.5 * lines
    cut = " (drawn in part)" if columns < n or lines < m else ""
    texts = f'<text x="26" y="11" font-size="9" fill="{first}">{escape(across)} {n}{cut}</text>'
    if down:
        texts += (f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})" font-size="9" '
                  f'fill="{second}">{escape(down)} {m}</text>')  # fmt: skip
    w, h = 30 + 9 * max(columns, 14), 22 + 9 * max(lines, 4 if down else 1)
    label = "mesh of " + " by ".join(f"{a} {k}" for a, k in axes)
    svg = (
        f'<svg class="grid" style="max-width:{1.6 * w:.0f}px" viewBox="0 0 {w} {h}" role="img" aria-label="{escape(label)}">'
        f"{texts}{cells}</svg>"
    )
    rest = "".join(f"<li>and {escape(a)} {k}</li>" for a, k in axes[2:])
    torus = "".join(
        f"<li>{escape(axis)}: {' × '.join(_stage(s) for s in stages)}</li>"
        for axis, stages in plan.torus.items()
        if stages
    )
    where = f"<div><h3>where it lies</h3><ul>{rest}{torus}</ul></div>" if rest or torus else ""
    return f'<div class="flow">{svg}{where}</div>'


def _stage(stage: Stage) -> str:
    if not stage.dim:
        return str(stage.size)
    kind = {"slice": "over DCN", "switch": "on the switch", "core": "in the chip"}.get(stage.dim)
    return f"{stage.size} {kind or f'along {stage.dim}, a ' + ('ring' if stage.wraps else 'line')}"


def memory_of_device(plan: Plan) -> str:
    """What is live over the ops of a step, against the capacity, and what the peak consists of."""
    memory, chip = memory_of(plan), plan.chip
    curve = memory.curve
    if not curve:
        return ""
    room = chip.per_device().hbm if chip is not None else 0.0
    top = memory.peak * 1.12 or 1.0
    if room and room < 3 * memory.peak:
        top = max(top, room * 1.05)
    n = max(1, len(curve) - 1)
    points = [(1000 * k / n, 200 - 200 * size / top) for k, (_, size, _) in enumerate(curve)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    at = max(range(len(curve)), key=lambda k: curve[k][1])
    limit = ""
    if room and room <= top:
        y = 100 * (1 - room / top)
        limit = (f'<line x1="0" x2="1000" y1="{2 * y:.1f}" y2="{2 * y:.1f}" stroke="var(--bad)" stroke-dasharray="6 5" '
                 f'vector-effect="non-scaling-stroke"/>')  # fmt: skip
    ticks = "".join(
        f'<span class="tick" style="top:{100 - 100 * share:.0f}%">{format_memory(top * share)}</span>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    )
    left = 100 * at / n
    side = f"right:{100 - left:.1f}%" if left > 50 else f"left:{left:.1f}%"
    source = f" at {memory.peak_source}" if memory.peak_source else ""
    mark = (f'<span class="mark" style="{side};top:{100 - 100 * memory.peak / top:.1f}%;transform:translateY(-112%)">'
            f"{format_memory(memory.peak)}</span>")  # fmt: skip
    svg = (
        f'<svg viewBox="0 0 1000 200" preserveAspectRatio="none" role="img" aria-label="live bytes over the ops of a step">'
        f'<polygon points="0,200 {line} 1000,200" fill="var(--a0)" opacity=".18"/>'
        f'<polyline points="{line}" fill="none" stroke="var(--a0)" stroke-width="1.5" vector-effect="non-scaling-stroke"/>'
        f"{limit}</svg>"
    )
    kinds = sorted(memory.by_kind.items(), key=lambda x: -x[1])
    bars = "".join(f'<i class="{c}" style="flex:{v / memory.peak:.4f} 0 0" title="{escape(k)}: {format_memory(v)}"></i>'
                   for (k, v), c in zip(kinds, KIND_COLOURS, strict=False))  # fmt: skip
    key = "".join(
        f'<span class="{c}"><i></i>{escape(k)} {format_memory(v)}</span>'
        for (k, v), c in zip(kinds, KIND_COLOURS, strict=False)
    )
    largest = "".join(
        f'<tr><td class="mono">{escape(what)}</td><td>{escape(kind)}</td>{number(format_memory(size), size)}</tr>'
        for what, size, kind in memory.largest[:8]
    )
    return (
        f'<div class="plot">{ticks}{svg}{mark}</div><h3>the peak{escape(source)}</h3>'
        f'<div class="stack">{bars}</div><div class="key">{key}</div>'
        + (
            f"<h3>its largest arrays</h3>{table([('array', ''), ('kind', ''), ('a device', 'n')], [largest])}"
            if largest
            else ""
        )
    )


def layers(plan: Plan, ink: Ink) -> str:
    """One iteration of the loops that take longest, over time."""
    if time_of(plan) is None:
        return f'<p class="dim">{NOT_ESTIMATED}</p>'
    found = bodies(plan)
    if not found:
        return '<p class="dim">the program has no loop over layers</p>'
    about = (
        '<p class="dim">One iteration of each loop, as the estimate has it: kernels one after the other; collectives between them '
        "where something waits, beside them (paler) where nothing does: a weight that can be sent for ahead, a gradient that "
        "only leaves, if programs for the chip go on meanwhile.</p>"
    )
    return about + "".join(_layer(b, ink) for b in found)


def _layer(body: Body, ink: Ink) -> str:
    whole = body.seconds
    lanes = {"compute": "", "links": ""}
    for s in body.spans:
        if s.seconds < 4e-4 * whole:
            continue
        where = f"left:{100 * s.start / whole:.2f}%;width:{100 * s.seconds / whole:.2f}%"
        colour = ink.of.get(s.axes[0], "cn") if s.axes else "cn"
        beside = " beside" if s.lane == "links" and not s.waits else ""
        tip = f"{s.name} {'+'.join(s.axes)} {format_seconds(s.seconds)}: {s.detail} {s.source}"
        label = escape(f"{s.name} {s.detail}") if s.seconds > 0.03 * whole else ""
        lanes[s.lane] += f'<i class="{colour}{beside}" style="{where}" title="{escape(tip)}">{label}</i>'
    busy = {lane: sum(s.seconds for s in body.spans if s.lane == lane) for lane in lanes}
    title = f"{format_seconds(whole)} × {body.trips}" + (f", {body.source}" if body.source else "")
    return (
        f"<h3>{escape(title)}: kernels {format_seconds(busy['compute'])}, collectives {format_seconds(busy['links'])}</h3>"
        f'<div class="wide"><div class="time"><div class="lane" aria-label="kernels">{lanes["compute"]}</div>'
        f'<div class="lane" aria-label="collectives">{lanes["links"]}</div></div>'
        f'<div class="axis"><span>0</span><span>{format_seconds(whole / 2)}</span><span>{format_seconds(whole)}</span></div></div>'
    )


def collectives_table(plan: Plan, ink: Ink, most: int | None = None) -> str:
    """Collectives alike in all that is shown as one row."""
    groups: dict[Any, list[Collective]] = {}
    for c in plan.collectives:
        groups.setdefault((c.op, c.axes, c.dims, c.dtype, c.bytes, c.cause, c.source), []).append(c)
    ranked = sorted(groups.values(), key=lambda g: -sum(c.total_bytes for c in g))
    timed = plan.chip is not None
    rows = []
    for group in ranked[:most]:
        c = group[0]
        runs = None if any(g.count is None for g in group) else sum(g.count or 0 for g in group)
        total, took = sum(g.total_bytes for g in group), sum(map(step_seconds, group))
        rows.append(
            f'<tr><td data-v="{c.op}"><b>{c.op}</b><br>{ink.axes(c.axes)}</td>'
            f'<td><code>{escape(c.dims or "(scalar)")}</code><br><span class="dim">{escape(c.dtype)}</span></td>'
            f"{number('?' if runs is None else f'{runs} ×', runs or 0)}{number(format_bytes(c.bytes), c.bytes)}"
            f"{number(format_bytes(total), total)}"
            + (number(format_seconds(took), took) if timed else "")
            + f'<td class="why">{escape(c.cause)}<br><code>{escape(c.source)}</code></td></tr>'
        )
    if not rows:
        return "<p>Each device sends nothing.</p>"
    heads = [("collective", ""), ("of", ""), ("runs", "n"), ("bytes once", "n"), ("in a step", "n")]
    heads += [("takes", "n")] * timed + [("why, and where", "")]
    more = f'<p class="dim">and {len(ranked) - most} more</p>' if most is not None and len(ranked) > most else ""
    return table(heads, rows, sortable=most is None) + more


def _tensors(plan: Plan, ink: Ink) -> str:
    rows = []
    for kind, label in KINDS.items():
        held = [h for h in (*plan.inputs, *plan.constants) if h.kind == kind]
        if not held:
            continue
        whole, local = sum(whole_bytes(plan, h) for h in held), sum(h.bytes for h in held)
        rows.append(f'<tr class="group"><td colspan="2">{label}</td>{number(str(len(held)), len(held))}'
                    f"{number(format_memory(whole), whole)}{number(format_memory(local), local)}</tr>")  # fmt: skip
        groups: dict[Any, list[ShardedArray]] = {}
        for h in held:
            groups.setdefault((tuple(chips_of(h)), h.shape, h.dtype), []).append(h)
        for group in sorted(groups.values(), key=lambda g: -sum(h.bytes for h in g)):
            h = group[0]
            whole, local = sum(whole_bytes(plan, x) for x in group), sum(x.bytes for x in group)
            paths = ", ".join(x.path for x in group[:2]) + (f", … {len(group) - 2} more" if len(group) > 2 else "")
            rows.append(
                f"<tr><td>{ink.chips(chips_of(h))}<br><code class=dim>{escape(paths)}</code></td>"
                f'<td class="mono">{escape(_shape(h.dtype, h.shape))}</td>{number(str(len(group)), len(group))}'
                f"{number(format_memory(whole), whole)}{number(format_memory(local), local)}</tr>"
            )
    return table([("dims", ""), ("shape", ""), ("tensors", "n"), ("all", "n"), ("a device", "n")], rows)


def _values(plan: Plan, ink: Ink) -> str:
    rows = [
        f'<tr><td>{ink.chips(v.chips)}</td><td class="mono">{escape(_shape(v.dtype, v.shape))}</td>'
        f"{number(str(v.times), v.times)}{number(format_memory(v.bytes), v.bytes)}<td><code>{escape(v.source)}</code></td></tr>"
        for v in largest_values(plan)
    ]
    heads = [("dims", ""), ("shape", ""), ("kernels write one", "n"), ("a device", "n"), ("first made at", "")]
    return table(heads, rows) if rows else ""


def _shape(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def notes_list(plan: Plan) -> str:
    """What to know of a plan."""
    return _list(notes(plan))


def _list(lines: Sequence[Text]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line.plain)}</li>" for line in lines) + "</ul>"
