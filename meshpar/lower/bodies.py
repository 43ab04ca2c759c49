"""Calls, loops and branches on local arrays: a body is walked with the shards that it reads, as the plan brings them in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from ..compat.jax import body_consts, scan_counts
from ..cost.fusion import itemsize
from ..layout import Spec
from ..program.ir import Frame, Op, Value
from ..rules.spmd import axis_index, cut, fine_names
from .derivatives import OWN, walk_body
from .moves import through_integers

if TYPE_CHECKING:
    from .shard_map import Walk


def call(walk: Walk, op: Op) -> None:
    (frame,) = op.frames
    (consts,) = body_consts(op.eqn)
    walk.enter_consts(frame, consts)
    invars = op.eqn.invars[len(op.eqn.invars) - len(frame.jaxpr.invars) :]
    for var, value in zip(invars, frame.ins(), strict=True):
        if isinstance(var, Literal):
            walk.put(value, literal(var), whole(value))
    if op.name in ("checkpoint", "remat", "remat2"):
        _checkpoint(walk, op, frame)
    elif op.name in OWN:
        walk_body(walk, op, frame)
    else:
        walk.frame(frame)
    for var, out in zip(frame.jaxpr.outvars, op.outs, strict=True):
        if isinstance(var, Literal):
            walk.put(out, literal(var), whole(out))


def _checkpoint(walk: Walk, op: Op, frame: Frame) -> None:
    """A rematerialised body.

    One that was differentiated computes again what the forward pass did: behind a barrier, as JAX lowers it, so that the
    compiler does not keep the first results (or the weights gathered for them). Another may yet be differentiated.
    """
    p = op.eqn.params
    ins = list({id(v): v for v in frame.ins() if id(v) in walk.x and id(v) not in walk.plan.generated}.values())
    if not p["differentiated"]:
        return _checkpointed(walk, op, frame, ins)
    guarded = p["prevent_cse"]
    if any(guarded) if isinstance(guarded, tuple) else guarded:
        before = {id(v): walk.x[id(v)] for v in ins}
        waiting = {id(v) for v in ins if id(v) in walk.partial}
        walk.x.update(zip(before, lax.optimization_barrier(list(before.values())), strict=True))
        walk.frame(frame)
        walk.x.update({i: x for i, x in before.items() if i not in waiting or i in walk.partial})
    else:
        walk.frame(frame)
    return None


def _checkpointed(walk: Walk, op: Op, frame: Frame, ins: Sequence[Value]) -> None:
    p = op.eqn.params
    known = {id(v) for v in ins}
    outs = [frame.env[v] for v in frame.jaxpr.outvars if not isinstance(v, Literal)]
    outs = [v for v in {id(v): v for v in outs}.values() if id(v) not in known | walk.plan.generated]
    if any(id(v) in walk.partial for v in ins):
        return walk.frame(frame)  # a sum that is settled in the body is settled after it as well

    def body(xs: Sequence[Any]) -> list[Any]:
        with walk.own_trace():
            walk.x.update(zip((id(v) for v in ins), xs, strict=True))
            walk.frame(frame)
            for v in outs:
                if id(v) in walk.here.extrema:
                    walk.settle(v)
            return [walk.x[id(v)] for v in outs]

    before = [walk.x[id(v)] for v in ins]
    guarded = p["prevent_cse"]
    guarded = any(guarded) if isinstance(guarded, tuple) else guarded
    results = jax.checkpoint(body, prevent_cse=guarded, policy=p["policy"])(before)
    walk.x.update(zip((id(v) for v in ins), before, strict=True))
    walk.x.update(zip((id(v) for v in outs), results, strict=True))
    return None


def _enter(walk: Walk, op: Op, i: int, inner: Value, need: Spec | None, drop: int = 0) -> tuple[Any, Spec]:
    """(what a body reads, where it lies inside)."""
    value = op.ins[i]
    if value is None:
        spec = whole(inner) if need is None else need
        return cut(walk.literal(op, i), whole(inner), spec, walk.sizes), spec
    spec = (walk.rest[id(value)] if id(value) in walk.plan.generated else walk.now[id(value)])[drop:]
    spec = spec if need is None else need
    return walk.operand(op, value, ((),) * drop + spec), spec


def _leave(walk: Walk, op: Op, frame: Frame, k: int, need: Spec | None) -> tuple[Any, Spec]:
    """(what a body returns, where it lies)."""
    var = frame.jaxpr.outvars[k]
    if id(op.outs[k]) in walk.plan.waiting:
        value = frame.env[var]
        return _strong(walk.x[id(value)], var.aval), walk.now[id(value)]
    if isinstance(var, Literal):
        everywhere: Spec = ((),) * len(np.shape(var.val))
        spec = everywhere if need is None else need
        return _strong(cut(literal(var), everywhere, spec, walk.sizes), var.aval), spec
    value = frame.env[var]
    walk.settle(value)
    if need is None:
        need = walk.rest[id(value)] if id(value) in walk.plan.generated else walk.now[id(value)]
    return _strong(walk.operand(op, value, need), var.aval), need


def _settle_all(walk: Walk, op: Op) -> None:
    for v in op.ins:
        if v is not None:
            walk.settle(v)


def _read(walk: Walk, frame: Frame, consts: Sequence[Any], entered: Sequence[tuple[Value, Any, Spec]]) -> None:
    walk.enter_consts(frame, consts)
    for value, x, spec in entered:
        walk.put(value, x, spec)


def scan(walk: Walk, op: Op) -> None:
    p, (frame,), (consts,) = op.eqn.params, op.frames, body_consts(op.eqn)
    nc, nk = scan_counts(p)
    inner = frame.ins()
    _settle_all(walk, op)
    partial = {id(w): walk.plan.accumulators[id(w)] for w in inner if id(w) in walk.plan.accumulators}

    def entered(i: int, w: Value) -> tuple[Any, Spec]:
        if id(w) in partial:  # one of the devices that add up brings the first value, the others zeros
            x, spec = _enter(walk, op, i, w, partial[id(w)].spec)
            axes = fine_names([a for a in partial[id(w)].axes if walk.sizes[a] > 1], walk.sizes)
            return (jnp.where(axis_index(axes) == 0, x, jnp.zeros((), x.dtype)) if axes else x), spec
        return _enter(walk, op, i, w, walk.rest[id(w)] if nc <= i < nc + nk else None, drop=int(i >= nc + nk))

    for i, w in enumerate(inner[:nc]):
        for spec in walk.plan.hoisted.get(id(w), ()):
            value = op.ins[i]
            assert value is not None
            walk.hoisted[id(w), spec] = walk.operand(op, value, spec)
    read = [entered(i, w) for i, w in enumerate(inner)]
    specs = [s for _, s in read]
    carry = [_strong(x, w.aval) for (x, _), w in zip(read[nc : nc + nk], inner[nc:], strict=False)]
    found: list[Spec] = []

    def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        with walk.own_trace():
            # else the compiler rounds all of the stack before the loop, and holds both
            xs = [through_integers(x) if w in rounded else x for w, x in zip(inner[nc + nk :], xs, strict=True)]
            values = [*(x for x, _ in read[:nc]), *carry, *xs]
            _read(walk, frame, consts, list(zip(inner, values, specs, strict=True)))
            walk.partial.update((i, (acc.axes, "sum")) for i, acc in partial.items())
            walk.frame(frame)
            outs = [_leave(walk, op, frame, k, specs[nc + k] if k < nk else None) for k in range(len(op.outs))]
            found[:] = [s for _, s in outs]
            return [x for x, _ in outs[:nk]], [x for x, _ in outs[nk:]]

    rounded = rounded_slices(frame, inner[nc + nk :])
    options = {k: p[k] for k in ("_split_transpose",) if k in p}
    carry, xs = walk.after_what_came(carry, [x for x, _ in read[nc + nk :]])
    carry, ys = lax.scan(body, carry, xs, length=p["length"], reverse=p["reverse"], unroll=p["unroll"], **options)
    walk.here.came.extend(sorted([*carry, *ys], key=lambda y: y.size)[:1])
    for k, (out, x) in enumerate(zip(op.outs, [*carry, *ys], strict=True)):
        walk.put(out, x, found[k] if k < nk else ((), *found[k]))
        if id(out) in walk.plan.waiting:
            walk.partial[id(out)] = walk.plan.waiting[id(out)], "sum"
        else:
            walk.finish(out)


def rounded_slices(frame: Frame, slices: Sequence[Value]) -> set[Value]:
    """The slices of stacks of floats (float32, float64) that the body of a loop rounds to a narrower type."""
    mine = {id(v): v for v in slices if v.shape}
    found: set[Value] = set()
    for op in frame.walk():
        x = op.ins[0] if op.name == "convert_element_type" else None
        floats = x is not None and np.issubdtype(x.aval.dtype, np.floating)
        if x is not None and floats and id(x) in mine and itemsize(op.outs[0].aval) < itemsize(x.aval):
            found.add(mine[id(x)])
    return found


def while_(walk: Walk, op: Op) -> None:
    p, (cond, body) = op.eqn.params, op.frames
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    cond_consts, body_consts_ = body_consts(op.eqn)
    _settle_all(walk, op)
    carried = body.ins()[nb:]
    specs = [walk.rest[id(w)] for w in carried]
    init = [
        _strong(_enter(walk, op, nc + nb + k, w, spec)[0], w.aval)
        for k, (w, spec) in enumerate(zip(carried, specs, strict=True))
    ]
    read = {}
    for frame, first, n in ((cond, 0, nc), (body, nc, nb)):
        ins = frame.ins()
        read[id(frame)] = [(ins[i], *_enter(walk, op, first + i, ins[i], None)) for i in range(n)]

    def run(frame: Frame, consts: Sequence[Any], carry: Sequence[Any], needs: Sequence[Spec]) -> list[Any]:
        with walk.own_trace():
            _read(walk, frame, consts, [*read[id(frame)], *zip(carried, carry, specs, strict=True)])
            walk.frame(frame)
            return [_leave(walk, op, frame, k, need)[0] for k, need in enumerate(needs)]

    results = lax.while_loop(
        lambda carry: run(cond, cond_consts, carry, [()])[0],
        lambda carry: run(body, body_consts_, carry, specs),
        init,
    )
    for out, x, spec in zip(op.outs, results, specs, strict=True):
        walk.put(out, x, spec)
        walk.finish(out)


def cond(walk: Walk, op: Op) -> None:
    _settle_all(walk, op)
    index = walk.literal(op, 0) if op.ins[0] is None else walk.at(op.ins[0], ())
    needs = [walk.rest[id(out)] for out in op.outs]

    def branch(frame: Frame, consts: Sequence[Any]) -> Callable[[], list[Any]]:
        read = [(w, *_enter(walk, op, i + 1, w, None)) for i, w in enumerate(frame.ins())]

        def run() -> list[Any]:
            with walk.own_trace():
                _read(walk, frame, consts, read)
                walk.frame(frame)
                return [_leave(walk, op, frame, k, need)[0] for k, need in enumerate(needs)]

        return run

    branches = [branch(f, c) for f, c in zip(op.frames, body_consts(op.eqn), strict=True)]
    results = lax.switch(lax.convert_element_type(index, np.int32), branches)
    for out, x, spec in zip(op.outs, results, needs, strict=True):
        walk.put(out, x, spec)


HANDLERS: Mapping[str, Callable[[Walk, Op], None]] = {"scan": scan, "while": while_, "cond": cond}
"""By primitive; what is not here is a call, whose body is walked in place."""


def whole(value: Value) -> Spec:
    return ((),) * len(value.shape)


def literal(var: Any) -> Any:
    return np.asarray(var.val, var.aval.dtype)


def _strong(x: Any, aval: Any) -> Any:
    """What loops carry keeps one type."""
    return x if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) else lax.convert_element_type(x, aval.dtype)
