"""What a search found as a picture: step time against memory, in a page, in a notebook and in a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from rich.text import Text

from ..plan.collectives import duration, human
from ..report.html import number, page, style, table

if TYPE_CHECKING:
    from .answer import Row, Search

WIDTH, HEIGHT, LEFT, BOTTOM = 760, 320, 74, 36
"""Of the drawing, and of the margins that have its ticks."""
FAR = 8.0
"""Candidates that take so many times as long as the shortest are left out: they would press the others together."""
CELLS = (56, 9)
"""Columns and rows of the picture in a terminal."""


class Scale:
    """A logarithmic axis: ``scale(value)`` lies between ``begin`` and ``end``."""

    def __init__(self, values: Sequence[float], begin: float, end: float):
        low, high = math.log(min(values)), math.log(max(values))
        pad = max(0.06 * (high - low), 0.05)
        self.low, self.high, self.begin, self.end = low - pad, high + pad, begin, end

    def __call__(self, value: float) -> float:
        part = (math.log(value) - self.low) / (self.high - self.low)
        return self.begin + part * (self.end - self.begin)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the axis, as few kinds of them as give three."""
        powers = range(math.floor(self.low / math.log(10)), math.ceil(self.high / math.log(10)) + 1)
        found: list[float] = []
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), tuple(1 + k / 10 for k in range(90))):
            found = [s * 10.0**p for p in powers for s in steps if self.low < math.log(s * 10.0**p) < self.high]
            if len(found) > 2:
                break
        return found[:: math.ceil(len(found) / most)]


def shown(found: Search) -> list[Row]:
    """The candidates of the picture: those not much longer than the shortest."""
    most = FAR * min(r.seconds for r in found.rows)
    return [r for r in found.rows if r.seconds <= most or r == found.best]


def letters(found: Search) -> dict[Row, str]:
    """The candidates on the front are called A, B, …, from the shortest that fits on."""
    front = [r for r in found.front if r.fits or not found.fits]
    return {row: chr(ord("A") + k) for k, row in enumerate(front[:26])}


def html(found: Search) -> str:
    """The picture, what was chosen, and the candidates as a table."""
    called = letters(found)
    best = found.best
    verdict = "" if found.fits else ' <span class="chip on c1">nothing fits</span>'
    head = (
        f"<h1>search on {escape(found.topology)}{verdict}</h1>"
        f'<p class="dim">{found.planned} plans; {escape(found.ended)}. The figures are the plans\' estimates.</p>'
        f"<p><code>{escape(best.mesh)}</code><br><code>{escape(best.layout)}</code>"
        + (f"<br><code>{escape(best.variant)}</code>" if best.variant else "")
        + f"<br>{duration(best.seconds)} a step, {human(best.peak)} at the peak, sends {human(best.sent)}</p>"
    )
    heads = [("", ""), ("step", "n"), ("peak", "n"), ("sends", "n more"), ("mesh, layout", "")]
    cells = []
    for row in found.rows[:40]:
        marks = ", ".join(filter(None, [row.variant, row.name, row.compiled, "" if row.fits else "does not fit"]))
        name = "★ " * (row == best) + called.get(row, "")
        figures = number(duration(row.seconds), row.seconds) + number(human(row.peak), row.peak)
        sends = f'<td class="n more" data-v="{row.sent:.6g}">{human(row.sent)}</td>'
        where = f"<code>{escape(row.mesh)}</code> {escape(marks)}<br><code>{escape(row.layout)}</code>"
        cells.append(f"<tr><td>{name}</td>{figures}{sends}<td>{where}</td></tr>")
    return f"{head}{drawing(found)}{table(heads, cells, sortable=True)}"


def html_page(found: Search) -> str:
    """A page of its own, nothing from the network."""
    return page(f"search on {found.topology}", html(found))


def html_cell(found: Search) -> str:
    """For a notebook."""
    return f'<div class="mp">{style()}{html(found)}</div>'


