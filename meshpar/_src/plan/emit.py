"""Writing the steps of a plan: runs of ops, copies of operands, reductions of partial values, and resharding of results."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Literal, Var

from ..compat.jax import literal_array
from ..layout import Spec
from ..program.ir import Frame, Op, Value
from .assignment import AxisAssignment
from .body_builder import BodyBuilder, StepGroup
from .bytes_sent_by_op import local_form_sends, value_reshard_bytes
from .causes import Causes
from .collective_records import CollectiveRecords
from .collectives import Collective, is_all_reducible, split_reduction
from .decide import OpDecision, Operand
from .deferred_sums import readers_of
from .input_independent_values import ConstantMaker, inputs_for
from .plan import Placement
from .plan_cache import PlanCache
from .shard_shapes import replicated_spec
from .steps import Constant, Reduce, Reshard, Scatter, Shard, Step, spec_after

MAX_RECOMPUTED_DEPTH = 8
"""Longest chain of ops that is recomputed instead of all-gathering a value."""


_Resharded = dict[tuple[Value, Spec], Mapping[tuple[Value, Spec], float]]
"""(value, spec) → the values that are resharded for it, with bytes."""

_NOT_RECOMPUTED = frozenset({"copy", "name", "pvary", "reshard", "threefry2x32"})


def is_recomputed(op: Op) -> bool:
    """Whether an op is recomputed on a larger shard instead of all-gathering its result, if its operands exist on that shard."""
    if op.primitive.call or op.primitive.family in ("identity", "barrier", "transfer") or op.name in _NOT_RECOMPUTED:
        return False
    return op.primitive.cheap


def _recomputable_depth(value: Value | None, most: int = MAX_RECOMPUTED_DEPTH) -> int:
    """The length of the longest chain of recomputable ops that ends with a value, at most ``most``: more than of its operands."""
    op = None if value is None else value.op
    if op is None or not is_recomputed(op) or not most:
        return 0
    return 1 + max((_recomputable_depth(v, most - 1) for v in op.ins), default=0)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a copy is made: by steps of ``origin`` (for a loop, before it) in a body that runs ``count`` times (None: unknown)."""

    origin: Op
    count: int | None
    body: BodyBuilder


