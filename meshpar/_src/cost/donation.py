"""Results that alias donated arguments, and whether XLA gathers them into another buffer first; arguments that could be donated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..compat.jax import pass_of
from ..plan.plan import Plan
from ..plan.steps import Branch
from .caching import cached_on_plan
from .device_computation import computation_of
from .fusion import Buffer, array_scattered_into, array_written


@cached_on_plan
def aliased_inputs(plan: Plan) -> dict[int, int]:
    """Index of a result → index of the donated input whose memory it takes: the first one of equal shape, dtype and spec."""
    arguments = plan.body.inputs[len(plan.body.inputs) - len(plan.program.inputs) :]
    free: dict[Any, list[int]] = {}
    for i in sorted(plan.donated):
        value = arguments[i].value
        free.setdefault((value.shape, value.aval.dtype, arguments[i].spec, arguments[i].on_host), []).append(i)
    out: dict[int, int] = {}
    for k, shard in enumerate(plan.body.outputs):
        assert shard is not None
        match = free.get((shard.value.shape, shard.value.aval.dtype, shard.spec, shard.on_host))
        if match:
            out[k] = match.pop(0)
    return out


@cached_on_plan
def donatable(plan: Plan) -> dict[int, str]:
    """Index → path of the inputs that are not donated, and that the step returns updated: a result of equal path (below the
    argument), shape, dtype and sharding is computed from the input elementwise, by writes into it, or as a carry of a loop."""
    region = computation_of(plan)
    index = {item: i for i, item in enumerate(region.inputs) if i not in plan.donated}
    out: dict[int, str] = {}
    for item, h in zip(region.outputs, plan.outputs, strict=True):
        for source in _updated(item):
            i = index.get(source)
            if i is None or i in out:
                continue
            given = plan.inputs[i]
            paths = {given.path, given.path.partition("/")[2]} - {""}
            alike = (h.shape, h.dtype, h.spec, h.on_host) == (given.shape, given.dtype, given.spec, given.on_host)
            if alike and paths.intersection((h.path, h.path.partition("/")[2])):
                out[i] = given.path
                break
    return out


def _updated(item: Buffer) -> Iterator[Buffer]:
    """The inputs of a program that a result updates. A gradient updates no input."""
    todo, seen = [item], {item}
    while todo:
        node = todo.pop().made_by
        if node is None or (node.op is not None and pass_of(node.op.eqn) == "backward"):
            continue
        array = array_written(node) or array_scattered_into(node)
        if node.carries:
            ins = [first for first, last in node.carries if last in seen]
        elif array is not None:
            ins = [array]
        elif node.is_light or isinstance(node.step, Branch):
            ins = node.ins
        else:
            ins = []
        new = [i for i in ins if i is not None and i not in seen]
        yield from (i for i in new if i.made_by is None)
        seen.update(new)
        todo += new


def gathered_then_copied(plan: Plan, gathered: float, shard: float) -> bool:
    """Whether XLA for TPUs all-gathers a result that aliases an argument into another buffer, and copies it.

    XLA (libtpu 0.0.42) does not gather into the memory of an argument. To prevent it from copying all of these arguments at the
    start of the program, large results are copied one after the other.

    Args:
      gathered: bytes of the result on a device.
      shard: bytes before the all-gather.
    """
    return gathered >= max(plan.compiler.large_buffer_bytes, 2 * shard)
