"""Making a plan: one walk over the program, op by op, that writes down the steps of every device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from jax.extend.core import Literal

from ..compat.jax import body_consts, literal_array, scan_counts, user_stacklevel
from ..dims import did_you_mean, format_dims, near
from ..errors import JoinError, JoinWarning, MeshError, UnknownAxisError, UnknownDimError, UnsupportedError
from ..hardware.algorithms import AlgorithmName, choose_algorithm
from ..hardware.calibration import Calibrations, calibrated
from ..hardware.chips import Chip
from ..hardware.collective_ops import CollectiveOp, wire_bytes
from ..hardware.collective_time import seconds_of
from ..hardware.topology import chip_of, torus_of
from ..layout import AnyMesh, Layout, Rule, Spec, divisibility_error
from ..program.divisible_rewrite import rewrite_indivisible_slices
from ..program.ir import Frame, Op, Program, Value
from ..rules import having
from ..rules.owned import adds_nothing
from ..rules.partial import LINEAR, Law
from ..rules.rule import ADDED, REDUCTIONS, Kind
from ..rules.spmd import Send
from ..units import format_memory
from .assignment import AxisAssignment, Names, blocks_only, spec_of
from .collectives import Collective, reduces, scatters_of, volume_of
from .memo import Key, Memo, Planned, Recipe
from .partial import law_of, named, readers, summed_into
from .plan import Placement, Plan, ShardedArray
from .reshape import reshape_axes
from .resharding import Move, reshard, reshard_bytes
from .spec import itemsize, local_bytes, local_shape, names_of, parts_of, unsplit
from .steps import (
    Barrier,
    Body,
    Branch,
    Call,
    Constant,
    Loop,
    Reduce,
    Reshard,
    Run,
    Scatter,
    Shard,
    Step,
    with_deferred,
)

OPAQUE = having(lambda p: p.opaque)
IDENTITIES = having(lambda p: p.identity)
RECOMPUTED = having(
    lambda p: (p.elementwise or p.view or p.fusible) and not (p.identity or p.random or p.call or p.opaque)
) - {"copy", "device_put", "name", "optimization_barrier", "pvary", "reshard", "threefry2x32"}
"""Ops that are computed again on a larger shard rather than all-gathered, where their operands exist on it."""

LARGE_CONSTANT = 1e6
"""Bytes of an array that a function closes over, above which the plan advises to pass it."""

MISSPELT = 0.8
"""How like a dim of the program an optional rule's must be to be taken for it: `heads?` is no misspelt `head_dim`."""

LARGEST_GATHERED = 2
"""An array that is read at some indices is gathered only if it has at most so many times the elements that are read."""

Axes = list[tuple[str, ...]]
"""Of every factor of an op, the axes that split it."""


def planned(
    program: Program, layout: Layout, mesh: AnyMesh, *, strict: bool = False, init: bool = False,
    topology: str | None = None, donated: frozenset[int] = frozenset(), calibrations: Calibrations = (),
    most: float = math.inf,
) -> Plan:  # fmt: skip
    """Plan a program under a layout on a mesh, before any pass.

    Args:
      strict: two names for one dim are an error instead of a warning.
      init: the program makes the state, so it need not have the dims of the batch.
      topology: the slices that an abstract mesh lies on, ``"v5p:8x8x8"``: for times.
      donated: positions of the flat inputs whose memory the results may take.
      calibrations: what was measured of devices, among them those of the plan.
      most: seconds of a step that its collectives may take, one after the other.

    Raises:
      UnknownAxisError, UnknownDimError, DivisibilityError, JoinError, UnsupportedError.
      TooLong: they take longer.
      MeshError: calibrations of other devices alone.
    """
    program = program.traced or program
    layout.check_axes(mesh)
    _check_dims(program, layout, init)
    _check_joins(program, strict)
    axes = sorted((program.all_names() & set(mesh.shape)) - set(layout.dims))
    named = layout.with_first([Rule(a, (a,)) for a in axes])  # models that name axes in their metadata, as Flax allows
    notes = [f"`{a}` is called after an axis of the mesh and has no rule: it is taken as `{a}: {a}`" for a in axes]

    assignment = AxisAssignment(program, named, dict(mesh.shape))

    def parts(value: Value, dim: int) -> int:
        return math.prod(assignment.sizes[a] for a in assignment.value_spec(value)[dim])

    def plan(program: Program, most: float = math.inf) -> Plan:
        return _Planner(program, layout, named, mesh, topology, donated, list(notes), calibrations, most).plan()

    padded: list[str] = []
    rewritten = rewrite_indivisible_slices(program, parts, padded)
    first = plan(program, most if rewritten is None else math.inf)
    found = first if rewritten is None or _sent(second := plan(rewritten)) >= _sent(first) else second
    if most < math.inf and sum((c.seconds or 0.0) * (c.count or 1) for c in found.collectives) > most:
        raise TooLong
    return found if found is first else replace(found, notes=(*found.notes, *padded))


class TooLong(Exception):
    """What a plan sends takes longer than it may."""


def _sent(plan: Plan) -> float:
    return sum(c.total_bytes for c in plan.collectives)


def _check_dims(program: Program, layout: Layout, init: bool) -> None:
    names = program.all_names()
    shared = init or layout.from_pairs  # a Flax rule list serves many models; the plan lists what has no effect
    for rule in layout.rules:
        if rule.dim in names:
            continue
        meant = [d for d in near(rule.dim, names, cutoff=MISSPELT) if d not in layout.dims]
        if (shared or rule.optional or rule.dim in layout.optional) and not meant:
            continue
        raise UnknownDimError(
            f"rule `{rule}` names dim `{rule.dim}`, which no value of the program has",
            dim=rule.dim,
            rule=str(rule),
            fixes=[
                *did_you_mean(rule.dim, names, "dims"),
                *([f"or give `{meant[0]}` a rule of its own: `{meant[0]}: none`"] if shared else []),
                "or remove the rule, or name the dim (dims=…, Flax metadata, mp.named)",
                *(
                    []
                    if near(rule.dim, names)
                    else [f'or share the layout with it: mp.Layout(…, optional="{rule.dim}")']
                ),
            ],
        )


def _check_joins(program: Program, strict: bool) -> None:
    if not program.joins:
        return
    lines = [str(j) for j in program.joins]
    if strict:
        j = program.joins[0]
        raise JoinError(
            f"`{j.first}` and `{j.second}` are the same dim of the program",
            dim=j.first,
            source=j.source,
            dims="; ".join(lines),
            fixes=[
                f'give both the same name, or make clear where they part: mp.rename(x, {j.first}="{j.second}")',
                "or plan without strict=True",
            ],
        )
    text = "names that turned out to be one dim of the program: " + "; ".join(lines)
    warnings.warn(text, JoinWarning, stacklevel=user_stacklevel())


@dataclass(eq=False, slots=True)
class _Building:
    """A body while it is planned.

    Attributes:
      groups: for every op, in order, its steps and those that follow from it; a step with bodies is made in the end.
      floating: steps that stand where they are first read.
      made: (value, spec) → its copy, or its shard where it is made from no data.
    """

    frame: Frame
    groups: list[list[Step | Callable[[], Step]]] = field(default_factory=list)
    floating: list[Step] = field(default_factory=list)
    made: dict[tuple[Value, Spec], Shard] = field(default_factory=dict)

    def body(self, inputs: Sequence[Shard], outputs: Sequence[Shard | None]) -> Body:
        fixed = [s if isinstance(s, Step) else s() for group in self.groups for s in group]
        for group in self.groups:
            group.clear()  # what made the steps with bodies refers to the walk, and this to that
        steps = with_deferred(fixed, self.floating, outputs)
        return Body(self.frame, tuple(inputs), steps, tuple(outputs), self.frame.trip_count)


@dataclass(slots=True)
class _LoopConst:
    """What a loop only reads: the loop, the value outside, how often the loop runs, and the body that the loop stands in."""

    loop: Op
    outer: Value
    count: int | None
    around: _Building


@dataclass(slots=True)
class _Accumulation:
    """A carry that a loop only adds to: ``carry + addend``, and nothing else reads either.

    Attributes:
      carry: the carry as the body sees it.
      addend: what is added.
    """

    carry: Value
    addend: Value


