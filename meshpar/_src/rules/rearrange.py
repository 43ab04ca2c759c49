"""``rearrange``: selects elements along one dim by a constant table, as rolls, permutations and slices of any size do.

Traced programs do not contain this primitive. :mod:`program.divisible_rewrite` makes it from slices, concatenations and
lookups by constants along a split dim: one table composes several of them, and shows which elements every device needs of the
others.

Example: ``jnp.roll(x, 1)`` of 8 elements has the table ``[7, 0, 1, 2, 3, 4, 5, 6]``. In 4 shards, device p needs element ``2p -
1`` of the device before it: one collective permute of one element.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..iterables import grouped
from .halo import cheapest_permutes
from .local import LocalOp
from .registry import register
from .rule import OpRule, exchange_kind
from .spmd import Axes, Send, Shapes, axis_index, exchange_sends, permute

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


rearrange_p = Primitive("rearrange")


def rearrange(x: Any, dim: int, table: Sequence[int] | np.ndarray) -> Any:
    """``x[..., table, ...]`` along a dim, with zeros for :data:`ZERO` entries, and any values for :data:`ANY` entries."""
    return rearrange_p.bind(x, dimension=dim, runs=runs_of(table))


def _impl(x: Any, *, dimension: int, runs: Runs) -> Any:
    return taken([x], dimension, table_of(runs).tolist())


def _abstract(x: Any, *, dimension: int, runs: Runs) -> Any:
    return x.update(shape=(*x.shape[:dimension], sum(n for _, _, n in runs), *x.shape[dimension + 1 :]))


def _transpose(ct: Any, x: Any, **table: Any) -> tuple[Any, ...]:
    return jax.linear_transpose(functools.partial(_impl, **table), x.aval)(ct)


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
    """One collective permute.

    Attributes:
      pairs: the (source, target) devices.
      sent: for every device, the elements of its shard that it sends; :data:`ANY` after the last, where others send more.
    """

    pairs: tuple[tuple[int, int], ...]
    sent: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        return len(self.sent[0])


@dataclass(frozen=True, slots=True)
class Exchange:
    """The collectives that give every device the elements of its shard of a result, whose elements are elements of one
    operand, at positions given by a table.

    :func:`exchange` makes it. A result in which device 0 needs element 5, which device 1 has, needs a round with the
    pair (1, 0).

    Attributes:
      rounds: the collective permutes, in order.
      tables: for every device and every element of its shard of the result, the index of this element in the
          concatenation of the device's own shard and the arrays received in the rounds; if ``gather``, its index in the
          all-gathered operand.
      gather: an all-gather replaces the rounds, since it sends no more elements.
    """

    rounds: tuple[Round, ...]
    tables: tuple[tuple[int, ...], ...]
    gather: bool


@functools.lru_cache(maxsize=1024)
def exchange(size: int, shards: int, runs: Runs) -> Exchange:
    """The exchange that sends the fewest elements: one permute per distance modulo ``shards``, the fewest permutes, or a gather.

    Args:
      size: of the operand's dim.
      shards: number of shards of the operand and of the result.
      runs: the table.
    """
    table, block = table_of(runs).reshape(shards, -1), size // shards
    taken_by = [(target, e) for target, row in enumerate(table) for e in np.unique(row[row >= 0]).tolist()]
    need = grouped(((e // block, target), e % block) for target, e in taken_by if e // block != target)
    chosen = cheapest_permutes({e: len(elements) for e, elements in need.items()}, lambda e: (e[0] - e[1]) % shards)
    rounds = tuple(_round(edges, need, shards) for edges in chosen)
    if rounds and sum(r.length for r in rounds) >= (shards - 1) * block:
        return Exchange((), tuple(map(tuple, table.tolist())), True)
    position: list[dict[int, int]] = [{p * block + i: i for i in range(block)} for p in range(shards)]
    start = block
    for r in rounds:
        for source, target in r.pairs:
            for k, i in enumerate(need[source, target]):
                position[target][source * block + i] = start + k
        start += r.length
    tables = [[position[p][e] if e >= 0 else int(e) for e in row] for p, row in enumerate(table)]
    _zeros_from_rounds(tables, rounds, block)
    return Exchange(rounds, tuple(map(tuple, tables)), False)


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


def _round(edges: Sequence[tuple[int, int]], need: dict[tuple[int, int], list[int]], shards: int) -> Round:
    """The permute for some (source, target) pairs; ``need`` has the elements of the source's shard for each."""
    length = max(len(need[e]) for e in edges)
    sent = [(ANY,) * length] * shards
    for source, target in edges:
        elements = need[source, target]
        sent[source] = (*elements, *(ANY,) * (length - len(elements)))
    return Round(tuple(edges), tuple(sent))


def _common_table(tables: Sequence[Sequence[int]]) -> list[int] | None:
    """One table for all devices, if theirs differ in :data:`ANY` entries only; else None."""
    columns = [{e for e in column if e != ANY} for column in zip(*tables, strict=True)]
    return [min(c, default=ANY) for c in columns] if all(len(c) < 2 for c in columns) else None


def _taken_by_device(arrays: Sequence[Any], dim: int, tables: Sequence[Sequence[int]], device: Any) -> Any:
    """The elements of this device's table, from arrays that are concatenated along a dim."""
    table = _common_table(tables)
    return _gathered(arrays, dim, np.asarray(tables), device) if table is None else taken(arrays, dim, table)


def rearranged(eqn, ins, outs) -> OpRule:
    """The rule of ``rearrange``: other dims pass through; along the dim of the table, ``[n] → [m]`` split over the same
    axes, devices exchange elements."""
    dim, runs, kind = eqn.params["dimension"], eqn.params["runs"], exchange_kind(eqn)
    r = OpRule()
    operand = r.factors(ins[0], kind, (dim,))
    (source,) = operand[dim]
    made = r.follower(source, outs[0][dim], kind)
    r.ins, r.outs = [operand], [(*operand[:dim], (made,), *operand[dim + 1 :])]

    def sends(shapes: Shapes, axes: Axes, sizes: Mapping[str, int]) -> list[Send]:
        by = exchange(ins[0][dim], math.prod(sizes[a] for a in axes[source]), runs)
        lengths = None if by.gather else [step.length for step in by.rounds]
        return exchange_sends(shapes[0], dim, source, eqn.invars[0].aval.dtype, lengths, "elements of other shards")

    r.sends = sends
    return r


def _local_rearrange(op: LocalOp, x: Any) -> list[Any]:
    """The shard of a rearranged array, ``[n / shards] → [m / shards]`` along ``params["dimension"]``; ``[shard]``.

    ``params["runs"]`` gives the index in the operand of each of the m elements. Elements of other shards are received by collective
    permutes, or selected from the all-gathered array.
    """
    dim, runs = op.params["dimension"], op.params["runs"]
    factors = op.rule.ins[0][dim]
    axes = op.axes_of(factors)
    if not axes:
        return [taken([x], dim, table_of(runs).tolist())]
    device = axis_index(axes)
    by = exchange(op.eqn.invars[0].aval.shape[dim], op.shard_count(factors), runs)
    if by.gather:
        arrays = [lax.all_gather(x, axes, axis=dim, tiled=True)]
    else:
        sent = [_taken_by_device([x], dim, step.sent, device) for step in by.rounds]
        arrays = [x, *(permute(y, axes, step.pairs) for y, step in zip(sent, by.rounds, strict=True))]
    return [_taken_by_device(arrays, dim, by.tables, device)]


register("rearrange", rule=rearranged, local=_local_rearrange, fusible=True, pinned=True)
