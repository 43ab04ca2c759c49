"""Which pairs one fused kernel can run (TPU: remote DMA while the matrix unit runs), and why it cannot run the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from meshpar_kernels.collective_matmul import Dot, FusedGather, FusedScatter, interpreting

from ..hardware.topology import Stage
from ..plan.collectives import local_shape
from ..program.ir import Op
from .pairs import GatherRing, ScatterRing

if TYPE_CHECKING:
    from ..plan.plan import Plan


def fused_of(plan: Plan, pair: GatherRing | ScatterRing, stages: Sequence[Stage]) -> FusedGather | FusedScatter | str:
    """The kernel call for a pair, or why there is none.

    Args:
      stages: of the torus, over which its ring goes: one, or none where nothing is sent.
    """
    if not stages:
        return "nothing is sent"
    if not interpreting():
        if plan.chip is None:
            return "it is for TPUs, and the mesh names none"
        if not plan.chip.torus:
            return f"it is for TPUs, and {plan.chip.name} is none"
    if stages[0].dim == "slice":
        return "remote DMA does not leave a slice"
    devices = stages[0].size
    made = _gather(plan, pair, devices) if isinstance(pair, GatherRing) else _scatter(plan, pair, devices)
    return "; ".join(made.reasons) if not isinstance(made, str) and made.reasons else made


def dot_of(op: Op, side: int) -> Dot:
    """A product as the kernels take it."""
    p = op.eqn.params
    (lc, rc), (lb, rb) = p["dimension_numbers"]
    numbers = ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb)))
    return Dot(numbers, side, p["precision"], p["preferred_element_type"])


def _operand(plan: Plan, op: Op, side: int) -> jax.ShapeDtypeStruct | None:
    """An operand as a device has it for the op; None: it is a constant."""
    value, need = op.ins[side], plan.ops[id(op)].ins[side]
    if value is None or need is None:
        return None
    return jax.ShapeDtypeStruct(local_shape(value.shape, need, plan.sizes), value.aval.dtype)


def _gather(plan: Plan, pair: GatherRing, devices: int) -> FusedGather | str:
    others = [_operand(plan, op, 1 - side) for op, side in pair.dots]
    found = [x for x in others if x is not None]
    shape = list(local_shape(pair.value.shape, pair.need, plan.sizes))
    if len(found) < len(others) or shape[pair.dim] % devices:
        return "an operand is a constant, or a block is not whole"
    shape[pair.dim] //= devices
    x = jax.ShapeDtypeStruct(tuple(shape), pair.value.aval.dtype)
    return FusedGather(x, found, [dot_of(op, side) for op, side in pair.dots], pair.dim, devices, pair.keep)


def _scatter(plan: Plan, pair: ScatterRing, devices: int) -> FusedScatter | str:
    operands = [(_operand(plan, op, 0), _operand(plan, op, 1)) for op, _ in pair.leaves]
    found = [(a, b) for a, b in operands if a is not None and b is not None]
    if len(found) < len(operands):
        return "an operand is a constant"
    if len(operands) > 1 and _turned(pair):
        return "the products of the sum are turned before they are added"
    dots, dims = [dot_of(op, 0) for op, _ in pair.leaves], [d for _, d in pair.leaves]
    dtype: Any = pair.value.aval.dtype
    return FusedScatter(found, dots, dims, devices, dtype, dtype)


def _turned(pair: ScatterRing) -> bool:
    leaves = {id(op) for op, _ in pair.leaves}
    todo: list[Op | None] = [pair.value.op]
    while todo:
        op = todo.pop()
        if op is None or id(op) in leaves:
            continue
        if op.name == "transpose":
            return True
        todo += [v.op for v in op.ins if v is not None]
    return False
