"""Where values lie while a program is planned; what moving and settling them sends, and which rule is to blame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ..dims import format_dims
from ..hardware.algorithms import choose_algorithm
from ..layout import AnyMesh, Layout, Spec
from ..program.ir import Frame, Op, Program, Value
from ..rules.rule import REDUCTIONS, Kind, Send
from .claims import Claims, Names
from .collectives import (
    Collective,
    CollectiveOp,
    local_bytes,
    local_shape,
    reduces,
    settlement,
    volume_of,
    wire_bytes,
)
from .plan import Plan, Sent
from .resharding import relayout, relayout_bytes, whole_axes


class Moving:
    """Where the values of a program lie while it is planned, and what bringing them elsewhere sends.

    Attributes:
      now: where each value lies, by ``id(value)``.
      partial, kind_of: axes over which a value is unsettled, and how its parts combine.
      made_by: the op whose split loops left a value partial, and their names.
      copies: (frame, value, spec) moved there once, for all ops of the frame.
      loop_consts: what a loop only reads: the loop, the value outside, how often the loop runs.
      generated: ids of values made from no data: each device makes the part that it needs.
      count: how often what is planned now runs; None: not known.
      within: the loop body whose results are brought into place now.
    """

    def __init__(self, program: Program, layout: Layout, mesh: AnyMesh, topology: str | None = None):
        self.plan = Plan(program, layout, mesh, topology=topology)
        self.program, self.sizes = program, dict(mesh.shape)
        self.claims = Claims(program, layout, self.sizes)
        self.now: dict[int, Spec] = {}
        self.partial: dict[int, tuple[str, ...]] = {}
        self.kind_of: dict[int, Kind] = {}
        self.count: int | None = 1
        self.made_by: dict[int, tuple[Op, list[Names]]] = {}
        self.within: Frame | None = None
        self.copies: dict[tuple[int, int, Spec], Sent | None] = {}
        self.loop_consts: dict[int, tuple[Op, Value, int | None]] = {}
        self.generated: set[int] = set()
        self.weights = {
            tuple(map(program.unifier.find, v.nodes)): v.path for v in reversed(program.inputs) if v.kind == "params"
        }

    def rest(self, value: Value) -> Spec:
        return self.claims.value(value)

    def whole(self, value: Value) -> None:
        self.now[id(value)] = ((),) * len(value.shape)

    def sends(self, op: Op, needs: Sequence[Spec | None], axes: list[tuple[str, ...]]) -> None:
        """Record what the local form of an op sends itself; what is made from no data is made whole instead."""
        if all(v is None or id(v) in self.generated for v in op.ins):
            return
        for send, got in self.sent_by(op, needs, axes):
            count = None if self.count is None else self.count * send.times
            op_kind, dtype = cast(CollectiveOp, send.op), np.dtype(send.dtype)
            name = op.eqn.params["kernel"].name if op.name == "kernel" else op.name
            cause = f"{plus(got)} splits a dim that {name} works along: {send.why}"
            self.plan.collectives.append(
                Collective(
                    op_kind, got, f"{name}: {send.why}", " × ".join(map(str, send.shape)), send.shape, str(dtype),
                    self.send_bytes(send, got), count, cause, op,
                )
            )  # fmt: skip

    def sent_by(
        self, op: Op, needs: Sequence[Spec | None], axes: list[tuple[str, ...]]
    ) -> list[tuple[Send, tuple[str, ...]]]:
        rule = op.rule
        assert rule is not None
        if not any(got and kind == "own" for got, kind in zip(axes, rule.kinds, strict=True)):
            return []
        avals = [v.aval for v in op.eqn.invars]
        shapes = [local_shape(a.shape, need, self.sizes) for a, need in zip(avals, needs, strict=True)]
        if rule.sends_over is not None:
            found = rule.sends_over(shapes, axes, self.sizes)
        elif rule.sends is not None:
            parts = [math.prod(self.sizes[a] for a in got) for got in axes]
            found = [(send, tuple(a for f in send.factors for a in axes[f])) for send in rule.sends(shapes, parts)]
        else:
            return []
        live = [(send, tuple(a for a in got if self.sizes[a] > 1)) for send, got in found]
        return [(send, got) for send, got in live if got]

    def send_bytes(self, send: Send, axes: Sequence[str]) -> float:
        group = math.prod(self.sizes[a] for a in axes)
        volume = math.prod(send.shape) * itemsize(send) * (group if send.op == "all-gather" else 1)
        return wire_bytes(cast(CollectiveOp, send.op), volume, group)

    def wait_as(self, out: Value, value: Value) -> None:
        """A loop's result is a partial sum, as what its body returns."""
        for table in (self.partial, self.kind_of, self.made_by):
            table[id(out)] = table[id(value)]  # type: ignore[index]
        self.plan.unsettled[id(value)] = self.plan.unsettled[id(out)] = self.partial[id(value)]
        self.plan.waiting[id(out)] = self.partial[id(value)]

    def ready(self, value: Value | None, op: Op) -> None:
        if value is not None:
            self.settle(value, op)

    def scatters(self, value: Value) -> bool:
        """Whether settling a partial sum would split it further."""
        scatter, _ = settlement(self.now[id(value)], self.rest(value), self.partial[id(value)], self.kind_of[id(value)])
        return bool(scatter) or self.kind_of[id(value)] != "sum"

    def finish(self, op: Op, out: Value) -> None:
        """Bring a result to the spec in which it rests."""
        rest = self.rest(out)
        if self.now[id(out)] != rest:
            self.move(out, rest, op, f"the layout keeps this result of {op.name} so")
            self.now[id(out)] = rest

    def bytes_between(self, value: Value, have: Spec, need: Spec) -> float:
        return relayout_bytes(have, need, value.shape, itemsize(value.aval), self.sizes)

    # -- moving

    def settle(self, value: Value, op: Op | None, note: str = "") -> None:
        """Make a partial value whole: reduce-scatter where its layout splits it over that axis, else all-reduce."""
        axes = self.partial.pop(id(value), None)
        if axes is None:
            return
        made, names = self.made_by[id(value)]
        have, rest = self.now[id(value)], self.rest(value)
        scatter, reduce = settlement(have, rest, axes, self.kind_of[id(value)])
        # the smaller piece is reduced: scatter first
        spec, before = have, len(self.plan.collectives)
        for i, scattered in scatter.items():
            target = tuple((*s, *scattered) if k == i else s for k, s in enumerate(spec))
            dim = self.program.dim_name(value, i) or f"dim {i}"
            why = self.contracted(made, names, scattered)
            self.record("reduce-scatter", tuple(scattered), value, made, spec,
                        f"{why}; the result is split over {plus(scattered)} on `{dim}`")  # fmt: skip
            if len(self.plan.collectives) > before:
                self.plan.algorithms.setdefault(id(value), {})[i] = self.plan.collectives[-1].algorithm
            spec = target
        new = self.plan.collectives[before:]
        if new:
            frame = self.program.root if op is None else self.within or op.frame
            self.plan.sent.append(Sent(value, have, spec, frame, self.count, new))
        if reduce:
            why = self.contracted(made, names, reduce)
            cause = f"{why}; no dim of the result is split over {plus(reduce)}"
            if reduces(self.kind_of[id(value)], value.aval.dtype):
                self.record("all-reduce", reduce, value, made, spec, cause)
            else:
                self.record("all-gather", reduce, value, made, spec, cause, math.prod(self.sizes[a] for a in reduce))
        self.now[id(value)] = spec
        self.plan.settled.add(id(value))
        self.move(value, rest, made, "the layout keeps it so")
        self.now[id(value)] = rest

    def contracted(self, op: Op, names: list[Names], axes: Sequence[str]) -> str:
        plan = self.plan.ops.get(id(op))
        parts = []
        for f, got in enumerate(plan.factor_axes or ()) if plan else ():
            mine = [a for a in got if a in axes]
            if mine and op.rule is not None and op.rule.kinds[f] in (*REDUCTIONS, "map", "own"):
                rule = self.claims.rule_text(names[f], mine[0])
                dim = names[f][0] if names[f] else "a factor"
                parts.append(f"`{rule or plus(mine)}` splits `{dim}`, which {op.name} contracts")
        return " and ".join(parts) or f"partial sums over {plus(axes)}"

    def move(self, value: Value, need: Spec, op: Op | None, cause: str) -> None:
        """Record what it takes to bring a value into another spec (it stays where it lies for others)."""
        have = self.now[id(value)]
        if have == need or id(value) in self.generated:
            return
        for step in relayout(have, need, value.shape, self.sizes):
            if step.op != "slice":
                sent = step.bytes(value.shape, itemsize(value.aval), self.sizes)
                self.note(step.op, whole_axes(step.axes), value, op, sent, cause)

    def record(
        self, kind: CollectiveOp, axes: tuple[str, ...], value: Value, op: Op | None, spec: Spec, cause: str, parts: int = 1
    ) -> None:  # fmt: skip
        axes = tuple(a for a in axes if self.sizes[a] > 1)
        if not axes:
            return
        group = math.prod(self.sizes[a] for a in axes)
        volume = parts * local_bytes(value.shape, itemsize(value.aval), spec, self.sizes)
        self.note(kind, axes, value, op, wire_bytes(kind, volume, group), cause)

    def note(
        self, kind: CollectiveOp, axes: tuple[str, ...], value: Value, op: Op | None, sent: float, cause: str
    ) -> None:
        if 0 in value.shape:
            return
        c = Collective(
            kind, axes, value.path or self.called(value), format_dims(self.program.dims(value)), value.shape,
            str(value.aval.dtype), sent, self.count, cause, op,
        )  # fmt: skip
        stages = [s for a in axes for s in self.plan.torus[a]]
        c.algorithm, c.why = choose_algorithm(kind, volume_of(c, self.sizes), stages, self.plan.chip)
        self.plan.collectives.append(c)

    def called(self, value: Value) -> str:
        """How reports call a value without a path: after the weight that it is as, else after the op that made it."""
        made = value.op.name if value.op is not None else "value"
        nodes = value.nodes
        weight = self.weights.get(tuple(map(self.program.unifier.find, nodes))) if len(nodes) > 1 else None
        return f"{made} ~ {weight}" if weight else made

    def operand(self, op: Op, value: Value, need: Spec, names: Sequence[Names] | None = None) -> None:
        """Bring an operand into the spec that an op needs, and say why it had to move."""
        have = self.now[id(value)]
        if have == need or id(value) in self.generated:
            return
        cause = self.why_moved(op, value, have, need, names)
        around, frame, count = self.around(value, need), op.frame, self.count
        if around is not None:  # moved once, before the loops that only read it
            loop, value, self.count = around
            op, frame = loop, loop.frame
        copy = (id(frame), id(value), need)
        if copy not in self.copies:
            before = len(self.plan.collectives)
            self.move(value, need, op, cause)
            new = self.plan.collectives[before:]
            sent = Sent(value, have, need, frame, self.count, new) if new and around is None else None
            self.copies[copy] = sent
            if sent is not None:
                self.plan.sent.append(sent)
        sent = self.copies[copy]
        if sent is not None:
            sent.users.append(op)
        self.count = count

    def around(self, value: Value, need: Spec) -> tuple[Op, Value, int | None] | None:
        """(the outermost loop that only reads a value, what it is outside, how often that loop runs)."""
        found = None
        while id(value) in self.loop_consts:
            self.plan.hoisted.setdefault(id(value), []).append(need)
            found = self.loop_consts[id(value)]
            value = found[1]
        return found

    def why_moved(self, op: Op, value: Value, have: Spec, need: Spec, names: Sequence[Names] | None) -> str:
        reasons = []
        for i, (h, n) in enumerate(zip(have, need, strict=True)):
            for a in h:
                if a in n:
                    continue
                dim = self.program.dim_name(value, i) or f"dim {i}"
                rule = (
                    self.claims.rule_text([x for ns, _ in self.program.parts(value, i) for x in ns], a) or f"{dim}: {a}"
                )
                winner = None
                plan = self.plan.ops.get(id(op))
                if plan is not None and plan.factor_axes is not None and names is not None:
                    winner = next(
                        (names[f][0] for f, got in enumerate(plan.factor_axes) if a in got and names[f]), None
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


def itemsize(aval: Any) -> float:
    try:
        return np.dtype(aval.dtype).itemsize
    except TypeError:  # keys: threefry has two 32-bit words
        return 8


def plus(axes: Sequence[str]) -> str:
    return "+".join(f"`{a}`" for a in axes)
