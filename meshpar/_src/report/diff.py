"""Comparison of two plans: memory, time and bytes of both, arguments that are sharded differently, collectives that differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

from rich.console import Group
from rich.text import Text

from ..cost.memory import memory_by_role, memory_of
from ..cost.time import time_of
from ..passes.advice import idle_axes
from ..plan.plan import Plan, ShardedArray
from ..units import format_bytes, format_memory, format_seconds, mesh_text
from . import facts
from .colours import ROLE_CLASSES, AxisColours
from .data import shards_place
from .document import Document
from .facts import (
    KINDS,
    argument_dims,
    collective_groups,
    dims_text,
    kernel_seconds,
    layout_text,
    lowering_text,
)
from .tables import Cell, Table, code, hanging, html_picture, number, prose
from .timeline import MIN_SHARE, step_bounds
from .torus import torus_picture

MAX_ROWS = 12
"""Arguments and collectives that the terminal lists; pages list three times as many."""

MIN_DIFFERENCE = 5e-3
"""Difference of two step times, as a fraction of one, below which they are said to be equal."""

Unit = Literal["bytes", "memory", "seconds", "share"]
FORMATS: Mapping[Unit, Callable[[float], str]] = {
    "bytes": format_bytes,
    "memory": format_memory,
    "seconds": format_seconds,
    "share": lambda x: f"{100 * x:.0f} %",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of both plans; None where a plan has no estimate."""

    name: str
    a: float | None
    b: float | None
    unit: Unit

    @property
    def ratio(self) -> float | None:
        """b / a."""
        return self.b / self.a if self.a and self.b is not None else None

    def text(self, x: float | None) -> str:
        """A value with its unit."""
        return "–" if x is None else FORMATS[self.unit](x)

    @property
    def change(self) -> str:
        """``−25.0 %``, ``+210 %``, ``same``, of a share ``+12 points``; empty where ``a`` is missing or negligible."""
        r = self.ratio
        if r is not None and (abs(r - 1) < 5e-4 or (self.unit == "share" and self.text(self.a) == self.text(self.b))):
            return "same"
        if r is None or self.a is None or self.b is None or (r >= 100 and self.unit != "share"):
            return ""
        if self.unit == "share":
            return f"{round(100 * self.b) - round(100 * self.a):+} points".replace("-", "−")
        return f"{100 * (r - 1):+,.{0 if r >= 2 else 1}f} %".replace("-", "−")

    @property
    def cell(self) -> Cell:
        """The change as a cell: green for less, red for more, of a share the opposite."""
        less = self.ratio is not None and self.ratio < 1
        css = "dim" if self.change in ("", "same") else "down" if less != (self.unit == "share") else "up"
        terminal = Text(self.change, {"down": "green", "up": "red"}.get(css, ""))
        return Cell(self.change, css=f"n {css}", terminal=terminal)


