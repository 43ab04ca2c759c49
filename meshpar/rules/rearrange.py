"""A dim made of elements of another one, by a table that is known beforehand: rolls, permutations, slices of any size.

Programs do not have this primitive as they are traced. A plan writes slices, joins and lookups by constants along a split dim so
(:mod:`meshpar.program.divisible_rewrite`), since one table says what several of them in turn need of every device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .halo import coloured
from .local import LocalOp
from .registry import register
from .rule import NameLink, OpRule, exchange_kind
from .spmd import Send, axis_index, permute

ZERO, ANY = -1, -2
"""Entries of a table: a zero; any value, since nobody reads it."""

MOST_PIECES = 16
"""Tables of more runs than this are looked up instead of cut and joined."""

Runs = tuple[tuple[int, int, int], ...]
"""A table in short: (first entry, difference of consecutive entries, number of entries) of every run."""


def runs_of(table: Sequence[int] | np.ndarray, breaks: Sequence[int] = ()) -> Runs:
    """The runs of a table; none leads across one of ``breaks``, or from an entry to :data:`ZERO` or :data:`ANY`."""
    entries = np.asarray(table, np.int64)
    kind = np.where(entries < 0, entries, np.searchsorted(breaks, entries, "right"))
    step = np.where(kind[1:] == kind[:-1], np.diff(entries), np.nan)  # nan, which equals nothing, parts two runs
    edges = [0, *(np.flatnonzero(step[1:] != step[:-1]) + 1).tolist(), len(step)] if len(step) else []
    found: list[tuple[int, int, int]] = []
    done = 0
    for start, end in itertools.pairwise(edges):
        if np.isnan(step[start]) or (end - start == 1 and step[start] not in (0, 1)):
            if done == start:
                found.append((int(entries[done]), 0, 1))
                done += 1
        else:
            count = end + 1 - done
            found.append((int(entries[done]), int(step[start]) if count > 1 else 0, count))
            done = end + 1
    return (*found, *((int(e), 0, 1) for e in entries[done:]))


def table_of(runs: Runs) -> np.ndarray:
    """The table of some runs, as int64."""
    return np.concatenate([np.zeros(0, np.int64), *(first + step * np.arange(n) for first, step, n in runs)])


def taken(parts: Sequence[Any], dim: int, table: Sequence[int]) -> Any:
    """The elements of some arrays, one after the other along a dim, that a table says."""
    ends = list(itertools.accumulate(x.shape[dim] for x in parts))
    runs = runs_of(table, ends)
    if len(runs) > MOST_PIECES:
        index = np.asarray(table)
        x = lax.concatenate(list(parts), dim) if len(parts) > 1 else parts[0]
        out = jnp.take(x, np.maximum(index, 0).astype(np.int32), axis=dim, mode="clip")
        return _zeroed(out, dim, np.asarray(index) == ZERO) if (index == ZERO).any() else out
    pieces = []
    for first, step, count in runs:
        if first < 0:
            shape = (*parts[0].shape[:dim], count, *parts[0].shape[dim + 1 :])
            pieces.append(lax.full(shape, 0, parts[0].dtype))
            continue
        k = next(k for k, end in enumerate(ends) if first < end)
        start = first - (ends[k] - parts[k].shape[dim])
        low, high = sorted((start, start + step * (count - 1)))
        piece = lax.slice_in_dim(parts[k], low, high + 1, max(abs(step), 1), dim)
        if step < 0:
            piece = lax.rev(piece, (dim,))
        elif step == 0 and count > 1:
            piece = lax.broadcast_in_dim(piece, (*piece.shape[:dim], count, *piece.shape[dim + 1 :]), range(piece.ndim))
        pieces.append(piece)
    return lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]


def _zeroed(x: Any, dim: int, where: Any) -> Any:
    return jnp.where(lax.broadcast_in_dim(where, x.shape, (dim,)), jnp.zeros((), x.dtype), x)


rearrange_p = Primitive("rearrange")


def rearrange(x: Any, dim: int, table: Sequence[int] | np.ndarray) -> Any:
    """``x[..., table, ...]`` along a dim, with zeros where the table says :data:`ZERO`."""
    return rearrange_p.bind(x, dimension=dim, runs=runs_of(table))


def _impl(x: Any, *, dimension: int, runs: Runs) -> Any:
    return taken([x], dimension, table_of(runs).tolist())


def _abstract(x: Any, *, dimension: int, runs: Runs) -> Any:
    return x.update(shape=(*x.shape[:dimension], sum(n for _, _, n in runs), *x.shape[dimension + 1 :]))


def _transpose(ct: Any, x: Any, *, dimension: int, runs: Runs) -> list[Any]:
    """The sum of every element's uses: its first ones, its second ones, …"""
    uses: list[np.ndarray] = []
    times: dict[int, int] = {}
    for place, element in enumerate(table_of(runs).tolist()):
        if element < 0:
            continue
        k = times[element] = times.get(element, -1) + 1
        if k == len(uses):
            uses.append(np.full(x.aval.shape[dimension], ZERO))
        uses[k][element] = place
    if not uses:
        return [ad.Zero(x.aval)]
    return [functools.reduce(lax.add, [rearrange(ct, dimension, table) for table in uses])]


