"""The order of a body's matmuls where the program leaves it open, so that large arrays are not live for longer than needed.

The backward pass of a matmul has two: the cotangent times the weight, on which the previous layer depends, and the cotangent
times the saved operand, which is the weight's gradient, on which nothing else depends. The scheduler of libtpu 0.0.42 (default
effort) runs all gradients of a network last, while all-gathered operands stay in memory; in a loop it keeps gathered weights until
the gradients are computed (:data:`compat.quirks.LATE_GRADIENTS`). Three rules:

- a matmul whose result is reduce-scattered waits for the matmuls of the same cotangent with gathered weights, which can be freed;
- where a later loop waits for an asynchronous reduction, these matmuls wait for the reduction of the weight's gradient instead, and
  run while the reduction is in flight: the head of the plain Llama 3 8B of ``benchmarks/plain.py`` under FSDP;
- a matmul on which no other depends is not postponed: the second one after it waits for it.

Matmuls in loops whose results are reduced on the SparseCores have no barriers. The compiler runs these at the end of the loop's
body, to hide the reductions of the others, whatever barriers precede them, and the barriers cost copies to other memory layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..cost.schedule import on_sparse_cores
from ..plan.plan import Plan
from ..plan.steps import (
    Barrier,
    Body,
    Reduce,
    Reshard,
    Run,
    Shard,
    ShardingChange,
    Step,
    is_deferred,
    rewrite_bodies,
    topological_order,
)
from ..program.ir import Frame, Op, Value
from .dependencies import FrameDependencies, added_matmuls, frame_dependencies, stored_values


def schedule(plan: Plan) -> Body:
    """The steps of a plan in an order by the rules above, and barriers that keep the compiler to it.

    Example of the first rule: the weight ``w`` is gathered for the cotangent, and freed before the gradient is computed::

          every device of data=8 runs:
          w: float32[embed=4096:data mlp=4096]
          x: float32[batch=4096:data embed]
          dy: float32[batch:data mlp]
        - %1 = dot_general dy, x: float32[mlp embed], partial (sum) over data
        - %2 = reduce-scatter over data of %1: float32[mlp embed:data]
        -     sends 58.7 MB per call: dot_general contracts the batch
          %3 = all-gather over data of w: float32[embed mlp]
              sends 58.7 MB per call: dot_general contracts mlp
          %4 = dot_general dy, %3: float32[batch:data embed]
        + %dy = barrier dy, after %4
        + %1 = dot_general %dy, x: float32[mlp embed], partial (sum) over data
        + %2 = reduce-scatter over data of %1: float32[mlp embed:data]
        +     sends 58.7 MB per call: dot_general contracts the batch
          return %2, %4
    """
    waits = _Waits(plan)
    if not waits.after:
        return plan.body
    orders = {frame: waits.frames[frame].order(waits.after) for frame in {op.frame for op in waits.after}}

    def change(body: Body) -> Body:
        """A body with its steps in the new order, and a barrier on one operand of each op that must wait."""
        if body.frame not in orders:
            return body
        steps: list[Step] = []
        for step in body.steps:
            values = waits.held(step.op) if isinstance(step, Run) and not is_deferred(step) else ()
            if values and isinstance(step, Run) and step.in_ring != "gather":
                source = min(step.reads, key=waits.cost_of_barrier)
                result = source.copy()
                after = tuple(plan.placements[v].made for v in values)
                steps.append(Barrier(step.op, (source,), (result,), after))
                step = replace(step, operands=tuple(result if s is source else s for s in step.operands))
            steps.append(step)
        index = {op: k for k, op in enumerate(orders[body.frame])}
        return replace(body, steps=topological_order(_in_order_of_ops(steps, index), body.outputs))

    return rewrite_bodies(plan.body, change)


def _in_order_of_ops(steps: Sequence[Step], index: Mapping[Op, int]) -> list[Step]:
    """Steps sorted by the index of their ops; a resharding directly after the op whose result it reshards."""
    index_of: dict[Shard, int] = {}
    keys: list[int] = []
    current = -1
    for step in steps:
        if isinstance(step, ShardingChange) and not is_deferred(step):
            current = index_of.get(step.source, current)
        elif step.op is not None:
            current = index.get(step.op, current)
        keys.append(current)
        for shard in step.makes:
            index_of[shard] = current
    return [steps[k] for k in sorted(range(len(steps)), key=keys.__getitem__)]


class _Waits:
    """The matmuls of a plan that must wait for results of others.

    Attributes:
      after: matmul → the values for which it waits, as their ops compute them (possibly partial).
      waiting: value → the matmuls that wait for it.
      frames: the frames with matmuls → the dependencies between their ops.
      in_chunks: values that rings compute and reduce in chunks, so that they never exist as one array.
      hide: the matmuls in loops whose results are reduced on the SparseCores.
    """

    def __init__(self, plan: Plan):
        """Decide for every frame with matmuls which of them wait, and for which values."""
        self.plan = plan
        self.after: dict[Op, list[Value]] = {}
        self.waiting: dict[Value, list[Op]] = {}
        self.frames = plan.program.cached(frame_dependencies)
        self.in_chunks = {
            s.value
            for step in plan.body.all_steps
            if isinstance(step, Run) and step.in_ring == "reduce"
            for s in step.results
        }
        self.hide = {
            op
            for s in plan.body.all_steps
            if isinstance(s, Reduce) and any(on_sparse_cores(plan, c.op) for c in s.collectives)
            for op in added_matmuls(plan, s.source.value)
            if op.frame.home is not plan.program.root
        }
        self._delay_scattered()
        for frame in self.frames.values():
            self._delay_others(frame)

    def _delay_scattered(self) -> None:
        """Apply the first two rules."""
        reductions = [s for s in self.plan.body.all_steps if isinstance(s, Reduce) and s.scatters and s.collectives]
        if not reductions:
            return
        readers: dict[tuple[Frame, Value], list[Op]] = {}  # matmuls of a value with a large gathered operand
        for step, users in _gathers(self.plan.body):
            value = step.source.value
            if self.plan.shard_bytes(step.result) < self.plan.compiler.large_buffer_bytes:
                continue
            for op in users:
                for v in op.ins:
                    if v is not None and v is not value:
                        readers.setdefault((op.frame, v), []).append(op)
        for step in reductions:
            for op in added_matmuls(self.plan, step.source.value):
                self._delay(step, op, [r for v in op.ins if v is not None for r in readers.get((op.frame, v), ())])

    def _delay(self, reduction: Reduce, op: Op, others: Sequence[Op]) -> None:
        """Let a matmul whose result is reduce-scattered wait for others of the same cotangent, or these for it (second rule)."""
        frame = self.frames[op.frame]
        others = [r for r in others if frame.position[r] > frame.last_operand(op)]
        results = [frame.sum_of(r.outs[0]) for r in others]
        results = [v for v in results if v.op is not None and self._is_array(v)]
        if not results or frame.leads_to_heavy[op]:
            return
        followers = frame.followers(op, self.waiting)
        free = [v for v in results if v.op not in followers]
        if not free:
            return
        last = max(free, key=lambda v: frame.position[v.op])  # type: ignore[index]
        if self._blocks_a_loop(reduction, frame, last) and self._is_array(op.outs[0]):
            for r in others:
                if r not in followers and op not in frame.followers(r, self.waiting):
                    self._wait(r, op.outs[0])
        else:
            self._wait(op, last)

    def _blocks_a_loop(self, step: Reduce, frame: FrameDependencies, value: Value) -> bool:
        """Whether a loop after ``value`` waits for an asynchronous reduction (:func:`.barriers.serialize_loops`)."""
        plan = self.plan
        if plan.shard_bytes(step.source) < plan.compiler.serialized_reduction_bytes or not any(
            plan.is_async(c.op) for c in step.collectives
        ):
            return False
        assert value.op is not None
        return any(op.primitive.family == "scan" for op in frame.followers(value.op, self.waiting))

    def _delay_others(self, frame: FrameDependencies) -> None:
        """Apply the third rule."""
        left: list[tuple[Op, int]] = []  # matmuls on which no other depends, and the number of matmuls since
        order = frame.order(self.after)
        for op in frame.matmuls if order is frame.frame.ops else order:
            if not op.primitive.matmul or not op.outs:
                continue
            if not frame.leads_to_heavy[op]:
                if self._operand_bytes(op) >= self.plan.compiler.large_buffer_bytes and self._is_array(op.outs[0]):
                    left.append((op, 0))
                continue
            left = [(o, n + 1) for o, n in left]
            for o in [o for o, n in left if n > 1]:
                self._wait(op, o.outs[0])
            left = [(o, n) for o, n in left if n <= 1]

    def _wait(self, op: Op, value: Value) -> None:
        """Let an op wait for a value."""
        self.after.setdefault(op, []).append(value)
        self.waiting.setdefault(value, []).append(op)

    def _is_array(self, value: Value) -> bool:
        """Whether a value exists as one array, as its op computes it: neither constant, nor computed in the chunks of a ring."""
        placed = self.plan.placements.get(value)
        return placed is not None and not placed.made.is_constant and value not in self.in_chunks

    def held(self, op: Op) -> list[Value]:
        """The values for which a barrier on an operand of an op waits."""
        return [v for v in self.after.get(op, ()) if self.hide.isdisjoint((op, v.op))]

    def cost_of_barrier(self, shard: Shard) -> tuple[float, float]:
        """(bytes that are written to memory only because a barrier holds a shard, bytes of the shard).

        A matmul computes elementwise ops as it reads their result, from one array in memory; behind a barrier the result is an
        array in memory. One operand behind a barrier delays the matmul as well as all of them. Of a padded array that several
        matmuls read (the gradient of ``logits[:, :-1]``) the operand of the padding is in memory, also in a narrower dtype.
        """
        op = shard.value.op
        while op is not None and op.primitive.view and op.ins[0] is not None:
            op = op.ins[0].op
        size = self.plan.shard_bytes(shard)
        fused = op is not None and op.primitive.fusible and op.outs[0] not in self.plan.program.cached(stored_values)
        while op is not None and op.primitive.family == "cast" and op.ins[0] is not None:
            op = op.ins[0].op
        fused |= op is not None and op.primitive.family == "pad"
        return (size if fused else 0.0), size

    def _operand_bytes(self, op: Op) -> float:
        run = self.plan.runs.get(op)
        return 0.0 if run is None else math.fsum(map(self.plan.shard_bytes, run.reads))


def _gathers(body: Body) -> Iterator[tuple[Reshard, list[Op]]]:
    """(all-gather, matmuls of the same frame that read its result) of a body and of the bodies inside it."""
    for k in body.nested:
        for inner in body.steps[k].bodies:
            yield from _gathers(inner)
    gathers: list[Reshard] = []
    users: dict[Shard, list[Op]] = {}
    for step in body.steps:
        if isinstance(step, Reshard):
            if step.copy and next((m.op for m in step.path if m.op != "slice"), "") == "all-gather":
                gathers.append(step)
                dots = () if step.ring is None else step.ring.dots
                users[step.result] = [run.op for run, _ in dots if run.op.frame is body.frame]
        elif users and isinstance(step, Run) and step.op.primitive.matmul and step.in_ring != "gather":
            for shard in step.reads:
                if shard in users:
                    users[shard].append(step.op)
    yield from ((step, users[step.result]) for step in gathers)
