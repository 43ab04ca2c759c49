"""Slices, gathers and scatters at indices that are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import JaxprEqn

from ..masks import global_index, owned_scatter, sharded_start
from ..relation import Context, Rel, not_partial, out_dtype, out_shape, require
from ..term import Term, frozen, is_zero, number_of
from .contract import together
from .shape import sliced
from .table import lemma


@lemma("dynamic_slice")
def dynamic_slice(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """At n times the index of the device, a slice of n elements is its block. At another index, which all devices have, it is a
    slice of a dim that is not sharded."""
    x, *starts = rels
    not_partial(starts, "an index")
    for d, (start, n) in enumerate(zip(starts, eqn.params["slice_sizes"], strict=True)):
        if n == x.shape[d] or x.term.shape[d] == 1:
            x = replace(x, shape=(*x.shape[:d], n, *x.shape[d + 1 :]))
            continue
        number = number_of(start.term)
        if number is not None:
            x = sliced(ctx, x, d, min(max(int(number), 0), x.shape[d] - n), n)
            continue
        axes = sharded_start(ctx, start.term, n, x.shape[d]) if start.term.axes else None
        shape = (*x.shape[:d], n, *x.shape[d + 1 :])
        if axes is not None:
            require(not set(axes) & x.varying, "a block, over axes along which the value differs already", refused=True)
            x = replace(x, shape=shape, spec=tuple((*s, *axes) if k == d else s for k, s in enumerate(x.spec)))
            continue
        require(not start.term.axes, "a slice at an offset of the device that is not its block")
        require(not x.spec[d], f"a slice at a computed index of dim {d}, which is sharded over {x.spec[d]}")
        sizes = (*x.term.shape[:d], n, *x.term.shape[d + 1 :])
        x = x.of(ctx.terms.make("dynamic_slice", d, (x.term, start.term), sizes, x.term.dtype), shape, x.spec)
    return [x]


@lemma("dynamic_update_slice")
def dynamic_update_slice(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """An update of elements at an index that all devices have, along dims that are not sharded."""
    x, update, *starts = rels
    not_partial(starts, "an index")
    partial = update if update.partial else x if x.partial else None
    for r in (x, update):
        same = partial is None or (r.partial, r.kind) == (partial.partial, partial.kind) or is_zero(r.term)
        require(same, "an update of a partial value with one that is not", refused=True)
    dims = [d for d in range(len(x.shape)) if x.shape[d] != update.shape[d]]
    x, update = ctx.expanded(x, dims), ctx.expanded(update, dims)
    shape, spec, at = list(x.term.shape), list(x.spec), []
    for d in range(len(x.shape)):
        if d in dims:
            require(not x.spec[d] and not update.spec[d], f"an update of dim {d}, which is sharded over {x.spec[d]}")
            at.append(starts[d].term)
        else:
            shape[d], spec[d] = together((x, update), (d, d), "an updated dim")
    require(not any(s.axes for s in at), "an update at an index that depends on the device")
    term = ctx.terms.make("dynamic_update_slice", tuple(dims), (x.term, update.term, *at), shape, x.term.dtype)
    return [(partial or x).of(term, x.shape, spec)]


@lemma("gather")
def gather(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Dims that are complete in each slice, and dims of the indices, are carried along; indexed dims are not sharded.

    Of an indexed dim that is sharded, the result is the term ``gather_block``: rows of the device's block, at an index that
    depends on the device. A mask makes it a partial value (:func:`masks.owned_gather`).
    """
    x, index = rels
    not_partial([index], "an index")
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    indexed, batching = numbers.start_index_map, numbers.operand_batching_dims
    require(not index.spec[-1], "a sharded vector of indices")
    sizes = [int(n) for n in p["slice_sizes"]]
    full = {d for d in range(len(x.shape)) if d not in indexed and d not in batching and sizes[d] == x.shape[d]}
    x, index = (
        ctx.expanded(x, [d for d in range(len(x.shape)) if d not in full and d not in batching]),
        ctx.expanded(index, [len(index.shape) - 1]),
    )
    blocks = [d for d in range(len(x.shape)) if x.spec[d] and d not in full and d not in batching]
    shape = [1] * len(out_shape(eqn))
    spec: list[tuple[str, ...]] = [()] * len(out_shape(eqn))
    windows = [d for d in range(len(x.shape)) if d not in numbers.collapsed_slice_dims and d not in batching]
    for o, d in zip(numbers.offset_dims, windows, strict=True):
        shape[o], spec[o] = (x.term.shape[d], x.spec[d]) if d in full else (sizes[d], ())
    batch = [o for o in range(len(shape)) if o not in numbers.offset_dims]
    for k, o in enumerate(batch):
        if k in numbers.start_indices_batching_dims:
            d = batching[numbers.start_indices_batching_dims.index(k)]
            shape[o], spec[o] = together((x, index), (d, k), "a batch dim of a gather")
        else:
            shape[o], spec[o] = index.term.shape[k], index.spec[k]
    known = {k: str(v) for k, v in p.items() if k in ("fill_value", "mode")}
    known |= {"numbers": numbers, "sizes": tuple(0 if d in full else n for d, n in enumerate(sizes))}
    params, op, dtype = frozen(known), "gather", out_dtype(eqn)
    if blocks:
        (d,) = blocks if len(blocks) == 1 else (-1,)
        require(d in numbers.collapsed_slice_dims and tuple(indexed) == (d,), "a gather along several sharded dims")
        require(
            not set(x.spec[d]) & index.sharded, "a gather at indices that are sharded as the operand is", refused=True
        )
        params, op = (x.spec[d], d, x.shape[d], params, tuple(batch)), "gather_block"
        require(bool(index.term.axes), f"a gather along dim {d}, which is sharded over {x.spec[d]}", refused=True)
    else:
        require(not index.term.axes, "a gather at indices that depend on the device")
    term = ctx.terms.make(op, params, (x.term, index.term), shape, dtype)
    return [x.of(term, out_shape(eqn), spec)]


