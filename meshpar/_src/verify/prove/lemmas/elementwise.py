"""Ops whose result has at each index a function of the operands' elements at this index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ..masks import resolved, unordered
from ..relation import Context, Rel, Spec, not_partial, out_dtype, out_shape, require
from ..term import frozen, is_zero, number_of
from .table import lemma

UNARY = (
    "sign floor ceil round is_finite exp exp2 log log1p expm1 tanh logistic sin cos tan asin acos atan sinh cosh asinh acosh atanh "
    "sqrt rsqrt cbrt abs not erf erfc erf_inv lgamma digamma integer_pow square population_count clz real imag conj "
    "reduce_precision random_unwrap to_edtype from_edtype one_minus_square log2"
).split()
BINARY = (
    "rem pow atan2 nextafter xor shift_left shift_right_logical shift_right_arithmetic eq ne lt le gt ge complex and or "
    "lt_to le_to eq_to igamma igammac bessel_i0e bessel_i1e polygamma zeta regularized_incomplete_beta"
).split()
COMMUTATIVE = frozenset("add mul max min and or xor eq ne add_any eq_to".split())
DROPPED = frozenset(("sharding", "out_sharding", "weak_type", "new_dtype"))
"""Params that do not change the values, or that the dtype of the term has."""


def aligned(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> tuple[list[Rel], tuple[int, ...], Spec]:
    """(operands of the rank of the result, global shape of the term, spec): the operands that vary along a dim must be sharded
    alike there; scalars apply everywhere."""
    rank = len(out_shape(eqn))
    rels = [r if len(r.shape) == rank else lifted(ctx, r, rank) for r in rels]
    shape = [1] * rank
    spec: list[tuple[str, ...]] = [()] * rank
    for d in range(rank):
        varying = [r for r in rels if r.term.shape[d] != 1]
        found = {(r.term.shape[d], r.spec[d]) for r in varying}
        names = " and ".join(sorted("×".join(axes) or "no axis" for _, axes in found))
        require(len(found) <= 1, f"operands sharded differently along dim {d}: over {names}", refused=True)
        if found:
            (n, spec[d]) = found.pop()
            shape[d] = n
    return rels, tuple(shape), tuple(spec)


def lifted(ctx: Context, rel: Rel, rank: int) -> Rel:
    """A scalar as an array of a rank, constant along all dims."""
    require(not rel.shape, "operands of different ranks")
    return replace(rel, term=ctx.terms.reshape(rel.term, (1,) * rank), shape=(1,) * rank, spec=((),) * rank)


def params_of(eqn: JaxprEqn) -> Any:
    return frozen({k: v for k, v in eqn.params.items() if k not in DROPPED and v is not None})


def applied(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel], partial: Rel | None = None) -> list[Rel]:
    """The result of an elementwise op, partial as ``partial`` is."""
    op = {"add_any": "add"}.get(eqn.primitive.name, eqn.primitive.name)
    rels, shape, spec = aligned(ctx, eqn, rels)
    term = ctx.terms.make(op, params_of(eqn), (r.term for r in rels), shape, out_dtype(eqn), op in COMMUTATIVE)
    axes = partial.partial if partial else frozenset()
    return [resolved(ctx, Rel(term, out_shape(eqn), spec, axes, partial.kind if partial else "sum"), rels)]


@lemma(*UNARY, *BINARY)
def pointwise(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """block(f(x, y)) = f(block(x), block(y)). A disjunction of partial disjunctions is partial."""
    name = eqn.primitive.name
    if out_dtype(eqn) == np.bool_ and name in ("or", "and"):
        return monotone(ctx, eqn, rels, "max" if name == "or" else "min")
    if name == "ne" and rels[0] == rels[1] and rels[0].kind in ("max", "min"):  # isnan
        return applied(ctx, eqn, rels, replace(rels[0], kind=rels[0].kind + "*") if rels[0].partial else None)
    if name == "xor":  # x ^ n ^ n = x
        for x, n in (rels, rels[::-1]):
            if number_of(n.term) is not None and x.term.op == "xor" and not n.shape and not x.partial:
                bits = ctx.terms.reshape(n.term, (1,) * len(x.shape))
                left = [a for a in x.term.args if a is not bits]
                if len(left) == 1:
                    return [replace(x, term=left[0])]
    if any(r.kind.endswith("*") for r in rels):
        return applied(ctx, eqn, rels, image(rels))
    not_partial(rels, name)
    return applied(ctx, eqn, rels)


def image(rels: Sequence[Rel]) -> Rel:
    """The first of the operands of kind ``max*``: values f(x) of a partial maximum x, whose maximum is only known for the f of
    :func:`masks.ordered`, or that devices add of :func:`masks.bits_of`. All are images of values that are partial over the same
    axes, along which the others do not vary."""
    some = [r for r in rels if r.partial]
    for r in rels:
        same = (r.partial, r.kind) == (some[0].partial, some[0].kind) if r.partial else not r.varying & some[0].partial
        require(same, "images of different partial values", refused=True)
    return some[0]


@lemma("add", "add_any", "sub")
def linear(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Σ x + Σ y = Σ (x + y): both are partial over the same axes, or one is 0."""
    if eqn.primitive.name != "sub":
        for x, y in (rels, rels[::-1]):
            if is_zero(x.term) and y.term.axes | y.partial and y.shape == out_shape(eqn):
                return [y]
    return applied(ctx, eqn, rels, summed(rels, eqn.primitive.name))


