"""Products beside collectives: which gathers and which reduce-scatters are sent in blocks while products run.

A pass over a plan. For the gathers whose values products take, and the sums of products that are reduce-scattered, it decides by
what is expected to be left exposed (:mod:`meshpar.cost.collective_matmul`), and has a ring or a kernel send them instead.
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
from ..cost.fusion import FUSIBLE, VIEWS
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
from .dependencies import Reachability, reaches

MODES = ("auto", "xla", "ring", "pallas", "off")
"""``auto``: by cost, of ``xla`` and ``ring``; ``xla``, ``ring``: that way wherever it is possible; ``pallas``: by the fused TPU
kernel wherever it takes the pair, as ``auto`` elsewhere; ``off``: not looked for. ``xla`` and ``off`` give one program, and with
``ring`` the one that sends least: sums are sent whole by the others alone (:mod:`meshpar.passes.all_reduce_choice`)."""
BY_COST = ("auto", "pallas")
"""The modes in which cost decides what else is not asked for."""


def overlap(plan: Plan, rest: Callable[[Plan], Plan] = lambda plan: plan) -> Plan:
    """Decide for every pair of a plan in the mode that ``plan.overlap`` names, have it sent accordingly, and run the passes behind.

    Where cost decides, a gather of a weight and the sum of a gradient are each on their own. What products of activations gather
    and scatter over the same axes is sent one way, that of the shorter step by the plan's own time of it: between collectives of
    their own the compiler (libtpu 0.0.42) puts hardly a product beside the hops of a ring. Five mixtures were compiled, chosen pair
    by pair: each was longer than one of the pure forms, two of them longer than both.

    ``auto`` never takes the kernel: none that talks to other devices is a default before it was timed. Its reasons say where one
    would run.

    Args:
      rest: the passes behind this one.

    Raises:
      UnsupportedError: a mode that is not of :data:`MODES`.
    """
    mode = plan.overlap
    if mode not in MODES:
        raise UnsupportedError(f"there is no overlap {mode!r}", fixes=did_you_mean(mode, MODES, "modes"))
    if mode == "off":
        return rest(plan)
    found = CollectiveMatmulPairs(plan)
    chains = _chains(plan, found) if mode in BY_COST and plan.chip is not None else []
    forms: dict[tuple[str, ...], Choice] = {}
    forms.update((axes, "xla") for axes in chains)
    best = rest(_sent(plan, found, forms))
    steps: dict[tuple[str, ...], str] = {}
    for axes in chains:
        if not any(o.together and o.axes == axes for o in best.overlaps):
            continue
        other = rest(_sent(plan, found, {**forms, axes: "ring"}))
        xla, ring = _seconds(best), _seconds(other)
        steps[axes] = (
            f"the step takes {format_seconds(ring)} with all of {format_axes(axes)} in blocks, {format_seconds(xla)} with none"
        )
        if xla - ring >= max(plan.compiler.min_gain_seconds, plan.compiler.min_joint_gain * xla):
            best, other, forms[axes] = other, best, "ring"
        free_caches(other)
    told = tuple(replace(o, reason=f"{o.reason}; {steps[o.axes]}") if o.together else o for o in best.overlaps)
    best = with_reasons(best, overlaps=told) if steps else best
    warn_about_lines(best)
    return best


def _seconds(plan: Plan) -> float:
    found = time_of(plan)
    assert found is not None
    return found.seconds


def _chains(plan: Plan, found: CollectiveMatmulPairs) -> list[tuple[str, ...]]:
    """The axes over which activations are gathered for products, and that rings are possible on."""
    longest = plan.compiler.max_ring_size
    gathers = [p for p in found.pairs.values() if p.gather and 1 < devices_of(plan.torus, p.axes) <= longest]
    return list(dict.fromkeys(p.axes for p in gathers if found.chained(p)))


def _sent(plan: Plan, found: CollectiveMatmulPairs, forms: Mapping[tuple[str, ...], Choice]) -> Plan:
    """The plan with its pairs sent as they are decided.

    Args:
      forms: axes → how what products of activations gather and scatter over them is sent.
    """
    found.taken = set()
    free = Free(plan, {run for pair in found.pairs.values() for run, _ in pair.dots})
    changes: dict[Step, Step] = {}
    overlaps: list[Overlap] = []
    for step in found.candidates:
        pair = found.pair(step)
        if pair is None:
            continue
        chained = found.chained(pair)
        decision, fused = _decision(plan, pair, free, found, forms.get(pair.axes) if chained else None, chained)
        overlaps.append(decision)
        if decision.choice != "xla":
            changes.update(_in_blocks(plan, pair, decision.choice, fused, found))

    def change(body: Body) -> Body:
        if changes.keys().isdisjoint(body.steps):
            return body
        steps = [changes.get(step, step) for step in body.steps]
        rings = any(isinstance(s, Reshard) and s.ring is not None for s in steps)
        return replace(body, steps=topological_order(steps, body.outputs) if rings else tuple(steps))

    return replace(plan, body=rewrite_bodies(plan.body, change) if changes else plan.body, overlaps=tuple(overlaps))


# -- finding


class CollectiveMatmulPairs:
    """The products of a plan that stand beside collectives.

    Attributes:
      candidates: gathers for steps of their own body, and reductions that begin with a reduce-scatter, in order.
      users: the steps that read what such a gather gives.
      maker: the ops that leave sums unreduced; reads: how often each of these is read.
      home: the bodies, calls in place, and frame: the frames in which candidates and such ops stand.
      taken: products that are in a ring already.
      pairs: by candidate, where none are.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.taken: set[Op] = set()
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
        self._chained: dict[Step, bool] = {}

    def _read(self, body: Body, hoisted: set[Shard], home: Frame) -> None:
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
        """What a ring would send for a pair."""
        if pair.step not in self._hops:
            self._hops[pair.step] = ring_collectives(self.plan, pair)
        return self._hops[pair.step]

    def pair(self, step: Reshard | Reduce) -> CollectiveMatmul | None:
        """The pair of a candidate, of products that are in no ring."""
        return self._pair(step) if self.taken else self.pairs.get(step)

    def _pair(self, step: Reshard | Reduce) -> CollectiveMatmul | None:
        return self._gather(step) if isinstance(step, Reshard) else self._scatter(step)

    def chained(self, pair: CollectiveMatmul) -> bool:
        """Whether a pair waits for others or others for it: all but gathers of weights do."""
        if pair.step not in self._chained:
            self._chained[pair.step] = not pair.gather or not _follows_from_inputs(pair.value, self._carried)
        return self._chained[pair.step]

    def ops_of_users(self, step: Reshard | Reduce) -> list[Op]:
        return [user.op for user in self.users.get(step.result, ()) if user.op is not None]

    def _gather(self, step: Reshard) -> CollectiveMatmul | None:
        """The products that one gathered value goes into, where some of them can run block by block."""
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
            if not isinstance(run, Run) or not run.op.primitive.dot or run.op in self.taken or run.op not in position:
                continue
            sides = [s for s in (0, 1) if run.operands[s] is step.result]
            if len(sides) == 1:
                (lc, rc), _ = run.op.eqn.params["dimension_numbers"]
                (contracted if dim in (lc, rc)[sides[0]] else free).append((run, sides[0]))
        first = min((position.get(op, -1) for op in self.ops_of_users(step)), default=-1)
        dots = [
            (run, side)
            for run, side in sorted(free or contracted, key=lambda x: position[x[0].op])
            if _can_stand_before(run.op.ins[1 - side], frame, first, position)
        ]
        if not dots:
            return None
        mine = {run for run, _ in dots}
        return CollectiveMatmul(step, dim, move.axes, tuple(dots), any(user not in mine for user in users))

    def _position(self, frame: Frame) -> dict[Op, int]:
        if frame not in self._positions:
            self._positions[frame] = {op: k for k, op in enumerate(frame.ops)}
        return self._positions[frame]

    def _scatter(self, step: Reduce) -> CollectiveMatmul | None:
        """The products whose sum is reduce-scattered, where all that is between is linear and used once."""
        made = self.maker.get(step.source)
        if made is None or self.reads[step.source] != 1 or len(made.results) > 1 or step.source.kind != "sum":
            return None
        scatter = step.scatters[0]
        leaves = self._leaves(step.source, scatter.dim, self.home[step], step.source)
        return None if not leaves else CollectiveMatmul(step, scatter.dim, scatter.axes, tuple(leaves))

    def _leaves(self, shard: Shard, dim: int, home: Frame, top: Shard) -> list[tuple[Run, int]] | None:
        run = self.maker.get(shard)
        if run is None or self.home[run] is not home or (shard is not top and self.reads[shard] != 1):
            return None
        if run.op.primitive.dot and run.axes is not None and not any(s.partial for s in run.reads):
            return None if run.op in self.taken else [(run, dim)]
        if not any(s.partial for s in run.reads):
            return None
        if run.op.primitive.transpose:
            return self._leaves(run.reads[0], run.op.eqn.params["permutation"][dim], home, top)
        if run.op.primitive.addition:
            found: list[tuple[Run, int]] = []
            for operand in run.operands:
                mine = None if operand is None else self._leaves(operand, dim, home, top)
                if mine is None:
                    return None
                found += mine
            return found
        return None


