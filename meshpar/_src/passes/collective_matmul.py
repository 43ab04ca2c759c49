"""Collective-matmul pass: overlaps all-gathers and reduce-scatters with the matmuls next to them, as rings or fused kernels.

For each all-gather whose result matmuls read, and each reduce-scatter of a sum of matmuls, the mode or the cost of a step chooses
an implementation, and the steps of the pair are replaced accordingly. A plan has the exposed seconds of each
(:mod:`cost.collective_matmul`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from meshpar_kernels.collective_matmul import FusedGather, FusedScatter, interpreting
from meshpar_kernels.collective_matmul.schedule import gather_hops

from ..cost.collective_matmul import CollectiveMatmul, exposed_seconds
from ..hardware.collective_algorithms import AlgorithmName
from ..hardware.collective_ops import wire_bytes
from ..hardware.collective_time import hop_seconds, seconds_of
from ..hardware.topology import devices_of, major_of, major_stage
from ..lru_cache import LRUCache
from ..plan.collectives import Collective
from ..plan.plan import Choice, Overlap, Plan
from ..plan.shard_shapes import format_axes, local_shape, shard_count
from ..plan.steps import (
    Body,
    Call,
    GatherRing,
    Reduce,
    ReduceRing,
    Reshard,
    Run,
    Shard,
    Step,
    dot_of,
    rewrite_bodies,
    topological_order,
)
from ..program.ir import Frame, Op, Program, Value
from .dependencies import leading_to_matmuls

MODES = ("auto", "xla", "ring", "pallas", "off")
"""``auto``: by cost, ``xla`` or ``ring``; ``xla``: a separate collective; ``ring``: a ring wherever possible; ``pallas``: the fused
TPU kernel wherever it supports the pair, elsewhere as ``auto``; ``off``: no pair is looked for. ``xla`` and ``off`` give the same
program. Only ``auto`` and ``pallas`` replace reduce-scatters by all-reduces (:mod:`passes.all_reduce_choice`)."""
BY_COST = ("auto", "pallas")
"""The modes in which cost decides where the user's mode does not."""


@dataclass(frozen=True, eq=False, slots=True)
class Pair:
    """A collective and the matmuls that it can be computed with as a ring, with the facts by which an implementation is chosen.

    Attributes:
      found: the all-gather and the matmuls that read its result, or the reduce-scatter and the matmuls that it sums.
      critical: other steps depend on the collective and it on them: true of all but the all-gather of a weight.
      terms: of a reduction, the steps that compute its operand: the matmuls, and the sums and transposes of their results.
      hops: the collectives of a ring in place of the pair's collective.
      fused: the fused kernel, or the reason against one.
      exposed: implementation → exposed seconds of one run; None: the chip is not known.
    """

    found: CollectiveMatmul
    critical: bool
    terms: tuple[Run, ...]
    hops: list[Collective]
    fused: FusedGather | FusedScatter | str
    exposed: dict[str, float] | None

    @classmethod
    def of(cls, plan: Plan, found: CollectiveMatmul, critical: bool, terms: Sequence[Run] = ()) -> Pair:
        """The pair of a plan, with its kernel and costs."""
        by_cost, hops, exposed = plan.overlap in BY_COST, ring_collectives(plan, found), None
        is_transposed = any(run.op.primitive.family == "transpose" for run in terms)
        fused = fused_of(plan, found, is_transposed) if by_cost else ""
        if plan.chip is not None:
            blocks = critical if found.gather else found.value.op in plan.program.cached(leading_to_matmuls)
            kernel = None if isinstance(fused, str) else fused
            exposed = exposed_seconds(plan, plan.chip, found, hops, kernel, blocks, by_cost)
        return cls(found, critical, tuple(terms), hops, fused, exposed)


