"""Dims of intermediate values that a rule shards and the mesh does not divide: their cost, and a mesh that divides them.

A fused kernel ``[embed, heads * head_dim]`` may be sharded over more devices than there are heads. After the reshape to
``[batch, seq, heads, head_dim]`` the number of heads does not divide, so that ``head_dim`` is sharded instead: every attention
matmul then contracts a sharded dim, and its result is all-reduced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..cost.flops import redundant_matmuls
from ..dims import format_dims
from ..layout import Rule
from ..plan.assignment import AxisAssignment
from ..plan.plan import Plan
from ..plan.steps import Loop
from ..units import format_bytes, mesh_text

MIN_EXCESS_BYTES = 3e5
"""Bytes that a device sends in a step because of an indivisible dim, from which on there is a warning."""
MIN_EXCESS_SHARE = 0.1
"""The same as a fraction of all bytes that it sends in a step."""


@dataclass(frozen=True, slots=True)
class IndivisibleDim:
    """A dim of intermediate values that a rule does not divide.

    Attributes:
      rule: the rule, whose axes also shard a dim of an argument.
      size: of the dim.
      shape, dims: of one of the values.
    """

    rule: Rule
    size: int
    shape: tuple[int, ...]
    dims: str


def indivisible_dims(plan: Plan) -> Iterator[IndivisibleDim]:
    """Yields a dim for each rule that shards some argument, and does not divide a dim of the same name elsewhere."""
    sharding = {
        r for h in plan.inputs for name, axes in h.split for r in plan.layout.rules if r.dim == name and axes == r.axes
    }
    seen = set()
    assignment = AxisAssignment(plan.program, plan.layout, plan.sizes)
    optional = assignment.all_indivisible_optional([rule for rule in sharding if rule.optional])
    for value, i, rule in itertools.chain(assignment.all_indivisible(), optional):
        if rule in sharding and rule not in seen:
            seen.add(rule)
            size = list(assignment.value_items(value))[i][1]
            yield IndivisibleDim(rule, size, value.shape, format_dims(plan.program.dims(value)))


def dividing_meshes(plan: Plan, dim: IndivisibleDim) -> Iterator[dict[str, int]]:
    """Yields meshes (axis → size) whose axes divide a dim: the rule's last axis is smaller, and another axis larger by the same
    factor. The last mesh has fewer devices: no other axis is larger.

    For 4 heads and ``heads: model``, data=1, model=8 gives data=2, model=4, then data=1, model=4.
    """
    *major, axis = dim.rule.axes
    size = plan.sizes[axis]
    most = dim.size // math.gcd(dim.size, math.prod(plan.sizes[a] for a in major))
    smaller = {**plan.sizes, axis: math.gcd(most, size)}
    if smaller[axis] == size or dim.size % math.prod(smaller[a] for a in dim.rule.axes):
        return
    for other in plan.sizes:
        if other not in dim.rule.axes:
            yield {**smaller, other: plan.sizes[other] * size // smaller[axis]}
    yield smaller


def bytes_caused(plan: Plan, rule: Rule) -> float:
    """The bytes that a device sends in a step in the collectives that a rule causes."""
    return sum(c.total_bytes for c in plan.collectives if str(plan.rule_of(c)) == str(rule))


def excess_text(plan: Plan, dim: IndivisibleDim, others: Iterable[Plan]) -> str | None:
    """A sentence: the bytes that an indivisible dim costs, and the mesh with which a device sends fewest; None: it costs little.

    Args:
      others: plans of the same program and layout on :func:`dividing_meshes`.
    """
    best = min(others, key=lambda p: p.bytes_sent, default=None)
    if best is None:
        return None
    sent = plan.bytes_sent
    excess = min(bytes_caused(plan, dim.rule) - bytes_caused(best, dim.rule), sent - best.bytes_sent)
    if excess < max(MIN_EXCESS_BYTES, MIN_EXCESS_SHARE * sent):
        return None
    sizes = {a: plan.sizes[a] for a in dim.rule.axes}
    shorter = any((dim.rule.dim, dim.size + 1) in zip(h.dims, h.shape, strict=True) for h in plan.inputs)
    inner = f"{dim.rule.dim}-inner"
    instead = f", and elsewhere splits each of them in parts (`{inner}`)" * any(
        inner in c.dims for c in plan.collectives
    )
    shift = "; where `logits[:, :-1]` makes it shorter, shift the labels with jnp.roll and mask the last one"
    return (
        f"`{dim.rule.dim}` of size {dim.size} does not divide over {mesh_text(sizes)} in {list(dim.shape)} ({dim.dims}), so "
        f"`{dim.rule}` does not split it there{instead}. A device sends {format_bytes(sent)} a step; with "
        f'mesh="{mesh_text(best.sizes)}", which divides it, {format_bytes(best.bytes_sent)}. '
        f"Or make `{dim.rule.dim}` a multiple of {math.prod(sizes.values())}" + shift * shorter
    )


def microbatch_text(plan: Plan, dim: IndivisibleDim) -> str | None:
    """A sentence: a rule shards the batch and does not divide its microbatches; None: no loop runs over microbatches.

    Microbatches are equal parts of the first dim of an input other than parameters and optimizer state, one per iteration.
    """
    name, shards = dim.rule.dim, math.prod(plan.sizes[a] for a in dim.rule.axes)
    inputs = [v for v in plan.program.inputs if v.kind is None and v.shape]
    rows = max((v.shape[0] for v in inputs if plan.program.dims(v)[0] == name), default=0)
    if rows % shards or rows <= dim.size or not _is_looped(plan, dim, rows):
        return None
    share = sum(r.share for r in redundant_matmuls(plan) if name in r.dims and set(r.axes) & set(dim.rule.axes))
    repeated = f", and devices repeat {100 * share:.0f} % of the matmul FLOPs of the step" * (share >= 0.01)
    return (
        f"`{name}` of {rows} is divided into {rows // dim.size} microbatches of {dim.size}, which `{dim.rule}` does not divide "
        f"({mesh_text({a: plan.sizes[a] for a in dim.rule.axes})}): they are computed without this rule{repeated}. "
        f"Use at most {rows // shards} microbatches, or make `{name}` a multiple of {rows // dim.size * shards}"
    )


def _is_looped(plan: Plan, dim: IndivisibleDim, rows: int) -> bool:
    """Whether the iterations of a loop are for the parts of ``rows``, each of the size of ``dim``."""
    parts = [
        shard.value
        for step in plan.body.all_steps
        if isinstance(step, Loop) and step.body.trip_count == rows / dim.size
        for shard in step.body.inputs[len(step.inits) :]
        if shard is not None and shard.value.shape
    ]
    return any(v.shape[0] == dim.size and plan.program.dims(v)[0] == dim.rule.dim for v in parts)