class Emitter:
    """Makes the steps of a plan: it turns the decisions about ops into steps, shards and collectives, and is their only
    writer.

    Attributes:
      current: the shard of each value: as its op left it, possibly partial, or in its stored spec. Of an input-independent value
        only the spec counts.
      constants: the input-independent values.
      placements: the shard that the op of each value makes, and the one in which it is stored.
      pending: the op whose split contracted factors left a value partial.
      factor_axes: the axes that split the factors of ops with a factor rule.
      loop_consts: value inside a scan that only reads it → the value outside, and where copies of it are made, before the scan.
      hoisted: copies that are made before a loop, by loop.
      body, group: the body under construction, and the steps of the present op.
      count: how often the body runs in a step; None: unknown.
    """

    def __init__(self, assignment: AxisAssignment, interned: PlanCache, records: CollectiveRecords):
        """An emitter for a plan without steps, whose body under construction is the program's."""
        self.program, self.assignment, self.sizes = assignment.program, assignment, assignment.sizes
        self.interned, self.records = interned, records
        self.readers = self.program.cached(readers_of)
        self.causes = Causes(assignment)
        self.maker = ConstantMaker(self.sizes, interned)
        self.current: dict[Value, Shard] = {}
        self.constants: set[Value] = set()
        self.placements: dict[Value, Placement] = {}
        self.pending: dict[Value, Op] = {}
        self.factor_axes: dict[Op, tuple[tuple[str, ...], ...]] = {}
        self.loop_consts: dict[Value, tuple[Value, Site]] = {}
        self.hoisted: dict[Op, dict[Shard, None]] = {}
        self.body = BodyBuilder(self.program.root)
        self.group: StepGroup = []
        self.count: int | None = 1
        self._groups: dict[Shard, StepGroup] = {}

    # -- bodies and shards

    @contextmanager
    def inside(self, frame: Frame) -> Iterator[BodyBuilder]:
        """A context in which steps are written into a new body, of a frame."""
        outer, count, group = self.body, self.count, self.group
        self.body = BodyBuilder(frame)
        self.count = None if frame.trip_count is None or count is None else count * frame.trip_count
        try:
            yield self.body
        finally:
            self.body, self.count, self.group = outer, count, group

    def new_group(self) -> StepGroup:
        """Begin the steps of another op."""
        self.group = self.body.new_group()
        return self.group

    def stored(self, value: Value) -> Spec:
        """The spec in which a value is stored."""
        return self.assignment.value_spec(value)

    def shard(
        self, value: Value, spec: Spec, partial: tuple[str, ...] = (), kind: Any = "sum", copy: object = None
    ) -> Shard:
        """An interned shard. Partial shards are distinguished by the spec to which they will be reduced, too."""
        return self.interned.shard(value, spec, partial, kind, copy=self.stored(value) if partial else copy)

    def place(self, shard: Shard) -> Shard:
        """Make a shard the current one of its value, and record its placement; returns the shard."""
        value = shard.value
        self.current[value] = shard
        if shard.partial:
            self._groups[shard] = self.group
        known = self.placements.get(value)
        if known is None or known.made.partial or known.made.spec != shard.spec:
            self.placements[value] = Placement(shard if known is None else known.made, shard)
        return shard

    def constant(self, value: Value, array: Any) -> Shard:
        """The unsharded shard of a literal or of a constant of a jaxpr."""
        shard = self.interned.shard(value, replicated_spec(len(value.shape)), is_constant=True)
        self.body.deferred.append(Constant(None, shard, array))
        return self.place(shard)

    def literal(self, value: Value, var: Var | Literal) -> Shard:
        """The unsharded shard of a value of a body that is a literal outside."""
        return self.constant(value, literal_array(var))

    def operand_of(self, value: Value | None) -> Operand | None:
        """The :class:`Operand` of a value in its current shard; None for a literal."""
        if value is None:
            return None
        shard, is_constant = self.current[value], value in self.constants
        return Operand(value, shard.spec, shard.partial, shard.kind, is_constant, self.iterations(value))

    def iterations(self, value: Value) -> int | None:
        """The iterations of the scans that only read a value; None: there is no such scan."""
        iterations = None
        while value in self.loop_consts:
            value, site = self.loop_consts[value]
            iterations = (1 if iterations is None else iterations) * site.origin.eqn.params["length"]
        return iterations

    # -- ops

    def local_form(self, op: Op, decision: OpDecision) -> tuple[tuple[Collective, ...], int]:
        """(records of the collectives of the local form of an op, number of its form).

        The form has the fewest exposed seconds; each further one must save ``CompilerModel.min_gain_seconds`` more.
        """
        rule, axes, chip = op.factor_rule, decision.axes or (), self.records.chip
        others = range(1, 1 + len(rule.forms) * (chip is not None))
        sends = [decision.sends, *(local_form_sends(op, decision.operands, list(axes), self.sizes, k) for k in others)]
        forms = [self.records.local_form(op, tuple(s), axes, self.causes, self.count) for s in sends]
        least = 0.0 if chip is None else chip.compiler.min_gain_seconds
        exposed = [k * least + math.fsum((c.seconds or 0.0) - c.hidden for c in sent) for k, sent in enumerate(forms)]
        form = exposed.index(min(exposed))
        return forms[form], form

    def run(self, op: Op, decision: OpDecision) -> None:
        """Append the steps of an op as decided: reductions and reshards of its operands, the op, and reshards of its
        results."""
        for i in decision.reduce:
            value = op.ins[i]
            assert value is not None
            self.reduce(value)
        if decision.is_constant:
            for out, result in zip(op.outs, decision.results, strict=True):
                self.constants.add(out)  # its parts are made where they are read
                self.place(self.interned.shard(out, result.spec, is_constant=True, copy="where read"))
            return
        if decision.axes is not None:
            self.factor_axes[op] = decision.axes
        current, constants = self.current, self.constants
        operands: list[Shard | None] = [None] * len(op.ins)
        moved = []
        for i, (value, need) in enumerate(zip(op.ins, decision.operands, strict=True)):
            if value is not None and need is not None:
                operands[i] = source = current[value]
                if value in constants or source.spec != need:
                    moved.append((i, value, need))
        if len(moved) > 1 and sum(v not in constants for _, v, _ in moved) > 1:
            # shorter chains first: a longer one may end in a copy that a shorter one has made (a sort by keys that are computed)
            moved.sort(key=lambda need: _recomputable_depth(need[1]))
        for i, value, need in moved:
            operands[i] = self.operand(op, value, need)
        pairs = zip(op.outs, decision.results, strict=True)
        results = tuple([self.shard(out, result.spec, result.partial, result.kind) for out, result in pairs])
        step = self.interned.run(op, tuple(operands), results, decision.axes)
        if decision.sends:
            collectives, form = self.local_form(op, decision)
            step = replace(step, collectives=collectives, form=form)
        self.group.append(step)
        for shard, source, stored in zip(results, decision.inherits, decision.stored, strict=True):
            current[shard.value] = shard
            self.placements[shard.value] = Placement(shard, shard)
            if shard.partial:
                self._groups[shard] = self.group
                if source is None:
                    self.pending[shard.value] = op
                else:
                    self.inherit(shard.value, op.ins[source])
            elif stored is not None and stored != shard.spec and self.readers.get(shard.value):
                self.store(op, shard.value)

    def inherit(self, value: Value, source: Value | None) -> None:
        """Record that a value is partial because another one is."""
        if source in self.pending:
            self.pending[value] = self.pending[source]

    # -- copies and reductions

    def store(self, op: Op | None, value: Value) -> Shard:
        """Append the reshard of a result to its stored spec, for all further readers; returns the value's new current shard.

        ``op``: whose result it is; None: of the program.
        """
        source, need = self.current[value], self.stored(value)
        if source.spec == need:
            return source
        cause = functools.partial(self.causes.stored, op, value, source.spec, need)
        path, collectives = self.records.resharding(value, source.spec, need, op, self.count, cause)
        result = self.shard(value, need)
        self.group.append(Reshard(op, source, result, path, tuple(collectives), copy=False))
        if not collectives:  # readers of the larger shard in this body need not gather it again
            self.body.copies.setdefault((value, source.spec), source)
        return self.place(result)

    def reduce(self, value: Value) -> None:
        """Reduce a partial value: reduce-scatters over the axes that split its stored spec further, an all-reduce over the others.

        The step follows the one that made the value, for all further readers.
        """
        source = self.current[value]
        if not source.partial:
            return
        op, stored = self.pending[value], self.stored(value)
        factor_axes = self.factor_axes.get(op, ())
        scatter, reduced = split_reduction(source.spec, stored, source.partial, source.kind)
        spec = source.spec
        scatters: list[Scatter] = []
        collectives: list[Collective] = []
        for i, axes in scatter.items():  # first, so that the smaller shard is all-reduced
            cause = functools.partial(self.causes.scattered, op, factor_axes, value, i, axes)
            records = self.records.reducing("reduce-scatter", axes, value, op, spec, self.count, cause)
            scatters.append(Scatter(i, axes, records[0].algorithm if records else "staged"))
            collectives += records
            spec = spec_after(spec, scatters[-1:])
        if reduced:
            kind = "all-reduce" if is_all_reducible(source.kind, value.aval.dtype) else "all-gather"
            cause = functools.partial(self.causes.all_reduced, op, factor_axes, reduced)
            collectives += self.records.reducing(kind, reduced, value, op, spec, self.count, cause)
        cause = functools.partial(self.causes.stored, op, value, spec, stored)
        path, moves = self.records.resharding(value, spec, stored, op, self.count, cause)
        result = self.shard(value, stored)
        self._groups[source].append(Reduce(op, source, result, path, (*collectives, *moves), tuple(scatters), reduced))
        self.place(result)

    def operand(self, op: Op, value: Value, need: Spec) -> Shard:
        """A value in the spec in which an op needs it."""
        if value in self.constants:
            return self.maker.part(value, need, self.body)
        source = self.current[value]
        return source if source.spec == need else self.copy(op, value, need, Site(op, self.count, self.body))

    def as_it_is(self, value: Value | None) -> Shard | None:
        """A value in its current spec; None for a literal."""
        if value is None:
            return None
        shard = self.current[value]
        return self.maker.part(value, shard.spec, self.body) if value in self.constants else shard

    def copy(self, op: Op, value: Value, need: Spec, site: Site) -> Shard:
        """The shard of a copy of ``value`` in the spec ``need``, made once for each body, at a site or before the loops around it
        that only read the value."""
        loops = []
        while value in self.loop_consts:
            value, site = self.loop_consts[value]
            loops.append(site.origin)
        shard = self._made(op, value, need, site, self._resharded_for(value, need, site.body, {}))
        for loop in loops:
            self.hoisted.setdefault(loop, {})[shard] = None
        return shard

    def _resharded_for(
        self, value: Value, need: Spec, body: BodyBuilder, known: _Resharded, depth: int = MAX_RECOMPUTED_DEPTH
    ) -> Mapping[tuple[Value, Spec], float]:
        """What is resharded for a copy of a value, such that the fewest bytes are sent: (value, spec) → bytes.

        That is the value, or values from which it is recomputed by cheap ops. Weights in 8 bits are gathered as codes and scales.
        Empty if the copy exists, or is recomputed from shards that exist.

        Args:
          known: results for values that were visited.
        """
        part, made = (value, need), self.current[value]
        if part in body.copies or value in self.constants or (made.spec == need and not made.partial):
            return {}
        if part in known:
            return known[part]
        sent = math.inf if made.partial else value_reshard_bytes(value, made.spec, need, self.sizes)
        known[part] = {part: sent}
        op = value.op
        own = (
            made is self.placements[value].stored
        )  # else behind the barrier of a recomputation, which what it is made of is not
        if op is not None and own and depth and is_recomputed(op) and not op.eqn.effects and len(op.outs) == 1:
            needs, axes = inputs_for(value, need, self.sizes)
            if op.rule is None or axes is not None:
                found: dict[tuple[Value, Spec], float] = {}
                for v, spec in needs:
                    found.update(self._resharded_for(v, spec, body, known, depth - 1))
                if not found or sum(found.values()) < sent:
                    known[part] = found
        return known[part]

    def _made(self, op: Op, value: Value, need: Spec, site: Site, resharded: Collection[tuple[Value, Spec]]) -> Shard:
        """A value in the spec in which ``op`` needs it, made at a site from the values that are ``resharded``."""
        body = site.body
        if (value, need) in body.copies or value in self.constants:
            return body.copies.get((value, need)) or self.maker.part(value, need, body)
        source, maker = self.current[value], value.op
        if source.spec == need:
            return source
        if (value, need) not in resharded:
            assert maker is not None
            needs, axes = inputs_for(value, need, self.sizes)
            rest = iter([self._made(op, v, spec, site, resharded) for v, spec in needs])
            operands = tuple(None if v is None else next(rest) for v in maker.ins)
            result = self.shard(value, need, copy=(body.frame, value))
            step: Step = self.interned.run(maker, operands, (result,), None if axes is None else tuple(axes))
        elif value in self.loop_consts:
            return self.copy(op, value, need, site)
        else:
            cause = functools.partial(self.causes.resharded, op, self.factor_axes.get(op, ()), value, source.spec, need)
            path, collectives = self.records.resharding(value, source.spec, need, site.origin, site.count, cause)
            result = self.shard(source.value, need, copy=(body.frame, value))
            step = Reshard(site.origin, source, result, path, tuple(collectives), copy=True)
        body.copies[value, need] = result
        body.deferred.append(step)
        return result