def activation_axes(plan: Plan, pairs: Sequence[Pair]) -> list[tuple[str, ...]]:
    """The mesh axes for which cost decides between rings and separate collectives: those over which activations are gathered.

    All collectives of activations over the same axes are decided jointly, by the estimated seconds of the step: next to separate
    collectives, the compiler (libtpu 0.0.42) overlaps hardly a matmul with the steps of a ring. Five mixtures were compiled, chosen
    pair by pair: each took longer than one of the pure choices, two of them longer than both. All-gathers of weights and
    reductions of gradients stay separate, since the compiler runs them concurrently with other matmuls: rings chosen one by one
    made 3 of 45 plans of real models 0.01 % shorter at most. None where the mode decides, or where the chip is not known.
    """
    if plan.overlap not in BY_COST or plan.chip is None:
        return []
    longest = plan.compiler.max_ring_size
    gathered = (p.found.axes for p in pairs if p.found.gather and p.critical)
    return [axes for axes in dict.fromkeys(gathered) if 1 < devices_of(plan.torus, axes) <= longest]


def with_overlaps(plan: Plan, pairs: Sequence[Pair], joint: Mapping[tuple[str, ...], Choice]) -> Plan:
    """The plan with an implementation for every pair of a collective and matmuls, by the mode ``plan.overlap``.

    ``auto`` never chooses the fused kernel, since no kernel with remote DMA was timed yet; the reasons say where one could run.

    Example, with ``overlap="ring"``::

          every device of model=8 runs:
          x: bfloat16[batch=4096:model embed=4096]
          w: bfloat16[embed mlp=4096:model]
          v: bfloat16[mlp:model embed]
          %1 = tanh x: bfloat16[batch:model embed]
        - %2 = all-gather over model of %1: bfloat16[batch embed]
        -     sends 29.4 MB per call: mlp uses model
        - %3 = dot_general %2, w: bfloat16[batch mlp:model]
        + %2 = all-gather over model of %1, as a ring with 1 matmuls: bfloat16[batch embed]
        +     sends 4.2 MB (ring) per call: mlp uses model; ring steps in place of the all-gather, overlapped with matmuls
        +     sends 2.1 MB (ring) per call: mlp uses model; ring steps in place of the all-gather, overlapped with matmuls
        + %3 = dot_general %2, w, chunk by chunk as they arrive: bfloat16[batch mlp:model]
          %4 = tanh %3: bfloat16[batch mlp:model]
        - %5 = dot_general %4, v: bfloat16[batch embed], partial (sum) over model
        - %6 = reduce-scatter over model of %5: bfloat16[batch:model embed]
        -     sends 29.4 MB per call: v is split
        + %5 = dot_general %4, v, chunk by chunk as they are sent: bfloat16[batch embed], partial (sum) over model
        + %6 = reduce-scatter over model of %5, as a ring with 1 matmuls: bfloat16[batch:model embed]
        +     sends 4.2 MB (ring) per call: v is split; ring steps in place of the reduce-scatter, overlapped with matmuls
        +     sends 2.1 MB (ring) per call: v is split; ring steps in place of the reduce-scatter, overlapped with matmuls
          return %6

    The second collective sends the halves of the chunk of the opposite device, one each way.

    Args:
      joint: axes of :func:`activation_axes` → the implementation of all collectives of activations over these axes.
    """
    changes: dict[Step, Step] = {}
    overlaps: list[Overlap] = []
    in_rings: set[Op] = set()
    for pair in pairs:
        if not in_rings.isdisjoint(run.op for run, _ in pair.found.dots):
            continue  # a matmul is computed by one ring
        decision = _decision(plan, pair, joint.get(pair.found.axes) if pair.critical else None)
        overlaps.append(decision)
        if decision.choice != "xla":
            in_rings.update(run.op for run, _ in pair.found.dots)
            changes.update(_ring_steps(plan, pair, decision.choice))

    def change(body: Body) -> Body:
        """A body with the steps in ``changes`` replaced, sorted again if it has a ring of an all-gather."""
        if changes.keys().isdisjoint(body.steps):
            return body
        steps = [changes.get(step, step) for step in body.steps]
        rings = any(isinstance(s, Reshard) and s.ring is not None for s in steps)
        return replace(body, steps=topological_order(steps, body.outputs) if rings else tuple(steps))

    return replace(plan, body=rewrite_bodies(plan.body, change) if changes else plan.body, overlaps=tuple(overlaps))


# -- pairs


