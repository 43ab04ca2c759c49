"""Merges equal conversions of one array.

A model with tied embeddings converts its table to bfloat16 for the lookup and for the logits. As one value it is all-gathered once.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from ..compat.jax import body_of, closed_parts, replace_body
from ..rules import primitive
from .sink import CALLS


def with_merged_casts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr in which equal casts of a variable are one equation, in each body of its loops and calls by itself.

    Results do not change. Casts in different bodies stay: a rematerialized layer computes its own.
    """
    jaxpr = _merged(closed.jaxpr, {})
    return closed if jaxpr is closed.jaxpr else ClosedJaxpr(jaxpr, closed.consts)


def _merged(jaxpr: Any, done: dict[int, Any]) -> Any:
    """A jaxpr without repeated casts; the jaxpr itself if it has none. ``done``: ``id`` of a jaxpr → its result."""
    if id(jaxpr) in done:
        return done[id(jaxpr)]
    first: dict[Any, Any] = {}
    same: dict[Any, Any] = {}  # result of a repeated cast → result of the first one
    eqns = []
    for eqn in jaxpr.eqns:
        entry = primitive(eqn.primitive.name)
        if entry.cast and not isinstance(eqn.invars[0], Literal):
            (out,) = eqn.outvars
            source = same.get(eqn.invars[0], eqn.invars[0])
            made = first.setdefault((source, tuple(sorted(eqn.params.items()))), out)
            if made is not out:
                same[out] = made
                continue
        if same and any(not isinstance(v, Literal) and v in same for v in eqn.invars):
            eqn = eqn.replace(invars=[v if isinstance(v, Literal) else same.get(v, v) for v in eqn.invars])
        if entry.scan or eqn.primitive.name in CALLS:
            body = closed_parts(body_of(eqn))[0]
            inner = _merged(body, done)
            eqn = eqn if inner is body else replace_body(eqn, [inner])
        eqns.append(eqn)
    result = jaxpr
    if len(eqns) != len(jaxpr.eqns) or any(a is not b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        outvars = [v if isinstance(v, Literal) else same.get(v, v) for v in jaxpr.outvars]
        result = jaxpr.replace(eqns=eqns, outvars=outvars)
    done[id(jaxpr)] = result
    return result
