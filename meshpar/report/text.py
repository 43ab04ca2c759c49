"""A plan in the terminal: what each device holds and sends, and why."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..cost.flops import redundant_matmuls
from ..cost.memory import memory_of
from ..cost.time import time_of
from ..plan.collectives import Collective
from ..plan.plan import Overlap, Plan, ShardedArray
from ..units import format_bytes, format_memory, format_seconds
from .facts import chips_of, lowering_text, rates, waited_for

MOST = 8  # collectives, each with its cause; what is left is summed up
ROWS = 7  # tensors of a kind
REPEATED = 0.05  # of the products' FLOPs, from which on it is said that they are done more than once
KINDS = {"params": "parameters", "opt": "optimizer state", None: "other inputs", "constant": "constants"}


def plain(shown: Any, width: int = 120) -> str:
    """What rich shows, as plain text of at most ``width`` columns."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, force_terminal=False).print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def plan_text(plan: Plan, width: int = 120) -> str:
    """The plan as plain text of at most ``width`` columns."""
    return plain(plan_renderable(plan), width)


def plan_line(plan: Plan) -> str:
    """The plan in one line, for a REPL; nothing that takes long is worked out for it."""
    mesh = ", ".join(f"{a}={n}" for a, n in plan.sizes.items())
    layout = str(plan.requested_layout or plan.layout)
    layout = layout if len(layout) <= 60 else f"{layout[:59]}…"
    return f"<Plan on {mesh}: {layout or '(nothing split)'}; sends {format_bytes(plan.bytes_sent)} a step>"


def fits(plan: Plan) -> bool | None:
    """Whether a device has the memory that the plan needs at its peak; None: the chip is not known."""
    return None if plan.chip is None else memory_of(plan).peak <= plan.chip.per_device().hbm


def plan_renderable(plan: Plan) -> Any:
    """The plan for rich: a headline, what each device holds, what it sends, and what to know.

    The first line says DOES NOT FIT where it does not.
    """
    mesh = " × ".join(f"{a} {n}" for a, n in plan.sizes.items())
    devices = math.prod(plan.sizes.values())
    head = Text.assemble(
        ("plan", "bold"), f"  {devices} devices ({mesh})\n", ("layout", "bold"),
        f"  {plan.layout or '(nothing split)'}\n", ("lowering", "bold"), f"  {lowering_text(plan)}",
    )  # fmt: skip
    if fits(plan) is False and plan.chip is not None:
        has, needs = format_memory(plan.chip.per_device().hbm), format_memory(memory_of(plan).peak)
        line = Text(f"DOES NOT FIT  each device needs {needs}, and a {plan.chip.name} has {has}\n", style="bold red")
        head = Text.assemble(line, head)
    parts: list[Any] = [head, Text(), _held(plan), Text(), *_costs(plan), *_repeated(plan), Text(), _sent(plan)]
    if plan.overlaps:
        parts += [Text(), *overlaps(plan)]
    if plan.options.values or plan.options.left_out:
        parts += [Text(), *options(plan)]
    more = notes(plan)
    if more:
        parts += [Text(), *more]
    return Group(*parts)


