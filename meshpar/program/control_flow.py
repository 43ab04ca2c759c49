"""Inference through ops that hold bodies or say names: loops, branches and calls, ``mp.named`` and ``mp.rename``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jax.extend.core import Literal

from ..compat.jax import body_of, closed_parts, constraint_spec, new_var, scan_counts
from ..rules import having
from .ir import Frame, Op, Value
from .names import NONE
from .primitives import name_dims_p

if TYPE_CHECKING:
    from .infer import Builder


def _call(own: bool = False):
    """A body that runs once, on the operands as they are; ``own``: with a derivative of its own, even where it does nothing."""

    def handler(b: Builder, op: Op) -> list[Value]:
        jaxpr, _ = closed_parts(body_of(op.eqn))
        if own:
            jaxpr = _with_own_results(jaxpr, op)
        frame = Frame(jaxpr, op)
        op.frames = [frame]
        _bind_consts(b, frame)
        n = len(jaxpr.invars)
        b.run(frame, op.ins[len(op.ins) - n :])
        return [_result(b, frame, v, op) for v in jaxpr.outvars]

    return handler


def _with_own_results(jaxpr: Any, op: Op) -> Any:
    """A body none of whose results is an operand."""
    eqns, outvars, ins = list(jaxpr.eqns), list(jaxpr.outvars), set(jaxpr.invars)
    for k, var in enumerate(outvars):
        if not isinstance(var, Literal) and var in ins:
            outvars[k] = new_var(var.aval)
            same = {
                "primitive": name_dims_p,
                "params": {"names": (None,) * len(var.aval.shape)},
                "effects": frozenset(),
            }
            eqns.append(op.eqn.replace(**same, invars=[var], outvars=[outvars[k]]))
    return jaxpr.replace(eqns=eqns, outvars=outvars) if len(eqns) > len(jaxpr.eqns) else jaxpr


def _result(b: Builder, frame: Frame, var: Any, op: Op) -> Value:
    value = b.read(frame, var)
    return b.value(var.aval, op=op) if value is None else value


def _bind_consts(b: Builder, frame: Frame) -> None:
    for var in frame.jaxpr.constvars:
        frame.env[var] = b.value(var.aval)


def _inside(value: Value | None, b: Builder, aval: Any, drop: int = 0) -> Value:
    """The value as a loop body sees it: the same dims, less the first ``drop``."""
    if value is None:
        return b.value(aval)
    inner = Value(aval, b.unifier.register(value.nodes[drop:]) if drop else value.nodes)
    if value.annotation is not None:
        inner.annotation = value.annotation[drop:]
    inner.kind = value.kind
    return inner


def _scan(b: Builder, op: Op) -> list[Value]:
    p = op.eqn.params
    jaxpr, _ = closed_parts(p["jaxpr"])
    nc, nk = scan_counts(p)
    frame = Frame(jaxpr, op, trips=p["length"])
    op.frames = [frame]
    _bind_consts(b, frame)
    avals = [v.aval for v in jaxpr.invars]
    consts = [_inside(v, b, a) for v, a in zip(op.ins[:nc], avals[:nc], strict=True)]
    carry = [_carry(v, b, a) for v, a in zip(op.ins[nc : nc + nk], avals[nc : nc + nk], strict=True)]
    xs = [_inside(v, b, a, 1) for v, a in zip(op.ins[nc + nk :], avals[nc + nk :], strict=True)]
    b.run(frame, [*consts, *carry, *xs])
    results = [b.read(frame, v) for v in jaxpr.outvars]
    for before, after in zip(carry, results[:nk], strict=True):
        b.alias(before, after, op)
    outs = [b.value(v.aval, c.nodes, op) for v, c in zip(op.eqn.outvars[:nk], carry, strict=True)]
    layers = next((v.nodes[0] for v in op.ins[nc + nk :] if v is not None), None)
    if layers is None:
        layers = NONE if p["length"] == 1 else b.unifier.node(p["length"])
    for v in op.ins[nc + nk :]:
        if v is not None:
            b.unifier.unify(layers, v.nodes[0], op)
    for var, y in zip(op.eqn.outvars[nk:], results[nk:], strict=True):
        inner = y.nodes if y is not None else b.unifier.fresh(var.aval.shape[1:])
        outs.append(b.value(var.aval, b.unifier.register((layers, *inner)), op))
    return outs


def _carry(value: Value | None, b: Builder, aval: Any) -> Value:
    return b.value(aval) if value is None else Value(aval, value.nodes)


def _while(b: Builder, op: Op) -> list[Value]:
    p = op.eqn.params
    cond, _ = closed_parts(p["cond_jaxpr"])
    body, _ = closed_parts(p["body_jaxpr"])
    ncc, nbc = p["cond_nconsts"], p["body_nconsts"]
    frames = [Frame(cond, op, trips=None), Frame(body, op, trips=None)]
    op.frames = frames
    init = op.ins[ncc + nbc :]
    carry = [_carry(v, b, a.aval) for v, a in zip(init, body.invars[nbc:], strict=True)]
    for frame, consts in ((frames[0], op.ins[:ncc]), (frames[1], op.ins[ncc : ncc + nbc])):
        _bind_consts(b, frame)
        inner = [_inside(v, b, a.aval) for v, a in zip(consts, frame.jaxpr.invars, strict=False)]
        b.run(frame, [*inner, *carry])
    for before, var in zip(carry, body.outvars, strict=True):
        b.alias(before, b.read(frames[1], var), op)
    return [b.value(v.aval, c.nodes, op) for v, c in zip(op.eqn.outvars, carry, strict=True)]


def _cond(b: Builder, op: Op) -> list[Value]:
    outs: list[Value] | None = None
    for branch in op.eqn.params["branches"]:
        jaxpr, _ = closed_parts(branch)
        frame = Frame(jaxpr, op)
        op.frames.append(frame)
        _bind_consts(b, frame)
        b.run(frame, [_inside(v, b, a.aval) for v, a in zip(op.ins[1:], jaxpr.invars, strict=True)])
        results = [b.read(frame, v) for v in jaxpr.outvars]
        if outs is None:
            outs = [
                b.value(v.aval, None if r is None else r.nodes, op)
                for v, r in zip(op.eqn.outvars, results, strict=True)
            ]
        for out, result in zip(outs, results, strict=True):
            b.alias(out, result, op)
    assert outs is not None
    return outs


def _named(b: Builder, op: Op) -> list[Value]:
    out = b.value(op.eqn.outvars[0].aval, None if op.ins[0] is None else op.ins[0].nodes, op)
    b.annotate(out, op.eqn.params["names"], f"mp.named at {op.source}")
    return [out]


def _rename(b: Builder, op: Op) -> list[Value]:
    b.renames.append(op)
    return [b.value(op.eqn.outvars[0].aval, op=op)]


def _place(b: Builder, op: Op) -> list[Value]:
    out = b.value(op.eqn.outvars[0].aval, None if op.ins[0] is None else op.ins[0].nodes, op)
    if op.name == "place":
        out.explicit = op.eqn.params["spec"]
    else:
        out.explicit = constraint_spec(op.eqn)
    return [out]


CONTROL: dict[str, Callable[[Builder, Op], list[Value]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "name_dims": _named,
    "rename_dims": _rename,
    "place": _place,
    "sharding_constraint": _place,
    **dict.fromkeys(having(lambda p: p.call), _call()),
    **dict.fromkeys(having(lambda p: p.own_derivative), _call(own=True)),
}
"""By primitive: (builder, op) → results."""
