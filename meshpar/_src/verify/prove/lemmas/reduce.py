"""Reductions, cumulative ops, windows and sorts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ....compat.jax import aval_of
from ..laws import act, not_partial, partial_of
from ..relation import Context, Fragments, Rel, Unverified, axes_of_dims, out_dtype, out_shape, require
from ..term import frozen, table_of
from ..windows import block_of_windows, candidates, reads, scattered
from .table import lemma

NEUTRAL = {
    "reduce_window_max": ("-inf",), "reduce_window_min": ("inf",), "reduce_window_sum": ("0.0", "0"),
    "select_and_scatter_add": ("-inf",),
}  # fmt: skip
"""Op of windows → the values outside of an array that do not change its results."""
KINDS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_or": "max", "reduce_and": "min"}
"""Reduction → the kind of its partial results; a disjunction of booleans is their maximum."""
NEUTRAL_OF = {"sum": ("0.0", "-0.0", "0"), "max": ("-inf", "False"), "min": ("inf", "True")}
"""Kind → the numbers that do not change a reduction."""


@lemma(*KINDS)
def reduction(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Σ over a sharded dim is the sum over devices of the sums of their blocks: partial over its axes. Along a dim where x is
    constant, Σ is n x."""
    return [reduced_along(ctx, rels[0], eqn.params["axes"], eqn.primitive.name, aval_of(eqn.outvars[0]))]


def reduced_along(ctx: Context, x: Rel, axes: Sequence[int], name: str, aval: Any) -> Rel:
    """A reduction along dims, whose result has a shape and a dtype."""
    kind, term, over = KINDS[name], x.term, axes_of_dims(x.spec[d] for d in axes)
    for d in axes:
        if isinstance(entry := x.spec[d], Fragments):
            term = ctx.terms.take(term, d, elements_once(entry, NEUTRAL_OF.get(kind, ()), kind != "sum"))
        elif term.op == "take" and term.params[0] == d:  # in any order
            term = ctx.terms.take(term.args[0], d, np.sort(table_of(term)))
    kept = [s for d, s in enumerate(x.spec) if d not in axes and isinstance(s, Fragments) and not s.complete]
    linear = kind == "sum" and all(s.zero_outside or s.fill is None for s in kept)  # also of incomplete sums
    require(not kept or linear, f"{name} of numbers outside of an array, or an extremum of incomplete sums")
    if name in ("reduce_or", "reduce_and") and str(aval.dtype) != "bool":
        kind = name.removeprefix("reduce_")  # of the bits of integers, which no extremum reduces
    require(not x.partial or x.kind == kind, f"{name} of a partial {x.kind}", refused=True)
    require(kind == "sum" or not x.partial & over, "a reduction over its own partial axes", refused=True)
    varying = tuple(d for d in axes if term.shape[d] != 1)
    require(kind == "sum" or all(x.shape[d] for d in axes if d not in varying), f"{name} of no elements")
    if varying:
        sizes = [1 if d in varying else n for d, n in enumerate(term.shape)]
        term = ctx.terms.make(name, varying, (term,), sizes, term.dtype)
    if kind == "sum":
        term = ctx.terms.scale(term, Fraction(math.prod(x.shape[d] for d in axes if d not in varying)))
    keep = [d for d in range(len(x.shape)) if d not in axes]
    term = ctx.terms.convert(ctx.terms.reshape(term, [term.shape[d] for d in keep]), aval.dtype)
    partial = x.partial | over
    return Rel(term, tuple(aval.shape), tuple(x.spec[d] for d in keep), partial, kind if partial else "sum")


def elements_once(entry: Fragments, neutral: Sequence[str], repeats: bool) -> np.ndarray:
    """The elements of fragments, in order, each of which one device has, once; ``repeats``: or several."""
    index = entry.array[..., 0].ravel()
    require(entry.origin is None, "a reduction of incomplete sums")
    require(entry.fill is None or entry.fill[1] in neutral, "a reduction of numbers outside of an array")
    found = np.unique(index[index >= 0])
    require(len(found) > 0 and (repeats or len(found) == (index >= 0).sum()), "a sum of elements that devices repeat")
    return found


