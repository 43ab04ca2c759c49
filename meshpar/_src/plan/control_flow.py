"""Planning scans, whiles, conds and calls: how their bodies take, carry, read and return values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Literal, Var

from ..compat.jax import body_consts, body_operands, literal_array
from ..compat.loop_operands import LoopParts, loop_parts
from ..layout import Spec
from ..program.ir import Frame, Op, Value
from ..program.primitives import add_row_p
from ..rules.rule import ADDED
from .body_builder import BodyBuilder
from .collectives import split_reduction
from .decide import Facts, add_to_carry
from .deferred_sums import addends
from .emit import Emitter, Site
from .plan import Placement
from .shard_shapes import replicated_spec, value_bytes
from .steps import Barrier, Branch, Call, Constant, Loop, Shard, Step

MakeStep = Callable[[], Step]
"""A function without arguments that makes the step of an op with bodies: a ``Loop``, ``Branch`` or ``Call``.

It is called after the whole program is planned, since steps may be added to the bodies until then.
"""

PlanOps = Callable[[Frame, Sequence[Any]], None]
"""A function of a frame and the constants of its jaxpr that plans the ops of the frame."""

MIN_SCATTERED_ELEMENTS = 2**18
"""Elements (1 MiB in float32) of the smallest gradient that is reduced in each microbatch to save memory."""


@dataclass(slots=True)
class Accumulation:
    """A carry to which a loop only adds: ``carry + addend``; nothing else reads either the carry or the sum.

    Attributes:
      carries: the carry as an input of the body; if an inner loop adds to it, of all bodies, the outer loop's first.
      addend: the value that is added, to the carry or to one row of it.
      start: the shard of a first value that is partial, as another loop left it; None: the first value is input-independent.
    """

    carries: tuple[Value, ...]
    addend: Value
    start: Shard | None


class ControlFlow:
    """Plans scans, while loops, conditionals and calls; made by the planner, once per plan.

    Attributes:
      accumulations: by the op that adds to the carry.
      outer: carries of a scan to which a scan inside of it adds.
      depth: the number of scans around the present op.
      in_each_microbatch: loops whose carries add up gradients gather weights, and reduce gradients, in each iteration.
      unsharded: bytes on a device of the gradients that loops add up without sharding them as they are stored; with
        ``in_each_microbatch`` the device has shards of them.
    """

    def __init__(self, emitter: Emitter, facts: Facts, in_each_microbatch: bool = False):
        self.emitter, self.facts = emitter, facts
        self.accumulations: dict[Op, Accumulation] = {}
        self.outer: set[Value] = set()
        self.depth = 0
        self.in_each_microbatch, self.unsharded = in_each_microbatch, 0.0

    def plan(self, op: Op, plan_ops: PlanOps) -> MakeStep:
        """Plan an op with bodies, and the ops in these by ``plan_ops``; returns a :data:`MakeStep`, which makes the op's step."""
        return _PLAN.get(op.name, ControlFlow.call)(self, op, plan_ops)

    def add(self, op: Op) -> bool:
        """Plan an addition to the carry of a loop, if the carry is partial; else only place the carry."""
        emitter, acc = self.emitter, self.accumulations[op]
        if len(self.facts.readers.get(acc.addend, ())) > 1:
            emitter.reduce(acc.addend)
        addend = emitter.operand_of(acc.addend)
        assert addend is not None
        decision = add_to_carry(op, addend)
        start = acc.start
        if decision is not None and self._scatters(acc.addend):
            if _is_row(op) or self._is_reduced_in_each(acc.addend):
                decision = None  # for rows: no device has room for the unsharded gradients of all layers
            elif math.prod(acc.addend.shape) >= MIN_SCATTERED_ELEMENTS:
                (result,), carry = decision.results, acc.carries[-1]
                self.unsharded += value_bytes(carry, result.spec, emitter.sizes)
        if decision is not None and start is not None:
            (result,) = decision.results
            if (start.spec, start.partial) != (result.spec, result.partial):
                decision = None
        if decision is None:
            for carry in acc.carries:
                emitter.place(emitter.shard(carry, emitter.stored(carry)))
            return False
        (result,) = decision.results
        for carry in acc.carries:
            emitter.place(emitter.shard(carry, result.spec, result.partial))
        emitter.run(op, decision)
        return True

    # -- ops

    def call(self, op: Op, plan_ops: PlanOps) -> MakeStep:
        """A function call: its steps run in place, and the steps of a recomputation behind a barrier."""
        emitter, outer = self.emitter, self.emitter.body
        (frame,), (consts,) = op.frames, body_consts(op.eqn)
        recomputes = op.recomputes
        saved: dict[Value, Shard] = {}
        with emitter.inside(frame) as body:
            # JAX inlines the call: it reads copies that were made before it, and later steps read its own
            if not recomputes:
                body.copies = outer.copies
            for var, value in zip(body_operands(op.eqn, op.eqn.invars), frame.ins(), strict=True):
                if isinstance(var, Literal):
                    emitter.literal(value, var)
            if recomputes:
                saved = self._behind_barrier(op, frame)
            plan_ops(frame, consts)
        emitter.current.update(saved)
        for var, out in zip(frame.jaxpr.outvars, op.outs, strict=True):
            if isinstance(var, Literal):
                emitter.literal(out, var)

        def step() -> Step:
            """The ``Call`` step; steps of copies that nothing in the call reads are deferred to the surrounding body."""
            built = body.body((), ())
            if not recomputes:  # copies that only later steps outside the call read
                placed = set(map(id, built.steps))
                outer.deferred += [s for s in body.deferred if id(s) not in placed]
            return Call(op, built)

        return step

    def _behind_barrier(self, op: Op, frame: Frame) -> dict[Value, Shard]:
        """Put the inputs of a recomputation behind a barrier, so that XLA does not reuse results (and gathered weights) of the
        forward pass, which would have to be saved. Returns the shards before the barrier."""
        emitter = self.emitter
        inputs = [v for v in frame.ins() if v not in emitter.constants]
        shards = {v: emitter.current[v] for v in inputs}
        saved = {v: s for v, s in shards.items() if not s.partial and not s.is_constant}
        copies = {v: emitter.shard(s.value, s.spec, copy=(frame, v)) for v, s in saved.items()}
        emitter.new_group().append(Barrier(op, tuple(saved.values()), tuple(copies.values())))
        emitter.current.update(copies)
        return saved

    def scan(self, op: Op, plan_ops: PlanOps) -> MakeStep:
        """Plan a scan and its body; returns a :data:`MakeStep`, which makes its ``Loop`` step after the whole program
        is planned.

        Carries are sharded as stored, and the slices of stacked operands as these are. Carries to which the body only
        adds, and stacked results of inner scans, may stay partial; they are then reduced after the loop.
        """
        emitter, current = self.emitter, self.emitter.current
        parts = loop_parts(op.eqn)
        (frame,), (consts,) = op.frames, body_consts(op.eqn)
        inner = frame.ins()
        _, inner_carries, inner_slices = parts.split(inner)
        accumulations = self._find_accumulations(op, frame, parts)
        self._reduce_operands(op, {op.ins[parts.carries[k]] for k in accumulations})
        # weights are gathered in each microbatch, so copies of them stay in the body
        hoist = not (self.in_each_microbatch and accumulations and self.depth == 0)
        read = [self._reads(op, i, op.ins[i], inner[i], hoist) for i in parts.consts]
        inits: dict[int, Shard] = {}
        for k, (i, w) in enumerate(zip(parts.carries, inner_carries, strict=True)):
            if k not in accumulations:
                inits[k] = self._enters(op, i, op.ins[i], emitter.stored(w))
                emitter.place(emitter.shard(w, emitter.stored(w)))
        stacks = []
        for i, w in zip(parts.stacks, inner_slices, strict=True):
            v = op.ins[i]
            spec = replicated_spec(len(w.shape)) if v is None else current[v].spec[1:]
            stacks.append(self._enters(op, i, v, ((), *spec)))
            emitter.place(emitter.shard(w, spec))
        self.depth += 1
        stacks_several = op.eqn.params["length"] > 1
        with emitter.inside(frame) as body:
            slices = [current[w] for w in inner_slices]
            plan_ops(frame, consts)
            carried = [emitter.placements[w].made for w in inner_carries]
            partial = {
                k
                for k, value in enumerate(frame.outs())
                if value is not None
                and value not in emitter.constants
                and current[value].partial
                and (
                    k in accumulations
                    or (k >= len(carried) and self.depth > 1 and (not stacks_several or not self._scatters(value)))
                )
            }  # they are reduced after this loop, or after the one around it
            needs: list[Spec | None] = [s.spec for s in carried]
            outputs = self._leaves(op, frame, needs + [None] * (len(op.outs) - len(carried)), partial)
            for k in accumulations:
                first, last = carried[k], outputs[k]
                alike = not first.partial or (first.spec, first.partial) == (last.spec, last.partial)
                assert alike, f"carry {k} of the loop at {op.source} is partial in another way than its sum"
        self.depth -= 1
        for k in accumulations:
            i = parts.carries[k]
            start = op.ins[i]
            if start is not None and not carried[k].partial:
                emitter.reduce(start)
            inits[k] = self._enters(op, i, start, carried[k].spec)
        results = []
        for k, (out, shard) in enumerate(zip(op.outs, outputs, strict=True)):
            spec = shard.spec if k < len(carried) else ((), *shard.spec)
            results.append(emitter.place(emitter.shard(out, spec, shard.partial, shard.kind)))
            if k in partial:
                emitter.inherit(out, shard.value)
            else:
                emitter.store(op, out)
        first = [inits[k] for k in range(len(carried))]
        return self._loop(op, read, first, stacks, [(body, [*carried, *slices], outputs)], results)

    def while_(self, op: Op, plan_ops: PlanOps) -> MakeStep:
        """Plan a while loop, its condition and its body; returns a :data:`MakeStep` for its ``Loop`` step.

        Carries are sharded as stored, in the condition and in the body.
        """
        emitter, parts = self.emitter, loop_parts(op.eqn)
        self._reduce_operands(op)
        cond, body = op.frames
        carry = parts.carried(body.ins())
        stored = [emitter.stored(w) for w in carry]
        inits = [self._enters(op, i, op.ins[i], spec) for i, spec in zip(parts.carries, stored, strict=True)]
        carried = [emitter.place(emitter.shard(w, spec)) for w, spec in zip(carry, stored, strict=True)]
        read = []
        for frame, consts in ((cond, parts.condition), (body, parts.consts)):
            read += [self._reads(op, i, op.ins[i], w, hoist=False) for i, w in zip(consts, frame.ins(), strict=False)]
        bodies = []
        for frame, needs, consts in zip((cond, body), ([()], stored), body_consts(op.eqn), strict=True):
            for shard in carried:
                emitter.current[shard.value] = shard
            with emitter.inside(frame) as builder:
                plan_ops(frame, consts)
                bodies.append((builder, carried, self._leaves(op, frame, needs)))
        results = []
        for out, shard in zip(op.outs, bodies[1][2], strict=True):
            results.append(emitter.place(emitter.shard(out, shard.spec)))
            emitter.store(op, out)
        return self._loop(op, read, inits, [], bodies, results)

    def _loop(
        self, op: Op, read: Sequence[Shard], inits: Sequence[Shard], stacks: Sequence[Shard],
        bodies: Sequence[tuple[BodyBuilder, Sequence[Shard], Sequence[Shard]]], results: Sequence[Shard],
    ) -> MakeStep:  # fmt: skip
        """A function that makes the ``Loop`` step of a scan or while loop.

        Args:
          read: the shards that the bodies read and do not change.
          inits: the initial carries.
          stacks: the stacked operands of a scan.
          bodies: of each body, (builder, its inputs, its outputs): a scan has one, a while loop its condition and its
              body.
          results: the results of the loop.
        """
        hoisted = self.emitter.hoisted  # without the emitter, which refers to the function
        return lambda: Loop(
            op, tuple(dict.fromkeys(read)), tuple(hoisted.get(op, ())), tuple(inits), tuple(stacks),
            tuple(body.body(inputs, outputs) for body, inputs, outputs in bodies), tuple(results),
        )  # fmt: skip

    def cond(self, op: Op, plan_ops: PlanOps) -> MakeStep:
        """Plan a conditional and its branches; returns a :data:`MakeStep` for its ``Branch`` step.

        All branches return the results in their stored specs.
        """
        emitter = self.emitter
        self._reduce_operands(op)
        index = emitter.as_it_is(op.ins[0])
        stored = [emitter.stored(out) for out in op.outs]
        bodies, read = [], []
        for frame, consts in zip(op.frames, body_consts(op.eqn), strict=True):
            operands = enumerate(zip(op.ins[1:], frame.ins(), strict=True), 1)
            read += [self._reads(op, i, v, w, hoist=False) for i, (v, w) in operands]
            with emitter.inside(frame) as body:
                plan_ops(frame, consts)
                bodies.append((body, self._leaves(op, frame, stored)))
        results = [emitter.place(emitter.shard(out, spec)) for out, spec in zip(op.outs, stored, strict=True)]
        read, results = tuple(dict.fromkeys(read)), tuple(results)
        return lambda: Branch(op, index, read, tuple(body.body((), outputs) for body, outputs in bodies), results)

    # -- what crosses the boundary of a body

    def _reduce_operands(self, op: Op, but: Collection[Value | None] = ()) -> None:
        """Reduce the partial operands of an op, but not some of them."""
        for value in op.ins:
            if value is not None and value not in but:
                self.emitter.reduce(value)

    def _reads(self, op: Op, i: int, outer: Value | None, inner: Value, hoist: bool = True) -> Shard:
        """The shard of a value that bodies only read (``outer`` outside, ``inner`` inside), sharded as it is outside.

        Args:
          hoist: copies of it may be made before the loop.
        """
        emitter = self.emitter
        if outer is None:
            return emitter.literal(inner, op.eqn.invars[i])
        shard = emitter.as_it_is(outer)
        assert shard is not None
        emitter.current[inner] = shard
        emitter.placements[inner] = Placement(shard, shard)
        if hoist and outer is not inner:
            emitter.loop_consts[inner] = outer, Site(op, emitter.count, emitter.body)
        return shard

    def _enters(self, op: Op, i: int, outer: Value | None, need: Spec) -> Shard:
        """A value that a loop takes, in the spec in which its body takes it."""
        if outer is not None:
            return self.emitter.operand(op, outer, need)
        return self._literal(op, op.eqn.invars[i], need)

    def _leaves(
        self, op: Op, frame: Frame, needs: Sequence[Spec | None], partial: set[int] | frozenset[int] = frozenset()
    ) -> list[Shard]:
        """The outputs of a body, as shards in the specs that are needed.

        Args:
          needs: for each output its spec; None: the current spec of the value.
          partial: positions of outputs that are not reduced, and retain their spec.
        """
        emitter, outputs = self.emitter, []
        for k, (var, need) in enumerate(zip(frame.jaxpr.outvars, needs, strict=True)):
            if isinstance(var, Literal):
                outputs.append(self._literal(op, var, replicated_spec(np.ndim(var.val)) if need is None else need))
                continue
            value = frame.env[var]
            if k not in partial:
                emitter.reduce(value)
            current = emitter.current[value].spec
            outputs.append(emitter.operand(op, value, current if need is None or k in partial else need))
        return outputs

    def _literal(self, op: Op, var: Var | Literal, spec: Spec) -> Shard:
        # no value of the program
        shard = Shard(Value(var.aval, (-1,) * len(spec)), spec, is_constant=True)
        self.emitter.body.deferred.append(Constant(op, shard, literal_array(var)))
        return shard

    def _scatters(self, value: Value) -> bool:
        """Whether reducing a partial value would split it further."""
        s = self.emitter.current[value]
        scatter, _ = split_reduction(s.spec, self.emitter.stored(value), s.partial, s.kind)
        return bool(scatter) or s.kind not in ADDED

    # -- carries that accumulate

    def _is_reduced_in_each(self, addend: Value) -> bool:
        """Whether a gradient is reduced in each microbatch. A small one is not: it saves little memory, and each collective has a
        latency."""
        return self.in_each_microbatch and math.prod(addend.shape) >= MIN_SCATTERED_ELEMENTS

    def _find_accumulations(self, op: Op, frame: Frame, parts: LoopParts) -> set[int]:
        """The positions of the carries to which a scan only adds; they are recorded.

        They start from an input-independent value, or from a partial sum that nothing else reads: the result of another loop.
        """
        positions = set()
        (_, starts, _), (_, carries, _) = parts.split(op.ins), parts.split(frame.ins())
        for k, (start, carry) in enumerate(zip(starts, carries, strict=True)):
            if start in self.outer:  # the loop around this one has recorded it
                positions.add(k)
                continue
            found = _addition(frame, k, carry)
            if found is None:
                continue
            first = None if start is None or start in self.emitter.constants else self.emitter.current[start]
            if first is not None and not (
                first.partial and first.kind in ADDED and len(self.facts.readers.get(first.value, ())) == 1
            ):
                continue
            positions.add(k)
            add, addend, chain = found
            self.outer.update(chain[:-1])
            self.accumulations[add] = Accumulation(chain, addend, first)
            # the addend is computed from these values by ops that partial values may pass
            for value, stacked in addends(self.facts.assignment.program, addend):
                self.facts.accumulated[value] = stacked or _is_row(add) or self._is_reduced_in_each(value)
        return positions