def _can_stand_before(value: Value | None, frame: Frame, first: int, position: Mapping[Op, int]) -> bool:
    """Whether a value of a frame can be made before the op at a place: only light ops from there on make it."""
    found: set[Op] = set()
    todo = [value]
    while todo:
        v = todo.pop()
        if v is None or v.op is None:
            continue
        if v.op not in position:
            around = _around(v.op, frame)  # a call whose body makes it
            if around is None and not _outside(v.op.frame, frame):
                return False
            if around is not None and position[around] >= first:
                return False
            continue
        if position[v.op] < first or v.op in found:
            continue
        if v.op.frames or v.op.name not in FUSIBLE | VIEWS or v.op.eqn.effects:
            return False
        found.add(v.op)
        todo += v.op.ins
    return True


def _around(op: Op, frame: Frame) -> Op | None:
    """The op of a frame that an op stands inside of."""
    while op.frame is not frame:
        if op.frame.parent is None:
            return None
        op = op.frame.parent
    return op


def _outside(frame: Frame, inner: Frame) -> bool:
    """Whether a frame is around another."""
    now = inner.parent
    while now is not None:
        if now.frame is frame:
            return True
        now = now.frame.parent
    return False


def _carried(body: Body) -> set[Value]:
    """What loops carry, as their bodies see it; of a ``while``, all that they see."""
    found: set[Value] = set()
    for step in body.loops:
        found.update(s.value for b in step.bodies for s in b.inputs[: len(step.inits)])
        if not step.op.primitive.scan:
            found.update(v for f in step.op.frames for v in f.ins())
    return found