def find_pairs(plan: Plan) -> list[Pair]:
    """The pairs of a plan, in program order."""
    reader, carried, pairs = _Reader(plan), _carried(plan.body), []
    positions: dict[Frame, dict[Op, int]] = {}
    for step, body, home in reader.candidates:
        if isinstance(step, Reduce):
            found, terms = _scatter(step, home, reader) or (None, ())
        else:
            if body not in positions:
                positions[body] = {op: k for k, op in enumerate(body.ops)}
            found, terms = _gather(step, reader.users[step.result], body, positions[body]), ()
        if found is not None and shard_count(found.axes, plan.sizes) > 1:  # a mesh axis may have one device
            critical = isinstance(step, Reduce) or not _is_input(found.value, carried)
            pairs.append(Pair.of(plan, found, critical, terms))
    return pairs


class _Reader:
    """The collectives of a plan that may be in a pair, and what reads and makes their arrays.

    Attributes:
      candidates: in program order, (step, its frame, the frame that its body's calls are inlined in) of the all-gathers whose
        results their own body reads, and of reductions that begin with a reduce-scatter.
      users: result of a candidate all-gather → the steps that read it.
      maker: partial shard → (the step of the op that computes it, the frame that this body's calls are inlined in).
      reads: partial shard → how many times it is read.
    """

    def __init__(self, plan: Plan):
        """Read all steps of a plan."""
        self.candidates: list[tuple[Reshard | Reduce, Frame, Frame]] = []
        self.users: dict[Shard, list[Step]] = {}
        self.maker: dict[Shard, tuple[Run, Frame]] = {}
        self.reads: dict[Shard, int] = {}
        self._read(plan.body, plan.program.root)

    def _read(self, body: Body, home: Frame) -> None:
        """Record the steps of a body and of nested bodies."""
        users, reads = self.users, self.reads
        for step in body.steps:
            if not isinstance(step, Run):
                for inner in step.bodies:
                    self._read(inner, home if isinstance(step, Call) else inner.frame)
                if isinstance(step, Call):
                    continue
            for shard in step.reads:
                if shard in users:
                    users[shard].append(step)
                if shard.partial:
                    reads[shard] = reads.get(shard, 0) + 1
            if isinstance(step, Run):
                self.maker.update((shard, (step, home)) for shard in step.results if shard.partial)
            elif isinstance(step, Reshard) and step.copy and step.collectives:
                users[step.result] = []
                self.candidates.append((step, body.frame, home))
            elif isinstance(step, Reduce) and [c.op for c in step.collectives[:1]] == ["reduce-scatter"]:
                self.candidates.append((step, body.frame, home))
        for shard in body.outputs:
            if shard is not None and shard.partial:
                reads[shard] = reads.get(shard, 0) + 1


def _gather(step: Reshard, users: Sequence[Step], frame: Frame, position: Mapping[Op, int]) -> CollectiveMatmul | None:
    """The pair of an all-gather: the matmuls that read its result and can run chunk by chunk, or None.

    Args:
      users: the steps that read its result.
      position: op of the frame → its index.
    """
    if len(step.path) != 1 or step.path[0].op != "all-gather":
        return None
    (move,) = step.path
    (dim,) = move.dims
    free: list[tuple[Run, int]] = []
    contracted: list[tuple[Run, int]] = []
    for run in users:
        if not isinstance(run, Run) or run.op.primitive.family != "dot" or run.op not in position:
            continue
        sides = [s for s in (0, 1) if run.operands[s] is step.result]
        if len(sides) == 1:
            (lc, rc), _ = run.op.eqn.params["dimension_numbers"]
            (contracted if dim in (lc, rc)[sides[0]] else free).append((run, sides[0]))
    first = min((position.get(user.op, -1) for user in users if user.op is not None), default=-1)
    dots = [
        (run, side)
        for run, side in sorted(free or contracted, key=lambda x: position[x[0].op])
        if _can_precede(run.op.ins[1 - side], frame, first, position)
    ]
    if not dots:
        return None
    paired = {run for run, _ in dots}
    return CollectiveMatmul(step, dim, move.axes, tuple(dots), any(user not in paired for user in users))