def summed(rels: Sequence[Rel], op: str) -> Rel | None:
    """The first of the partial operands, which are all partial over the same axes; operands that are 0 are partial over any."""
    some = [r for r in rels if r.partial]
    for r in rels:
        if some and not is_zero(r.term):
            same = r.partial == some[0].partial and r.kind == some[0].kind == "sum"
            over = ", ".join(sorted(some[0].partial))
            require(
                same, f"{op} of a value that is partial over {over} and one that is not, or differently", refused=True
            )
    return some[0] if some else None


@lemma("max", "min")
def extremum(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """max(max_k x_k, y) = max_k max(x_k, y)."""
    return monotone(ctx, eqn, rels, eqn.primitive.name)


def monotone(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel], kind: str) -> list[Rel]:
    """An idempotent reduction of operands that are partial by it; the same value on all devices is partial over any axes."""
    some = [r for r in rels if r.partial]
    axes: frozenset[str] = frozenset().union(*(r.partial for r in some))
    for r in rels:
        fits = r.partial == axes if r.partial else not axes & r.varying
        require(fits and (not r.partial or r.kind == kind), f"{eqn.primitive.name} of a partial value", refused=True)
    return applied(ctx, eqn, rels, some[0] if some else None)


@lemma("mul")
def mul(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """(Σ x) y = Σ (x y), of which at most one is partial. A product with a number is a scale."""
    for x, y in (rels, rels[::-1]):
        number = number_of(x.term)
        if number is not None and np.isfinite(number) and not isinstance(number, bool):
            y = y if len(y.shape) == len(out_shape(eqn)) else lifted(ctx, y, len(out_shape(eqn)))
            return scaled(ctx, y, Fraction(number), out_shape(eqn))
    some = [r for r in rels if r.partial]
    require(len(some) < 2 and all(r.kind == "sum" for r in some), "a product of two partial values", refused=True)
    return applied(ctx, eqn, rels, some[0] if some else None)


def scaled(ctx: Context, x: Rel, by: Fraction, shape: tuple[int, ...]) -> list[Rel]:
    """A number times a value; a negative number makes a maximum a minimum."""
    require(not x.partial or x.kind == "sum" or by > 0, "a negative multiple of a partial extremum")
    return [replace(x, term=ctx.terms.scale(x.term, by), shape=shape)]


@lemma("neg")
def neg(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """-x = (-1) x."""
    return scaled(ctx, rels[0], Fraction(-1), out_shape(eqn))


@lemma("div")
def div(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """(Σ x) / y = Σ (x / y). A quotient by a number is a scale, for floats."""
    x, y = rels
    number, inexact = number_of(y.term), np.issubdtype(_dtype(out_dtype(eqn)), np.inexact)
    if inexact and number and np.isfinite(number) and len(x.shape) == len(out_shape(eqn)):
        return scaled(ctx, x, 1 / Fraction(number), out_shape(eqn))
    require(not x.partial or (inexact and x.kind == "sum"), "a quotient of partial integers", refused=True)
    not_partial([y], "a quotient")
    return applied(ctx, eqn, rels, x if x.partial else None)


def _dtype(dtype: Any) -> Any:
    return np.float32 if "float" in str(dtype) else dtype


@lemma("convert_element_type")
def convert(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """A cast between floats, or from integers, is linear up to rounding, and monotone."""
    (x,) = rels
    dtype = eqn.params["new_dtype"]
    exact = np.issubdtype(_dtype(dtype), np.inexact) or str(dtype) == x.term.dtype or x.kind != "sum"
    exact = exact or (x.term.dtype.startswith(("int", "uint")) and str(dtype).startswith(("int", "uint")))
    exact = exact and not (x.term.dtype == "bool" and x.kind == "sum")
    require(not x.partial or exact, "a cast of a partial value that rounds to integers", refused=True)
    return [resolved(ctx, replace(x, term=ctx.terms.convert(x.term, dtype)), [x])]


@lemma("bitcast_convert_type")
def bitcast(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The bits of an element; the cast back gives the element."""
    (x,) = rels
    require(len(out_shape(eqn)) == len(x.shape), "a bitcast between widths")
    ordered = unordered(ctx.terms, x.term, str(out_dtype(eqn)))
    if ordered is not None and not x.partial:
        return [replace(x, term=ordered)]
    if x.term.op == "bitcast" and x.term.args[0].dtype == str(out_dtype(eqn)):
        return [replace(x, term=x.term.args[0], kind=x.kind.rstrip("*"))]
    return [
        replace(
            x,
            kind=x.kind + "*" * bool(x.partial),
            term=ctx.terms.make("bitcast", None, (x.term,), x.term.shape, out_dtype(eqn)),
        )
    ]


@lemma("select_n")
def select(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """where(c, Σ x, Σ y) = Σ where(c, x, y), of a condition that is not partial."""
    if any(r.kind.endswith("*") for r in rels):
        return applied(ctx, eqn, rels, image(rels))
    not_partial(rels[:1], "a condition")
    partial = summed(rels[1:], "a choice") if all(r.kind == "sum" for r in rels[1:]) else None
    require(partial is not None or not any(r.partial for r in rels[1:]), "a choice of partial extrema")
    return applied(ctx, eqn, rels, partial)


@lemma("clamp")
def clamp(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """clamp(block(x)) = block(clamp(x)); monotone."""
    not_partial(rels, "clamp")
    return applied(ctx, eqn, rels)


SAME = (
    "copy copy_p name optimization_barrier stop_gradient local_constraint sharding_constraint name_dims rename_dims place "
    "pvary reshard multiple_of layout_constraint optimization_barrier_p device_put pbroadcast"
).split()


@lemma(*SAME)
def same(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The operands: copies, names, and hints to the compiler."""
    return list(rels)
