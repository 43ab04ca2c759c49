"""Splits the backward loops of a microbatch into input gradients and weight gradients (zero bubble).

A layer's backward pass computes the cotangent of its input, which the stage before needs, and the gradients of its weights, which
no stage needs. In a loop of its own, a *weight loop*, the latter run in other ticks, in which the stage would be idle (Qi et al.,
"Zero Bubble Pipeline Parallelism", 2023, ZB-H1). The values of the backward loop that the weight loop reads are stacked, so that
they are stored in rings like activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from ...compat.jax import closed_parts
from ...compat.loop_operands import loop_parts
from ...rules import primitive
from ..ir import Op
from ..jaxprs import flatten, live, variables
from .find import LayerLoop
from .segments import Body, replaced


def split_backward(body: Body, op: Op, loops: Sequence[LayerLoop], order: str) -> tuple[list[LayerLoop], str]:
    """Split the backward loops of a body, where the gradients of weights can be separated.

    Args:
      body: it is changed.
      op: the loop over microbatches.
      loops: its layer loops.
      order: of them, see :class:`.schedule.Schedule`.

    Returns:
      (the layer loop that each loop of the body is from, their order with ``W`` for each weight loop).
    """
    equations, sources, letters = list[list[Any]](), list[LayerLoop](), ""
    for eqn, loop, letter in zip(body.loops, loops, order, strict=True):
        parts = _parts(eqn) if letter == "B" else None
        equations.append([eqn] if parts is None else [*parts])
        sources += [loop] * len(equations[-1])
        letters += letter if parts is None else f"{letter}W"
    replaced(body, equations, op, sources)
    return sources, letters


def _parts(eqn: JaxprEqn) -> tuple[Any, Any] | None:
    """(the scan of the carries, the scan of the other stacked results) of a scan; None: the carries need all of its equations."""
    jaxpr, values = closed_parts(eqn.params["jaxpr"])
    flat = flatten(ClosedJaxpr(jaxpr, values))
    inner, parts = flat.jaxpr, loop_parts(eqn)
    carries = len(parts.carries)
    first, _ = live(inner.eqns, inner.outvars[:carries])
    if len(first) == len(inner.eqns):
        return None
    early = {v for e in first for v in e.outvars}
    rest = [e for e in inner.eqns if e not in first]
    late = {v for e in rest for v in e.outvars}
    second = [k for k, v in enumerate(inner.outvars) if k >= carries and not isinstance(v, Literal) and v in late]
    carried = set(parts.carried(inner.invars))
    rest, cut = _cut(inner.eqns, first, rest, early, carried)

    kept = [k for k in range(len(inner.outvars)) if k not in second]
    stacked = [Var(v.aval.update(shape=(eqn.params["length"], *v.aval.shape), weak_type=False)) for v in cut]
    backward = inner.replace(eqns=first, outvars=[*(inner.outvars[k] for k in kept), *cut])
    results = [*(eqn.outvars[k] for k in kept), *stacked]
    one = _scan(eqn, ClosedJaxpr(backward, flat.consts), eqn.invars, results, len(parts.consts), carries)
    read = {v for e in rest for v in variables(e.invars)}
    held = [p for p, v in enumerate(inner.invars) if v in read and v not in carried]
    own = [p for p in held if p in parts.consts]
    arguments = [*(inner.invars[p] for p in held), *cut]
    weights = inner.replace(eqns=rest, invars=arguments, outvars=[inner.outvars[k] for k in second])
    operands = [*(eqn.invars[p] for p in held), *stacked]
    two = _scan(eqn, ClosedJaxpr(weights, flat.consts), operands, [eqn.outvars[k] for k in second], len(own), 0)
    return one, two


def _cut(
    eqns: Sequence[JaxprEqn], first: Sequence[Any], rest: Sequence[Any], early: set[Any], carried: set[Any]
) -> tuple[list[Any], list[Any]]:
    """(the equations of the weight loop, the values that it reads of the backward loop).

    An elementwise op or a change of shape is computed in both loops if its operands are no larger than its results: a cast, or the
    activation function of an array that is stored in any case.
    """
    rest, made = list(rest), {v: eqn for eqn in first for v in eqn.outvars}
    while True:
        cut = [v for v in dict.fromkeys(v for e in rest for v in variables(e.invars)) if v in early | carried]
        stored = set(cut)
        for v in cut:
            eqn = made.get(v)
            if eqn is None or not _cheap(eqn):
                continue
            operands = {x for x in variables(eqn.invars) if x in early | carried}
            if sum(_bytes(x) for x in operands - stored) <= sum(_bytes(x) for x in eqn.outvars if x in stored):
                chosen = {id(e) for e in (*rest, eqn)}
                rest = [e for e in eqns if id(e) in chosen]  # in the order of the layer
                break  # its operands are now read by the weight loop, and may be computed in both loops as well
        else:
            return rest, cut
        early = early - set(eqn.outvars)


def _cheap(eqn: JaxprEqn) -> bool:
    """Whether an op takes little time to compute twice."""
    p = primitive(eqn.primitive.name)
    return len(eqn.outvars) == 1 and (p.elementwise or p.view or p.family == "random")


def _bytes(v: Any) -> int:
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize


def _scan(
    eqn: JaxprEqn, body: ClosedJaxpr, invars: Sequence[Any], outvars: Sequence[Any], consts: int, carries: int
) -> Any:
    """A layer loop with another body, in the direction of ``eqn``. It is never bound: its slots run the body."""
    params = {"jaxpr": body, "num_consts": consts, "num_carry": carries}
    params |= {name: eqn.params[name] for name in ("length", "reverse")}
    return eqn.replace(invars=list(invars), outvars=list(outvars), params=params)