@dataclass(eq=False)
class PlanDiff(Document):
    """Plan ``a`` compared with plan ``b``; print it, show it in a notebook, or save it.

    Attributes:
      a, b: the plans.
      metrics: memory, time and bytes of both.
      tensors: (path, dims → axes in a, in b, bytes a device in a, in b) of the arguments that are sharded differently: parameters,
        other inputs, optimizer state; largest first.
      collectives: (op, axes, dims, bytes in a step of a, of b) where they differ, largest difference first.
    """

    a: Plan
    b: Plan
    metrics: list[Metric] = field(init=False)
    tensors: list[tuple[str, str, str, float, float]] = field(init=False)
    collectives: list[tuple[str, str, str, float, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = [m for m in _metrics(self.a, self.b) if m.a is not None or m.b is not None]
        self.tensors = _tensors(self.a, self.b)
        self.collectives = _collectives(self.a, self.b)

    def to_json(self) -> str:
        """Both layouts and meshes, all metrics, all arguments that are sharded differently, all collectives that differ."""
        names = {
            "tensors": ("path", "a", "b", "bytes_a", "bytes_b"),
            "collectives": ("op", "axes", "dims", "bytes_a", "bytes_b"),
        }
        tables = {of: [dict(zip(keys, row, strict=True)) for row in getattr(self, of)] for of, keys in names.items()}
        sides = {
            k: {"mesh": p.sizes, "topology": p.topology, "layout": str(p.layout), "lowering": p.lowering}
            for k, p in (("a", self.a), ("b", self.b))
        }
        units = {"memory": "bytes"}
        metrics = {m.name: {"a": m.a, "b": m.b, "unit": units.get(m.unit, m.unit)} for m in self.metrics}
        return json.dumps({**sides, "metrics": metrics, **tables})

    @property
    def verdict(self) -> str:
        """What differs besides the layout, which plan fits, the axes that one leaves idle, and which step is shorter, with the
        differences of its parts, which add up to the difference of the step."""
        texts = [*self._targets, *(f"{k} does not fit" for k in "ab" if facts.fits(getattr(self, k)) is False)]
        idle = {k: ", ".join(f"`{axis}`" for axis in idle_axes(getattr(self, k))) for k in "ab"}
        texts += [
            f"no value of {k} is split over {axes}: its devices all do the same work"
            for k, axes in idle.items()
            if axes
        ]
        a, b = time_of(self.a), time_of(self.b)
        if a is None or b is None or not a.seconds:
            sent = Metric("", self.a.bytes_sent, self.b.bytes_sent, "bytes")
            return "; ".join([*texts, f"b sends {sent.text(sent.b)} a step, a {sent.text(sent.a)}"])
        more = b.seconds / a.seconds - 1
        if abs(more) < MIN_DIFFERENCE:
            return "; ".join([*texts, f"b takes as long as a, {format_seconds(b.seconds)} a step"])
        differences = {name: after - before for name, before, after in _step_parts(self)}
        large = {name: n for name, n in differences.items() if abs(n) >= MIN_SHARE * abs(b.seconds - a.seconds)}
        rest = sum(differences.values()) - sum(large.values())
        why = [f"{name} {_signed(n)}" for name, n in large.items()]
        why += [f"other parts {_signed(rest)}"] * (abs(rest) >= 0.001 * abs(b.seconds - a.seconds))
        much = f"takes {1 + more:.3g} × as long" if more > 0 else f"is {1 / (1 + more):.3g} × as fast"
        longer = f"b {much} as a, {_signed(b.seconds - a.seconds)} a step"
        return "; ".join([*texts, f"{longer}, bound by {', '.join(why)}"])

    @property
    def _targets(self) -> list[str]:
        """What differs between the plans besides mesh, layout and options: programs, the shapes of their arguments, chips."""
        a, b = self.a, self.b
        names, chips = [facts.title(p) for p in (a, b)], [p.topology or "no chip" for p in (a, b)]
        shapes = [{h.path: (h.shape, h.dtype) for h in p.inputs} for p in (a, b)]
        texts = [f"two programs, a: {names[0]}, b: {names[1]}"] * (names[0] != names[1])
        texts += ["the arguments have different shapes"] * (shapes[0] != shapes[1])
        return texts + [f"different devices, a: {chips[0]}, b: {chips[1]}"] * (chips[0] != chips[1])

    def _title(self) -> str:
        return f"{self.a.layout} | {self.b.layout}"

    def _html(self) -> str:
        return f"<h1>Two plans</h1>{diff_body(self)}"

    def __rich__(self) -> Any:
        """The comparison for a terminal: a verdict, both plans, the table of metrics, and a table for each section that differs."""
        colours = AxisColours(self.a.sizes, self.b.sizes)
        sides = hanging([(Text(k, "bold"), _side(p, colours)) for k, p in (("a", self.a), ("b", self.b))])
        metrics, *differences = _tables(self, colours)
        verdict = colours.layout(self.verdict)
        verdict.stylize("bold")
        parts: list[Any] = [verdict, sides, Text(), metrics.terminal()]
        for table in differences:
            parts += [Text(), table.terminal(MAX_ROWS)]
        return Group(*parts, *([] if differences else [Text(), Text("the same plan")]))


def _signed(seconds: float) -> str:
    """``+3.2 ms``, ``−3.2 ms``."""
    return f"{'−' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _metrics(a: Plan, b: Plan) -> Iterator[Metric]:
    """The metrics of both plans, in the order of the report."""

    def metric(name: str, unit: Unit, of: Callable[[Plan], float | None]) -> Metric:
        return Metric(name, of(a), of(b), unit)

    def time(name: str, of: str, unit: Unit = "seconds") -> Metric:
        return metric(name, unit, lambda p: getattr(time_of(p), of, None))

    yield metric("peak memory of a device", "memory", lambda p: memory_of(p).peak)
    if memory_of(a).host or memory_of(b).host:
        yield metric("in the host's memory", "memory", lambda p: memory_of(p).host)
    yield time("step", "seconds")
    yield time("matmuls alone", "compute")
    yield time("memory traffic alone", "memory")
    yield time("communication alone", "communication")
    yield time("MFU", "mfu", "share")
    yield metric("sent by a device in a step", "bytes", lambda p: p.bytes_sent)
    for op in dict.fromkeys(c.op for c in (*a.collectives, *b.collectives)):
        yield metric(f"  {op}", "bytes", lambda p, op=op: sum(c.total_bytes for c in p.collectives if c.op == op))
    for kind, label in KINDS.items():
        if kind and (a.argument_bytes(kind) or b.argument_bytes(kind)):
            yield metric(f"{label} on a device", "memory", lambda p, kind=kind: p.argument_bytes(kind))


def longer_parts(slow: Plan, fast: Plan) -> list[tuple[float, str]]:
    """(seconds, text) of matmuls, memory traffic and each collective that take longer in ``slow`` than in ``fast``, largest
    difference first; the text of a collective has its cause. Empty without estimates of time."""

    def of(plan: Plan) -> dict[tuple[str, ...], tuple[float, str]]:
        """Kind of cost, (name,) or (collective, tensor) → (seconds in a step, text)."""
        time = time_of(plan)
        if time is None:
            return {}
        costs: dict[tuple[str, ...], tuple[float, str]] = {
            ("matmuls",): (time.compute, "matmuls of each device"),
            ("memory traffic",): (time.memory, "memory traffic"),
        }
        for c in plan.collectives:
            key = (c.op, c.tensor)
            text = f"{c.op} of {c.tensor} over {'+'.join(c.axes)}: {c.explanation}"
            costs[key] = (costs.get(key, (0.0, ""))[0] + c.total_seconds, text)
        return costs

    before = of(fast)
    more = [(seconds - before.get(key, (0.0, ""))[0], text) for key, (seconds, text) in of(slow).items()]
    return sorted(((s, text) for s, text in more if s > 0), key=lambda m: -m[0])


def _step_parts(d: PlanDiff) -> list[tuple[str, float, float]]:
    """(part, seconds in a, seconds in b) of the parts of both steps (:func:`step_bounds`), largest difference first."""
    a, b = (dict(step_bounds(plan)) for plan in (d.a, d.b))
    parts = [(name, a.get(name, 0.0), b.get(name, 0.0)) for name in {**a, **b}]
    return sorted(parts, key=lambda part: -abs(part[2] - part[1]))


def time_comparison(d: PlanDiff, most: int = 4) -> str:
    """Why plan b is slower or faster than plan a, as part of a page: the parts of both steps, and the ``most`` matmuls and
    collectives that take longer in the slower plan; "" without estimates of time."""
    a, b = time_of(d.a), time_of(d.b)
    if a is None or b is None:
        return ""
    is_longer = b.seconds > a.seconds
    rows = [
        [
            Cell(name),
            *(number(format_seconds(n), n) for n in (x, y)),
            number(_signed(y - x), y - x, css="up" if y > x else "down"),
        ]
        for name, x, y in _step_parts(d)
    ]
    table = Table([("part of the step", ""), ("pinned", "n"), ("this plan", "n"), ("difference", "n")], rows)
    longer = longer_parts(d.b, d.a) if is_longer else longer_parts(d.a, d.b)
    causes = "".join(f"<li>{format_seconds(s)}: {prose(text)}</li>" for s, text in longer[:most])
    title = f"<h3>takes longer in {'this' if is_longer else 'the pinned'} plan</h3>"
    return table.html() + (f"{title}<ul>{causes}</ul>" if causes else "")


def _by_path(plan: Plan) -> dict[str, ShardedArray]:
    return {h.path: h for h in plan.inputs}


def _tensors(a: Plan, b: Plan) -> list[tuple[str, str, str, float, float]]:
    """(path, sharding in a, sharding in b, bytes in a, bytes in b) of the arguments that differ in these; largest
    first.

    Parameters precede other inputs, and these precede optimizer state.
    """
    in_a, in_b = _by_path(a), _by_path(b)
    order = {"params": 0, None: 1, "opt": 2}  # optimizer state mostly follows its parameters
    out = []
    for path in dict.fromkeys((*in_a, *in_b)):
        x, y = in_a.get(path), in_b.get(path)
        if x is None or y is None or _sharding(x) != _sharding(y) or x.bytes != y.bytes:
            h = x or y
            row = (path, _sharding(x), _sharding(y), x.bytes if x else 0.0, y.bytes if y else 0.0)
            out.append((order.get(h.kind if h else None, 1), row))
    return [row for _, row in sorted(out, key=lambda t: (t[0], -max(t[1][3:])))]


def _sharding(h: ShardedArray | None) -> str:
    return "–" if h is None else dims_text(argument_dims(h))


def _collectives(a: Plan, b: Plan) -> list[tuple[str, str, str, float, float]]:
    """(kind, axes, dims, bytes in a, bytes in b) of the collectives whose bytes in a step differ; largest difference
    first."""

    def key(c: Any) -> tuple[str, str, str]:
        return c.op, "+".join(c.axes), c.dims or "(scalar)"

    in_a, in_b = ({key(g.first): g.bytes for g in collective_groups(p.collectives, key)} for p in (a, b))
    keys = dict.fromkeys((*(key(c) for c in a.collectives), *(key(c) for c in b.collectives)))
    rows = [(*k, in_a.get(k, 0.0), in_b.get(k, 0.0)) for k in keys if in_a.get(k) != in_b.get(k)]
    return sorted(rows, key=lambda r: -abs(r[3] - r[4]))


def _side(p: Plan, colours: AxisColours) -> Text:
    """Mesh, topology, layout and lowering of a plan in one line, with coloured axes."""
    where = f" of {p.topology}" if p.topology else ""
    layout = colours.layout(layout_text(p))
    return Text.assemble(colours.mesh(mesh_text(p.sizes)), where, "   ", layout, f"   {p.lowering}")


def _tables(d: PlanDiff, colours: AxisColours) -> list[Table]:
    """The metrics, then the arguments and the collectives that differ, if any."""
    metrics = [[Cell(m.name), number(m.text(m.a), m.a or 0), number(m.text(m.b), m.b or 0), m.cell] for m in d.metrics]
    sides = [_by_path(plan) for plan in (d.a, d.b)]

    def arguments() -> Iterator[list[Cell]]:
        for path, _, _, *sizes in d.tensors:
            dims = (colours.dims(argument_dims(side[path])) if path in side else Cell("–") for side in sides)
            yield [code(path), *dims, *(number(format_memory(n), n) for n in sizes)]

    def collectives() -> Iterator[list[Cell]]:
        for op, axes, dims, *sizes in d.collectives:
            sent = (number(format_bytes(n) if n else "–", n) for n in sizes)
            yield [Cell(op), colours.axes(axes.split("+")), code(dims), *sent]

    count = len(d.tensors)
    differences = (
        Table(
            [("argument", "path"), ("dims in a", ""), ("in b", ""), ("device, a", "n"), ("b", "n")],
            list(arguments()),
            f"{count} argument{'s are' if count != 1 else ' is'} sharded differently",
        ),
        Table(
            [("collective", "word"), ("axes", "word"), ("dims", ""), ("sent in a", "n"), ("in b", "n")],
            list(collectives()),
            "Collectives that differ, bytes in a step",
        ),
    )
    return [
        Table([("", ""), ("a", "n"), ("b", "n"), ("change", "n")], metrics),
        *(table for table in differences if table.rows),
    ]


def _bars(d: PlanDiff) -> str:
    """The step times and the peaks of both plans as bars with their parts."""
    sides = []
    for name, plan in (("a", d.a), ("b", d.b)):
        time = time_of(plan)
        kernels = 0.0 if time is None else kernel_seconds(time)
        peak = max(memory_by_role(plan), key=lambda roles: sum(roles.values()), default={})
        live = [[ROLE_CLASSES[role], role, n] for role, n in peak.items() if n > 0]
        sides.append({"name": name, "seconds": time and [kernels, time.seconds - kernels], "memory": live})
    return html_picture("drawBars", "step time and peak memory of both plans", sides)


def _drawings(d: PlanDiff, colours: AxisColours) -> str:
    """The largest argument that is sharded differently, on both meshes; and both placements on the chips, if they differ."""
    pairs: list[tuple[str, list[str]]] = []
    sides = [(plan, _by_path(plan)) for plan in (d.a, d.b)]
    path = next((row[0] for row in d.tensors if all(row[0] in of for _, of in sides)), None)
    if path is not None:
        pairs.append((f"How {path} is sharded", [shards_place(p, colours, of[path]) for p, of in sides]))
    if d.a.topology == d.b.topology and d.a.torus != d.b.torus:
        pairs.append(("Axes on the chips", [torus_picture(p, colours) for p, _ in sides]))
    return "".join(
        f'<h2>{escape(title)}</h2><div class="two"><div><h3>a</h3>{a}</div><div><h3>b</h3>{b}</div></div>'
        for title, (a, b) in pairs
        if a and b
    )


def diff_body(d: PlanDiff, folded: bool = False) -> str:
    """The comparison as part of a page; ``folded``: arguments and collectives are shown only when they are opened."""
    colours = AxisColours(d.a.sizes, d.b.sizes)

    def side(name: str, p: Plan) -> str:
        where = f' <span class="dim">of {escape(p.topology)}</span>' if p.topology else ""
        layout = f"<code>{escape(layout_text(p))}</code>"
        lowering = f'<p class="dim">lowering: {escape(lowering_text(p))}</p>'
        return f'<div class="card"><b>{name}</b>{colours.sizes(p.sizes).markup}{where}<br>{layout}{lowering}</div>'

    def section(table: Table) -> str:
        body = table.html(3 * MAX_ROWS, sortable=not folded and table.columns[0][1] != "path")
        if folded:
            return f"<details><summary>{table.title}</summary>{body}</details>"
        return f"<h2>{table.title}</h2>{body}"

    metrics, *differences = _tables(d, colours)
    out = f'<div class="cards">{side("a", d.a)}{side("b", d.b)}</div>{_bars(d)}{metrics.html()}{_drawings(d, colours)}'
    out = f"<p><b>{escape(d.verdict)}</b></p>{out}"
    return out + ("".join(map(section, differences)) or "<p>The same plan.</p>")
