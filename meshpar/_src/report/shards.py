"""How arguments are sharded over the mesh, as a picture for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from rich.box import SQUARE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...errors import PatternError
from ..dims import did_you_mean, path_matches
from ..plan.plan import Plan, ShardedArray
from ..units import format_memory
from .colours import AxisColours
from .facts import argument_dims, shape_text

MAX_BLOCKS, MAX_DEVICES, COLUMNS = 8, 4, 56
"""Blocks along a dim and devices of a block that are drawn; columns of the terminal that blocks may take."""


def shards_renderable(plan: Plan, pattern: str) -> Group:
    """The arguments whose path matches a tree-path pattern, each as a grid of its shards with the devices that store them.

    Raises:
      PatternError: the pattern matches no argument.
    """
    chosen = [h for h in (*plan.inputs, *plan.constants) if path_matches(pattern, h.path)]
    if not chosen:
        fixes = did_you_mean(pattern, (h.path for h in plan.inputs), "arguments")
        raise PatternError(f"the pattern {pattern!r} matches no argument of the plan", fixes=fixes)
    return Group(*(_shards(plan, h, AxisColours(plan.sizes)) for h in chosen))


def _shards(plan: Plan, h: ShardedArray, colours: AxisColours) -> Group:
    """An argument as a grid of its shards: two of its dims, sharded ones first; the first shard along the others."""
    sizes, dims = plan.sizes, argument_dims(h)
    counts = [math.prod(sizes[a] for a in axes) for _, axes in dims]
    shard = [-(-n // count) for n, count in zip(h.shape, counts, strict=True)]
    devices, shards = math.prod(sizes.values()), math.prod(counts)

    def name(k: int | None) -> Text:
        """``embed:data 32 × 128``: a dim, its number of shards and their size; empty for None."""
        number = "" if k is None else f" {counts[k]} × {shard[k]}" if counts[k] > 1 else f" {shard[k]}"
        return Text.assemble("" if k is None else colours.dims([dims[k]]).terminal, number)

    head = Text.assemble((h.path, "bold"), f"  {shape_text(h.dtype, h.shape)}  ", colours.dims(dims).terminal)
    each = "each device" if shards == 1 else f"{devices // shards} device{'s' * (shards < devices)} each"
    about = f"{shards} shard{'s' * (shards > 1)} of {shape_text(h.dtype, shard)} on {each}, {format_memory(h.bytes)} a device"
    ranked = sorted(range(len(dims)), key=lambda k: (counts[k] == 1, -h.shape[k]))[:2]
    row, column = [None, None, *sorted(ranked)][-2:]
    down, across = (1 if k is None else counts[k] for k in (row, column))
    width = len(_devices(plan, h, {row: down - 1, column: across - 1})) + 3  # the last device has the longest number
    columns = _some(across, max(3, min(MAX_BLOCKS, COLUMNS // width)))
    grid = Table(box=SQUARE, show_header=False, show_lines=True, border_style="dim")
    for i in _some(down, MAX_BLOCKS):
        grid.add_row(*(_devices(plan, h, {row: i, column: j}) for j in columns))
    sides = Table.grid(padding=(0, 1))
    sides.add_row("", name(column))
    sides.add_row(Text("\n" * (len(grid.rows) // 2 * 2 + 1)) + name(row), grid)
    return Group(head, Text(about, "dim"), sides)


def _devices(plan: Plan, h: ShardedArray, block: Mapping[int | None, int | None]) -> str:
    """``0 4 8 +12``: the devices, numbered in the order of the mesh, that store a block, dim → its index; ``…`` for None."""
    if None in block.values():
        return "…"
    shape = tuple(plan.sizes.values())
    at = dict(zip(plan.sizes, np.indices(shape), strict=True))
    stores = np.ones(shape, bool)
    for k, (_, axes) in enumerate(argument_dims(h)):
        index = np.zeros((), int)
        for a in axes:
            index = index * plan.sizes[a] + at[a]
        stores &= index == (block.get(k) or 0)
    devices = np.flatnonzero(stores)
    more = f" +{len(devices) - MAX_DEVICES}" if len(devices) > MAX_DEVICES else ""
    return "all" if len(devices) == stores.size else " ".join(map(str, devices[:MAX_DEVICES])) + more


def _some(n: int, most: int) -> list[int | None]:
    """At most ``most`` of n indices: the first ones, None for those left out, and the last one."""
    return list(range(n)) if n <= most else [*range(most - 2), None, n - 1]
