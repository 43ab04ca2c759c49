"""A move in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from rich.console import Group
from rich.text import Text

from ..compat.jax import axes_of_spec
from ..iterables import grouped_by
from ..report.colours import AxisColours
from ..report.plan_html_page import collectives_table
from ..report.plan_terminal_text import collectives_block
from ..report.tables import Cell, Table, hanging, number
from ..units import format_bytes, format_memory, format_seconds
from .plan import LINKS, MovePlan, Side


def move_title(move: MovePlan) -> str:
    """``8 devices (data=8) → 4 devices (model=4)``, and the bytes that a device sends."""
    return f"{_source(move)} → {_side(move.target)}, each device sends {format_bytes(move.bytes_sent)}"


def _source(move: MovePlan) -> str:
    """The devices of the source, or ``host memory``, as text."""
    from_host = move.links and move.links.keys() <= {"host"} and not move.bytes_received
    return "host memory" if from_host else _side(move.source)


def _side(side: Side) -> str:
    return f"{side.devices} device{'s' * (side.devices != 1)} ({', '.join(f'{a} {n}' for a, n in side.mesh.items())})"


def _lines(move: MovePlan) -> Iterator[tuple[str, str]]:
    """(label, text) of the summary."""
    memory, seconds = move.memory, move.seconds
    for name, text, side in (("source", _source(move), move.source), ("target", _side(move.target), move.target)):
        yield name, text + f"  {side.layout}" * bool(side.layout)
    took = "" if seconds is None else f" in {format_seconds(seconds)}"
    host = move.links.get("host", 0.0)
    over = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in move.links.items() if kind not in (LINKS[""], "host"))
    yield "sends", f"{format_bytes(move.bytes_sent)} a device{took}" + f": {over}" * bool(over)
    received = f"{format_bytes(move.bytes_received + host)} a device: what it needs and does not have"
    yield "receives", received + f", {format_bytes(host)} of it from host memory" * bool(host)
    yield "rounds", move.rounds_text
    frees = "each round frees its part of the source" if move.donate else "not donated: the source stays"
    sizes = f"before {format_memory(memory.source)}, after {format_memory(memory.target)}; {frees}"
    yield "needs", f"{format_memory(memory.peak)} at the peak, on a device of both sides: {sizes}"


def _arrays(move: MovePlan, colours: AxisColours) -> Table:
    """The arrays, grouped by dims and shardings."""
    rows = []
    specs = lambda a: [str(of.sharding.spec) for of in (*a.operands, a)]  # noqa: E731
    for group in grouped_by(move.arrays, lambda a: (a.dims, *specs(a))):
        a = group[0]
        names = a.dims.split(" → ")
        cells = []
        for named, x in ((names[0], a.operands[0]), (names[-1], a)):
            dims, spec = named.split(), x.sharding.spec
            pairs = list(zip(dims, axes_of_spec(spec, len(x.shape)), strict=False))
            cells.append(colours.dims(pairs) if len(dims) == len(x.shape) else Cell(str(spec)))
        cast = str(a.dtype) if a.dtype == a.old_dtype else f"{a.old_dtype} → {a.dtype}"
        sent = sum(sum(x.links.values()) for x in group)
        before, after = sum(x.before for x in group), sum(x.after for x in group)
        sizes = [number(format_memory(n), n) for n in (before, after)]
        rows.append([*cells, Cell(cast), number(str(len(group)), len(group)), *sizes, number(format_bytes(sent), sent)])
    numbers = ("arrays", "bytes before", "bytes after", "sends")
    columns = [("before", ""), ("after", ""), ("dtype", ""), *((name, "n") for name in numbers)]
    return Table(columns, rows, "each device moves")


def _colours(move: MovePlan) -> AxisColours:
    return AxisColours(move.source.mesh, move.target.mesh, ["devices"])


def move_renderable(move: MovePlan) -> Any:
    """The move for rich: summary, collectives with their causes, arrays."""
    colours, timed = _colours(move), move.chip is not None
    head = hanging([(Text(name, "bold"), colours.layout(text)) for name, text in _lines(move)])
    return Group(
        head,
        Text(),
        collectives_block(move.collectives, colours, timed, when="for the move", name="move"),
        Text(),
        _arrays(move, colours).terminal(),
    )


def move_html(move: MovePlan) -> str:
    """The body of the page of a move."""
    colours = _colours(move)
    rows = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in _lines(move))
    return (
        f'<h1>{escape(move_title(move))}</h1><dl class="facts">{rows}</dl>'
        f"<section><h2>Collectives</h2>{collectives_table(move.collectives, colours, move.chip is not None)}</section>"
        f"<section><h2>Arrays</h2>{_arrays(move, colours).html()}</section>"
    )
