"""Where the compiler must not choose: the order of loops, of large sums, and of results in place of arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np

from ..cost.donation import aliased_inputs, gathered_then_copied
from ..cost.flops import smaller_operand_bytes
from ..cost.fusion import FUSIBLE, MATMULS, REDUCTIONS
from ..plan.plan import Plan
from ..plan.spec import itemsize, value_bytes
from ..plan.steps import Barrier, Body, Loop, Order, Reduce, Reshard, Run, Shard, Step, replace_steps, rewrite_bodies
from ..program.ir import Program, Value


def serialize_loops(plan: Plan) -> Plan:
    """A loop waits for the loops and the large reduce-scattered sums before it.

    The compiler may order what is independent as it likes, and likes to keep whole gradients and gathered weights waiting while it
    runs other loops first. What is large and sent whole is cut where it is sent, not where it is read.
    """

    def home(body: Body) -> Body:
        came: list[Shard] = []

        def change(step: Reduce | Loop) -> Sequence[Step]:
            if isinstance(step, Reduce):
                before = plan.shard_bytes(step.source)
                after = value_bytes(step.source.value, step.scattered, plan.sizes)
                if after >= before or before < plan.compiler.slice_barrier_bytes:
                    return (step,)
                raw = step.result.copy()
                if before >= plan.compiler.serialized_reduction_bytes:
                    came.append(step.result)
                return replace(step, result=raw), Barrier(step.op, (raw,), (step.result,))
            if not step.op.primitive.scan:
                return (step,)
            steps: list[Step] = []
            if came:
                reads = tuple(dict.fromkeys((*step.inits, *step.stacks)))
                held = dict(zip(reads, (s.copy() for s in reads), strict=True))
                if reads:
                    steps.append(Barrier(step.op, reads, tuple(held.values()), tuple(came)))
                came.clear()
                step = replace(
                    step, inits=tuple(held[s] for s in step.inits), stacks=tuple(held[s] for s in step.stacks)
                )
            came.extend(sorted(step.results, key=plan.shard_bytes)[:1])
            return (*steps, step)

        return replace_steps(body, (Reduce, Loop), change)

    return _with_body(plan, _homes(plan.body, home))


def _with_body(plan: Plan, body: Body) -> Plan:
    return plan if body is plan.body else replace(plan, body=body)


def _homes(body: Body, change: Callable[[Body], Body]) -> Body:
    """Change what JAX traces into one body: the program and the bodies of loops and branches, with the calls in them."""

    def inner(body: Body) -> Body:
        is_call = body.frame.is_call
        return body if is_call else change(body)

    return rewrite_bodies(body, inner)


def _with_scans(plan: Plan, change: Callable[[Loop], Loop]) -> Plan:
    """Change every ``scan``."""

    def inner(body: Body) -> Body:
        scans = {k: s for k in body.nested if isinstance(s := body.steps[k], Loop) and s.op.primitive.scan}
        if not scans:
            return body
        steps = list(body.steps)
        for k, step in scans.items():
            steps[k] = change(step)
        return body.with_steps(steps)

    return _with_body(plan, rewrite_bodies(plan.body, inner))


def serialize_results(plan: Plan) -> Plan:
    """Large results that are gathered into the place of donated arguments are put there one after the other."""
    outputs = {plan.body.outputs[k].value for k in aliased_inputs(plan)}  # type: ignore[union-attr]
    last: list[Shard] = []

    def change(step: Reshard) -> Sequence[Step]:
        if (
            step.copy
            or step.result.value not in outputs
            or not gathered_then_copied(plan, plan.shard_bytes(step.result), plan.shard_bytes(step.source))
        ):
            return (step,)
        steps: list[Step] = []
        if last:
            held = step.source.copy()
            steps.append(Barrier(step.op, (step.source,), (held,), tuple(last)))
            step = replace(step, source=held)
        last[:] = [step.result]
        return (*steps, replace(step, separate_buffer=True))

    return _with_body(plan, replace_steps(plan.body, Reshard, change)) if outputs else plan


def separate_slices(plan: Plan) -> Plan:
    """Slices of a stack of floats that a loop rounds to a narrower type cannot be seen through.

    Else the compiler rounds all of the stack before the loop, and holds both.
    """

    rounded = plan.program.cached(_rounded)

    def change(step: Loop) -> Loop:
        inner = step.body
        new = {s: s.copy() for s in inner.inputs[len(step.inits) :] if s.value in rounded}
        if not new:
            return step
        barrier = Barrier(step.op, tuple(new.values()), tuple(new), opaque=True)
        inputs = tuple(new.get(s, s) for s in inner.inputs)
        return replace(step, inner=(replace(inner, inputs=inputs, steps=(barrier, *inner.steps)),))

    return _with_scans(plan, change)


def separate_matmuls(plan: Plan) -> Plan:
    """A large matrix product is a kernel of its own where much is computed from its result.

    Else the compiler computes it inside the product, and its matrix units wait meanwhile, or multiply smaller tiles
    (:data:`meshpar.compat.quirks.FUSED_EPILOGUE`):

    - several arrays that other products read: the way back of ``silu(gate) * up``;
    - sums over what it makes and other arrays: the way back of a norm.
    """
    if "FUSED_EPILOGUE" not in plan.compiler.quirks:
        return plan
    most, stays = plan.compiler.epilogue_max_matmuls, plan.compiler.epilogue_operand_bytes

    def home(body: Body) -> Body:
        steps = body.with_calls
        products: set[Shard] = set()  # results of large products, and views of these
        makers: list[Run] = []
        spread: set[Shard] = set()  # from rows and scalars
        for step in steps:
            if isinstance(step, Run):
                if step.op.primitive.dot:
                    if (
                        step.in_ring != "reduce"
                        and plan.shard_bytes(step.results[0]) >= plan.compiler.large_buffer_bytes
                    ):
                        makers.append(step)
                        products.update(step.results)
                elif step.op.primitive.broadcast:
                    spread.update(step.results)
                if products and _is_view(step) and step.reads[0] in products:
                    products.update(step.results)
        if not products:
            return body
        readers: dict[Shard, list[Run | Barrier]] = {}  # of what follows from products
        depth: dict[Shard, int] = {}  # products, one after the other, that it follows from
        for step in steps:
            deep = [s for s in step.reads if s in depth]
            if isinstance(step, Run | Barrier):
                for shard in deep:
                    readers.setdefault(shard, []).append(step)
            if isinstance(step, Barrier):
                depth.update((r, depth[s]) for s, r in zip(step.sources, step.results, strict=True) if s in depth)
            elif (more := _multiplies(step)) or deep:
                depth.update(dict.fromkeys(step.makes, max([depth[s] for s in deep], default=0) + more))
        apart: dict[Shard, Shard] = {}  # what a product gives or takes → the same behind a barrier
        for step in makers:
            product = step.results[0]
            ops, found, inside = _between(product, readers, depth)
            least = plan.shard_bytes(product)
            read = [s for s in found if s not in products]
            given = dict.fromkeys(s for each in ops for s in each.reads if s in products)
            others = {s for each in ops for s in each.reads} - inside - products - spread
            beside = any(plan.shard_bytes(s) >= least for s in others)
            large = [s for s in read if plan.shard_bytes(s) >= least]
            streams = smaller_operand_bytes(step, plan.sizes) > stays
            cut: Sequence[Shard] = ()
            if len(large) > 1:
                cut = (*given, *read) if streams or len(given) <= most else ()
            elif beside and streams and any(each.op.name in REDUCTIONS for each in ops):
                cut = tuple(given)
            apart.update((s, s.copy()) for s in cut if s not in apart)

        def across(step: Run) -> Run:
            if apart.keys().isdisjoint(step.operands) or _is_view(step):
                return step
            if not (_multiplies(step) or step.op.name in FUSIBLE | REDUCTIONS):
                return step
            return replace(step, operands=tuple(s if s is None else apart.get(s, s) for s in step.operands))

        def change(step: Run) -> Sequence[Step]:
            cut = tuple(s for s in step.results if s in apart)
            step = across(step)
            return (step, Barrier(step.op, cut, tuple(apart[s] for s in cut))) if cut else (step,)

        return replace_steps(body, Run, change) if apart else body

    return _with_body(plan, _homes(plan.body, home))


def order_stacks(plan: Plan) -> Plan:
    """What loops stack of large products lies as the products of the way back read it, on chips where these take another order.

    (:data:`meshpar.compat.quirks.COPIED_STACK`)
    """
    if "COPIED_STACK" not in plan.compiler.quirks:
        return plan

    def change(step: Loop) -> Loop:
        body, carries = step.body, len(step.inits)
        products: set[Shard] = set()
        for run in body.with_calls:
            if isinstance(run, Run) and (_multiplies(run) or (_is_view(run) and run.reads[0] in products)):
                products.update(run.results)
        new = {
            s: s.copy()
            for s in body.outputs[carries:]
            if s in products and len(s.spec) == 3 and plan.shard_bytes(s) >= plan.compiler.large_buffer_bytes
        }
        if not new:
            return step
        orders = tuple(Order(s.value.op, s, made, (0, 2, 1)) for s, made in new.items())
        outputs = tuple(s if s is None or k < carries else new.get(s, s) for k, s in enumerate(body.outputs))
        return replace(step, inner=(*step.inner[:-1], replace(body, steps=(*body.steps, *orders), outputs=outputs)))

    return _with_scans(plan, change)


def _multiplies(step: Step) -> TypeGuard[Run]:
    return isinstance(step, Run) and step.op.name in MATMULS


def _between(
    product: Shard, readers: Mapping[Shard, Sequence[Run | Barrier]], depth: Mapping[Shard, int]
) -> tuple[list[Run], list[Shard], set[Shard]]:
    """(the elementwise ops and sums that follow from a product, and from no later one; what they make and products read; all that
    the ops make)."""
    ops: dict[Run, None] = {}
    read: dict[Shard, None] = {}
    todo, seen = [(product, product)], {product}  # a shard, and the same before barriers
    while todo:
        shard, made = todo.pop()
        for step in readers.get(shard, ()):
            if _multiplies(step):
                read[made] = None
                continue
            if isinstance(step, Barrier):
                results = [(r, made) for s, r in zip(step.sources, step.results, strict=True) if s is shard]
            elif _is_view(step):
                results = [(r, r) for r in step.results]
            elif step.op.name in FUSIBLE:
                ops[step] = None
                results = [(r, r) for r in step.results]
            elif step.op.name in REDUCTIONS:
                ops[step] = None
                continue
            else:
                continue
            results = [(r, m) for r, m in results if depth[r] == depth[product] and r not in seen]
            seen.update(r for r, _ in results)
            todo += results
    return list(ops), list(read), seen


def _is_view(step: Run) -> bool:
    """Whether it changes no number; ``jax.checkpoint`` rounds what it keeps to its own type."""
    return step.op.primitive.view or step.op.primitive.identity or step.op.primitive.rounding


def _rounded(program: Program) -> set[Value]:
    """The floats that some op converts to a narrower type."""
    found: set[Value] = set()
    for op in program.root.walk():
        x = op.ins[0] if op.primitive.cast else None
        floats = x is not None and x.shape and np.issubdtype(x.aval.dtype, np.floating)
        if x is not None and floats and itemsize(op.outs[0].aval) < itemsize(x.aval):
            found.add(x)
    return found
