"""Products in blocks, on a ring or by a kernel: a gathered operand multiplied as it arrives, a sum sent as it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from meshpar_kernels.collective_matmul import dots_scatter, gather_dots

from ..passes.collective_matmul import dot_of
from ..plan.steps import GatherRing, Reduce, ReduceRing, Reshard, Shard
from ..program.ir import Op, Value
from ..rules.spmd import Grid


def run_gather_ring(step: Reshard, ring: GatherRing, x: dict[Shard, Any], grid: Grid) -> None:
    """Make all products of a gathered operand, and where others read it, the gathered operand itself."""
    shard = x[step.source]
    others = [dot.op.eqn.invars[1 - dot.side].val if dot.other is None else x[dot.other] for dot in ring.dots]
    dots = [dot_of(dot.op, dot.side) for dot in ring.dots]
    major, minor = grid.ring(ring.axes)
    if minor:
        shard = lax.all_gather(shard, minor, axis=ring.dim, tiled=True)
    around = major[0] if len(major) == 1 else major
    if ring.fused is not None:
        results = ring.fused(shard, others, around)
    else:
        results = gather_dots(shard, others, dots, around, ring.dim, keep=ring.keep_gathered)
    if ring.keep_gathered:
        x[step.result] = results.pop()
    x.update((dot.result, y) for dot, y in zip(ring.dots, results, strict=True))


def run_reduce_ring(step: Reduce, ring: ReduceRing, x: dict[Shard, Any], grid: Grid) -> Any:
    """A sum of products, scattered over the ring of its axes (:meth:`meshpar.rules.spmd.Grid.ring`)."""
    products: list[tuple[Op, Sequence[Any]]] = [x[shard] for shard, _ in ring.leaves]
    operands = [(xs[0], xs[1]) for _, xs in products]
    axes, dtype = grid.ring(ring.axes)[0], step.result.value.aval.dtype
    major = axes[0] if len(axes) == 1 else axes
    finish = _finish(step.source.value, [op for op, _ in products])
    if ring.fused is not None:
        made = ring.fused(operands, major)
        return made if len(ring.leaves) > 1 else finish([made])
    dots = [dot_of(op, 0) for op, _ in products]
    dims = [d for _, d in ring.leaves]
    return dots_scatter(operands, dots, dims, major, ring.dim, dtype, finish=finish, comm_dtype=dtype)


def _finish(value: Value, leaves: Sequence[Op]) -> Callable[[list[Any]], Any]:
    """Blocks of the products → a block of the sum: the transposes and additions between."""
    place = {op: k for k, op in enumerate(leaves)}

    def made(value: Value, blocks: list[Any]) -> Any:
        op = value.op
        assert op is not None
        if op in place:
            return blocks[place[op]]
        parts = [made(v, blocks) for v in op.ins if v is not None]
        return lax.transpose(parts[0], op.eqn.params["permutation"]) if op.primitive.transpose else parts[0] + parts[1]

    return lambda blocks: made(value, blocks)
