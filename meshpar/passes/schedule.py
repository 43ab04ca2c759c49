"""The order of a body's matmuls where the program leaves it open, so that large arrays are not live for longer than needed.

The backward pass of a matmul has two: the cotangent times the weight, on which the previous layer depends, and the cotangent
times the saved operand, which is the weight's gradient, on which nothing else depends. The scheduler of libtpu 0.0.42 (default
effort) runs all gradients of a network last, and keeps what was gathered for them in memory; in a loop it keeps gathered weights
until the gradients are made. Three rules:

- a matmul whose result is reduce-scattered waits for the matmuls of the same cotangent with gathered weights, which can be freed;
- where a later loop waits for an asynchronous reduction, these matmuls wait for that of the weight's gradient instead, and run
  while the reduction is in flight;
- a matmul on which no other depends is not postponed: the second one after it waits for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..cost.fusion import FUSIBLE, MATMULS, VIEWS
from ..plan.plan import Plan
from ..plan.steps import (
    Barrier,
    Body,
    Reduce,
    Reshard,
    Run,
    Shard,
    ShardingChange,
    Step,
    is_deferred,
    rewrite_bodies,
    topological_order,
)
from ..program.ir import Frame, Op, Program, Value
from ..rules import having

ADDS = having(lambda p: p.addition)
HEAVY = having(lambda p: p.matmul or p.opaque or p.kernel)


def schedule(plan: Plan) -> Plan:
    """Put the products of every body in an order in which nothing large waits for long; barriers hold it."""
    found = _Schedule(plan)
    if not found.after:
        return plan
    orders = {frame: found.bodies[frame].in_order(found.after) for frame in {op.frame for op in found.after}}

    def change(body: Body) -> Body:
        if body.frame not in orders:
            return body
        steps: list[Step] = []
        for step in body.steps:
            if isinstance(step, Run) and step.op in found.after and step.in_ring != "gather" and not is_deferred(step):
                source = min(step.reads, key=found.stored_for_barrier)
                result = source.copy()
                after = tuple(plan.placements[v].made for v in found.after[step.op])
                steps.append(Barrier(step.op, (source,), (result,), after))
                step = replace(step, operands=tuple(result if s is source else s for s in step.operands))
            steps.append(step)
        place = {op: k for k, op in enumerate(orders[body.frame])}
        return replace(body, steps=topological_order(_by_op(steps, place), body.outputs))

    return replace(plan, body=rewrite_bodies(plan.body, change))


def _by_op(steps: Sequence[Step], place: Mapping[Op, int]) -> list[Step]:
    """Steps in the order of their ops; what follows from an op behind it."""
    of: dict[Shard, int] = {}
    keys: list[int] = []
    now = -1
    for step in steps:
        if isinstance(step, ShardingChange) and not is_deferred(step):
            now = of.get(step.source, now)
        elif step.op is not None:
            now = place.get(step.op, now)
        keys.append(now)
        for shard in step.makes:
            of[shard] = now
    return [steps[k] for k in sorted(range(len(steps)), key=keys.__getitem__)]


class _Schedule:
    """Which products wait for what.

    Attributes:
      after: for a product, the values that must be there before it is made, as their ops leave them (a sum unreduced).
      bodies: the frames that have products.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.after: dict[Op, list[Value]] = {}
        self.bodies = {frame: _Body(found) for frame, found in plan.program.cached(_frames).items()}
        self.pending = {
            s.value
            for step in plan.body.all_steps
            if isinstance(step, Run) and step.in_ring == "reduce"
            for s in step.results
        }
        self._scatters_wait()
        for body in self.bodies.values():
            self._none_is_left_behind(body)

    def _scatters_wait(self) -> None:
        sums = [s for s in self.plan.body.all_steps if isinstance(s, Reduce) and s.scatters and s.collectives]
        if not sums:
            return
        readers: dict[tuple[Frame, Value], list[Op]] = {}  # products of a value with a large gathered operand
        for step, users in _gathers(self.plan.body):
            value = step.source.value
            if self._bytes(step.result) < self.plan.compiler.large_buffer_bytes:
                continue
            for op in users:
                for v in op.ins:
                    if v is not None and v is not value:
                        readers.setdefault((op.frame, v), []).append(op)
        for step in sums:
            for op in self._products(step.source.value):
                body = self.bodies[op.frame]
                found = [r for v in op.ins if v is not None for r in readers.get((op.frame, v), ())]
                found = [r for r in found if body.position[r] > body.operands_at(op)]
                ends = [body.sum_of(r.outs[0]) for r in found]
                ends = [v for v in ends if v.op is not None and self._is_made(v)]
                if not ends or body.heavy_after(op):
                    continue
                mine = body.follows(op)
                free = [v for v in ends if v.op not in mine]
                if not free:
                    continue
                last = max(free, key=lambda v: body.position[v.op])  # type: ignore[index]
                if self._blocks_a_loop(step, body, last) and self._is_made(op.outs[0]):
                    for r in found:
                        if r not in mine and op not in body.follows(r):
                            self._wait(body, r, op.outs[0])
                else:
                    self._wait(body, op, last)

    def _blocks_a_loop(self, step: Reduce, body: _Body, value: Value) -> bool:
        """Whether an asynchronous reduction is one that a loop after ``value`` waits for (:func:`.barriers.serialize_loops`)."""
        if self._bytes(step.source) < self.plan.compiler.serialized_reduction_bytes or not any(
            self.plan.is_async(c.op) for c in step.collectives
        ):
            return False
        assert value.op is not None
        return any(op.primitive.scan for op in body.follows(value.op))

    def _none_is_left_behind(self, body: _Body) -> None:
        left: list[tuple[Op, int]] = []  # products from which no other follows, and how many have come since
        order = body.in_order(self.after)
        for op in body.products if order is body.frame.ops else order:
            if op.name not in MATMULS or not op.outs:
                continue
            if not body.heavy_after(op):
                if self._operands(op) >= self.plan.compiler.large_buffer_bytes and self._is_made(op.outs[0]):
                    left.append((op, 0))
                continue
            left = [(o, n + 1) for o, n in left]
            for o in [o for o, n in left if n > 1]:
                self._wait(body, op, o.outs[0])
            left = [(o, n) for o, n in left if n <= 1]

    def _wait(self, body: _Body, op: Op, value: Value) -> None:
        self.after.setdefault(op, []).append(value)
        body.waiting.setdefault(value, []).append(op)

    def _is_made(self, value: Value) -> bool:
        """Whether a value is there as its op leaves it: not what is made block by block when it is reduced."""
        placed = self.plan.placements.get(value)
        return placed is not None and not placed.made.is_constant and value not in self.pending

    def _products(self, value: Value) -> list[Op]:
        """The products that an unreduced sum consists of."""
        op = value.op
        if op is None:
            return []
        if op.name in MATMULS:
            return [op]
        run = self.plan.runs.get(op)
        if run is None or not any(s.partial for s in run.reads):
            return []
        return [found for v in op.ins if v is not None for found in self._products(v)]

    def _bytes(self, shard: Shard) -> float:
        return self.plan.shard_bytes(shard)

    def stored_for_barrier(self, shard: Shard) -> tuple[float, float]:
        """(bytes that are written to memory only because a barrier holds a shard, bytes of the shard).

        A matmul computes elementwise ops as it reads their result; behind a barrier the result is an array in memory. One operand
        behind a barrier delays the matmul as well as all of them.
        """
        op = shard.value.op
        while op is not None and op.name in VIEWS and op.ins[0] is not None:
            op = op.ins[0].op
        size = self._bytes(shard)
        return (size if op is not None and op.name in FUSIBLE else 0.0), size

    def _operands(self, op: Op) -> float:
        run = self.plan.runs.get(op)
        return 0.0 if run is None else math.fsum(map(self._bytes, run.reads))


