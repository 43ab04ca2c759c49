"""Slices, gathers and scatters at indices that are computed."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from ....compat.jax import aval_of
from ..device_values import INTEGERS, Rows, axes_of, constant_rows, evaluate, leaves, owned
from ..laws import ALL, act, axes_text, not_partial, partial_of
from ..non_block_shards import take_positions, update_fragments
from ..relation import Context, Rel, axes_of_dims, out_dtype, out_shape, require
from ..term import Term, frozen, is_zero, number_of
from .shape import sliced
from .table import lemma


@lemma("dynamic_slice")
def dynamic_slice(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """At an index of the device alone, a slice is a fragment; at n times the index of the device, one of n elements is its
    block. At another index it is a slice of a dim that is not sharded."""
    x, *starts = rels
    not_partial(starts, "an index")
    for d, (start, n) in enumerate(zip(starts, eqn.params["slice_sizes"], strict=True)):
        shape = x.resized(d, n)
        if n == x.shape[d] or x.term.shape[d] == 1:
            x = replace(x, shape=shape)
        elif start.number is not None:
            x = sliced(ctx, x, d, min(max(int(start.number), 0), x.shape[d] - n), n)
        elif not leaves(start.term):
            at, axes = starts_of(ctx, start, x.shape[d] - n)
            require(not set(axes) & x.partial, "fragments, over axes along which the value is partial", refused=True)
            x = take_positions(ctx, x, d, at[:, None] + np.arange(n), axes)
        elif x.spec[d] and start.term.axes and n == 1 and not x.fragmented:  # of the block of the device
            own, sizes = (x.spec[d], x.shape[d], d), [1 if k == d else m for k, m in enumerate(x.term.shape)]
            x = x.of(ctx.terms.make("slice_block", own, (x.term, start.term), sizes, x.term.dtype), shape, x.spec)
        else:
            aval = aval_of(eqn.outvars[0]).update(shape=shape)
            ins, partial = [range(len(shape)), ()], x if x.partial else None
            start = unclamped(start, x.shape[d] - n)
            (x,) = act(ctx, eqn, [x, start], ins=ins, unsharded=[d], params=d, partial=partial, avals=[aval])
    return [x]


def unclamped(start: Rel, last: int) -> Rel:
    """An index that is moved to 0 … ``last``, without limits beyond these that it had before."""
    term = start.term
    while term.op == "clamp":
        low, inner, high = term.args
        first, end = number_of(low), number_of(high)
        if first is None or end is None or first > 0 or end < last:
            break
        term = inner
    return replace(start, term=term)


def starts_of(ctx: Context, start: Rel, last: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """(the index at which each device along some axes begins, moved back to the last one that is possible; the axes)."""
    axes = axes_of(ctx, start.term)
    (starts,) = evaluate(ctx, axes, [start.term])
    return np.clip(starts[:, 0].astype(np.int64), 0, last), axes


@lemma("dynamic_update_slice")
def dynamic_update_slice(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """An update of elements along dims that are not sharded, or in fragments; the others are carried along."""
    x, update, *starts = rels
    not_partial(starts, "an index")
    dims = [d for d in range(len(x.shape)) if x.shape[d] != update.shape[d]]
    if len(dims) == 1 and (x.spec[dims[0]] or update.spec[dims[0]] or starts[dims[0]].term.axes):
        (d,) = dims
        return [update_fragments(ctx, x, update, d, *starts_of(ctx, starts[d], x.shape[d] - update.shape[d]))]
    partial = partial_of([x, update], "an update")
    at = [unclamped(starts[d], x.shape[d] - update.shape[d]) for d in dims]
    return act(ctx, eqn, [x, update, *at], unsharded=dims, params=tuple(dims), partial=partial)


@lemma("add_row")
def add_row(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """A row [k, …] that is added to one row of [n, k, …], for each of k parts at an index and by a condition of its own; linear."""
    total, row, index, where = rels
    not_partial([index, where], "an index or a condition")
    rank = len(total.shape)
    ins = [range(rank), range(1, rank), [1] * len(index.shape), [1]]
    return act(ctx, eqn, rels, ins=ins, unsharded=[0], partial=partial_of([total, row], "a row that is added", "sum"))


def labels_of(
    rank: int, dropped: Sequence[int], batching: dict[int, int], windows: Sequence[int], size: int
) -> list[list[Any]]:
    """The labels of the dims of an array, of the indices into it, and of its windows (the result of a gather, the updates of a
    scatter): the number of the array's dim, or ``b0``, ``b1``, … of a batch dim of the indices.

    Args:
      rank: of the array.
      dropped: its dims that windows do not have.
      batching: its batch dims → the batch dims of the indices.
      windows: the other dims of the windows than batch dims.
      size: the rank of the windows.
    """
    batch = [f"b{k}" for k in range(size - len(windows))]
    array = [batch[batching[d]] if d in batching else d for d in range(rank)]
    kept, rest = iter([d for d in range(rank) if d not in dropped and d not in batching]), iter(batch)
    return [array, [*batch, "vector"], [next(kept) if o in windows else next(rest) for o in range(size)]]


def moving(indexed: Sequence[int], parts: Container[int], mode: str) -> set[int]:
    """The indexed dims along which windows may begin at several elements: an index that is clipped is 0 for a complete dim."""
    return {d for d in indexed if d in parts or "CLIP" not in mode}


@lemma("gather")
def gather(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Dims that are complete in each slice, and dims of the indices, are carried along; indexed dims are not sharded.

    Of an indexed dim that is sharded, the result is the term ``gather_block``: rows of the device's block, at an index that
    depends on the device. A mask makes it a partial value (:func:`device_values.gathered`).
    """
    x, index = rels
    not_partial([index], "an index")
    p, n, sizes = eqn.params, eqn.params["dimension_numbers"], list(map(int, eqn.params["slice_sizes"]))
    taken = rows_at(ctx, eqn, x, index)
    if taken is not None:
        return [taken]
    require(not x.fragmented, "a gather of fragments at computed indices")
    batching = dict(zip(n.operand_batching_dims, n.start_indices_batching_dims, strict=True))
    rank = len(out_shape(eqn))
    *ins, out = labels_of(len(x.shape), n.collapsed_slice_dims, batching, n.offset_dims, rank)
    parts = {d for d, m in enumerate(sizes) if m != x.shape[d]}
    unsharded = {"vector", *n.collapsed_slice_dims, *parts, *moving(n.start_index_map, parts, str(p["mode"]))}
    best = extremum_of_blocks(ctx, x, index, ins[0], out)
    if best is not None:
        return [replace(best, shape=out_shape(eqn))]
    known = {k: str(v) for k, v in p.items() if k in ("fill_value", "mode")}
    known |= {"numbers": n, "sizes": tuple(m if d in unsharded else 0 for d, m in zip(ins[0], sizes, strict=True))}
    if x.partial and x.kind == "sum" and "FILL" in known["mode"] and p.get("fill_value") != 0:
        nan = p.get("fill_value") is None and not out_dtype(eqn).startswith(("int", "uint", "bool"))
        require(nan, "a gather of a partial sum, and numbers")  # a sum of any number of NaN is NaN
    op, params = "gather", frozen(known)
    for d in [d for d in ins[0] if d in unsharded and x.spec[d]]:
        axes = x.spec[d]
        rows = tuple(n.start_index_map) == (d,) and d in n.collapsed_slice_dims
        require(rows, "a gather along several sharded dims")
        require(not set(axes) & index.sharded, "a gather at indices that are sharded as the operand is", refused=True)
        require(
            bool(index.term.axes) or x.shape[d] == 1, f"a gather along dim {d}, which is sharded over {axes_text(axes)}"
        )
        op, params = "gather_block", (axes, x.shape[d], params, tuple(o for o in range(rank) if o not in n.offset_dims))
        unsharded.remove(d)
    return act(ctx, eqn, rels, ins=ins, outs=[out], unsharded=unsharded, params=params, op=op, partial=x)


