"""Collective-matmul pass: overlaps all-gathers and reduce-scatters with the matmuls next to them, as rings or fused kernels.

For each all-gather whose result matmuls read, and each reduce-scatter of a sum of matmuls, it compares the exposed seconds of the
implementations (:mod:`meshpar.cost.collective_matmul`), and replaces the steps of the pair accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from meshpar_kernels.collective_matmul import Dot, FusedGather, FusedScatter, interpreting
from meshpar_kernels.collective_matmul.schedule import gather_hops

from ..caches import LRUCache
from ..cost.caching import free_caches, with_reasons
from ..cost.collective_matmul import (
    CollectiveMatmul,
    exposed_seconds,
    matmul_seconds,
    warn_about_lines,
)
from ..cost.fusion import FUSIBLE, MATMULS, VIEWS
from ..cost.time import time_of
from ..dims import did_you_mean
from ..errors import UnsupportedError
from ..hardware.algorithms import AlgorithmName
from ..hardware.collective_ops import CollectiveOp, wire_bytes
from ..hardware.collective_time import hop_seconds, seconds_of
from ..hardware.compiler import CompilerModel
from ..hardware.topology import Stage, devices_of, major_of, major_stage
from ..plan.collectives import Collective
from ..plan.plan import Choice, Overlap, Plan
from ..plan.spec import format_axes, local_shape, shard_count
from ..plan.steps import (
    Body,
    Call,
    GatherRing,
    Reduce,
    ReduceRing,
    Reshard,
    RingDot,
    Run,
    Shard,
    Step,
    rewrite_bodies,
    topological_order,
)
from ..program.ir import Frame, Op, Program, Value
from ..units import format_seconds
from .dependencies import Dependencies, dependencies

MODES = ("auto", "xla", "ring", "pallas", "off")
"""``auto``: by cost, ``xla`` or ``ring``; ``xla``: a separate collective; ``ring``: a ring wherever possible; ``pallas``: the fused
TPU kernel wherever it supports the pair, elsewhere as ``auto``; ``off``: no pair is looked for. ``xla`` and ``off`` give the same
program. Only ``auto`` and ``pallas`` replace reduce-scatters by all-reduces (:mod:`meshpar.passes.all_reduce_choice`)."""
BY_COST = ("auto", "pallas")
"""The modes in which cost decides where the user's mode does not."""


def overlap_collectives(plan: Plan, other_passes: Callable[[Plan], Plan] = lambda plan: plan) -> Plan:
    """The plan with an implementation for every pair of a collective and matmuls, by the mode ``plan.overlap``.

    Where cost decides, an all-gather of a weight and a reduction of a gradient are decided one by one. The collectives of
    activations over the same axes are decided jointly, by the estimated seconds of the step: next to separate collectives, the
    compiler (libtpu 0.0.42) overlaps hardly a matmul with the steps of a ring. Five mixtures were compiled, chosen pair by pair:
    each took longer than one of the pure choices, two of them longer than both.

    ``auto`` never chooses the fused kernel, since no kernel with remote DMA was timed yet; the reasons say where one could run.

    Args:
      other_passes: the passes that follow; plans are compared after these.

    Raises:
      UnsupportedError: the mode is not one of :data:`MODES`.
    """
    mode = plan.overlap
    if mode not in MODES:
        raise UnsupportedError(f"there is no overlap {mode!r}", fixes=did_you_mean(mode, MODES, "modes"))
    if mode == "off":
        return other_passes(plan)
    pairs = CollectiveMatmulPairs(plan)
    joint: dict[tuple[str, ...], Choice] = {}
    if mode in BY_COST and plan.chip is not None:
        joint.update((axes, "xla") for axes in _activation_axes(plan, pairs))
    best = other_passes(_with_choices(plan, pairs, joint))
    reasons: dict[tuple[str, ...], str] = {}
    for axes in joint:
        if not any(o.together and o.axes == axes for o in best.overlaps):
            continue
        candidate = other_passes(_with_choices(plan, pairs, {**joint, axes: "ring"}))
        xla, ring = _seconds(best), _seconds(candidate)
        reasons[axes] = (
            f"the step takes {format_seconds(ring)} with rings over {format_axes(axes)}, {format_seconds(xla)} without"
        )
        if xla - ring >= max(plan.compiler.min_gain_seconds, plan.compiler.min_joint_gain * xla):
            best, candidate, joint[axes] = candidate, best, "ring"
        free_caches(candidate)
    if reasons:
        explained = [replace(o, reason=f"{o.reason}; {reasons[o.axes]}") if o.together else o for o in best.overlaps]
        best = with_reasons(best, overlaps=tuple(explained))
    warn_about_lines(best)
    return best