def _follows_from_inputs(value: Value, carried: set[Value]) -> bool:
    """Whether a value follows from what its body is given for reading (a weight), not from what it carries or makes."""
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


class Free:
    """Products that no pair has, body by body: each hides one gather that is left to the compiler.

    The TPU compiler (libtpu 0.0.42) sends a gather asynchronously while other products of its body run, which neither make what it
    sends nor wait for it, but only where programs go on beside gathers (``Plan.is_async``). In the schedule of a
    recomputed Llama layer on v5e the gather of the cotangent of the attention's output runs beside the gradients of the MLP's
    weights.

    Args:
      taken: the products of all pairs. They have hops of their own to hide, if they run on rings.
    """

    def __init__(self, plan: Plan, taken: set[Run]):
        self.program, self.runs = plan.program, plan.runs
        self.taken = {run.op for run in taken}
        self.left: dict[Frame, int] = {}

    def _body(self, home: Frame) -> Reachability:
        reach = self.program.cached(reaches).get(home) or Reachability([])
        if home not in self.left:
            self.left[home] = reach.bits(op for op in reach.products if op in self.runs and op not in self.taken)
        return reach

    def beside(self, pair: CollectiveMatmul, home: Frame, users: Sequence[Op]) -> list[Run]:
        """The products that can run while a value is gathered for some ops."""
        body = self._body(home)
        return [self.runs[op] for op in body.neither(self.left[home], pair.value.op, users)]

    def followed(self, pair: CollectiveMatmul, home: Frame) -> bool:
        """Whether products of the body follow from a value."""
        return self._body(home).is_followed(pair.value.op)

    def take(self, home: Frame, runs: Iterable[Run]) -> None:
        """Let products hide a gather: they hide no other."""
        body = self._body(home)
        self.left[home] &= ~body.bits(run.op for run in runs)


# -- deciding


