"""The result of a search: the chosen layout, the other candidates, and why another layout is not the best."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import warnings
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import Any

from rich.console import Group
from rich.text import Text

from ...errors import MeshparError, UnknownAxisError, UnsupportedError
from ..hardware.topology import device_count, larger_topologies, parse_topology
from ..layout import UNSHARDED, Layout
from ..mesh import parse_mesh
from ..plan_api import Plan
from ..report.colours import AxisColours
from ..report.diff import MIN_DIFFERENCE, longer_parts
from ..report.document import Document
from ..report.facts import calibration_text, takes_text, title
from ..report.hints import hints
from ..report.tables import Cell, Table, hanging, key, number
from ..units import format_bytes, format_memory, format_seconds, mesh_text
from .picture import Picture
from .row import Objective, Row
from .thresholds import POLICY

MAX_TERMINAL_ROWS = 8
"""Candidates that the terminal lists, besides the known schemes and those with a letter in the plot."""
MAX_PAGE_ROWS = 40
CONVERGED = "no further change of the best layout improves it"
"""Why a search ended that no limit ended."""


@dataclass(eq=False)
class Search(Document):
    """The result of :func:`meshpar.search`; print it. ``best.mesh`` and ``best.layout`` are text for :func:`meshpar.jit`.

    Attributes:
      best: the choice; where nothing fits, the candidate that needs the least memory.
      rows: the best candidates and the known schemes, best first.
      topology, objective, memory_fraction: the options of the search.
      planned: number of candidates that were planned.
      ended: why the search ended.
      refused: messages about the user's own layouts that could not be planned.
      usable: bytes of a device that a plan's peak may take: ``memory_fraction`` of its memory.
      stages: whether a pipeline pays, as text: the best step with stages and without, and the numbers of stages that a limit left
        untried; "" for a program without a loop over layers inside of a loop over microbatches, or whose stacked dim may not be
        split.
      illegal: number of candidates that have no plan.
      points: (step time, peak memory) of each plan.
      name: of the model; "": the name of the function that was traced.
      command: the command line that plans the best candidate; "": the search has no command line.
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
    stages: str = ""
    illegal: int = 0
    points: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    name: str = ""
    command: str = ""

    @property
    def fits(self) -> bool:
        """Whether the peak of the best candidate fits the usable memory."""
        return self.best.fits

    @property
    def front(self) -> tuple[Row, ...]:
        """The Pareto front of step time and peak memory, shortest step first."""
        return tuple(sorted((r for r in self.rows if r.front), key=lambda r: r.seconds))

    def plan(self, row: Row | None = None) -> Plan:
        """The plan of a candidate; by default of the best one."""
        row = row or self.best
        return self._base_of(row).replan(layout=row.layout, mesh=row.mesh, topology=self.topology)

    def _base_of(self, row: Row) -> Plan:
        """The plan of the program of a candidate, with the options of its pipelines."""
        base = self._bases[row.variant]
        return replace(base, request=replace(base.request, **row.stages))

    def why(self, layout: Any, mesh: str | None = None, variant: str | None = None) -> str:
        """Why a layout is not the best, as text: it is illegal, does not fit, or takes longer, and the largest causes.

        Args:
          layout: as in :func:`meshpar.jit`.
          mesh: text; default: the mesh of the best candidate that has the axes of the layout.
          variant: the variant of the program, as in :attr:`Row.variant`; default: the variant of the best candidate.

        Raises:
          UnsupportedError: a variant that was not searched.
        """
        layout = Layout(layout)
        if mesh is None:
            fitting = (r.mesh for r in (self.best, *self.rows) if set(layout.axes) <= parse_mesh(r.mesh).keys())
            mesh = next(fitting, self.best.mesh)
        base = self._bases.get(self.best.variant if variant is None else variant)
        if base is None:
            raise UnsupportedError(f"variant={variant!r} was not searched", fixes=[f"one of {sorted(self._bases)}"])
        try:
            with quiet():
                other, best = base.replan(layout=layout, mesh=mesh, topology=self.topology), self.plan()
        except MeshparError as e:
            axes = ", ".join(f"{a}=…" for a in layout.axes)
            more = f'\n          or say which mesh: found.why(layout, mesh="{axes}")'
            return f"illegal: {e}{more * isinstance(e, UnknownAxisError)}"
        assert other.chip is not None
        assert other.seconds is not None
        assert best.seconds is not None
        lines = [f"on the mesh {mesh}:"] * (mesh != self.best.mesh)
        if other.memory.peak > self.usable:
            lines.append(
                f"does not fit: {format_memory(other.memory.peak)} of the {format_memory(self.usable)} that may be used "
                f"({self.memory_fraction:.0%} of a {other.chip.name}); most of it is"
            )
            kinds = sorted(other.memory.by_kind.items(), key=lambda k: -k[1])
            lines += [f"  {format_memory(size)} of {kind}" for kind, size in kinds[:3]]
        longer = other.seconds - best.seconds
        if longer > 0:
            times = f"{format_seconds(other.seconds)} for {format_seconds(best.seconds)}"
            lines.append(f"{format_seconds(longer)} longer than the best ({times})")
            lines += [f"  {format_seconds(s)} more: {text}" for s, text in longer_parts(other, best)[:3]]
        elif other.memory.peak <= self.usable:
            costs = [f"{format_seconds(p.seconds or 0.0)} and {format_memory(p.memory.peak)}" for p in (other, best)]
            lines.append(f"it is equally good: {costs[0]}; the best has {costs[1]}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The best candidate, all rows and the options of the search as JSON."""
        own = "topology objective memory_fraction fits larger planned illegal ended refused stages".split()
        facts = {**{name: getattr(self, name) for name in own}, "calibration": self._base.calibration}
        return json.dumps({**facts, "best": asdict(self.best), "rows": [asdict(r) for r in self.rows]})

    def _title(self) -> str:
        return f"{self.name or title(self._base)}: search on {self.topology}"

    @property
    def _picture(self) -> Picture:
        return Picture(self.rows, self.best, self.usable, self.points)

    @property
    def _styles(self) -> AxisColours:
        """The colours of the axes in the terminal, the axes of the best candidate first."""
        return AxisColours(*(dict(parse_mesh(row.mesh)) for row in (self.best, *self.rows)))

    def _listed(self, most: int, without: Collection[Row] = ()) -> list[Row]:
        """The first ``most`` candidates; of the others, each known scheme on its best mesh, and those with a letter in the plot."""
        named = {r.name: r for r in reversed(self.rows) if r.name}
        labels, rows = self._picture.labels, [r for r in self.rows if r not in without]
        return [r for k, r in enumerate(rows) if k < most or named.get(r.name) is r or r in labels]

    @property
    def _alike(self) -> list[Row]:
        """The candidates that are as good as the best but less simple, and have neither a name nor a letter in the plot."""
        plain = (r for r in self.rows if not r.name and r not in self._picture.labels)
        return [r for r in plain if self._why_not(r).startswith("as ")]

    def _table(self, rows: Iterable[Row]) -> Table:
        """The table of candidates: time, peak memory, bytes sent, mesh and layout."""
        cells, styles, ids, labels = [], self._styles, [], self._picture.labels
        for row in rows:
            ids.append(f'id="plan-{self.rows.index(row)}"')
            marks = ", ".join(filter(None, [row.variant, row.name, _pipeline(row), row.compiled]))
            why = self._why_not(row)
            layout = row.layout or UNSHARDED
            where = f"<code>{escape(row.mesh)}</code> {escape(marks)} <i>{why}</i><br><code>{escape(layout)}</code>"
            parts = [styles.mesh(row.mesh), *filter(None, [marks, why and (why, "yellow" if row.fits else "red")])]
            shown = Text("  ").join(Text.assemble(part) for part in parts).append("\n").append(styles.layout(layout))
            peak = format_memory(row.peak)
            seconds = number(format_seconds(row.seconds), row.seconds)
            memory = Cell(peak, row.peak, terminal=Text(peak, "" if row.fits else "red"))
            sent = number(format_bytes(row.sent), row.sent, css="more")
            mfu = number(f"{100 * row.mfu:.0f} %", row.mfu, css="more")
            choice = Cell(shown.plain, markup=where, terminal=shown)
            cells.append([Cell(labels.get(row, "")), seconds, mfu, memory, sent, choice])
        columns = [("", ""), ("step", "n"), ("MFU", "n more"), ("peak", "n"), ("sends", "n more")]
        return Table([*columns, ("mesh, scheme, compared with ★; layout", "")], cells, attributes=ids)

    def _why_not(self, row: Row) -> str:
        """Why a candidate is not chosen, compared with the best, ``★``; "" for the best, if it fits."""
        best = self.best
        if row == best and row.fits:
            return ""
        if not row.fits:
            return f"too large by {format_memory(row.peak - self.usable)}"
        rules, own = set(Layout(row.layout).rules), set(Layout(best.layout).rules)
        turned = rules == own and parse_mesh(row.mesh) == parse_mesh(best.mesh)
        order = "another order of the axes: other places on the torus" if turned else ""
        if self.objective == "time":
            ratio = row.seconds / best.seconds
            longer = f"{100 * abs(ratio - 1):.1f} % {'slower' if ratio > 1 else 'faster'}"
            equal = abs(ratio - 1) < MIN_DIFFERENCE
            than = "as fast" if equal else longer if ratio < 2 else f"{ratio:.3g} × as long"
            if row.complexity >= best.complexity:
                than += ", but less simple" * (equal or ratio < 1)
            elif ratio <= 1 + POLICY.tie_fraction and row.peak > max(best.peak, self.usable / 2):
                than += f", and needs {format_memory(row.peak - best.peak)} more memory, which is scarce"
        else:
            larger = row.peak - best.peak
            than = f"{format_memory(larger)} more" if larger > 0 else "as small, but less simple"
        return "; ".join(filter(None, [than, order, row.undivided]))

    @property
    def _speedup(self) -> str:
        """How much shorter the best step is than under the default layout: FSDP, over several slices HSDP if it fits. Where that
        does not fit or divide the arguments, than under the best known scheme that does. "" if there is none, or it is the best."""
        known = {r.name: r for r in reversed(self.rows) if r.name not in ("", "yours")}
        hsdp = known.get("hsdp") if parse_topology(self.topology).slices > 1 else None
        default, what = hsdp if hsdp and hsdp.fits and not hsdp.undivided else known.get("fsdp"), "the default layout"
        why = "" if default is None else default.undivided or "it does not fit" * (not default.fits)
        row = default
        if row is None or why:
            sound = (r for r in known.values() if r.fits and not r.undivided)
            row, what = min(sound, key=lambda r: r.seconds, default=None), "the best known scheme"
        if row is None or row == self.best:
            return ""
        no_default = f"; the default layout, fsdp, is no comparison: {why}" * bool(why)
        faster = f"{row.seconds / self.best.seconds:.3g} × as fast as {what}"
        return f"{faster}, {row.name} ({format_seconds(row.seconds)} on {row.mesh}{no_default})"

    def _axes(self, rows: Iterable[Row]) -> str:
        """The explanation of axes called ``idle`` or ``model2``, if some of these candidates have one, else ""."""
        axes = sorted({axis for row in rows for axis in dict(parse_mesh(row.mesh))})
        second = next((axis for axis in axes if not axis.startswith("idle") and re.search(r"\d$", axis)), "")
        idle = "idle: an axis that shards nothing; the devices along it all compute the same"
        like = f"{second}: an axis like `{second.rstrip('0123456789')}`, so that a rule may take one of both, or both"
        return "; ".join([idle] * any(axis.startswith("idle") for axis in axes) + [like] * bool(second))

    def _html(self) -> str:
        """The best candidate and how to use it, the plot of time against memory, and the candidates as a table."""
        best, rows = self.best, self._listed(MAX_PAGE_ROWS)
        verdict = "" if self.fits else '<b class="up">Nothing fits.</b> '
        of = f"{format_memory(best.peak)} of the {format_memory(self.usable)} usable"
        speedup = f" It is {escape(self._speedup)}." if self._speedup else ""
        texts = {**self._choice, "next": self._next}
        chosen = "".join(f"<div><dt>{k}</dt><dd><code>{escape(v)}</code></dd></div>" for k, v in texts.items())
        about = [self._count, f"All numbers are estimates{self._calibrated}", self.stages, self._star]
        legend = (
            ("c1", "★ the chosen layout"),
            ("c0", "A, B, …: Pareto front of step time and memory"),
            ("cn", self._picture.others),
        )
        return (
            f'<h1>{escape(self.name or title(self._base))} <span class="dim">search on {escape(self.topology)}</span></h1>'
            f'<p class="verdict">{verdict}{takes_text(self.fits).capitalize()} about '
            f"<b>{format_seconds(best.seconds)}</b> (MFU {100 * best.mfu:.0f} %), with {of}.{speedup}</p>"
            f'<dl class="facts">{chosen}</dl>{self._picture.drawing(rows)}{key(legend)}'
            f'{self._table(rows).html(sortable=True)}<p class="dim">{self._axes(rows)}</p>'
            f'<p class="dim">{escape(". ".join(text[:1].upper() + text[1:] for text in about if text))}.</p>'
        )

    @property
    def _choice(self) -> dict[str, str]:
        """The best candidate: mesh, layout, lowering, and where there are others, program and schedule."""
        best = self.best
        texts = {"mesh": best.mesh, "layout": best.layout or UNSHARDED, "lowering": best.lowering}
        more = ", ".join(filter(None, [best.variant, _pipeline(best)]))
        return {**texts, "with": more} if more else texts

    @property
    def _next(self) -> str:
        """What to do with the best candidate: the command that plans it, or the call that runs it."""
        best = self.best
        options = {"mesh": best.mesh, "layout": best.layout, **best.stages}
        return self.command or f"mp.jit(step, {', '.join(f'{k}={json.dumps(v)}' for k, v in options.items())})"

    @property
    def _star(self) -> str:
        """The explanation of the sign of the best candidate."""
        if not self.fits:
            return "★ has the smallest peak, and does not fit either: nothing is chosen"
        least = "shortest step that fits" if self.objective == "time" else "smallest peak"
        near = f"within {100 * POLICY.tie_fraction:.0f} % of the {least}"
        return f"★ is the choice: of the layouts {near}, the simplest one"

    def __rich__(self) -> Any:
        """The result for a terminal: the best candidate, a plot of time and memory, the table of candidates, and
        errors."""
        where = f"{self.name} on {self.topology}" if self.name else self.topology
        head = [Text.assemble(("search", "bold"), f"  {where}: {self._count}{self._calibrated}")]
        with quiet():
            plan, kind = self.plan(), "hint" if self.fits else "fix"
        fixes = [(Text(kind, "bold"), Text(hint, "green")) for hint in hints(plan)]
        if not self.fits:
            head = [Text(self._misfit(), "bold red"), hanging(fixes), Text(), *head]
        best, styles, rows = self.best, self._styles, self._listed(MAX_TERMINAL_ROWS, self._alike)
        styled = {"mesh": styles.mesh, "layout": styles.layout}
        lines = {name: styled.get(name, Text)(text) for name, text in self._choice.items()}
        usable = f"{format_memory(best.peak)} of the {format_memory(self.usable)} usable"
        speedup = f"; {self._speedup}" * bool(self._speedup)
        lines["step"] = Text(f"{format_seconds(best.seconds)}, MFU {100 * best.mfu:.0f} %, {usable}{speedup}")
        lines[""] = Text(self.stages)
        named = ((Text(name, "bold"), text) for name, text in lines.items() if text)
        choice = hanging([*named, *fixes * self.fits])
        plot = [Text(), self._picture.terminal()] if len(self.rows) > 2 else []
        notes = [Text(f"note  {text}")] if (text := self._unnamed_batch()) else []
        notes += [Text(), *map(Text, self.refused)] if self.refused else []
        like = f", {len(self._alike)} of them as good as ★ but less simple" * bool(self._alike)
        listed = (
            f"{len(rows)} of the {len(self.points)} plans are listed; the page has {len(self.rows)}{like} (--html FILE)"
        )
        hidden = listed * (len(rows) < len(self.rows))
        texts = [Text(text, "dim") for text in (hidden, self._star, self._axes(rows)) if text]
        return Group(*head, Text(), choice, *plot, Text(), self._table(rows).terminal(), *texts, *notes)

    @functools.cached_property
    def larger(self) -> tuple[str, str] | None:
        """If nothing fits: (topology, mesh) of the first of :func:`larger_topologies` on which the best layout fits; None: it fits
        on this one, or on none of them."""
        sizes, devices = dict(parse_mesh(self.best.mesh)), device_count(self.topology)
        for where in () if self.fits else larger_topologies(self.topology):
            for axis in sizes:
                mesh = mesh_text({a: n * where.devices // devices if a == axis else n for a, n in sizes.items()})
                with quiet(), contextlib.suppress(MeshparError):
                    plan = self._base_of(self.best).replan(layout=self.best.layout, mesh=mesh, topology=str(where))
                    if plan.memory.peak <= self.usable:
                        return str(where), mesh
        return None

    def _unnamed_batch(self) -> str:
        """The name of the first dim of the batch arguments, if no dim has the name ``batch`` of the known schemes; else ""."""
        plan = self._base
        if "batch" in plan.program.all_names():
            return ""
        first = {h.dims[0] for h in plan.inputs if h.kind is None and h.dims and h.dims[0]}
        shown = sorted({d for d in first if "batch" in d} or first)
        have = f"the batch arguments have {', '.join(f'`{d}`' for d in shown)}" if shown else "name it by dims="
        return f"no dim is called `batch`, which the known schemes shard; {have}"

    def _misfit(self) -> str:
        """The headline if nothing fits: the smallest peak, its largest kind, and a larger slice on which the layout fits."""
        with quiet():
            plan = self.plan()
        assert plan.chip is not None
        kind, size = max(plan.memory.by_kind.items(), key=lambda k: k[1])
        text = (
            f"NOTHING FITS  the smallest peak is {format_memory(self.best.peak)} a device, {self.best.peak / self.usable:.1f} × "
            f"the {format_memory(self.usable)} usable on a {plan.chip.name}; most of it is {format_memory(size)} of {kind}"
        )
        if self.larger is not None:
            text += f"; this layout fits on {self.larger[0]} with the mesh {self.larger[1]}"
        return text + f"; the search ended early ({self.ended}): other layouts may fit" * self.early

    @property
    def _count(self) -> str:
        """The number of candidates, by the outcome of their plans, and why the search ended."""
        fit = sum(peak <= self.usable for _, peak in self.points)
        large, early = len(self.points) - fit, self.planned - len(self.points) - self.illegal
        kinds = {"fit": fit, "too large": large, "not legal": self.illegal}
        kinds |= {"not planned to the end, since their communication alone takes too long": early}
        found = ", ".join(f"{n} {kind}" for kind, n in kinds.items() if n)
        programs = f" of {len(self._bases)} programs" * (len(self._bases) > 1)
        each = " of a program" * (len(self._bases) > 1 and self.ended.endswith("plans"))
        return f"{self.planned} layout{'s' * (self.planned != 1)}{programs}: {found}; {self.ended}{each}"

    @property
    def _base(self) -> Plan:
        return self._bases[self.best.variant]

    @property
    def _calibrated(self) -> str:
        return "".join(f"; {text}" for text in [calibration_text(self._base)] if text)

    @property
    def early(self) -> bool:
        """Whether a limit or an interrupt ended the search."""
        return self.ended.startswith(("stopped", "interrupted"))

    def __repr__(self) -> str:
        layout, seconds = self.best.layout or UNSHARDED, format_seconds(self.best.seconds)
        return f"<Search on {self.topology}: {self.best.mesh}: {layout}; {seconds} a step>"


def _pipeline(row: Row) -> str:
    """The options of the pipelines of a candidate as text; "" without stages."""
    return ", ".join(f"{name}={value}" for name, value in row.stages.items())


def quiet() -> warnings.catch_warnings[None]:
    """A context that suppresses the warnings of candidates: their costs are part of the estimates."""
    return warnings.catch_warnings(action="ignore")