def _gathers(body: Body) -> Iterator[tuple[Reshard, list[Op]]]:
    """The gathers of every body that products of the same frame read, with these products."""
    for k in body.nested:
        for inner in body.steps[k].bodies:
            yield from _gathers(inner)
    found: list[Reshard] = []
    users: dict[Shard, list[Op]] = {}
    for step in body.steps:
        if isinstance(step, Reshard):
            if step.copy and next((m.op for m in step.path if m.op != "slice"), "") == "all-gather":
                found.append(step)
                dots = () if step.ring is None else step.ring.dots
                users[step.result] = [dot.op for dot in dots if dot.op.frame is body.frame]
        elif users and isinstance(step, Run) and step.op.name in MATMULS and step.in_ring != "gather":
            for shard in step.reads:
                if shard in users:
                    users[shard].append(step.op)
    yield from ((step, users[step.result]) for step in found)


def _frames(program: Program) -> dict[Frame, _Frame]:
    """The frames that have products."""
    frames = dict.fromkeys(op.frame for op in program.root.walk() if op.name in MATMULS)
    return {frame: _Frame(frame) for frame in frames}


class _Frame:
    """A frame: its ops, and who reads what."""

    def __init__(self, frame: Frame):
        self.frame = frame
        self.position = {op: k for k, op in enumerate(frame.ops)}
        self.maker = {v: op for op in frame.ops for v in op.makes}
        self.reads = {op: _reads(op) for op in frame.ops}
        self.needed = [{made for v in self.reads[op] if (made := self.maker.get(v, op)) is not op} for op in frame.ops]
        self.followers: dict[Op, list[int]] = {}
        for k, makers in enumerate(self.needed):
            for op in makers:
                self.followers.setdefault(op, []).append(k)
        self.products = [op for op in frame.ops if op.name in MATMULS]
        self.users: dict[Value, list[Op]] = {}
        for op, values in self.reads.items():
            for v in values:
                self.users.setdefault(v, []).append(op)
        self.heavy: dict[Op, bool] = {}
        for op in reversed(frame.ops):
            users = [u for v in op.makes for u in self.users.get(v, ()) if u is not op]
            self.heavy[op] = any(u.name in HEAVY or u.frames or self.heavy[u] for u in users)