class _Planner:
    """The walk.

    Attributes:
      at: the shard in which every value lies: unreduced as it was made, or where it rests. Of a value made from no data only the
        spec counts.
      free: values made from no data.
      reduced_from: (op, names of its factors) whose split left a value unreduced.
      groups: the group of the step that made a shard.
      count: how often what is planned now runs; None: not known.
      here: the body that is planned now.
      depth: of the loops around.
      called: what collectives call a value and its dims.
      kept: what earlier plans on such a mesh came to; None: this is the first plan, or a layout that is resolved by cost.
      record: what planning the present op does, where that is to be kept; sized: it follows from the sizes of the mesh.
      accumulated: the values that are read once, by linear ops alone, and end in a carry that a loop only adds to: whether an inner
        loop stacks them on the way.
      named: the results of conversions to a dtype in which the user asks a sum to be reduced.
      refused: ops with values that the layout does not divide.
      apart: ops whose steps follow from more than their own neighbourhood.
      left: seconds that collectives may take yet.
    """

    def __init__(
        self, program: Program, asked: Layout, layout: Layout, mesh: AnyMesh, topology: str | None,
        donated: frozenset[int], notes: list[str], calibrations: Calibrations = (), most: float = math.inf,
    ):  # fmt: skip
        self.program, self.asked, self.layout, self.mesh, self.topology = program, asked, layout, mesh, topology
        self.donated, self.notes, self.calibrations = donated, notes, calibrations
        self.left = most
        self.sizes = dict(mesh.shape)
        memo = program.cached(Memo)
        of_mesh = memo.on(self.sizes)
        self.torus = torus_of(mesh) if topology is None else of_mesh.torus(self.sizes, topology)
        self.chip: Chip | None = calibrated(chip_of(topology or mesh), mesh, calibrations)
        self.assignment = AxisAssignment(program, layout, self.sizes)
        self.at: dict[Value, Shard] = {}
        self.free: set[Value] = set()
        self.placements: dict[Value, Placement] = {}
        self.reduced_from: dict[Value, tuple[Op, list[Names]]] = {}
        self.groups: dict[Shard, list[Step | Callable[[], Step]]] = {}
        self.group: list[Step | Callable[[], Step]] = []
        self.factor_axes: dict[Op, Axes] = {}
        self.consts: dict[Value, _LoopConst] = {}
        self.hoisted: dict[Op, dict[Shard, None]] = {}
        self.accumulating: dict[Value, _Accumulation] = {}
        self.accumulated: dict[Value, bool] = {}
        self.count: int | None = 1
        self.depth = 0
        self.here = _Building(program.root)
        self.weights = program.cached(_weights)
        self.readers = program.cached(readers)
        self.named = program.cached(named)
        self.called = memo.called
        memo.plans += 1
        self.kept = (
            of_mesh if memo.plans > 1 and layout.resolve == "order" and not self.assignment.shard_map_axes else None
        )
        self.keys: Mapping[Op, Key] = {}
        self.answers: Sequence[Any] = ()
        self.refused: frozenset[Op] = frozenset()
        if self.kept is not None:
            numbers = of_mesh.axes.numbers
            self.keys = memo.keys(self.assignment.queries())
            self.answers = [numbers.setdefault(answer, len(numbers)) for answer in self.assignment.assignments()]
            self.refused = self.assignment.indivisible_ops()
        self.record: Planned | None = None
        self.sized = False
        self.apart: set[Op] = set()
        self._algorithms = {} if topology is None else of_mesh.algorithms.setdefault((topology, self.chip), {})

    # -- the walk

    def plan(self) -> Plan:
        program = self.program
        inputs = [self.made(self.shard(v, unsplit(len(v.shape)))) for v in program.constants]
        self.notes += filter(None, map(self.advice, program.constants))
        held, kept = [], []
        for value in program.inputs:
            spec = self.rest(value)
            self.check_divides(value)
            inputs.append(self.made(self.shard(value, spec)))
            held.append(self.held(value, spec))
        here = self.here
        self.ops(program.root)
        outputs = []
        for var, value in zip(program.root.jaxpr.outvars, program.outputs, strict=True):
            if isinstance(var, Literal):
                self.literal(value, var)
            self.reduce(value)
            spec = self.rest(value)
            self.check_divides(value)
            if value in self.free:
                shard = self.make(value, spec)
            else:
                self.group = []
                here.groups.append(self.group)
                shard = self.moved(value, spec, None, f"the result {value.path} is kept so")
            outputs.append(shard)
            kept.append(self.held(value, spec))
        whole: dict[str, list[str]] = {}
        for value in program.inputs:
            for rule, i in self.assignment.unused_optional_rules(value):
                note = (
                    f"`{rule}` does not divide `{program.dims(value)[i]}` of {value.shape[i]}, which is left whole in "
                )
                whole.setdefault(note, []).append(str(value.path))
        self.notes += [
            f"{note}{paths[0]}" + (f" and {len(paths) - 1} more" if paths[1:] else "") for note, paths in whole.items()
        ]
        for value, i, rule in self.assignment.indivisible.values():
            dims = format_dims(program.dims(value))
            note = f"`{self.layout.rules[rule]}` does not divide dim {i} of {list(value.shape)} ({dims}), which is left whole"
            if note not in self.notes:
                self.notes.append(note)
        self.notes += [n for n in self.assignment.notes if n not in self.notes]
        return Plan(
            program, self.layout, self.asked, self.mesh, self.topology, self.torus, self.chip, self.donated,
            here.body(inputs, outputs), self.placements, tuple(held), tuple(kept), tuple(self.notes),
            calibrations=self.calibrations,
        )  # fmt: skip

    def held(self, value: Value, spec: Spec) -> ShardedArray:
        found = None if self.kept is None else self.kept.held.get((value, spec))
        if found is None:
            found = ShardedArray.of(self.program, value, spec, self.sizes, value.kind)
            if self.kept is not None:
                self.kept.held[value, spec] = found
        return found

    def advice(self, constant: Value) -> str | None:
        """What to do about an array that the function closes over, where it is large."""
        size = local_bytes(constant.shape, itemsize(constant.aval), unsplit(len(constant.shape)), self.sizes)
        if size <= LARGE_CONSTANT:
            return None
        reader = next((op for op in self.program.root.walk() if constant in op.ins), None)
        where = f", read at {reader.source}," if reader is not None and reader.source else ""
        return (
            f"{constant.aval.dtype}{list(constant.shape)} ({format_memory(size)}){where} is closed over: it is compiled into "
            f"the program, "
            "and every device holds all of it; pass it as an argument, which a rule can split"
        )

    def check_divides(self, value: Value) -> None:
        refused = self.assignment.indivisible.get(value)
        if refused is None or value.annotation is None or value.annotation[refused[1]] is None:
            return
        _, i, rule = refused
        raise divisibility_error(
            path=value.path or "an input", shape=value.shape, dims=format_dims(value.annotation),
            dim=str(value.annotation[i]), size=value.shape[i], rule=self.layout.rules[rule], sizes=self.sizes,
            dtype=value.aval.dtype,
        )  # fmt: skip

    def rest(self, value: Value) -> Spec:
        if self.record is not None:
            self.record.rests += (value,)
        return self.assignment.value_spec(value)

    def shard(
        self, value: Value, spec: Spec, partial: tuple[str, ...] = (), kind: Kind = "sum", is_constant: bool = False,
        copy: object = None,
    ) -> Shard:  # fmt: skip
        """A shard, the same one in every plan that keeps what it came to.

        Args:
          copy: tells those of one value and spec apart: the body that a copy is made in; None: the one that its op makes.
        """
        if self.kept is None:
            return Shard(value, spec, partial, kind, is_constant)
        key = (value, spec, partial, kind, is_constant, copy)
        shards = self.kept.axes.shards
        found = shards.get(key)
        if found is None:
            found = shards[key] = Shard(value, spec, partial, kind, is_constant)
        return found

    def made(self, shard: Shard) -> Shard:
        """A value lies in a shard now."""
        self.at[shard.value] = shard
        if shard.partial:
            self.groups[shard] = self.group
        found = self.placements.get(shard.value)
        if found is None or found.made.partial or found.made.spec != shard.spec:
            self.placements[shard.value] = Placement(shard if found is None else found.made, shard)
        return shard

    @contextmanager
    def inside(self, frame: Frame, around: Op | None = None) -> Iterator[_Building]:
        """What is planned in this context belongs to the body of a frame."""
        outer, count = self.here, self.count
        self.here = _Building(frame)
        self.count = None if frame.trip_count is None or count is None else count * frame.trip_count
        loop = around is not None and around.name == "scan"
        self.depth += loop
        try:
            yield self.here
        finally:
            self.depth -= loop
            self.here, self.count = outer, count

    def ops(self, frame: Frame, consts: Sequence[Any] = ()) -> None:
        """Plan the ops of a frame, in order."""
        for var, const in zip(frame.jaxpr.constvars, consts, strict=False):
            self.constant(frame.env[var], unsplit(len(var.aval.shape)), const)
        groups = self.here.groups
        for op in frame.ops:
            self.group = group = []
            groups.append(group)
            if op.frames:
                step = _CONTROL.get(op.name, _Planner.call)(self, op, group)
                group.insert(0, step)
            elif self.kept is None:
                self.op(op)
            else:
                self.op_as_before(op)

    def op(self, op: Op) -> None:
        """Plan an op without bodies."""
        if op.name == "optimization_barrier":
            self.barrier(op)
        elif op.name in IDENTITIES:
            self.identity(op)
        elif op.rule is None:
            self.elementwise(op)
        else:
            self.by_rule(op)

    def op_as_before(self, op: Op) -> None:
        """Plan an op as before, where it finds the same answers of the assignment and the same shards; else keep what is done."""
        if op in self.apart:
            self.op(op)
            return
        kept = self.kept
        assert kept is not None
        answers, operands = self.keys[op]
        ops, sized, numbers = kept.axes.ops, kept.ops, answers(self.answers)
        key = (op, numbers, operands(self.at))
        found = ops.get(key) or sized.get(key)
        if found is not None and found.reduced:
            for value in found.reduced:
                self.reduce(value)
            key = (op, numbers, operands(self.at))
            found = ops.get(key) or sized.get(key)
        if found is not None and self.repeat(op, found):
            return
        record, self.sized = Planned(), False
        self.record = record
        self.op(op)
        if self.record is not None:
            (sized if self.sized else ops)[key] = Planned(reduced=record.reduced) if record.reduced else record
            self.record = None

    def repeat(self, op: Op, done: Planned) -> bool:
        """Do for an op what was done before; False: its operands are other copies than they were."""
        if done.axes is not None:
            self.factor_axes[op] = done.axes
        for value, spec, names, shard in done.copies:
            if self.operand(op, value, spec, names) is not shard:
                return False
        if op in self.refused:
            for value in done.rests:  # the notes of what is refused have the order of the walk
                self.rest(value)
        if done.run is not None:
            self.group.append(done.run)
        at, placements = self.at, self.placements
        for placed in done.results:
            shard = placed.made
            at[shard.value], placements[shard.value] = shard, placed
            if shard.partial:
                self.groups[shard] = self.group
            elif done.free:
                self.free.add(shard.value)
        for out, value in done.follows:
            self.follows(out, value)
        for out in done.partial:
            self.reduced_from[out] = (op, done.names or [])
        for out in done.finish:
            self.finish(op, out)
        return True

    def is_free(self, op: Op) -> bool:
        """Whether an op follows from no data, so that each device makes the part of its results that it needs."""
        for v in op.ins:
            if v is not None and v not in self.free:
                return False
        made_by_spec = op.rule is not None and op.rule.given is not None
        return bool(op.outs) and op.name != "random_bits" and not op.eqn.effects and not made_by_spec

    def made_from_no_data(self, value: Value, spec: Spec) -> None:
        self.free.add(value)
        shard = self.made(self.shard(value, spec, is_constant=True, copy="where needed"))
        if self.record is not None:
            self.record.free = True
            self.record.results += (Placement(shard, shard),)

    # -- ops

    def run(
        self, op: Op, operands: Sequence[Shard | None], results: Sequence[Shard], axes: Sequence[tuple[str, ...]] | None = None,
        collectives: Sequence[Collective] = (),
    ) -> None:  # fmt: skip
        step = Run(op, tuple(operands), tuple(results), None if axes is None else tuple(axes), tuple(collectives))
        self.group.append(step)
        for shard in results:
            self.made(shard)
        if collectives:
            self.record = None
        if self.record is not None:
            self.record.run = step
            self.record.results += tuple(Placement(s, s) for s in results)

    def lies(self, value: Value | None) -> Shard | None:
        """A value where it lies; None for a literal."""
        if value is None:
            return None
        if value not in self.free:
            return self.at[value]
        return self.operand(value.op, value, self.at[value].spec)

    def barrier(self, op: Op) -> None:
        if self.is_free(op):
            for value, out in zip(op.ins, op.outs, strict=True):
                self.made_from_no_data(out, unsplit(len(out.shape)) if value is None else self.at[value].spec)
            return
        for v in op.ins:
            self.reduce_if_shared(v)
        operands = [self.lies(v) for v in op.ins]
        results = []
        for value, shard, out in zip(op.ins, operands, op.outs, strict=True):
            if shard is None or value is None:
                results.append(self.shard(out, unsplit(len(out.shape))))
            else:
                results.append(self.shard(out, shard.spec, shard.partial, shard.kind))
                self.follows(out, value)
        self.run(op, operands, results)

    def identity(self, op: Op) -> None:
        """The value lies where its own names put it."""
        (value,), (out,) = op.ins, op.outs
        if self.is_free(op):
            self.made_from_no_data(out, unsplit(len(out.shape)) if value is None else self.rest(out))
            return
        assert value is not None
        self.reduce_if_shared(value)
        if self.at[value].partial:
            self.pass_on(op, value, out, self.at[value].spec)
            return
        self.run(op, [self.at[value]], [self.shard(out, self.at[value].spec)])
        self.finish(op, out)

    def elementwise(self, op: Op) -> None:
        out = op.outs[0]
        for v in op.ins:
            if v is not None and v in self.at:
                self.reduce_if_shared(v)
        acc = next((self.accumulating[v] for v in op.ins if v is not None and v in self.accumulating), None)
        if acc is not None and self.accumulate(op, acc):
            return
        if self.stays_partial(op, out):
            return
        for v in op.ins:
            if v is not None:
                self.reduce(v)
        spec = self.assignment.elementwise_spec(op, out)
        if self.is_free(op):
            for each in op.outs:
                self.made_from_no_data(each, self.rest(each))
            return
        operands = [None if v is None else self.operand(op, v, stretched(spec, v.shape, out.shape)) for v in op.ins]
        self.run(op, operands, [self.shard(each, spec) for each in op.outs])
        for each in op.outs:
            self.finish(op, each)

    def stays_partial(self, op: Op, out: Value) -> bool:
        """Apply an elementwise op to partial operands, if a law of its primitive allows that; the result is partial, too."""
        positions = self.partial_operands(op)
        if not positions or len(op.outs) > 1 or any(op.eqn.invars[i].aval.shape != out.shape for i in positions):
            return False
        source = op.ins[positions[0]]
        assert source is not None
        first = self.at[source]
        law = self.law(op, positions)
        if law is None:
            return False
        others = [v for i, v in enumerate(op.ins) if v is not None and i not in positions and v not in self.free]
        if any(self.at[v].spec != stretched(first.spec, v.shape, out.shape) for v in others):
            return False  # no other operand is moved for this
        operands = [
            None if v is None else self.operand(op, v, stretched(first.spec, v.shape, out.shape)) for v in op.ins
        ]
        self.run(op, operands, [self.shard(out, first.spec, first.partial, kind_by(law, first.kind))])
        self.follows(out, source)
        return True

    def partial_operands(self, op: Op) -> list[int]:
        return [i for i, v in enumerate(op.ins) if v is not None and self.at[v].partial]

    def law(self, op: Op, positions: Sequence[int]) -> Law | None:
        """The law by which an op may be applied to its partial operands, at these positions; None: they are reduced first."""
        shards = [self.at[v] for i in positions if (v := op.ins[i]) is not None]
        first = shards[0]
        kinds = {s.kind for s in shards}
        if any((s.partial, s.spec) != (first.partial, first.spec) for s in shards) or (
            len(kinds) > 1 and kinds - ADDED
        ):
            return None

        def of(kind: Kind) -> Law | None:
            return law_of(self.program, op, kind, positions, lambda law: self.is_used(law, op, first))

        found = None if len(kinds) > 1 else of(first.kind)
        if found is None and "indexed" in kinds and all(adds_nothing(s.value.aval.dtype) for s in shards):
            law = of("sum")  # where one device has an element, the contributions also add up to it
            operand, result = first.value.shape, op.outs[0].shape
            if (
                law is not None
                and len(positions) == 1
                and law.when == "always"
                and math.prod(result) >= math.prod(operand)
            ):
                return None  # nothing less is sent later, and a device without an element, which has -0.0, may make +0.0 of it
            return law
        return found

    def is_used(self, law: Law, op: Op, shard: Shard) -> bool:
        """Whether a law of an op that has its partial operands in a shard is to be used (:data:`meshpar.rules.partial.When`).

        ``smaller`` is decided where the axes of the op are known.
        """
        (out,) = op.outs
        if law.when == "widening":
            if out not in self.accumulated:
                return False
            scatter, _ = scatters_of(shard.spec, self.rest(out), shard.partial, shard.kind)
            return not (self.accumulated[out] and scatter)  # else it is reduced in every iteration
        return law.when != "named" or out in self.named

    def pass_on(
        self, op: Op, value: Value, out: Value, spec: Spec, axes: Axes | None = None, law: Law | None = None
    ) -> None:
        """Apply an op to a partial operand by a law (None: it is an identity, or adds to a carry); its result is partial, too."""
        shard = self.at[value]
        self.run(
            op, [self.lies(v) for v in op.ins], [self.shard(out, spec, shard.partial, kind_by(law, shard.kind))], axes
        )
        self.follows(out, value)

    def reduce_if_shared(self, value: Value | None) -> None:
        """Reduce an unreduced value that several read before the first of them: what they make of it is not reduced again each."""
        if value is not None and self.at[value].partial and self.readers.get(value, 0) > 1:
            self.reduce(value)

    def follows(self, out: Value, value: Value) -> None:
        """A value is unreduced because another one is."""
        if value in self.reduced_from:
            self.reduced_from[out] = self.reduced_from[value]
        if self.record is not None:
            self.record.follows += ((out, value),)

    def by_rule(self, op: Op) -> None:
        rule = op.rule
        assert rule is not None
        if op.name in OPAQUE:
            self.refuse_opaque(op)
        if rule.given is not None:
            self.refuse_other_axes(op)
        self.sized |= op.name == "reshape" or op.name in OPAQUE or rule.given is not None
        first = op.ins[0] if op.ins else None
        for v in op.ins:
            self.reduce_if_shared(v)
        names = self.assignment.factor_names(op)
        positions, passed = self.partial_operands(op), None
        law = self.law(op, positions) if positions and len(op.outs) == 1 else None
        if law is not None:
            if law.when == "smaller":
                passed = self.smaller_partial(op, positions[0], self.claimed(op, names))
            elif self.carry_partial(op, positions[0], law):
                return
        for v in op.ins:
            if v is not None and v is not passed:
                self.reduce(v)
        axes = list(rule.given) if rule.given is not None else self.claimed(op, names)
        if op.name == "reshape" and first is not None and not (first in self.free or first in self.consts):
            axes = list(reshape_axes(rule, axes, self.at[first].spec, self.rest(op.outs[0]), self.sizes))
        if rule.given is None:
            axes = self.spread(op, self.exchanged_or_whole(op, self.indexed(op, axes)))
        partial, kind = self.partial_axes(op, axes)
        if passed is not None:
            partial = [self.both_partial(partial[0], self.at[passed].partial)]
            kind = kind_by(law, self.at[passed].kind)
        self.factor_axes[op] = axes
        if self.record is not None:
            self.record.axes, self.record.names = axes, names
        if self.is_free(op) and not any(partial):
            for out in op.outs:
                self.made_from_no_data(out, self.rest(out))
            return
        needs = [None if v is None else spec_of(d, axes) if d else unsplit(len(v.shape))
                 for v, d in zip(op.ins, rule.ins, strict=True)]  # fmt: skip
        operands = [
            None if v is None or need is None else self.operand(op, v, need, names)
            for v, need in zip(op.ins, needs, strict=True)
        ]
        results = [
            self.shard(out, spec_of(d, axes), over, kind if over else "sum")
            for out, d, over in zip(op.outs, rule.outs, partial, strict=True)
        ]
        self.run(op, operands, results, axes, self.sends(op, needs, axes))
        for out, over in zip(op.outs, partial, strict=True):
            if passed is not None:
                self.follows(out, passed)
            elif over:
                self.reduced_from[out] = (op, names)
                if self.record is not None:
                    self.record.partial += (out,)
            else:
                self.finish(op, out)

    def claimed(self, op: Op, names: list[Names]) -> Axes:
        """The axes that the layout assigns to the factors of an op."""
        scopes = self.assignment.op_scopes(op, op.outs)
        costed = self.layout.resolve == "cost"
        return self.assignment.factor_axes(op, names, scopes, (lambda a: self.cost(op, a)) if costed else None)

    def exchanged_or_whole(self, op: Op, axes: Axes) -> Axes:
        """Work on whole dims where an exchange of blocks sends more: where not all that an op cuts or joins is split alike."""
        rule = op.rule
        assert rule is not None
        moved = {f for pair in rule.sharded_like for f in pair if axes[f]}
        if not moved:
            return axes
        self.sized = True
        ends = [(self.at[v].spec, d) for v, d in zip(op.ins, rule.ins, strict=True) if v is not None and d]
        ends += [(self.rest(v), d) for v, d in zip(op.outs, rule.outs, strict=True)]
        if all(e == axes[f] for spec, dims in ends for e, fs in zip(spec, dims, strict=True) for f in fs if f in moved):
            return axes
        whole = [() if f in moved else got for f, got in enumerate(axes)]
        return whole if self.cost(op, whole) <= self.cost(op, axes) else axes

    def spread(self, op: Op, axes: Axes) -> Axes:
        """Split another dim over the axes of a dim that the op needs replicated or exchanges, where this sends less.

        A sort along a dim split over n devices all-gathers V·(n-1)/n bytes. If it splits another dim instead, an all-to-all of the
        operand and one of the result send 2·V/n·(n-1)/n. Not for kernels, whose rules say along which dims they communicate.
        """
        rule = op.rule
        assert rule is not None
        if op.name == "kernel":
            return axes
        exchanged = [f for f, kind in enumerate(rule.kinds) if kind == "permutation"]
        used = {a for f, got in enumerate(axes) if f not in exchanged for a in got}
        lost: dict[tuple[str, ...], None] = {}
        for v, dims in zip(op.ins, rule.ins, strict=True):
            if v is None or not dims or v in self.free or v in self.consts:
                continue
            for entry, factors in zip(self.at[v].spec, dims, strict=True):
                if any(rule.kinds[f] in ("need_replication", "permutation") for f in factors):
                    lost[tuple(a for a in entry if a not in used and self.sizes[a] > 1)] = None
        lost.pop((), None)
        results = [{f for factors in dims for f in factors[:1]} for dims in rule.outs]
        everywhere = set.intersection(*results) if results else set()  # a callback has no results
        others = [f for f in sorted(everywhere) if rule.kinds[f] == "pass_through" and rule.sizes[f]]
        if not lost or not others:
            return axes
        self.sized = True
        best = self.cost(op, axes)
        for more in lost:
            if any(a in got for f, got in enumerate(axes) if f not in exchanged for a in more):
                continue  # of an earlier choice
            without = [tuple(a for a in got if a not in more) for got in axes]
            for f in others:
                choice = [(*got, *more) if g == f else got for g, got in enumerate(without)]
                if rule.sizes[f] % parts_of(choice[f], self.sizes) or blocks_only(rule, choice, self.sizes) != choice:
                    continue
                if best and (cost := self.cost(op, choice)) < best:
                    best, axes = cost, choice
        return axes

    def indexed(self, op: Op, axes: Axes) -> Axes:
        """Choose what an op that reads or writes an array at some indices does with the axes that shard the indexed dims.

        The array stays as it is sharded, and these axes are taken from the op's other factors (those of the indices and
        updates), unless the assignment sends fewer bytes. It is gathered for a read only if it has at most
        ``LARGEST_GATHERED`` times the elements that are read, that sends fewer bytes, and the op is a ``dynamic_slice`` or in a
        loop that only reads the array. A ``dynamic_slice`` in a loop that only reads the array is
        treated as one that reads a window per iteration, of an array that may be gathered before the loop.
        """
        rule, value = op.rule, op.ins[0] if op.ins else None
        if rule is None or value is None or "indexed" not in rule.kinds or value in self.free:
            return axes
        have = self.at[value].spec
        pairs = zip(rule.ins[0], have, strict=True)
        held = {f: entry for (f,), entry in pairs if rule.kinds[f] == "indexed"}
        taken = {a for entry in held.values() for a in entry}
        if not taken:
            return axes
        self.sized = True
        served = blocks_only(
            rule, [held.get(f, tuple(a for a in got if a not in taken)) for f, got in enumerate(axes)], self.sizes
        )
        choices = [served, axes] if served != axes else [axes]
        trip_count = 1
        outer, n, m = value, math.prod(value.shape), math.prod(op.outs[0].shape)
        while outer in self.consts:
            trip_count *= self.consts[outer].loop.eqn.params["length"]
            outer = self.consts[outer].outer
        windows = trip_count if op.name == "dynamic_slice" else 1
        cost = {id(c): self.cost(op, c) * trip_count for c in choices}
        read = [f for f in held if (f,) not in rule.outs[0]]
        may_gather = op.name == "dynamic_slice" or outer is not value
        if may_gather and any(axes[f] for f in read) and n <= LARGEST_GATHERED * m * windows:
            whole = [() if f in read else got for f, got in enumerate(axes)]
            moved = self.bytes_between(value, have, spec_of(rule.ins[0], whole))
            choices.append(whole)
            cost[id(whole)] = (self.cost(op, whole) - moved) * trip_count + moved
        return min(choices, key=lambda c: cost[id(c)])

    def refuse_opaque(self, op: Op) -> None:
        """A kernel without a rule may be called with whole operands only: nobody knows what it does to a shard."""
        for value in op.ins:
            if value is None:
                continue
            for i, axes in enumerate(self.at[value].spec):
                if not any(self.sizes[a] > 1 for a in axes):
                    continue
                dim = self.program.dim_name(value, i) or f"dim {i}"
                names = [x for ns, _ in self.program.parts(value, i) for x in ns]
                raise UnsupportedError(
                    f"{op.name} has no factor rule, and `{dim}` of its operand is split over {names_of(axes)}",
                    shape=value.shape,
                    dims=format_dims(self.program.dims(value)),
                    dim=dim,
                    axis="+".join(axes),
                    rule=self.assignment.rule_text(names, axes[0]),
                    source=op.source,
                    fixes=[
                        "declare which dims may be split, on the function around it: "
                        '@mp.kernel_rule("tokens embed, embed mlp -> tokens mlp")',
                        f"or keep `{dim}` whole here, under another name: mp.rename(x, {dim}=…)",
                    ],
                )

    def refuse_other_axes(self, op: Op) -> None:
        """A ``shard_map`` of the user's own runs over axes of the plan's mesh."""
        theirs = op.eqn.params["mesh"]
        for axis in (a for a in theirs.axis_names if a in op.eqn.params["newly_manual_axes"]):
            if axis not in self.sizes:
                raise UnknownAxisError(
                    f"this shard_map runs over axis `{axis}`, which the mesh does not have",
                    axis=axis,
                    source=op.source,
                    fixes=[
                        *did_you_mean(axis, self.sizes, "axes"),
                        f"plan on a mesh with `{axis}={theirs.shape[axis]}`",
                    ],
                )
            if theirs.shape[axis] != self.sizes[axis]:
                raise MeshError(
                    f"this shard_map runs over `{axis}={theirs.shape[axis]}`, and the mesh has `{axis}={self.sizes[axis]}`",
                    axis=axis,
                    source=op.source,
                    fixes=["make both from one mesh"],
                )
        if [a for a in theirs.axis_names if a in self.sizes] != [a for a in self.sizes if a in theirs.axis_names]:
            raise MeshError(
                f"this shard_map has the axes in the order {', '.join(theirs.axis_names)}, and the mesh {', '.join(self.sizes)}: "
                "devices would be numbered otherwise",
                source=op.source,
                fixes=["make both from one mesh"],
            )

    def partial_axes(self, op: Op, axes: Axes) -> tuple[list[tuple[str, ...]], Kind]:
        """(the axes over which every result is unreduced, how its terms combine)."""
        rule = op.rule
        assert rule is not None
        order = list(self.sizes)
        kind: Kind = "sum"
        partial = []
        for k in range(len(op.outs)):
            factors = [f for f in rule.partial_factors(k) if axes[f]]
            for f in factors:
                if rule.kinds[f] not in ("pass_through", "permutation"):
                    kind = rule.kinds[f]
            kept = {a for dim in rule.outs[k] for f in dim for a in axes[f]}
            partial.append(tuple(sorted({a for f in factors for a in axes[f]} - kept, key=order.index)))
        return partial, kind

    def smaller_partial(self, op: Op, i: int, axes: Axes) -> Value | None:
        """Operand i of an op, which is partial, if fewer bytes are sent where the result is reduced in its place.

        Args:
          axes: of the factors of the op, none of which may be one over which the operand is partial.
        """
        self.sized = True
        rule, value, (out,) = op.rule, op.ins[i], op.outs
        assert rule is not None
        assert value is not None
        shard = self.at[value]
        need, made = spec_of(rule.ins[i], axes), spec_of(rule.outs[0], axes)
        if need != shard.spec or any(a in shard.partial for got in axes for a in got):
            return None
        (own,), kind = self.partial_axes(op, axes)
        if own and kind != kind_by(LINEAR, shard.kind):
            return None
        before = self.reduction_bytes(value, need, shard.partial, kind)
        before += self.bytes_between(value, self.rest(value), need)
        before += self.reduction_bytes(out, made, own, kind)
        return value if self.reduction_bytes(out, made, self.both_partial(own, shard.partial), kind) < before else None

    def both_partial(self, a: Sequence[str], b: Sequence[str]) -> tuple[str, ...]:
        """The axes of both, in the order of the mesh."""
        return tuple(x for x in self.sizes if x in a or x in b)

    def reduction_bytes(self, value: Value, spec: Spec, axes: tuple[str, ...], kind: Kind) -> float:
        """Bytes that a device sends to reduce a partial value to its stored spec."""
        scatter, reduced = scatters_of(spec, self.rest(value), axes, kind)
        volume, sent = local_bytes(value.shape, itemsize(value.aval), spec, self.sizes), 0.0
        for over in scatter.values():
            sent += wire_bytes("reduce-scatter", volume, parts_of(over, self.sizes))
            volume /= parts_of(over, self.sizes)
        return sent + wire_bytes("all-reduce", volume, parts_of(reduced, self.sizes))

    def carry_partial(self, op: Op, i: int, law: Law) -> bool:
        """Apply an op with a factor rule to a partial operand i where that is, if the op splits no factor otherwise."""
        self.sized = True
        rule, value = op.rule, op.ins[i]
        assert rule is not None
        assert value is not None
        axes: Axes = [()] * len(rule.sizes)
        for entry, factors in zip(self.at[value].spec, rule.ins[i], strict=True):
            if entry and factors:
                f = factors[0]
                if rule.kinds[f] != "pass_through" or rule.sizes[f] % parts_of(entry, self.sizes):
                    return False
                axes[f] = entry
        if blocks_only(rule, axes, self.sizes) != axes:
            return False
        self.pass_on(op, value, op.outs[0], spec_of(rule.outs[0], axes), axes, law)
        return True

    def cost(self, op: Op, axes: Axes) -> float:
        """Bytes that a choice of assignment moves: operands, what the op sends itself, unreduced sums, results."""
        rule = op.rule
        assert rule is not None
        axes = blocks_only(rule, axes, self.sizes)
        needs = [None if v is None or not d else spec_of(d, axes) for v, d in zip(op.ins, rule.ins, strict=True)]
        total = sum(self.send_bytes(send, got) * (send.times or 1) for send, got in self.sent_by(op, needs, axes))
        for v, d in zip(op.ins, rule.ins, strict=True):
            if v is not None and d:
                total += self.bytes_between(v, self.at[v].spec, spec_of(d, axes))
        partials, kind = self.partial_axes(op, axes)
        for v, d, partial in zip(op.outs, rule.outs, partials, strict=True):
            spec, rest = spec_of(d, axes), self.rest(v)
            if partial:
                volume = local_bytes(v.shape, itemsize(v.aval), spec, self.sizes)
                scattered = kind in ADDED and all(any(a in entry for entry in rest) for a in partial)
                total += wire_bytes(
                    "reduce-scatter" if scattered else "all-reduce", volume, parts_of(partial, self.sizes)
                )
            else:
                total += self.bytes_between(v, spec, rest)
        return total

    def bytes_between(self, value: Value, have: Spec, need: Spec) -> float:
        return reshard_bytes(have, need, value.shape, itemsize(value.aval), self.sizes)

    # -- what the local forms of ops send themselves

    def sends(self, op: Op, needs: Sequence[Spec | None], axes: Axes) -> list[Collective]:
        """The collectives of an op's local form; what is made from no data is made whole instead."""
        own = op.rule is not None and op.rule.given is not None
        if not own and all(v is None or v in self.free for v in op.ins):
            return []
        name = op.eqn.params["kernel"].name if op.name == "kernel" else op.name

        def why(axes: tuple[str, ...]) -> str:
            if own:
                return f"this {name} sends over {names_of(axes)} itself"
            return f"{names_of(axes)} splits a dim that {name} works along"

        return [
            Collective(
                cast(CollectiveOp, send.op), got, f"{name}: {send.why}", " × ".join(map(str, send.shape)), send.shape,
                str(np.dtype(send.dtype)), self.send_bytes(send, got),
                None if self.count is None or send.times is None else self.count * send.times,
                f"{why(got)}: {send.why}", op,
                self.seconds(cast(CollectiveOp, send.op), got, self.send_bytes(send, got), "native"),
            )
            for send, got in self.sent_by(op, needs, axes)
        ]  # fmt: skip

    def sent_by(self, op: Op, needs: Sequence[Spec | None], axes: Axes) -> list[tuple[Send, tuple[str, ...]]]:
        rule = op.rule
        assert rule is not None
        own = rule.given is not None or any(
            got and kind == "permutation" for got, kind in zip(axes, rule.kinds, strict=True)
        )
        if not own:
            return []
        self.sized = True
        avals = [v.aval for v in op.eqn.invars]
        shapes = [local_shape(a.shape, need, self.sizes) for a, need in zip(avals, needs, strict=True)]
        if rule.sends_over is not None:
            found = rule.sends_over(shapes, axes, self.sizes)
        elif rule.sends is not None:
            parts = [parts_of(got, self.sizes) for got in axes]
            found = [(send, tuple(a for f in send.factors for a in axes[f])) for send in rule.sends(shapes, parts)]
        else:
            return []
        live = [(send, tuple(a for a in got if self.sizes[a] > 1)) for send, got in found]
        return [(send, got) for send, got in live if got]

    def send_bytes(self, send: Send, axes: Sequence[str]) -> float:
        group = parts_of(axes, self.sizes)
        volume = math.prod(send.shape) * itemsize(send) * (group if send.op == "all-gather" else 1)
        return wire_bytes(cast(CollectiveOp, send.op), volume, group)

    # -- collectives

    def collective(
        self, kind: CollectiveOp, axes: tuple[str, ...], value: Value, op: Op | None, sent: float, cause: str
    ) -> list[Collective]:
        """The record of a collective that moves a value; none where nothing is to be sent."""
        if 0 in value.shape or not axes:
            return []
        key = (kind, axes, sent)
        if key not in self._algorithms:
            volume = volume_of(kind, sent, parts_of(axes, self.sizes))
            algorithm, why = choose_algorithm(kind, volume, [s for a in axes for s in self.torus[a]], self.chip)
            self._algorithms[key] = algorithm, why, self.seconds(kind, axes, sent, algorithm)
        algorithm, why, seconds = self._algorithms[key]
        self.left -= (seconds or 0.0) * (self.count or 1)
        if self.left < 0:
            raise TooLong
        if value not in self.called:
            self.called[value] = value.path or self.name(value), format_dims(self.program.dims(value))
        tensor, dims = self.called[value]
        return [
            Collective(
                kind, axes, tensor, dims, value.shape,
                str(value.aval.dtype), sent, self.count, cause, op, seconds, algorithm, why,
            )
        ]  # fmt: skip

    def seconds(self, kind: CollectiveOp, axes: tuple[str, ...], sent: float, algorithm: AlgorithmName) -> float | None:
        """Seconds of a collective that sends so many bytes; None: the chip is not known."""
        if self.chip is None:
            return None
        volume = volume_of(kind, sent, parts_of(axes, self.sizes))
        return seconds_of(kind, volume, [s for a in axes for s in self.torus[a]], self.chip, algorithm)

    def name(self, value: Value) -> str:
        """How reports call a value without a path: after the weight that it is as, else after the op that made it."""
        made = value.op.name if value.op is not None else "value"
        nodes = value.nodes
        weight = self.weights.get(tuple(map(self.program.unifier.find, nodes))) if len(nodes) > 1 else None
        return f"{made} ~ {weight}" if weight else made

    # -- moving and reducing

    def reduce(self, value: Value) -> None:
        """Reduce a value that is unreduced: reduce-scatters where its layout splits it over those axes, else an all-reduce.

        The step stands right behind the one that made the value, for all that read it reduced.
        """
        source = self.at[value]
        if not source.partial:
            return
        if self.record is not None:
            self.record.reduced += (value,)
        made, names = self.reduced_from[value]
        rest, size = self.rest(value), itemsize(value.aval)
        scatter, reduced = scatters_of(source.spec, rest, source.partial, source.kind)
        spec = source.spec
        scatters, collectives = [], []
        for i, axes in scatter.items():  # first, so that the smaller piece is all-reduced
            dim = self.program.dim_name(value, i) or f"dim {i}"
            cause = f"{self.contracted(made, names, axes)}; the result is split over {names_of(axes)} on `{dim}`"
            new = self.combine("reduce-scatter", axes, value, made, spec, size, cause)
            scatters.append(Scatter(i, axes, new[0].algorithm if new else "staged"))
            collectives += new
            spec = tuple((*entry, *axes) if k == i else entry for k, entry in enumerate(spec))
        if reduced:
            cause = f"{self.contracted(made, names, reduced)}; no dim of the result is split over {names_of(reduced)}"
            if reduces(source.kind, value.aval.dtype):
                collectives += self.combine("all-reduce", reduced, value, made, spec, size, cause)
            else:
                size *= parts_of(reduced, self.sizes)
                collectives += self.combine("all-gather", reduced, value, made, spec, size, cause)
        path, moves = self.path(value, spec, rest, made, "the layout keeps it so")
        result = self.shard(value, rest)
        group = self.groups[source]
        group.append(Reduce(made, source, result, path, (*collectives, *moves), tuple(scatters), reduced))
        before, self.group = self.group, group
        self.made(result)
        self.group = before

    def combine(
        self, kind: CollectiveOp, axes: tuple[str, ...], value: Value, op: Op, spec: Spec, size: float, cause: str
    ) -> list[Collective]:
        axes = tuple(a for a in axes if self.sizes[a] > 1)
        volume = local_bytes(value.shape, size, spec, self.sizes)
        return self.collective(kind, axes, value, op, wire_bytes(kind, volume, parts_of(axes, self.sizes)), cause)

    def contracted(self, op: Op, names: list[Names], axes: Sequence[str]) -> str:
        parts = []
        for f, got in enumerate(self.factor_axes.get(op, ())):
            mine = [a for a in got if a in axes]
            if mine and op.rule is not None and op.rule.kinds[f] in (*REDUCTIONS, "pass_through", "permutation"):
                rule = self.assignment.rule_text(names[f], mine[0])
                dim = names[f][0] if names[f] else "a factor"
                does = "indexes" if op.rule.kinds[f] == "indexed" else "contracts"
                parts.append(f"`{rule or names_of(mine)}` splits `{dim}`, which {op.name} {does}")
        return " and ".join(parts) or f"partial sums over {names_of(axes)}"

    def path(
        self, value: Value, have: Spec, need: Spec, op: Op | None, cause: str
    ) -> tuple[tuple[Move, ...], list[Collective]]:
        """The moves that bring a value from one spec to another, and what they send."""
        moves = reshard(have, need, self.sizes)
        sent = [m for m in moves if m.op != "slice"]
        size = itemsize(value.aval)
        return moves, [
            c
            for m in sent
            for c in self.collective(
                cast(CollectiveOp, m.op), m.axes, value, op, m.bytes(value.shape, size, self.sizes), cause
            )
        ]

    def finish(self, op: Op, out: Value) -> None:
        """Bring a result to the spec in which it rests."""
        self.moved(out, self.rest(out), op, f"the layout keeps this result of {op.name} so")

    def moved(self, value: Value, need: Spec, op: Op | None, cause: str) -> Shard:
        """Bring a value to a spec in which it rests from now on."""
        source = self.at[value]
        if source.spec == need:
            return source
        if self.record is not None:
            self.record.finish += (value,)
        path, collectives = self.path(value, source.spec, need, op, cause)
        result = self.shard(value, need)
        self.group.append(Reshard(op, source, result, path, tuple(collectives), copy=False))
        if not collectives:  # readers of the larger shard in this body need not gather it again
            self.here.made.setdefault((value, source.spec), source)
        return self.made(result)

    def operand(self, op: Op | None, value: Value, need: Spec, names: Sequence[Names] | None = None) -> Shard:
        """A value in the spec that an op needs it in, and why it had to move; what a loop only reads is moved before the loop."""
        if value in self.free:
            found = self.make(value, need)
        elif (source := self.at[value]).spec == need:
            return source
        else:
            assert op is not None
            found = self.copied(op, value, need, names)
        if self.record is not None:
            self.record.copies += ((value, need, names, found),)
        return found

    def copied(self, op: Op, value: Value, need: Spec, names: Sequence[Names] | None) -> Shard:
        """A copy of a value in another spec, made once for each body."""
        here, origin, count = self.here, op, self.count
        loops = []
        while value in self.consts:
            const = self.consts[value]
            loops.append(const.loop)
            value, here, origin, self.count = const.outer, const.around, const.loop, const.count
        try:
            found = here.made.get((value, need))
            if found is None and value in self.free:
                found = self.make(value, need, here)
            if found is None and not loops:
                found = self.recomputed(value, need)
            if found is None:
                source = self.at[value]
                cause = self.why_moved(op, value, source.spec, need, names)
                path, collectives = self.path(value, source.spec, need, origin, cause)
                found = here.made[value, need] = self.shard(source.value, need, copy=(here.frame, value))
                here.floating.append(Reshard(origin, source, found, path, tuple(collectives), copy=True))
        finally:
            self.count = count
        for loop in loops:
            self.hoisted.setdefault(loop, {})[found] = None
        return found

    def recomputed(self, value: Value, need: Spec, depth: int = 8) -> Shard | None:
        """The result of a cheap op in another spec, computed from operands that exist in theirs; None where one would be sent."""
        here, op = self.here, value.op
        if (value, need) in here.made or value in self.free:
            return here.made.get((value, need)) or self.make(value, need, here)
        if self.at[value].partial:
            return None
        if self.at[value].spec == need:
            return self.at[value]
        if op is None or op.name not in RECOMPUTED or op.eqn.effects or op.outs[1:] or not depth:
            return None
        needs, axes = self._needs(value, need)
        if op.rule is not None and axes is None:
            return None
        found = []
        for v, spec in needs:
            shard = self.recomputed(v, spec, depth - 1)
            if shard is None:
                return None
            found.append(shard)
        rest = iter(found)
        operands = tuple(None if v is None else next(rest) for v in op.ins)
        result = here.made[value, need] = self.shard(value, need, copy=(here.frame, value))
        here.floating.append(Run(op, operands, (result,), None if axes is None else tuple(axes)))
        return result

    def why_moved(self, op: Op, value: Value, have: Spec, need: Spec, names: Sequence[Names] | None) -> str:
        reasons = []
        for i, (h, n) in enumerate(zip(have, need, strict=True)):
            for a in h:
                if a in n:
                    continue
                dim = self.program.dim_name(value, i) or f"dim {i}"
                rule = (
                    self.assignment.rule_text([x for ns, _ in self.program.parts(value, i) for x in ns], a)
                    or f"{dim}: {a}"
                )
                winner = None
                if names is not None:
                    winner = next(
                        (names[f][0] for f, got in enumerate(self.factor_axes.get(op, ())) if a in got and names[f]),
                        None,
                    )
                if winner is not None:
                    reasons.append(f"`{rule}` lost `{a}` to `{winner}` in this {op.name}, so `{dim}` is gathered")
                elif any(a in entry for entry in need):
                    reasons.append(f"`{a}` moves from `{dim}` to another dim in this {op.name}")
                elif op.rule is not None and not op.rule.known:
                    reasons.append(f"{op.name} has no factor rule, so `{dim}` is gathered")
                else:
                    reasons.append(f"{op.name} needs all of `{dim}`, which `{rule}` splits")
        return "; ".join(reasons) or f"this {op.name} needs it so"

    # -- what is made from no data

    def constant(self, value: Value, spec: Spec, array: Any, op: Op | None = None) -> Shard:
        shard = self.shard(value, spec, is_constant=True)
        self.here.floating.append(Constant(op, shard, array))
        return self.made(shard)

    def literal(self, value: Value, var: Any) -> Shard:
        return self.constant(value, unsplit(len(value.shape)), literal_array(var))

    def make(self, value: Value, spec: Spec, here: _Building | None = None) -> Shard:
        """The part of a value made from no data that a spec asks for, made once for each body."""
        here = here or self.here
        todo = [(value, spec)]
        while todo:
            v, s = todo[-1]
            if (v, s) in here.made:
                todo.pop()
                continue
            recipe = None if self.kept is None else self.kept.recipes.get((here.frame, v, s))
            needs, axes = self._needs(v, s) if recipe is None else (recipe.needs, None)
            missing = [need for need in needs if need not in here.made]
            if missing:
                todo += missing
                continue
            found = [here.made[need] for need in needs]
            if recipe is not None and recipe.found != found:
                recipe, (needs, axes) = None, self._needs(v, s)
            if recipe is None:
                recipe = self._recipe(v, s, needs, axes, found, here)
                if self.kept is not None:
                    self.kept.recipes[here.frame, v, s] = recipe
            for key, shard in recipe.made.items():
                here.made.setdefault(key, shard)
            if recipe.step is not None:
                here.floating.append(recipe.step)
            todo.pop()
        return here.made[value, spec]

    def _needs(self, value: Value, spec: Spec) -> tuple[tuple[tuple[Value, Spec], ...], Axes | None]:
        """(the values, in their specs, of which a part of a value is made; the axes of its op's factors, if it is run)."""
        op = value.op
        assert op is not None
        if op.name in IDENTITIES or op.name == "optimization_barrier":
            source = op.ins[op.outs.index(value)]
            return () if source is None else ((source, spec),), None
        if op.rule is None:
            needs = [None if v is None else stretched(spec, v.shape, value.shape) for v in op.ins]
            axes = None
        else:
            axes = self._axes_for(op, op.outs.index(value), spec)
            if axes is None:
                return ((value, unsplit(len(spec))),), None
            needs = [None if v is None else spec_of(d, axes) if d else unsplit(len(v.shape))
                     for v, d in zip(op.ins, op.rule.ins, strict=True)]  # fmt: skip
        return tuple(
            (v, need) for v, need in zip(op.ins, needs, strict=True) if v is not None and need is not None
        ), axes

    def _recipe(
        self, value: Value, spec: Spec, needs: tuple[tuple[Value, Spec], ...], axes: Axes | None, found: list[Shard],
        here: _Building,
    ) -> Recipe:  # fmt: skip
        """How a part of a value is made of the parts that it needs."""
        op = value.op
        assert op is not None
        if op.name in IDENTITIES or op.name == "optimization_barrier":
            if found:
                return Recipe(needs, found, None, {(value, spec): found[0]})
            result = self.part(value, spec, here)
            constant = Constant(op, result, literal_array(op.eqn.invars[op.outs.index(value)]))
            return Recipe(needs, found, constant, {(value, spec): result})
        if op.rule is not None and axes is None:
            result = self.part(value, spec, here)
            path = reshard(unsplit(len(spec)), spec, self.sizes)
            cut = Reshard(op, found[0], result, path, (), copy=True)
            return Recipe(needs, found, cut, {(value, spec): result})
        specs = [spec] * len(op.outs) if op.rule is None or axes is None else [spec_of(d, axes) for d in op.rule.outs]
        rest = iter(found)
        operands = tuple(None if v is None else next(rest) for v in op.ins)
        results = tuple(self.part(out, s, here) for out, s in zip(op.outs, specs, strict=True))
        run = Run(op, operands, results, None if axes is None else tuple(axes))
        return Recipe(needs, found, run, {(s.value, s.spec): s for s in results})

    def part(self, value: Value, spec: Spec, here: _Building) -> Shard:
        """The shard of a part of a value made from no data, in a body."""
        return self.shard(value, spec, is_constant=True, copy=here.frame)

    def _axes_for(self, op: Op, k: int, spec: Spec) -> Axes | None:
        """The axes of the factors with which a result comes out in a spec; None where only the whole can be made."""
        rule = op.rule
        assert rule is not None
        axes: Axes = [()] * len(rule.sizes)
        if not any(spec):
            return axes
        for factors, entry in zip(rule.outs[k], spec, strict=True):
            if not entry:
                continue
            f = factors[0] if factors else None
            if f is None or rule.kinds[f] != "pass_through" or rule.sizes[f] % parts_of(entry, self.sizes):
                return None
            axes[f] = entry
        return axes if blocks_only(rule, axes, self.sizes) == axes and spec_of(rule.outs[k], axes) == spec else None

    # -- calls, loops and branches

    def call(self, op: Op, group: list[Step | Callable[[], Step]]) -> Callable[[], Step]:
        (frame,) = op.frames
        (consts,) = body_consts(op.eqn)
        invars = op.eqn.invars[len(op.eqn.invars) - len(frame.jaxpr.invars) :]
        before: dict[Value, Shard] = {}
        around, recomputes = self.here, _recomputes(op)
        with self.inside(frame, op) as here:
            if not recomputes:
                here.made = around.made  # its steps run in place
            for var, value in zip(invars, frame.ins(), strict=True):
                if isinstance(var, Literal):
                    self.literal(value, var)
            if recomputes:
                # what the forward pass did is done again, so that its results (and gathered weights) need not be kept
                ins = {v: self.at[v] for v in frame.ins() if v not in self.free and not self.at[v].partial}
                before = {v: s for v, s in ins.items() if not s.is_constant}
                self.group = []
                here.groups.append(self.group)
                again = {v: self.shard(s.value, s.spec, copy=(frame, v)) for v, s in before.items()}
                self.group.append(Barrier(op, tuple(before.values()), tuple(again.values())))
                self.at.update(again)
            self.ops(frame, consts)
        self.at.update(before)
        for var, out in zip(frame.jaxpr.outvars, op.outs, strict=True):
            if isinstance(var, Literal):
                self.literal(out, var)

        def step() -> Step:
            body = here.body((), ())
            if not recomputes:  # copies that only later steps around the call read
                placed = set(map(id, body.steps))
                around.floating += [s for s in here.floating if id(s) not in placed]
            return Call(op, body)

        return step

    def scan(self, op: Op, group: list[Step | Callable[[], Step]]) -> Callable[[], Step]:
        nc, nk = scan_counts(op.eqn.params)
        (frame,), (consts,) = op.frames, body_consts(op.eqn)
        inner = frame.ins()
        for v in op.ins:
            if v is not None:
                self.reduce(v)
        read = [self.read(op, i, v, w) for i, (v, w) in enumerate(zip(op.ins[:nc], inner[:nc], strict=True))]
        adding = self.accumulations(op, frame, nc, nk)
        inits: list[Shard | None] = []
        for k, (v, w) in enumerate(zip(op.ins[nc : nc + nk], inner[nc : nc + nk], strict=True)):
            if k not in adding:
                inits.append(self.enters(op, nc + k, v, self.rest(w)))
                self.made(self.shard(w, self.rest(w)))
            else:
                inits.append(None)
        stacks = []
        for i, (v, w) in enumerate(zip(op.ins[nc + nk :], inner[nc + nk :], strict=True), nc + nk):
            spec = unsplit(len(w.shape)) if v is None else self.at[v].spec[1:]
            stacks.append(self.enters(op, i, v, ((), *spec)))
            self.made(self.shard(w, spec))
        self.accumulating.update((a.carry, a) for a in adding.values())
        for a in adding.values():
            self.find_accumulated(a.addend)
        self.apart.update(o for o in frame.ops for a in adding.values() if a.carry in o.ins or a.addend in o.outs)
        with self.inside(frame, op) as here:
            slices = [self.at[w] for w in inner[nc + nk :]]
            self.ops(frame, consts)
            carried = [self.placements[w].made for w in inner[nc : nc + nk]]
            waiting: set[int] = set()
            for k, var in enumerate(frame.jaxpr.outvars):
                value = None if isinstance(var, Literal) else frame.env[var]
                if value is None or value in self.free or not self.at[value].partial:
                    continue
                if k in adding or (k >= nk and self.depth > 1 and not self.scatters(value)):
                    waiting.add(k)  # may wait for the end of the loop around
            needs: list[Spec | None] = [s.spec for s in carried]
            needs += [None] * (len(frame.jaxpr.outvars) - nk)
            outputs = self.leaves(op, frame, needs, waiting)
        for k in adding:
            inits[k] = self.enters(op, nc + k, op.ins[nc + k], carried[k].spec)
        self.group = group
        results = []
        for k, (out, shard) in enumerate(zip(op.outs, outputs, strict=True)):
            spec = shard.spec if k < nk else ((), *shard.spec)
            results.append(self.made(self.shard(out, spec, shard.partial, shard.kind)))
            if k in waiting:
                self.follows(out, shard.value)
            else:
                self.finish(op, out)
        return self._loop(op, read, inits, stacks, [(here, [*carried, *slices], outputs)], results)

    def while_(self, op: Op, group: list[Step | Callable[[], Step]]) -> Callable[[], Step]:
        params = op.eqn.params
        nc, nb = params["cond_nconsts"], params["body_nconsts"]
        for v in op.ins:
            if v is not None:
                self.reduce(v)
        cond, body = op.frames
        carry = body.ins()[nb:]
        rests = [self.rest(w) for w in carry]
        inits = [
            self.enters(op, i, v, rest)
            for i, (v, rest) in enumerate(zip(op.ins[nc + nb :], rests, strict=True), nc + nb)
        ]
        carried = [self.made(self.shard(w, rest)) for w, rest in zip(carry, rests, strict=True)]
        read = []
        for frame, first, n in ((cond, 0, nc), (body, nc, nb)):
            read += [self.read(op, first + i, op.ins[first + i], frame.ins()[i], hoist=False) for i in range(n)]
        bodies = []
        for frame, needs, consts in zip((cond, body), ([()], rests), body_consts(op.eqn), strict=True):
            for shard in carried:
                self.at[shard.value] = shard
            with self.inside(frame, op) as here:
                self.ops(frame, consts)
                bodies.append((here, carried, self.leaves(op, frame, needs)))
        self.group = group
        results = []
        for out, shard in zip(op.outs, bodies[1][2], strict=True):
            results.append(self.made(self.shard(out, shard.spec)))
            self.finish(op, out)
        return self._loop(op, read, inits, [], bodies, results)

    def _loop(
        self, op: Op, read: Sequence[Shard], inits: Sequence[Shard | None], stacks: Sequence[Shard],
        bodies: Sequence[tuple[_Building, Sequence[Shard], Sequence[Shard]]], results: Sequence[Shard],
    ) -> Callable[[], Step]:  # fmt: skip
        first = tuple(s for s in inits if s is not None)
        assert len(first) == len(inits)
        hoisted = self.hoisted  # without the planner, which refers to this
        return lambda: Loop(
            op, tuple(dict.fromkeys(read)), tuple(hoisted.get(op, ())), first, tuple(stacks),
            tuple(here.body(inputs, outputs) for here, inputs, outputs in bodies), tuple(results),
        )  # fmt: skip

    def cond(self, op: Op, group: list[Step | Callable[[], Step]]) -> Callable[[], Step]:
        for v in op.ins:
            if v is not None:
                self.reduce(v)
        index = self.lies(op.ins[0])
        rests = [self.rest(out) for out in op.outs]
        bodies, read = [], []
        for frame, consts in zip(op.frames, body_consts(op.eqn), strict=True):
            read += [
                self.read(op, i, v, w, hoist=False)
                for i, (v, w) in enumerate(zip(op.ins[1:], frame.ins(), strict=True), 1)
            ]
            with self.inside(frame, op) as here:
                self.ops(frame, consts)
                bodies.append((here, self.leaves(op, frame, rests)))
        self.group = group
        results = [self.made(self.shard(out, rest)) for out, rest in zip(op.outs, rests, strict=True)]
        return lambda: Branch(
            op,
            index,
            tuple(dict.fromkeys(read)),
            tuple(here.body((), outputs) for here, outputs in bodies),
            tuple(results),
        )

    def read(self, op: Op, i: int, outer: Value | None, inner: Value, hoist: bool = True) -> Shard:
        """What bodies only read is there as it lies outside; the body of a scan may have it moved before the loop."""
        if outer is None:
            return self.literal(inner, op.eqn.invars[i])
        shard = self.lies(outer)
        assert shard is not None
        self.at[inner] = shard
        self.placements[inner] = Placement(shard, shard)
        if hoist and outer is not inner:
            self.consts[inner] = _LoopConst(op, outer, self.count, self.here)
        return shard

    def enters(self, op: Op, i: int, outer: Value | None, need: Spec) -> Shard:
        """What a loop takes, in the spec in which its body has it."""
        if outer is not None:
            return self.operand(op, outer, need)
        var = op.eqn.invars[i]
        shard = Shard(self._nameless(var.aval), need, is_constant=True)
        self.here.floating.append(Constant(op, shard, literal_array(var)))
        return shard

    def leaves(
        self, op: Op, frame: Frame, needs: Sequence[Spec | None], waiting: frozenset[int] | set[int] = frozenset()
    ) -> list[Shard]:
        """What a body returns, reduced but for ``waiting``, in the specs that are asked for (None: as it lies)."""
        out = []
        for k, (var, need) in enumerate(zip(frame.jaxpr.outvars, needs, strict=True)):
            if isinstance(var, Literal):
                shard = Shard(
                    self._nameless(var.aval), need if need is not None else unsplit(np.ndim(var.val)), is_constant=True
                )
                self.here.floating.append(Constant(op, shard, literal_array(var)))
                out.append(shard)
                continue
            value = frame.env[var]
            if k not in waiting:
                self.reduce(value)
            out.append(self.operand(op, value, self.at[value].spec if need is None or k in waiting else need))
        return out

    @staticmethod
    def _nameless(aval: Any) -> Value:
        return Value(aval, (-1,) * len(aval.shape))

    def scatters(self, value: Value) -> bool:
        """Whether reducing a value would split it further."""
        s = self.at[value]
        scatter, _ = scatters_of(s.spec, self.rest(value), s.partial, s.kind)
        return bool(scatter) or s.kind not in ADDED

    def accumulations(self, op: Op, frame: Frame, nc: int, nk: int) -> dict[int, _Accumulation]:
        """The carries that a loop only adds to, by their place among the carries, where they start from no data."""
        uses: dict[Value, int] = {}
        for v in (v for o in frame.ops for v in o.ins if v is not None):
            uses[v] = uses.get(v, 0) + 1
        outs = [None if isinstance(v, Literal) else frame.env[v] for v in frame.jaxpr.outvars]
        for v in outs:
            if v is not None:
                uses[v] = uses.get(v, 0) + 1
        found = {}
        for k, (start, carry) in enumerate(zip(op.ins[nc : nc + nk], frame.ins()[nc : nc + nk], strict=True)):
            total = outs[k]
            if (
                total is None
                or total.op is None
                or total.op.name not in ("add", "add_any")
                or total.op.frame is not frame
            ):
                continue
            a, b = total.op.ins
            addend = b if a is carry else a if b is carry else None
            if addend is None or addend is carry or addend.shape != carry.shape:
                continue
            if uses[carry] != 1 or uses[total] != 1 or not (start is None or start in self.free):
                continue
            found[k] = _Accumulation(carry, addend)
        return found

    def find_accumulated(self, addend: Value) -> None:
        """Note the conversions from which an addend is computed by ops that partial sums may pass."""
        for value, stacked in summed_into(self.program, addend):
            self.accumulated[value] = stacked
            if value.op is not None and value.op.name == "convert_element_type":
                self.apart.add(value.op)

    def accumulate(self, op: Op, acc: _Accumulation) -> bool:
        """Plan ``carry + addend``: where the addend is an unreduced sum, so is the carry, from its first value on."""
        added = self.at[acc.addend]
        if not added.partial or added.kind not in ADDED:
            self.made(self.shard(acc.carry, self.rest(acc.carry)))
            return False
        self.made(self.shard(acc.carry, added.spec, added.partial))
        self.pass_on(op, acc.addend, op.outs[0], added.spec, law=LINEAR)
        return True


