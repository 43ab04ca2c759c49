"""Making a plan: one walk over the program, op by op, that brings values into place and notes what that sends."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

from .._compat import user_stacklevel
from ..dims import did_you_mean, format_dims, near
from ..errors import JoinError, JoinWarning, UnknownDimError, UnsupportedError
from ..layout import AnyMesh, Layout, Rule, Spec, divisibility_error, to_partition_spec
from ..program.graph import Frame, Op, Program, Value
from ..program.rules import LINEAR, SCALINGS
from ..program.rules.rule import Kind
from .claims import blocks_only, spec_of
from .collectives import (
    local_bytes,
    wire_bytes,
)
from .control import HANDLERS, Accumulation, accumulate, call
from .hardware import note_crossings, price
from .moving import Moving, itemsize, plus
from .overlap import decide
from .plan import Held, OpPlan, Plan
from .reshape import reshape_axes


def make_plan(
    program: Program, layout: Layout, mesh: AnyMesh, *, strict: bool = False, init: bool = False,
    topology: str | None = None, donated: Iterable[int] = (), overlap: str = "off",
) -> Plan:  # fmt: skip
    """Plan a program under a layout on a mesh.

    Args:
      strict: two names for one dim are an error instead of a warning.
      init: the program makes the state, so it need not have the dims of the batch.
      topology: the slices that an abstract mesh lies on, ``"v5p:8x8x8"``: for times.
      donated: positions of the flat inputs whose memory the results may take.
      overlap: how gathers before products and scatters after them are made: :data:`meshpar.plan.overlap.MODES`.

    Raises:
      UnsupportedError: an ``overlap`` that does not exist.
      UnknownAxisError, UnknownDimError, DivisibilityError, JoinError.
    """
    layout.check_axes(mesh)
    _check_dims(program, layout, init)
    _check_joins(program, strict)
    axes = sorted((program.all_names() & set(mesh.shape)) - set(layout.dims))
    plan = Planner(program, layout.with_first([Rule(a, (a,)) for a in axes]), mesh, topology).run()
    plan.asked, plan.donated = layout, frozenset(donated)
    decide(plan, overlap)
    price(plan)
    note_crossings(plan)
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
        if (init or rule.dim in layout.optional) and not (set(near(rule.dim, names)) - set(layout.dims)):
            continue
        raise UnknownDimError(
            f"rule `{rule}` names dim `{rule.dim}`, which no value of the program has",
            dim=rule.dim,
            rule=str(rule),
            fixes=[
                *did_you_mean(rule.dim, names, "dims"),
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


OPAQUE = frozenset({"pallas_call", "ffi_call", "custom_call", "tpu_custom_call", "mosaic_gpu_call"})


class Planner(Moving):
    """The walk: every op says where it needs its operands and where it leaves its results."""

    def __init__(self, program: Program, layout: Layout, mesh: AnyMesh, topology: str | None = None):
        super().__init__(program, layout, mesh, topology)
        self.accumulating: dict[int, Accumulation] = {}  # carries that a loop only adds to
        self.depth = 0  # of the loops around

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

    def held(self, value: Value, spec: Spec, path: str, kind: str | None) -> Held:
        return Held(path, format_dims(self.program.dims(value)), value.shape, str(value.aval.dtype),
                    to_partition_spec(spec), local_bytes(value.shape, itemsize(value.aval), spec, self.sizes), kind)  # fmt: skip

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

    def frame(self, frame: Frame) -> None:
        before = self.count
        if frame.trips is None:
            self.count = None
        elif self.count is not None:
            self.count *= frame.trips
        loop = frame.parent is not None and frame.parent.name == "scan"
        self.depth += loop
        for var in frame.jaxpr.constvars:
            if id(frame.env[var]) not in self.now:
                self.whole(frame.env[var])
        for op in frame.ops:
            if op.frames:
                HANDLERS.get(op.name, call)(self, op)
            elif op.name in IDENTITIES:
                self.named(op)
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
        self.depth -= loop

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
        acc = next((self.accumulating[id(v)] for v in op.ins if v is not None and id(v) in self.accumulating), None)
        if acc is not None and accumulate(self, op, acc):
            return
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
        if any(a.widened is waiting[0] and a.addend is out for a in self.accumulating.values()):
            self.pass_on(op, waiting[0], out, self.now[id(waiting[0])])
            return True
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
        self.plan.passed[id(out)] = OpPlan([self.now[id(value)]], [spec], [partial], axes, kind)
        self.partial[id(out)] = self.partial[id(value)]
        self.plan.unsettled[id(value)] = self.partial[id(value)]
        self.kind_of[id(out)] = self.kind_of[id(value)]
        self.made_by[id(out)] = self.made_by[id(value)]
        self.now[id(out)] = spec

    def by_rule(self, op: Op) -> None:
        rule = op.rule
        assert rule is not None
        if op.name in OPAQUE:
            self.refuse_opaque(op)
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
        if (
            op.name == "reshape"
            and first is not None
            and not (id(first) in self.generated or id(first) in self.loop_consts)
        ):
            axes = list(reshape_axes(rule, axes, self.now[id(first)], self.rest(op.outs[0]), self.sizes))
        partial, kind = self.partial_axes(op, axes)
        needs = [None if v is None else spec_of(d, axes) if d else ((),) * len(v.shape)
                 for v, d in zip(op.ins, rule.ins, strict=True)]  # fmt: skip
        outs = [spec_of(d, axes) for d in rule.outs]
        self.plan.ops[id(op)] = OpPlan(needs, outs, partial, axes, kind)
        for v, need in zip(op.ins, needs, strict=True):
            if v is not None and need is not None:
                self.operand(op, v, need, names)
        self.sends(op, needs, axes)
        for out, spec, waiting in zip(op.outs, outs, partial, strict=True):
            self.now[id(out)] = spec
            if waiting:
                self.partial[id(out)] = waiting
                self.kind_of[id(out)] = kind
                self.made_by[id(out)] = (op, names)
            else:
                self.finish(op, out)

    def refuse_opaque(self, op: Op) -> None:
        """A kernel without a rule may be called with whole operands only: nobody knows what it does to a shard."""
        for value in op.ins:
            if value is None:
                continue
            lies = self.now[id(value)]
            for i, axes in enumerate(lies):
                if not any(self.sizes[a] > 1 for a in axes):
                    continue
                dim = self.program.dim_name(value, i) or f"dim {i}"
                names = [x for ns, _ in self.program.parts(value, i) for x in ns]
                raise UnsupportedError(
                    f"{op.name} has no factor rule, and `{dim}` of its operand is split over {plus(axes)}",
                    shape=value.shape,
                    dims=format_dims(self.program.dims(value)),
                    dim=dim,
                    axis="+".join(axes),
                    rule=self.claims.rule_text(names, axes[0]),
                    source=op.source,
                    fixes=[
                        "declare which dims may be split, on the function around it: "
                        '@mp.kernel_rule("tokens embed, embed mlp -> tokens mlp")',
                        f"or keep `{dim}` whole here, under another name: mp.rename(x, {dim}=…)",
                    ],
                )

    def partial_axes(self, op: Op, axes: list[tuple[str, ...]]) -> tuple[list[tuple[str, ...]], Kind]:
        """(the axes over which every result is partial, how partial results combine)."""
        rule = op.rule
        assert rule is not None
        order = list(self.sizes)
        kind: Kind = "sum"
        partial = []
        for k in range(len(op.outs)):
            factors = [f for f in rule.partial_factors(k) if axes[f]]
            for f in factors:
                if rule.kinds[f] not in ("map", "own"):
                    kind = rule.kinds[f]
            kept = {a for dim in rule.outs[k] for f in dim for a in axes[f]}
            partial.append(tuple(sorted({a for f in factors for a in axes[f]} - kept, key=order.index)))
        return partial, kind

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
        """Bytes that a choice of claims moves: operands, what the op sends itself, partial sums, results."""
        rule = op.rule
        assert rule is not None
        axes = blocks_only(rule, axes, self.sizes)
        needs = [None if v is None or not d else spec_of(d, axes) for v, d in zip(op.ins, rule.ins, strict=True)]
        total = sum(self.send_bytes(send, got) * send.times for send, got in self.sent_by(op, needs, axes))
        for v, d in zip(op.ins, rule.ins, strict=True):
            if v is not None and d:
                total += self.bytes_between(v, self.now[id(v)], spec_of(d, axes))
        partials, kind = self.partial_axes(op, axes)
        for v, d, partial in zip(op.outs, rule.outs, partials, strict=True):
            spec, rest = spec_of(d, axes), self.rest(v)
            if partial:
                group = math.prod(self.sizes[a] for a in partial)
                volume = local_bytes(v.shape, itemsize(v.aval), spec, self.sizes)
                scattered = kind == "sum" and all(any(a in entry for entry in rest) for a in partial)
                total += wire_bytes("reduce-scatter" if scattered else "all-reduce", volume, group)
            else:
                total += self.bytes_between(v, spec, rest)
        return total

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


IDENTITIES = frozenset({"name_dims", "rename_dims", "place", "sharding_constraint"})


def stretched(spec: Spec, shape: Sequence[int], out: Sequence[int]) -> Spec:
    """The spec of an operand that an elementwise op stretches to its result: whole along dims of size 1."""
    if shape == out:
        return spec
    if len(shape) != len(out):
        return ((),) * len(shape)
    return tuple(axes if n == m else () for axes, n, m in zip(spec, shape, out, strict=True))
