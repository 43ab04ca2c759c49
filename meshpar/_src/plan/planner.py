"""Making a plan: each op of a program is decided (:mod:`.decide`) and its steps are emitted (:mod:`.emit`), in order."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax.extend.core import Literal, Var

from ..dims import format_dims
from ..hardware.calibration import calibrated
from ..hardware.chips import Chip
from ..hardware.topology import Torus, chip_of, torus_of, torus_of_slices
from ..iterables import grouped
from ..program.ir import Frame, Op, Program, Value
from ..units import format_memory
from .assignment import AxisAssignment
from .checks import check_blocks, check_dims, check_divides, check_joins
from .collective_records import AlgorithmChoices, CollectiveRecords, TooLong
from .control_flow import ControlFlow
from .decide import Facts, OpDecision, Operand, decide, is_reduced_after
from .deferred_sums import deferrable, narrowed, narrows, readers_of
from .emit import Emitter
from .input_independent_values import large_constant_note
from .plan import Plan, ShardedArray
from .plan_cache import PlanCache
from .program_variants import Variant, variants
from .request import PlanRequest
from .shard_shapes import replicated_spec, shard_count
from .steps import Shard


class Rank(NamedTuple):
    """The order of plans of one step: a plan that fits in the memory of its chip is before one that does not, then a cheaper one.

    Attributes:
      exceeds: plan → whether it needs more than the memory of its chip.
      cost: plan → its cost; it is not called for a plan that another one precedes by memory alone.
    """

    exceeds: Callable[[Plan], bool]
    cost: Callable[[Plan], float]

    def first(self, plans: Iterable[Plan]) -> Plan:
        """The first plan in this order; of equal ones the first given."""
        plans = list(plans)
        fitting = [p for p in plans if not self.exceeds(p)] if len(plans) > 1 else plans
        left = fitting or plans
        return left[0] if len(left) == 1 else min(left, key=self.cost)


def planned(program: Program, request: PlanRequest, rank: Rank, max_seconds: float = math.inf) -> Plan:
    """The best plan of a program before any pass, of the plans of its :func:`.variants`.

    Args:
      rank: chooses between them.
      max_seconds: limit of the seconds of the plan's collectives, run one after the other.

    Raises:
      UnknownAxisError, UnknownDimError, DivisibilityError, JoinError, UnsupportedError.
      TooLong: the collectives take longer than ``max_seconds``.
      MeshError: all calibrations are of other devices.
    """
    program = program.traced
    request.layout.check_axes(request.mesh, program.all_names())
    check_dims(program, request.layout, request.init)
    check_joins(program, request.strict, request.layout)
    plans = [p for form in variants(program, request) for p in _plans_of(form, request, rank, max_seconds)]
    if not plans:
        raise TooLong
    return rank.first(plans)


def _plans_of(form: Variant, request: PlanRequest, rank: Rank, max_seconds: float) -> list[Plan]:
    """The plans of a form: as it is, then with rewritten slices; without those whose collectives take longer than the limit.

    The form with rewritten slices is planned first. If it sends nothing, no plan sends less; else it is the other one's limit.
    """
    limit, rewritten = max_seconds, list[Plan]()
    if form.divisible is not None:
        rewritten = _plans_of(form.divisible, request, rank, max_seconds)
        if any(not plan.collectives for plan in rewritten):
            return rewritten
        limit = min([limit, *(plan.comm_seconds for plan in rewritten if plan.chip is not None)])
    with contextlib.suppress(TooLong):
        return [_with_gather(form, request, rank, limit), *rewritten]
    return rewritten


def _with_gather(variant: Variant, request: PlanRequest, rank: Rank, max_seconds: float) -> Plan:
    """The plan of a variant, whose loops over microbatches gather weights once a step or in each microbatch, as it says.

    Where it does not say, a plan that gathers once and exceeds the memory is compared with one that gathers in each microbatch.

    Raises:
      TooLong: the collectives take longer than ``max_seconds``.
    """
    once = _Planner(variant, request, max_seconds, variant.gather == "microbatch").plan()
    if not once.unsharded or variant.gather == "step":
        return once
    if not rank.exceeds(once):
        note = (
            "gradients that a loop adds up, over microbatches or over chunks of the loss, are reduced once, after the loop: a "
            f'device has {format_memory(once.unsharded)} of them unsharded. gather="microbatch" needs less memory, and sends more'
        )
        return replace(once, notes=(*once.notes, note)) if once.unsharded >= MIN_NOTED_BYTES else once
    try:
        each = _Planner(variant, request, max_seconds, True).plan()
    except TooLong:
        return once
    return rank.first((once, replace(each, notes=(*each.notes, IN_EACH_MICROBATCH))))


def planned_as_traced(plan: Plan) -> Plan:
    """The plan of the program of another plan as traced, without its rewrites, before any pass."""
    return _Planner(Variant(plan.program.traced, plan.layout, (), None), plan.request, math.inf, False).plan()


def _on_slices(
    program: Program, sizes: tuple[tuple[str, int], ...], topology: str
) -> tuple[Torus, dict[Chip | None, AlgorithmChoices]]:
    """(the stages of the axes on slices, the algorithms of collectives by chip, which plans add) of the plans of a program."""
    return torus_of_slices(dict(sizes), topology), {}


MIN_NOTED_BYTES = 2**26
"""Bytes of unsharded gradients from which on a note says how to have them sharded."""
IN_EACH_MICROBATCH = (
    "weights are gathered, and gradients reduced, in each microbatch: doing so once a step would send less, but exceeds the memory "
    '(gather="step" requests it)'
)
"""The note of a plan that gathers weights in each microbatch because of the memory."""


class _Planner:
    """Makes one plan: decides about every op of a program in order, and emits its steps.

    Attributes:
      deferrable: values that may be in ``deferred`` of the facts.
      decisions: by :meth:`key`; shared by the plans of the program on meshes of these sizes, of this plan alone unless ``by_key``.
      by_key: ops that are alike share a decision.
    """

    def __init__(self, variant: Variant, request: PlanRequest, max_seconds: float, in_each_microbatch: bool):
        """Set up the assignment, caches and emitter; ``in_each_microbatch`` as in :class:`ControlFlow`."""
        self.program = program = variant.program
        self.layout = layout = variant.layout
        self.request, self.notes = request, list(variant.notes)
        mesh, topology = request.mesh, request.topology
        self.sizes = sizes = dict(mesh.shape)
        self.assignment = assignment = AxisAssignment(program, layout, sizes)
        self.chip: Chip | None = calibrated(chip_of(topology or mesh), mesh, request.calibrations)
        # a layout that is resolved by cost decides by names too, and a user's shard_map by the axes that it returns dims with
        self.by_key = layout.resolve == "order" and not assignment.shard_map_axes
        cache = program.cached(PlanCache).trim() if self.by_key else PlanCache(program)
        self.decisions = cache.decisions.setdefault(tuple(sizes.items()), {})
        self.torus, algorithms = torus_of(mesh), AlgorithmChoices()
        if topology is not None:
            self.torus, of_chip = program.cached(_on_slices, tuple(sizes.items()), topology)
            algorithms = of_chip.setdefault(self.chip, algorithms)
        records = CollectiveRecords(program, sizes, self.torus, self.chip, algorithms, max_seconds)
        self.emitter = Emitter(assignment, cache, records)
        self.deferrable = program.cached(deferrable)
        self.facts = Facts(assignment, program.cached(readers_of), {}, set())
        self.control = ControlFlow(self.emitter, self.facts, in_each_microbatch)

    def plan(self) -> Plan:
        """The plan.

        Raises:
          TooLong: its collectives take longer than the limit.
        """
        program, emitter = self.program, self.emitter
        inputs = [emitter.place(emitter.shard(v, replicated_spec(len(v.shape)))) for v in program.constants]
        self.notes += filter(None, (large_constant_note(program, v, self.sizes) for v in program.constants))
        arguments, results = [], []
        for value in program.inputs:
            spec = emitter.stored(value)
            inputs.append(emitter.place(emitter.shard(value, spec)))
            arguments.append(ShardedArray.of(program, value, spec, self.sizes, value.kind))
        check_divides(program.inputs, self.assignment)
        self.ops(program.root, ())
        outputs = []
        for var, value in zip(program.root.jaxpr.outvars, program.outputs, strict=True):
            outputs.append(self.output(var, value))
            results.append(ShardedArray.of(program, value, emitter.stored(value), self.sizes, value.kind))
        self.notes += self.unsharded_notes()
        return Plan(
            program, self.request, self.layout, self.torus, self.chip, emitter.body.body(inputs, outputs),
            emitter.placements, tuple(arguments), tuple(results), tuple(dict.fromkeys(self.notes)),
            unsharded=self.control.unsharded,
        )  # fmt: skip

    def ops(self, frame: Frame, consts: Sequence[Any]) -> None:
        """Plan the ops of a frame, in order.

        Args:
          consts: the arrays of its jaxpr's constants; none for the program's own, which are inputs of the plan.
        """
        emitter, control = self.emitter, self.control
        for var, const in zip(frame.jaxpr.constvars, consts, strict=False):
            emitter.constant(frame.env[var], const)
        for op in frame.ops:
            group = emitter.new_group()
            if op.frames:
                group.insert(0, control.plan(op, self.ops))
            elif op not in control.accumulations or not control.add(op):
                emitter.run(op, self.decision(op))
                if op.primitive.family == "blocks":
                    check_blocks(op, emitter.current[op.outs[0]].spec, self.assignment)
                self.defer(op)

    def defer(self, op: Op) -> None:
        """Record the partial results of an op that are not reduced, because reducing what their readers make sends less."""
        for value in op.outs:
            if value in self.deferrable and self.emitter.current[value].partial:
                x = self.emitter.operand_of(value)
                if x is not None and is_reduced_after(x, self.facts):
                    self.facts.deferred.add(value)

    def decision(self, op: Op) -> OpDecision:
        """The decision about an op without bodies; ops with equal keys, such as in equal layers, share it."""
        operands = [self.emitter.operand_of(v) for v in op.ins]
        key = self.key(op, operands)
        known = self.decisions.get(key)
        if known is None:
            known = self.decisions[key] = decide(op, operands, self.facts)
        return known

    def key(self, op: Op, operands: Sequence[Operand | None]) -> tuple[Any, ...]:
        """All that the decision about an op depends on besides the mesh: (what the op is, the axes that the layout gives it,
        how its operands are sharded, how its results are stored).

        Equal equations have one rule; elementwise ops are alike if their names and shapes are. The op itself is in the key where
        the decision also depends on its names, on its effects, or on the other readers of a partial operand.
        """
        assignment, facts, rule = self.assignment, self.facts, op.rule
        what: Any = op
        if any(x is not None and x.partial for x in operands):
            what = op, frozenset(facts.deferred.intersection(op.ins)), *map(facts.accumulated.get, op.outs[:1])
        elif self.by_key and not op.eqn.effects and op.primitive.family not in ("identity", "barrier", "opaque"):
            shapes = [v and v.shape for v in (*op.ins, *op.outs)] if rule is None else ()
            what = rule or (op.name, narrows(op), *shapes)
        if rule is None:
            axes: Any = assignment.elementwise_spec(op)
        else:
            axes = tuple(rule.given or assignment.factor_axes(op))
        among = self.program.cached(narrowed)
        shards = [x and (x.spec, x.partial, x.kind, x.is_constant, x.iterations) for x in operands]
        return what, axes, tuple(shards), tuple([(assignment.value_spec(v), v in among) for v in op.outs])

    def output(self, var: Var | Literal, value: Value) -> Shard:
        """A result of the program in its stored spec."""
        emitter = self.emitter
        if isinstance(var, Literal):
            emitter.literal(value, var)
        emitter.reduce(value)
        spec = emitter.stored(value)
        check_divides([value], self.assignment)
        if value in emitter.constants:
            return emitter.maker.part(value, spec, emitter.body)
        emitter.new_group()
        return emitter.store(None, value)

    def unsharded_notes(self) -> list[str]:
        """Notes of the dims that a rule does not divide, and that are therefore left unsharded."""
        program, assignment = self.program, self.assignment
        unused = ((rule, i, value) for value in program.inputs for rule, i in assignment.unused_optional_rules(value))
        left = "which is left unsharded in"
        notes = grouped(
            (f"`{rule}` does not divide `{program.dims(value)[i]}` of {value.shape[i]}, {left} ", str(value.path))
            for rule, i, value in unused
        )
        out = [f"{n}{paths[0]}" + (f" and {len(paths) - 1} more" if paths[1:] else "") for n, paths in notes.items()]
        values = grouped(
            ((rule, f"`{dim}`" if (dim := program.dim_name(value, i)) else f"dim {i}", value.shape[i]), value)
            for value, i, rule in assignment.all_indivisible()
        )
        for (rule, dim, size), same in values.items():
            first = same[0]
            more = f" and {len(same) - 1} more" if same[1:] else ""
            count, devices = shard_count(rule.axes, self.sizes), math.prod(self.sizes.values())
            parts = [n for n in range(2, count) if size % n == devices % n == 0] or [1]
            sizes = " or ".join(filter(None, [", ".join(map(str, parts[-4:-1])), str(parts[-1])]))
            out.append(
                f"`{rule}` does not divide {dim} of {size}, {left} {list(first.shape)} "
                f"({format_dims(program.dims(first))}){more}; {' × '.join(rule.axes)} of {sizes} divides it"
            )
        return [*out, *assignment.notes]
