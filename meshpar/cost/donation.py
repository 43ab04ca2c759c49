"""Results that alias donated arguments, and whether XLA gathers them into another buffer first."""

from __future__ import annotations

from typing import Any

from ..plan.plan import Plan
from .caching import cached_on_plan


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


def gathered_then_copied(plan: Plan, gathered: float, shard: float) -> bool:
    """Whether XLA for TPUs all-gathers a result that aliases an argument into another buffer, and copies it.

    XLA (libtpu 0.0.42) does not gather into the memory of an argument. To prevent it from copying all of these arguments at the
    start of the program, large results are copied one after the other.

    Args:
      gathered: bytes of the result on a device.
      shard: bytes before the all-gather.
    """
    return gathered >= max(plan.compiler.large_buffer_bytes, 2 * shard)