_CONTROL: Mapping[str, Callable[[_Planner, Op, list[Step | Callable[[], Step]]], Callable[[], Step]]] = {
    "scan": _Planner.scan,
    "while": _Planner.while_,
    "cond": _Planner.cond,
}
"""By primitive; what is not here is a call, whose body is planned in place."""


def _weights(program: Program) -> dict[tuple[int, ...], str | None]:
    """The paths of the weights, by the classes of their dims."""
    return {tuple(map(program.unifier.find, v.nodes)): v.path for v in reversed(program.inputs) if v.kind == "params"}


def kind_by(law: Law | None, kind: Kind) -> Kind:
    """How the contributions to the result of an op combine that is applied to an operand of a kind by a law.

    An ``indexed`` operand of a law for sums is a sum: ``kind_by(LINEAR, "indexed") == "sum"``.
    """
    return kind if law is None or kind in law.kinds else "sum"


def _recomputes(op: Op) -> bool:
    """Whether a call does again, behind a barrier, what the forward pass did."""
    p = op.eqn.params
    if op.name not in ("checkpoint", "remat", "remat2") or not p["differentiated"]:
        return False
    guarded = p["prevent_cse"]
    return any(guarded) if isinstance(guarded, tuple) else bool(guarded)


def stretched(spec: Spec, shape: Sequence[int], out: Sequence[int]) -> Spec:
    """The spec of an operand that an elementwise op stretches to its result: whole along dims of size 1."""
    if shape == out:
        return spec
    if len(shape) != len(out):
        return unsplit(len(shape))
    return tuple(axes if n == m else () for axes, n, m in zip(spec, shape, out, strict=True))
