"""Results that take the place of donated arguments: which they are, and which are gathered into other memory first."""

from __future__ import annotations

from typing import Any

from ..compat.quirks import LARGE
from ..plan.plan import Plan
from .caching import cached_on_plan


@cached_on_plan
def aliased_inputs(plan: Plan) -> dict[int, int]:
    """Which results take the place of donated inputs, by position: the first input of the same shape, dtype and spec."""
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


def gathered_then_copied(whole: float, shard: float) -> bool:
    """Whether what is gathered for such a result lies beside its place first: bytes on a device of all of it, and before.

    XLA for TPUs (libtpu 0.0.42) does not gather into the memory of an argument. So that it does not copy all of these arguments
    when the program begins, large results are put there one after the other.
    """
    return whole >= max(LARGE, 2 * shard)
