"""Merges equal conversions of one array.

A model with tied embeddings converts its table to bfloat16 for the lookup and for the logits. As one value it is all-gathered once.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from ..rules import primitive
from .jaxprs import Atom, renamed, rewrite


def with_merged_casts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr in which equal casts of a variable are one equation, in each body of its loops and calls by itself.

    Results do not change. Casts in different bodies stay: a rematerialized layer computes its own.
    """
    return rewrite(closed, _merged)


def _merged(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr without repeated casts; the jaxpr itself if it has none."""
    first: dict[Any, Var] = {}
    same: dict[Var, Atom] = {}  # result of a repeated cast → result of the first one

    eqns = []
    for eqn in jaxpr.eqns:
        if primitive(eqn.primitive.name).family == "cast" and not isinstance(eqn.invars[0], Literal):
            (out,) = eqn.outvars
            made = first.setdefault((*renamed(eqn.invars, same), *sorted(eqn.params.items())), out)
            if made is not out:
                same[out] = made
                continue
        if same and (invars := renamed(eqn.invars, same)) != eqn.invars:
            eqn = eqn.replace(invars=invars)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, same)) if same else jaxpr