def _scatter(step: Reduce, home: Frame, reader: _Reader) -> tuple[CollectiveMatmul, list[Run]] | None:
    """(the pair of a reduce-scatter: the matmuls whose sum it reduces, the steps that compute the sum).

    None if an op between them is not a sum or transpose, or if another step reads a partial value between them.
    """
    if step.source.kind != "sum":
        return None
    scatter = step.scatters[0]
    leaves: list[tuple[Run, int]] = []
    terms: list[Run] = []
    pending: list[tuple[Shard | None, int]] = [(step.source, scatter.dim)]
    while pending:  # not recursive: a sum may have more terms than Python's stack
        term, dim = pending.pop()
        run, made_in = (None, None) if term is None else reader.maker.get(term, (None, None))
        if term is None or run is None or made_in is not home or reader.reads[term] != 1 or len(run.results) > 1:
            return None
        terms.append(run)
        partial = any(s.partial for s in run.reads)
        if run.op.primitive.family == "dot" and run.axes is not None and not partial:
            leaves.append((run, dim))
        elif partial and run.op.primitive.family == "transpose":
            pending.append((run.reads[0], run.op.eqn.params["permutation"][dim]))
        elif partial and run.op.primitive.family == "add":
            pending += [(operand, dim) for operand in reversed(run.operands)]
        else:
            return None
    return CollectiveMatmul(step, scatter.dim, scatter.axes, tuple(leaves)), terms


def _can_precede(value: Value | None, frame: Frame, first: int, position: Mapping[Op, int]) -> bool:
    """Whether a value of a frame can be computed before its op at index ``first``, by moving only light ops forward."""
    moved: set[Op] = set()
    todo = [value]
    while todo:
        v = todo.pop()
        if v is None or v.op is None:
            continue
        if v.op not in position:
            call = v.op
            while call is not None and call.frame is not frame:
                call = call.frame.parent
            if call is None and not _encloses(v.op.frame, frame):
                return False
            if call is not None and position[call] >= first:
                return False
            continue
        if position[v.op] < first or v.op in moved:
            continue
        if v.op.frames or not (v.op.primitive.fusible or v.op.primitive.view) or v.op.eqn.effects:
            return False
        moved.add(v.op)
        todo += v.op.ins
    return True


def _encloses(frame: Frame, inner: Frame) -> bool:
    """Whether a frame is an ancestor of another: its values exist before the ops of the inner one."""
    parent = inner.parent
    while parent is not None and parent.frame is not frame:
        parent = parent.frame.parent
    return parent is not None


def _carried(body: Body) -> set[Value]:
    """The values that loop bodies receive from the previous iteration; of a ``while``, all that its bodies receive."""
    out: set[Value] = set()
    for step in body.loops:
        out.update(s.value for b in step.bodies for s in b.inputs[: len(step.inits)])
        if step.op.primitive.family != "scan":
            out.update(v for f in step.op.frames for v in f.ins())
    return out


def _is_input(value: Value, carried: set[Value]) -> bool:
    """Whether a value is an input of its body (a weight), or follows from inputs by light ops; carries do not count as inputs."""
    todo, seen = [value], set[Value]()
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        if v.op is not None:
            if not (v.op.primitive.fusible or v.op.primitive.view):
                return False
            todo += [x for x in v.op.ins if x is not None]
        elif v in carried:
            return False
    return True


# -- decisions


def _decision(plan: Plan, pair: Pair, joint: Choice | None) -> Overlap:
    """The decision about a pair.

    Args:
      joint: the implementation of all collectives of activations over the same axes; None: the pair is not one of these.
    """
    mode, found, fused = plan.overlap, pair.found, pair.fused
    first = found.step.collectives[0]
    idle = devices_of(plan.torus, found.axes) == 1 or 0 in found.value.shape
    choice: Choice = "xla"
    reason = ""
    if idle:
        reason = "nothing is sent"
    elif mode == "xla":
        reason = "as requested"
    elif mode == "ring":
        choice, reason = "ring", "as requested"
    elif mode == "pallas" and not isinstance(fused, str):
        choice, reason = "pallas", "as requested: one kernel sends chunks while it multiplies others"
    else:
        choice, reason = joint or "xla", _reason(plan, pair, joint)
        if mode == "pallas":
            reason = f"no fused kernel: {fused}; {reason}"
        elif not isinstance(fused, str):
            reason += '; a fused kernel is possible (overlap="pallas"), but none was timed yet'
    if not idle and any(s.line for s in major_of(plan.torus, found.axes)):
        reason += f"; {format_axes(found.axes)} is no ring of the torus, so that ring steps share links"
    return Overlap(
        "gather" if found.gather else "scatter", choice, reason, first.tensor, found.axes, len(found.dots), first.count,
        pair.exposed, found.dots[0][0].op, joint is not None and choice != "pallas",
    )  # fmt: skip