def rows_at(ctx: Context, eqn: JaxprEqn, x: Rel, index: Rel) -> Rel | None:
    """Rows of a block at constant indices, of which devices may have other ones."""
    at = constant_rows(index.term, eqn.params["dimension_numbers"], len(x.shape))
    if at is None or index.spec[1] or index.fragmented:
        return None
    d, at = eqn.params["dimension_numbers"].start_index_map[0], at.reshape(-1, index.shape[0])
    inside = bool(((at >= 0) & (at < x.shape[d])).all())
    if not inside or x.term.shape[d] == 1 or out_shape(eqn) != x.resized(d, at.shape[1]):
        return None
    return take_positions(ctx, x, d, at, index.spec[0])


def extremum_of_blocks(ctx: Context, x: Rel, index: Rel, labels: Sequence[Any], out: Sequence[Any]) -> Rel | None:
    """x[argmax(x)], along one dim, is the extremum of a block; the index of the first block with the largest one, and in it of the
    first largest element, is argmax(x)."""
    terms, at = ctx.terms, index.term
    while at.op == "reshape" or (at.op == "convert" and "8" not in at.dtype and at.args[0].dtype in INTEGERS):
        (at,) = at.args
    along = [k for k, pair in enumerate(itertools.zip_longest(labels, out)) if pair[0] != pair[1]]
    if len(along) != 1 or len(out) != len(labels):
        return None
    (d,) = along
    sizes = [1 if k == d else m for k, m in enumerate(x.term.shape)]
    spec = tuple(() if k == d else s for k, s in enumerate(x.spec))
    if index.spec[:-1] != spec or x.partial:
        return None
    if at.op == "arg_block" and at.args[0] is x.term and at.params == (x.spec[d], x.shape[d], at.params[2], d):
        return x.of(terms.make("best_block", at.params, (x.term,), sizes, x.term.dtype), x.shape, spec)
    if at.op not in ("argmax", "argmin") or at.params != (d,) or not at.args[0].op == x.term.op == "devices":
        return None
    best, local, (axes, along_dim) = at.args[0].args[0], leaves(x.term.args[0]), x.term.params
    if at.args[0].params != (axes, d) or best.op != "best_block" or len(local) != 1 or along_dim != d:
        return None
    n, (value,) = best.params[1], local
    if best.params != (axes, n, at.op, d):
        return None
    first = n * np.arange(ctx.size(axes))[:, None] + np.arange(n)
    same = value is terms.make("arg_block", best.params, best.args, value.shape, value.dtype)
    if not same or (evaluate(ctx, axes, x.term.args, value, np.arange(n))[0] != first).any():
        return None
    found = terms.make(at.op, (d,), best.args, value.shape, value.dtype)
    return x.of(terms.reshape(found, sizes), x.shape, spec)


