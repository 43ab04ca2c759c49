"""What a search found: the choice, what stands beside it, and why another layout is not it."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..errors import MeshparError, UnsupportedError
from ..hardware.topology import Topology, parse_topology
from ..layout import Layout
from ..mesh import parse_mesh
from ..plan.collectives import Collective
from ..plan_api import Plan
from ..report.facts import rates
from ..report.html import number, page, style, table
from ..report.text import plain
from ..units import format_bytes, format_memory, format_seconds
from .picture import Picture
from .row import Row

Objective = Literal["time", "memory"]
SHOWN = 8
"""Candidates that are shown, beside the known schemes."""


@dataclass(eq=False)
class Search:
    """What :func:`meshpar.search` found: print it; ``best.mesh`` and ``best.layout`` are text for ``mp.jit``.

    Attributes:
      best: the choice; where nothing fits, the candidate that needs the least memory.
      rows: the best candidates and the known schemes, best first.
      topology, objective, memory_fraction: as they were asked for.
      planned: how many candidates were planned; ``ended``: why no more were.
      refused: the layouts of the user's own that could not be planned, and why.
      usable: bytes of a device that a plan's peak may take.
    """

    topology: str
    objective: Objective
    memory_fraction: float
    best: Row
    rows: tuple[Row, ...]
    planned: int
    ended: str
    refused: tuple[str, ...]
    usable: float
    _bases: dict[str, Plan] = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether the best fits."""
        return self.best.fits

    @property
    def front(self) -> tuple[Row, ...]:
        """The candidates than which none is both shorter and smaller, shortest first."""
        return tuple(sorted((r for r in self.rows if r.front), key=lambda r: r.seconds))

    def plan(self, row: Row | None = None) -> Plan:
        """The plan of a candidate; of the best."""
        row = row or self.best
        return self._bases[row.variant].replan(layout=row.layout, mesh=row.mesh, topology=self.topology)

    def why(self, layout: Any, mesh: str | None = None, variant: str | None = None) -> str:
        """Why a layout is not the best: it is illegal, does not fit, or takes longer; with what makes it so.

        Args:
          layout: as in :func:`meshpar.jit`.
          mesh: text; default: the best one's.
          variant: which of the programs, as rows have it; default: the best one's.

        Raises:
          UnsupportedError: a variant that was not searched.
        """
        where = mesh or self.best.mesh
        layout = Layout(layout)
        base = self._bases.get(self.best.variant if variant is None else variant)
        if base is None:
            raise UnsupportedError(f"variant={variant!r} was not searched", fixes=[f"one of {sorted(self._bases)}"])
        try:
            with quiet():
                other, best = base.replan(layout=layout, mesh=where, topology=self.topology), self.plan()
        except MeshparError as e:
            return f"illegal: {e}"
        assert other.chip is not None
        assert other.seconds is not None
        assert best.seconds is not None
        lines = []
        if other.memory.peak > self.usable:
            lines.append(
                f"does not fit: {format_memory(other.memory.peak)} of the {format_memory(self.usable)} that may be used "
                f"({self.memory_fraction:.0%} of a {other.chip.name}); most of it is"
            )
            kinds = sorted(other.memory.by_kind.items(), key=lambda k: -k[1])
            lines += [f"  {format_memory(size)} of {kind}" for kind, size in kinds[:3]]
        longer = other.seconds - best.seconds
        if longer > 0:
            lines.append(
                f"{format_seconds(longer)} longer than the best ({format_seconds(other.seconds)} for "
                f"{format_seconds(best.seconds)})"
            )
            lines += [f"  {text}" for text in _costs_more(other, best)]
        elif other.memory.peak <= self.usable:
            lines.append(
                f"it is as good: {format_seconds(other.seconds)} and {format_memory(other.memory.peak)}; the best has "
                f"{format_seconds(best.seconds)} "
                f"and {format_memory(best.memory.peak)}"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Rows and choice as JSON."""
        return json.dumps(
            {
                "topology": self.topology, "objective": self.objective, "memory_fraction": self.memory_fraction, "fits": self.fits,
                "larger": self.larger,
                "planned": self.planned, "ended": self.ended, "refused": self.refused,
                "calibration": self._base.calibration,
                "best": asdict(self.best),
                "rows": [asdict(r) for r in self.rows],
            }
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write it to a file: ``.html``, a page with the picture of time against memory; ``.json``; ``.txt``.

        Raises:
          UnsupportedError: another ending.
        """
        path = Path(path)
        writers = {
            ".html": lambda found: page(f"search on {found.topology}", found._html()),
            ".json": Search.to_json,
            ".txt": plain,
        }
        if path.suffix not in writers:
            raise UnsupportedError(
                f"{path}: a search is saved as {', '.join(writers)}",
                fixes=[f'found.save("search{next(iter(writers))}")'],
            )
        path.write_text(writers[path.suffix](self), "utf8")

    def _page(self) -> str:
        return page(f"search on {self.topology}", self._html())

    def _repr_html_(self) -> str:
        return f'<div class="mp">{style()}{self._html()}</div>'

    @property
    def _picture(self) -> Picture:
        return Picture(self.rows, self.best, self.usable)

    def _html(self) -> str:
        """The picture, what was chosen, and the candidates as a table."""
        best = self.best
        verdict = "" if self.fits else ' <span class="chip on c1">nothing fits</span>'
        head = (
            f"<h1>search on {escape(self.topology)}{verdict}</h1>"
            f'<p class="dim">{self._count}; {escape(self.ended)}. The figures are the plans\' estimates{escape(self._priced)}.</p>'
            f"<p><code>{escape(best.mesh)}</code><br><code>{escape(best.layout)}</code><br><code>{best.lowering}</code>"
            + (f"<br><code>{escape(best.variant)}</code>" if best.variant else "")
            + f"<br>{format_seconds(best.seconds)} a step, {format_memory(best.peak)} at the peak, "
            f"sends {format_bytes(best.sent)}</p>"
        )
        heads = [("", ""), ("step", "n"), ("peak", "n"), ("sends", "n more"), ("mesh, layout", "")]
        cells = []
        for row in self.rows[:40]:
            marks = ", ".join(filter(None, [row.variant, row.name, row.compiled, "" if row.fits else "does not fit"]))
            name = self._picture.mark(row)
            figures = number(format_seconds(row.seconds), row.seconds) + number(format_memory(row.peak), row.peak)
            sends = f'<td class="n more" data-v="{row.sent:.6g}">{format_bytes(row.sent)}</td>'
            where = f"<code>{escape(row.mesh)}</code> {escape(marks)}<br><code>{escape(row.layout)}</code>"
            cells.append(f"<tr><td>{name}</td>{figures}{sends}<td>{where}</td></tr>")
        return f"{head}{self._picture.drawing()}{table(heads, cells, sortable=True)}"

    def __rich__(self) -> Any:
        head = Text.assemble(("search", "bold"), f"  {self._count} on {self.topology}; {self.ended}{self._priced}")
        if not self.fits:
            head = Text.assemble((f"{self._misfit()}\n", "bold red"), head)
        choice = Text.assemble(
            ("mesh", "bold"), f"    {self.best.mesh}\n", ("layout", "bold"), f"  {self.best.layout}\n",
            ("lowering", "bold"), f"  {self.best.lowering}",
        )  # fmt: skip
        if self.best.variant:
            choice.append_text(Text.assemble(("\nwith", "bold"), f"    {self.best.variant}"))
        table = Table(box=None, pad_edge=False)
        for name in ("", "step", "peak", "sends"):
            table.add_column(name, justify="right", no_wrap=True, vertical="top")
        table.add_column("mesh, layout", overflow="fold")
        named = {r.name: r for r in reversed(self.rows) if r.name}  # each scheme on its best mesh
        drawn_as = self._picture
        for row in self.rows[:SHOWN] + tuple(r for r in self.rows[SHOWN:] if named.get(r.name) is r):
            marks = [
                row.variant,
                row.name,
                row.compiled,
                "" if row.fits else "does not fit",
            ]
            where = Text.assemble(
                row.mesh, (f"  {', '.join(filter(None, marks))}", "italic"), "\n", (row.layout, "dim")
            )
            table.add_row(
                drawn_as.mark(row),
                format_seconds(row.seconds),
                format_memory(row.peak),
                format_bytes(row.sent),
                where,
            )
        drawn = [Text(), self._picture.terminal()] if len(self.rows) > 2 else []
        return Group(
            head, Text(), choice, *drawn, Text(), table, *([Text(), *map(Text, self.refused)] if self.refused else [])
        )

    @functools.cached_property
    def larger(self) -> tuple[str, str] | None:
        """Where nothing fits, (topology, mesh) of the smallest larger slice on which the best layout does, of those with 2, 4, 8, …
        times the devices; None: it fits here, or on none of them."""
        if self.fits:
            return None
        slices, kind, chips = where = parse_topology(self.topology)
        sizes = dict(parse_mesh(self.best.mesh))
        each = math.prod(chips)
        for times in (2**k for k in range(1, 15)):
            shapes = [(times * each,)] if where.chip.switch else where.chip.shapes(times * each)
            topology = str(Topology(slices, kind, shapes[0])) if shapes and where.chip.exists(shapes[0]) else None
            for axis in sizes if topology is not None else ():
                mesh = ", ".join(f"{a}={n * times if a == axis else n}" for a, n in sizes.items())
                try:
                    with quiet():
                        plan = self._bases[self.best.variant].replan(
                            layout=self.best.layout, mesh=mesh, topology=topology
                        )
                except MeshparError:
                    continue
                if topology is not None and plan.memory.peak <= self.usable:
                    return topology, mesh
        return None

    def _misfit(self) -> str:
        with quiet():
            plan = self.plan()
        assert plan.chip is not None
        kind, size = max(plan.memory.by_kind.items(), key=lambda k: k[1])
        said = (
            f"NOTHING FITS  the least is {format_memory(self.best.peak)} a device, {self.best.peak / self.usable:.1f} × the "
            f"{format_memory(self.usable)} that may be used of a {plan.chip.name}; most of it is {format_memory(size)} of {kind}"
        )
        if self.larger is not None:
            said += f"; this layout fits on {self.larger[0]} with the mesh {self.larger[1]}"
        if self.early:
            said += f"\nthe search ended early ({self.ended}): there may be others that do"
        return said

    @property
    def _count(self) -> str:
        return f"{self.planned} plan{'s' * (self.planned != 1)}"

    @property
    def _base(self) -> Plan:
        return self._bases[self.best.variant]

    @property
    def _priced(self) -> str:
        return "".join(f"; {text}" for text in [rates(self._base)] if text)

    @property
    def early(self) -> bool:
        """Whether it ended before it came to an end of its own."""
        return self.ended.startswith(("stopped", "interrupted"))

    def __str__(self) -> str:
        return plain(self)

    def __repr__(self) -> str:
        return f"<Search on {self.topology}: {self.best.mesh}: {self.best.layout}; {format_seconds(self.best.seconds)} a step>"


def _costs_more(other: Plan, best: Plan) -> list[str]:
    """The three kinds of cost by which a plan is longer than another, largest first, with causes."""

    def of(plan: Plan) -> dict[tuple[str, ...], tuple[float, str]]:
        assert plan.time is not None
        found: dict[tuple[str, ...], tuple[float, str]] = {
            ("products",): (plan.time.compute, "products that each device does"),
            ("memory traffic",): (plan.time.memory, "arrays read and written"),
        }
        for c in plan.collectives:
            key = (c.op, c.tensor)
            found[key] = (found.get(key, (0.0, ""))[0] + (c.seconds or 0.0) * (c.count or 1), _line(c))
        return found

    before = of(best)
    more = [(seconds - before.get(key, (0.0, ""))[0], text) for key, (seconds, text) in of(other).items()]
    return [f"{format_seconds(s)} more: {text}" for s, text in sorted(more, key=lambda m: -m[0])[:3] if s > 0]


def _line(c: Collective) -> str:
    return f"{c.op} of {c.tensor} over {'+'.join(c.axes)}: {c.cause}"


@contextmanager
def quiet() -> Iterator[None]:
    """What a candidate wastes is in its figures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