def drawing(found: Search) -> str:
    """Time to the right, memory up, both logarithmic; what fits below the line; the front joined."""
    rows = shown(found)
    x = Scale([r.seconds for r in rows], LEFT, WIDTH - 12)
    y = Scale([*(r.peak for r in rows), found.usable], HEIGHT - BOTTOM, 10)
    line = y(found.usable)
    out = [
        f'<svg class="search" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" style="width:100%;max-width:{WIDTH}px;font-size:11px" '
        'aria-label="step time against peak memory of the candidates">',
        f'<rect x="{LEFT}" y="10" width="{WIDTH - 12 - LEFT}" height="{max(0.0, line - 10):.1f}" '
        'fill="var(--bad)" opacity="0.08"/>',
        f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{line:.1f}" y2="{line:.1f}" stroke="var(--bad)" stroke-dasharray="5 4"/>',
        _text(WIDTH - 14, line - 4, f"{human(found.usable)} may be used", "end", "var(--bad)"),
        f'<path d="M{LEFT} 10V{HEIGHT - BOTTOM}H{WIDTH - 12}" fill="none" stroke="var(--line)"/>',
    ]
    for value in x.ticks():
        out.append(_text(x(value), HEIGHT - BOTTOM + 15, duration(value), "middle"))
    for value in y.ticks(5):
        out.append(_text(LEFT - 6, y(value) + 4, human(value), "end"))
    out.append(_text((LEFT + WIDTH) / 2, HEIGHT - 4, "a step", "middle"))
    called = letters(found)
    front = [r for r in called if r in rows]
    corners = [
        f"{x(a.seconds):.1f},{y(a.peak):.1f} {x(b.seconds):.1f},{y(a.peak):.1f}" for a, b in itertools.pairwise(front)
    ]
    if front:
        last = f"{x(front[-1].seconds):.1f},{y(front[-1].peak):.1f}"
        out.append(
            f'<polyline points="{" ".join([*corners, last])}" fill="none" stroke="var(--a0)" stroke-width="1.5"/>'
        )
    for row in sorted(rows, key=lambda r: (r == found.best, r in called)):
        best = row == found.best
        colour = "var(--a1)" if best else "var(--a0)" if row in called else "var(--none)"
        radius = 6 if best else 4.5 if row in called else 3
        out.append(
            f'<circle cx="{x(row.seconds):.1f}" cy="{y(row.peak):.1f}" r="{radius}" fill="{colour}">'
            f"<title>{escape(_said(row))}</title></circle>"
        )
        if row in called:
            out.append(_text(x(row.seconds) + 8, y(row.peak) - 6, called[row], "start", "var(--ink)"))
    return "".join(out) + "</svg>"


def _text(x: float, y: float, text: str, anchor: str, colour: str = "var(--dim)") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _said(row: Row) -> str:
    what = ", ".join(filter(None, [row.variant, row.name]))
    return f"{duration(row.seconds)}, {human(row.peak)}: {row.mesh}: {row.layout}" + (f" ({what})" if what else "")


def terminal(found: Search) -> Text:
    """The picture in characters: ``★`` the best, a letter one on the front, ``·`` another, ``─`` what may be used."""
    rows = shown(found)
    columns, lines = CELLS
    x = Scale([r.seconds for r in rows], 0, columns - 1)
    y = Scale([*(r.peak for r in rows), found.usable], lines - 1, 0)
    grid = [[(" ", "")] * columns for _ in range(lines)]
    at = round(y(found.usable))
    grid[at] = [("─", "red")] * columns
    called = letters(found)
    for row in sorted(rows, key=lambda r: (r in called, r == found.best)):
        style = "bold" if row == found.best else "blue" if row in called else "dim"
        grid[round(y(row.peak))][round(x(row.seconds))] = ("★" if row == found.best else called.get(row, "·"), style)
    left = {round(y(v)): human(v) for v in y.ticks(4)} | {at: human(found.usable)}
    text = Text(no_wrap=True)
    for k, cells in enumerate(grid):
        text.append(f"{left.get(k, ''):>9} │", "dim")
        for mark, how in cells:
            text.append(mark, how)
        text.append("\n")
    text.append(f"{'':>9} └{'─' * columns}\n", "dim")
    return text.append(f"{'':>11}{_along(x.ticks(5), x, duration, columns)}  a step", "dim")


def _along(ticks: Sequence[float], scale: Scale, said: Callable[[float], str], columns: int) -> str:
    line = [" "] * columns
    free = 0
    for value in ticks:
        text = said(value)
        begin = max(0, min(round(scale(value)) - len(text) // 2, columns - len(text)))
        if begin >= free:
            line[begin : begin + len(text)] = text
            free = begin + len(text) + 1
    return "".join(line)
