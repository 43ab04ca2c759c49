"""Making a plan: one walk over the program, op by op, that brings values into place and notes what that sends."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._compat import scan_counts, user_stacklevel
from ..dims import did_you_mean, format_dims, near
from ..errors import JoinError, JoinWarning, UnknownDimError
from ..layout import AnyMesh, Layout, Rule, Spec, divisibility_error, to_partition_spec
from ..program.graph import Frame, Op, Program, Value
from ..program.rules import LINEAR, SCALINGS
from ..program.rules.rule import Kind
from .claims import Claims, Names, blocks_only, spec_of
from .collectives import Collective, CollectiveOp, local_bytes, reduces, relayout, settlement, wire_bytes
from .plan import Held, OpPlan, Plan


def make_plan(program: Program, layout: Layout, mesh: AnyMesh, *, strict: bool = False, init: bool = False) -> Plan:
    """Plan a program under a layout on a mesh.

    Args:
      strict: two names for one dim are an error instead of a warning.
      init: the program makes the state, so it need not have the dims of the batch.

    Raises:
      UnknownAxisError, UnknownDimError, DivisibilityError, JoinError.
    """
    layout.check_axes(mesh)
    _check_dims(program, layout, init)
    _check_joins(program, strict)
    axes = sorted((program.all_names() & set(mesh.shape)) - set(layout.dims))
    plan = _Planner(program, layout.with_first([Rule(a, (a,)) for a in axes]), mesh).run()
    for a in axes:  # models that name axes in their metadata, as Flax allows
        plan.notes.insert(0, f"`{a}` is called after an axis of the mesh and has no rule: it is taken as `{a}: {a}`")
    return plan


def _check_dims(program: Program, layout: Layout, init: bool) -> None:
    if layout.from_pairs:
        return  # a Flax rule list serves many models; the plan lists what has no effect
    names = program.all_names()
    for rule in layout.rules:
        if rule.dim in names:
            continue
        if init and not (set(near(rule.dim, names)) - set(layout.dims)):
            continue
        raise UnknownDimError(
            f"rule `{rule}` names dim `{rule.dim}`, which no value of the program has",
            dim=rule.dim,
            rule=str(rule),
            fixes=[
                *did_you_mean(rule.dim, names, "dims"),
                "or remove the rule, or name the dim (dims=…, Flax metadata, mp.named)",
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


class _Planner:
    def __init__(self, program: Program, layout: Layout, mesh: AnyMesh):
        self.plan = Plan(program, layout, mesh)
        self.program, self.sizes = program, dict(mesh.shape)
        self.claims = Claims(program, layout, self.sizes)
        self.now: dict[int, Spec] = {}  # where each value lies
        self.partial: dict[int, tuple[str, ...]] = {}  # axes over which a value is an unsettled sum
        self.kind_of: dict[int, Kind] = {}  # how partial values combine
        self.count: int | None = 1
        self.made_by: dict[int, tuple[Op, list[Names]]] = {}
        self.copies: set[tuple[int, int, Spec]] = (
            set()
        )  # (frame, value, spec): moved once, used by all ops of the frame
        self.generated: set[int] = set()  # made from no data: each device makes the part that it needs
        self.weights = {
            tuple(map(program.unifier.find, v.nodes)): v.path for v in reversed(program.inputs) if v.kind == "params"
        }

    # -- the walk

    def run(self) -> Plan:
        plan = self.plan
        for value in self.program.inputs:
            spec = self.rest(value)
            self.check_divides(value)
            self.now[id(value)] = spec
            plan.inputs.append(self.held(value, spec, value.path or "", value.kind))
        for var in self.program.closed.jaxpr.constvars:
            self.whole(self.program.root.env[var])
        self.frame(self.program.root)
        for value in self.program.outputs:
            if id(value) not in self.now and id(value) not in self.partial:
                self.whole(value)
            self.settle(value, None)
            spec = self.rest(value)
            self.check_divides(value)
            self.move(value, spec, None, f"the result {value.path} is kept so")
            plan.out_specs.append(spec)
            plan.outputs.append(self.held(value, spec, value.path or "", value.kind))
        plan.specs, plan.generated = self.now, self.generated
        for value, i, rule in self.claims.refused.values():
            text = str(plan.layout.rules[rule])
            dims = format_dims(self.program.dims(value))
            note = f"`{text}` does not divide dim {i} of {list(value.shape)} ({dims}), which is left whole"
            if note not in plan.notes:
                plan.notes.append(note)
        return plan

    def whole(self, value: Value) -> None:
        self.now[id(value)] = ((),) * len(value.shape)

    def held(self, value: Value, spec: Spec, path: str, kind: str | None) -> Held:
        return Held(path, format_dims(self.program.dims(value)), value.shape, str(value.aval.dtype),
                    to_partition_spec(spec), local_bytes(value.shape, _itemsize(value.aval), spec, self.sizes), kind)  # fmt: skip

    def check_divides(self, value: Value) -> None:
        refused = self.claims.refused.get(id(value))
        if refused is None or value.annotation is None or value.annotation[refused[1]] is None:
            return
        _, i, rule = refused
        raise divisibility_error(
            path=value.path or "an input", shape=value.shape, dims=format_dims(value.annotation),
            dim=str(value.annotation[i]), size=value.shape[i], rule=self.plan.layout.rules[rule], sizes=self.sizes,
            dtype=value.aval.dtype,
        )  # fmt: skip

    def rest(self, value: Value) -> Spec:
        return self.claims.value(value)

    def frame(self, frame: Frame) -> None:
        before = self.count
        if frame.trips is None:
            self.count = None
        elif self.count is not None:
            self.count *= frame.trips
        for var in frame.jaxpr.constvars:
            if id(frame.env[var]) not in self.now:
                self.whole(frame.env[var])
        for op in frame.ops:
            handler = _HANDLERS.get(op.name)
            if handler is not None:
                handler(self, op)
            elif op.frames:
                self.call(op)
            elif op.rule is None:
                self.elementwise(op)
            else:
                self.by_rule(op)
            if (
                not op.frames
                and op.name != "random_bits"
                and all(v is None or id(v) in self.generated for v in op.ins)
                and not any(id(v) in self.partial for v in op.outs)
            ):
                self.generated.update(map(id, op.outs))
        self.count = before

    # -- moving values

    def settle(self, value: Value, op: Op | None, note: str = "") -> None:
        """Make a partial value whole: reduce-scatter where its layout splits it over that axis, else all-reduce."""
        axes = self.partial.pop(id(value), None)
        if axes is None:
            return
        made, names = self.made_by[id(value)]
        have, rest = self.now[id(value)], self.rest(value)
        scatter, reduce = settlement(have, rest, axes, self.kind_of[id(value)])
        # the smaller piece is reduced: scatter first
        spec = have
        for i, scattered in scatter.items():
            target = tuple((*s, *scattered) if k == i else s for k, s in enumerate(spec))
            dim = self.program.dim_name(value, i) or f"dim {i}"
            why = self.contracted(made, names, scattered)
            self.record("reduce-scatter", tuple(scattered), value, made, spec,
                        f"{why}; the result is split over {_plus(scattered)} on `{dim}`")  # fmt: skip
            spec = target
        if reduce:
            why = self.contracted(made, names, reduce)
            cause = f"{why}; no dim of the result is split over {_plus(reduce)}"
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
            if mine and op.rule is not None and op.rule.kinds[f] not in ("map", "whole"):
                rule = self.claims.rule_text(names[f], mine[0])
                dim = names[f][0] if names[f] else "a factor"
                parts.append(f"`{rule or _plus(mine)}` splits `{dim}`, which {op.name} contracts")
        return " and ".join(parts) or f"partial sums over {_plus(axes)}"

    def move(self, value: Value, need: Spec, op: Op | None, cause: str) -> None:
        """Record what it takes to bring a value into another spec (it stays where it lies for others)."""
        have = self.now[id(value)]
        if have == need or id(value) in self.generated:
            return
        spec = have
        for kind, axes, after in relayout(have, need):
            self.record(kind, axes, value, op, after if kind == "all-gather" else spec, cause)
            spec = after

    def record(
        self,
        kind: CollectiveOp,
        axes: tuple[str, ...],
        value: Value,
        op: Op | None,
        spec: Spec,
        cause: str,
        parts: int = 1,
    ) -> None:
        axes = tuple(a for a in axes if self.sizes[a] > 1)
        if not axes or 0 in value.shape:
            return
        group = math.prod(self.sizes[a] for a in axes)
        volume = parts * local_bytes(value.shape, _itemsize(value.aval), spec, self.sizes)
        tensor = value.path or self.called(value)
        self.plan.collectives.append(
            Collective(
                kind, axes, tensor, format_dims(self.program.dims(value)), value.shape, str(value.aval.dtype),
                wire_bytes(kind, volume, group), self.count, cause, op.eqn if op is not None else None,
            )
        )  # fmt: skip

    def called(self, value: Value) -> str:
        """How reports call a value without a path: after the weight that it is as, else after the op that made it."""
        made = value.op.name if value.op is not None else "value"
        nodes = value.nodes
        weight = self.weights.get(tuple(map(self.program.unifier.find, nodes))) if len(nodes) > 1 else None
        return f"{made} ~ {weight}" if weight else made

    def operand(self, op: Op, value: Value, need: Spec, names: Sequence[Names] | None = None) -> None:
        """Bring an operand into the spec that an op needs, and say why it had to move."""
        have = self.now[id(value)]
        copy = (id(op.frame), id(value), need)
        if have == need or copy in self.copies:
            return
        self.copies.add(copy)
        self.move(value, need, op, self.why_moved(op, value, have, need, names))

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

    # -- ops

    def elementwise(self, op: Op) -> None:
        if op.name == "optimization_barrier":
            for value, out in zip(op.ins, op.outs, strict=True):
                if value is None:
                    self.whole(out)
                elif id(value) in self.partial:
                    self.pass_on(op, value, out, self.now[id(value)])
                else:
                    self.now[id(out)] = self.now[id(value)]
            return
        (out,) = op.outs
        waiting = [v for v in op.ins if v is not None and id(v) in self.partial]
        if waiting and self.stays_partial(op, out):
            return
        for v in waiting:
            self.settle(v, op)
        spec = self.claims.elementwise(op, out)
        needs = [None if v is None else stretched(spec, v.shape, out.shape) for v in op.ins]
        self.plan.ops[id(op)] = OpPlan(needs, [spec])
        for v, need in zip(op.ins, needs, strict=True):
            if v is not None and need is not None:
                self.operand(op, v, need)
        self.now[id(out)] = spec
        self.finish(op, out)

    def stays_partial(self, op: Op, out: Value) -> bool:
        """Whether an elementwise op is linear in partial sums over the same axes, so that its result is one too."""
        arrays = [v for v in op.ins if v is not None]
        waiting = [v for v in arrays if id(v) in self.partial]
        if not waiting or any(v.shape != out.shape for v in waiting):
            return False
        if len({(self.partial[id(v)], self.now[id(v)], self.kind_of[id(v)]) for v in waiting}) > 1:
            return False
        if self.kind_of[id(waiting[0])] != "sum":
            return False
        linear = op.name in LINEAR and len(waiting) == len(op.ins)
        others = [v for v in op.ins if v is None or id(v) not in self.partial]
        scaled = op.name in SCALINGS and len(waiting) == 1 and all(v is None or not v.shape for v in others)
        if op.name == "div":
            scaled = scaled and op.ins[0] is waiting[0]
        if linear or scaled:
            self.pass_on(op, waiting[0], out, self.now[id(waiting[0])])
        return linear or scaled

    def pass_on(self, op: Op, value: Value, out: Value, spec: Spec, axes: list[tuple[str, ...]] | None = None) -> None:
        """A linear op on a partial sum makes a partial sum."""
        partial, kind = self.partial[id(value)], self.kind_of[id(value)]
        self.plan.passed[id(out)] = OpPlan([self.now[id(value)]], [spec], partial, axes, kind)
        self.partial[id(out)] = self.partial[id(value)]
        self.plan.unsettled[id(value)] = self.partial[id(value)]
        self.kind_of[id(out)] = self.kind_of[id(value)]
        self.made_by[id(out)] = self.made_by[id(value)]
        self.now[id(out)] = spec

    def by_rule(self, op: Op) -> None:
        rule = op.rule
        assert rule is not None
        first = op.ins[0] if op.ins else None
        if (
            rule.strong
            and 0 in rule.linear
            and first is not None
            and id(first) in self.partial
            and not op.eqn.outvars[1:]
        ) and self.carry_partial(op, first):
            return
        for v in op.ins:
            if v is not None and id(v) in self.partial:
                self.settle(v, op)
        names = self.claims.factor_names(op)
        scopes = self.claims.op_scopes(op, op.outs)
        costed = self.plan.layout.resolve == "cost"
        axes = self.claims.op(op, names, scopes, (lambda a: self.cost(op, a)) if costed else None)
        partial, kind = self.partial_axes(op, axes)
        needs = [None if v is None else spec_of(d, axes) if d else ((),) * len(v.shape)
                 for v, d in zip(op.ins, rule.ins, strict=True)]  # fmt: skip
        outs = [spec_of(d, axes) for d in rule.outs]
        self.plan.ops[id(op)] = OpPlan(needs, outs, partial, axes, kind)
        for v, need in zip(op.ins, needs, strict=True):
            if v is not None and need is not None:
                self.operand(op, v, need, names)
        for out, spec in zip(op.outs, outs, strict=True):
            self.now[id(out)] = spec
            if partial:
                self.partial[id(out)] = partial
                self.kind_of[id(out)] = kind
                self.made_by[id(out)] = (op, names)
            else:
                self.finish(op, out)

    def partial_axes(self, op: Op, axes: list[tuple[str, ...]]) -> tuple[tuple[str, ...], Kind]:
        rule = op.rule
        assert rule is not None
        found: list[tuple[str, Kind]] = [
            (a, k) for got, k in zip(axes, rule.kinds, strict=True) if k not in ("map", "whole") for a in got
        ]
        order = list(self.sizes)
        kind: Kind = found[0][1] if found else "sum"
        return tuple(sorted((a for a, _ in found), key=order.index)), kind

    def carry_partial(self, op: Op, value: Value) -> bool:
        """Pass a partial sum through a transpose or reshape."""
        rule = op.rule
        assert rule is not None
        axes: list[tuple[str, ...]] = [()] * len(rule.sizes)
        for entry, factors in zip(self.now[id(value)], rule.ins[0], strict=True):
            if entry and factors:
                f = factors[0]
                if rule.kinds[f] != "map" or rule.sizes[f] % math.prod(self.sizes[a] for a in entry):
                    return False
                axes[f] = entry
        if blocks_only(rule, axes, self.sizes) != axes:
            return False
        self.pass_on(op, value, op.outs[0], spec_of(rule.outs[0], axes), axes)
        return True

    def cost(self, op: Op, axes: list[tuple[str, ...]]) -> float:
        """Bytes that a choice of claims moves: operands, partial sums, results."""
        rule = op.rule
        assert rule is not None
        axes = blocks_only(rule, axes, self.sizes)
        total = 0.0
        for v, d in zip(op.ins, rule.ins, strict=True):
            if v is not None and d:
                total += self.bytes_between(v, self.now[id(v)], spec_of(d, axes))
        partial, kind = self.partial_axes(op, axes)
        for v, d in zip(op.outs, rule.outs, strict=True):
            spec, rest = spec_of(d, axes), self.rest(v)
            if partial:
                group = math.prod(self.sizes[a] for a in partial)
                volume = local_bytes(v.shape, _itemsize(v.aval), spec, self.sizes)
                scattered = kind == "sum" and all(any(a in entry for entry in rest) for a in partial)
                total += wire_bytes("reduce-scatter" if scattered else "all-reduce", volume, group)
            else:
                total += self.bytes_between(v, spec, rest)
        return total

    def bytes_between(self, value: Value, have: Spec, need: Spec) -> float:
        total, spec = 0.0, have
        for kind, axes, after in relayout(have, need):
            group = math.prod(self.sizes[a] for a in axes)
            at = after if kind == "all-gather" else spec
            total += wire_bytes(kind, local_bytes(value.shape, _itemsize(value.aval), at, self.sizes), group)
            spec = after
        return total

    def finish(self, op: Op, out: Value) -> None:
        """Bring a result to the spec in which it rests."""
        rest = self.rest(out)
        if self.now[id(out)] != rest:
            self.move(out, rest, op, f"the layout keeps this result of {op.name} so")
            self.now[id(out)] = rest

    # -- control flow

    def ready(self, value: Value | None, op: Op) -> None:
        if value is not None:
            self.settle(value, op)

    def literal(self, value: Value) -> None:
        """Results of bodies that are literals lie everywhere."""
        if id(value) not in self.now:
            self.whole(value)

    def call(self, op: Op) -> None:
        for frame in op.frames:
            for v in frame.ins():
                self.literal(v)
            self.frame(frame)
        for out in op.outs:
            self.literal(out)

    def enter(self, outer: Value | None, inner: Value, need: Spec, op: Op, drop: int = 0) -> None:
        """Bring what a body reads into place, and note where it lies inside."""
        if outer is not None:
            self.operand(op, outer, ((),) * drop + need)
        self.now[id(inner)] = need

    def leave(self, frame: Frame, var: Any, need: Spec | None, op: Op) -> Spec | None:
        """Settle what a body returns, and bring it into the spec that is asked for."""
        if hasattr(var, "val"):
            return need
        value = frame.env[var]
        self.settle(value, op)
        if need is not None:
            self.operand(op, value, need)
            return need
        return self.now[id(value)]

    def scan(self, op: Op) -> None:
        nc, nk = scan_counts(op.eqn.params)
        (frame,) = op.frames
        inner = frame.ins()
        for v in op.ins:
            self.ready(v, op)
        for i, (v, w) in enumerate(zip(op.ins, inner, strict=True)):
            if i < nc:
                self.enter(v, w, self.now[id(v)] if v is not None else ((),) * len(w.shape), op)
            elif i < nc + nk:
                self.enter(v, w, self.rest(w), op)
            else:
                self.enter(v, w, self.now[id(v)][1:] if v is not None else ((),) * len(w.shape), op, 1)
        needs: list[Spec | None] = [self.rest(w) for w in inner[nc : nc + nk]]
        needs += [None] * (len(frame.jaxpr.outvars) - nk)
        results = self.body(frame, needs, op)
        for k, out in enumerate(op.outs):
            spec = results[k] or ((),) * (len(out.shape) - (k >= nk))
            self.now[id(out)] = spec if k < nk else ((), *spec)
            self.finish(op, out)

    def body(self, frame: Frame, needs: list[Spec | None], op: Op) -> list[Spec | None]:
        """Plan a loop body, and bring its results into place inside the loop."""
        self.frame(frame)
        before = self.count
        self.count = None if frame.trips is None or before is None else before * frame.trips
        out = [self.leave(frame, v, need, op) for v, need in zip(frame.jaxpr.outvars, needs, strict=True)]
        self.count = before
        return out

    def while_(self, op: Op) -> None:
        p = op.eqn.params
        nc, nb = p["cond_nconsts"], p["body_nconsts"]
        for v in op.ins:
            self.ready(v, op)
        cond, body = op.frames
        carry = body.ins()[nb:]
        for v, w in zip(op.ins[nc + nb :], carry, strict=True):
            self.enter(v, w, self.rest(w), op)
        for frame, consts in ((cond, op.ins[:nc]), (body, op.ins[nc : nc + nb])):
            for v, w in zip(consts, frame.ins(), strict=False):
                self.enter(v, w, self.now[id(v)] if v is not None else ((),) * len(w.shape), op)
        self.body(cond, [()], op)
        results = self.body(body, [self.rest(w) for w in carry], op)
        for out, spec in zip(op.outs, results, strict=True):
            self.now[id(out)] = spec or ((),) * len(out.shape)
            self.finish(op, out)

    def cond(self, op: Op) -> None:
        for v in op.ins:
            self.ready(v, op)
        for frame in op.frames:
            for v, w in zip(op.ins[1:], frame.ins(), strict=True):
                self.enter(v, w, self.now[id(v)] if v is not None else ((),) * len(w.shape), op)
            self.body(frame, [self.rest(out) for out in op.outs], op)
        for out in op.outs:
            self.now[id(out)] = self.rest(out)

    def named(self, op: Op) -> None:
        """An identity: the value lies where its own names put it."""
        (value,), (out,) = op.ins, op.outs
        if value is None:
            self.whole(out)
            return
        if id(value) in self.partial:
            self.pass_on(op, value, out, self.now[id(value)])
            return
        self.now[id(out)] = self.now[id(value)]
        rest = self.rest(out)
        self.plan.ops[id(op)] = OpPlan([rest], [rest])
        self.finish(op, out)


_HANDLERS: Mapping[str, Any] = {
    "scan": _Planner.scan,
    "while": _Planner.while_,
    "cond": _Planner.cond,
    "name_dims": _Planner.named,
    "rename_dims": _Planner.named,
    "place": _Planner.named,
    "sharding_constraint": _Planner.named,
}


def stretched(spec: Spec, shape: Sequence[int], out: Sequence[int]) -> Spec:
    """The spec of an operand that an elementwise op stretches to its result: whole along dims of size 1."""
    if shape == out:
        return spec
    if len(shape) != len(out):
        return ((),) * len(shape)
    return tuple(axes if n == m else () for axes, n, m in zip(spec, shape, out, strict=True))


def _itemsize(aval: Any) -> float:
    try:
        return np.dtype(aval.dtype).itemsize
    except TypeError:  # keys: threefry has two 32-bit words
        return 8


def _plus(axes: Sequence[str]) -> str:
    return "+".join(f"`{a}`" for a in axes)