class _Body:
    """A frame, and which of its products wait."""

    def __init__(self, found: _Frame):
        self.frame, self.position, self.maker, self.products = found.frame, found.position, found.maker, found.products
        self.users, self._needed, self._followers, self._heavy = found.users, found.needed, found.followers, found.heavy
        self.waiting: dict[Value, list[Op]] = {}

    def follows(self, op: Op) -> set[Op]:
        """The ops that follow from an op, or wait for one of these, itself among them."""
        found, todo = {op}, [op]
        while todo:
            for out in todo.pop().makes:
                for user in (*self.users.get(out, ()), *self.waiting.get(out, ())):
                    if user not in found:
                        found.add(user)
                        todo.append(user)
        return found

    def operands_at(self, op: Op) -> int:
        """The place of the last op that makes an operand of an op."""
        makers = (self.maker.get(v) for v in op.ins if v is not None)
        return max((self.position[m] for m in makers if m is not None), default=-1)

    def heavy_after(self, op: Op) -> bool:
        """Whether a product, an opaque kernel or a loop follows from an op."""
        return self._heavy[op]

    def sum_of(self, value: Value) -> Value:
        """The sum that a value is only a term of."""
        while len(users := self.users.get(value, ())) == 1 and users[0].name in ADDS:
            value = users[0].outs[0]
        return value

    def in_order(self, after: Mapping[Op, list[Value]]) -> list[Op]:
        """The ops: those that wait, and what follows from them, behind what they wait for, else in their order."""
        ops, place = self.frame.ops, self.position
        waits = [(place[op], {self.maker[v] for v in values}) for op, values in after.items() if op in place]
        if all(place[made] < k for k, makers in waits for made in makers):
            return ops
        left = [len(makers) for makers in self._needed]
        late: dict[Op, list[int]] = {}
        for k, makers in waits:
            for made in makers - self._needed[k]:
                late.setdefault(made, []).append(k)
                left[k] += 1
        free = [k for k, n in enumerate(left) if not n]
        out: list[Op] = []
        while free:  # the first one of those that can
            op = ops[heapq.heappop(free)]
            out.append(op)
            for k in (*self._followers.get(op, ()), *late.get(op, ())):
                left[k] -= 1
                if not left[k]:
                    heapq.heappush(free, k)
        assert len(out) == len(ops), "products that wait for each other"
        return out


def _reads(op: Op) -> list[Value]:
    """What an op reads from its frame; the bodies of calls, that of values outside."""
    found = {v: None for v in op.ins if v is not None}
    for frame in op.frames:
        for inner in frame.walk():
            found.update((v, None) for v in inner.ins if v is not None)
        for var in frame.jaxpr.outvars:
            if not hasattr(var, "val"):
                found[frame.env[var]] = None
    return list(found)
