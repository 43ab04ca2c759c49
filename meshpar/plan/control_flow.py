"""Calls, loops and branches in a plan: where a body finds what it reads, and leaves what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from ..compat.jax import scan_counts
from ..layout import Spec
from ..program.ir import Frame, Op, Value
from .plan import Accumulator

if TYPE_CHECKING:
    from .planner import Planner


@dataclass(slots=True)
class Accumulation:
    """A carry that a loop only adds to: ``carry + addend``, and nothing else reads either.

    Attributes:
      carry: the carry as the body sees it.
      addend: what is added.
      widened: the narrower value that ``addend`` was converted from, if it was.
      starts: what the carry starts from, outside.
    """

    carry: Value
    addend: Value
    widened: Value | None
    starts: Value | None


def call(p: Planner, op: Op) -> None:
    for frame in op.frames:
        for v in frame.ins():
            _literal(p, v)
        p.frame(frame)
    for out in op.outs:
        _literal(p, out)


def _literal(p: Planner, value: Value) -> None:
    """Results of bodies that are literals lie everywhere."""
    if id(value) not in p.now:
        p.whole(value)


def _enter(p: Planner, outer: Value | None, inner: Value, need: Spec, op: Op, drop: int = 0) -> None:
    """Bring what a body reads into place, and note where it lies inside."""
    if outer is not None:
        p.operand(op, outer, ((),) * drop + need)
    p.now[id(inner)] = need


def _place(p: Planner, outer: Value | None, inner: Value) -> Spec:
    """Where a value lies, or nowhere in particular for a literal."""
    return p.now[id(outer)] if outer is not None else ((),) * len(inner.shape)


def _leave(p: Planner, frame: Frame, var: Any, need: Spec | None, op: Op, waits: bool) -> Spec | None:
    """Settle what a body returns, and bring it into the spec that is asked for."""
    if hasattr(var, "val"):
        return need
    value = frame.env[var]
    if waits:
        return p.now[id(value)]
    p.settle(value, op)
    if need is not None:
        p.operand(op, value, need)
        return need
    return p.now[id(value)]


def _body(
    p: Planner, frame: Frame, needs: list[Spec | None], op: Op, waiting: frozenset[int] = frozenset()
) -> list[Spec | None]:
    """Bring the results of a loop body into place, inside the loop; those in ``waiting`` stay partial sums."""
    before = p.count
    p.count = None if frame.trips is None or before is None else before * frame.trips
    pairs = zip(frame.jaxpr.outvars, needs, strict=True)
    outer, p.within = p.within, frame
    out = [_leave(p, frame, v, need, op, k in waiting) for k, (v, need) in enumerate(pairs)]
    p.count, p.within = before, outer
    return out


def scan(p: Planner, op: Op) -> None:
    nc, nk = scan_counts(op.eqn.params)
    (frame,) = op.frames
    inner = frame.ins()
    for v in op.ins:
        p.ready(v, op)
    adding = accumulations(p, op, frame, nc, nk)
    for i, (v, w) in enumerate(zip(op.ins, inner, strict=True)):
        if i < nc:
            _enter(p, v, w, _place(p, v, w), op)
            if v is not None and v is not w:
                p.loop_consts[id(w)] = op, v, p.count
        elif i >= nc + nk:
            _enter(p, v, w, _place(p, v, w)[1:] if v is not None else ((),) * len(w.shape), op, 1)
        elif i - nc not in adding:
            _enter(p, v, w, p.rest(w), op)
    p.accumulating.update((id(a.carry), a) for a in adding.values())
    p.frame(frame)
    waiting: dict[int, Value] = {}
    for k, var in enumerate(frame.jaxpr.outvars):
        value = None if hasattr(var, "val") else frame.env[var]
        if value is None or id(value) not in p.partial:
            continue
        if k in adding or (k >= nk and p.depth and adds_up(p, value)):
            waiting[k] = value
    needs: list[Spec | None] = [p.now[id(w)] for w in inner[nc : nc + nk]]
    needs += [None] * (len(frame.jaxpr.outvars) - nk)
    results = _body(p, frame, needs, op, frozenset(waiting))
    for k, out in enumerate(op.outs):
        spec = results[k] or ((),) * (len(out.shape) - (k >= nk))
        p.now[id(out)] = spec if k < nk else ((), *spec)
        if k in waiting:
            p.wait_as(out, waiting[k])
        else:
            p.finish(op, out)


def accumulations(p: Planner, op: Op, frame: Frame, nc: int, nk: int) -> dict[int, Accumulation]:
    """The carries that a loop only adds to, by their place among the carries, where they start from no data."""
    uses: dict[int, int] = {}
    for v in (v for o in frame.ops for v in o.ins if v is not None):
        uses[id(v)] = uses.get(id(v), 0) + 1
    outs = [None if hasattr(v, "val") else frame.env[v] for v in frame.jaxpr.outvars]
    for v in outs:
        if v is not None:
            uses[id(v)] = uses.get(id(v), 0) + 1
    found = {}
    for k, (start, carry) in enumerate(zip(op.ins[nc : nc + nk], frame.ins()[nc : nc + nk], strict=True)):
        total = outs[k]
        if total is None or total.op is None or total.op.name not in ("add", "add_any") or total.op.frame is not frame:
            continue
        a, b = total.op.ins
        addend = b if a is carry else a if b is carry else None
        if addend is None or addend is carry or addend.shape != carry.shape:
            continue
        if uses[id(carry)] != 1 or uses[id(total)] != 1 or not (start is None or id(start) in p.generated):
            continue
        widened = None
        made = addend.op
        if (
            made is not None
            and made.name == "convert_element_type"
            and uses[id(addend)] == 1
            and made.ins[0] is not None
        ):
            narrow, wide = made.ins[0].aval.dtype, addend.aval.dtype
            if jnp.issubdtype(narrow, jnp.floating) and jnp.promote_types(narrow, wide) == wide:
                widened = made.ins[0]
        found[k] = Accumulation(carry, addend, widened, start)
    return found


def adds_up(p: Planner, value: Value) -> bool:
    """Whether settling a partial sum would leave it as large: then it may wait for the end of the loop around."""
    return not p.scatters(value)


def accumulate(p: Planner, op: Op, acc: Accumulation) -> bool:
    """Plan ``carry + addend``: where the addend is a partial sum, so is the carry, from its first value on."""
    added, carry = acc.addend, acc.carry
    if id(added) not in p.partial or p.kind_of[id(added)] != "sum":
        _enter(p, acc.starts, carry, p.rest(carry), op)
        return False
    p.now[id(carry)] = p.now[id(added)]
    p.plan.accumulators[id(carry)] = Accumulator(p.now[id(added)], p.partial[id(added)])
    p.pass_on(op, added, op.outs[0], p.now[id(added)])
    return True


def while_(p: Planner, op: Op) -> None:
    params = op.eqn.params
    nc, nb = params["cond_nconsts"], params["body_nconsts"]
    for v in op.ins:
        p.ready(v, op)
    cond, body = op.frames
    carry = body.ins()[nb:]
    for v, w in zip(op.ins[nc + nb :], carry, strict=True):
        _enter(p, v, w, p.rest(w), op)
    for frame, consts in ((cond, op.ins[:nc]), (body, op.ins[nc : nc + nb])):
        for v, w in zip(consts, frame.ins(), strict=False):
            _enter(p, v, w, _place(p, v, w), op)
    p.frame(cond)
    _body(p, cond, [()], op)
    p.frame(body)
    results = _body(p, body, [p.rest(w) for w in carry], op)
    for out, spec in zip(op.outs, results, strict=True):
        p.now[id(out)] = spec or ((),) * len(out.shape)
        p.finish(op, out)


def cond(p: Planner, op: Op) -> None:
    for v in op.ins:
        p.ready(v, op)
    for frame in op.frames:
        for v, w in zip(op.ins[1:], frame.ins(), strict=True):
            _enter(p, v, w, _place(p, v, w), op)
        p.frame(frame)
        _body(p, frame, [p.rest(out) for out in op.outs], op)
    for out in op.outs:
        p.now[id(out)] = p.rest(out)


HANDLERS: Mapping[str, Callable[[Planner, Op], None]] = {"scan": scan, "while": while_, "cond": cond}
"""By primitive; what is not here is a call, whose body is walked in place."""
