"""Ops whose result has at each index a function of the operands' elements at this index."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ..device_values import INTEGERS, axes_of, evaluate, leaves, resolved
from ..laws import act, not_partial, one_partial, partial_of
from ..non_block_shards import (
    add_incomplete_sums,
    fill_of,
    known_pads,
    map_elements,
    mask_fragments,
    of_chosen_device,
)
from ..relation import Context, Rel, out_dtype, out_shape, require
from ..term import Term, constant, frozen, is_float, is_zero, number_of
from .table import Lemma, lemma

POINTWISE = (
    "sign floor ceil round is_finite exp exp2 log log1p expm1 tanh logistic sin cos tan asin acos atan sinh cosh asinh acosh atanh "
    "sqrt rsqrt cbrt abs not erf erfc erf_inv lgamma digamma integer_pow square population_count clz real imag conj "
    "reduce_precision to_edtype from_edtype one_minus_square log2 clamp rem pow atan2 nextafter xor shift_left shift_right_logical "
    "shift_right_arithmetic eq ne lt le gt ge complex and or lt_to le_to eq_to igamma igammac bessel_i0e bessel_i1e polygamma zeta "
    "regularized_incomplete_beta threefry2x32"
).split()
DROPPED = frozenset(("sharding", "out_sharding", "weak_type", "new_dtype"))
"""Params that do not change the values, or that the dtype of the term has."""


def elementwise(*primitives: str) -> Callable[[Lemma], Lemma]:
    """Register a lemma of operands with the shape of the result: scalars and dims of size 1 are constant along its dims."""

    def register(fn: Lemma) -> Lemma:
        @functools.wraps(fn)
        def lifted(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
            shape = out_shape(eqn)
            ones, axes = (1,) * len(shape), ((),) * len(shape)

            def spread(r: Rel) -> Rel:
                if not r.shape:
                    return replace(r, term=ctx.terms.reshape(r.term, ones), shape=shape, spec=axes)
                fits = all(n == m or n == size == 1 for n, m, size in zip(r.shape, shape, r.term.shape, strict=True))
                require(fits, f"{eqn.primitive.name} of a block of one element")
                return replace(r, shape=shape)

            return fn(ctx, eqn, [spread(r) for r in rels])

        return lemma(*primitives)(lifted)

    return register


def applied(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel], partial: Rel | None = None) -> list[Rel]:
    """The result of an elementwise op, partial as ``partial`` is."""
    op = {"add_any": "add"}.get(eqn.primitive.name, eqn.primitive.name)
    params = frozen({k: v for k, v in eqn.params.items() if k not in DROPPED and v is not None})
    out = act(ctx, eqn, rels, params=params, partial=partial, op=op, by_element=True)
    return [resolved(ctx, r, rels) for r in out]


@elementwise(*POINTWISE)
def pointwise(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """block(f(x, y)) = f(block(x), block(y)). A disjunction of partial disjunctions is partial.

    Values f(x) of a partial maximum x have the kind ``max*``: :mod:`lemmas.bits` has those that are reduced.
    """
    name, x, y = eqn.primitive.name, rels[0], rels[-1]
    if name == "clamp" and x.number == y.number is not None and not is_float(x.term.dtype):  # to one number
        return [replace(x, shape=out_shape(eqn))]
    if name == "clamp" and in_limits(rels[1].term, x.number, y.number):
        return [rels[1]]
    index = rels[1].term if name == "clamp" else x.term
    if index.op == "convert" and index.args[0].dtype == "bool" and (x.number, y.number) == (0, 1) and name == "clamp":
        return [rels[1]]  # the branch of a condition
    if name == "ne" and x.kind in ("max", "min") and (x.term, x.source) == (y.term, y.source):  # isnan
        return applied(ctx, eqn, rels, replace(x, kind=x.kind + "*"))
    if name in ("or", "and") and out_dtype(eqn) == "bool":
        return applied(ctx, eqn, rels, partial_of(rels, name, "max" if name == "or" else "min"))
    if any(r.kind == name for r in rels):  # of the bits of integers
        return applied(ctx, eqn, rels, partial_of(rels, name, name))
    if not any(r.kind.endswith("*") for r in rels):
        not_partial(rels, name)
    return applied(ctx, eqn, rels, partial_of(rels, name))


def in_limits(x: Term, low: Any, high: Any) -> bool:
    """Whether an integer is clamped to limits already, or the index of a platform."""
    if x.dtype not in INTEGERS or low is None or high is None:
        return False
    if x.op == "platform_index":
        return low <= 0 and high + 1 >= len(dict(x.params)["platforms"])
    limits = [number_of(x.args[k]) for k in (0, 2)] if x.op == "clamp" else [None]
    return None not in limits and low <= limits[0] <= limits[1] <= high  # type: ignore[operator]


@elementwise("add", "add_any", "sub")
def linear(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Σ x + Σ y = Σ (x + y): both are partial over the same axes, or one is 0. The sums over different blocks of one
    contraction are the one over all of them (:func:`fragments.add_incomplete_sums`)."""
    if eqn.primitive.name != "sub":
        for x, y in (rels, rels[::-1]):
            if is_zero(x.term) and y.shape == out_shape(eqn) and (y.term.axes | y.partial or y.fragmented):
                return [resolved(ctx, y, rels)]
        both = add_incomplete_sums(ctx, *rels)
        if both is not None:
            return [both if both.incomplete else replace(both, term=ctx.terms.convert(both.term, out_dtype(eqn)))]
    return applied(ctx, eqn, rels, partial_of(rels, eqn.primitive.name, "sum"))


