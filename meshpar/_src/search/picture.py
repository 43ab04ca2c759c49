"""A plot of candidates, step time against peak memory, as SVG for pages and as text for the terminal."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Group
from rich.text import Text

from ..hardware.chips import GIB
from ..layout import UNSHARDED
from ..report.tables import hanging
from ..units import format_memory, format_seconds
from .row import Row

WIDTH, HEIGHT, LEFT, BOTTOM = 1240, 340, 74, 36
"""Pixels: size of the drawing, and its margins with tick labels."""
MAX_TIME_RATIO = 8.0
"""Candidates that take more than this many times the shortest step are not drawn: they would compress the scale."""
CELLS = (56, 9)
"""Columns and rows of the plot in a terminal."""


class Scale:
    """A logarithmic axis: ``scale(value)`` is a coordinate between ``begin`` and ``end``; ticks are round multiples of ``unit``."""

    def __init__(self, values: Sequence[float], begin: float, end: float, unit: float = 1.0):
        self.unit = unit
        low, high = math.log(min(values) / unit), math.log(max(values) / unit)
        pad = max(0.06 * (high - low), 0.05)
        self.low, self.high, self.begin, self.end = low - pad, high + pad, begin, end

    def __call__(self, value: float) -> float:
        part = (math.log(value / self.unit) - self.low) / (self.high - self.low)
        return self.begin + part * (self.end - self.begin)

    def ticks(self, most: int = 6) -> list[float]:
        """At most ``most`` round values within the axis: the coarsest subdivision of powers of ten that gives at least three."""
        powers = range(math.floor(self.low / math.log(10)), math.ceil(self.high / math.log(10)) + 1)
        ticks: list[float] = []
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), tuple(1 + k / 10 for k in range(90))):
            ticks = [s * 10.0**p for p in powers for s in steps if self.low < math.log(s * 10.0**p) < self.high]
            if len(ticks) > 2:
                break
        return [self.unit * t for t in ticks[:: math.ceil(len(ticks) / most)]]


@dataclass(frozen=True)
class Picture:
    """The plot of a search: step time against peak memory, a point for each candidate.

    Attributes:
      rows: the candidates that have a row in the table.
      best: the chosen candidate.
      usable: bytes of a device that a plan's peak may take.
      plans: (step time, peak) of all plans of the search.
    """

    rows: Sequence[Row]
    best: Row
    usable: float
    plans: Sequence[tuple[float, float]] = ()

    @property
    def longest(self) -> float:
        """The longest step time that is drawn."""
        return max(self.best.seconds, MAX_TIME_RATIO * min(r.seconds for r in self.rows))

    @property
    def shown(self) -> list[Row]:
        """The candidates of the table that are drawn: those within ``MAX_TIME_RATIO`` of the shortest, and the best."""
        return [r for r in self.rows if r.seconds <= self.longest]

    @property
    def points(self) -> list[tuple[float, float]]:
        """(Step time, peak) of all plans that are drawn, each once."""
        return [*dict.fromkeys(p for p in (*self.plans, *(r.cost for r in self.shown)) if p[0] <= self.longest)]

    @property
    def others(self) -> str:
        """The legend of the plans without a letter, with the number of those that are too slow to be drawn."""
        slower = len({*self.plans, *(r.cost for r in self.rows)}) - len(self.points)
        return "other plans" + f" ({slower} slower {'one is' if slower == 1 else 'ones are'} not drawn)" * bool(slower)

    @property
    def front(self) -> list[tuple[float, float]]:
        """The corners of the Pareto front as a line."""
        front = [r.cost for r in self._front if r in self.shown]
        return [*(at for a, b in itertools.pairwise(front) for at in (a, (b[0], a[1]))), *front[-1:]]

    @functools.cached_property
    def _front(self) -> list[Row]:
        """The Pareto front, the shortest candidate that fits first."""
        return sorted((r for r in self.rows if r.front and r.fits >= self.best.fits), key=lambda r: r.seconds)[:26]

    @property
    def labels(self) -> dict[Row, str]:
        """``★``, the best candidate, and A, B, …: the others of the Pareto front."""
        others = (r for r in self._front if r != self.best)
        return {self.best: "★"} | {row: chr(ord("A") + k) for k, row in enumerate(others)}

    def drawing(self, listed: Collection[Row] = ()) -> str:
        """The plot as SVG: logarithmic axes, a line at the usable memory, the Pareto front connected. The points of the
        ``listed`` candidates are links to their rows ``plan-0``, ``plan-1``, … in the table."""
        rows = self.shown
        x = Scale([seconds for seconds, _ in self.points], LEFT, WIDTH - 12)
        y = Scale([*(peak for _, peak in self.points), self.usable], HEIGHT - BOTTOM, 10, unit=GIB)
        line = y(self.usable)
        out = [
            f'<div class="wide"><svg class="search" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'style="width:100%;max-width:{WIDTH}px;min-width:{WIDTH // 2}px;font-size:12px" '
            'aria-label="step time against peak memory of the candidates">',
            f'<rect x="{LEFT}" y="10" width="{WIDTH - 12 - LEFT}" height="{max(0.0, line - 10):.1f}" '
            'fill="var(--bad)" opacity="0.08"/>',
            f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{line:.1f}" y2="{line:.1f}" stroke="var(--bad)" stroke-dasharray="5 4"/>',
            _text(WIDTH - 14, line - 4, f"{format_memory(self.usable)} usable", "end", "var(--bad)"),
            f'<path d="M{LEFT} 10V{HEIGHT - BOTTOM}H{WIDTH - 12}" fill="none" stroke="var(--line)"/>',
        ]
        out += [_text(x(v), HEIGHT - BOTTOM + 15, format_seconds(v), "middle") for v in x.ticks()]
        out += [_text(LEFT - 6, y(v) + 4, format_memory(v), "end") for v in y.ticks(5)]
        out.append(_text((LEFT + WIDTH) / 2, HEIGHT - 4, "step time", "middle"))
        out.append(_text(0, 8, "peak memory of a device", "start"))
        labels = self.labels
        dots = (f'<circle cx="{x(seconds):.1f}" cy="{y(peak):.1f}" r="2"/>' for seconds, peak in self.points)
        out.append(f'<g fill="var(--none)" opacity="0.6">{"".join(dots)}</g>')
        points = " ".join(f"{x(seconds):.1f},{y(peak):.1f}" for seconds, peak in self.front)
        out.append(f'<polyline points="{points}" fill="none" stroke="var(--a0)" stroke-width="1.5"/>')
        for row in sorted(rows, key=lambda r: (r == self.best, r in labels)):
            others = ("var(--a0)", 4.5) if row in labels else ("var(--none)", 3)
            colour, radius = ("var(--a1)", 6) if row == self.best else others
            title = escape(_tooltip(row))
            link = f'href="#plan-{self.rows.index(row)}"' if row in listed else ""
            out.append(
                f'<a {link} aria-label="{title}"><circle cx="{x(row.seconds):.1f}" '
                f'cy="{y(row.peak):.1f}" r="{radius}" fill="{colour}"><title>{title}</title></circle></a>'
            )
            if row in labels:
                out.append(_text(x(row.seconds) + 8, y(row.peak) - 6, labels[row], "start", "var(--ink)"))
        return "".join(out) + "</svg></div>"

    def terminal(self) -> Group:
        """The plot as text: ``★`` the best, letters and a line for the Pareto front, ``·`` other plans, ``─`` the usable memory.

        A letter whose cell has another label is drawn in the nearest cell without one.
        """
        rows = self.shown
        columns, lines = CELLS
        x = Scale([seconds for seconds, _ in self.points], 0, columns - 1)
        y = Scale([*(peak for _, peak in self.points), self.usable], lines - 1, 0, unit=GIB)

        def cell_of(cost: tuple[float, float]) -> tuple[int, int]:
            return round(y(cost[1])), round(x(cost[0]))

        grid = [[(" ", "")] * columns for _ in range(lines)]
        at = round(y(self.usable))
        grid[at] = [("─", "red")] * columns
        for (line, begin), (bottom, end) in itertools.pairwise(map(cell_of, self.front)):
            for column in range(begin, end + 1):
                grid[line][column] = ("┄", "blue")
            for below in range(line + 1, bottom + 1):
                grid[below][end] = ("┆", "blue")
        for line, column in map(cell_of, self.points):
            grid[line][column] = ("·", "dim")
        labels = self.labels
        labelled: set[tuple[int, int]] = set()
        for row, label in labels.items():
            if row in rows:
                line, column = cell = _nearest_free(cell_of(row.cost), labelled)
                labelled.add(cell)
                grid[line][column] = (label, "bold" if row == self.best else "blue")
        left = {round(y(v)): format_memory(v) for v in y.ticks(4)} | {at: format_memory(self.usable)}
        width = max(9, *map(len, left.values()))
        text = Text(no_wrap=True)
        for k, cells in enumerate(grid):
            text.append(f"{left.get(k, ''):>{width}} │", "dim")
            for mark, style in cells:
                text.append(mark, style)
            text.append("\n")
        text.append(f"{'':>{width}} └{'─' * columns}\n", "dim")
        text.append(f"{'':>{width + 2}}{_tick_labels(x.ticks(5), x, format_seconds, columns)}  step time", "dim")
        last = [*labels.values()][-1]
        front = [("A" + f" … {last}" * (last != "A") + " ┄", "blue"), (" Pareto front  ", "dim")]
        chosen = [("★", "bold"), (" chosen  ", "dim"), *front[: 2 * (last != "★")]]
        legend = [*chosen, (f"· {self.others}  ", "dim"), ("─", "red"), (" usable memory", "dim")]
        return Group(text, hanging([(" " * width, Text.assemble(*legend))]))


def _text(x: float, y: float, text: str, anchor: str, colour: str = "var(--dim)") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _nearest_free(cell: tuple[int, int], labelled: Collection[tuple[int, int]]) -> tuple[int, int]:
    """The (line, column) of the terminal plot nearest to a cell, of those not in ``labelled``; on the same line where possible."""
    columns, lines = CELLS
    free = (c for c in itertools.product(range(lines), range(columns)) if c not in labelled)
    return min(free, key=lambda c: (columns * abs(c[0] - cell[0]) + abs(c[1] - cell[1]), -c[1]))


def _tooltip(row: Row) -> str:
    names = ", ".join(filter(None, [row.variant, row.name]))
    what = f"{row.mesh}: {row.layout or UNSHARDED}" + f" ({names})" * bool(names)
    return f"{format_seconds(row.seconds)}, {format_memory(row.peak)}: {what}"


def _tick_labels(ticks: Sequence[float], scale: Scale, label: Callable[[float], str], columns: int) -> str:
    """A line of tick labels under a text plot; labels that would overlap are left out."""
    line = [" "] * columns
    free = 0
    for value in ticks:
        text = label(value)
        begin = max(0, min(round(scale(value)) - len(text) // 2, columns - len(text)))
        if begin >= free:
            line[begin : begin + len(text)] = text
            free = begin + len(text) + 1
    return "".join(line)