def _reason(plan: Plan, pair: Pair, joint: Choice | None) -> str:
    """Why cost decided for a ring or a separate collective, as a sentence; ``joint`` as in :func:`_decision`."""
    if pair.exposed is None:
        return "the chip is not known"
    compiler, devices = plan.compiler, devices_of(plan.torus, pair.found.axes)
    if devices > compiler.max_ring_size:
        return f"a ring of {devices} devices is longer than {compiler.max_ring_size}"
    xla, ring = pair.exposed["xla"], pair.exposed["ring"]
    if joint == "ring":
        hidden = f": {100 * (1 - ring / xla):.0f} % hidden" if ring < xla else ""
        return (
            f"chunks are sent while {'others are multiplied' if pair.found.gather else 'the next are computed'}{hidden}"
        )
    if xla == 0:
        return "the compiler overlaps it with other matmuls"
    if joint is None:
        return "rings are for activations: weights and gradients are sent while other matmuls run"
    if xla - ring >= compiler.min_gain_seconds:
        return "rings for all collectives over the same axes save too little"
    if ring:
        return "the matmuls of a chunk are too short to hide a ring step and the elementwise ops between ring steps"
    return "a ring saves too little"


# -- steps of rings


def _ring_steps(plan: Plan, pair: Pair, choice: Choice) -> dict[Step, Step]:
    """Step → its replacement, for the steps of a pair that a ring or fused kernel implements."""
    found, step = pair.found, pair.found.step
    fused = None if choice == "ring" or isinstance(pair.fused, str) else pair.fused
    new = [replace(c, algorithm="pallas") if c.entry.ring_step and choice == "pallas" else c for c in pair.hops]
    collectives = (*new, *step.collectives[1:])
    if isinstance(step, Reshard):
        assert not isinstance(fused, FusedScatter)
        ring = GatherRing(found.dim, found.axes, found.dots, found.keep, fused)
        changes: dict[Step, Step] = {run: replace(run, in_ring="gather") for run, _ in found.dots}
        return {**changes, step: replace(step, collectives=collectives, ring=ring)}
    leaves = tuple((run.results[0], d) for run, d in found.dots)
    assert not isinstance(fused, FusedGather)
    ring = ReduceRing(found.dim, found.axes, leaves, devices_of(plan.torus, found.axes), fused)
    changes = {run: replace(run, in_ring="reduce") for run in pair.terms}
    return {**changes, step: replace(step, collectives=collectives, ring=ring)}


def ring_collectives(plan: Plan, pair: CollectiveMatmul) -> list[Collective]:
    """The collectives of a ring in place of a pair's collective: permutes over the major stage, the minor stages as before."""
    old = pair.step.collectives[0]
    devices = devices_of(plan.torus, pair.axes)
    minor = shard_count(pair.axes, plan.sizes) // devices
    spec = pair.step.result.spec if pair.gather else pair.step.source.spec
    shape = local_shape(pair.value.shape, spec, plan.sizes)
    size = old.bytes * (devices * minor) / (devices * minor - 1)  # of the full-size array on a device
    rows = shape[pair.dim] // devices
    out = []
    for h in gather_hops(devices, rows):
        sent, seconds = size * h.rows / shape[pair.dim], None
        if plan.chip is not None:
            seconds = hop_seconds(sent, major_of(plan.torus, pair.axes)[0], plan.chip) / min(2, devices - 1)
        count = None if old.count is None else old.count * h.count
        if count is None:  # all steps of one ring, in an iteration of a loop of unknown length
            sent, seconds = sent * h.count, None if seconds is None else seconds * h.count
        why = f"ring steps in place of the {old.op}, overlapped with matmuls"
        hop = replace(old, op="collective-permute", bytes=sent, algorithm="ring", seconds=seconds, count=count, why=why)
        out.append(hop)
    if minor > 1:
        _, first = major_stage(plan.torus, pair.axes)
        inner = [s for a in pair.axes for s in plan.torus[a] if s.size > 1][first:]
        algorithm: AlgorithmName = "staged" if old.op == "reduce-scatter" else "native"
        seconds = None if plan.chip is None else seconds_of(old.op, size / devices, inner, plan.chip, algorithm)
        sent = wire_bytes(old.op, size / devices, minor)
        part = replace(old, bytes=sent, algorithm=algorithm, seconds=seconds, why="", first=first)
        out = [part, *out] if pair.gather else [*out, part]
    return out


