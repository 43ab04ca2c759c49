"""A plan in the terminal: what each device stores, needs and sends, with the cause of every collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from ..cost.decoding import decoding_of
from ..cost.memory import memory_of
from ..cost.time import time_of
from ..layout import UNSHARDED
from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..units import format_bytes, format_memory, format_seconds, mesh_text, with_article
from . import facts
from .colours import PALETTE, ROLE_STYLES, AxisColours
from .facts import ArgumentGroup, CollectiveGroup
from .pipeline import pipeline_section
from .sections import OPTIONS, remedies, sections
from .tables import GROUP, Cell, Table, Wrapped, hanging
from .timeline import step_notes, step_shares

MAX_COLLECTIVE_ROWS = 8
MAX_ARGUMENT_ROWS = 7
"""Groups of parameters; of another kind of arguments half as many."""
BAR_CELLS = 20
"""Columns of a bar."""
FIT_STYLES = {"fits": PALETTE[0], "tight": "bold yellow", "too large": "bold red"}
"""Styles of the bar of the memory, by :func:`facts.fit`."""
MIN_KIND_SHARE = 0.01
"""Fraction of the peak of the smallest kind of memory in the summary."""
MIN_TWICE = 1.5
"""Bytes of parameters or optimizer state at the peak, as a multiple of the arguments, from which on old and new ones are live."""
MIN_COLLECTIVE_SHARE = 0.01
"""Fraction of the time of all collectives, or of their bytes where no time is estimated, from which on a collective has a row."""


def plan_line(plan: Plan) -> str:
    """The plan in one line, for a REPL; it computes no estimate."""
    layout = str(plan.requested_layout or plan.layout)
    layout = layout if len(layout) <= 60 else f"{layout[:59]}…"
    return f"<Plan on {mesh_text(plan.sizes)}: {layout or UNSHARDED}; sends {format_bytes(plan.bytes_sent)} a step>"


def plan_renderable(plan: Plan, brief: bool = False, verbose: bool = False) -> Any:
    """The plan for rich: mesh and layout, a summary, collectives, memory and time, arguments, notes; ``brief``: only the first two;
    ``verbose``: with the options of the compiler, not only their number.

    Where the peak exceeds the memory of a device, the first line is DOES NOT FIT, and the next ones say what to change.
    """
    colours = AxisColours(plan.sizes)
    of = f" of {plan.topology}" * bool(plan.topology)
    devices = Text.assemble(f"{math.prod(plan.sizes.values())} devices{of} (", colours.sizes(plan.sizes).terminal, ")")
    between, places = facts.crossing(plan)
    if between:  # DCN is the network of TPUs
        text = f" connects the {places}" + ", over DCN" * (places == "slices")
        devices.append("; ").append(colours.axes(between).terminal).append(text)
    effects = [f"`{e.rule}`: {e.unused}" for e in facts.rule_effects(plan) if e.unused]
    layout, lowering = colours.layout(facts.layout_text(plan)), facts.lowering_text(plan)
    named = {"plan": devices, "inputs": Text(facts.inputs_text(plan)), "layout": layout}
    named |= {"no effect": colours.layout(". ".join(effects)), "lowering": Text(lowering)}
    head: list[Any] = [hanging([(Text(name, "bold"), text) for name, text in named.items() if text])]
    too_large, changes = list[Any](), remedies(plan).terminal()
    if facts.fits(plan) is False and plan.chip is not None:
        has, needs = format_memory(plan.chip.per_device().hbm), format_memory(memory_of(plan).peak)
        line = f"DOES NOT FIT  each device needs {needs}, and {with_article(plan.chip.name)} has {has}"
        too_large, changes = [Text(line, "bold red"), *changes], []
    shown = 1 + len(plan.options.left_out)
    blocks: list[list[Any]] = [
        too_large,
        [*head, _summary(plan, colours), *changes[:1]],
        [collectives_block(plan.collectives, colours, plan.chip is not None, bool(plan.uncounted_loops))],
        pipeline_section(plan),
        _costs(plan),
        [_arguments(plan, colours)],
        changes[1:],
        *(section.terminal()[: None if verbose or section.title != OPTIONS else shown] for section in sections(plan)),
    ]
    lines = [line for block in blocks[: 2 if brief else None] if block for line in (*block, Text())]
    return Group(*(_indented(line) if isinstance(line, Text) else line for line in lines[:-1]))


def _indented(text: Text) -> Group:
    """The lines of a text; those that wrap continue at the indentation of their line, of a line without one at 4 columns."""
    lines = []
    for line in text.split("\n", allow_blank=True):
        indent = len(line.plain) - len(line.plain.lstrip(" "))
        lines.append(Padding(line[indent:], (0, 0, 0, indent)) if indent else Wrapped([line], hang=4))
    return Group(*lines)


def _summary(plan: Plan, colours: AxisColours) -> Any:
    """Memory, step time, traffic and the costliest rule, with bars where the chip is known."""
    memory, time, chip = memory_of(plan), time_of(plan), plan.chip
    timed = chip is not None
    rows: list[tuple[str, str, Text, Wrapped]] = []

    def joined(*items: Text | str) -> Wrapped:
        return Wrapped([item if isinstance(item, Text) else Text(item) for item in items], " · ")

    ranked = sorted(memory.by_kind.items(), key=lambda x: -x[1])
    large = [(kind, n) for kind, n in ranked if n >= MIN_KIND_SHARE * memory.peak]
    state = {facts.KINDS[kind]: plan.argument_bytes(kind) for kind in ("params", "opt")}
    twice = {kind for kind, n in large if chip and n > MIN_TWICE * state.get(kind, n)}
    note = " (old and new: donate_argnums)"
    kinds = joined(*(Text.assemble((k, ROLE_STYLES[k]), f" {format_memory(n)}", note * (k in twice)) for k, n in large))
    needs = format_memory(memory.peak)
    if chip is None:
        rows.append(("needs", needs, Text(), kinds))
    else:
        capacity = chip.per_device().hbm
        fit = facts.fit(memory.peak, capacity)
        if fit == "tight":
            limit = Text(f"a search allows {100 * facts.USABLE_FRACTION:.0f} %", FIT_STYLES[fit])
            kinds = joined(limit, *kinds.items)
        rows.append((fit, f"{needs} of {format_memory(capacity)}", memory_bar(memory.peak, capacity), kinds))
    if time is not None and facts.fits(plan):
        kernels = facts.kernel_seconds(time)
        waits = time.seconds - kernels
        bar = _bar([("█", kernels, "grey62"), ("▒", waits, "red")])
        bound = [f"bound by {', '.join(shares)}"] if (shares := step_shares(plan)) else []
        bound = [*filter(None, [facts.step_rate(plan, time.seconds)]), *bound]
        waiting = "communication" + " and host copies" * bool(time.to_host + time.to_device)
        parts = f"kernels {format_seconds(kernels)}", f"{waiting} not hidden {format_seconds(waits)}"
        split = joined(*parts, *bound)
        rows.append(("step", f"{format_seconds(time.seconds)}, MFU {100 * time.mfu:.0f} %", bar, split))
    cost = attrgetter("seconds" if timed else "bytes")

    def figures(of: CollectiveGroup) -> str:
        return format_bytes(of.bytes) + f" ({format_seconds(of.seconds)})" * timed

    if groups := facts.collective_groups(plan.collectives, lambda c: c.axes):
        parts = [("█", cost(g), colours.styles.get(g.first.axes[0], "")) for g in groups]
        others = 0.0 if time is None else max(0.0, time.seconds - sum(map(cost, groups)))
        bar = _bar([*parts, ("░", others, "dim")])
        over = [Text.assemble(colours.axes(g.first.axes).terminal, f" {figures(g)}") for g in groups]
        over += [Text(f"between {facts.crossing(plan)[1]} {format_bytes(plan.dcn_bytes)}")] * bool(plan.dcn_bytes)
        rows.append(("sends", format_bytes(plan.bytes_sent), bar, joined(*over)))
    effects = [e for e in facts.rule_effects(plan) if e.rule is not None and e.collectives.members]
    if effects:
        worst = max(effects, key=lambda e: cost(e.collectives))
        place = max(facts.collective_groups(worst.collectives.members, lambda c: c.location), key=cost)
        most = f"  {figures(worst.collectives)}" + f", most in {place.location}" * bool(place.location)
        rows.append(("costliest", "", Text(), joined(colours.layout(str(worst.rule)).append(most))))
    width = max(len(value) for _, value, _, _ in rows)
    lines = []
    for label, value, bar, rest in rows:
        head = Text.assemble((f"{value:<{width}}", "bold"), "  " * bool(bar), bar)
        shown = replace(rest, head=head) if value else Text().join(rest.items)
        lines.append((Text(f"  {label}", "" if label == "fits" else FIT_STYLES.get(label, "")), shown))
    return hanging(lines)


def _bar(segments: Sequence[tuple[str, float, str]]) -> Text:
    """A bar of :data:`BAR_CELLS` columns whose segments, (character, amount, style), have widths in proportion to their amounts."""
    total, end, out = sum(amount for _, amount, _ in segments), 0.0, Text()
    for character, amount, style in segments:
        begin, end = end, end + amount
        cells = round(BAR_CELLS * end / total) - round(BAR_CELLS * begin / total) if total else 0
        out.append(character * cells, style)
    return Text.assemble("[", out, "]")


def _arguments(plan: Plan, colours: AxisColours) -> Any:
    """The table of arguments by kind, grouped by dims and sharding."""
    rows: list[list[Cell]] = []
    attributes = []
    for label, every, groups in facts.argument_groups(plan, lambda h: (tuple(facts.argument_dims(h)), h.on_host)):
        most = MAX_ARGUMENT_ROWS if every.members[0].kind == "params" else MAX_ARGUMENT_ROWS // 2
        shown, others = groups[:most], [h for group in groups[most:] for h in group.members]
        rows.append([Cell(label), *every.cells()])
        for group in shown:
            host = " (on the host)" * group.members[0].on_host
            dims = Text.assemble("  ", colours.dims(group.dims).terminal, host)
            rows.append([Cell(dims.plain, terminal=dims), *group.cells()])
        if others:
            rows.append([Cell("  …"), *ArgumentGroup(tuple(others)).cells()])
        attributes += [GROUP, *[""] * (len(shown) + bool(others))]
    columns = [("dims → axes", ""), ("tensors", "n"), ("global", "n"), ("per device", "n")]
    return Table(columns, rows, "each device stores", attributes).terminal()


def _costs(plan: Plan) -> list[Text]:
    """The peak of memory and the estimated time, each with the notes about it."""
    memory, time, chip = memory_of(plan), time_of(plan), plan.chip
    of = "" if chip is None else f" of the {format_memory(chip.per_device().hbm)} of {with_article(chip.name)}"
    at = f", at {memory.peak_source}" if memory.peak_source else ""
    out = [Text.assemble((f"each device needs {format_memory(memory.peak)}", "bold"), f"{of} at the peak{at}")]
    copies = facts.host_copies(plan)
    host = f"host: {format_memory(memory.host)} in the host's memory for each device; {copies}" if copies else ""
    notes = filter(None, (facts.largest_text(plan), facts.padding_text(plan), host))
    out += [Text(f"    {note}", "dim") for note in notes]
    if time is not None and chip is not None:
        takes = f"{facts.takes_text(facts.fits(plan))} {'at least' if plan.uncounted_loops else 'about'} "
        takes += format_seconds(time.seconds)
        on = f" on {chip.name}: {facts.time_bounds(time)}; {100 * time.mfu:.0f} % of the peak FLOP/s"
        out += [Text.assemble((takes, "bold"), on), *(Text(f"    {note}", "dim") for note in step_notes(plan))]
    if decoding := decoding_of(plan):
        out.append(Text.assemble(("decoding ", "bold"), str(decoding)))
    return out


def memory_bar(peak: float, capacity: float) -> Text:
    """``[███░░░░░░░] 31 %`` of the memory of a device; red where the peak exceeds the capacity, yellow above the part that a search
    allows. Both are bytes."""
    part, style = peak / capacity, FIT_STYLES[facts.fit(peak, capacity)]
    filled = min(BAR_CELLS, max(1, round(BAR_CELLS * part)))
    empty = "░" * (BAR_CELLS - filled)
    return Text.assemble("[", ("█" * filled, style), (empty, "dim"), "]", (f" {100 * part:.0f} %", style))


def collectives_block(
    collectives: Sequence[Collective],
    colours: AxisColours,
    timed: bool,
    at_least: bool = False,
    when: str = "a step",
    name: str = "plan",
) -> Any:
    """The collectives, in the order of :func:`collective_groups`, each with its cause on the lines below.

    Args:
      timed: they have seconds.
      at_least: a loop of unknown length sends more.
      when: follows the bytes that a device sends.
      name: of the variable that has the report.
    """
    groups = facts.collective_groups(collectives)
    if not groups:
        return Text("each device sends nothing", style="bold")
    every = CollectiveGroup(tuple(c for g in groups for c in g.members))
    cost = attrgetter("seconds" if timed else "bytes")
    shown = [g for g in groups if cost(g) >= MIN_COLLECTIVE_SHARE * cost(every)][:MAX_COLLECTIVE_ROWS]
    table = [("", "", "total", "calls", "per call", "time", "dims, and why")]
    table += [(g.first.op, "+".join(g.first.axes), *(cell.text for cell in g.cells()), g.dims) for g in shown]
    if len(shown) < len(groups):
        small = CollectiveGroup(tuple(c for g in groups[len(shown) :] for c in g.members))
        total, calls, _, seconds = (cell.text for cell in small.cells())
        rest = "shorter ones" if timed else "smaller ones"
        table.append((rest, "", total, calls, "", seconds, f'{name}.save("{name}.html") lists them'))
    widths = [max(len(row[i]) for row in table) for i in range(6)]
    took = f", in {format_seconds(every.seconds)}" if timed else ""
    more = "at least " * at_least
    lines: list[Any] = [Text(f"each device sends {more}{format_bytes(every.bytes)} {when}{took}", style="bold")]
    for i, (op, axes, *numbers, dims) in enumerate(table):
        cells = "".join(f"  {text:>{n}}" for text, n in zip(numbers[: 3 + timed], widths[2:], strict=False))
        group = shown[i - 1] if 1 <= i <= len(shown) else None
        over = Text(axes) if group is None else colours.axes(group.first.axes).terminal
        line = Text.assemble(f"{op:<{widths[0]}}  ", over, " " * (widths[1] - len(axes)), cells)
        style = "dim" if group is None else ""
        lines.append(hanging([(Text.assemble(line, style=style), Text(dims, style))]))
        if group is not None:
            first = not any(g.first.entry.slices_locally for g in shown[: i - 1])
            lines.append(Padding(colours.layout(group.explanation(compared=first)), (0, 0, 0, 4)))
    return Group(*lines)
