"""A plan in the terminal: what each device stores, needs and sends, with the cause of every collective."""

from __future__ import annotations

import io
import math
from collections import Counter
from operator import attrgetter
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..cost.decoding import decoding_of
from ..cost.flops import redundant_matmuls
from ..cost.memory import memory_of
from ..cost.time import time_of
from ..dims import format_dims
from ..plan.plan import Overlap, Plan
from ..units import format_bytes, format_memory, format_seconds, mesh_text, with_article
from .colours import PALETTE, AxisColours
from .facts import (
    ArgumentGroup,
    CollectiveGroup,
    argument_dims,
    argument_groups,
    arrivals_text,
    blocking_collectives,
    calibration_text,
    collective_groups,
    fits,
    grouped,
    host_text,
    largest_text,
    layout_text,
    lowering_text,
    padding_text,
    time_bounds,
)
from .hints import exchange_hints, memory_hints
from .pipeline import pipeline_section
from .tables import rich_table

MAX_COLLECTIVE_ROWS = 8
MAX_ARGUMENT_ROWS = 7
"""Groups of parameters; of another kind of arguments half as many."""
BAR_CELLS = 20
"""Columns of the bar of a device's memory."""
MIN_COLLECTIVE_SHARE = 0.01
"""Fraction of the time of all collectives, or of their bytes where no time is estimated, from which on a collective has a row."""
MIN_REDUNDANT_SHARE = 0.05
"""Fraction of the matmuls' FLOPs from which on redundant matmuls are reported."""