def _seconds(plan: Plan) -> float:
    """The estimated seconds of a step of a plan with a known chip."""
    time = time_of(plan)
    assert time is not None
    return time.seconds


def _activation_axes(plan: Plan, pairs: CollectiveMatmulPairs) -> list[tuple[str, ...]]:
    """The mesh axes over which activations are all-gathered for matmuls, and on which rings are possible."""
    longest = plan.compiler.max_ring_size
    gathers = [p for p in pairs.pairs.values() if p.gather and 1 < devices_of(plan.torus, p.axes) <= longest]
    return list(dict.fromkeys(p.axes for p in gathers if pairs.on_critical_path(p)))


def _with_choices(plan: Plan, pairs: CollectiveMatmulPairs, joint: Mapping[tuple[str, ...], Choice]) -> Plan:
    """The plan with an implementation for each pair.

    Args:
      joint: axes → the implementation of all collectives of activations over these axes.
    """
    pairs.in_rings = set()
    unpaired = UnpairedMatmuls(plan, {run for pair in pairs.pairs.values() for run, _ in pair.dots})
    changes: dict[Step, Step] = {}
    overlaps: list[Overlap] = []
    for step in pairs.candidates:
        pair = pairs.pair(step)
        if pair is None:
            continue
        critical = pairs.on_critical_path(pair)
        decision, fused = _decision(plan, pair, unpaired, pairs, joint.get(pair.axes) if critical else None, critical)
        overlaps.append(decision)
        if decision.choice != "xla":
            changes.update(_ring_steps(plan, pair, decision.choice, fused, pairs))

    def change(body: Body) -> Body:
        """A body with the steps in ``changes`` replaced, sorted again if it has a ring of an all-gather."""
        if changes.keys().isdisjoint(body.steps):
            return body
        steps = [changes.get(step, step) for step in body.steps]
        rings = any(isinstance(s, Reshard) and s.ring is not None for s in steps)
        return replace(body, steps=topological_order(steps, body.outputs) if rings else tuple(steps))

    return replace(plan, body=rewrite_bodies(plan.body, change) if changes else plan.body, overlaps=tuple(overlaps))


# -- pairs


