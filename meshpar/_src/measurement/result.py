"""The result of a calibration: measured layouts, best first, and the fitted efficiencies."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from rich.console import Group
from rich.text import Text

from ..hardware.calibration import EFFICIENCIES, Calibration
from ..layout import UNSHARDED
from ..report.document import Document
from ..report.tables import Cell, Table, number
from ..units import format_seconds

MAX_ROWS = 12
"""Layouts that the terminal lists; pages list all."""


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """A measured layout.

    Attributes:
      mesh, layout, lowering: as text, for ``mp.jit``.
      seconds: of a step, the median of the rounds.
      spread: half of the interquartile range of the rounds, in seconds.
      planned: seconds of its plan before calibration, with the chip table's efficiencies, or nominal peak rates.
      fitted: seconds of its plan with the fitted efficiencies.
    """

    mesh: str
    layout: str
    seconds: float
    spread: float
    planned: float
    fitted: float
    lowering: str = "shard_map"

    @property
    def ratio(self) -> float:
        """Measured over planned seconds."""
        return self.seconds / self.planned if self.planned else float("inf")


@dataclass(frozen=True)
class CalibrationResult(Document):
    """The result of :func:`meshpar.hardware.calibrate`; ``best.mesh`` and ``best.layout`` are text for ``mp.jit``.

    Attributes:
      device_kind, devices: kind and number of the devices.
      rounds: measurements of each layout.
      rows: best first.
      calibration: fitted to the rows; ``calibration.save("chip.json")`` stores it for ``calibration=`` of :func:`meshpar.plan`.
      listed: the chip table has these devices; else ``planned`` assumes nominal peak rates.
    """

    device_kind: str
    devices: int
    rounds: int
    rows: tuple[CalibrationRow, ...]
    calibration: Calibration
    listed: bool

    @property
    def best(self) -> CalibrationRow:
        """The layout of the shortest step."""
        return self.rows[0]

    @property
    def ties(self) -> tuple[CalibrationRow, ...]:
        """Layouts other than the best whose difference from it is within the spread of the rounds."""
        best = self.best
        return tuple(r for r in self.rows[1:] if r.seconds - r.spread <= best.seconds + best.spread)

    def to_json(self) -> str:
        """The result as JSON."""
        rows = [{**asdict(r), "ratio": r.ratio} for r in self.rows]
        return json.dumps({**asdict(self), "rows": rows, "best": rows[0]})

    def _title(self) -> str:
        return f"{len(self.rows)} layouts on {self.devices} × {self.device_kind}"

    @property
    def _summary(self) -> list[str]:
        """Lines of text about the fit and about layouts that are equally fast."""
        c = self.calibration
        nominal = "nominal rates (100 GFLOP/s, 20 GB/s of memory, 5 GB/s of links)"
        of = "the chip table's peak rates" if self.listed else nominal
        efficiencies = zip(("matmuls", "memory traffic", "links"), (getattr(c, k) for k in EFFICIENCIES), strict=True)
        fitted = ", ".join(f"{rate} {value:.3g}" for rate, value in efficiencies)
        lines = [f"fitted: {fitted} of {of}; the median error of plans with these is {100 * c.error:.0f} %"]
        if self.ties:
            lines.append(f"the best {len(self.ties) + 1} layouts are equally fast within the spread of the rounds")
        return [*lines, *c.notes]

    def _html(self) -> str:
        """The result as an HTML fragment."""
        best = self.best
        head = (
            f'<h1>{escape(self._title())}</h1><p class="dim">medians of {self.rounds} interleaved rounds</p>'
            f"<p><code>{escape(best.mesh)}</code><br><code>{escape(best.layout or UNSHARDED)}</code><br>"
            f"<code>{best.lowering}</code><br>{format_seconds(best.seconds)} a step</p>"
        )
        return head + self._table().html(sortable=True) + "".join(f"<p>{escape(line)}</p>" for line in self._summary)

    def _table(self) -> Table:
        """Measured, planned and fitted times of every layout."""
        columns = [("step", "n"), ("±", "n"), ("planned", "n more"), ("measured / planned", "n"), ("fitted", "n more")]
        rows = []
        for r in self.rows:
            times = [number(format_seconds(t), t) for t in (r.seconds, r.spread, r.planned, r.fitted)]
            times.insert(3, number(f"{r.ratio:.2f}", r.ratio))
            where = f"<code>{escape(r.mesh)}</code><br><code>{escape(r.layout or UNSHARDED)}</code>"
            rows.append([*times, Cell(f"{r.mesh}\n{r.layout or UNSHARDED}", markup=where)])
        return Table([*columns, ("mesh, layout", "")], rows)

    def __rich__(self) -> Any:
        """The result for the terminal."""
        best = self.best
        head = Text.assemble(("calibrate", "bold"), f"    {self._title()}, medians of {self.rounds} interleaved rounds")
        own = {"mesh": best.mesh, "layout": best.layout or UNSHARDED, "lowering": best.lowering}
        choice = Text("\n").join(Text.assemble((f"{name:<6}", "bold"), f"  {text}") for name, text in own.items())
        table = self._table().terminal(MAX_ROWS)
        return Group(head, Text(), choice, Text(), table, Text(), *(Text(line, style="dim") for line in self._summary))

    def __repr__(self) -> str:
        best = self.best
        layout, seconds = best.layout or UNSHARDED, format_seconds(best.seconds)
        return f"<CalibrationResult of {self._title()}: {best.mesh}: {layout}; {seconds} a step>"