def _decision(
    plan: Plan, pair: CollectiveMatmul, free: Free, found: CollectiveMatmulPairs, form: Choice | None, chained: bool
) -> tuple[Overlap, FusedGather | FusedScatter | None]:
    mode, first = plan.overlap, pair.step.collectives[0]
    devices = devices_of(plan.torus, pair.axes)
    idle = devices == 1 or 0 in pair.value.shape
    stages = [] if idle else major_of(plan.torus, pair.axes)
    fused = fused_of(plan, pair, stages) if mode in ("auto", "pallas") else ""
    exposed, others, home = None, [], found.home[pair.step]
    if plan.chip is not None:
        part = None if isinstance(fused, str) else fused
        others = free.beside(pair, home, found.ops_of_users(pair.step)) if pair.gather else []
        seconds = [matmul_seconds(plan, plan.chip, run) for run in others]
        waits = chained if pair.gather else free.followed(pair, home)
        exposed = exposed_seconds(plan, plan.chip, pair, found.hops(pair), part, waits, seconds, mode in BY_COST)
    choice: Choice = "xla"
    reason = ""
    if idle:
        reason = "nothing is sent"
    elif mode == "xla":
        reason = "as asked for"
    elif mode == "ring":
        choice, reason = "ring", "as asked for"
    elif mode == "pallas" and not isinstance(fused, str):
        choice, reason = "pallas", "as asked for: one kernel sends blocks while it multiplies others"
    else:
        choice, reason = _by_cost(plan.compiler, devices, exposed, pair.gather, form)
        if mode == "pallas":
            reason = f"no kernel: {fused}; {reason}"
        elif not isinstance(fused, str):
            reason += '; a fused kernel would run it too (overlap="pallas"), but none was timed yet'
    if others:
        free.take(home, others)
    if exposed is not None and any(s.line for s in stages):
        reason += f"; {format_axes(pair.axes)} is no ring of the torus, so that hops share links"
    kind = "gather" if pair.gather else "scatter"
    origin = pair.dots[0][0].op
    decision = Overlap(
        kind, choice, reason, first.tensor, pair.axes, len(pair.dots), first.count, exposed, origin,
        form is not None and choice != "pallas",
    )  # fmt: skip
    return decision, fused if choice == "pallas" and not isinstance(fused, str) else None


def _by_cost(
    compiler: CompilerModel, devices: int, exposed: dict[str, float] | None, gather: bool, form: Choice | None
) -> tuple[Choice, str]:
    """A collective of its own, or a ring; and why.

    Args:
      form: of all that it is sent together with; None: it is on its own.
    """
    if exposed is None:
        return "xla", "the chip is not known"
    if devices > compiler.max_ring_size:
        return "xla", f"a ring of {devices} devices is longer than {compiler.max_ring_size}"
    xla, ring = exposed["xla"], exposed["ring"]
    choice: Choice = form or ("ring" if xla - ring >= compiler.min_gain_seconds else "xla")
    if choice == "ring":
        hidden = f": {100 * (1 - ring / xla):.0f} % hidden" if ring < xla else ""
        return choice, f"blocks travel while {'others are multiplied' if gather else 'the next are made'}{hidden}"
    if xla == 0:
        return choice, "the compiler sends for it while other products run"
    if xla - ring >= compiler.min_gain_seconds:
        return choice, "with all that goes over the same axes there is too little to gain"
    few = "the products of a block are too short to hide a hop, and what stands between hops"
    return choice, few if ring else "there is too little to gain"


# -- what is sent in blocks


def _in_blocks(
    plan: Plan,
    pair: CollectiveMatmul,
    choice: Choice,
    fused: FusedGather | FusedScatter | None,
    found: CollectiveMatmulPairs,
) -> dict[Step, Step]:
    """The steps of a pair, as they are where a ring or a kernel runs it."""
    step = pair.step
    new = [replace(c, algorithm="pallas") if c.entry.ring_step and choice == "pallas" else c for c in found.hops(pair)]
    collectives = (*new, *step.collectives[1:])
    if isinstance(step, Reshard):
        dots = tuple(RingDot(run.op, side, run.operands[1 - side], run.results[0]) for run, side in pair.dots)
        assert not isinstance(fused, FusedScatter)
        ring = GatherRing(pair.dim, pair.axes, dots, pair.keep, fused)
        found.taken.update(run.op for run, _ in pair.dots)
        changes: dict[Step, Step] = {run: replace(run, in_ring="gather") for run, _ in pair.dots}
        return {**changes, step: replace(step, collectives=collectives, ring=ring)}
    leaves = {run.results[0]: d for run, d in pair.dots}
    assert not isinstance(fused, FusedGather)
    terms = ReduceRing(pair.dim, pair.axes, tuple(leaves.items()), devices_of(plan.torus, pair.axes), fused)
    changes = {step: replace(step, collectives=collectives, ring=terms)}
    todo = [step.source]
    while todo:
        shard = todo.pop()
        run = found.maker[shard]
        changes[run] = replace(run, in_ring="reduce")
        if shard not in leaves:
            todo += run.reads
    return changes