class CollectiveMatmulPairs:
    """Finds the collectives of a plan that can be computed with matmuls as a ring (collective matmul), and their
    matmuls.

    A pair is an all-gather and the matmuls that read its result, or a reduce-scatter and the matmuls that it sums. The
    pass makes one instance per plan.

    Attributes:
      candidates: in program order, the all-gathers whose results their own body reads, and reductions that begin with a
          reduce-scatter.
      pairs: candidate → its pair, without regard to rings that other pairs have.
      in_rings: the matmuls that are in a ring already.
      users: result of a candidate all-gather → the steps that read it.
      maker: partial shard → the step of the op that computes it.
      reads: partial shard → how many times it is read.
      home, frame: step → its body (calls inlined), and its frame (a call is a frame of its own).
    """

    def __init__(self, plan: Plan):
        """Find the candidates and pairs of a plan; no matmul is in a ring yet."""
        self.plan = plan
        self.in_rings: set[Op] = set()
        self.candidates: list[Reshard | Reduce] = []
        self.users: dict[Shard, list[Step]] = {}
        self.maker: dict[Shard, Run] = {}
        self.reads: dict[Shard, int] = {}
        self.home: dict[Step, Frame] = {}
        self.frame: dict[Step, Frame] = {}
        self._hops: dict[Step, list[Collective]] = {}
        self._positions: dict[Frame, dict[Op, int]] = {}
        self._read(plan.body, {s for loop in plan.body.loops for s in loop.hoisted}, plan.program.root)
        self.pairs = {step: pair for step in self.candidates if (pair := self._pair(step)) is not None}
        self._carried = _carried(plan.body)
        self._on_critical_path: dict[Step, bool] = {}

    def _read(self, body: Body, hoisted: set[Shard], home: Frame) -> None:
        """Record the candidates of a body and of nested bodies, and the readers and makers of shards.

        Args:
          hoisted: shards that are resharded before a loop, which are no candidates.
          home: the frame that the body's calls are inlined in.
        """
        users, reads = self.users, self.reads
        for step in body.steps:
            if not isinstance(step, Run):
                for inner in step.bodies:
                    self._read(inner, hoisted, home if isinstance(step, Call) else inner.frame)
                if isinstance(step, Call):
                    continue
            for shard in step.reads:
                if shard in users:
                    users[shard].append(step)
                if shard.partial:
                    reads[shard] = reads.get(shard, 0) + 1
            if isinstance(step, Run):
                for shard in step.results:
                    if shard.partial:
                        self.maker[shard], self.home[step] = step, home
            elif isinstance(step, Reshard) and step.copy and step.collectives and step.result not in hoisted:
                users[step.result] = []
                self.candidates.append(step)
                self.home[step], self.frame[step] = home, body.frame
            elif isinstance(step, Reduce) and [c.op for c in step.collectives[:1]] == ["reduce-scatter"]:
                self.candidates.append(step)
                self.home[step], self.frame[step] = home, body.frame
        for shard in body.outputs:
            if shard is not None and shard.partial:
                reads[shard] = reads.get(shard, 0) + 1

    def hops(self, pair: CollectiveMatmul) -> list[Collective]:
        """The collectives of a ring in place of the pair's collective."""
        if pair.step not in self._hops:
            self._hops[pair.step] = ring_collectives(self.plan, pair)
        return self._hops[pair.step]

    def pair(self, step: Reshard | Reduce) -> CollectiveMatmul | None:
        """The pair of a candidate, with matmuls that are in no ring yet, or None."""
        return self._pair(step) if self.in_rings else self.pairs.get(step)

    def _pair(self, step: Reshard | Reduce) -> CollectiveMatmul | None:
        return self._gather(step) if isinstance(step, Reshard) else self._scatter(step)

    def on_critical_path(self, pair: CollectiveMatmul) -> bool:
        """Whether other steps depend on the collective and it on them: true of all but the all-gather of a weight."""
        if pair.step not in self._on_critical_path:
            self._on_critical_path[pair.step] = not pair.gather or not _is_input(pair.value, self._carried)
        return self._on_critical_path[pair.step]

    def ops_of_users(self, step: Reshard | Reduce) -> list[Op]:
        """The ops of the steps that read the result of an all-gather."""
        return [user.op for user in self.users.get(step.result, ()) if user.op is not None]

    def _gather(self, step: Reshard) -> CollectiveMatmul | None:
        """The pair of an all-gather: the matmuls that read its result and can run chunk by chunk, or None."""
        if len(step.path) != 1 or step.path[0].op != "all-gather":
            return None
        (move,) = step.path
        (dim,) = move.dims
        frame = self.frame[step]
        position = self._position(frame)
        users = self.users[step.result]
        free: list[tuple[Run, int]] = []
        contracted: list[tuple[Run, int]] = []
        for run in users:
            if (
                not isinstance(run, Run)
                or not run.op.primitive.dot
                or run.op in self.in_rings
                or run.op not in position
            ):
                continue
            sides = [s for s in (0, 1) if run.operands[s] is step.result]
            if len(sides) == 1:
                (lc, rc), _ = run.op.eqn.params["dimension_numbers"]
                (contracted if dim in (lc, rc)[sides[0]] else free).append((run, sides[0]))
        first = min((position.get(op, -1) for op in self.ops_of_users(step)), default=-1)
        dots = [
            (run, side)
            for run, side in sorted(free or contracted, key=lambda x: position[x[0].op])
            if _can_precede(run.op.ins[1 - side], frame, first, position)
        ]
        if not dots:
            return None
        paired = {run for run, _ in dots}
        return CollectiveMatmul(step, dim, move.axes, tuple(dots), any(user not in paired for user in users))

    def _position(self, frame: Frame) -> dict[Op, int]:
        if frame not in self._positions:
            self._positions[frame] = {op: k for k, op in enumerate(frame.ops)}
        return self._positions[frame]

    def _scatter(self, step: Reduce) -> CollectiveMatmul | None:
        """The pair of a reduce-scatter: the matmuls whose sum it reduces.

        None if an op between them is not a sum or transpose, or if another step reads a partial value between them.
        """
        made = self.maker.get(step.source)
        if made is None or self.reads[step.source] != 1 or len(made.results) > 1 or step.source.kind != "sum":
            return None
        scatter = step.scatters[0]
        leaves = self._leaves(step.source, scatter.dim, self.home[step])
        return None if not leaves else CollectiveMatmul(step, scatter.dim, scatter.axes, tuple(leaves))

    def _leaves(self, shard: Shard, dim: int, home: Frame) -> list[tuple[Run, int]] | None:
        """(matmul, dim of its result that becomes ``dim``) of all matmuls that are added in a partial shard; None as above."""
        leaves: list[tuple[Run, int]] = []
        pending: list[tuple[Shard | None, int]] = [(shard, dim)]
        while pending:  # not recursive: a sum may have more terms than Python's stack
            term, dim = pending.pop()
            run = None if term is None else self.maker.get(term)
            if (
                term is None
                or run is None
                or self.home[run] is not home
                or (term is not shard and self.reads[term] != 1)
            ):
                return None
            partial = any(s.partial for s in run.reads)
            if run.op.primitive.dot and run.axes is not None and not partial and run.op not in self.in_rings:
                leaves.append((run, dim))
            elif partial and run.op.primitive.transpose:
                pending.append((run.reads[0], run.op.eqn.params["permutation"][dim]))
            elif partial and run.op.primitive.addition:
                pending += [(operand, dim) for operand in reversed(run.operands)]
            else:
                return None
        return leaves


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
        if v.op.frames or v.op.name not in FUSIBLE | VIEWS or v.op.eqn.effects:
            return False
        moved.add(v.op)
        todo += v.op.ins
    return True


