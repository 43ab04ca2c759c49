"""Optimization barriers that stop XLA from reordering, moving or fusing ops where this costs memory or time.

Each pass works around one defect of a compiler (:mod:`compat.quirks`), and adds barriers or rows to a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np

from ..compat.quirks import MATMUL_ROWS
from ..cost.donation import aliased_inputs, gathered_then_copied
from ..cost.flops import single_row_elements, smaller_operand_bytes
from ..plan.plan import Plan
from ..plan.shard_shapes import itemsize, value_bytes
from ..plan.steps import Barrier, Body, Call, Loop, Reduce, Reshard, Run, Shard, Step, replace_steps, rewrite_bodies
from ..program.ir import Program, Value

MIN_SINGLE_ROW_ELEMENTS = 65_536
"""Elements of the other operand on a device from which a matmul of one row is padded: on v6e 0.2 µs of its vector units."""


def serialize_loops(plan: Plan) -> Body:
    """The steps with loops that start after the loops and large reduce-scatters before them.

    The compiler orders independent steps as it likes, and tends to run other loops while full-size gradients and gathered weights
    stay in memory (:data:`compat.quirks.LOOPS_BEFORE_REDUCTIONS`). A barrier after each large reduce-scatter makes it slice
    an all-reduce immediately, not where the result is read (:data:`compat.quirks.LATE_SLICE`).

    Example::

          every device of data=8 runs:
          w: float32[embed=4096 mlp=4096]
          x: float32[batch:data embed]
          dy: float32[batch:data mlp]
          %1, %2 = scan × 2 from x
            given %3:
              %4 = tanh %3: float32[batch:data embed]
              %5 = reduce_sum %4: float32[batch:data]
              yield %4, %5
          %6 = dot_general x, dy: float32[embed mlp], partial (sum) over data
        - %7 = reduce-scatter over data of %6: float32[embed:data mlp]
        - %8 = scan × 3 from dy
        + %6s = reduce-scatter over data of %6: float32[embed:data mlp]
        + %7 = barrier %6s
        + %dy = barrier dy, after %2, %7
        + %8 = scan × 3 from %dy
            given %9:
              %10 = sin %9: float32[batch:data mlp]
              yield %10
          return %1, %2, %7, %8

    The second loop waits for the smaller result of the first one, which is in memory in any case.
    """

    def serialized(body: Body) -> Body:
        """A body whose scans start after the scans and large reduce-scatters before them."""
        pending: list[Shard] = []  # results for which the next loop waits

        def change(step: Reduce | Loop) -> Sequence[Step]:
            """The steps that replace a reduction or loop: with a barrier after a large reduction, and one on the
            operands of a scan."""
            if isinstance(step, Reduce):
                before = plan.shard_bytes(step.source)
                after = value_bytes(step.source.value, step.scattered, plan.sizes)
                if after >= before or before < plan.compiler.slice_barrier_bytes:
                    return (step,)
                raw = step.result.copy()
                if before >= plan.compiler.serialized_reduction_bytes:
                    pending.append(step.result)
                return replace(step, result=raw), Barrier(step.op, (raw,), (step.result,))
            if step.op.primitive.family != "scan":
                return (step,)
            steps: list[Step] = []
            if pending:
                reads = tuple(dict.fromkeys((*step.inits, *step.stacks)))
                delayed = {s: s.copy() for s in reads}
                if reads:
                    steps.append(Barrier(step.op, reads, tuple(delayed.values()), tuple(pending)))
                pending.clear()
                step = replace(
                    step, inits=tuple(delayed[s] for s in step.inits), stacks=tuple(delayed[s] for s in step.stacks)
                )
            # a barrier on any result waits for all of the loop, and the smallest one costs the least
            pending.extend(sorted(step.results, key=plan.shard_bytes)[:1])
            return (*steps, step)

        return replace_steps(body, (Reduce, Loop), change)

    return _rewrite_homes(plan.body, serialized)


def compute_results_early(plan: Plan) -> Body:
    """The steps with barriers by which results that no matmul depends on are computed before the backward pass.

    The compiler computes them at the end of the program, and has their operands in memory until then
    (:data:`compat.quirks.LATE_RESULTS`). The next large array is computed after them: a row that it is computed from is behind a
    barrier, because a barrier on a large array would write it to memory.

    Example::

          every device of data=8 runs:
          x: float32[batch=4096:data embed=512]
          w: float32[embed vocab=65536]
          %1 = dot_general x, w: float32[batch:data vocab]
          %2 = reduce_min %1: float32[batch:data]
          %3 = reduce_max %1: float32[batch:data]
        - %4 = broadcast_in_dim %3: float32[batch:data vocab]
        + %3b = barrier %3, after %2
        + %4 = broadcast_in_dim %3b: float32[batch:data vocab]
          %5 = sub %1, %4: float32[batch:data vocab]
          %6 = dot_general %5, w: float32[batch:data embed]
          return %2, %6
    """
    steps = list(plan.body.with_calls)
    needed = _needed_by_matmuls(steps)
    position = {s: k for k, step in enumerate(steps) for s in step.makes}
    pending: list[Shard] = []  # results that the next large array waits for
    behind: dict[Shard, Shard] = {}

    def is_large(shard: Shard) -> bool:
        return plan.shard_bytes(shard) >= plan.compiler.serialized_reduction_bytes

    def change(step: Run) -> Sequence[Step]:
        """The step, after a barrier on its rows if it computes a large array that waits for results."""
        made = step.results
        if not step.op.primitive.fusible and not _is_view(step) and needed.isdisjoint(made):
            if any(is_large(s) and s in position for s in step.reads) and not any(map(is_large, made)):
                pending.extend(made)
            return (step,)
        barrier: tuple[Step, ...] = ()
        if pending and any(map(is_large, made)) and not needed.isdisjoint(made):
            rows = tuple(s for s in step.reads if s in position and not is_large(s) and s not in behind)
            if rows:
                behind.update((s, s.copy()) for s in rows)
                barrier = (Barrier(step.op, rows, tuple(behind[s] for s in rows), tuple(pending)),)
                pending.clear()
        if not behind.keys().isdisjoint(step.operands):
            step = replace(step, operands=tuple(s if s is None else behind.get(s, s) for s in step.operands))
        return (*barrier, step)

    return replace_steps(plan.body, Run, change)


def _needed_by_matmuls(steps: Sequence[Step]) -> set[Shard]:
    """The shards on which a matmul, an opaque kernel, a loop or a branch depends."""
    out: set[Shard] = set()
    for step in reversed(steps):
        heavy = not isinstance(step, Call) and (
            bool(step.bodies) or (isinstance(step, Run) and (_is_matmul(step) or step.op.primitive.family == "kernel"))
        )
        if heavy or not out.isdisjoint(step.makes):
            out.update(step.reads)
    return out


def pad_rows(plan: Plan) -> Body:
    """The steps with large matmuls of one row computed with several (:data:`compat.quirks.SINGLE_ROW`).

    Example::

          every device of data=8 runs:
          x: float32[rows=1 embed=256]
          w: float32[embed mlp=256]
        - %1 = dot_general x, w: float32[rows mlp]
        + %1 = dot_general x, w, padded to 8 rows: float32[rows mlp]
          return %1
    """

    def change(step: Run) -> Sequence[Step]:
        """The step, with more rows if it is such a matmul."""
        if step.in_ring or single_row_elements(step, plan.sizes) < MIN_SINGLE_ROW_ELEMENTS or not _has_free_dims(step):
            return (step,)
        return (replace(step, rows=MATMUL_ROWS),)

    return _rewrite_homes(plan.body, lambda body: replace_steps(body, Run, change))


def _has_free_dims(run: Run) -> bool:
    """Whether both operands of a matmul have dims that are neither contracted nor batch dims."""
    (lc, rc), (lb, rb) = run.op.eqn.params["dimension_numbers"]
    left, right = (var.aval.ndim for var in run.op.eqn.invars)
    return left > len(lc) + len(lb) and right > len(rc) + len(rb)


def _rewrite_homes(body: Body, change: Callable[[Body], Body]) -> Body:
    """The body after ``change`` of the program and of the bodies of loops and branches, but not of calls."""
    return rewrite_bodies(body, lambda body: body if body.frame.is_call else change(body))


def serialize_results(plan: Plan) -> Body:
    """The steps with barriers by which large results that alias donated arguments are all-gathered one after the other.

    (:data:`compat.quirks.GATHER_NOT_IN_PLACE`)

    Example, with ``a`` and ``b`` donated::

          every device of data=8 runs:
          a: float32[embed=2048 mlp=2048]
          b: float32[embed mlp]
          da: float32[embed:data mlp]
          db: float32[embed:data mlp]
          %1 = slice over data of a: float32[embed:data mlp]
          %2 = add %1, da: float32[embed:data mlp]
        - %3 = all-gather over data of %2: float32[embed mlp]
        + %3 = all-gather over data of %2, into a separate buffer: float32[embed mlp]
          %4 = slice over data of b: float32[embed:data mlp]
          %5 = add %4, db: float32[embed:data mlp]
        - %6 = all-gather over data of %5: float32[embed mlp]
        + %5b = barrier %5, after %3
        + %6 = all-gather over data of %5b, into a separate buffer: float32[embed mlp]
          return %3, %6
    """
    outputs = {plan.body.outputs[k].value for k in aliased_inputs(plan)}  # type: ignore[union-attr]
    previous: tuple[Shard, ...] = ()

    def change(step: Reshard) -> Sequence[Step]:
        """The steps that replace a resharding: a large all-gather of an aliased result waits for the previous one."""
        nonlocal previous
        if (
            step.copy
            or step.result.value not in outputs
            or not gathered_then_copied(plan, plan.shard_bytes(step.result), plan.shard_bytes(step.source))
        ):
            return (step,)
        steps: list[Step] = []
        if previous:
            delayed = step.source.copy()
            steps.append(Barrier(step.op, (step.source,), (delayed,), previous))
            step = replace(step, source=delayed)
        previous = (step.result,)
        return (*steps, replace(step, separate_buffer=True))

    return replace_steps(plan.body, Reshard, change) if outputs else plan.body


def separate_slices(plan: Plan) -> Body:
    """The steps with an optimization barrier on slices of a stacked float array that a loop casts to a narrower dtype.

    Otherwise XLA casts the full stack before the loop, and both arrays are in memory
    (:data:`compat.quirks.STACK_CAST_BEFORE_LOOP`).

    Example::

          every device of data=8 runs:
          x: float32[batch:data embed]
          w: float32[layers embed mlp]
          %1 = scan × 4 from x over w
            given %2, %3:
        +     %w = barrier as integers %3
        -     %4 = convert_element_type %3: bfloat16[embed mlp]
        +     %4 = convert_element_type %w: bfloat16[embed mlp]
              %5 = dot_general %2, %4: float32[batch:data mlp]
              %6 = dot_general %5, %4: float32[batch:data embed]
              yield %6
          return %1
    """
    cast = plan.program.cached(_values_cast_to_narrower)

    def change(step: Loop) -> Sequence[Step]:
        """A scan whose cast slices are behind an optimization barrier; the scan itself if no slice is cast to a
        narrower dtype."""
        inner = step.body
        slices = {s: s.copy() for s in inner.inputs[len(step.inits) :] if s.value in cast}
        if not slices or step.op.primitive.family != "scan":
            return (step,)
        barrier = Barrier(step.op, tuple(slices.values()), tuple(slices), opaque=True)
        inputs = tuple(slices.get(s, s) for s in inner.inputs)
        return (replace(step, inner=(replace(inner, inputs=inputs, steps=(barrier, *inner.steps)),)),)

    return _rewrite_homes(plan.body, lambda body: replace_steps(body, Loop, change))


def separate_matmuls(plan: Plan) -> Body:
    """The steps with barriers by which large matmuls are kernels of their own, without the ops that read their results.

    Otherwise the compiler computes these ops in the matmul's kernel, while the matrix units wait, or multiplies smaller tiles
    (:data:`compat.quirks.FUSED_EPILOGUE`). It concerns matmuls from whose results follow:

    - several arrays that other matmuls read: the backward pass of ``silu(gate) * up``;
    - reductions that also read other arrays: the backward pass of a norm.

    Example::

          every device of data=8 runs:
          dh: float32[batch=4096:data embed=16]
          x: float32[batch:data embed]
          up: float32[embed mlp=8192]
          gate: float32[batch:data mlp]
          %1 = dot_general dh, up: float32[batch:data mlp]
        - %2 = mul %1, gate: float32[batch:data mlp]
        - %3 = tanh %1: float32[batch:data mlp]
        - %4 = dot_general %2, x: float32[mlp embed], partial (sum) over data
        - %5 = dot_general %3, x: float32[mlp embed], partial (sum) over data
        + %1b = barrier %1
        + %2 = mul %1b, gate: float32[batch:data mlp]
        + %2b = barrier %2
        + %3 = tanh %1b: float32[batch:data mlp]
        + %3b = barrier %3
        + %4 = dot_general %2b, x: float32[mlp embed], partial (sum) over data
        + %5 = dot_general %3b, x: float32[mlp embed], partial (sum) over data
          return %4, %5
    """

    def separated(body: Body) -> Body:
        """A body with barriers on the operands and results of matmuls that must not be fused."""
        facts = _LargeMatmuls(plan, body)
        behind: dict[Shard, Shard] = {}  # operand or result of a matmul → the same behind a barrier
        for matmul in facts.matmuls:
            behind.update((s, s.copy()) for s in facts.separated(matmul) if s not in behind)

        def change(step: Run) -> Sequence[Step]:
            """The steps that replace an op: it reads operands behind their barriers, and barriers of its own results
            follow it."""
            new = tuple(s for s in step.results if s in behind)
            reads = not _is_view(step) and (
                _is_matmul(step) or step.op.primitive.fusible or step.op.primitive.family == "reduction"
            )
            if reads and not behind.keys().isdisjoint(step.operands):
                step = replace(step, operands=tuple(s if s is None else behind.get(s, s) for s in step.operands))
            return (step, Barrier(step.op, new, tuple(behind[s] for s in new))) if new else (step,)

        return replace_steps(body, Run, change) if behind else body

    return _rewrite_homes(plan.body, separated)


class _LargeMatmuls:
    """The large matmuls of a body, calls included.

    Attributes:
      matmuls: that are not in the ring of a reduction.
      results: their results, and views of these.
      broadcasts: results of broadcasts.
      readers: shard that depends on a matmul → the steps that read it.
      depth: shard → the largest number of matmuls on a path to it.
    """

    def __init__(self, plan: Plan, body: Body):
        """Find the large matmuls of a body and, if there are any, the readers of all that depends on them."""
        self.plan = plan
        self.matmuls: list[Run] = []
        self.results: set[Shard] = set()
        self.broadcasts: set[Shard] = set()
        self.readers: dict[Shard, list[Run | Barrier]] = {}
        self.depth: dict[Shard, int] = {}
        for step in body.with_calls:
            if isinstance(step, Run):
                if step.op.primitive.family == "dot":
                    if step.in_ring != "reduce" and self._is_large(step.results[0]):
                        self.matmuls.append(step)
                        self.results.update(step.results)
                elif step.op.primitive.family == "broadcast":
                    self.broadcasts.update(step.results)
                if self.results and _is_view(step) and step.reads[0] in self.results:
                    self.results.update(step.results)
        if self.matmuls:
            self._read(body.with_calls)

    def _is_large(self, shard: Shard) -> bool:
        return self.plan.shard_bytes(shard) >= self.plan.compiler.large_buffer_bytes

    def _read(self, steps: Iterable[Step]) -> None:
        """Set ``readers`` and ``depth``."""
        depth = self.depth
        for step in steps:
            dependent = [s for s in step.reads if s in depth]
            if isinstance(step, Run | Barrier):
                for shard in dependent:
                    self.readers.setdefault(shard, []).append(step)
            if isinstance(step, Barrier):
                depth.update((r, depth[s]) for s, r in zip(step.sources, step.results, strict=True) if s in depth)
            elif (more := _is_matmul(step)) or dependent:
                depth.update(dict.fromkeys(step.makes, max([depth[s] for s in dependent], default=0) + more))

    def separated(self, matmul: Run) -> Sequence[Shard]:
        """The shards that need a barrier so that a matmul becomes a kernel of its own; none if it is as fast with its epilogue."""
        plan, compiler = self.plan, self.plan.compiler
        size = plan.shard_bytes(matmul.results[0])
        epilogue, read_by_matmuls, computed = self._epilogue(matmul.results[0])
        read_by_matmuls = [s for s in read_by_matmuls if s not in self.results]
        read = [s for step in epilogue for s in step.reads]
        matmul_results = tuple(dict.fromkeys(s for s in read if s in self.results))
        others = set(read) - computed - self.results - self.broadcasts
        is_tiled = smaller_operand_bytes(matmul, plan.sizes) > compiler.epilogue_operand_bytes
        if sum(plan.shard_bytes(s) >= size for s in read_by_matmuls) > 1:
            if is_tiled or len(matmul_results) <= compiler.epilogue_max_matmuls:
                return (*matmul_results, *read_by_matmuls)
            return ()
        reduces = any(step.op.primitive.family == "reduction" for step in epilogue)
        return matmul_results if is_tiled and reduces and any(plan.shard_bytes(s) >= size for s in others) else ()

    def _epilogue(self, result: Shard) -> tuple[list[Run], list[Shard], set[Shard]]:
        """The ops that follow from the matmul with this result and from no later one, which the compiler may compute in its kernel.

        Returns (elementwise ops and reductions, the shards that other matmuls read, all shards that the ops compute, the result).
        """
        ops: dict[Run, None] = {}
        read: dict[Shard, None] = {}
        todo, seen = [(result, result)], {result}  # a shard, and the same before barriers
        while todo:
            shard, before_barriers = todo.pop()
            for step in self.readers.get(shard, ()):
                if _is_matmul(step):
                    read[before_barriers] = None
                    continue
                if isinstance(step, Barrier):
                    results = [
                        (r, before_barriers) for s, r in zip(step.sources, step.results, strict=True) if s is shard
                    ]
                elif _is_view(step) or step.op.primitive.fusible:
                    if not _is_view(step):
                        ops[step] = None
                    results = [(r, r) for r in step.results]
                else:
                    if step.op.primitive.family == "reduction":
                        ops[step] = None
                    continue
                results = [(r, b) for r, b in results if self.depth[r] == self.depth[result] and r not in seen]
                seen.update(r for r, _ in results)
                todo += results
        return list(ops), list(read), seen


def _is_matmul(step: Step) -> TypeGuard[Run]:
    """Whether a step is a matmul or convolution."""
    return isinstance(step, Run) and step.op.primitive.matmul


def _is_view(step: Run) -> bool:
    """Whether an op changes no number, but for the rounding of residuals to their own dtype (``jax.checkpoint``)."""
    return step.op.primitive.view or step.op.primitive.family in ("identity", "rounding")


def _values_cast_to_narrower(program: Program) -> set[Value]:
    """The float arrays that some op casts to a narrower dtype."""
    out: set[Value] = set()
    for op in program.root.walk():
        x = op.ins[0] if op.primitive.family == "cast" else None
        floats = x is not None and x.shape and np.issubdtype(x.aval.dtype, np.floating)
        if x is not None and floats and itemsize(op.outs[0].aval) < itemsize(x.aval):
            out.add(x)
    return out
