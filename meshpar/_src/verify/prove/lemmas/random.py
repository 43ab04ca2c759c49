"""Random keys and bits."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from ..relation import Context, Rel, not_partial, out_dtype, out_shape, require
from ..term import frozen
from .table import lemma


@lemma(
    "random_seed",
    "random_wrap",
    "random_unwrap",
    "random_split",
    "random_fold_in",
    "random_clone",
    "random_bits",
    "random_gamma",
)
def keys(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Functions of keys that all devices have, computed alike on every device."""
    not_partial(rels, eqn.primitive.name)
    for r in rels:
        require(not r.sharded and not r.term.axes, f"{eqn.primitive.name} of sharded keys")
    rels = [ctx.expanded(r, range(len(r.shape))) for r in rels]
    params = frozen({k: v for k, v in eqn.params.items() if k != "impl"} | {"impl": str(eqn.params.get("impl"))})
    term = ctx.terms.make(eqn.primitive.name, params, (r.term for r in rels), out_shape(eqn), out_dtype(eqn))
    return [ctx.replicated(term, out_shape(eqn))]
