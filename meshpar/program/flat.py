"""Programs without calls: the bodies of ``jit``, ``jax.checkpoint`` and custom derivatives are inlined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from ..compat.jax import bodies_of, body_operands, new_var
from ..rules import primitive


def flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with calls inlined and dead ops removed; loops and conditionals remain single ops."""
    eqns: list[Any] = []
    constvars: list[Any] = []
    consts: list[Any] = []

    def bind(jaxpr: Any, values: Sequence[Any]) -> dict[Any, Any]:
        env = {v: new_var(v.aval) for v in jaxpr.constvars}
        constvars.extend(env.values())
        consts.extend(values)
        return env

    def inline(jaxpr: Any, env: dict[Any, Any]) -> list[Any]:
        """Append the equations of ``jaxpr``, with calls inlined, to ``eqns``; returns the atoms of its results.

        Args:
          env: variable of ``jaxpr`` → variable of the flat program; variables that equations define are added.
        """

        def read(v: Any) -> Any:
            return v if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            if primitive(eqn.primitive.name).call:
                ((body, values),) = bodies_of(eqn)
                scope = bind(body, values)
                scope.update(zip(body.invars, body_operands(eqn, ins), strict=True))
                outs = inline(body, scope)
            else:
                outs = [new_var(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=ins, outvars=outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    root = closed.jaxpr
    outs = inline(root, {**bind(root, closed.consts), **{v: v for v in root.invars}})
    needed = {v for v in outs if not isinstance(v, Literal)}
    live = []
    for eqn in reversed(eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    live.reverse()
    return ClosedJaxpr(root.replace(constvars=constvars, eqns=live, outvars=outs), consts)
