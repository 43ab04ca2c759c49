"""The order of a body's products where the program leaves it open, so that what is large does not wait in memory.

In the backward pass of a product two others follow: one of the cotangent with the weight, on which the layer before depends,
and one of the cotangent with what was saved, the weight's gradient, which nobody is in a hurry for. A compiler that is left to
itself (libtpu 0.0.42, default effort) was seen to make all gradients of a network last, with all that was gathered for them in
memory, and in a loop to hold gathered weights until the gradients were on their way. Two rules:

- a product whose sum is scattered waits for those of the same cotangent with gathered weights: these can go before it comes;
- a product from which no other follows is not left behind: the second one after it waits for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..cost.fusion import PRODUCTS, itemsize
from ..plan.collectives import local_bytes
from ..program.ir import Frame, Op, Value
from ..rules import having

if TYPE_CHECKING:
    from ..plan.plan import Plan

ADDS = having(lambda p: p.addition)
HEAVY = having(lambda p: p.product or p.opaque) | {"kernel"}
LARGE = 2**24
"""Bytes of operands on a device from which on it matters how long they are held."""


class Order:
    """Which products wait for what, and the order of ops that follows.

    Attributes:
      after: by ``id`` of a product: the values that must be there before it is made, as their ops leave them (a partial sum
        unsettled).
      awaited: ids of these values.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.after: dict[int, list[Value]] = {}
        frames = {id(op.frame): op.frame for op in plan.program.root.walk() if op.name in PRODUCTS}
        bodies = {i: _Body(frame) for i, frame in frames.items()}
        self._scatters_wait(bodies)
        for body in bodies.values():
            self._none_is_left_behind(body)
        waiting = [f for i, f in frames.items() if any(id(op) in self.after for op in f.ops)]
        self._ordered = {id(f): bodies[id(f)].in_order(self.after) for f in waiting}
        self.awaited = {id(v) for values in self.after.values() for v in values}

    def ops(self, frame: Frame) -> list[Op]:
        """The ops of a body, each after what it waits for."""
        return self._ordered.get(id(frame), frame.ops)

    def _scatters_wait(self, bodies: Mapping[int, _Body]) -> None:
        readers: dict[tuple[int, int], list[Op]] = {}  # (frame, value) → products of it with a large gathered operand
        for sent in self.plan.sent:
            if sent.collectives[0].op != "all-gather" or self._bytes(sent.value, sent.need) < LARGE:
                continue
            for op in sent.users:
                if op.name in PRODUCTS and op.frame is sent.frame:
                    for v in op.ins:
                        if v is not None and v is not sent.value:
                            readers.setdefault((id(sent.frame), id(v)), []).append(op)
        for sent in self.plan.sent:
            if sent.users or sent.collectives[0].op != "reduce-scatter":
                continue
            for op in self._products(sent.value):
                body = bodies[id(op.frame)]
                found = [r for v in op.ins if v is not None for r in readers.get((id(op.frame), id(v)), ())]
                found = [r for r in found if body.position[id(r)] > body.operands_at(op)]
                ends = [body.sum_of(r.outs[0]) for r in found]
                mine = body.follows(op, waits=True) if ends else set()
                free = [v for v in ends if v.op is not None and id(v.op) not in mine and self._is_made(v)]
                if free and not body.heavy_after(op):
                    last = max(free, key=lambda v: body.position[id(v.op)])
                    self._wait(body, op, last)

    def _none_is_left_behind(self, body: _Body) -> None:
        left: list[tuple[Op, int]] = []  # products from which no other follows, and how many have come since
        for op in body.in_order(self.after):
            if op.name not in PRODUCTS or not op.outs:
                continue
            if not body.heavy_after(op):
                if self._operands(op) >= LARGE and self._is_made(op.outs[0]):
                    left.append((op, 0))
                continue
            left = [(o, n + 1) for o, n in left]
            for o in [o for o, n in left if n > 1]:
                self._wait(body, op, o.outs[0])
            left = [(o, n) for o, n in left if n <= 1]

    def _wait(self, body: _Body, op: Op, value: Value) -> None:
        self.after.setdefault(id(op), []).append(value)
        body.waiting.setdefault(id(value), []).append(op)

    def _is_made(self, value: Value) -> bool:
        """Whether a value is there as its op leaves it: not what is made block by block when it is settled."""
        return id(value) not in self.plan.rings.pending and id(value) not in self.plan.generated

    def _products(self, value: Value) -> list[Op]:
        """The products that a partial sum consists of."""
        op = value.op
        if op is None:
            return []
        if op.name in PRODUCTS:
            return [op]
        if id(value) not in self.plan.passed:
            return []
        return [found for v in op.ins if v is not None for found in self._products(v)]

    def _bytes(self, value: Value, spec: tuple[tuple[str, ...], ...]) -> float:
        return local_bytes(value.shape, itemsize(value.aval), spec, self.plan.sizes)

    def _operands(self, op: Op) -> float:
        planned = self.plan.ops.get(id(op))
        if planned is None:
            return 0.0
        pairs = zip(op.ins, planned.ins, strict=True)
        return math.fsum(self._bytes(v, spec) for v, spec in pairs if v is not None and spec is not None)


