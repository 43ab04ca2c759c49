"""Bits: identities by which a reduction of the bits of elements is one of the elements; random keys and bits.

XLA's all-reduces on CPUs lose NaN in a maximum, and the sign of zero in a sum of which all devices but one have -0.0. So a program
for CPUs reduces integers instead: images of the elements, in the order of the floats, or whose bits are 0 for -0.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from ....compat.jax import aval_of, key_impl
from ..laws import ALL, act, not_partial
from ..relation import Context, Rel, out_dtype, out_shape, require
from ..term import Term, Terms, frozen, is_float
from .shape import sliced
from .table import lemma


@lemma("bitcast_convert_type")
def bitcast(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The bits of an element; the cast back gives the element."""
    (x,), terms, dtype = rels, ctx.terms, out_dtype(eqn)
    require(out_shape(eqn) == x.shape, "a bitcast between widths")

    def cast(t: Term, dtype: str) -> Term:
        return terms.make("bitcast", None, (t,), t.shape, dtype)

    bits, old = cast(x.term, dtype), x.term.dtype
    terms.equal[cast(bits, old).number] = x.term
    if is_float(old) and dtype.startswith("int"):
        for kind in ("max", "min"):
            image = ordered(terms, x.term, bits, kind)
            ctx.images[image.number] = kind + "*"
            terms.equal[cast(flipped(terms, image), old).number] = x.term
    if is_float(old) and dtype.startswith("uint"):
        sign = terms.literal(1 << (8 * np.dtype(dtype).itemsize - 1), dtype, len(bits.shape))
        image = xor(terms, bits, sign)
        ctx.images[image.number] = "one*"
        terms.equal[xor(terms, image, sign).number] = bits
    return [replace(x, term=bits, kind=x.kind + "*" * bool(x.partial))]


def xor(terms: Terms, x: Term, y: Term) -> Term:
    return terms.make("xor", (), (x, y), x.shape, x.dtype, sort=True)


def flipped(terms: Terms, n: Term) -> Term:
    """Integers in the order of the floats with these bits: of negative numbers, all bits except the sign are inverted."""
    zero, largest = (terms.literal(x, n.dtype, len(n.shape)) for x in (0, np.iinfo(n.dtype).max))
    negative = terms.make("lt", (), (n, zero), n.shape, "bool")
    return terms.make("select_n", (), (negative, n, xor(terms, n, largest)), n.shape, n.dtype)


def ordered(terms: Terms, x: Term, bits: Term, kind: str) -> Term:
    """The integers that are in the order of the floats ``x``; NaN is the largest (of a minimum: the smallest) of them."""
    nan, limits = terms.make("ne", (), (x, x), x.shape, "bool"), np.iinfo(bits.dtype)
    limit = terms.literal(limits.max if kind == "max" else limits.min, bits.dtype, len(x.shape))
    return terms.make("select_n", (), (nan, flipped(terms, bits), limit), x.shape, bits.dtype)


# -- random keys and bits

OPS = "seed wrap unwrap split fold_in clone gamma".split()


@lemma(*(f"random_{op}" for op in OPS))
def keys(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Functions of full arrays of keys."""
    not_partial(rels, eqn.primitive.name)
    params = frozen({**eqn.params, "impl": str(eqn.params.get("impl"))})
    return act(ctx, eqn, rels, unsharded=ALL, params=params)


@lemma("random_bits")
def bits(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Element i of the bits of one partitionable threefry key is a function of the key and of i: a device makes its block of them
    from its block of the indices. Other bits are a function of the full array."""
    not_partial(rels, eqn.primitive.name)
    (key,), shape, dtype = rels, out_shape(eqn), out_dtype(eqn)
    partitionable = getattr(jax.config, "jax_threefry_partitionable") and math.prod(shape) < 2**32  # noqa: B009
    if key.shape or not partitionable or dtype == "uint64" or key_impl(aval_of(eqn.invars[0]).dtype) != "threefry2x32":
        return keys(ctx, eqn, rels)
    terms, rank = ctx.terms, len(shape)
    index = terms.literal(0, "uint32", rank)
    for d, n in enumerate(shape):
        if n > 1:
            along = terms.make("iota", None, (), [n if k == d else 1 for k in range(rank)], "uint32")
            index = terms.add(index, terms.scale(along, Fraction(math.prod(shape[d + 1 :]))))
    data = terms.make("random_unwrap", frozen({"impl": "None"}), (key.term,), (2,), "uint32")
    words = [sliced(ctx, ctx.replicated(data, (2,)), 0, k, 1).term for k in range(2)]
    args = [*(terms.reshape(w, (1,) * rank) for w in words), terms.literal(0, "uint32", rank), index]
    halves = [terms.make("threefry2x32", p, args, shape, "uint32") for p in ((), ((), 1))]
    term = terms.convert(terms.make("xor", (), halves, shape, "uint32", sort=True), dtype)
    return [ctx.replicated(term, shape)]
