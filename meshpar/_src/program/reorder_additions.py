"""Reorders the additions of cotangents, so that results of matmuls are added to each other first.

The backward pass of an attention block with a residual computes ``add_any(add_any(add_any(dy, dq), dk), dv)``. If heads are
sharded, each of dq, dk and dv is a partial sum, and dy is not: each of them would be reduced before it is added to dy. In
``add_any(dy, add_any(add_any(dq, dk), dv))`` one reduction is enough.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ..rules import bodies, primitive
from .jaxprs import readers, rewrite, with_eqns


def with_matmuls_added_first(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr in which a sum that JAX's differentiation makes (``add_any``) adds the results of matmuls to each other first.

    An intermediate sum that another op reads is not reordered, and neither is an ``add`` in the user's function. Each body of a
    loop, branch or call is rewritten by itself. The closed jaxpr itself is returned if nothing changes.
    """
    results: dict[tuple[Any, ...], list[bool]] = {}  # by _signature of a jaxpr: which of its results matmuls compute

    def change(jaxpr: Jaxpr) -> Jaxpr:
        """The jaxpr with reordered additions; adds its results to ``results``."""
        matmuls = set[Any]()  # also sums of results of matmuls, and reshapes, transposes and casts of them
        for eqn in jaxpr.eqns:
            entry = primitive(eqn.primitive.name)
            if entry.call:
                (body,) = bodies(eqn)
                matmuls.update(itertools.compress(eqn.outvars, results[_signature(body)]))
            moves = entry.name == "add_any" or ((entry.view or entry.family == "cast") and len(eqn.invars) == 1)
            if entry.matmul or (moves and all(_is_in(v, matmuls) for v in eqn.invars)):
                matmuls.update(eqn.outvars)
        results[_signature(jaxpr)] = [_is_in(v, matmuls) for v in jaxpr.outvars]
        return with_eqns(jaxpr, _with_reordered_additions(jaxpr, matmuls))

    return rewrite(closed, change)


def _signature(jaxpr: Jaxpr) -> tuple[Any, ...]:
    """The variables of a jaxpr's arguments and results, which rewriting keeps; JAX 0.12 copies a jaxpr that becomes a body."""
    return tuple(None if isinstance(v, Literal) else v for v in (*jaxpr.invars, *jaxpr.outvars))


def _is_in(v: Any, variables: set[Any]) -> bool:
    return not isinstance(v, Literal) and v in variables


def _with_reordered_additions(jaxpr: Jaxpr, matmuls: set[Any]) -> Sequence[JaxprEqn]:
    """The equations of a jaxpr with reordered additions; ``matmuls``: the variables that matmuls compute."""
    eqns = jaxpr.eqns
    adds = {i for i, eqn in enumerate(eqns) if eqn.primitive.name == "add_any" and eqn.outvars[0] not in matmuls}
    if not adds:
        return eqns
    readers_of = readers(eqns, jaxpr.outvars)
    made_at = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    inner = {i for i in adds if len(found := readers_of.get(eqns[i].outvars[0], [])) == 1 and found[0] in adds}
    replaced: dict[int, list[Any]] = {}
    for root in adds - inner:
        terms, slots = _terms(root, eqns, inner, made_at)
        chosen = [k for k, v in enumerate(terms) if _is_in(v, matmuls)]
        if len(chosen) > 1 and chosen[-1] >= len(chosen):
            replaced.update(_additions(terms, chosen, slots, eqns, made_at))
    return [new for i, eqn in enumerate(eqns) for new in replaced.get(i, [eqn])]


def _terms(
    root: int, eqns: Sequence[JaxprEqn], inner: set[int], made_at: dict[Any, int]
) -> tuple[list[Any], list[int]]:
    """(terms of a sum in order, sorted indices of the equations that add them); ``root``: the index of the last one."""
    terms, slots = [], [root]
    stack = list(reversed(eqns[root].invars))
    while stack:
        v = stack.pop()
        i = -1 if isinstance(v, Literal) else made_at.get(v, -1)
        if i in inner:
            slots.append(i)
            stack.extend(reversed(eqns[i].invars))
        else:
            terms.append(v)
    return terms, sorted(slots)


def _additions(
    terms: Sequence[Any],
    matmuls: Sequence[int],
    slots: Sequence[int],
    eqns: Sequence[JaxprEqn],
    made_at: dict[Any, int],
) -> dict[int, list[Any]]:
    """The additions of ``((other terms) + (matmuls)) + terms after the last matmul``, as slot → new equations.

    Other terms and matmuls are added separately, in order, as soon as they are computed: two intermediate arrays are live. Each
    new addition takes the place of the first old one at which its operands are available.

    Args:
      terms: the terms of the sum.
      matmuls: the indices of the terms that matmuls compute, sorted.
      slots: the indices of the old additions, sorted.
      eqns: the equations of the jaxpr.
      made_at: variable → the index of the equation that computes it.
    """
    new: dict[int, list[Any]] = {slot: [] for slot in slots}
    available = {v: made_at.get(v, -1) + 1 for v in terms if not isinstance(v, Literal)}

    def chain(x: Any, *others: Any, out: Any = None) -> Any:
        for k, y in enumerate(others):
            ready = max(0 if isinstance(v, Literal) else available[v] for v in (x, y))
            slot = slots[bisect_left(slots, ready)]
            total = out if out is not None and k == len(others) - 1 else Var(eqns[slot].outvars[0].aval)
            new[slot].append(eqns[slot].replace(invars=[x, y], outvars=[total]))
            available[total] = slot
            x = total
        return x

    last, chosen = matmuls[-1] + 1, set(matmuls)
    others = chain(*[v for k, v in enumerate(terms[:last]) if k not in chosen])
    chain(others, chain(*[terms[k] for k in matmuls]), *terms[last:], out=eqns[slots[-1]].outvars[0])
    return new