def _encloses(frame: Frame, inner: Frame) -> bool:
    """Whether a frame is an ancestor of another."""
    parent = inner.parent
    while parent is not None and parent.frame is not frame:
        parent = parent.frame.parent
    return parent is not None


def _carried(body: Body) -> set[Value]:
    """The values that loop bodies receive from the previous iteration; of a ``while``, all that its bodies receive."""
    out: set[Value] = set()
    for step in body.loops:
        out.update(s.value for b in step.bodies for s in b.inputs[: len(step.inits)])
        if not step.op.primitive.scan:
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
            if v.op.name not in FUSIBLE | VIEWS:
                return False
            todo += [x for x in v.op.ins if x is not None]
        elif v in carried:
            return False
    return True


class UnpairedMatmuls:
    """The matmuls of each body that are in no pair; each hides at most one separate all-gather.

    The TPU compiler (libtpu 0.0.42) overlaps an asynchronous all-gather (``Plan.is_async``) with matmuls of its body that neither
    compute its operand nor read its result. In the schedule of a recomputed Llama layer on v5e, the all-gather of the cotangent of
    the attention's output overlaps with the weight gradients of the MLP.

    Args:
      paired: the matmuls of all pairs, which hide the steps of their own rings.
    """

    def __init__(self, plan: Plan, paired: set[Run]):
        self.program, self.runs = plan.program, plan.runs
        self.paired = {run.op for run in paired}
        self.left: dict[Frame, int] = {}

    def _dependencies(self, home: Frame) -> Dependencies:
        """The dependencies of a body, whose unpaired matmuls are then in ``left``."""
        ops = self.program.cached(dependencies).get(home) or Dependencies([])
        if home not in self.left:
            self.left[home] = ops.set_of(
                op for op in ops.ops if op.name in MATMULS and op in self.runs and op not in self.paired
            )
        return ops

    def during(self, pair: CollectiveMatmul, home: Frame, users: Sequence[Op]) -> list[Run]:
        """The matmuls that can run while a value is all-gathered for ``users``, and that hide no other collective yet."""
        ops = self._dependencies(home)
        return [self.runs[op] for op in ops.independent(self.left[home], pair.value.op, users)]

    def leads_to_matmul(self, pair: CollectiveMatmul, home: Frame) -> bool:
        """Whether matmuls of the body depend on the pair's value."""
        return self._dependencies(home).leads_to_matmul(pair.value.op)

    def reserve(self, home: Frame, runs: Iterable[Run]) -> None:
        """Let matmuls hide a collective, so that they hide no other."""
        self.left[home] &= ~self._dependencies(home).set_of(run.op for run in runs)


