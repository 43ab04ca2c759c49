"""Two plans side by side: what one holds, sends and takes more than the other, and which tensors lie otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..cost.memory import memory_of
from ..cost.time import time_of
from ..plan.plan import Plan, ShardedArray
from ..units import format_bytes, format_memory, format_seconds
from .facts import chips_of
from .html import Ink, lowering, number, page, style, table
from .save import save
from .text import plain

MOST = 12


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both plans; None where one has no estimate."""

    name: str
    a: float | None
    b: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        """b / a."""
        return self.b / self.a if self.a and self.b is not None else None

    def show(self, x: float | None) -> str:
        """A value for people."""
        if x is None:
            return "–"
        return (
            format_memory(x)
            if self.unit == "memory"
            else format_bytes(x)
            if self.unit == "bytes"
            else format_seconds(x)
            if self.unit == "seconds"
            else f"{100 * x:.0f} %"
        )

    @property
    def change(self) -> str:
        """``−25 %``, ``× 3.1``; empty where there is nothing to compare, or ``a`` is next to nothing beside ``b``."""
        r = self.ratio
        if r is None or self.unit == "share" or abs(r - 1) < 5e-4:
            return "=" if r is not None and abs(r - 1) < 5e-4 else ""
        if r >= 100:
            return ""
        return f"× {r:.2g}" if r >= 2 else f"{100 * (r - 1):+.1f} %".replace("-", "−")


