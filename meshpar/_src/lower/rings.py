"""Collective matmuls as rings or kernels: all-gather and matmul, or matmul and reduce-scatter, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from meshpar_kernels.collective_matmul import dots_scatter, gather_dots

from ..iterables import operands_first
from ..plan.steps import GatherRing, Reduce, ReduceRing, Reshard, Shard, dot_of
from ..program.ir import Op, Value
from ..rules.mesh_in_shard_map import Grid


def run_gather_ring(step: Reshard, ring: GatherRing, x: dict[Shard, Any], grid: Grid) -> None:
    """Compute all matmuls of an all-gathered operand and, if other ops read it, the operand; the results are added to ``x``."""
    shard = x[step.source]
    pairs = [(run.operands[1 - side], run.op.eqn.invars[1 - side]) for run, side in ring.dots]
    others = [var.val if s is None else x[s] for s, var in pairs]
    dots = [dot_of(run.op.eqn, side) for run, side in ring.dots]
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
    x.update((run.results[0], y) for (run, _), y in zip(ring.dots, results, strict=True))


def run_reduce_ring(step: Reduce, ring: ReduceRing, x: dict[Shard, Any], grid: Grid) -> Any:
    """The reduce-scatter of a sum of matmuls over the ring of its axes (:meth:`rules.mesh_in_shard_map.Grid.ring`)."""
    matmuls: list[tuple[Op, Sequence[Any]]] = [x[shard] for shard, _ in ring.leaves]
    operands = [(xs[0], xs[1]) for _, xs in matmuls]
    axes, dtype = grid.ring(ring.axes)[0], step.result.value.aval.dtype
    major = axes[0] if len(axes) == 1 else axes
    finish = _finish(step.source.value, [op for op, _ in matmuls])
    if ring.fused is not None:
        result = ring.fused(operands, major)
        return result if len(ring.leaves) > 1 else finish([result])
    dots = [dot_of(op.eqn, 0) for op, _ in matmuls]
    dims = [d for _, d in ring.leaves]
    return dots_scatter(operands, dots, dims, major, ring.dim, dtype, finish=finish, comm_dtype=dtype)


def _finish(value: Value, leaves: Sequence[Op]) -> Callable[[list[Any]], Any]:
    """A function from chunks of the matmuls to a chunk of the sum: it applies the transposes and additions between them."""
    position = {op: k for k, op in enumerate(leaves)}

    def operands(value: Value) -> list[Value]:
        """The terms of a sum or the operand of a transpose; none of a matmul."""
        return [] if value.op is None or value.op in position else [v for v in value.op.ins if v is not None]

    def sum_of(chunks: list[Any]) -> Any:
        """The chunk of ``value``, computed from chunks of the matmuls by the additions and transposes of the program."""
        made: dict[Value, Any] = {}
        for item in operands_first(value, operands):
            op = item.op
            assert op is not None
            if op in position:
                made[item] = chunks[position[op]]
            else:
                terms = [made[v] for v in operands(item)]
                permutation = op.eqn.params["permutation"] if op.primitive.family == "transpose" else None
                made[item] = terms[0] + terms[1] if permutation is None else lax.transpose(terms[0], permutation)
        return made[value]

    return sum_of