# -- decisions


def _decision(
    plan: Plan,
    pair: CollectiveMatmul,
    unpaired: UnpairedMatmuls,
    pairs: CollectiveMatmulPairs,
    joint: Choice | None,
    critical: bool,
) -> tuple[Overlap, FusedGather | FusedScatter | None]:
    """(decision about a pair, kernel): the :class:`Overlap` with its choice, and the fused kernel if the choice is
    ``pallas``, else None.

    Args:
      unpaired: the matmuls that are in no pair, with which a separate collective may overlap.
      joint: the implementation of all collectives of activations over the same axes; None: the pair is decided on its
          own.
      critical: it is on the critical path (:meth:`CollectiveMatmulPairs.on_critical_path`).
    """
    mode, first = plan.overlap, pair.step.collectives[0]
    devices = devices_of(plan.torus, pair.axes)
    idle = devices == 1 or 0 in pair.value.shape
    stages = [] if idle else major_of(plan.torus, pair.axes)
    fused = fused_of(plan, pair, stages) if mode in ("auto", "pallas") else ""
    exposed, others, home = None, [], pairs.home[pair.step]
    if plan.chip is not None:
        kernel = None if isinstance(fused, str) else fused
        others = unpaired.during(pair, home, pairs.ops_of_users(pair.step)) if pair.gather else []
        seconds = [matmul_seconds(plan, plan.chip, run) for run in others]
        blocks = critical if pair.gather else unpaired.leads_to_matmul(pair, home)
        exposed = exposed_seconds(plan, plan.chip, pair, pairs.hops(pair), kernel, blocks, seconds, mode in BY_COST)
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
        choice, reason = _by_cost(plan.compiler, devices, exposed, pair.gather, joint)
        if mode == "pallas":
            reason = f"no fused kernel: {fused}; {reason}"
        elif not isinstance(fused, str):
            reason += '; a fused kernel is possible (overlap="pallas"), but none was timed yet'
    if others:
        unpaired.reserve(home, others)
    if any(s.line for s in stages):
        reason += f"; {format_axes(pair.axes)} is no ring of the torus, so that ring steps share links"
    kind = "gather" if pair.gather else "scatter"
    origin = pair.dots[0][0].op
    decision = Overlap(
        kind, choice, reason, first.tensor, pair.axes, len(pair.dots), first.count, exposed, origin,
        joint is not None and choice != "pallas",
    )  # fmt: skip
    return decision, fused if choice == "pallas" and not isinstance(fused, str) else None


def _by_cost(
    compiler: CompilerModel, devices: int, exposed: dict[str, float] | None, gather: bool, joint: Choice | None
) -> tuple[Choice, str]:
    """(``"xla"`` or ``"ring"``, the reason as a sentence).

    Args:
      exposed: implementation → exposed seconds; None: the chip is not known.
      joint: as in :func:`_decision`.
    """
    if exposed is None:
        return "xla", "the chip is not known"
    if devices > compiler.max_ring_size:
        return "xla", f"a ring of {devices} devices is longer than {compiler.max_ring_size}"
    xla, ring = exposed["xla"], exposed["ring"]
    saves = xla - ring >= compiler.min_gain_seconds
    if (joint or ("ring" if saves else "xla")) == "ring":
        hidden = f": {100 * (1 - ring / xla):.0f} % hidden" if ring < xla else ""
        return "ring", f"chunks are sent while {'others are multiplied' if gather else 'the next are computed'}{hidden}"
    if xla == 0:
        return "xla", "the compiler overlaps it with other matmuls"
    if saves:
        return "xla", "rings for all collectives over the same axes save too little"
    if ring:
        return (
            "xla",
            "the matmuls of a chunk are too short to hide a ring step and the elementwise ops between ring steps",
        )
    return "xla", "a ring saves too little"


# -- steps of rings


