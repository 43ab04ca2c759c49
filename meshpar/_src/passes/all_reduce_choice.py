"""Chooses, for each gradient reduction with a sharded result, a staged reduce-scatter or an all-reduce followed by a local slice.

A reduce-scatter over several torus dimensions runs one stage per dimension, which sends the fewest bytes. An all-reduce uses the
links of all dimensions at once, for twice the bytes: with three dimensions it takes two thirds of the time. Where reductions run on
the SparseCores, the compiler overlaps matmuls with all of an all-reduce, but only with the first stage of a staged reduce-scatter.
If matmuls of the body also depend on other reductions (of activations), these queue behind the gradients' on the links. Then the
time on the links counts instead of the exposed time: over two full torus dimensions both algorithms take the same time, and by the
schedules of Llama 3 with sequence parallelism on v5p all-reduces expose 66 ms more (8B) and 111 ms (70B). Over one full dimension
and every eighth device of another, a staged reduce-scatter takes 2.6 times as long as an all-reduce, since eight groups share the
links of its first stage: on v6e (`data=32, model=8`) it exposes 31 ms more (8B).

The pass runs after the one that looks for rings, and compares exposed seconds
(:func:`cost.collective_matmul.reduction_costs`). The comparison is local, because a schedule of the step for each
alternative would take longer than planning. It agrees with the schedule (:mod:`cost.schedule`): in the 22 standard plans of
``benchmarks/agreement.py``, with 12 staged reductions at the median, no choice that is reversed alone shortens the step by more
than 0.1 ms.

Under ``lowering="jit"`` XLA decides: on v4, v5e, v5p and v6e (libtpu 0.0.42; one and several torus dimensions) its partitioner
makes an all-reduce and a local slice if the shards of all devices differ, and reduce-scatters otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..cost.collective_matmul import (
    all_reduce_cost,
    later_stage_seconds,
    matmul_seconds,
    merged_seconds,
    reduction_costs,
)
from ..cost.tiles import LANES
from ..hardware.collective_ops import collective_volume, wire_bytes
from ..hardware.topology import joined
from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..plan.shard_map_inside_jit import ManualOps, on_cpus
from ..plan.shard_shapes import itemsize, local_shape, shard_count
from ..plan.steps import Body, Reduce, rewrite_bodies
from ..program.ir import Value
from ..units import format_bytes, format_seconds
from .collective_matmul import BY_COST
from .dependencies import added_matmuls, leading_to_matmuls

MAX_ALL_REDUCED_BYTES = 134_217_728
"""Bytes of the largest gradient on a device for which :func:`_is_compiled_to_all_reduce` was observed to hold."""


def choose_all_reduce(plan: Plan) -> Body:
    """The steps with all-reduces in place of some reduce-scatters.

    Under ``"shard_map"``, where this exposes less, if ``plan.overlap`` is a mode in which cost decides; under ``"jit"``, where
    XLA's partitioner does so.

    Example, under ``"jit"`` on ``v5e:2x4``::

          every device of data=8 runs:
          dy: float32[batch=4096:data mlp=4096]
          x: float32[batch:data embed=4096]
          %1 = dot_general dy, x: float32[mlp embed], partial (sum) over data
        - %2 = reduce-scatter over data of %1: float32[mlp embed:data]
        -     sends 58.7 MB per call: dot_general contracts the batch
        + %2 = all-reduce and slice over data of %1: float32[mlp embed:data]
        +     sends 117 MB (all_reduce) per call: dot_general contracts the batch; all-reduce and local slice, …
          return %2
    """
    replacement: Callable[[Plan, Reduce, Collective], Replacement | None] | None = None  # None: by cost
    if plan.lowering == "jit" and on_cpus(plan):
        replacement = partial(_as_all_reduce, manual=ManualOps(plan))
    elif plan.chip is None or not plan.chip.torus:
        return plan.body
    elif plan.lowering == "jit" and plan.compiler.partitioner_prefers_all_reduce:
        replacement = _as_partitioned
    elif plan.lowering == "jit" or plan.overlap not in BY_COST:
        return plan.body

    def change(body: Body) -> Body:
        """A body with its reductions replaced; rings, and the bodies inside, are unchanged."""
        if not any(isinstance(s, Reduce) for s in body.steps):
            return body
        queued = replacement is None and plan.is_async("all-reduce") and _matmuls_block_on_reductions(plan, body)
        own = replacement or partial(_by_cost, queued=queued)
        return body.with_steps(
            [_replaced(plan, s, own) if isinstance(s, Reduce) and s.ring is None else s for s in body.steps]
        )

    return rewrite_bodies(plan.body, change)


Replacement = tuple[float, float | None, str]
"""Of the all-reduce in place of a reduce-scatter: bytes, seconds, and why."""


def _replaced(
    plan: Plan, step: Reduce, replacement: Callable[[Plan, Reduce, Collective], Replacement | None]
) -> Reduce:
    """A reduction with an all-reduce in place of each of its reduce-scatters for which there is a ``replacement``."""
    collectives, scatters = list(step.collectives), list(step.scatters)
    sent = 0
    for k, scatter in enumerate(step.scatters):
        if 0 in step.source.value.shape or shard_count(scatter.axes, plan.sizes) == 1:
            continue
        new = replacement(plan, step, collectives[sent])
        if new is not None:
            size, seconds, why = new
            collectives[sent] = replace(
                collectives[sent], op="all-reduce", algorithm="all_reduce", bytes=size, seconds=seconds, why=why
            )
            scatters[k] = replace(scatter, algorithm="all_reduce")
        sent += 1
    if scatters == list(step.scatters):
        return step
    return replace(step, collectives=tuple(collectives), scatters=tuple(scatters))


def _as_all_reduce(plan: Plan, step: Reduce, old: Collective, *, manual: ManualOps) -> Replacement | None:
    """The all-reduce that XLA's compiler for CPUs (jaxlib 0.10.2) makes of a reduce-scatter; None for other collectives, and for
    ops that the lowering partitions itself, which keep their reduce-scatters."""
    op = step.source.value.op
    if old.op != "reduce-scatter" or (op is not None and manual.has(plan.runs.get(op))):
        return None
    devices = math.prod(plan.sizes[a] for a in old.axes)
    sent = wire_bytes("all-reduce", collective_volume(old.op, old.bytes, devices), devices)
    cost = all_reduce_cost(plan, old, 0.0)
    why = (
        f"since XLA's compiler for CPUs makes no reduce-scatters; an all-reduce sends {format_bytes(sent)}; "
        f'lowering="shard_map" reduce-scatters, which sends {format_bytes(old.bytes)}'
    )
    return sent, old.seconds if cost is None else cost.seconds, why


def _by_cost(plan: Plan, step: Reduce, old: Collective, *, queued: bool) -> Replacement | None:
    """The all-reduce in place of a staged reduce-scatter, if it saves time; None otherwise.

    Args:
      queued: reductions that matmuls depend on queue behind it, so that seconds on the links count instead of exposed seconds.
    """
    if not old.entry.stage_by_stage:
        return None
    costs = reduction_costs(plan, old, seconds_of_next_matmul(plan, step.source.value))
    if "all_reduce" not in costs:
        return None
    staged, new = costs["staged"], costs["all_reduce"]
    saved = staged.seconds - new.seconds if queued else staged.exposed - new.exposed
    if _is_compiled_to_all_reduce(plan, step, old):
        saved += staged.seconds - later_stage_seconds(plan, old)
        if plan.compiler.merged_gather_bytes and not plan.is_async("all-reduce"):  # it is merged with the others
            saved += new.seconds - merged_seconds(plan, old)
    if saved < plan.compiler.min_gain_seconds:
        return None
    why = (
        "faster than a reduce-scatter here; "
        f"an all-reduce over the links of all torus dimensions at once takes {format_seconds(new.seconds)}, "
        f"{format_seconds(new.exposed)} of it exposed; a staged reduce-scatter {format_seconds(staged.seconds)}, "
        f"{format_seconds(staged.exposed)} exposed. It sends {format_bytes(new.bytes)} instead of {format_bytes(old.bytes)}"
    )
    return new.bytes, new.seconds, why


def _is_compiled_to_all_reduce(plan: Plan, step: Reduce, old: Collective) -> bool:
    """Whether the TPU compiler makes an all-reduce, of twice the seconds, of the first stage of a staged reduce-scatter.

    It does so if the scattered dim is innermost in memory and leaves an odd number of lane tiles of 2-byte elements
    (:data:`compat.quirks.REDUCE_SCATTER_SHAPES`). It chooses that layout for the gradient of a weight whatever the order of its
    dims: gradients ``[embed=2048, mlp]`` over 16 and 16 devices of a v5e (libtpu 0.0.42).
    """
    dim = next(s.dim for s in step.scatters if s.axes == old.axes)
    value, (first, *_) = step.source.value, [s for s, _ in joined(s for a in old.axes for s in plan.torus[a])]
    tiles = local_shape(value.shape, step.source.spec, plan.sizes)[dim] / first.size / LANES
    small = plan.shard_bytes(step.source) <= MAX_ALL_REDUCED_BYTES
    return small and itemsize(value.aval) == 2 and tiles % 2 != 0


def _as_partitioned(plan: Plan, step: Reduce, old: Collective) -> Replacement | None:
    """The all-reduce that XLA's partitioner makes of a reduce-scatter if the shards of all devices differ; None otherwise."""
    shards = math.prod(shard_count(s.axes, plan.sizes) for s in step.scatters)
    new = all_reduce_cost(plan, old, 0.0) if shards == plan.mesh.size else None
    if new is None:
        return None
    why = (
        "as XLA's partitioner makes of a reduce-scatter if the shards of all devices differ; "
        f"the all-reduce sends {format_bytes(new.bytes)}; "
        f'lowering="shard_map" can reduce-scatter, which sends {format_bytes(old.bytes)}'
    )
    return new.bytes, new.seconds, why


def seconds_of_next_matmul(plan: Plan, value: Value) -> float:
    """Seconds of the matmul that runs during the reduction of a partial value; 0 if matmuls depend on the reduction.

    The next matmul is assumed to be as long as the one that computes the partial value.
    """
    if plan.chip is None or _matmuls_follow(plan, value):
        return 0.0
    return math.fsum(matmul_seconds(plan, plan.chip, plan.runs[op]) for op in added_matmuls(plan, value))


def _matmuls_block_on_reductions(plan: Plan, body: Body) -> bool:
    """Whether reductions that matmuls depend on take more than ``max_blocking_fraction`` of the seconds of a body's reductions."""
    reductions = [s for s in body.steps if isinstance(s, Reduce)]
    seconds = [math.fsum(c.seconds or 0.0 for c in s.sends) for s in reductions]
    blocking = math.fsum(n for s, n in zip(reductions, seconds, strict=True) if _matmuls_follow(plan, s.source.value))
    return blocking > plan.compiler.max_blocking_fraction * math.fsum(seconds)


def _matmuls_follow(plan: Plan, value: Value) -> bool:
    """Whether matmuls of its body depend on a value."""
    return value.op in plan.program.cached(leading_to_matmuls)
