"""Exchanges of elements along one split dim: which elements every device needs, and the collectives by which it gets them.

A table has for each element of a result its index in the operand. Rolls, permutations and slices have a table
(:mod:`.rearrange`), and the windows that devices read of a dim (:mod:`.halo`) are one. Tables and collectives are calculated as
plain integers, so that factor rules can list the collectives in the plan, and local forms send exactly these.

Example: device p of 4, with 4 rows each, needs the rows ``[4p - 1, 4p + 5)``: its shard, one row of the shard before, and one of
the shard after. That is two collective permutes of one row, between neighbours.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..iterables import grouped
from .mesh_in_shard_map import Send, axis_index, permute, table_entry

ZERO, ANY = -1, -2
"""Entries of a table: a zero; any value, since no op reads it."""

MAX_SLICES = 16
"""A table with more runs is a gather, one with fewer a concatenation of slices."""

Runs = tuple[tuple[int, int, int], ...]
"""A table as arithmetic progressions: (first entry, difference of consecutive entries, number of entries) of every run."""


def runs_of(table: Sequence[int] | np.ndarray, breaks: Sequence[int] = ()) -> Runs:
    """The runs of a table: ``[7, 0, 1, 2]`` is ``((7, 0, 1), (0, 1, 3))``.

    A run contains no two entries on different sides of one of ``breaks``, and no :data:`ZERO` or :data:`ANY` next to other
    entries.
    """
    entries = np.asarray(table, np.int64)
    kind = np.searchsorted([ZERO, 0, *breaks], entries, "right")
    step = np.where(kind[1:] == kind[:-1], np.diff(entries), np.nan)  # nan equals nothing, and so separates runs
    edges = [0, *(np.flatnonzero(step[1:] != step[:-1]) + 1).tolist(), len(step)] if len(step) else []
    runs: list[tuple[int, int, int]] = []
    done = 0
    for start, end in itertools.pairwise(edges):
        if np.isnan(step[start]) or (end - start == 1 and step[start] not in (0, 1)):
            if done == start:
                runs.append((int(entries[done]), 0, 1))
                done += 1
        else:
            count = end + 1 - done
            runs.append((int(entries[done]), int(step[start]) if count > 1 else 0, count))
            done = end + 1
    return (*runs, *((int(e), 0, 1) for e in entries[done:]))


def table_of(runs: Runs) -> np.ndarray:
    """The table of some runs: int64, the inverse of :func:`runs_of`."""
    return np.concatenate([np.zeros(0, np.int64), *(first + step * np.arange(n) for first, step, n in runs)])


def taken(arrays: Sequence[Any], dim: int, table: Sequence[int]) -> Any:
    """The elements of a table, from arrays that are concatenated along a dim."""
    ends = list(itertools.accumulate(x.shape[dim] for x in arrays))
    runs = runs_of(table, ends)
    if len(runs) > MAX_SLICES:
        return _gathered(arrays, dim, np.asarray(table))
    slices = []
    for first, step, count in runs:
        if first < 0:
            shape = (*arrays[0].shape[:dim], count, *arrays[0].shape[dim + 1 :])
            slices.append(lax.full(shape, 0, arrays[0].dtype))
            continue
        k = next(k for k, end in enumerate(ends) if first < end)
        start = first - (ends[k] - arrays[k].shape[dim])
        low, high = sorted((start, start + step * (count - 1)))
        part = lax.slice_in_dim(arrays[k], low, high + 1, max(abs(step), 1), dim)
        if step < 0:
            part = lax.rev(part, (dim,))
        elif step == 0 and count > 1:
            part = lax.broadcast_in_dim(part, (*part.shape[:dim], count, *part.shape[dim + 1 :]), range(part.ndim))
        slices.append(part)
    return lax.concatenate(slices, dim) if len(slices) > 1 else slices[0]


def _gathered(arrays: Sequence[Any], dim: int, table: np.ndarray, device: Any = None) -> Any:
    """:func:`taken` as a gather, by one table or (``[devices, n]``) by the table of a device, an int32 scalar."""
    x = lax.concatenate(list(arrays), dim) if len(arrays) > 1 else arrays[0]
    index, is_zero = np.maximum(table, 0).astype(np.int32), table == ZERO
    out = jnp.take(x, index if device is None else jnp.asarray(index)[device], axis=dim, mode="clip")
    if not is_zero.any():
        return out
    where = is_zero if device is None else jnp.asarray(is_zero)[device]
    return jnp.where(lax.broadcast_in_dim(where, out.shape, (dim,)), jnp.zeros((), out.dtype), out)


# -- between devices


Edge = tuple[int, int]
"""(source, target): two devices along the axes of a split dim."""


@dataclass(frozen=True, slots=True)
class Round:
    """One collective permute.

    Attributes:
      pairs: the (source, target) devices.
      sent: for every device, the elements of its shard that it sends; :data:`ANY` after the last, where others send more.
    """

    pairs: tuple[Edge, ...]
    sent: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        return len(self.sent[0])


@dataclass(eq=False)
class Exchange:
    """The collectives that give every device the elements of its shard of a result.

    A result in which device 0 needs element 5, which device 1 has, needs a round with the pair (1, 0).

    Attributes:
      block: size of a shard of the operand.
      table: [devices, size of a shard of the result], the index in the operand of every element.
      rounds: the collective permutes, in order.
      gather: an all-gather replaces the rounds, since it sends no more elements.
    """

    block: int
    table: np.ndarray
    rounds: tuple[Round, ...]
    gather: bool

    @property
    def sent(self) -> tuple[Round | None, ...]:
        """Keys of the elements that each collective sends; None: an all-gather."""
        return (None,) if self.gather else self.rounds

    def sends(self, shape: Sequence[int], dim: int, factor: int, dtype: Any, why: str) -> list[Send]:
        """The collectives, for shards of this shape that are split along ``dim``, whose factor is ``factor``."""
        if self.gather:
            return [Send("all-gather", (factor,), tuple(shape), dtype, why)]
        shapes = ((*shape[:dim], r.length, *shape[dim + 1 :]) for r in self.rounds)
        return [Send("collective-permute", (factor,), sent, dtype, why) for sent in shapes]

    @functools.cached_property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """For every device and every element of its shard of the result, the index of this element in the concatenation of the
        device's own shard and the arrays received in the rounds; if ``gather``, its index in the all-gathered operand."""
        out: list[list[int]] = []
        for device, row in enumerate(self.table):
            index = np.arange(len(self.table) * self.block) - (0 if self.gather else device * self.block)
            start = self.block
            for r in self.rounds:
                for source in (s for s, target in r.pairs if target == device):
                    elements = np.array([e for e in r.sent[source] if e != ANY])
                    index[source * self.block + elements] = start + np.arange(len(elements))
                start += r.length
            out.append(np.where(row < 0, row, index[row]).tolist())
        if self.rounds:
            _zeros_from_rounds(out, self.rounds, self.block)
        return tuple(map(tuple, out))


