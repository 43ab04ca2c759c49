"""Ops without a lemma of their own, as functions of full arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from ..laws import ALL, act, axes_text, not_partial
from ..relation import Context, Rel, require
from ..term import frozen

NOT_FUNCTIONS = frozenset("rng_uniform infeed outfeed shard_map xla_pmap".split())
"""Ops whose results are no function of their operands."""


def of_full_arrays(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """f(x) of full arrays, by any op whose results are a function of its operands and params, the same on every device."""
    name, params = eqn.primitive.name, frozen(dict(eqn.params))
    axes = ctx.sizes.keys() & set(_texts(params))
    function = not eqn.effects and name not in NOT_FUNCTIONS and not axes
    require(function, f"no lemma, of an op with effects or over {axes_text(axes)}")
    sharded = {a for r in rels for a in r.sharded}
    require(not sharded, f"no lemma for operands that are sharded over {axes_text(sharded)}")
    not_partial(rels, name)
    return act(ctx, eqn, rels, unsharded=ALL, params=params)


def _texts(value: Any) -> Iterator[str]:
    """The strings in a param."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | frozenset):
        for item in value:
            yield from _texts(item)
