"""A compiled program in the terminal: does it fit, and what is really sent."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..plan.collectives import human
from ..verify.hlo import HloCollective
from ..verify.memory import gib

if TYPE_CHECKING:
    from ..verify.aot import Compiled

MOST = 16


def compiled_text(compiled: Compiled, width: int = 120) -> str:
    """The report as plain text of at most ``width`` columns."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, force_terminal=False).print(compiled_renderable(compiled))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def compiled_renderable(c: Compiled) -> Any:
    """The report for rich: memory, cycles, and the collectives of the final program beside those of the partitioner."""
    m = c.memory
    fits = f" of {gib(c.capacity)}" if c.capacity else ""
    when = "from the cache; it took" if c.cached else "in"
    head = Text.assemble(
        ("compiled", "bold"), f"  {c.name} for {c.topology}, {c.effort} effort, {when} {c.compile_seconds:.1f} s\n",
        ("memory", "bold"), f"    peak {gib(m.peak)}{fits} a device: arguments {gib(m.arguments)}, outputs {gib(m.outputs)} "
        f"({gib(m.aliased)} in place of arguments), temporaries {gib(m.temporaries)}, code {gib(m.code)}",
    )  # fmt: skip
    if c.effort == "fast":
        head.append(
            "\n          (full effort may give another peak: 0 to 16 % higher for models of 7B to 50B)", style="dim"
        )
    if c.cycles:
        head.append("\ncycles", style="bold")
        head.append(f"    {c.cycles:.4g} a step, by the compiler's estimate, communication left out")
    parts: list[Any] = [head, Text(), _table(c, c.final_collectives, "sent by each device, in the final program")]
    if c.collectives:
        kinds: dict[str, float] = {}
        for x in c.collectives:
            kinds[x.op] = kinds.get(x.op, 0.0) + x.total_bytes
        text = ", ".join(f"{op} {human(n)}" for op, n in sorted(kinds.items(), key=lambda k: -k[1]))
        parts.append(Text(f"right after partitioning: {text}", style="dim"))
    if c.plan is not None:
        text = f"planned: {human(c.plan.bytes_sent)} sent, peak {gib(c.plan.memory.peak)}"
        parts.append(Text(text, style="dim"))
    return Group(*parts)


def _table(c: Compiled, found: list[HloCollective], title: str) -> Any:
    rows: dict[tuple[Any, ...], list[HloCollective]] = {}
    sizes = dict(c.mesh.shape) if c.mesh is not None else {}
    for x in found:
        axes = "+".join(x.axes(sizes)) if sizes else f"{x.group} devices" if x.group else "pairs"
        axes += " (DCN)" if x.dcn else ""
        rows.setdefault((x.op, axes, x.shape, x.source), []).append(x)
    total = sum(x.total_bytes for x in found)
    if not found:
        return Text("each device sends nothing", style="bold")
    table = Table(title=f"{human(total)} {title}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, justify in (
        ("", "left"),
        ("axes", "left"),
        ("times", "right"),
        ("bytes", "right"),
        ("", "left"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    ranked = sorted(rows.items(), key=lambda r: -sum(x.total_bytes for x in r[1]))
    for (op, axes, shape, source), group in ranked[:MOST]:
        table.add_row(op, axes, _times(group), human(sum(x.total_bytes for x in group)), shape, _short(source))
    rest = [x for _, group in ranked[MOST:] for x in group]
    if rest:
        table.add_row("smaller ones", "", _times(rest), human(sum(x.total_bytes for x in rest)), "", "", style="dim")
    return table


def _short(source: str) -> str:
    """A line of a file without the folder that is the current one, or that of installed packages."""
    here = os.getcwd() + os.sep
    return source.removeprefix(here).rpartition(f"{os.sep}site-packages{os.sep}")[2]


def _times(group: list[HloCollective]) -> str:
    if any(x.count is None for x in group):
        return "?"
    return f"{sum(x.count or 0 for x in group)} ×"