def fused_of(plan: Plan, pair: CollectiveMatmul, is_transposed: bool) -> FusedGather | FusedScatter | str:
    """The fused kernel (TPU: remote DMA while the matrix unit runs) for a pair, or the reason against it.

    Args:
      is_transposed: a matmul is transposed before it is added to the sum.
    """
    stages = [] if 0 in pair.value.shape else major_of(plan.torus, pair.axes)
    if devices_of(plan.torus, pair.axes) == 1 or not stages:
        return "nothing is sent"
    if not interpreting():
        if plan.chip is None:
            return "it is for TPUs, and the chip is not known"
        if not plan.chip.torus:
            return f"it is for TPUs, and {plan.chip.name} is a GPU"
        if plan.chip.cores > 1:
            return f"a {plan.chip.name} has {plan.chip.cores} TensorCores, and the kernel multiplies on one"
    if stages[0].dim == "slice":
        return "remote DMA does not leave a slice"
    if len(pair.dots) > 1 and is_transposed:
        return "the matmuls are transposed before they are added"
    devices = stages[0].size
    key = (
        tuple(plan.sizes.items()), devices, pair.dim, pair.keep, pair.step.source.spec, pair.step.result.spec, pair.step.op,
        *((run.op, side, *(s and s.spec for s in run.operands)) for run, side in pair.dots),
    )  # fmt: skip
    cache = plan.program.cached(_fused_kernels)
    kernel = cache.get(key)
    if kernel is None:
        made = _fused_gather(plan, pair, devices) if pair.gather else _fused_scatter(plan, pair, devices)
        kernel = cache.put(key, "; ".join(made) if isinstance(made, tuple) else made)
    return kernel


def _fused_kernels(program: Program) -> LRUCache[tuple[Any, ...], FusedGather | FusedScatter | str]:
    """A cache of the fused kernel of each matmul–collective pair, or of the reason against one, by mesh, matmuls and specs."""
    return LRUCache(4096)


def _operand(plan: Plan, run: Run, side: int) -> jax.ShapeDtypeStruct | None:
    """The local shape and dtype of an operand of a matmul; None: it is input-independent."""
    value, shard = run.op.ins[side], run.operands[side]
    if value is None or shard is None:
        return None
    return jax.ShapeDtypeStruct(local_shape(value.shape, shard.spec, plan.sizes), value.aval.dtype)


def _fused_gather(plan: Plan, pair: CollectiveMatmul, devices: int) -> FusedGather | tuple[str, ...] | str:
    """The fused kernel of an all-gather and its matmuls, or the reasons against it."""
    others = [_operand(plan, run, 1 - side) for run, side in pair.dots]
    known = [x for x in others if x is not None]
    shape = list(local_shape(pair.value.shape, pair.step.result.spec, plan.sizes))
    if len(known) < len(others) or shape[pair.dim] % devices:
        return "an operand is a constant, or chunks differ in size"
    shape[pair.dim] //= devices
    x = jax.ShapeDtypeStruct(tuple(shape), pair.value.aval.dtype)
    return FusedGather.of(x, known, [dot_of(run.op.eqn, side) for run, side in pair.dots], pair.dim, devices, pair.keep)


def _fused_scatter(plan: Plan, pair: CollectiveMatmul, devices: int) -> FusedScatter | tuple[str, ...] | str:
    """The fused kernel of matmuls and the reduce-scatter of their sum, or the reasons against it."""
    operands = [(_operand(plan, run, 0), _operand(plan, run, 1)) for run, _ in pair.dots]
    known = [(a, b) for a, b in operands if a is not None and b is not None]
    if len(known) < len(operands):
        return "an operand is a constant"
    dots, dims = [dot_of(run.op.eqn, 0) for run, _ in pair.dots], [d for _, d in pair.dots]
    dtype: Any = pair.value.aval.dtype
    return FusedScatter.of(known, dots, dims, devices, dtype, dtype)