class _Body:
    """A frame: its ops, and who reads what."""

    def __init__(self, frame: Frame):
        self.frame = frame
        self.ops = {id(op): op for op in frame.ops}
        self.position = {id(op): k for k, op in enumerate(frame.ops)}
        self.maker = {id(v): op for op in frame.ops for v in _makes(op)}
        self.users: dict[int, list[Op]] = {}
        self.waiting: dict[int, list[Op]] = {}
        for op in frame.ops:
            for v in _reads(op):
                self.users.setdefault(id(v), []).append(op)

    def follows(self, op: Op, waits: bool = False) -> set[int]:
        """Ids of the ops that follow from an op, itself among them; ``waits``: those that wait for one of these too."""
        found, todo = {id(op)}, [op]
        while todo:
            for out in _makes(todo.pop()):
                for user in (*self.users.get(id(out), ()), *(self.waiting.get(id(out), ()) if waits else ())):
                    if id(user) not in found:
                        found.add(id(user))
                        todo.append(user)
        return found

    def operands_at(self, op: Op) -> int:
        """The place of the last op that makes an operand of an op."""
        makers = (self.maker.get(id(v)) for v in op.ins if v is not None)
        return max((self.position[id(m)] for m in makers if m is not None), default=-1)

    def heavy_after(self, op: Op) -> bool:
        """Whether a product, an opaque kernel or a loop follows from an op."""
        others = (self.ops[k] for k in self.follows(op) if k != id(op))
        return any(o.name in HEAVY or o.frames for o in others)

    def sum_of(self, value: Value) -> Value:
        """The sum that a value is only a term of."""
        while len(users := self.users.get(id(value), ())) == 1 and users[0].name in ADDS:
            value = users[0].outs[0]
        return value

    def in_order(self, after: Mapping[int, list[Value]]) -> list[Op]:
        """The ops: those that wait, and what follows from them, behind what they wait for, else in their order."""
        if not any(i in after for i in self.ops):
            return self.frame.ops
        made = self.maker
        needed = [
            {id(made[id(v)]) for v in (*_reads(op), *after.get(id(op), ())) if id(v) in made} - {id(op)}
            for op in self.frame.ops
        ]
        followers: dict[int, list[int]] = {}
        for k, makers in enumerate(needed):
            for i in makers:
                followers.setdefault(i, []).append(k)
        left = [len(makers) for makers in needed]
        free = [k for k, n in enumerate(left) if not n]
        out: list[Op] = []
        while free:  # the first one of those that can
            op = self.frame.ops[heapq.heappop(free)]
            out.append(op)
            for k in followers.get(id(op), ()):
                left[k] -= 1
                if not left[k]:
                    heapq.heappush(free, k)
        assert len(out) == len(self.frame.ops), "products that wait for each other"
        return out


def _makes(op: Op) -> list[Value]:
    """What an op makes, in its bodies too."""
    return [*op.outs, *(v for frame in op.frames for inner in frame.walk() for v in inner.outs)]


def _reads(op: Op) -> list[Value]:
    """What an op reads from its frame; the bodies of calls, that of values outside."""
    found = {id(v): v for v in op.ins if v is not None}
    for frame in op.frames:
        for inner in frame.walk():
            found.update((id(v), v) for v in inner.ins if v is not None)
        for var in frame.jaxpr.outvars:
            if not hasattr(var, "val"):
                found[id(frame.env[var])] = frame.env[var]
    return list(found.values())