@lemma("scatter-add", "scatter_add", "scatter", "scatter-mul", "scatter-min", "scatter-max")
def scatter(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Updates at indices along dims that are not sharded, or at indices relative to the device's block, which drop the others.
    Updates of which each device has some are partial sums, added to 0 or to a partial sum."""
    x, index, update = rels
    not_partial([index], "an index")
    p, numbers, name = eqn.params, eqn.params["dimension_numbers"], eqn.primitive.name
    indexed, batching = numbers.scatter_dims_to_operand_dims, numbers.operand_batching_dims
    require(not index.spec[-1], "a sharded vector of indices")
    windows = [d for d in range(len(x.shape)) if d not in numbers.inserted_window_dims and d not in batching]
    index = ctx.expanded(index, [len(index.shape) - 1])
    adds = name in ("scatter-add", "scatter_add")
    shape, spec, partial_over = list(x.term.shape), list(x.spec), set(update.partial)
    for o, d in zip(numbers.update_window_dims, windows, strict=True):
        if update.shape[o] == x.shape[d] and d not in indexed:
            shape[d], spec[d] = together((x, update), (d, o), "a window of a scatter")
        else:
            x, update = ctx.expanded(x, [d]), ctx.expanded(update, [o])
            shape[d] = x.term.shape[d]
            require(not x.spec[d] and not update.spec[o], "a sharded window of a scatter")
    batch = [o for o in range(len(update.shape)) if o not in numbers.update_window_dims]
    for k, o in enumerate(batch):
        if k in numbers.scatter_indices_batching_dims:
            d = batching[numbers.scatter_indices_batching_dims.index(k)]
            shape[d], spec[d] = together((x, index, update), (d, k, o), "a batch dim of a scatter")
        else:
            _, axes = together((index, update), (k, o), "a dim of the updates of a scatter")
            partial_over |= set(axes)
    known = {"mode": str(p["mode"]), "numbers": numbers}
    others = [d for d in range(len(x.shape)) if d in numbers.inserted_window_dims]
    x = ctx.expanded(x, [d for d in others if not index.term.axes])
    local = index.term
    if local.axes:
        require(len(indexed) == 1 and indexed[0] in others, "a scatter along several dims")
        (d,) = indexed
        axes = x.spec[d] or tuple(a for a in ctx.sizes if a in local.axes)
        require(x.spec[d] == axes or x.term.shape[d] == 1, "a scatter into blocks over other axes", refused=True)
        n = x.shape[d] * ctx.size(axes)
        term_x = ctx.terms.expand(x.term, d, n)
        shape[d], spec[d] = n, axes
        args = lambda i: (term_x, i, update.term)  # noqa: E731
        found = next(
            (
                term
                for i, term in global_index(
                    ctx, local, lambda i: ctx.terms.make(name, frozen(known), args(i), shape, out_dtype(eqn))
                )
                if owned_scatter(ctx, axes, x.shape[d], str(p["mode"]), local, i)
            ),
            None,
        )
        require(found is not None, "a scatter at indices that depend on the device")
        term = found
    else:
        for d in others:
            require(not x.spec[d], f"a scatter along dim {d}, which is sharded over {x.spec[d]}", refused=True)
            shape[d] = x.term.shape[d]
        term = ctx.terms.make(name, frozen(known), (x.term, local, update.term), shape, out_dtype(eqn))
    assert term is not None
    over = frozenset(partial_over)
    if over or x.partial:
        require(adds and (is_zero(strip(x.term)) or x.partial == over), f"{name} of updates that devices have parts of")
    return [
        Rel(term, x.shape, tuple(a if n != 1 else () for a, n in zip(spec, term.shape, strict=True)), over | x.partial)
    ]


def strip(term: Term) -> Term:
    """A term without its expansions."""
    while term.op == "expand":
        (term,) = term.args
    return term
