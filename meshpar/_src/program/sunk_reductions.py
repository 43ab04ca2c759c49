"""Moves ``reduce_in`` into the loop or call whose result it converts.

The loop of the backward pass reduces the gradient of each layer in its iteration and stacks them. The user's dtype of the reduction
(:class:`meshpar.train.Precision`) is applied to the stacked gradients, after the loop. Since a conversion of a stack equals the
stack of converted arrays, it is moved into the body of the loop, before the reduction.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ..compat.jax import equations
from ..compat.loop_operands import loop_parts
from ..rules import bodies, primitive
from .jaxprs import readers, with_bodies, with_eqns
from .primitives import reduce_in_p


def with_sunk_reductions(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr in which each ``reduce_in`` of a loop's stack or a call's result is in the body, if no other op reads it."""
    if not any(eqn.primitive is reduce_in_p for eqn in equations(closed)):
        return closed
    return ClosedJaxpr(_sunk(closed.jaxpr), closed.consts)


def _sunk(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr with the same results, in which ``reduce_in`` is applied in the bodies of scans and calls rather than to
    their results.

    All bodies are rewritten recursively. The jaxpr itself is returned if there is nothing to move.
    """
    eqns: list[Any] = list(jaxpr.eqns)
    readers_of = readers(eqns, jaxpr.outvars)
    maker = {v: (k, i) for k, eqn in enumerate(eqns) for i, v in enumerate(eqn.outvars)}
    moved: dict[int, dict[int, Any]] = {}  # of an equation: result → the reduce_in that converts it
    for j, eqn in enumerate(eqns):
        x = eqn.invars[0] if eqn.primitive is reduce_in_p else None
        if x is None or isinstance(x, Literal) or x not in maker or len(readers_of[x]) > 1:
            continue
        if x.aval.dtype == eqn.params["dtype"]:
            continue
        k, i = maker[x]
        entry = primitive(eqns[k].primitive.name)
        # a custom derivative rule fixes the types of results
        own_types = entry.family in ("call", "checkpoint")
        if own_types or (entry.family == "scan" and i >= len(loop_parts(eqns[k]).carries)):
            moved.setdefault(k, {})[i] = eqn
            eqns[j] = None
    for k, eqn in enumerate(eqns):
        if eqn is None:
            continue
        own = moved.get(k, {})
        eqns[k] = with_bodies(eqn, [_sunk(_with_conversions(body, own) if own else body) for body in bodies(eqn)])
        if own:
            eqns[k] = eqns[k].replace(outvars=[own[i].outvars[0] if i in own else v for i, v in enumerate(eqn.outvars)])
    return with_eqns(jaxpr, [eqn for eqn in eqns if eqn is not None])


def _with_conversions(body: Jaxpr, conversions: dict[int, JaxprEqn]) -> Jaxpr:
    """A body that converts some results itself; ``conversions``: index of a result → the ``reduce_in`` equation outside."""
    eqns, outvars = list(body.eqns), list(body.outvars)
    for i, conversion in conversions.items():
        x = outvars[i]
        out = Var(x.aval.update(dtype=conversion.params["dtype"], weak_type=False))
        eqns.append(conversion.replace(invars=[x], outvars=[out]))
        outvars[i] = out
    return body.replace(eqns=eqns, outvars=outvars)
