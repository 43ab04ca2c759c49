"""How arguments are sharded over the mesh, as a picture for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from ...errors import PatternError
from ..dims import did_you_mean, path_matches
from ..plan.plan import Plan, ShardedArray
from ..units import format_memory
from .colours import AxisColours
from .facts import argument_dims, shape_text

MAX_ROWS, MAX_COLUMNS, MAX_DEVICES = 8, 8, 4
"""Blocks of an array that are drawn, and devices of each that are listed."""


def shards_renderable(plan: Plan, pattern: str) -> Group:
    """The arguments whose path matches a tree-path pattern, each as a grid of its shards.

    Raises:
      PatternError: the pattern matches no argument.
    """
    chosen = [h for h in (*plan.inputs, *plan.constants) if path_matches(pattern, h.path)]
    if not chosen:
        fixes = did_you_mean(pattern, (h.path for h in plan.inputs), "arguments")
        raise PatternError(f"the pattern {pattern!r} matches no argument of the plan", fixes=fixes)
    colours = AxisColours(plan.sizes)
    return Group(*(part for k, h in enumerate(chosen) for part in ([Text()] * bool(k) + [_Shards(plan, h, colours)])))


class _Shards:
    """An argument as a grid of its shards with the numbers of the devices, as wide as the terminal allows: two of its dims, sharded
    ones first. Lines between shards have the colour of the axis. Along other dims the first shard is drawn."""

    def __init__(self, plan: Plan, h: ShardedArray, colours: AxisColours):
        self.h, self.colours, self.sizes = h, colours, plan.sizes
        self.dims = argument_dims(h)
        self.counts = [math.prod(self.sizes[a] for a in axes) for _, axes in self.dims]
        self.shard = [-(-n // count) for n, count in zip(h.shape, self.counts, strict=True)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        h, shards, devices = self.h, math.prod(self.counts), math.prod(self.sizes.values())
        yield Text.assemble(
            (h.path, "bold"), f"  {shape_text(h.dtype, h.shape)}  ", self.colours.dims(self.dims).terminal
        )
        copies = "each device" if shards == 1 else f"{devices // shards} device{'s' * (shards < devices)} each"
        stored = f"{shards} shard{'s' * (shards > 1)} of {shape_text(h.dtype, self.shard)} on {copies}"
        yield Text(f"{stored}, {format_memory(h.bytes)} a device", "dim")
        ranked = sorted(range(len(self.dims)), key=lambda k: (self.counts[k] == 1, -h.shape[k]))[:2]
        row, column = [None, None, *sorted(ranked)][-2:]
        left, top = self._name(row), self._name(column)
        down, across = (1 if k is None else self.counts[k] for k in (row, column))
        margin = len(left) + 1
        rows, last = _some(down, MAX_ROWS), self._devices({row: down - 1, column: across - 1})
        width = len(last) + 2  # the last device has the longest number
        columns = _some(across, max(3, min(MAX_COLUMNS, (options.max_width - margin - 1) // (width + 1))))
        rule, between = Text("─" * width, self._ink(row)), Text("│", self._ink(column))
        edge = Text("─" * width, "dim")
        yield Text.assemble(" " * (margin + 1), top)
        yield Text.assemble(
            " " * margin, ("┌", "dim"), Text("┬", self._ink(column)).join([edge] * len(columns)), ("┐", "dim")
        )
        for n, i in enumerate(rows):
            label = left if n == (len(rows) - 1) // 2 else Text()
            cells = [Text(f"{self._devices({row: i, column: j}):^{width}}") for j in columns]
            yield Text.assemble(label, " " * (margin - len(label)), ("│", "dim"), between.join(cells), ("│", "dim"))
            if n < len(rows) - 1:
                yield Text.assemble(
                    " " * margin, ("├", "dim"), Text("┼", self._ink(row)).join([rule] * len(columns)), ("┤", "dim")
                )
        yield Text.assemble(
            " " * margin, ("└", "dim"), Text("┴", self._ink(column)).join([edge] * len(columns)), ("┘", "dim")
        )

    def _name(self, k: int | None) -> Text:
        """``embed:data 32 × 128``: a dim, its number of shards and their size; empty for None."""
        if k is None:
            return Text()
        size = f" {self.counts[k]} × {self.shard[k]}" if self.counts[k] > 1 else f" {self.shard[k]}"
        return Text.assemble(self.colours.dims([self.dims[k]]).terminal, size)

    def _ink(self, k: int | None) -> str:
        """The style of the lines between the shards of a dim."""
        return "dim" if k is None or self.counts[k] == 1 else self.colours.styles[self.dims[k][1][0]]

    def _devices(self, block: Mapping[int | None, int | None]) -> str:
        """``0 4 8 +12``: the devices, numbered in the order of the mesh, that store a block, dim → its index; ``…`` for None."""
        if None in block.values():
            return "…"
        at = dict(zip(self.sizes, np.indices(tuple(self.sizes.values())), strict=True))
        stores = np.ones(tuple(self.sizes.values()), bool)
        for k, (_, axes) in enumerate(self.dims):
            index = np.zeros((), int)
            for a in axes:
                index = index * self.sizes[a] + at[a]
            stores &= index == (block.get(k) or 0)
        devices = np.flatnonzero(stores)
        if len(devices) == stores.size:
            return "all"
        more = f" +{len(devices) - MAX_DEVICES}" if len(devices) > MAX_DEVICES else ""
        return " ".join(map(str, devices[:MAX_DEVICES])) + more


def _some(n: int, most: int) -> list[int | None]:
    """At most ``most`` of n indices: the first ones, None for those left out, and the last one."""
    return list(range(n)) if n <= most else [*range(most - 2), None, n - 1]