def _batch(args: Any, dims: Any, *, dimension: int, runs: Runs) -> Any:
    (x,), (d,) = args, dims
    return rearrange_p.bind(x, dimension=dimension + (d <= dimension), runs=runs), d


rearrange_p.def_impl(_impl)
rearrange_p.def_abstract_eval(_abstract)
mlir.register_lowering(rearrange_p, mlir.lower_fun(_impl, multiple_results=False))
ad.deflinear2(rearrange_p, _transpose)
batching.primitive_batchers[rearrange_p] = _batch


# -- between devices


@dataclass(frozen=True, slots=True)
class Round:
    """One collective permute: (source, target) pairs, and what each device sends of its block (:data:`ANY` beyond its end)."""

    pairs: tuple[tuple[int, int], ...]
    sent: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        return len(self.sent[0])


@dataclass(frozen=True, slots=True)
class Exchange:
    """What gives every device its block of the result.

    Attributes:
      rounds: the collective permutes.
      tables: for every device, the table of its block: into its own block and what the rounds bring, one after the other; where
        ``gather``, into the whole dim.
      gather: an all-gather sends no more, and is made instead.
    """

    rounds: tuple[Round, ...]
    tables: tuple[tuple[int, ...], ...]
    gather: bool


@functools.lru_cache(maxsize=1024)
def exchange(size: int, parts: int, runs: Runs) -> Exchange:
    """The exchange that sends least: one permute for each distance around the devices, or as few permutes as can be.

    Args:
      size: of the operand's dim.
      parts: how many devices split it, and the result.
      runs: the table.
    """
    table, block = table_of(runs).reshape(parts, -1), size // parts
    need: dict[tuple[int, int], list[int]] = {}
    for target, row in enumerate(table):
        for element in np.unique(row[row >= 0]).tolist():
            if element // block != target:
                need.setdefault((element // block, target), []).append(element % block)
    around = [[e for e in sorted(need) if (e[0] - e[1]) % parts == k] for k in range(1, parts)]
    choices = [[pairs for pairs in around if pairs], coloured(sorted(need))]
    pairs = min(choices, key=lambda found: sum(max(len(need[e]) for e in pairs) for pairs in found))
    rounds = tuple(_round(edges, need, parts) for edges in pairs)
    if rounds and sum(r.length for r in rounds) >= (parts - 1) * block:
        return Exchange((), tuple(map(tuple, table.tolist())), True)
    place: list[dict[int, int]] = [{p * block + i: i for i in range(block)} for p in range(parts)]
    start = block
    for r in rounds:
        for source, target in r.pairs:
            for k, i in enumerate(need[source, target]):
                place[target][source * block + i] = start + k
        start += r.length
    tables = [[place[p][e] if e >= 0 else int(e) for e in row] for p, row in enumerate(table)]
    _zeros_from_rounds(tables, rounds, block)
    return Exchange(rounds, tuple(map(tuple, tables)), False)


def _zeros_from_rounds(tables: list[list[int]], rounds: Sequence[Round], block: int) -> None:
    """Zeros are had from a permute too, by the devices that are nobody's target: then all devices have one table."""
    ends = list(itertools.accumulate((r.length for r in rounds), initial=block))
    for k, column in enumerate(zip(*tables, strict=True)):
        entries = set(column) - {ANY}
        if ZERO not in entries or len(entries) != 2 or (place := max(entries)) < block:
            continue
        targets = {t for _, t in rounds[next(r for r, end in enumerate(ends[1:]) if place < end)].pairs}
        if not any(column[t] == ZERO for t in targets):
            for row in tables:
                row[k] = place if row[k] == ZERO else row[k]


def _round(edges: Sequence[tuple[int, int]], need: dict[tuple[int, int], list[int]], parts: int) -> Round:
    length = max(len(need[e]) for e in edges)
    sent = [(ANY,) * length] * parts
    for source, target in edges:
        mine = need[source, target]
        sent[source] = (*mine, *(ANY,) * (length - len(mine)))
    return Round(tuple(edges), tuple(sent))


def _alike(tables: Sequence[Sequence[int]]) -> list[int] | None:
    """One table for all devices, where theirs differ only in entries that nobody reads."""
    columns = [{e for e in column if e != ANY} for column in zip(*tables, strict=True)]
    return [min(c, default=ANY) for c in columns] if all(len(c) < 2 for c in columns) else None


def _taken_by_device(parts: Sequence[Any], dim: int, tables: Sequence[Sequence[int]], here: Any) -> Any:
    """The elements that each device's own table says."""
    same = _alike(tables)
    if same is not None:
        return taken(parts, dim, same)
    x = lax.concatenate(list(parts), dim) if len(parts) > 1 else parts[0]
    table = np.asarray(tables)
    index = jnp.asarray(np.maximum(table, 0).astype(np.int32))[here]
    out = jnp.take(x, index, axis=dim, mode="clip")
    return _zeroed(out, dim, jnp.asarray(table == ZERO)[here]) if (table == ZERO).any() else out


def rearranged(eqn, ins, outs) -> OpRule:
    """The other dims pass through; along the one that the table is for devices exchange what their blocks are made of."""
    dim, runs, kind = eqn.params["dimension"], eqn.params["runs"], exchange_kind(eqn)
    r = OpRule([], [])
    operand = tuple((r.factor(n, kind if d == dim else "pass_through"),) for d, n in enumerate(ins[0]))
    made = r.factor(outs[0][dim], kind)
    r.ins, r.outs = [operand], [(*operand[:dim], (made,), *operand[dim + 1 :])]
    (source,) = operand[dim]
    r.name_links.append(NameLink(source, made))
    if kind == "permutation":
        r.sharded_like.append((source, made))

    def sends(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> list[Send]:
        (shape,), why, dtype = shapes, "what lies in another block", eqn.invars[0].aval.dtype
        found = exchange(ins[0][dim], parts[source], runs)
        if found.gather:
            return [Send("all-gather", (source,), shape, dtype, why)]
        pieces = [(*shape[:dim], turn.length, *shape[dim + 1 :]) for turn in found.rounds]
        return [Send("collective-permute", (source,), piece, dtype, why) for piece in pieces]

    r.sends = sends
    return r


def _local_rearrange(at: LocalOp, x: Any) -> list[Any]:
    dim, runs = at.params["dimension"], at.params["runs"]
    factors = at.rule.ins[0][dim]
    axes = at.of(factors)
    if not axes:
        return [taken([x], dim, table_of(runs).tolist())]
    here = axis_index(axes)
    found = exchange(at.eqn.invars[0].aval.shape[dim], at.parts(factors), runs)
    if found.gather:
        parts = [lax.all_gather(x, axes, axis=dim, tiled=True)]
    else:
        sent = [_taken_by_device([x], dim, turn.sent, here) for turn in found.rounds]
        parts = [x, *(permute(y, axes, turn.pairs) for y, turn in zip(sent, found.rounds, strict=True))]
    return [_taken_by_device(parts, dim, found.tables, here)]


register("rearrange", rule=rearranged, local=_local_rearrange, fusible=True, pinned=True)
