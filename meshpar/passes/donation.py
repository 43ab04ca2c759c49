"""Results that take the place of donated arguments: which they are, and which are put there from other memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .schedule import LARGE

if TYPE_CHECKING:
    from ..plan.plan import Plan


def in_place(plan: Plan) -> dict[int, int]:
    """Which results take the place of donated inputs, by position: the first input of the same shape, dtype and spec."""
    free: dict[Any, list[int]] = {}
    for i in sorted(plan.donated):
        value = plan.program.inputs[i]
        free.setdefault((value.shape, value.aval.dtype, plan.specs[id(value)]), []).append(i)
    out: dict[int, int] = {}
    for k, (value, spec) in enumerate(zip(plan.program.outputs, plan.out_specs, strict=True)):
        match = free.get((value.shape, value.aval.dtype, spec))
        if match:
            out[k] = match.pop(0)
    return out


def gathered_apart(whole: float, shard: float) -> bool:
    """Whether what is gathered for such a result lies beside its place first: bytes on a device of all of it, and before.

    XLA for TPUs (libtpu 0.0.42) does not gather into the memory of an argument. So that it does not copy all of these arguments
    when the program begins, the lowering puts large results there itself, one after the other.
    """
    return whole >= max(LARGE, 2 * shard)