def _ring_steps(
    plan: Plan,
    pair: CollectiveMatmul,
    choice: Choice,
    fused: FusedGather | FusedScatter | None,
    pairs: CollectiveMatmulPairs,
) -> dict[Step, Step]:
    """Step → its replacement, for the steps of a pair that a ring or fused kernel implements."""
    step = pair.step
    new = [replace(c, algorithm="pallas") if c.entry.ring_step and choice == "pallas" else c for c in pairs.hops(pair)]
    collectives = (*new, *step.collectives[1:])
    if isinstance(step, Reshard):
        dots = tuple(RingDot(run.op, side, run.operands[1 - side], run.results[0]) for run, side in pair.dots)
        assert not isinstance(fused, FusedScatter)
        ring = GatherRing(pair.dim, pair.axes, dots, pair.keep, fused)
        pairs.in_rings.update(run.op for run, _ in pair.dots)
        changes: dict[Step, Step] = {run: replace(run, in_ring="gather") for run, _ in pair.dots}
        return {**changes, step: replace(step, collectives=collectives, ring=ring)}
    leaves = {run.results[0]: d for run, d in pair.dots}
    assert not isinstance(fused, FusedGather)
    terms = ReduceRing(pair.dim, pair.axes, tuple(leaves.items()), devices_of(plan.torus, pair.axes), fused)
    changes = {step: replace(step, collectives=collectives, ring=terms)}
    todo = [step.source]
    while todo:
        shard = todo.pop()
        run = pairs.maker[shard]
        changes[run] = replace(run, in_ring="reduce")
        if shard not in leaves:
            todo += run.reads
    return changes


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
        why = f"ring steps in place of the {old.op}, overlapped with matmuls"
        out.append(_like(old, "collective-permute", sent, "ring", seconds, count=count, why=why))
    if minor > 1:
        _, first = major_stage(plan.torus, pair.axes)
        inner = [s for a in pair.axes for s in plan.torus[a] if s.size > 1][first:]
        algorithm: AlgorithmName = "staged" if old.op == "reduce-scatter" else "native"
        seconds = None if plan.chip is None else seconds_of(old.op, size / devices, inner, plan.chip, algorithm)
        part = _like(old, old.op, wire_bytes(old.op, size / devices, minor), algorithm, seconds, first=first)
        out = [part, *out] if pair.gather else [*out, part]
    return out


def _like(
    old: Collective, op: CollectiveOp, size: float, algorithm: AlgorithmName, seconds: float | None, **other: Any
) -> Collective:
    return replace(old, op=op, bytes=size, algorithm=algorithm, seconds=seconds, **{"why": "", **other})


def fused_of(plan: Plan, pair: CollectiveMatmul, stages: Sequence[Stage]) -> FusedGather | FusedScatter | str:
    """The fused kernel (TPU: remote DMA while the matrix unit runs) for a pair, or the reason against it.

    Args:
      stages: of the torus, over which its ring goes: one, or none if nothing is sent.
    """
    if not stages:
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


def dot_of(op: Op, side: int) -> Dot:
    """A ``dot_general`` whose operand ``side`` is gathered, as :mod:`meshpar_kernels` describes it."""
    p = op.eqn.params
    (lc, rc), (lb, rb) = p["dimension_numbers"]
    numbers = ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb)))
    return Dot(numbers, side, p["precision"], p["preferred_element_type"])


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
    return FusedGather.of(x, known, [dot_of(run.op, side) for run, side in pair.dots], pair.dim, devices, pair.keep)


def _fused_scatter(plan: Plan, pair: CollectiveMatmul, devices: int) -> FusedScatter | tuple[str, ...] | str:
    """The fused kernel of matmuls and the reduce-scatter of their sum, or the reasons against it."""
    operands = [(_operand(plan, run, 0), _operand(plan, run, 1)) for run, _ in pair.dots]
    known = [(a, b) for a, b in operands if a is not None and b is not None]
    if len(known) < len(operands):
        return "an operand is a constant"
    if len(operands) > 1 and _transposed(pair):
        return "the matmuls are transposed before they are added"
    dots, dims = [dot_of(run.op, 0) for run, _ in pair.dots], [d for _, d in pair.dots]
    dtype: Any = pair.value.aval.dtype
    return FusedScatter.of(known, dots, dims, devices, dtype, dtype)


def _transposed(pair: CollectiveMatmul) -> bool:
    """Whether a matmul is transposed before it is added to the sum."""
    leaves = {run.op for run, _ in pair.dots}
    todo: list[Op | None] = [pair.value.op]
    while todo:
        op = todo.pop()
        if op is None or op in leaves:
            continue
        if op.primitive.transpose:
            return True
        todo += [v.op for v in op.ins if v is not None]
    return False