@elementwise("max", "min")
def extremum(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """max(max_k x_k, y) = max_k max(x_k, y)."""
    return applied(ctx, eqn, rels, partial_of(rels, eqn.primitive.name, eqn.primitive.name))


@elementwise("select_n")
def select(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """where(c, Σ x, Σ y) = Σ where(c, x, y), of a condition that is not partial."""
    if any(r.kind.endswith("*") for r in rels):
        return applied(ctx, eqn, rels, partial_of(rels, "a choice"))
    not_partial(rels[:1], "a condition")
    masked = (one_element(ctx, *rels) or outside(ctx, *rels)) if len(rels) == 3 else None
    if masked is not None:
        return [masked]
    require(not any(r.fragmented for r in rels), "a choice of fragments")
    return applied(ctx, eqn, rels, partial_of(rels[1:], "a choice"))


def one_element(ctx: Context, mask: Rel, no: Rel, yes: Rel) -> Rel | None:
    """where(i == k, x, number), of the index i along a dim, is x padded along it, if the function as written has this array."""
    value, (at, *more) = fill_of(no), leaves(mask.term) or [mask.term]
    dims = [d for d, n in enumerate(mask.term.shape) if n != 1]
    if value is None or more or at.op != "iota" or mask.term.axes or len(dims) != 1 or yes.term.shape[dims[0]] != 1:
        return None
    if yes.fragmented or (yes.partial and not is_zero(no.term)):  # devices would add the numbers
        return None
    (d,), term = dims, yes.term
    (chosen,) = np.nonzero(evaluate(ctx, (), [mask.term], at, np.arange(mask.term.shape[d]))[0][0])
    for padded in known_pads(ctx, term, value, d):
        if padded.shape[d] == mask.term.shape[d] and chosen.tolist() == [padded.params[0][1][0]]:
            return yes.placed({d: mask.spec[d]}).of(padded, yes.shape, yes.placed({d: mask.spec[d]}).spec)
    return None


def outside(ctx: Context, mask: Rel, no: Rel, yes: Rel) -> Rel | None:
    """where(mask, x, number), of blocks or fragments x, by a mask of the device and of the position; None: it is another choice."""
    for x, other, wanted in ((yes, no, True), (no, yes, False)):
        one = of_chosen_device(ctx, mask.term, x, wanted) if is_zero(other.term) and not x.partial else None
        if one is not None:
            return replace(one, kind="one" if other.term.params == "-0.0" else "sum")
        value, at = fill_of(other), leaves(mask.term)
        if value is None or len(at) > 1:
            continue
        own = x.fragmented or [d for d, s in enumerate(x.spec) if mask.term.axes.intersection(s)]
        padded = [d for d in range(len(x.shape)) if mask.term.axes and next(known_pads(ctx, x.term, value, d), None)]
        for d in own or padded:
            if len(own) > 1 or any(n != 1 and k != d for k, n in enumerate(mask.term.shape)):
                continue
            if mask.term.op == "array" and x.fragmented and not mask.fragmented:  # each device has its block of it
                axes, keep = mask.spec[d], constant(mask.term).reshape(-1, x.shape[d])
            elif not mask.sharded and all(t.op == "iota" and t.shape[d] != 1 for t in at):
                axes = axes_of(ctx, mask.term)
                (keep,) = evaluate(ctx, axes, [mask.term], *at, values=np.arange(x.shape[d]))
            else:
                continue
            found = mask_fragments(ctx, x, d, keep == wanted, axes, value)
            if own or not found.fragmented:
                return found
    return None


@elementwise("mul", "times_power_of_two")
def mul(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """(Σ x) y = Σ (x y), of which at most one is partial. A product with a number is a scale."""
    for x, y in (rels, rels[::-1]):
        if x.number is not None and np.isfinite(x.number) and x.term.params not in ("True", "False", "-0.0"):
            return scaled(ctx, y, Fraction(x.number))
    return applied(ctx, eqn, rels, one_partial(rels, "a product"))


def scaled(ctx: Context, x: Rel, by: Fraction) -> list[Rel]:
    """A number times a value; a negative number makes a maximum a minimum."""
    scales = not x.partial or x.kind == "sum" or (by > 0 and is_float(x.term.dtype))
    require(scales, "a negative multiple, or one of integers, of a partial extremum")
    return [map_elements(ctx, x, lambda t: ctx.terms.scale(t, by))]


@elementwise("neg")
def neg(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """-x = (-1) x."""
    return scaled(ctx, rels[0], Fraction(-1))


@elementwise("div")
def div(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """(Σ x) / y = Σ (x / y). A quotient by a number is a scale, for floats."""
    x, y = rels
    inexact = is_inexact(out_dtype(eqn))
    if inexact and y.number and np.isfinite(y.number):
        return scaled(ctx, x, 1 / Fraction(y.number))
    require(not x.partial or (inexact and x.kind == "sum"), "a quotient of partial integers", refused=True)
    not_partial([y], "a quotient")
    return applied(ctx, eqn, rels, x if x.partial else None)


def is_inexact(dtype: str) -> bool:
    return is_float(dtype) or dtype.startswith("complex")


@elementwise("convert_element_type")
def convert(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """A cast to floats is monotone, and linear up to rounding; one between integers is linear, and monotone if it is to wider ones;
    the numbers 0 and 1 of booleans have the same extrema, and another sum."""
    (x,), source, target = rels, rels[0].term.dtype, out_dtype(eqn)
    if x.partial and source != target and not x.kind.endswith("*"):
        both = source.startswith(("int", "uint")) and target.startswith(("int", "uint"))
        wraps = not is_inexact(source) and (not both or np.dtype(source).itemsize < np.dtype(target).itemsize)
        linear = not wraps and (both or is_inexact(target))
        monotone = is_float(target) or (not is_inexact(source) and np.can_cast(source, target))
        reason = "a cast of a partial value that rounds to integers, or of sums that wrap"
        require(linear if x.kind == "sum" else monotone, reason, is_inexact(source))
    if x.incomplete:  # of an incomplete sum, whose term keeps its dtype
        require(is_float(source) and is_float(target), "a cast of an incomplete sum to integers", refused=True)
        return [x]

    def cast(t: Term) -> Term:
        narrow = narrowed(ctx, t, target) if is_float(source) and is_float(target) else t
        return narrow if ctx.terms.is_known(narrow) and narrow.dtype == target else ctx.terms.convert(t, target)

    return [resolved(ctx, map_elements(ctx, x, cast), [x])]


def narrowed(ctx: Context, x: Term, dtype: str) -> Term:
    """A matmul, or a sum of matmuls, whose result has another dtype: the cast of one that is accumulated in more bits."""
    if x.op not in ("einsum", "add", "transpose"):
        return x
    args = x.args if x.op == "einsum" else [narrowed(ctx, t, dtype) for t in x.args]
    return ctx.terms.make(x.op, x.params, args, x.shape, dtype, x.op == "add")


IDENTITIES = frozenset(
    "copy copy_p name optimization_barrier stop_gradient local_constraint sharding_constraint name_dims rename_dims place "
    "in_blocks pvary reshard multiple_of layout_constraint device_put".split()
)
"""Primitives whose results are their operands: copies, names, and hints to the compiler."""
