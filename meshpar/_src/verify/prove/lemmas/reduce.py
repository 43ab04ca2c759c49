"""Reductions, cumulative ops, windows and sorts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from jax.extend.core import JaxprEqn

from ..relation import Context, Rel, aval_of, not_partial, out_dtype, out_shape, require
from ..term import frozen
from .shape import carried
from .table import lemma

KINDS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_or": "max", "reduce_and": "min"}


@lemma(*KINDS)
def reduction(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Σ over a sharded dim is the sum over devices of the sums of their blocks: partial over its axes. Along a dim where x is
    constant, Σ is n x."""
    (x,), axes, kind = rels, [int(a) for a in eqn.params["axes"]], KINDS[eqn.primitive.name]
    over = frozenset(a for d in axes for a in x.spec[d])
    require(not x.partial or x.kind == kind, f"{eqn.primitive.name} of a partial {x.kind}", refused=True)
    require(kind == "sum" or not x.partial & over, "a reduction over its own partial axes", refused=True)
    keep = [d for d in range(len(x.shape)) if d not in axes]
    varying = tuple(d for d in axes if x.term.shape[d] != 1)
    term, times = x.term, 1
    for d in axes:
        times *= x.shape[d] if x.term.shape[d] == 1 else 1
    if varying:
        shape = [1 if d in varying else n for d, n in enumerate(term.shape)]
        term = ctx.terms.make(eqn.primitive.name, varying, (term,), shape, term.dtype)
    if kind == "sum":
        term = ctx.terms.scale(term, Fraction(times))
    term = ctx.terms.convert(ctx.terms.reshape(term, [term.shape[d] for d in keep]), out_dtype(eqn))
    spec = tuple(x.spec[d] for d in keep)
    return [Rel(term, out_shape(eqn), spec, x.partial | over, kind if x.partial | over else "sum")]


@lemma("reduce_prod", "argmax", "argmin", "reduce_xor")
def along(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Reductions of dims that are not sharded; the other dims are carried along."""
    not_partial(rels, eqn.primitive.name)
    (x,), axes = rels, tuple(map(int, eqn.params["axes"]))
    for d in axes:
        require(not x.spec[d], f"it acts along dim {d}, which is sharded over {', '.join(x.spec[d])}")
    x = ctx.expanded(x, axes)
    keep = [d for d in range(len(x.shape)) if d not in axes]
    term = ctx.terms.make(eqn.primitive.name, axes, (x.term,), [x.term.shape[d] for d in keep], out_dtype(eqn))
    return [Rel(term, out_shape(eqn), tuple(x.spec[d] for d in keep))]


@lemma("cumsum", "cumlogsumexp", "cumprod", "cummax", "cummin")
def cumulative(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Along a dim that is not sharded; cumsum is linear."""
    if eqn.primitive.name != "cumsum" or rels[0].kind != "sum":
        not_partial(rels, eqn.primitive.name)
    return carried(ctx, eqn, rels[0], [eqn.params["axis"]], (eqn.params["axis"], eqn.params["reverse"]))


@lemma("sort")
def sort(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Along a dim that is not sharded; all operands are sharded alike along the others."""
    not_partial(rels, "sort")
    return jointly(ctx, eqn, rels, [eqn.params["dimension"]], frozen(eqn.params))


def jointly(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel], dims: Sequence[int], params: Any) -> list[Rel]:
    """Several operands of one shape, along dims that are not sharded."""
    rels = [ctx.expanded(r, range(len(r.shape))) if len(rels) > 1 else ctx.expanded(r, dims) for r in rels]
    for r in rels:
        require(r.spec == rels[0].spec, "operands sharded differently")
        require(not any(r.spec[d] for d in dims), "it acts along a dim that is sharded")
    out = []
    for k, var in enumerate(eqn.outvars):
        shape = [aval_of(var).shape[d] if d in dims else n for d, n in enumerate(rels[0].term.shape)]
        term = ctx.terms.make(eqn.primitive.name, (params, k), (r.term for r in rels), shape, aval_of(var).dtype)
        out.append(rels[0].of(term, aval_of(var).shape, rels[0].spec))
    return out


@lemma("top_k")
def top_k(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The largest elements of the last dim, which is not sharded."""
    not_partial(rels, "top_k")
    d = eqn.params.get("axis", len(rels[0].shape) - 1) % len(rels[0].shape)
    return jointly(ctx, eqn, rels, [d], frozen(eqn.params))


@lemma("reduce_window_max", "reduce_window_min", "reduce_window_sum", "reduce_window")
def window(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Along dims whose window has more than one element; these are not sharded."""
    not_partial(rels, eqn.primitive.name)
    p = eqn.params
    dims = [
        d for d in range(len(rels[0].shape))
        if (p["window_dimensions"][d], p["window_strides"][d], tuple(p["padding"][d]), p["base_dilation"][d]) != (1, 1, (0, 0), 1)
    ]  # fmt: skip
    require(eqn.primitive.name != "reduce_window", "a window with a reduction of its own")
    return carried(ctx, eqn, rels[0], dims, frozen(p))


@lemma("select_and_scatter_add", "select_and_gather_add")
def select_and_scatter(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The gradient of a window's maximum: along dims whose window has more than one element."""
    not_partial(rels, eqn.primitive.name)
    source, operand = rels
    p = eqn.params
    dims = [d for d in range(len(operand.shape)) if (p["window_dimensions"][d], p["window_strides"][d]) != (1, 1)]
    source, operand = (ctx.expanded(r, range(len(r.shape))) for r in (source, operand))
    require(source.spec == operand.spec, "operands sharded differently")
    require(not any(operand.spec[d] for d in dims), "a window along a dim that is sharded")
    k = 1 if eqn.primitive.name == "select_and_gather_add" else 0
    like = (source, operand)[1 - k]
    shape = [out_shape(eqn)[d] if d in dims else n for d, n in enumerate(like.term.shape)]
    term = ctx.terms.make(eqn.primitive.name, frozen(p), (source.term, operand.term), shape, out_dtype(eqn))
    return [replace(like, term=term, shape=out_shape(eqn))]