_PLAN = {"scan": ControlFlow.scan, "while": ControlFlow.while_, "cond": ControlFlow.cond}
"""By primitive; all others are calls, whose bodies are planned in place."""


def _is_row(op: Op) -> bool:
    """Whether an op adds to one row of a carry, and the row is not ``late``: as an inner loop that stacks rows."""
    return op.eqn.primitive is add_row_p and not op.eqn.params["late"]


def _addition(frame: Frame, k: int, carry: Value) -> tuple[Op, Value, tuple[Value, ...]] | None:
    """How the body of a scan only adds to carry k: (the addition, the addend, the carry as an input of this body and of the scans
    inside that add to it); None: it does not only add to it.

    Several scans of the body may add to it, one after another; the result is about the first one. The others start from a partial
    sum, as a scan after a scan does.
    """
    outs, uses = frame.outs(), dict[Value, int]()
    for v in (*(v for o in frame.ops for v in o.ins), *outs):
        if v is not None:
            uses[v] = uses.get(v, 0) + 1
    total = outs[k]
    while True:
        op = None if total is None else total.op
        if total is None or op is None or op.frame is not frame or uses[total] != 1:
            return None
        if op.primitive.family != "scan":
            break
        carries, j, (inner,) = loop_parts(op.eqn).carries, op.outs.index(total), op.frames
        found = _addition(inner, j, inner.ins()[carries[j]]) if j < len(carries) else None
        if found is None:
            return None
        total = op.ins[carries[j]]
        if total is carry:
            return (*found[:2], (carry, *found[2])) if uses[carry] == 1 else None
    if total is not outs[k] or uses.get(carry) != 1:
        return None
    a, b = op.ins[:2] if len(op.ins) > 1 else (None, None)
    if op.eqn.primitive is add_row_p:
        addend = b if a is carry else None
    elif op.primitive.family == "add":
        addend = b if a is carry else a if b is carry else None
    else:
        return None
    rank = len(carry.shape) - (op.eqn.primitive is add_row_p)
    if addend is None or addend is carry or addend.shape != carry.shape[len(carry.shape) - rank :]:
        return None
    return op, addend, (carry,)