@lemma("scatter-add", "scatter_add", "scatter", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def scatter(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Updates at indices along dims that are not sharded, or at indices relative to the device's block, which drop the others.
    Updates of which each device has some are partial sums, added to 0 or to a partial sum."""
    x, index, update = rels
    not_partial([index], "an index")
    n, mode, name = eqn.params["dimension_numbers"], str(eqn.params["mode"]), eqn.primitive.name
    batching = dict(zip(n.operand_batching_dims, n.scatter_indices_batching_dims, strict=True))
    ins = labels_of(len(x.shape), n.inserted_window_dims, batching, n.update_window_dims, len(update.shape))
    parts = {d for d, m in zip(ins[2], update.shape, strict=True) if d in ALL and m != x.shape[d]}
    indexed = n.scatter_dims_to_operand_dims
    unsharded = {"vector", *n.inserted_window_dims, *parts, *moving(indexed, {*parts, *n.inserted_window_dims}, mode)}
    local = index.term

    def at(local: Term, mode: str) -> Rel:
        operands, params = [x, replace(index, term=local), update], frozen({"mode": mode, "numbers": n})
        return act(ctx, eqn, operands, ins=ins, outs=ins[:1], unsharded=unsharded, params=params)[0]

    if local.axes:
        (d, *more) = n.scatter_dims_to_operand_dims
        axes = x.spec[d] or axes_of(ctx, local)
        require(d in n.inserted_window_dims and not more, "a scatter along several dims")
        require(x.spec[d] == axes or x.term.shape[d] == 1, "a scatter into blocks over other axes", refused=True)
        unsharded.remove(d)
        term = ctx.terms.expand(x.term, d, x.shape[d] * ctx.size(axes))
        x = replace(x, term=term).placed({d: axes})
        modes = [str(m) for m in GatherScatterMode] if mode == str(GatherScatterMode.FILL_OR_DROP) else []
        value = owned(ctx, Rows(axes, x.shape[d], local), modes, lambda i, mode: at(i, mode).term)
        require(value is not None, "a scatter at indices that depend on the device")
        result = replace(at(local, mode), term=value)
    else:
        result = at(local, mode)
    dims = dict(zip(ins[1] + ins[2], index.spec + update.spec, strict=True))
    dims |= {label: axes for label, axes in zip(ins[1], index.spec, strict=True) if axes}
    over = update.partial | axes_of_dims(axes for label, axes in dims.items() if label not in ins[0])
    if over or x.partial:
        sums = (
            name.endswith(("add", "sub")) and x.kind == update.kind == "sum" and (is_zero(x.term) or x.partial == over)
        )
        require(sums and x.partial <= over, f"{name} of updates that devices have parts of")
    return [replace(result, partial=over | x.partial)]
