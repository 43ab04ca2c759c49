"""The bits of elements: identities by which a reduction of bits is one of the elements.

XLA's all-reduces on CPUs lose NaN in a maximum, and the sign of zero in a sum of which all devices but one have -0.0. So a program
for CPUs reduces integers instead: images of the elements, in the order of the floats, or whose bits are 0 for -0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jax.extend.core import JaxprEqn

from ..relation import Context, Rel, out_dtype, out_shape, require
from ..term import Term, Terms, is_float
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
