"""Rewrites a loop over microbatches as loops over the ticks of a schedule.

In every tick, all stages run a slot of each layer loop. The values between two slots of a loop move to the next stage by
``jnp.roll``. A value that is read in a later tick than it is made is stored in a *ring*, an array with a row for each of the last
ticks. Idle slots compute values as well; nothing that they compute is added to a result.

The ticks are divided into phases, in which the same loops are active, and each phase is one scan: for 1F1B, forward slots alone,
forward and backward slots, and backward slots alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from ...compat.jax import at_line_of, bind, scan_counts, with_weak_type
from .schedule import Schedule
from .segments import CONSTANT, INVARIANT, Body, Stack
from .slots import Stages, Time, run_slot, zeros


@dataclass(eq=False, slots=True)
class _Needs:
    """The equations that segments and slots run, and the values that are stored for later ticks.

    Attributes:
      eqns: by place (a segment, ``INVARIANT``), its equations and the constants' equations, without dead ones.
      stack_eqns: by loop, the elementwise equations of its stacks.
      wanted: by place, the variables that other places read.
      lags: variable → the most ticks between its making and a reading; absent: it is read in its own tick only.
    """

    eqns: dict[int, list[Any]] = field(default_factory=dict)
    stack_eqns: dict[int, list[Any]] = field(default_factory=dict)
    wanted: dict[Any, set[Any]] = field(default_factory=dict)
    lags: dict[Any, int] = field(default_factory=dict)


class TickLoops:
    """The loops over ticks of one microbatch loop.

    Attributes:
      eqn: the microbatch loop.
      body: its body, in segments.
      schedule, stages: of the pipeline.
      offsets: the tick at which each segment runs for microbatch 0.
      slot_times: the times of the slots of each loop.
    """

    def __init__(self, eqn: Any, body: Body, schedule: Schedule, dim: str):
        """Loops for a schedule; ``dim``: the name of the stacked dim."""
        self.eqn, self.body, self.schedule = eqn, body, schedule
        self.stages = Stages(schedule.stages, dim)
        k = schedule.stages
        self.offsets = (0, *(start + k - 1 for start in schedule.starts))
        self.slot_times = [
            Time(start + k - 1, -1) if loop.params["reverse"] else Time(start, 1)
            for start, loop in zip(schedule.starts, body.loops, strict=True)
        ]
        self.needs = self._needs()
        self.spans = {v: self._span(v) for v in self.needs.lags}

    # -- when

    def _segment_time(self, j: int) -> Time:
        return Time(self.offsets[j])

    def made_at(self, var: Any) -> Time:
        """When a variable is made."""
        place = self.body.place(var)
        return self.slot_times[place.loop] if isinstance(place, Stack) else self._segment_time(max(place, 0))

    def phases(self) -> list[range]:
        """The ticks of each phase."""
        n, m, slots = len(self.body.loops), self.schedule.microbatches, self.schedule.slots
        cuts = {c for start in self.schedule.starts for c in (start, start + slots)}
        for j in range(1, max(n, 2)):  # the last segment of a training step is small: it runs in idle ticks as well
            cuts |= {self.offsets[j], self.offsets[j] + m}
        ordered = sorted(cuts)
        return [range(a, b) for a, b in itertools.pairwise(ordered)]

    def runs(self, place: Any, phase: range) -> bool:
        """Whether a segment or slot runs in a phase."""
        if isinstance(place, Stack):
            start, length = self.schedule.starts[place.loop], self.schedule.slots
        else:
            start, length = self.offsets[place], self.schedule.microbatches
        return phase.start < start + length and phase.stop > start

    def enters(self, i: int, phase: range) -> bool:
        """Whether microbatches enter loop i in a phase; else the last ones leave it."""
        start = self.schedule.starts[i]
        return phase.start < start + self.schedule.microbatches and phase.stop > start

    def _span(self, var: Any) -> range:
        """The ticks in which a variable is made."""
        place = self.body.place(var)
        phases = [p for p in self.phases() if self.runs(place if isinstance(place, Stack) else max(place, 0), p)]
        return range(phases[0].start, phases[-1].stop)

    # -- needed equations

    def _needs(self) -> _Needs:
        """Walk backwards over segments and loops, from the results."""
        body, needs = self.body, _Needs()
        for j in range(len(body.loops), -1, -1):
            for var in self._segment_results(j):
                self._read(needs, var, self._segment_time(j), j)
            self._close(needs, j)
            if j:
                i = j - 1
                self._close_stack(needs, i)
                eqn, consts = body.loops[i], scan_counts(body.loops[i].params)
                for p, var in enumerate(eqn.invars):
                    entry = consts[0] <= p < sum(consts)
                    self._read(needs, var, Time(self.schedule.starts[i]) if entry else self.slot_times[i], None)
        self._close(needs, INVARIANT)
        return needs

    def _segment_results(self, j: int) -> Iterable[Any]:
        """The variables from which results are made in segment j; of stacks, in the slots of the loop before."""
        body = self.body
        for k, out in enumerate(body.outs):
            if k < len(body.carries):
                if k in body.accumulators:
                    out = body.accumulators[k].addend
                    if isinstance(body.place(out), Stack):
                        continue
                elif out is body.carries[k]:
                    continue
            if body.segment(out) == j and not isinstance(out, Literal):
                yield out

    def _read(self, needs: _Needs, var: Any, time: Time, place: Any) -> None:
        """Record that a variable is read at a time, in segment ``place`` (None: in a slot)."""
        made = self.body.place(var)
        if isinstance(var, Literal):
            return
        if made == CONSTANT:
            needs.wanted.setdefault(INVARIANT if place is None else place, set()).add(var)
            return
        needs.wanted.setdefault(made, set()).add(var)
        if made == INVARIANT or var in self._xs:
            return
        lag = time.after(self.made_at(var), self.stages.count)
        if lag or isinstance(made, Stack) or time.step:
            needs.lags[var] = max(lag, needs.lags.get(var, 0))

    @property
    def _xs(self) -> Mapping[Any, int]:
        return {v: i for i, v in enumerate(self.body.xs)}

    def _close(self, needs: _Needs, place: int) -> None:
        """Find the equations that a segment needs, and record the values that they read."""
        wanted, live = set(needs.wanted.get(place, ())), []
        for eqn in reversed(self.body.eqns):
            if self.body.place(eqn.outvars[0]) in (place, CONSTANT) and wanted & set(eqn.outvars):
                live.append(eqn)
                wanted.update(v for v in eqn.invars if not isinstance(v, Literal))
        made = {v for eqn in live for v in eqn.outvars}
        needs.eqns[place] = live[::-1]
        if place >= 0:
            needs.wanted.setdefault(place, set()).update(wanted)  # also results of the loop before
            for var in wanted - made:
                if self.body.place(var) != place or var in self.body.carries:
                    self._read(needs, var, self._segment_time(place), place)
        else:
            needs.wanted.setdefault(INVARIANT, set()).update(wanted)

    def _close_stack(self, needs: _Needs, i: int) -> None:
        """Find the elementwise equations of the stacks of loop i that are needed."""
        place = Stack(i)
        wanted = set(needs.wanted.get(place, ()))
        wanted |= {a.addend for a in self.body.accumulators.values() if self.body.place(a.addend) == place}
        live = []
        for eqn in reversed(self.body.eqns):
            if self.body.place(eqn.outvars[0]) == place and wanted & set(eqn.outvars):
                live.append(eqn)
                wanted.update(v for v in eqn.invars if not isinstance(v, Literal))
        needs.stack_eqns[i] = live[::-1]

    # -- running

    def __call__(self, *args: Any) -> list[Any]:
        """The results of the microbatch loop, given its operands."""
        nc, nk = scan_counts(self.eqn.params)
        body, needs = self.body, self.needs
        known: dict[Any, Any] = dict(zip(body.consts, args[:nc], strict=True))
        known.update((c, x) for c, x, out in zip(body.carries, args[nc : nc + nk], body.outs, strict=False) if out is c)
        evaluate(needs.eqns[INVARIANT], known, known.__getitem__)
        divided = {
            v: self.stages.divided(known[v])
            for eqn in body.loops
            for v in eqn.invars[sum(scan_counts(eqn.params)) :]
            if v in known
        }
        state = self._first_state(args[nc : nc + nk])
        results: dict[int, list[Any]] = {}
        # the copy is a loop over the microbatches: inference then gives the name of the batch to the rows of a microbatch
        xs = lax.scan(lambda _, x: (None, x), None, list(args[nc + nk :]), length=self.schedule.microbatches)[1]
        for phase in self.phases():
            tick = _Tick(self, phase, known, divided, dict(zip(body.xs, xs, strict=True)))
            state, outs = lax.scan(tick, state, jnp.arange(phase.start, phase.stop, dtype=np.int32))
            for k, out in outs.items():
                results.setdefault(k, []).append(out)
        return [self._result(k, out, args, known, state, results) for k, out in enumerate(body.outs)]

    def _first_state(self, carries: Sequence[Any]) -> dict[str, dict[Any, Any]]:
        """The state before the first tick: carries and accumulators, rings, and the results of the slots before."""
        body, rings = self.body, {}
        first: dict[Any, Any] = {}
        for k, (init, out) in enumerate(zip(carries, body.outs, strict=False)):
            if k in body.accumulators and isinstance(body.place(body.accumulators[k].addend), Stack):
                first[k] = self.stages.divided(init)
            elif out is not body.carries[k]:
                first[k] = init
        for var, span in self.spans.items():
            size = min(self.needs.lags[var] + 1, len(span))
            aval = var.aval
            if isinstance(body.place(var), Stack):
                parts = (size, aval.shape[0] // self.stages.count, self.stages.count, *aval.shape[1:])
                rings[var] = self.stages.named(zeros(parts, aval.dtype), 2)
            else:
                rings[var] = zeros((size, *aval.shape), aval.dtype)
        sent = {}
        for i, eqn in enumerate(body.loops):
            consts, count = scan_counts(eqn.params)
            sent[i] = [self.stages.zeros(v.aval) for v in eqn.invars[consts : consts + count]]
        return {"carries": first, "rings": {self.ring_key(v): r for v, r in rings.items()}, "sent": sent}

    def ring_key(self, var: Any) -> int:
        """The position of a ring in the state."""
        return list(self.spans).index(var)

    def _result(self, k: int, out: Any, args: Sequence[Any], known: Mapping[Any, Any], state: Any, results: Any) -> Any:
        """Result k of the microbatch loop."""
        nc, nk = scan_counts(self.eqn.params)
        body, m = self.body, self.schedule.microbatches
        aval = self.eqn.outvars[k].aval
        if k < nk:
            if out is body.carries[k]:
                return args[nc + k]
            value = state["carries"][k]
            if k in body.accumulators and isinstance(body.place(body.accumulators[k].addend), Stack):
                value = self.stages.joined(value)
        elif isinstance(out, Literal) or body.place(out) == INVARIANT:
            one = out.val if isinstance(out, Literal) else known[out]
            value = jnp.broadcast_to(jnp.asarray(one, aval.dtype), aval.shape)
        else:
            j = body.segment(out)
            first = next(p.start for p in self.phases() if self.runs(j, p))
            value = jnp.concatenate(results[k])[self.offsets[j] - first :][:m]
            value = value[::-1] if self.eqn.params["reverse"] else value
        return with_weak_type(jnp.asarray(value), aval.weak_type)


class _Tick:
    """One tick of a phase, as the body of a scan: (state, tick) → (state, stacked results).

    Attributes:
      loops: the loops over ticks.
      phase: the ticks of the phase.
      known: the values that all microbatches have.
      divided: the stacked values among them, divided into stages.
      xs: the stacked operands of the microbatch loop.
      state, tick: of the present call.
      env: the values that this tick has made.
    """

    def __init__(
        self,
        loops: TickLoops,
        phase: range,
        known: Mapping[Any, Any],
        divided: Mapping[Any, Any],
        xs: Mapping[Any, Any],
    ):
        """A tick of a phase; the arguments are attributes of the class."""
        self.loops, self.phase, self.known, self.divided, self.xs = loops, phase, known, divided, xs
        self.body, self.stages, self.schedule = loops.body, loops.stages, loops.schedule
        self.state: Any = None
        self.tick: Any = None
        self.env: dict[Any, Any] = {}

    def __call__(self, state: Any, tick: Any) -> tuple[Any, dict[int, Any]]:
        """The state after a tick, and the results that are stacked."""
        self.state = {name: dict(values) for name, values in state.items()}
        self.tick, self.env, outs = tick, {}, {}
        for j in range(len(self.body.loops) + 1):
            if self.loops.runs(j, self.phase):
                outs.update(self.segment(j))
            if j < len(self.body.loops) and self.loops.runs(Stack(j), self.phase):
                self.slot(j)
        return self.state, outs

    # -- segments

    def segment(self, j: int) -> dict[int, Any]:
        """Run segment j for its microbatch; returns the results that are stacked."""
        loops, body, needs = self.loops, self.body, self.loops.needs
        time = Time(loops.offsets[j])
        local: dict[Any, Any] = {}
        lookup: Callable[[Any], Any] = lambda v: self.read(v, time)  # noqa: E731
        before = {k: self.state["carries"].get(k) for k in range(len(body.carries))}
        for k, carry in enumerate(body.carries):
            if body.place(carry) == j and k in before and before[k] is not None and k not in body.accumulators:
                self.env[carry] = before[k]
        evaluate(needs.eqns.get(j, []), local, lookup)
        self.env.update((v, x) for v, x in local.items() if body.place(v) == j)
        value = lambda v: v.val if isinstance(v, Literal) else local[v] if v in local else lookup(v)  # noqa: E731
        microbatch = self.tick - time.start
        valid = (microbatch >= 0) & (microbatch < self.schedule.microbatches)
        outs: dict[int, Any] = {}
        for k, out in enumerate(body.outs):
            accumulator = body.accumulators.get(k)
            if accumulator is not None:
                if isinstance(body.place(accumulator.addend), Stack) or body.segment(accumulator.addend) != j:
                    continue
                total, x = before[k], jnp.asarray(value(accumulator.addend))
                self.state["carries"][k] = total + lax.select(valid, x, jnp.zeros(x.shape, x.dtype))
            elif body.segment(out) != j or out in body.carries[k : k + 1]:
                continue
            elif k < len(body.carries):
                self.state["carries"][k] = lax.select(valid, jnp.asarray(value(out)), before[k])
            elif not isinstance(out, Literal) and body.place(out) != INVARIANT:
                outs[k] = value(out)
        for var in loops.spans:
            if body.place(var) == j:
                self.store(var, self.env[var])
        return outs

    # -- slots

    def slot(self, i: int) -> None:
        """Run a slot of loop i on all stages."""
        body, stages, eqn = self.body, self.stages, self.body.loops[i]
        nc, nk = scan_counts(eqn.params)
        time = self.loops.slot_times[i]
        first, last = (stages.count - 1, 0) if time.step < 0 else (0, stages.count - 1)
        consts, per_stage = [], []
        for v in eqn.invars[:nc]:
            own = not isinstance(v, Literal) and v not in self.known
            consts.append(self.rows(v, time) if own else v.val if isinstance(v, Literal) else self.known[v])
            per_stage.append(own)
        start = Time(self.schedule.starts[i])
        with at_line_of(eqn):
            carries = self.state["sent"][i]
            if self.loops.enters(i, self.phase):
                inits = [self.read(v, start) for v in eqn.invars[nc : nc + nk]]
                carries = [stages.entering(x, y, first) for x, y in zip(inits, carries, strict=True)]
            else:
                carries = [stages.moved(x, first) for x in carries]
            stacks = [self.divided[v] if v in self.divided else self.stack_rows(v, time) for v in eqn.invars[nc + nk :]]
            added = [k for k, a in body.accumulators.items() if body.place(a.addend) == Stack(i)]
            stored = [var for var in self.loops.spans if body.place(var) == Stack(i)]
            totals, split = [self.state["carries"][k] for k in added], self.of_layer(i, added, stored)
            done, made, totals = run_slot(eqn, stages.count, consts, per_stage, carries, stacks, totals, split)
        self.state["sent"][i] = done = [stages.named(x) for x in done]
        self.state["carries"].update(zip(added, totals, strict=True))
        for var, x in zip(stored, made, strict=True):
            self.store(var, stages.named(x, 1))
        if self.loops.runs(i + 1, self.phase):
            for var, x in zip(eqn.outvars[:nk], done, strict=True):
                if var in self.loops.needs.wanted.get(i + 1, ()):
                    self.env[var] = stages.of_stage(x, last)

    def of_layer(
        self, i: int, added: Sequence[int], stored: Sequence[Any]
    ) -> Callable[[list[Any]], tuple[list[Any], list[Any]]]:
        """The function by which one layer of loop i divides its stacked results, each [K, …].

        Returns:
          Results → (the values of the variables ``stored``, the addends of the accumulators ``added``: zeros for idle stages).
        """
        body, stages, time = self.body, self.stages, self.loops.slot_times[i]
        eqn, eqns = body.loops[i], self.loops.needs.stack_eqns[i]
        microbatch = self.tick - (time.start + time.step * stages.index())
        valid = (microbatch >= 0) & (microbatch < self.schedule.microbatches)

        def split(made: list[Any]) -> tuple[list[Any], list[Any]]:
            """The results of one layer that are stored, and those that are added."""
            outs = eqn.outvars[scan_counts(eqn.params)[1] :]
            local = dict(zip(outs, map(stages.named, made), strict=True))
            evaluate(eqns, local, local.__getitem__)
            addends = [local[body.accumulators[k].addend] for k in added]
            rows = [stages.select(valid, x, jnp.zeros(x.shape, x.dtype)) for x in addends]
            return [local[var] for var in stored], rows

        return split

    # -- values of other ticks

    def store(self, var: Any, x: Any) -> None:
        """Write a value into the row of this tick of its ring."""
        key = self.loops.ring_key(var)
        ring = self.state["rings"][key]
        row = lax.rem(self.tick - self.loops.spans[var].start, np.int32(ring.shape[0]))
        self.state["rings"][key] = lax.dynamic_update_index_in_dim(ring, x, row, 0)

    def row(self, var: Any, ticks_ago: Any) -> Any:
        """The row of a variable's ring that was written so many ticks ago: a scalar, or [K]."""
        size = self.state["rings"][self.loops.ring_key(var)].shape[0]
        return jnp.mod(self.tick - ticks_ago - self.loops.spans[var].start, np.int32(size))

    def read(self, var: Any, time: Time) -> Any:
        """The value that a segment reads, of the microbatch that it runs for."""
        if isinstance(var, Literal):
            return var.val
        if var in self.known:
            return self.known[var]
        if var in self.xs:
            return lax.dynamic_index_in_dim(self.xs[var], self.position(self.tick - time.start), 0, keepdims=False)
        if isinstance(self.body.place(var), Stack):
            return self.stages.joined(self.stack_rows(var, time))
        lag = time.start - self.loops.made_at(var).start
        if lag == 0:
            return self.env[var]
        ring = self.state["rings"][self.loops.ring_key(var)]
        return lax.dynamic_index_in_dim(ring, self.row(var, lag), 0, keepdims=False)

    def position(self, microbatch: Any) -> Any:
        """The index of a microbatch in the stacked operands of the microbatch loop."""
        m = self.schedule.microbatches
        at = jnp.clip(microbatch, 0, m - 1)
        return m - 1 - at if self.loops.eqn.params["reverse"] else at

    def ticks_ago(self, made: Time, time: Time) -> Any:
        """[K]: for each stage, how many ticks before a time a value was made."""
        return (time.start - made.start) + (time.step - made.step) * self.stages.index()

    def rows(self, var: Any, time: Time) -> Any:
        """[K, …]: for each stage, the value of its microbatch."""
        if var in self.xs:
            at = self.position(self.tick - (time.start + time.step * self.stages.index()))
            return self.stages.rows(self.xs[var], at, -1)
        ring = self.state["rings"][self.loops.ring_key(var)]
        return self.stages.rows(ring, self.row(var, self.ticks_ago(self.loops.made_at(var), time)), -1)

    def stack_rows(self, var: Any, time: Time) -> Any:
        """[L / K, K, …]: for each stage, its part of a stack, of its microbatch."""
        stages = self.stages
        if var in self.xs:
            at = self.position(self.tick - (time.start + time.step * stages.index()))
            ring = self.xs[var]
        else:
            ring = self.state["rings"][self.loops.ring_key(var)]
            at = self.row(var, self.ticks_ago(self.loops.made_at(var), time))
        if not isinstance(self.body.place(var), Stack):  # [R, L, …]
            size, layers = ring.shape[:2]
            ring = stages.named(jnp.reshape(ring, (size, stages.count, layers // stages.count, *ring.shape[2:])), 1)
            return jnp.swapaxes(stages.rows(ring, at, 0), 0, 1)
        return jnp.swapaxes(stages.rows(ring, at, 1), 0, 1)


def evaluate(eqns: Iterable[Any], env: dict[Any, Any], lookup: Callable[[Any], Any]) -> None:
    """Run equations, and add their results to ``env``; ``lookup`` gives the other operands."""
    for eqn in eqns:
        args = [v.val if isinstance(v, Literal) else env[v] if v in env else lookup(v) for v in eqn.invars]
        with at_line_of(eqn):
            outs = bind(eqn, args, eqn.params)
        env.update(zip(eqn.outvars, outs, strict=True))


def one_microbatch(eqn: Any, stages: Stages) -> Callable[..., list[Any]]:
    """A function of the operands of a layer loop without a loop over microbatches: K ticks, in each of which one stage is active.

    Returns:
      A function that returns the results of the loop.
    """
    nc, nk = scan_counts(eqn.params)
    time = Time(stages.count - 1, -1) if eqn.params["reverse"] else Time(0, 1)
    first, last = (stages.count - 1, 0) if time.step < 0 else (0, stages.count - 1)

    def run(*args: Any) -> list[Any]:
        """The results of the loop."""
        consts, inits = args[:nc], args[nc : nc + nk]
        stacks = [stages.divided(x) for x in args[nc + nk :]]
        if not nk:  # no layer needs another one: all stages are active at once
            made = [
                stages.joined(stages.named(x, 1))
                for x in run_slot(eqn, stages.count, consts, (False,) * nc, [], stacks)[1]
            ]
            return [with_weak_type(x, v.aval.weak_type) for x, v in zip(made, eqn.outvars, strict=True)]

        def tick(state: Any, tick: Any) -> tuple[Any, None]:
            """Run one slot on all stages, and store the stacks of the active one."""
            sent, stored = state
            carries = [stages.entering(x, y, first) for x, y in zip(inits, sent, strict=True)]
            done, made, _ = run_slot(eqn, stages.count, consts, (False,) * nc, carries, stacks)
            active = time.start + time.step * stages.index() == tick
            stored = [stages.merged(active, new, old) for new, old in zip(made, stored, strict=True)]
            return ([stages.named(x) for x in done], stored), None

        made = [v.aval for v in eqn.outvars[nk:]]
        parts = [(x.shape[0] // stages.count, stages.count, *x.shape[1:]) for x in made]
        empty = [stages.named(zeros(shape, x.dtype), 1) for shape, x in zip(parts, made, strict=True)]
        sent = [stages.zeros(v.aval) for v in eqn.invars[nc : nc + nk]]
        (sent, stored), _ = lax.scan(tick, (sent, empty), jnp.arange(stages.count, dtype=np.int32))
        outs = [*(stages.of_stage(x, last) for x in sent), *map(stages.joined, stored)]
        return [with_weak_type(x, v.aval.weak_type) for x, v in zip(outs, eqn.outvars, strict=True)]

    return run