@dataclass(eq=False)
class PlanDiff:
    """``a`` beside ``b``; print it, show it in a notebook, or save it.

    Attributes:
      a, b: the plans.
      figures: memory, time and bytes of both.
      tensors: (path, dims → axes in a, in b, bytes a device in a, in b) of the arguments that lie otherwise: parameters,
        other inputs, optimizer state; largest first.
      collectives: (op, axes, dims, bytes in a step of a, of b) where they differ, largest difference first.
    """

    a: Plan
    b: Plan
    figures: list[Figure] = field(init=False)
    tensors: list[tuple[str, str, str, float, float]] = field(init=False)
    collectives: list[tuple[str, str, str, float, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.figures = list(_figures(self.a, self.b))
        self.tensors = _tensors(self.a, self.b)
        self.collectives = _collectives(self.a, self.b)

    def to_json(self) -> str:
        """Both layouts and meshes, all figures, all tensors that lie otherwise, all collectives that differ."""
        tensors = [dict(zip(("path", "a", "b", "bytes_a", "bytes_b"), t, strict=True)) for t in self.tensors]
        sent = [dict(zip(("op", "axes", "dims", "bytes_a", "bytes_b"), c, strict=True)) for c in self.collectives]
        sides = {
            k: {"mesh": p.sizes, "topology": p.topology, "layout": str(p.layout), "lowering": p.lowering}
            for k, p in (("a", self.a), ("b", self.b))
        }
        figures = {
            f.name: {"a": f.a, "b": f.b, "unit": "bytes" if f.unit == "memory" else f.unit} for f in self.figures
        }
        return json.dumps({**sides, "figures": figures, "tensors": tensors, "collectives": sent})

    def save(self, path: str | Path) -> None:
        """Write it to a file: ``.html``, ``.json`` or ``.txt``.

        Raises:
          UnsupportedError: another suffix.
        """
        save(self, path, {".html": _page, ".json": PlanDiff.to_json, ".txt": str})

    def __str__(self) -> str:
        return plain(self)

    def __rich__(self) -> Any:
        heads = [Text.assemble((f"{k}  ", "bold"), _side(p)) for k, p in (("a", self.a), ("b", self.b))]
        parts: list[Any] = [*heads, Text(), _rich(["", "a", "b", ""], [
            [f.name, f.show(f.a), f.show(f.b), f.change] for f in self.figures])]  # fmt: skip
        if self.tensors:
            rows = [[path, x, y, format_memory(m), format_memory(n)] for path, x, y, m, n in self.tensors[:MOST]]
            parts += [Text(), Text(f"{_counted(len(self.tensors), 'argument')} otherwise", style="bold"),
                      _rich(["", "in a", "in b", "a", "b"], rows)]  # fmt: skip
        if self.collectives:
            rows = [[op, axes, dims, _sent(m), _sent(n)] for op, axes, dims, m, n in self.collectives[:MOST]]
            parts += [Text(), Text("what is sent in a step, where it differs", style="bold"),
                      _rich(["", "axes", "of", "a", "b"], rows)]  # fmt: skip
        if not self.tensors and not self.collectives:
            parts += [Text(), Text("the same plan")]
        return Group(*parts)

    def _repr_html_(self) -> str:
        return f'<div class="mp">{style()}{diff_body(self)}</div>'


def _figures(a: Plan, b: Plan) -> Iterator[Figure]:
    def figure(name: str, unit: str, of: Callable[[Plan], float | None]) -> Figure:
        return Figure(name, of(a), of(b), unit)

    yield figure("peak memory of a device", "memory", lambda p: memory_of(p).peak)
    if memory_of(a).host or memory_of(b).host:
        yield figure("in the host's memory", "memory", lambda p: memory_of(p).host)
    yield figure("step", "seconds", lambda p: (t := time_of(p)) and t.seconds)
    yield figure("compute", "seconds", lambda p: (t := time_of(p)) and t.compute)
    yield figure("memory traffic", "seconds", lambda p: (t := time_of(p)) and t.memory)
    yield figure("communication", "seconds", lambda p: (t := time_of(p)) and t.communication)
    yield figure("part of the peak FLOP/s", "share", lambda p: (t := time_of(p)) and t.mfu)
    yield figure("sent by a device in a step", "bytes", lambda p: p.bytes_sent)
    for op in dict.fromkeys(c.op for c in (*a.collectives, *b.collectives)):
        yield figure(f"  {op}", "bytes", lambda p, op=op: sum(c.total_bytes for c in p.collectives if c.op == op))
    for kind, label in (("params", "parameters"), ("opt", "optimizer state"), ("constant", "constants")):
        if a.argument_bytes(kind) or b.argument_bytes(kind):
            yield figure(f"{label} on a device", "memory", lambda p, kind=kind: p.argument_bytes(kind))


def _tensors(a: Plan, b: Plan) -> list[tuple[str, str, str, float, float]]:
    ours, theirs = ({h.path: h for h in p.inputs} for p in (a, b))
    order = {"params": 0, None: 1, "opt": 2}  # optimizer state mostly follows its parameters
    out = []
    for path in dict.fromkeys((*ours, *theirs)):
        x, y = ours.get(path), theirs.get(path)
        if x is None or y is None or _lies(x) != _lies(y) or x.bytes != y.bytes:
            held = x or y
            row = (path, _lies(x), _lies(y), x.bytes if x else 0.0, y.bytes if y else 0.0)
            out.append((order.get(held.kind if held else None, 1), row))
    return [row for _, row in sorted(out, key=lambda t: (t[0], -max(t[1][3:])))]


def _lies(h: ShardedArray | None) -> str:
    if h is None:
        return "–"
    return " ".join(f"{n}:{'+'.join(axes)}" if axes else n for n, axes in chips_of(h)) or "(scalar)"


def _collectives(a: Plan, b: Plan) -> list[tuple[str, str, str, float, float]]:
    def by_kind(p: Plan) -> dict[tuple[str, str, str], float]:
        out: dict[tuple[str, str, str], float] = {}
        for c in p.collectives:
            key = (c.op, "+".join(c.axes), c.dims or "(scalar)")
            out[key] = out.get(key, 0.0) + c.total_bytes
        return out

    ours, theirs = by_kind(a), by_kind(b)
    keys = dict.fromkeys((*ours, *theirs))
    rows = [(*k, ours.get(k, 0.0), theirs.get(k, 0.0)) for k in keys if ours.get(k) != theirs.get(k)]
    return sorted(rows, key=lambda r: -abs(r[3] - r[4]))


def _side(p: Plan) -> str:
    mesh = ", ".join(f"{a}={n}" for a, n in p.sizes.items())
    return f"{mesh}{f' of {p.topology}' if p.topology else ''}   {p.layout or '(nothing split)'}   {p.lowering}"


def _sent(n: float) -> str:
    return format_bytes(n) if n else "–"


def _counted(n: int, what: str) -> str:
    return f"{n} {what} lies" if n == 1 else f"{n} {what}s lie"


def _rich(heads: list[str], rows: list[list[str]]) -> Table:
    out = Table(box=None, pad_edge=False, header_style="dim")
    numbers = {k for k, h in enumerate(heads) if h in ("a", "b") or (h == "" and k)}
    for k, h in enumerate(heads):
        out.add_column(h, justify="right" if k in numbers else "left", overflow="fold")
    for row in rows:
        out.add_row(*row)
    return out


# -- as a page


def _page(d: PlanDiff) -> str:
    return page(f"{d.a.layout} | {d.b.layout}", f"<h1>Two plans</h1>{diff_body(d)}")


def diff_body(d: PlanDiff, folded: bool = False) -> str:
    """The two plans side by side, as a part of a page; ``folded``: what lies and is sent otherwise only when it is opened."""
    ink = Ink(d.a)
    ink.of = {x: f"c{k % 6}" for k, x in enumerate(dict.fromkeys((*d.a.sizes, *d.b.sizes)))}

    def side(name: str, p: Plan) -> str:
        axes = " ".join(f'<span class="chip on {ink.of[x]}">{escape(x)} {n}</span>' for x, n in p.sizes.items())
        where = f' <span class="dim">of {escape(p.topology)}</span>' if p.topology else ""
        layout = f"<code>{escape(str(p.layout) or '(nothing split)')}</code>"
        return f'<div class="card"><b>{name}</b>{axes}{where}<br>{layout}{lowering(p)}</div>'

    def changed(f: Figure) -> str:
        better = f.ratio is not None and f.ratio < 1 and f.change != "="
        return f'<td class="n {"down" if better else "up" if f.change not in ("", "=") else "dim"}">{f.change}</td>'

    figures = [f"<tr><td>{escape(f.name)}</td>{number(f.show(f.a), f.a or 0)}{number(f.show(f.b), f.b or 0)}{changed(f)}</tr>"
               for f in d.figures]  # fmt: skip
    out = f'<div class="cards">{side("a", d.a)}{side("b", d.b)}</div>'
    out += table([("", ""), ("a", "n"), ("b", "n"), ("b against a", "n")], figures)
    if d.tensors:
        ours, theirs = ({h.path: h for h in p.inputs} for p in (d.a, d.b))

        def chips(h: ShardedArray | None) -> str:
            return ink.chips(chips_of(h)) if h is not None else "–"

        rows = [f"<tr><td><code>{escape(path)}</code></td><td>{chips(ours.get(path))}</td><td>{chips(theirs.get(path))}</td>"
                f"{number(format_memory(m), m)}{number(format_memory(n), n)}</tr>"
                for path, _, _, m, n in d.tensors[: 3 * MOST]]  # fmt: skip
        heads = [("argument", ""), ("in a", ""), ("in b", ""), ("a device, a", "n"), ("b", "n")]
        out += _part(
            f"{_counted(len(d.tensors), 'argument')} otherwise", table(heads, rows, sortable=not folded), folded
        )
    if d.collectives:
        rows = [f"<tr><td>{op}<br>{ink.axes(axes.split('+'))}</td><td><code>{escape(dims)}</code></td>{number(_sent(m), m)}"
                f"{number(_sent(n), n)}</tr>" for op, axes, dims, m, n in d.collectives[: 3 * MOST]]  # fmt: skip
        heads = [("collective", ""), ("of", ""), ("a, in a step", "n"), ("b, in a step", "n")]
        out += _part("What is sent, where it differs", table(heads, rows, sortable=not folded), folded)
    return out if d.tensors or d.collectives else f"{out}<p>The same plan.</p>"


def _part(heading: str, body: str, folded: bool) -> str:
    return f"<details><summary>{heading}</summary>{body}</details>" if folded else f"<h2>{heading}</h2>{body}"
