"""Rewrites a loop over microbatches as loops over the ticks of a schedule.

In every tick, all stages run a slot of each layer loop. The values between two slots of a loop move to the next stage by
``jnp.roll``. A value that is read in a later tick than it is made is stored in a *ring*, an array with a row for each of the last
ticks. Idle slots compute values as well; nothing that they compute is added to a result.

The ticks are divided into phases, in which the same loops are active, and each phase is one scan: for 1F1B, forward slots alone,
forward and backward slots, and backward slots alone. With several rounds, microbatches enter and leave in K of every v·K ticks;
the ticks with and without segments alternate, as scans inside of a scan over periods.

If the slots of a tick are independent (:attr:`.Schedule.joint`), one scan over layers runs them: its body has a layer of each slot,
so that a compiler overlaps the collectives of one with the matmuls of another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from ....errors import UnsupportedError
from ...compat.jax import Atom, at_line_of, bind, on_host, with_weak_type, zeros
from ...compat.loop_operands import loop_parts
from ..jaxprs import live
from ..primitives import rename_dims_p
from .find import LayerLoop
from .run_all_stages import RoundOfStack, Slot, Stages, Time, run_slots
from .schedule import Schedule, interval_rows
from .segments import CONSTANT, INVARIANT, Body, Place, stack_of

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

State = dict[str, dict[int, Any]]
"""The state of the loops over ticks: ``carries`` by position, ``rings`` by :attr:`Ring.key`, and by loop the results of
its last slot, which are ``sent`` to the next stages."""


@dataclass(eq=False, slots=True)
class _Needs:
    """The equations that segments and slots run, and the values that are stored for later ticks.

    Attributes:
      eqns: by place (a segment, ``INVARIANT``, stacks of a loop), its equations and the constants' equations, without dead ones.
      wanted: by place, the variables that other places read, in a fixed order.
      reads: variable → the times at which it is read, if any is in a later tick than it is made, or of another stage.
    """

    eqns: dict[Place, list[Any]] = field(default_factory=dict)
    wanted: dict[Place, dict[Any, None]] = field(default_factory=dict)
    reads: dict[Any, set[Time]] = field(default_factory=dict)

    def want(self, place: Place, variables: Iterable[Any]) -> None:
        """Record that variables of a place are read."""
        self.wanted.setdefault(place, {}).update(dict.fromkeys(variables))


@dataclass(frozen=True, slots=True)
class Phase:
    """Consecutive ticks.

    Attributes:
      parts: ranges of ticks; in each, the same segments and loops run.
      repeats: how often the parts are repeated, one period of the schedule after another.
    """

    parts: tuple[range, ...]
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Ring:
    """The rows in which a variable is stored.

    Attributes:
      key: of the ring in the state.
      rows: their number.
      start: the first tick in which the variable is made.
      table: several rounds and a part per stage: by the number of a slot of its stage, the row; else rows are used cyclically.
    """

    key: int
    rows: int
    start: int
    table: tuple[int, ...] | None = None


Operands = tuple[Mapping[Any, Any], Mapping[Any, Any], Mapping[Any, Any]]
"""The values that the loops over ticks only read: ``known``, ``divided`` and ``xs`` of a :class:`_Tick`."""


class TickLoops:
    """The loops over ticks of one microbatch loop.

    Attributes:
      eqn: the microbatch loop.
      body: its body, in segments.
      schedule: of the pipeline.
      stages: of each loop.
      offsets: the tick at which each segment runs for microbatch 0.
      slot_times: the times of the slots of each loop.
      places: the segments, then the slots of each loop.
      phases: all ticks.
      rings: by variable.
    """

    def __init__(self, eqn: Any, body: Body, schedule: Schedule, loops: Sequence[LayerLoop]):
        """Loops for a schedule; ``loops``: the layer loop of the program that each loop of the body is from."""
        self.eqn, self.body, self.schedule = eqn, body, schedule
        self.stages = [
            Stages(schedule.stages, loop.dim, schedule.rounds, eqn.params["length"])
            for loop, eqn in zip(loops, body.loops, strict=True)
        ]
        self.slot_times = [self._slot_time(i) for i in range(schedule.loops)]
        self.offsets = self._offsets()
        self.places = [*map(Place, range(len(body.loops) + 1)), *map(stack_of, range(len(body.loops)))]
        self.phases = self._phases()
        self.needs = self._needs()
        hosted = next((v for v in (*self.needs.reads, *self._selected()) if on_host(v)), None)
        if hosted is not None:
            raise _on_host(hosted, loops[0], hosted in self.needs.reads)
        self.rings = {v: self._ring(key, v) for key, v in enumerate(self.needs.reads)}

    # -- when

    def _selected(self) -> Iterable[Any]:
        """The operands of layer loops of which each stage reads another round or microbatch in a tick."""
        for eqn in self.body.loops:
            stacks = loop_parts(eqn).stacks if self.schedule.rounds > 1 else ()
            for p, v in enumerate(eqn.invars):
                if not isinstance(v, Literal) and (v in self.body.xs or p in stacks):
                    yield v

    def _slot_time(self, i: int) -> Time:
        """The times of the slots of loop i."""
        s = self.schedule
        turn, step = (s.stages if s.rounds > 1 else 0), (0 if s.order[i] == "W" else 1)
        if not s.is_reverse(i):
            return Time(s.starts[i], step, turn, True)
        return Time(s.starts[i] + step * (s.stages - 1) + (s.rounds - 1) * turn, -step, -turn, True)

    def leaves(self, i: int) -> int:
        """The tick in which microbatch 0 leaves loop i."""
        return self.schedule.starts[i] + self.schedule.passage(i)

    def _offsets(self) -> tuple[int, ...]:
        """The tick at which each segment runs for microbatch 0.

        With several rounds, segments of a training step run in the same ticks of each period: the first one a tick earlier than
        its results are read, and the last one a tick later than it could.
        """
        last = len(self.body.loops) - 1
        offsets = [0, *(self.leaves(i) + (self.schedule.joint and i < last) for i in range(last + 1))]
        if self.schedule.rounds > 1:
            offsets[0] = -1
            offsets[-1] += len(offsets) == 3
        return tuple(offsets)

    def made_at(self, var: Atom) -> Time:
        """When a variable is made."""
        place = self.body.place(var)
        return self.slot_times[place.loop] if place.stacked else Time(self.offsets[place.runs.segment])

    def _phases(self) -> list[Phase]:
        """The phases, in order; with several rounds, equal periods are repeated.

        With one round, the first and the last segment of a training step, which are small, run in idle ticks as well.
        """
        s, watched, period = self.schedule, self.places, self.schedule.period
        first, end = self.offsets[0], max(s.ticks, self.offsets[-1] + s.entry(s.microbatches - 1) + 1)
        if s.rounds == 1:
            last = max(len(self.body.loops), 2)
            watched, period = [p for p in watched if p.stacked or 0 < p.segment < last], end
        active = [tuple(self._is_active(p, t) for p in watched) for t in range(first, end)]
        edges = [0, *(i for i in range(1, len(active)) if active[i] != active[i - 1]), len(active)]
        phases: list[Phase] = []
        done = 0
        while done < len(active):
            ahead = active[done : done + period]
            repeats = 1
            while len(ahead) == period and active[done + repeats * period :][:period] == ahead:
                repeats += 1
            stop = done + period if repeats > 1 else next(e for e in edges if e > done)
            inner = [done, *(e for e in edges if done < e < stop), stop]
            phases.append(Phase(tuple(range(first + a, first + b) for a, b in itertools.pairwise(inner)), repeats))
            done += (stop - done) * repeats
        return phases

    def _is_active(self, place: Place, tick: int) -> bool:
        """Whether a segment or the slots of a loop run in a tick.

        With several rounds, the first and the last segment of a training step run in some idle ticks as well, so that more periods
        are equal.
        """
        s = self.schedule
        if place.stacked:
            return 0 <= tick - s.starts[place.loop] < s.slots(place.loop)
        group, within = divmod(tick - self.offsets[place.segment], s.period)
        idle = s.rounds > 1 and s.name != "gpipe" and len(self.body.loops) == 2
        first, stop = -(idle and place.segment == 2), s.microbatches + s.stages * (idle and place.segment == 0)
        return within < s.stages and first <= group and group * s.stages + within < stop

    def runs(self, place: Place, ticks: range) -> bool:
        """Whether a segment or the slots of a loop run in a part of a phase."""
        return any(self._is_active(place, tick) for tick in ticks)

    def enters(self, i: int, ticks: range) -> bool:
        """Whether microbatches enter loop i in a part of a phase; else all stages continue with those that have entered."""
        start, s = self.schedule.starts[i], self.schedule
        last = start + s.entry(s.microbatches - 1)
        return any((t - start) % s.period < s.stages and start <= t <= last for t in ticks)

    # -- rings

    def _ring(self, key: int, var: Atom) -> Ring:
        """The ring of a variable in which the state has ``key``, with a row for each value that is still to be read."""
        s, place, made = self.schedule, self.body.place(var), self.made_at(var)
        runs = [part for p in self.phases for part in p.parts if self.runs(place.runs, part)]
        start = runs[0].start
        lives = [max(t.since(made, s.stages, r) for t in self.needs.reads[var]) for r in range(s.rounds)]
        if s.rounds == 1:
            return Ring(key, min(lives[0] + 1, runs[-1].stop - start), start)
        if not place.stacked:
            entries = [s.entry(m) for m in range(s.microbatches + s.stages)]  # an idle group may follow
            return Ring(key, max(sum(a <= b <= a + max(lives) for b in entries) for a in entries[: s.stages]), start)
        lives = lives[::-1] if made.turn < 0 else lives
        rows = interval_rows(
            [
                lives[n // s.stages % s.rounds] if n < s.rounds * s.microbatches else 0
                for n in range(s.slots(place.loop))
            ]
        )
        return Ring(key, max(rows) + 1, start, tuple(rows))

    # -- needed equations

    def _needs(self) -> _Needs:
        """Walk backwards over segments and loops, from the results."""
        body, needs = self.body, _Needs()
        for j in range(len(body.loops), -1, -1):
            for var in self._segment_results(j):
                self._read(needs, var, Time(self.offsets[j]), Place(j))
            self._close(needs, Place(j))
            if j:
                i = j - 1
                self._close(needs, stack_of(i))
                eqn, entering = body.loops[i], loop_parts(body.loops[i]).carries
                for p, var in enumerate(eqn.invars):
                    time = Time(self.schedule.starts[i]) if p in entering else self.slot_times[i]
                    self._read(needs, var, time, None)
        self._close(needs, INVARIANT)
        return needs

    def _segment_results(self, j: int) -> Iterable[Any]:
        """The variables from which results are made in segment j; of stacks, in the slots of the loop before."""
        body = self.body
        for k, out in enumerate(body.outs):
            if body.adding_loop(k) is not None or (k < len(body.carries) and out is body.carries[k]):
                continue
            out = body.accumulators.get(k, out)
            if body.segment(out) == j and not isinstance(out, Literal):
                yield out

    def _read(self, needs: _Needs, var: Atom, time: Time, place: Place | None) -> None:
        """Record that a variable is read at a time, in a segment, or in a slot (None)."""
        made = self.body.place(var)
        if isinstance(var, Literal):
            return
        if made == CONSTANT:
            needs.want(INVARIANT if place is None else place, [var])
            return
        needs.want(made, [var])
        if made == INVARIANT or var in self.body.xs:
            return
        if made.stacked or time.slot or time != self.made_at(var):
            needs.reads.setdefault(var, set()).add(time)

    def _close(self, needs: _Needs, place: Place) -> None:
        """Find the equations that a segment needs, and record the values that they read; of stacks, the elementwise equations."""
        body = self.body
        own = [eqn for eqn in body.eqns if body.place(eqn.outvars[0]) in (place, CONSTANT)]
        added = [v for v in body.accumulators.values() if place.stacked and body.place(v) == place]
        needs.eqns[place], wanted = live(own, [*needs.wanted.get(place, ()), *added])
        if place.stacked:
            return
        needs.want(place, wanted)  # also results of the loop before
        made = {v for eqn in needs.eqns[place] for v in eqn.outvars}
        for var in wanted if place != INVARIANT else ():
            if var not in made and (body.place(var) != place or var in body.carries):
                self._read(needs, var, Time(self.offsets[place.segment]), place)

    # -- running

    def __call__(self, *args: Any) -> list[Any]:
        """The results of the microbatch loop, given its operands."""
        consts, inits, stacked = loop_parts(self.eqn).split(args)
        body, needs = self.body, self.needs
        known: dict[Any, Any] = dict(zip(body.consts, consts, strict=True))
        known.update((c, x) for c, x, out in zip(body.carries, inits, body.outs, strict=False) if out is c)
        evaluate(needs.eqns[INVARIANT], known, known.__getitem__)
        # the copy is a loop over the microbatches: inference then gives the name of the batch to the rows of a microbatch
        copied = lax.scan(lambda _, x: (None, x), None, stacked, length=self.schedule.microbatches)[1]
        xs = dict(zip(body.xs, copied, strict=True))
        divided = {}
        for stages, eqn in zip(self.stages, body.loops, strict=True):
            for v in loop_parts(eqn).split(eqn.invars)[2]:
                if v in known and v not in divided:
                    divided[v] = parts = stages.divided(known[v])
                    if v in body.gathered:
                        divided[v] = rename_dims_p.bind(parts, pairs=body.gathered[v], back=False)
                elif v in xs and v not in divided:
                    divided[v] = stages.divided(xs[v], 1)
        state, operands = self._first_state(inits), (known, divided, xs)
        results: dict[int, list[Any]] = {}
        for phase in self.phases:
            state, outs = self._run(phase, state, operands)
            for k, out in outs.items():
                results.setdefault(k, []).append(out)
        return [self._result(k, out, inits, known, state, results) for k, out in enumerate(body.outs)]

    def _run(self, phase: Phase, state: Any, operands: Operands) -> tuple[Any, dict[int, Any]]:
        """Run a phase: (the state after it, results that segments make, stacked over ticks)."""

        def run(state: Any, start: Any) -> tuple[Any, dict[int, Any]]:
            """Run the parts once."""
            made: dict[int, list[Any]] = {}
            for part in phase.parts:
                ticks = jnp.arange(part.start, part.stop, dtype=np.int32) + start
                changed, rest = self._changed(state, [part])
                changed, outs = lax.scan(_Tick(self, part, rest, *operands), changed, ticks)
                state = _merged(changed, rest)
                for k, out in outs.items():
                    made.setdefault(k, []).append(out)
            return state, {k: jnp.concatenate(parts) if len(parts) > 1 else parts[0] for k, parts in made.items()}

        if phase.repeats == 1:
            return run(state, np.int32(0))
        changed, rest = self._changed(state, phase.parts)

        def period(changed: Any, start: Any) -> tuple[Any, dict[int, Any]]:
            """Run the parts for a period that starts at a tick."""
            state, outs = run(_merged(changed, rest), start)
            return self._changed(state, phase.parts)[0], outs

        starts = self.schedule.period * np.arange(phase.repeats, dtype=np.int32)
        changed, outs = lax.scan(period, changed, jnp.asarray(starts))
        return _merged(changed, rest), {k: jnp.reshape(x, (-1, *x.shape[2:])) for k, x in outs.items()}

    def _changed(self, state: State, parts: Sequence[range]) -> tuple[State, State]:
        """The state that parts of a phase change, and the rest: a scan carries only values that it changes.

        JAX would make unchanged carries operands of the scan that its body does not read, and partial operands are reduced.
        """
        body, variables = self.body, list(self.rings)
        active = {p for p in self.places if any(self.runs(p, part) for part in parts)}

        def changes(name: str, key: int) -> bool:
            """Whether a segment or slot that runs writes an entry of the state."""
            if name == "sent":
                return stack_of(key) in active
            if name == "rings":
                return body.place(variables[key]) in active
            if key in body.accumulators:
                return body.place(body.accumulators[key]).runs in active
            return Place(body.segment(body.outs[key])) in active

        def part(changed: bool) -> State:
            return {n: {k: x for k, x in values.items() if changes(n, k) == changed} for n, values in state.items()}

        return part(True), part(False)

    def _first_state(self, carries: Sequence[Any]) -> State:
        """The state before the first tick: carries and accumulators, rings, and the results of the slots before."""
        body, rings = self.body, {}
        first: dict[Any, Any] = {}
        for k, (init, out) in enumerate(zip(carries, body.outs, strict=False)):
            loop = body.adding_loop(k)
            if loop is not None:
                stages = self.stages[loop]
                if stages.rounds == 1:
                    first[k] = stages.divided(init)
                else:  # the initial value is added at the end: it is zero, and would move to other stages
                    parts = (stages.length * stages.rounds, stages.count, *init.shape[1:])
                    first[k] = stages.named(zeros(parts, init.dtype), 1)
            elif out is not body.carries[k]:
                first[k] = init
        for var, ring in self.rings.items():
            aval, place = var.aval, body.place(var)
            if place.stacked:
                stages = self.stages[place.loop]
                rings[ring.key] = stages.named(
                    zeros((ring.rows, stages.length, stages.count, *aval.shape[1:]), aval.dtype), 2
                )
            else:
                rings[ring.key] = zeros((ring.rows, *aval.shape), aval.dtype)
        sent = {}
        for i, (stages, eqn) in enumerate(zip(self.stages, body.loops, strict=True)):
            sent[i] = [stages.zeros(v.aval) for v in loop_parts(eqn).carried(eqn.invars)]
        return {"carries": first, "rings": rings, "sent": sent}

    def _result(
        self, k: int, out: Any, inits: Sequence[Any], known: Mapping[Any, Any], state: Any, results: Any
    ) -> Any:
        """Result k of the microbatch loop, given the first values of its carries."""
        body, m = self.body, self.schedule.microbatches
        aval = self.eqn.outvars[k].aval
        if k < len(inits):
            if out is body.carries[k]:
                return inits[k]
            value = state["carries"][k]
            loop = body.adding_loop(k)
            if loop is not None:
                value = self.stages[loop].joined(value)
                value = value if self.schedule.rounds == 1 else inits[k] + value
        elif isinstance(out, Literal) or body.place(out) == INVARIANT:
            one = out.val if isinstance(out, Literal) else known[out]
            value = jnp.broadcast_to(jnp.asarray(one, aval.dtype), aval.shape)
        else:
            j = body.segment(out)
            ticks = [
                t + n * self.schedule.period
                for phase in self.phases
                for n in range(phase.repeats)
                for part in phase.parts
                if self.runs(Place(j), part)
                for t in part
            ]
            value = jnp.concatenate(results[k])[ticks.index(self.offsets[j]) :][:m]
            value = value[::-1] if self.eqn.params["reverse"] else value
        return with_weak_type(jnp.asarray(value), aval.weak_type)


@dataclass(eq=False)
class _Tick:
    """One tick of a part of a phase, as the body of a scan: (state, tick) → (state, stacked results).

    Attributes:
      loops: the loops over ticks.
      ticks: the first of the ticks that the body is for.
      rest: the state that the ticks do not change.
      known: the values that all microbatches have.
      divided: the stacked operands of layer loops, divided into stages, of all layers or of all microbatches.
      xs: the stacked operands of the microbatch loop.
      state, tick: of the present call.
      env: the values that this tick has made.
    """

    loops: TickLoops
    ticks: range
    rest: State
    known: Mapping[Any, Any]
    divided: Mapping[Any, Any]
    xs: Mapping[Any, Any]
    state: Any = None
    tick: Any = None
    env: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.body, self.schedule = self.loops.body, self.loops.schedule

    def __call__(self, state: Any, tick: Any) -> tuple[Any, dict[int, Any]]:
        """The state after a tick, and the results that are stacked."""
        self.state = _merged(state, self.rest)
        self.tick, self.env, outs = tick, {}, {}
        for i in range(len(self.body.loops)):
            if self.loops.offsets[i + 1] > self.loops.leaves(i) and self.loops.runs(Place(i + 1), self.ticks):
                self.leave(i)
        count = len(self.body.loops)
        for j in range(count):
            if self.loops.runs(Place(j), self.ticks):
                outs.update(self.segment(j))
            if self.loops.runs(stack_of(j), self.ticks) and not self.schedule.joint:
                self.run([j])
        active = [j for j in range(count) if self.loops.runs(stack_of(j), self.ticks)] if self.schedule.joint else []
        for _, equal in itertools.groupby(active, lambda j: self.body.loops[j].params["length"]):
            self.run(list(equal))
        if self.loops.runs(Place(count), self.ticks):
            outs.update(self.segment(count))
        return {name: {key: self.state[name][key] for key in values} for name, values in state.items()}, outs

    def of(self, time: Time) -> tuple[Any, Any, Any]:
        """(microbatch, round, whether there is one) that is at a time; [K] if it is the time of a slot."""
        s = self.schedule
        step = self.tick - (time.start + min(time.turn, 0) * (s.rounds - 1))
        if time.slot:
            step = step - time.step * self.loops.stages[0].index()
        if s.rounds == 1:
            return step, 0, (step >= 0) & (step < s.microbatches)
        valid = (step >= 0) & (step < s.rounds * s.microbatches)
        step = jnp.maximum(step, 0)
        group, within = lax.div(step, np.int32(s.period)), lax.rem(step, np.int32(s.period))
        r, first = lax.div(within, np.int32(s.stages)), lax.rem(within, np.int32(s.stages))
        valid &= r == 0 if not time.turn else True
        return group * s.stages + first, s.rounds - 1 - r if time.turn < 0 else r, valid

    # -- segments

    def segment(self, j: int) -> dict[int, Any]:
        """Run segment j for its microbatch; returns the results that are stacked."""
        loops, body, needs = self.loops, self.body, self.loops.needs
        time = Time(loops.offsets[j])
        local: dict[Any, Any] = {}
        lookup: Callable[[Any], Any] = lambda v: self.read(v, time)  # noqa: E731
        before = {k: self.state["carries"].get(k) for k in range(len(body.carries))}
        for k, carry in enumerate(body.carries):
            if body.place(carry) == Place(j) and k in before and before[k] is not None and k not in body.accumulators:
                self.env[carry] = before[k]
        evaluate(needs.eqns[Place(j)], local, lookup)
        self.env.update((v, x) for v, x in local.items() if body.place(v) == Place(j))
        value = lambda v: v.val if isinstance(v, Literal) else local[v] if v in local else lookup(v)  # noqa: E731
        _, _, valid = self.of(time)
        outs: dict[int, Any] = {}
        for k, out in enumerate(body.outs):
            addend = body.accumulators.get(k)
            if addend is not None:
                if body.adding_loop(k) is not None or body.segment(addend) != j:
                    continue
                total, x = before[k], jnp.asarray(value(addend))
                self.state["carries"][k] = total + lax.select(valid, x, jnp.zeros(x.shape, x.dtype))
            elif body.segment(out) != j or out in body.carries[k : k + 1]:
                continue
            elif k < len(body.carries):
                self.state["carries"][k] = lax.select(valid, jnp.asarray(value(out)), before[k])
            elif not isinstance(out, Literal) and body.place(out) != INVARIANT:
                outs[k] = value(out)
        for var in loops.rings:
            if body.place(var) == Place(j):
                self.store(var, self.env[var])
        return outs

    # -- slots

    def run(self, loops: Sequence[int]) -> None:
        """Run a slot of each of some loops on all stages, in one scan."""
        with at_line_of(self.body.loops[loops[0]]):
            results = run_slots([self.slot(i) for i in loops])
        for i, (done, made, totals) in zip(loops, results, strict=True):
            stages = self.loops.stages[i]
            self.state["sent"][i] = [stages.named(x) for x in done]
            self.state["carries"].update(zip(self.added(i), totals, strict=True))
            for var, x in zip(self.stored(i), made, strict=True):
                self.store(var, stages.named(x, 1))
            if self.loops.offsets[i + 1] == self.loops.leaves(i) and self.loops.runs(Place(i + 1), self.ticks):
                self.leave(i)

    def added(self, i: int) -> list[int]:
        """The accumulators to which loop i adds."""
        return [k for k in self.body.accumulators if self.body.adding_loop(k) == i]

    def stored(self, i: int) -> list[Any]:
        """The results of the layers of loop i that are stored."""
        return [var for var in self.loops.rings if self.body.place(var) == stack_of(i)]

    def slot(self, i: int) -> Slot:
        """The slot of loop i."""
        body, stages, eqn = self.body, self.loops.stages[i], self.body.loops[i]
        unchanged, entering, stacked = loop_parts(eqn).split(eqn.invars)
        time, start = self.loops.slot_times[i], Time(self.schedule.starts[i])
        first = stages.count - 1 if time.step < 0 else 0
        consts, per_stage = [], []
        for v in unchanged:
            own = not isinstance(v, Literal) and v not in self.known
            consts.append(self.rows(v, time, stages) if own else v.val if isinstance(v, Literal) else self.known[v])
            per_stage.append(own)
        _, r, valid = self.of(time)
        carries = self.state["sent"][i]
        if self.loops.enters(i, self.ticks):
            inits = [self.read(v, start) for v in entering]
            when = self.of(start)[2] if stages.rounds > 1 else True
            carries = [stages.entering(x, y, first, when) for x, y in zip(inits, carries, strict=True)]
        else:
            carries = [stages.moved(x, first) for x in carries]
        stacks = [self.stack(v, time, stages, r) for v in stacked]
        added, stored = self.added(i), self.stored(i)
        totals = [self.state["carries"][k] for k in added]
        split, late = self.of_layer(i, added, stored), bool(body.gathered)
        return Slot(eqn, stages, consts, per_stage, carries, stacks, totals, split, valid, late, r)

    def leave(self, i: int) -> None:
        """Take the results of loop i from its last stage, for the segment that follows."""
        eqn, stages = self.body.loops[i], self.loops.stages[i]
        last = 0 if eqn.params["reverse"] else stages.count - 1
        for var, x in zip(eqn.outvars, self.state["sent"][i], strict=False):
            if var in self.loops.needs.wanted.get(Place(i + 1), ()):
                self.env[var] = stages.of_stage(x, last)

    def of_layer(
        self, i: int, added: Sequence[int], stored: Sequence[Any]
    ) -> Callable[[list[Any]], tuple[list[Any], list[Any]]]:
        """The function by which one layer of loop i divides its stacked results, each [K, …].

        Args:
          i: of the loop.
          added: the accumulators to which it adds.
          stored: the variables that are stored.

        Returns:
          Results → (the values of the variables ``stored``, the addends of the accumulators ``added``).
        """
        body, stages = self.body, self.loops.stages[i]
        eqn, eqns = body.loops[i], self.loops.needs.eqns[stack_of(i)]

        def split(made: list[Any]) -> tuple[list[Any], list[Any]]:
            """The results of one layer that are stored, and those that are added."""
            _, outs = loop_parts(eqn).split_results(eqn.outvars)
            local = dict(zip(outs, map(stages.named, made), strict=True))
            evaluate(eqns, local, local.__getitem__)
            return [local[var] for var in stored], [local[body.accumulators[k]] for k in added]

        return split

    # -- values of other ticks

    def ring(self, var: Atom) -> Any:
        """The rows of the ring in which a variable is stored."""
        return self.state["rings"][self.loops.rings[var].key]

    def store(self, var: Atom, x: Any) -> None:
        """Write a value into the row of this tick of its ring."""
        loops, ring, made = self.loops, self.loops.rings[var], self.loops.made_at(var)
        values, place = self.ring(var), self.body.place(var)
        if place.stacked and ring.table is not None:
            row = self.table_row(ring, self.tick - self.schedule.starts[place.loop], made)
            self.state["rings"][ring.key] = loops.stages[place.loop].with_rows(values, x, row)
            return
        if self.schedule.rounds == 1:
            row = lax.rem(self.tick - ring.start, np.int32(ring.rows))
        else:
            row = lax.rem(self.of(made)[0], np.int32(ring.rows))
        self.state["rings"][ring.key] = lax.dynamic_update_index_in_dim(values, x, row, 0)

    def table_row(self, ring: Ring, step: Any, made: Time) -> Any:
        """[K]: for each stage, the row in which a ring with a table has the value of a slot.

        Args:
          step: the tick of the slot on the first stage that runs it, counted from the first tick of the loop.
          made: the time of the slots.
        """
        index, count = self.loops.stages[0].index(), self.schedule.stages
        own = step - made.step * index - (count - 1 if made.step < 0 else 0)
        return jnp.asarray(ring.table, np.int32)[jnp.clip(own, 0, len(ring.table or ()) - 1)]

    def row(self, var: Atom, time: Time) -> Any:
        """The row of a ring in which the value is that is read at a time: a scalar, or [K]."""
        ring, made, s = self.loops.rings[var], self.loops.made_at(var), self.schedule
        if s.rounds == 1:
            ago = time.start - made.start
            if time.slot or made.slot:
                ago = ago + (time.step - made.step) * self.loops.stages[0].index()
            return jnp.mod(self.tick - ago - ring.start, np.int32(ring.rows))
        microbatch, r, _ = self.of(time)
        return lax.rem(microbatch, np.int32(ring.rows)) if ring.table is None else self.row_of(var, microbatch, r)

    def row_of(self, var: Atom, microbatch: Any, r: Any) -> Any:
        """[K]: for each stage, the row in which a ring with a table has the value of a microbatch and round."""
        ring, s = self.loops.rings[var], self.schedule
        q = s.rounds - 1 - r if self.loops.made_at(var).turn < 0 else r
        group, within = lax.div(microbatch, np.int32(s.stages)), lax.rem(microbatch, np.int32(s.stages))
        step = group * s.period + q * s.stages + within
        return jnp.asarray(ring.table, np.int32)[jnp.clip(step, 0, len(ring.table or ()) - 1)]

    def read(self, var: Atom, time: Time) -> Any:
        """The value that a segment reads, of the microbatch that it runs for."""
        if isinstance(var, Literal):
            return var.val
        if var in self.known:
            return self.known[var]
        if var in self.xs:
            return lax.dynamic_index_in_dim(self.xs[var], self.position(time), 0, keepdims=False)
        place = self.body.place(var)
        if place.stacked:
            stages, ring = self.loops.stages[place.loop], self.ring(var)
            if stages.rounds == 1:
                parts = [stages.rows(ring, self.row(var, time), 1)]
            else:
                microbatch = jnp.broadcast_to(self.of(time)[0], (stages.count,))
                parts = [stages.rows(ring, self.row_of(var, microbatch, r), 1) for r in range(stages.rounds)]
            return stages.joined(jnp.swapaxes(jnp.concatenate(parts, 1), 0, 1))
        if time.start == self.loops.made_at(var).start:
            return self.env[var]
        return lax.dynamic_index_in_dim(self.ring(var), self.row(var, time), 0, keepdims=False)

    def position(self, time: Time) -> Any:
        """The index of the microbatch of a time in the stacked operands of the microbatch loop."""
        m = self.schedule.microbatches
        at = jnp.clip(self.of(time)[0], 0, m - 1)
        return m - 1 - at if self.loops.eqn.params["reverse"] else at

    def rows(self, var: Atom, time: Time, stages: Stages) -> Any:
        """[K, …]: for each stage, the value of its microbatch."""
        if var in self.xs:
            return stages.rows(self.xs[var], self.position(time), -1)
        return stages.rows(self.ring(var), self.row(var, time), -1)

    def stack(self, var: Atom, time: Time, stages: Stages, r: Any) -> Any:
        """[l, K, …], or an equivalent :class:`RoundOfStack`: for each stage, its part of a stacked operand of a slot, of its
        microbatch and round ``r``."""
        renamed: tuple[tuple[str, str], ...] = ()
        if var in self.known:
            parts = self.divided[var]
            # a layer has dims of its own: dims of the layers' body have the rules of the old names as well
            renamed = tuple((new, f"{new}_layer") for _, new in self.body.gathered.get(var, ()))
        elif self.body.place(var).stacked:
            return jnp.swapaxes(stages.rows(self.ring(var), self.row(var, time), 1), 0, 1)
        elif var in self.xs:
            parts = jnp.swapaxes(stages.rows(self.divided[var], self.position(time), 1), 0, 1)
        else:
            parts = jnp.swapaxes(stages.rows(stages.divided(self.ring(var), 1), self.row(var, time), 1), 0, 1)
        return parts if stages.rounds == 1 else RoundOfStack(parts, r * np.int32(stages.length), renamed)


def _on_host(var: Atom, loop: LayerLoop, residual: bool) -> UnsupportedError:
    """The error for a value in host memory of which each stage reads another part in a tick: a residual of a layer, such as an
    offloaded one, or weights of several rounds."""
    what, part = ("a residual", "row of the residuals") if residual else ("an operand", "part of it")
    return loop.unsupported(
        f"{what} {var.aval.str_short()} of layers whose stacked dim `{loop.dim}` is sharded is in host memory: each stage reads "
        f"another {part} in a tick, and JAX cannot select rows of an array in host memory at different indices",
        "use a policy of jax.checkpoint that saves in device memory, or none, which recomputes the layer"
        if residual
        else f"put it in device memory before the loop over microbatches, or use one round: `{loop.dim}` without `*`",
    )


def _merged(first: State, second: State) -> State:
    """The entries of two parts of a state."""
    return {name: {**values, **second[name]} for name, values in first.items()}


def evaluate(eqns: Iterable[JaxprEqn], env: dict[Any, Any], lookup: Callable[[Any], Any]) -> None:
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
    loop = loop_parts(eqn)
    time = Time(stages.count - 1, -1) if eqn.params["reverse"] else Time(0, 1)
    first, last = (stages.count - 1, 0) if time.step < 0 else (0, stages.count - 1)

    def run(*args: Any) -> list[Any]:
        """The results of the loop."""
        consts, inits, stacked = loop.split(args)
        stacks, shared = [stages.divided(x) for x in stacked], (False,) * len(consts)
        if not inits:  # no layer needs another one: all stages are active at once
            with at_line_of(eqn):
                ((_, rows, _),) = run_slots([Slot(eqn, stages, consts, shared, [], stacks)])
            made = [stages.joined(stages.named(x, 1)) for x in rows]
            return [with_weak_type(x, v.aval.weak_type) for x, v in zip(made, eqn.outvars, strict=True)]

        def tick(state: Any, tick: Any) -> tuple[Any, None]:
            """Run one slot on all stages, and store the stacks of the active one."""
            sent, stored = state
            carries = [stages.entering(x, y, first) for x, y in zip(inits, sent, strict=True)]
            with at_line_of(eqn):
                ((done, made, _),) = run_slots([Slot(eqn, stages, consts, shared, carries, stacks)])
            active = time.start + time.step * stages.index() == tick
            new = [jax.device_put(x, _DEVICE) if on_host(x) else x for x in made]  # conditions are in device memory
            stored = [stages.merged(active, x, old) for x, old in zip(new, stored, strict=True)]
            return ([stages.named(x) for x in done], stored), None

        made = [v.aval for v in loop.split_results(eqn.outvars)[1]]
        parts = [(stages.length, stages.count, *x.shape[1:]) for x in made]
        empty = [stages.named(zeros(shape, x.dtype), 1) for shape, x in zip(parts, made, strict=True)]
        sent = [stages.zeros(v.aval) for v in loop.carried(eqn.invars)]
        (sent, stored), _ = lax.scan(tick, (sent, empty), jnp.arange(stages.count, dtype=np.int32))
        outs = [*(stages.of_stage(x, last) for x in sent), *map(stages.joined, stored)]
        outs = [jax.device_put(x, _HOST) if on_host(v) else x for x, v in zip(outs, eqn.outvars, strict=True)]
        return [with_weak_type(x, v.aval.weak_type) for x, v in zip(outs, eqn.outvars, strict=True)]

    return run