def plain(shown: Any, width: int = 120) -> str:
    """A rich renderable as plain text of at most ``width`` columns."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, force_terminal=False).print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def plan_text(plan: Plan, width: int = 120) -> str:
    """The plan as plain text of at most ``width`` columns."""
    return plain(plan_renderable(plan), width)


def plan_line(plan: Plan) -> str:
    """The plan in one line, for a REPL; it computes no estimate."""
    layout = str(plan.requested_layout or plan.layout)
    layout = layout if len(layout) <= 60 else f"{layout[:59]}…"
    return f"<Plan on {mesh_text(plan.sizes)}: {layout or '(nothing sharded)'}; sends {format_bytes(plan.bytes_sent)} a step>"


def plan_renderable(plan: Plan) -> Any:
    """The plan for rich: mesh and layout, arguments, memory and time, collectives, notes.

    The first line is DOES NOT FIT where the peak exceeds the memory of a device.
    """
    colours = AxisColours(plan.sizes)
    head = Text.assemble(
        ("plan", "bold"), f"  {math.prod(plan.sizes.values())} devices (", colours.sizes(plan.sizes).terminal, ")\n",
        ("layout", "bold"), "  ", colours.layout(layout_text(plan)), "\n",
        ("lowering", "bold"), f"  {lowering_text(plan)}",
    )  # fmt: skip
    if fits(plan) is False and plan.chip is not None:
        has, needs = format_memory(plan.chip.per_device().hbm), format_memory(memory_of(plan).peak)
        line = Text(f"DOES NOT FIT  each device needs {needs}, and a {plan.chip.name} has {has}\n", style="bold red")
        head = Text.assemble(line, head)
    parts: list[Any] = [
        head,
        Text(),
        _arguments(plan, colours),
        Text(),
        *_costs(plan),
        *_redundant(plan),
        Text(),
        _collectives(plan, colours),
        *([Text.assemble(("before the step, ", "bold"), arrivals_text(plan.arrivals))] if plan.arrivals else []),
    ]
    for section in (pipeline_section(plan), overlaps(plan) if plan.overlaps else [], options(plan), notes(plan)):
        parts += [Text(), *section] if section else []
    return Group(*(_indented(part) if isinstance(part, Text) else part for part in parts))


def _indented(text: Text) -> Group:
    """The lines of a text; those that wrap continue at the indentation of their line."""
    lines = []
    for line in text.split("\n", allow_blank=True):
        indent = len(line.plain) - len(line.plain.lstrip(" "))
        lines.append(Padding(line[indent:], (0, 0, 0, indent)) if indent else line)
    return Group(*lines)


def _arguments(plan: Plan, colours: AxisColours) -> Table:
    """The table of arguments by kind, grouped by dims and sharding."""
    rows: list[tuple[Any, ...]] = []

    def add(label: str, dims: Text, members: ArgumentGroup, style: str = "") -> None:
        """Append the row of a group: label, number of arguments, dims, bytes in all and per device."""
        texts = (label, str(len(members.members)), format_memory(members.global_bytes), format_memory(members.bytes))
        first, count, *sizes = (Text(text, style=style) for text in texts)
        rows.append((first, count, dims, *sizes))

    for label, every, groups in argument_groups(plan, lambda h: (tuple(argument_dims(h)), h.on_host)):
        add(label, Text(), every, "bold")
        most = MAX_ARGUMENT_ROWS if label == "parameters" else MAX_ARGUMENT_ROWS // 2
        for group in groups[:most]:
            add("", colours.dims(group.dims).terminal + Text(" (on the host)" * group.members[0].on_host), group)
        if len(groups) > most:
            add("", Text("…"), ArgumentGroup(tuple(h for g in groups[most:] for h in g.members)))
    columns = [("", ""), ("tensors", "n"), ("dims → axes", ""), ("global", "n"), ("per device", "n")]
    return rich_table(columns, rows, title="each device stores", title_justify="left", title_style="bold")


def _redundant(plan: Plan) -> list[Text]:
    """Matmuls that several devices compute redundantly, and rules that would shard them; empty if they are few."""
    redundant = redundant_matmuls(plan)
    share = sum(r.share for r in redundant)
    if share < MIN_REDUNDANT_SHARE:
        return []
    few = f"{100 * share:.0f} % of the matmul FLOPs are redundant: several devices compute the same"
    return [Text(few, style="bold"), *(Text(f"    {r}", style="dim") for r in redundant[:3])]


def _costs(plan: Plan) -> list[Text]:
    """Peak memory by kind; the estimated time, its bounds, and the bottleneck."""
    memory, time, chip = memory_of(plan), time_of(plan), plan.chip
    at = f", at {memory.peak_source}" if memory.peak_source else ""
    ranked = sorted(memory.by_kind.items(), key=lambda x: -x[1])
    kinds = ", ".join(f"{kind} {format_memory(n)}" for kind, n in ranked if n >= 1e-3 * memory.peak)
    of, bar, largest = "", Text(), ""
    if chip is not None:
        capacity = chip.per_device().hbm
        of, largest = f" of the {format_memory(capacity)} of {with_article(chip.name)}", largest_text(plan)
        bar = Text.assemble(memory_bar(memory.peak, capacity), "  ")
    need = f"each device needs {format_memory(memory.peak)}"
    out = [Text.assemble((need, "bold"), f"{of} at the peak{at}"), Text.assemble("    ", bar, (kinds, "dim"))]
    host = host_text(plan)
    details = ((largest, "dim"), (padding_text(plan), ""), (host and f"host: {host}", ""))
    out += [Text(f"    {line}", style=style) for line, style in details if line]
    if time is not None and chip is not None:
        takes = f"a step takes {'at least' if plan.uncounted_loops else 'about'} {format_seconds(time.seconds)}"
        on = f" on {chip.name}: {time_bounds(time)}; {100 * time.mfu:.0f} % of the peak FLOP/s"
        out.append(Text.assemble((takes, "bold"), on))
        details = (time.bottleneck, blocking_collectives(plan), calibration_text(plan))
        out += [Text(f"    {line}", style="dim") for line in details if line]
    if decoding := decoding_of(plan):
        out.append(Text.assemble(("decoding ", "bold"), str(decoding)))
    return out


def memory_bar(peak: float, capacity: float) -> Text:
    """``[███░░░░░░░] 31 %`` of the memory of a device; red where the peak exceeds the capacity. Both are bytes."""
    filled = min(BAR_CELLS, max(1, round(BAR_CELLS * peak / capacity)))
    style = "bold red" if peak > capacity else PALETTE[0]
    empty = "░" * (BAR_CELLS - filled)
    return Text.assemble("[", ("█" * filled, style), (empty, "dim"), "]", (f" {100 * peak / capacity:.0f} %", style))


def _collectives(plan: Plan, colours: AxisColours) -> Any:
    """The collectives, in the order of :func:`collective_groups`, each with its cause on the lines below."""
    groups = collective_groups(plan.collectives)
    if not groups:
        return Text("each device sends nothing", style="bold")
    timed = plan.chip is not None
    every = CollectiveGroup(tuple(c for g in groups for c in g.members))
    cost = attrgetter("seconds" if timed else "bytes")
    shown = [g for g in groups if cost(g) >= MIN_COLLECTIVE_SHARE * cost(every)][:MAX_COLLECTIVE_ROWS]
    table = [("", "", "total", "calls", "per call", "time", "dims, and why")]
    table += [(g.first.op, "+".join(g.first.axes), *g.cells(), g.dims) for g in shown]
    if len(shown) < len(groups):
        small = CollectiveGroup(tuple(c for g in groups[len(shown) :] for c in g.members))
        total, calls, _, seconds = small.cells()
        rest = "shorter ones" if timed else "smaller ones"
        table.append((rest, "", total, calls, "", seconds, 'plan.save("plan.html") lists them'))
    widths = [max(len(row[i]) for row in table) for i in range(6)]
    took = f", in {format_seconds(every.seconds)}" if timed else ""
    at_least = "at least " * bool(plan.uncounted_loops)
    lines: list[Any] = [Text(f"each device sends {at_least}{format_bytes(every.bytes)} a step{took}", style="bold")]
    for i, (op, axes, *numbers, dims) in enumerate(table):
        cells = "".join(f"  {text:>{n}}" for text, n in zip(numbers[: 3 + timed], widths[2:], strict=False))
        group = shown[i - 1] if 1 <= i <= len(shown) else None
        over = Text(axes) if group is None else colours.axes(group.first.axes).terminal
        line = Text.assemble(f"{op:<{widths[0]}}  ", over, " " * (widths[1] - len(axes)), f"{cells}  {dims}")
        lines.append(line)
        if group is None:
            line.stylize("dim")
        else:
            lines.append(Padding(Text(group.first.explanation, style="dim"), (0, 0, 0, 4)))
    return Group(*lines)


def overlaps(plan: Plan, every: bool = False) -> list[Text]:
    """How all-gathers before matmuls and reduce-scatters after them are lowered, and why.

    If no pair is a ring or a fused kernel: one line with the most frequent reason, unless ``every``; none if the chip is not known.
    """
    gains = [o.gain for o in plan.overlaps if o.gain is not None]
    names = {"ring": "rings", "pallas": "fused kernels"}
    counts = Counter(names[o.choice] for o in plan.overlaps if o.choice in names)
    chosen = counts.total()
    as_what = ", ".join(f"{n} {name}" for name, n in counts.items()) if len(counts) > 1 else next(iter(counts), "rings")
    if not chosen and not every and plan.chip is None and plan.overlap == "auto":
        return []  # nothing is timed, and no pair was asked to be a ring
    head = f"{chosen} of {len(plan.overlaps)} matmul–collective pairs are lowered as {as_what} (overlap={plan.overlap})"
    if not chosen and not every:
        reasons = Counter(o.reason.split(";")[0] for o in plan.overlaps)
        return [Text.assemble((head, "bold"), f": {reasons.most_common(1)[0][0]}")]
    colours = AxisColours(plan.sizes)
    out = [Text(head + (f", which saves {format_seconds(sum(gains))}" if chosen and gains else ""), style="bold")]

    def gain_of(group: list[Overlap]) -> float:
        return sum(o.gain or 0.0 for o in group)

    groups = grouped(plan.overlaps, lambda o: (o.kind, o.axes, o.choice, o.reason))
    for group in sorted(groups, key=lambda g: -gain_of(g))[:MAX_COLLECTIVE_ROWS]:
        o, runs = group[0], [o.count for o in group]
        calls = "?" if None in runs else sum(runs)
        pair = "all-gather → matmuls" if o.kind == "gather" else "matmuls → reduce-scatter"
        saved = f"  saves {format_seconds(gain_of(group))}" if gain_of(group) and o.choice != "xla" else ""
        choice = Text(f"{o.choice:<6}  ", "dim" if o.choice == "xla" else "")
        what = f"  {calls} × {pair}{saved}: {o.reason}"
        out.append(Text.assemble(choice, colours.axes(o.axes).terminal, what))
    return out


def options(plan: Plan) -> list[Text]:
    """The compiler options of the plan, each group with its reason; may be empty."""
    of = plan.options
    if not of.values and not of.left_out:
        return []
    own = ", and the user's own" if of.given else ""
    out = [Text(f"{len(of.values)} compiler options (options={of.mode}{own}; plan.options.values)", style="bold")]
    out += [Text.assemble((group.name, "cyan"), f"  {group.why}") for group in of.groups]
    out += [Text(f"given  {k}={v}") for k, v in of.given]
    return out + [Text(f"left out  {group.name}: {reason}", style="yellow") for group, reason in of.left_out]


def notes(plan: Plan) -> list[Text]:
    """Dims that could not be sharded, hints, joined names, rules and axes without effect, unnamed dims."""
    out = [Text(f"note  {n}") for n in plan.notes]
    hints = [*memory_hints(plan), *(hint.text(plan) for hint in exchange_hints(plan))]
    out += [Text(f"hint  {hint}", style="green") for hint in hints]
    out += [Text(f"join  {j}", style="yellow") for j in plan.joins]
    named, total, missing = plan.program.coverage()
    if total:
        unsharded = "; a dim without a name is not sharded" * (named < total)
        text = f"dims  {named} of {total} named ({100 * named / total:.1f} %){unsharded}"
        unnamed = Counter(
            f"{op.name} {list(v.shape)} ({format_dims(plan.program.dims(v))}) at {op.location_of_layers}"
            for op, v, _ in missing
        )
        text += "".join(f"\n      {n} × unnamed in {line}" for line, n in unnamed.most_common(4))
        out.append(Text(text, style="dim"))
    return out