@functools.lru_cache(maxsize=1024)
def exchange(size: int, shards: int, runs: Runs) -> Exchange:
    """:func:`exchange_of` the table of some runs.

    Args:
      size: of the operand's dim.
      shards: number of shards of the operand and of the result.
    """
    return exchange_of(table_of(runs).reshape(shards, -1), size // shards)


def exchange_of(table: np.ndarray, block: int) -> Exchange:
    """The exchange that sends the fewest elements: one permute per distance on the ring of devices, the fewest permutes, or an
    all-gather. The arguments are attributes of :class:`Exchange`."""
    device, size = np.arange(len(table))[:, None], len(table) * block
    lacks = (table >= 0) & (table // block != device)
    target, element = np.divmod(np.unique((device * size + table)[lacks]), size)
    lists = (x.tolist() for x in (element // block, target, element % block))
    need = grouped(((s, t), e) for s, t, e in zip(*lists, strict=True))  # → elements of the source's shard
    rounds = tuple(_round(edges, need, len(table)) for edges in _permutes(need, len(table)))
    gather = bool(rounds) and sum(r.length for r in rounds) >= (len(table) - 1) * block
    return Exchange(block, table, () if gather else rounds, gather)


def _permutes(need: Mapping[Edge, Sequence[int]], shards: int) -> list[list[Edge]]:
    """The pairs of the collective permutes that send the fewest elements: one permute per distance, or the fewest permutes. Every
    source of a permute sends as many elements as the longest of ``need``."""
    edges = sorted(need)
    by_distance = grouped(((source - target) % shards, (source, target)) for source, target in edges)
    choices = [by_distance[d] for d in sorted(by_distance)], edge_coloring(edges)
    return min(choices, key=lambda permutes: sum(max(len(need[e]) for e in pairs) for pairs in permutes))


def edge_coloring(edges: Sequence[Edge]) -> list[list[Edge]]:
    """The fewest sets of (source, target) pairs in which no device sends or receives twice.

    The edge coloring of a bipartite graph by alternating paths (König): as many sets as the device with the most partners has.
    ``[(0, 1), (0, 2), (1, 2)]`` needs two sets, ``[(0, 1), (1, 2)]`` and ``[(0, 2)]``.
    """
    partners: dict[tuple[str, int], dict[int, int]] = {}  # (side, device) -> color -> the device on the other side

    def free_color(node: tuple[str, int]) -> int:
        used = partners.setdefault(node, {})
        return next(c for c in itertools.count() if c not in used)

    for source, target in edges:
        left, right = ("source", source), ("target", target)
        a, b = free_color(left), free_color(right)
        if a != b:  # make `a` free at the target: exchange the colors along the path that leaves it by `a`
            path, node, color = [], right, a
            while color in partners.setdefault(node, {}):
                partner = ("source" if node[0] == "target" else "target", partners[node][color])
                path.append((node, partner, color))
                node, color = partner, a + b - color
            for one, other, color in path:
                del partners[one][color], partners[other][color]
            for one, other, color in path:
                partners[one][a + b - color], partners[other][a + b - color] = other[1], one[1]
        partners[left][a], partners[right][a] = target, source
    sources = [(device, by_color) for (side, device), by_color in partners.items() if side == "source"]
    sets = grouped((color, (source, target)) for source, by_color in sources for color, target in by_color.items())
    return [sorted(sets[c]) for c in sorted(sets)]


def _zeros_from_rounds(tables: list[list[int]], rounds: Sequence[Round], block: int) -> None:
    """Take zeros from a received array where possible: a device that is no target of the permute receives zeros.

    Then all devices have the same table, and need no gather by a run-time index.
    """
    ends = list(itertools.accumulate((r.length for r in rounds), initial=block))
    for k, column in enumerate(zip(*tables, strict=True)):
        entries = set(column) - {ANY}
        if ZERO not in entries or len(entries) != 2 or (received := max(entries)) < block:
            continue
        targets = {t for _, t in rounds[next(r for r, end in enumerate(ends[1:]) if received < end)].pairs}
        if not any(column[t] == ZERO for t in targets):
            for row in tables:
                row[k] = received if row[k] == ZERO else row[k]


def _round(edges: Sequence[Edge], need: Mapping[Edge, Sequence[int]], shards: int) -> Round:
    """The permute for some pairs; ``need`` has the elements of the source's shard for each."""
    length = max(len(need[e]) for e in edges)
    sent = [(ANY,) * length] * shards
    for edge in edges:
        sent[edge[0]] = (*need[edge], *(ANY,) * (length - len(need[edge])))
    return Round(tuple(edges), tuple(sent))


def _common_table(tables: Sequence[Sequence[int]]) -> list[int] | None:
    """One table for all devices, if theirs differ in :data:`ANY` entries only; else None."""
    columns = [{e for e in column if e != ANY} for column in zip(*tables, strict=True)]
    return [min(c, default=ANY) for c in columns] if all(len(c) < 2 for c in columns) else None


def _taken_by_device(arrays: Sequence[Any], dim: int, tables: Sequence[Sequence[int]], device: Any) -> Any:
    """The elements of this device's table, from arrays that are concatenated along a dim."""
    table = _common_table(tables)
    if table is not None:
        return taken(arrays, dim, table)
    starts = [{e - k if e != ZERO else ZERO for k, e in enumerate(row) if e != ANY} or {0} for row in tables]
    last = sum(x.shape[dim] for x in arrays) - len(tables[0])
    if all(len(of) == 1 and 0 <= min(of) <= last for of in starts):  # consecutive elements
        x = lax.concatenate(list(arrays), dim) if len(arrays) > 1 else arrays[0]
        return lax.dynamic_slice_in_dim(x, table_entry([*map(min, starts)], device), len(tables[0]), dim)
    return _gathered(arrays, dim, np.asarray(tables), device)


def exchanged(
    x: Any,
    dim: int,
    axes: tuple[str, ...],
    by: Exchange,
    received: Callable[[Hashable, Callable[[], Any]], Any] = lambda key, receive: receive(),
) -> Any:
    """This device's shard of a result, from its shard ``x``, inside a ``shard_map``.

    Args:
      axes: the axes over which the dim is split, major to minor.
      received: (key of what is received, function that receives it) → the received array.
    """
    device = axis_index(axes)
    if by.gather:
        arrays = [received((dim, axes), lambda: lax.all_gather(x, axes, axis=dim, tiled=True))]
    else:

        def receive(r: Round) -> Any:
            return permute(_taken_by_device([x], dim, r.sent, device), axes, r.pairs)

        arrays = [x, *(received((dim, axes, r), functools.partial(receive, r)) for r in by.rounds)]
    return _taken_by_device(arrays, dim, by.tables, device)