def ring_collectives(plan: Plan, pair: CollectiveMatmul) -> list[Collective]:
    """What is sent instead of the one collective: its minor stages as before, the major one hop by hop."""
    old = pair.step.collectives[0]
    devices = devices_of(plan.torus, pair.axes)
    minor = shard_count(pair.axes, plan.sizes) // devices
    spec = pair.step.result.spec if pair.gather else pair.step.source.spec
    shape = local_shape(pair.value.shape, spec, plan.sizes)
    size = old.bytes * (devices * minor) / (devices * minor - 1)  # of the whole array on a device
    rows = shape[pair.dim] // devices
    out = []
    for h in gather_hops(devices, rows):
        sent, seconds = size * h.rows / shape[pair.dim], None
        if plan.chip is not None:
            seconds = hop_seconds(sent, major_of(plan.torus, pair.axes)[0], plan.chip) / min(2, devices - 1)
        count = None if old.count is None else old.count * h.count
        out.append(_like(old, "collective-permute", sent, "ring", seconds, count=count))
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
    return replace(old, op=op, bytes=size, algorithm=algorithm, why="", seconds=seconds, **other)


def fused_of(plan: Plan, pair: CollectiveMatmul, stages: Sequence[Stage]) -> FusedGather | FusedScatter | str:
    """The call of the fused kernel (TPU: remote DMA while the matrix unit runs) for a pair, or why there is none.

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
    key = (
        tuple(plan.sizes.items()), devices, pair.dim, pair.keep, pair.step.source.spec, pair.step.result.spec, pair.step.op,
        *((run.op, side, *(s and s.spec for s in run.operands)) for run, side in pair.dots),
    )  # fmt: skip
    cache = plan.program.cached(_fused_kernels)
    found = cache.get(key)
    if found is None:
        made = _fused_gather(plan, pair, devices) if pair.gather else _fused_scatter(plan, pair, devices)
        found = cache.put(key, "; ".join(made.reasons) if not isinstance(made, str) and made.reasons else made)
    return found


def _fused_kernels(program: Program) -> LRUCache[tuple[Any, ...], FusedGather | FusedScatter | str]:
    """A cache of the fused kernel of each matmul–collective pair, or of the reason against one, by mesh, matmuls and specs."""
    return LRUCache(4096)


def dot_of(op: Op, side: int) -> Dot:
    """A product as the kernels take it."""
    p = op.eqn.params
    (lc, rc), (lb, rb) = p["dimension_numbers"]
    numbers = ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb)))
    return Dot(numbers, side, p["precision"], p["preferred_element_type"])


def _operand(plan: Plan, run: Run, side: int) -> jax.ShapeDtypeStruct | None:
    """An operand as a device has it for the product; None: it is a constant."""
    value, shard = run.op.ins[side], run.operands[side]
    if value is None or shard is None:
        return None
    return jax.ShapeDtypeStruct(local_shape(value.shape, shard.spec, plan.sizes), value.aval.dtype)


def _fused_gather(plan: Plan, pair: CollectiveMatmul, devices: int) -> FusedGather | str:
    others = [_operand(plan, run, 1 - side) for run, side in pair.dots]
    found = [x for x in others if x is not None]
    shape = list(local_shape(pair.value.shape, pair.step.result.spec, plan.sizes))
    if len(found) < len(others) or shape[pair.dim] % devices:
        return "an operand is a constant, or a block is not whole"
    shape[pair.dim] //= devices
    x = jax.ShapeDtypeStruct(tuple(shape), pair.value.aval.dtype)
    return FusedGather(x, found, [dot_of(run.op, side) for run, side in pair.dots], pair.dim, devices, pair.keep)


def _fused_scatter(plan: Plan, pair: CollectiveMatmul, devices: int) -> FusedScatter | str:
    operands = [(_operand(plan, run, 0), _operand(plan, run, 1)) for run, _ in pair.dots]
    found = [(a, b) for a, b in operands if a is not None and b is not None]
    if len(found) < len(operands):
        return "an operand is a constant"
    if len(operands) > 1 and _transposed(pair):
        return "the products of the sum are transposed before they are added"
    dots, dims = [dot_of(run.op, 0) for run, _ in pair.dots], [d for _, d in pair.dots]
    dtype: Any = pair.value.aval.dtype
    return FusedScatter(found, dots, dims, devices, dtype, dtype)


def _transposed(pair: CollectiveMatmul) -> bool:
    """Whether a transpose stands between the products and their sum."""
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
