"""Products in blocks, on a ring or by a kernel: a gathered operand multiplied as it arrives, a sum sent as it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jax import lax

from meshpar_kernels.collective_matmul import Dot, dots_scatter, gather_dots

from ..compat.jax import at_line_of
from ..passes.fused import dot_of
from ..passes.pairs import GatherRing, ScatterRing
from ..program.ir import Op, Value
from ..rules.spmd import fine_names

if TYPE_CHECKING:
    from .shard_map import Walk


def gathered(walk: Walk, ring: GatherRing, op: Op) -> Any:
    """The result of a product whose operand is gathered on a ring, which serves all its products when the first is reached."""
    if id(op) not in walk.here.ringed:
        run_ring(walk, ring)
    return walk.here.ringed.pop(id(op))


def run_ring(walk: Walk, ring: GatherRing) -> None:
    """All products of a gathered operand, and where others use it, the gathered operand itself."""
    for op in ring.before:
        with at_line_of(op.eqn, op.where):
            walk.op(op)
        walk.here.done.add(id(op))
    walk.settle(ring.value)
    x = walk.at(ring.value, walk.now[id(ring.value)])
    others: list[Any] = []
    dots: list[Dot] = []
    for op, side in ring.dots:
        other, need = op.ins[1 - side], walk.plan.ops[id(op)].ins[1 - side]
        if other is None or need is None:
            others.append(walk.literal(op, 1 - side))
        else:
            walk.settle(other)
            others.append(walk.operand(op, other, need))
        dots.append(dot_of(op, side))
    major, *minor = _fine(walk, ring.axes)
    if minor:
        x = lax.all_gather(x, tuple(minor), axis=ring.dim, tiled=True)
    if ring.fused is not None:
        results = ring.fused(x, others, major)
    else:
        results = gather_dots(x, others, dots, major, ring.dim, keep=ring.keep)
    if ring.keep:
        walk.here.copies[id(ring.dots[0][0].frame), id(ring.value), ring.need] = results.pop()
    walk.here.ringed.update((id(op), y) for (op, _), y in zip(ring.dots, results, strict=True))


def scattered(walk: Walk, ring: ScatterRing, dtype: Any) -> tuple[Any, float]:
    """(a partial sum of products, summed and scattered over the first of its axes; how many times larger it was before)."""
    operands = [walk.here.waiting_for[id(op)] for op, _ in ring.leaves]
    major = _fine(walk, ring.axes)[0]
    if ring.fused is not None:
        x = ring.fused(operands, major)
        return x if len(ring.leaves) > 1 else _finish(ring)([x]), float(lax.axis_size(major))
    dots = [dot_of(op, 0) for op, _ in ring.leaves]
    x = dots_scatter(
        operands, dots, [d for _, d in ring.leaves], major, ring.dim, dtype, finish=_finish(ring), wire_dtype=dtype
    )
    return x, float(lax.axis_size(major))


def _finish(ring: ScatterRing) -> Callable[[list[Any]], Any]:
    """Blocks of the products → a block of the sum: the transposes and additions between."""
    place = {id(op): k for k, (op, _) in enumerate(ring.leaves)}

    def made(value: Value, blocks: list[Any]) -> Any:
        op = value.op
        assert op is not None
        if id(op) in place:
            return blocks[place[id(op)]]
        parts = [made(v, blocks) for v in op.ins if v is not None]
        return lax.transpose(parts[0], op.eqn.params["permutation"]) if op.name == "transpose" else parts[0] + parts[1]

    return lambda blocks: made(ring.value, blocks)


def _fine(walk: Walk, axes: tuple[str, ...]) -> tuple[str, ...]:
    return fine_names([a for a in axes if walk.sizes[a] > 1], walk.sizes)