@lemma("reduce")
def custom(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """A reduction of several arrays together, by any function, along dims that are not sharded."""
    n, rank, name = len(rels) // 2, len(rels[0].shape), eqn.primitive.name
    not_partial(rels, name)
    params, dims = {k: v for k, v in eqn.params.items() if k != "computation"}, eqn.params["dimensions"]
    ins, outs = [range(rank)] * n + [()] * n, [[d for d in range(rank) if d not in dims]] * n
    return act(ctx, eqn, rels, ins=ins, outs=outs, unsharded=dims, params=frozen(params))


@lemma(
    "reduce_prod", "reduce_xor", "argmax", "argmin", "cumsum", "cumlogsumexp", "cumprod", "cummax", "cummin", "sort", "top_k"
)  # fmt: skip
def along(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Ops along dims that are not sharded; the other dims are carried along. cumsum is linear, and cummax and cummin commute with
    an extremum of their kind over devices. The extremum of a block along a sharded dim is the term ``arg_block``
    (:func:`index.extremum_of_blocks`)."""
    x, name, p = rels[0], eqn.primitive.name, eqn.params
    kind = {"cumsum": "sum", "cummax": "max", "cummin": "min"}.get(name)
    partial = not_partial(rels, name) if kind is None else partial_of(rels, name, kind)
    if "axes" not in p:
        d = int(p.get("dimension", p.get("axis", -1))) % len(x.shape)
        return act(ctx, eqn, rels, unsharded=[d], params=frozen(p), partial=partial)
    axes = tuple(map(int, p["axes"]))
    keep = [d for d in range(len(x.shape)) if d not in axes]
    if name.startswith("arg") and x.spec[axes[0]]:
        own, sizes = (x.spec[axes[0]], x.shape[axes[0]], name, axes[0]), [x.term.shape[d] for d in keep]
        term = ctx.terms.make("arg_block", own, (x.term,), sizes, out_dtype(eqn))
        return [Rel(term, out_shape(eqn), tuple(x.spec[d] for d in keep))]
    return act(ctx, eqn, rels, outs=[keep], unsharded=axes, params=axes)


@lemma(*NEUTRAL, "reduce_window", "select_and_gather_add")
def window(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Reductions of windows, and their gradients: along dims whose window has more than one element, which are not sharded, or
    whose fragments have a block of the windows."""
    name = eqn.primitive.name
    not_partial(rels, name)
    p = eqn.params
    sizes = [p[key] for key in ("window_dimensions", "window_strides", "base_dilation") if key in p]
    windows = [*zip(*sizes, strict=True)]
    unsharded = [d for d, pad in enumerate(p["padding"]) if set(windows[d]) != {1} or tuple(pad) != (0, 0)]
    split = [d for d in unsharded if any(r.spec[d] for r in rels if r.shape)]
    if not split or name not in NEUTRAL:
        return act(ctx, eqn, rels, unsharded=unsharded, params=frozen(p))
    x, result, scatters = rels[-1], out_shape(eqn), name == "select_and_scatter_add"
    flat, neutral = [r.placed(dict.fromkeys(split, ())) for r in rels], NEUTRAL[name]
    require(not scatters or str(p["select_prim"]) == "ge", "a gradient of windows that select the smallest element")
    for term, found in candidates(ctx, name, dict(frozen(p)), [r.term for r in rels], split):
        (made,) = act(ctx, eqn, flat, unsharded=unsharded, term=term)
        counts = (rels[0].shape, rels[0].term.shape) if scatters else (result, term.shape)
        each = list(zip((p, found), (x.shape, x.term.shape), counts, strict=True))
        pairs = [[reads(q, d, r[d], c[d], p["window_dimensions"][d]) for q, r, c in each] for d in split]
        if scatters:
            require(len(split) == 1, "windows of fragments along several dims")
            (d,), ((local, full),) = split, pairs
            return [scattered(ctx, rels[0], made.placed({d: x.spec[d]}), term, d, local, full, neutral)]
        orders = [block_of_windows(ctx, x, d, a, b, neutral) for d, (a, b) in zip(split, pairs, strict=True)]
        if None not in orders:
            return [made.placed({d: order or () for d, order in zip(split, orders, strict=True)})]
    raise Unverified("windows of blocks or fragments that are not those of an op as written")
