"""Random keys and bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import jax
from jax.extend.core import JaxprEqn

from ....compat.jax import aval_of, key_impl
from ..laws import ALL, act, not_partial
from ..relation import Context, Rel, out_dtype, out_shape
from ..term import frozen
from .shape import sliced
from .table import lemma

OPS = "seed wrap unwrap split fold_in clone gamma".split()


@lemma(*(f"random_{op}" for op in OPS))
def keys(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Functions of each key: leading dims are carried along. Words of keys, new keys and bits are further dims."""
    not_partial(rels, eqn.primitive.name)
    params = frozen({**eqn.params, "impl": str(eqn.params.get("impl"))})
    shared = min(len(s) for s in (out_shape(eqn), *(r.shape for r in rels)))
    labels = range(shared) if eqn.primitive.name != "random_gamma" else ()
    return act(ctx, eqn, rels, unsharded=[d for d in ALL if d not in labels], params=params)


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
