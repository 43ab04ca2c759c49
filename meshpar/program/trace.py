"""Traces a function to a closed jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ..compat.jax import closed_parts, equations, make_jaxpr, without_refs
from .casts import with_merged_casts
from .sink import with_sunk_reductions
from .sums import with_matmuls_added_first


def trace(fn: Callable[..., Any], leaves: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """Trace a function of flat arguments.

    Args:
      fn: takes ``*leaves``, returns any tree.
      leaves: arrays, numbers or ``ShapeDtypeStruct``.

    Returns:
      (closed jaxpr, in which all loops have scalar conditions; tree of the results as ``ShapeDtypeStruct``; its flat leaves).
    """
    closed, shapes = make_jaxpr(fn, *leaves, return_shape=True)
    closed = without_refs(closed)
    if any(map(_is_batched, equations(closed))):
        closed = ClosedJaxpr(_scalar_conditions(closed.jaxpr, {}), closed.consts)
    closed = with_matmuls_added_first(with_merged_casts(with_sunk_reductions(closed)))
    return closed, shapes, jax.tree.leaves(shapes)


def _is_batched(eqn: Any) -> bool:
    """Whether an equation is a ``while`` under ``vmap``, with one condition for each element of the batch."""
    return "cond_jaxpr" in eqn.params and bool(eqn.params["cond_jaxpr"].out_avals[0].shape)


def _rewritten(param: Any, done: dict[int, Any]) -> Any:
    """A parameter of an equation after :func:`_scalar_conditions` of the jaxprs in it; the same object if nothing changed."""
    if isinstance(param, tuple | list):
        new = [_rewritten(x, done) for x in param]
        if all(a is b for a, b in zip(param, new, strict=True)):
            return param
        return type(param)(*new) if hasattr(param, "_fields") else type(param)(new)
    inner, consts = closed_parts(param)
    if not hasattr(inner, "eqns"):
        return param
    if id(inner) not in done:
        done[id(inner)] = _scalar_conditions(inner, done)
    new = done[id(inner)]
    return param if new is inner else ClosedJaxpr(new, consts) if isinstance(param, ClosedJaxpr) else new


def _scalar_conditions(jaxpr: Any, done: dict[int, Any]) -> Any:
    """A jaxpr in which batched loops run until all elements are done; done elements are not changed, as in the compiled program."""
    eqns = []
    for eqn in jaxpr.eqns:
        params = {k: _rewritten(v, done) if _holds_bodies(v) else v for k, v in eqn.params.items()}
        new = eqn if all(params[k] is v for k, v in eqn.params.items()) else eqn.replace(params=params)
        eqns.append(_with_scalar_condition(new) if _is_batched(new) else new)
    return jaxpr if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)) else jaxpr.replace(eqns=eqns)


def _holds_bodies(param: Any) -> bool:
    first = param[0] if isinstance(param, tuple | list) and param else param
    return hasattr(closed_parts(first)[0], "eqns")


def _with_scalar_condition(eqn: Any) -> Any:
    """A batched ``while`` equation as one whose condition is a scalar: it runs until all elements are done."""
    p = eqn.params
    cond, body = (jaxpr_as_fun(p[k]) for k in ("cond_jaxpr", "body_jaxpr"))
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]

    def any_continues(*args: Any) -> Any:
        (active,) = cond(*args)
        return lax.reduce_or(active, tuple(range(active.ndim)))

    def step(*args: Any) -> list[Any]:
        """The loop body for a batched condition: (*condition constants, *body constants, *carry) → the new carry.

        Batch elements whose condition is false retain their old carry.
        """
        carry = args[m:]
        (active,) = cond(*args[:n], *carry)
        lead = range(active.ndim)
        return [
            lax.select_n(lax.broadcast_in_dim(active, old.shape, lead), old, new)
            for old, new in zip(carry, body(*args[n:m], *carry), strict=True)
        ]

    carried = eqn.invars[m:]
    ins = [[*eqn.invars[:n], *carried], [*eqn.invars[:m], *carried]]
    jaxprs = [
        make_jaxpr(f, *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in vs])
        for f, vs in zip((any_continues, step), ins, strict=True)
    ]
    params = {**p, "cond_jaxpr": jaxprs[0], "body_jaxpr": jaxprs[1], "body_nconsts": m}
    return eqn.replace(params=params, invars=[*eqn.invars[:n], *eqn.invars[:m], *carried])
