"""Where the compiler must not choose: the order of loops, of large sums, and of results in place of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..compat.quirks import CUT_HERE, LARGE_SUM
from ..cost.donation import gathered_apart, in_place
from ..plan.plan import Plan
from ..plan.spec import itemsize, local_bytes
from ..plan.steps import Barrier, Body, Call, Loop, Reduce, Reshard, Shard, Step, rewritten
from ..program.ir import Frame, Value


def _again(shard: Shard) -> Shard:
    return Shard(shard.value, shard.spec, shard.partial, shard.kind)


def loops_in_turn(plan: Plan) -> Plan:
    """A loop waits for the loops and the large reduce-scattered sums before it.

    The compiler may order what is independent as it likes, and likes to keep whole gradients and gathered weights waiting while it
    runs other loops first. What is large and sent whole is cut where it is sent, not where it is read.
    """

    def size(shard: Shard, spec: Sequence[tuple[str, ...]]) -> float:
        return local_bytes(shard.value.shape, itemsize(shard.value.aval), tuple(spec), plan.sizes)

    def home(body: Body) -> Body:
        return walk(body, [])

    def walk(body: Body, came: list[Shard]) -> Body:
        steps: list[Step] = []
        for step in body.steps:
            if isinstance(step, Call):
                step = replace(step, body=walk(step.body, came))
            elif isinstance(step, Reduce):
                before, after = size(step.source, step.source.spec), size(step.source, step.scattered)
                if after < before and before >= CUT_HERE:
                    raw = _again(step.result)
                    steps.append(replace(step, result=raw))
                    if before >= LARGE_SUM:
                        came.append(step.result)
                    step = Barrier(step.op, (raw,), (step.result,))
            elif isinstance(step, Loop) and step.op.name == "scan":
                if came:
                    reads = tuple(dict.fromkeys((*step.inits, *step.stacks)))
                    held = dict(zip(reads, map(_again, reads), strict=True))
                    if reads:
                        steps.append(Barrier(step.op, reads, tuple(held.values()), tuple(came)))
                    came.clear()
                    step = replace(
                        step, inits=tuple(held[s] for s in step.inits), stacks=tuple(held[s] for s in step.stacks)
                    )
                came += sorted(step.results, key=lambda s: size(s, s.spec))[:1]
            steps.append(step)
        return replace(body, steps=tuple(steps))

    return replace(plan, body=_homes(plan.body, home))


def _homes(body: Body, change: object) -> Body:
    """Change what JAX traces into one body: the program and the bodies of loops and branches, with the calls in them."""

    def inner(body: Body) -> Body:
        is_call = body.frame.parent is not None and body.frame.parent.name not in ("scan", "while", "cond")
        return body if is_call else change(body)  # type: ignore[operator]

    return rewritten(body, inner)


def results_in_turn(plan: Plan) -> Plan:
    """Large results that are gathered into the place of donated arguments are put there one after the other."""
    outputs = {plan.body.outputs[k].value for k in in_place(plan)}  # type: ignore[union-attr]
    last: list[Shard] = []

    def size(shard: Shard) -> float:
        return local_bytes(shard.value.shape, itemsize(shard.value.aval), shard.spec, plan.sizes)

    def walk(body: Body) -> Body:
        steps: list[Step] = []
        for step in body.steps:
            if isinstance(step, Call):
                step = replace(step, body=walk(step.body))
            elif (
                isinstance(step, Reshard)
                and not step.copy
                and step.result.value in outputs
                and gathered_apart(size(step.result), size(step.source))
            ):
                if last:
                    held = _again(step.source)
                    steps.append(Barrier(step.op, (step.source,), (held,), tuple(last)))
                    step = replace(step, source=held)
                step = replace(step, apart=True)
                last[:] = [step.result]
            steps.append(step)
        return replace(body, steps=tuple(steps))

    return replace(plan, body=walk(plan.body)) if outputs else plan


def slices_apart(plan: Plan) -> Plan:
    """Slices of a stack of floats that a loop rounds to a narrower type cannot be seen through.

    Else the compiler rounds all of the stack before the loop, and holds both.
    """

    def change(body: Body) -> Body:
        steps: list[Step] = []
        for step in body.steps:
            if isinstance(step, Loop) and step.op.name == "scan":
                inner = step.body
                carries = len(step.inits)
                rounded = _rounded(inner.frame, [s.value for s in inner.inputs[carries:]])
                new = {s: _again(s) for s in inner.inputs[carries:] if s.value in rounded}
                if new:
                    barrier = Barrier(step.op, tuple(new.values()), tuple(new), opaque=True)
                    inputs = tuple(new.get(s, s) for s in inner.inputs)
                    step = replace(step, inner=(replace(inner, inputs=inputs, steps=(barrier, *inner.steps)),))
            steps.append(step)
        return replace(body, steps=tuple(steps))

    return replace(plan, body=rewritten(plan.body, change))


def _rounded(frame: Frame, slices: Sequence[Value]) -> set[Value]:
    """The slices of stacks of floats that the body of a loop converts to a narrower type."""
    mine = {v for v in slices if v.shape}
    found: set[Value] = set()
    for op in frame.walk():
        x = op.ins[0] if op.name == "convert_element_type" else None
        floats = x is not None and x in mine and np.issubdtype(x.aval.dtype, np.floating)
        if x is not None and floats and itemsize(op.outs[0].aval) < itemsize(x.aval):
            found.add(x)
    return found