def _held(plan: Plan) -> Table:
    table = Table(title="each device holds", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, justify in (
        ("", "left"),
        ("tensors", "right"),
        ("dims → axes", "left"),
        ("all", "right"),
        ("a device", "right"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for kind, label in KINDS.items():
        rows = [h for h in (*plan.inputs, *plan.constants) if h.kind == kind]
        if not rows:
            continue
        whole = sum(_whole(h) for h in rows)
        table.add_row(
            label, str(len(rows)), "", format_memory(whole), format_memory(sum(h.bytes for h in rows)), style="bold"
        )
        groups: dict[str, list[ShardedArray]] = {}
        for h in rows:
            groups.setdefault(_dims_and_axes(h), []).append(h)
        ranked = sorted(groups.items(), key=lambda g: -sum(h.bytes for h in g[1]))
        most = ROWS if kind == "params" else ROWS // 2
        for text, group in ranked[:most]:
            table.add_row(
                "",
                str(len(group)),
                text,
                format_memory(sum(map(_whole, group))),
                format_memory(sum(h.bytes for h in group)),
            )
        if len(ranked) > most:
            rest = [h for _, group in ranked[most:] for h in group]
            table.add_row(
                "",
                str(len(rest)),
                "…",
                format_memory(sum(map(_whole, rest))),
                format_memory(sum(h.bytes for h in rest)),
            )
    return table


def _repeated(plan: Plan) -> list[Text]:
    """Products that several devices do alike, where they are much of the step, and what would split them."""
    found = redundant_matmuls(plan)
    share = sum(r.share for r in found)
    if share < REPEATED:
        return []
    out = [Text(f"{100 * share:.0f} % of the products' FLOPs are done more than once", style="bold")]
    for r in found[:3]:
        out.append(Text(f"    {r}", style="dim"))
    return out


def _costs(plan: Plan) -> list[Text]:
    """Memory at its peak by kind; time by what takes it, and the bottleneck."""
    memory, time, chip = memory_of(plan), time_of(plan), plan.chip
    room = math.inf if chip is None else chip.per_device().hbm
    of = f" of the {format_memory(room)} of a {chip.name}" if chip is not None and math.isfinite(room) else ""
    at = f", at {memory.peak_source}" if memory.peak_source else ""
    kinds = ", ".join(f"{kind} {format_memory(n)}" for kind, n in sorted(memory.by_kind.items(), key=lambda x: -x[1]))
    out = [Text.assemble(("each device needs ", "bold"), (format_memory(memory.peak), "bold"), f"{of} at the peak{at}"),
           Text(f"    {kinds}", style="dim")]  # fmt: skip
    if time is not None and chip is not None:
        out.append(Text.assemble(
            ("a step takes ", "bold"), (f"about {format_seconds(time.seconds)}", "bold"),
            f" on {chip.name}: {format_seconds(time.overlapped)} if all overlaps, {format_seconds(time.serial)} if nothing does; "
            f"{100 * time.mfu:.0f} % of the peak FLOP/s",
        ))  # fmt: skip
        out += [Text(f"    {line}", style="dim") for line in (time.bottleneck, waited_for(plan), rates(plan)) if line]
    return out


def _whole(h: ShardedArray) -> float:
    size = 8.0 if "key" in h.dtype else _width(h.dtype)
    return math.prod(h.shape) * size


def _width(dtype: str) -> float:
    if dtype == "bool":
        return 1
    m = re.search(r"(\d+)", dtype)
    return int(m[1]) / 8 if m else 4


def _dims_and_axes(h: ShardedArray) -> str:
    """``embed:data mlp:model`` — each dim, with its axes where it is split."""
    text = " ".join(name + (f":{'+'.join(axes)}" if axes else "") for name, axes in chips_of(h)) or "(scalars)"
    return f"{text} (on the host)" if h.on_host else text


def _sent(plan: Plan) -> Any:
    """The collectives, largest first, each with its cause on a line of its own."""
    rows = merge_collectives(plan.collectives)
    if not rows:
        return Text("each device sends nothing", style="bold")
    total = plan.bytes_sent
    shown = [r for r in rows if r.bytes >= 0.01 * total][:MOST]
    timed = plan.chip is not None
    cells = [
        (
            r.first.op,
            "+".join(r.first.axes),
            r.times,
            format_bytes(r.bytes),
            format_seconds(r.seconds) if timed else "",
            r.dims,
        )
        for r in shown
    ]
    small = rows[len(shown) :]
    if small:
        count = sum(r.runs or 1 for r in small)
        took = format_seconds(sum(r.seconds for r in small)) if timed else ""
        cells.append(("smaller ones", "", f"{count} ×", format_bytes(sum(r.bytes for r in small)), took, ""))
    wide = [max(len(row[i]) for row in cells) for i in range(5)]
    took = f", in {format_seconds(sum(r.seconds for r in rows))}" if timed else ""
    lines: list[Any] = [Text(f"each device sends {format_bytes(total)} a step{took}", style="bold")]
    for i, (op, axes, times, size, seconds, dims) in enumerate(cells):
        line = Text.assemble(
            (f"{op:<{wide[0]}}  ", "" if i < len(shown) else "dim"), (f"{axes:<{wide[1]}}", "cyan"),
            f"  {times:>{wide[2]}}  {size:>{wide[3]}}  " + (f"{seconds:>{wide[4]}}  " if timed else "") + dims,
        )  # fmt: skip
        lines.append(line)
        if i < len(shown):
            lines.append(Padding(Text(shown[i].first.cause, style="dim"), (0, 0, 0, 4)))
    return Group(*lines)


def merge_overlaps(overlaps: Iterable[Overlap]) -> list[tuple[Overlap, int, int | None, float | None]]:
    """Decisions alike in kind, axes, choice and reason: (one of them, how many, runs in a step, gain in seconds)."""
    groups: dict[Any, list[Overlap]] = {}
    for o in overlaps:
        groups.setdefault((o.kind, o.axes, o.choice, o.reason), []).append(o)
    rows = []
    for group in groups.values():
        counts = [o.count for o in group]
        runs = None if None in counts else sum(n for n in counts if n is not None)
        gains = [o.gain for o in group if o.gain is not None]
        rows.append((group[0], len(group), runs, sum(gains) if gains else None))
    return sorted(rows, key=lambda r: -(r[3] or 0.0))


def overlaps(plan: Plan, every: bool = False) -> list[Text]:
    """How all-gathers before matmuls and reduce-scatters after them are made, and why.

    One line with the commonest reason where none is made in blocks; ``plan.overlaps`` and the page have all.
    """
    gains = [o.gain for o in plan.overlaps if o.gain is not None]
    rings, kernels = (sum(o.choice == c for o in plan.overlaps) for c in ("ring", "pallas"))
    shown = rings + kernels
    both = f"in blocks, {rings} on rings and {kernels} by fused kernels"
    where = both if rings and kernels else "by fused kernels" if kernels else "on rings"
    head = f"{shown} of {len(plan.overlaps)} gathers and scatters beside products run {where} (overlap={plan.overlap})"
    out = [Text(head + (f", which saves {format_seconds(sum(gains))}" if shown and gains else ""), style="bold")]
    if not shown and not every:
        reasons = Counter(o.reason.split(";")[0] for o in plan.overlaps)
        return [Text.assemble((head, "bold"), f": {reasons.most_common(1)[0][0]}")]
    for o, _, runs, gain in merge_overlaps(plan.overlaps)[:MOST]:
        what = "gather → products" if o.kind == "gather" else "products → scatter"
        saved = f"  saves {format_seconds(gain)}" if gain and o.choice != "xla" else ""
        out.append(Text.assemble((f"{o.choice:<6}  ", "" if o.choice != "xla" else "dim"), (f"{'+'.join(o.axes)}", "cyan"),
                                 f"  {'?' if runs is None else runs} × {what}{saved}: {o.reason}"))  # fmt: skip
    return out


def options(plan: Plan) -> list[Text]:
    """The options of the compiler that the plan comes with, each group with its reason."""
    of = plan.options
    own = ", and the user's own" if of.given else ""
    out = [
        Text(f"{len(of.values)} options of the compiler (options={of.mode}{own}; plan.options.values)", style="bold")
    ]
    for group in of.groups:
        out.append(Text.assemble((group.name, "cyan"), f"  {group.why}"))
    out += [Text(f"given  {k}={v}") for k, v in of.given]
    return out + [Text(f"left out  {group.name}: {reason}", style="yellow") for group, reason in of.left_out]


class Merged(NamedTuple):
    """Collectives alike in kind, axes and cause: the largest of them, their dims, how often, bytes and seconds in a step."""

    first: Collective
    dims: str
    runs: int | None
    bytes: float
    seconds: float

    @property
    def times(self) -> str:
        return "?" if self.runs is None else f"{self.runs} ×"


def merge_collectives(collectives: Iterable[Collective]) -> list[Merged]:
    """Collectives alike in kind, axes and cause as one row, largest first."""
    groups: dict[Any, list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.op, c.axes, c.cause), []).append(c)
    rows = []
    for group in groups.values():
        counts = [c.count for c in group]
        count = None if None in counts else sum(n for n in counts if n is not None)
        group.sort(key=lambda c: -c.total_bytes)
        dims = list(dict.fromkeys(c.dims or "(scalar)" for c in group))
        text = " | ".join(dims[:3]) + (f" | {len(dims) - 3} more" if len(dims) > 3 else "")
        seconds = sum((c.seconds or 0.0) * (c.count or 1) for c in group)
        rows.append(Merged(group[0], text, count, sum(c.total_bytes for c in group), seconds))
    return sorted(rows, key=lambda r: -r.bytes)


def notes(plan: Plan) -> list[Text]:
    """What to know: what could not be split, names that turned out to be one, rules and axes without effect, unnamed dims."""
    out = [Text(f"note  {n}") for n in plan.notes]
    if memory_of(plan).host or plan.transfers:
        there, back = (sum(t.total_bytes for t in plan.transfers if t.to == to) for to in ("host", "device"))
        lines = list(dict.fromkeys(t.source for t in plan.transfers))
        where = f" ({', '.join(lines[:3])}{', …' if len(lines) > 3 else ''})" if lines else ""
        out.append(Text(
            f"host  each device keeps {format_memory(memory_of(plan).host)} in the host's memory; it copies "
            f"{format_bytes(there)} there and "
            f"{format_bytes(back)} back in a step{where}"))  # fmt: skip
    for j in plan.joins:
        out.append(Text(f"join  {j}", style="yellow"))
    named, total, _ = plan.program.coverage()
    if total:
        text = f"dims  {named} of {total} named ({100 * named / total:.1f} %)"
        for line, n in _unnamed(plan):
            text += f"\n      {n} × unnamed in {line}"
        out.append(Text(text, style="dim"))
    return out


def _unnamed(plan: Plan) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for line in plan.unnamed:
        line = re.sub(r" dim \d+ at ", " ", line)
        counts[line] = counts.get(line, 0) + 1
    return sorted(counts.items(), key=lambda x: -x[1])[:4]
