"""Sums that end split: which are sent whole, over the links of all torus dimensions at once, and cut afterwards.

A reduce-scatter over several torus dimensions goes over one after the other, which sends least. As an all-reduce the whole sum has
the links of all of them at once, for twice the bytes: on three dimensions that is two thirds of the time. And where sums run on
cores of their own, the compiler has products beside all of a whole sum, but beside the first stage alone of a staged one. If a
body's products also wait for other sums (those of activations), these stand behind the gradients', and what is left exposed is what
the links are busy for: the form that keeps them busy for less is the better one. Over two whole torus dimensions both take the
same time, and by the schedules of Llama 3 with sequence parallelism on v5p whole sums leave 66 ms more exposed (8B), and 111
(70B). Over one, and every eighth device of the other, a staged sum takes 2.6 times a whole one, as eight groups share the links of
its first stage: on v6e (`data=32, model=8`) staged ones leave 31 ms more exposed (8B).

A pass over a plan, after the one that looks for rings: it takes what leaves less exposed
(:func:`meshpar.cost.collective_matmul.reduction_costs`).

Under ``lowering="jit"`` XLA decides: on v4, v5e, v5p and v6e (libtpu 0.0.42; sums over one and over several torus dimensions)
XLA leaves a sum whole, and cuts it, where every device gets a part of its own, and scatters all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..cost.collective_matmul import all_reduce_cost, matmul_seconds, reduction_costs
from ..cost.fusion import MATMULS
from ..hardware.collective_ops import collective_volume, wire_bytes
from ..plan.collectives import Collective
from ..plan.manual import ManualOps, on_cpus
from ..plan.plan import Plan
from ..plan.spec import shard_count
from ..plan.steps import Body, Reduce, Scatter, Step, rewrite_bodies
from ..program.ir import Value
from ..units import format_bytes, format_seconds
from .collective_matmul import BY_COST
from .dependencies import reaches


def choose_all_reduce(plan: Plan) -> Plan:
    """Send sums whole where that leaves less exposed, if ``plan.overlap`` is one of those that decide by cost; where XLA does, if
    it partitions."""
    if plan.lowering == "jit" and on_cpus(plan):
        return _without_reduce_scatters(plan)
    if plan.chip is None or not plan.chip.torus:
        return plan
    if plan.lowering == "jit" and plan.compiler.partitioner_prefers_all_reduce:
        partitioned = True
    elif plan.lowering != "jit" and plan.overlap in BY_COST:
        partitioned = False
    else:
        return plan

    def change(body: Body) -> Body:
        if not any(isinstance(s, Reduce) for s in body.steps):
            return body
        queued = not partitioned and plan.is_async("all-reduce") and _waits_for_sums(plan, body)
        change_sum = _as_partitioned if partitioned else partial(_by_cost, queued=queued)
        return body.with_steps(
            [_decided(plan, s, change_sum) if isinstance(s, Reduce) and s.ring is None else s for s in body.steps]
        )

    body = rewrite_bodies(plan.body, change)
    return plan if body is plan.body else replace(plan, body=body)


def _without_reduce_scatters(plan: Plan) -> Plan:
    """The plan with an all-reduce for every reduce-scatter that is left to XLA's partitioner.

    XLA's compiler for CPUs makes no reduce-scatters (jaxlib 0.10.2): it all-reduces, and each device takes its slice. Ops that the
    lowering partitions itself have theirs.
    """
    manual = ManualOps(plan)

    def changed(step: Step) -> Step:
        if not isinstance(step, Reduce) or not step.scatters:
            return step
        op = step.source.value.op
        return step if op is not None and manual.has(plan.runs.get(op)) else _decided(plan, step, _as_all_reduce)

    body = rewrite_bodies(plan.body, lambda body: body.with_steps(list(map(changed, body.steps))))
    return plan if body is plan.body else replace(plan, body=body)


def _as_all_reduce(plan: Plan, step: Reduce, old: Collective) -> Collective | None:
    """The all-reduce in place of a reduce-scatter."""
    if old.op != "reduce-scatter":
        return None
    devices = math.prod(plan.sizes[a] for a in old.axes)
    sent = wire_bytes("all-reduce", collective_volume(old.op, old.bytes, devices), devices)
    form = all_reduce_cost(plan, old, 0.0)
    why = (
        f"XLA's compiler for CPUs makes no reduce-scatters: {format_bytes(sent)} sent by an all-reduce; "
        f'lowering="shard_map" reduce-scatters, which sends {format_bytes(old.bytes)}'
    )
    seconds = old.seconds if form is None else form.seconds
    return replace(old, op="all-reduce", algorithm="all_reduce", bytes=sent, seconds=seconds, why=why)


def _decided(plan: Plan, step: Reduce, change: Callable[[Plan, Reduce, Collective], Collective | None]) -> Reduce:
    """A sum with what ``change`` has in place of its reduce-scatters; None: these stay."""
    collectives, scatters = list(step.collectives), list(step.scatters)
    sent = 0
    for k, scatter in enumerate(step.scatters):
        if 0 in step.source.value.shape or shard_count(scatter.axes, plan.sizes) == 1:
            continue
        new = change(plan, step, collectives[sent])
        if new is not None:
            collectives[sent], scatters[k] = new, Scatter(scatter.dim, scatter.axes, "all_reduce")
        sent += 1
    if scatters == list(step.scatters):
        return step
    return replace(step, collectives=tuple(collectives), scatters=tuple(scatters))


def _by_cost(plan: Plan, step: Reduce, old: Collective, *, queued: bool) -> Collective | None:
    """The all-reduce instead of a staged reduce-scatter, if it pays.

    Args:
      queued: sums for which products wait stand behind it, so that it counts for how long the links are busy.
    """
    if not old.entry.stage_by_stage:
        return None
    forms = reduction_costs(plan, old, beside(plan, step.source.value))
    if "all_reduce" not in forms:
        return None
    staged, whole = forms["staged"], forms["all_reduce"]
    if (staged.seconds - whole.seconds if queued else staged.exposed - whole.exposed) < plan.compiler.min_gain_seconds:
        return None
    why = (
        f"whole {format_seconds(whole.seconds)} on the links of all torus dimensions at once, "
        f"{format_seconds(whole.exposed)} of it exposed; "
        f"staged {format_seconds(staged.seconds)}, {format_seconds(staged.exposed)} exposed. It sends "
        f"{format_bytes(whole.bytes)} instead of "
        f"{format_bytes(old.bytes)}"
    )
    return replace(old, op="all-reduce", algorithm="all_reduce", bytes=whole.bytes, seconds=whole.seconds, why=why)


def _as_partitioned(plan: Plan, step: Reduce, old: Collective) -> Collective | None:
    """The all-reduce that XLA makes of a reduce-scatter if every device has a part of its own afterwards."""
    parts = math.prod(shard_count(s.axes, plan.sizes) for s in step.scatters)
    whole = all_reduce_cost(plan, old, 0.0) if parts == plan.mesh.size else None
    if whole is None:
        return None
    why = (
        f"XLA leaves a sum of which every device has a part whole: {format_bytes(whole.bytes)} sent; "
        f'lowering="shard_map" can scatter it, '
        f"which sends {format_bytes(old.bytes)}"
    )
    return replace(old, op="all-reduce", algorithm="all_reduce", bytes=whole.bytes, seconds=whole.seconds, why=why)


def beside(plan: Plan, value: Value) -> float:
    """Seconds of the product that runs while a sum is sent: one like those that it is of; 0 where products wait for it."""
    if value.op is None or plan.chip is None or _waited_for(plan, value):
        return 0.0
    return math.fsum(_products(plan, [value]))


def _waits_for_sums(plan: Plan, body: Body) -> bool:
    """Whether the reductions that matmuls of a body depend on take more than ``CompilerModel.max_blocking_fraction`` of the time
    of all reductions of the body."""
    sums = [s for s in body.steps if isinstance(s, Reduce)]
    seconds = [math.fsum(c.seconds or 0.0 for c in s.sends) for s in sums]
    waited = math.fsum(n for s, n in zip(sums, seconds, strict=True) if _waited_for(plan, s.source.value))
    return waited > plan.compiler.max_blocking_fraction * math.fsum(seconds)


def _waited_for(plan: Plan, value: Value) -> bool:
    """Whether products of its body follow from a sum."""
    op = value.op
    return op is not None and plan.program.cached(reaches)[op.frame.home].is_followed(op)


def _products(plan: Plan, values: Sequence[Value]) -> list[float]:
    """Seconds of the products that an unreduced sum consists of."""
    assert plan.chip is not None
    found: list[float] = []
    for value in values:
        run = None if value.op is None else plan.runs.get(value.op)
        if run is None:
            continue
        if run.op.name in MATMULS:
            found.append(matmul_seconds(plan, plan.chip, run))
        elif any(s.partial for s in run.reads):
            found += _products(plan, [s.value for s in run.reads])
    return found
