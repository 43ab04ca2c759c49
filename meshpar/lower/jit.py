"""The ``"jit"`` lowering: the program with sharding constraints where the plan moves or settles something; XLA partitions.

Convolutions that are split are partitioned here, by a ``shard_map`` around the op: XLA's partitioner multiplies some of
their gradients by the size of an idle mesh axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.sharding import Mesh, NamedSharding

from ..compat.jax import (
    close_over,
    constraint_params,
    make_jaxpr,
    new_var,
    replace_body,
    scan_counts,
    sharding_constraint_p,
)
from ..layout import Spec, to_partition_spec
from ..plan.collectives import settlement
from ..plan.plan import OpPlan, Plan
from ..program.ir import Frame, Op, Value
from ..rules import having, run_local
from .bodies import literal
from .exchange import settle

BITWISE = having(lambda p: p.under_jit == "manual of integers")
MANUAL = having(lambda p: p.under_jit == "manual")
PINNED = having(lambda p: p.under_jit == "pinned")
FREE = having(lambda p: p.under_jit == "free")


def lower_to_jit(plan: Plan, mesh: Mesh) -> tuple[Callable[..., list[Any]], list[NamedSharding], list[NamedSharding]]:
    """(a function from flat inputs to flat results, shardings of the inputs, shardings of the results).

    The function is to be called under ``jax.jit`` with these shardings.
    """
    closed = plan.program.closed
    jaxpr = _Rewriter(plan, mesh).frame(plan.program.root)
    run = close_over(ClosedJaxpr(jaxpr, closed.consts))
    ins = [NamedSharding(mesh, to_partition_spec(plan.specs[id(v)])) for v in plan.program.inputs]
    outs = [NamedSharding(mesh, to_partition_spec(s)) for s in plan.out_specs]
    return run, ins, outs


class _Rewriter:
    def __init__(self, plan: Plan, mesh: Mesh):
        self.plan, self.mesh = plan, mesh
        self.sizes = plan.sizes
        self.params: dict[Spec, dict[str, Any]] = {}

    def constrain(self, var: Any, spec: Spec, eqns: list[Any], like: Any) -> Var:
        params = self.params.get(spec)
        if params is None:
            params = self.params[spec] = constraint_params(NamedSharding(self.mesh, to_partition_spec(spec)), len(spec))
        out = new_var(var.aval)
        eqns.append(
            like.replace(
                primitive=sharding_constraint_p, params=params, invars=[var], outvars=[out], effects=frozenset()
            )
        )
        return out

    def frame(self, frame: Frame) -> Any:
        """The jaxpr of a frame, constrained; the very same object where nothing was to be done."""
        eqns: list[Any] = []
        names: dict[Any, Any] = {}  # variable -> what stands for it now
        placed: dict[tuple[Any, Spec], Any] = {}
        changed = False

        def read(var: Any) -> Any:
            return var if isinstance(var, Literal) else names.get(var, var)

        def at(var: Any, value: Value | None, need: Spec | None, op: Op) -> Any:
            """The variable in the spec that an op needs."""
            nonlocal changed
            now = read(var)
            if value is None or need is None or not need or self.plan.specs.get(id(value)) == need:
                return now
            key = (now, need)
            if key not in placed:
                changed = True
                placed[key] = self.constrain(now, need, eqns, op.eqn)
            return placed[key]

        if frame.parent is not None and frame.parent.name in ("scan", "while"):
            n = len(frame.jaxpr.invars)
            p = frame.parent.eqn.params
            first, last = n - len(frame.parent.outs), n
            if frame.parent.name == "scan":
                first, carries = scan_counts(p)
                last = first + carries
            for var in frame.jaxpr.invars[first:last]:
                spec = self.plan.specs[id(frame.env[var])]
                if any(spec) and frame.ops:
                    names[var] = self.constrain(var, spec, eqns, frame.ops[0].eqn)
                    changed = True
        for op in frame.ops:
            eqn, plan = op.eqn, self.plan.ops.get(id(op))
            if op.name in ("name_dims", "rename_dims", "place", "sharding_constraint"):
                (value,), (out,) = op.ins, op.outs
                spec = self.plan.specs[id(out)]
                now = read(eqn.invars[0])
                if id(out) in self.plan.settled:
                    now = self.constrain(now, spec, eqns, eqn)
                elif (
                    value is not None and id(out) not in self.plan.unsettled and self.plan.specs.get(id(value)) != spec
                ):
                    now = at(eqn.invars[0], value, spec, op)
                names[eqn.outvars[0]] = now
                changed = True
                continue
            needs = plan.ins if plan is not None else self.boundary(op)
            invars = [at(v, x, need, op) for v, x, need in zip(eqn.invars, op.ins, needs, strict=True)]
            if any(a is not b for a, b in zip(invars, eqn.invars, strict=True)):
                changed = True
            new = eqn.replace(invars=invars)
            if op.frames:
                bodies = [self.frame(f) for f in op.frames]
                if any(b is not f.jaxpr for b, f in zip(bodies, op.frames, strict=True)):
                    new = replace_body(new, bodies)
                    changed = True
            manual = self.is_manual(op, plan)
            if op.name == "reshard":  # jax.random makes them; without explicit axes they say nothing
                names[eqn.outvars[0]] = invars[0]
                changed = True
            elif manual:
                names.update(self.manual(op, invars, eqns))
                changed = True
            else:
                eqns.append(new)
            for k, (var, out) in enumerate(zip(eqn.outvars, op.outs, strict=True)):
                spec = self.result(op, out, manual)
                if (
                    op.name in PINNED
                    and plan is not None
                    and not manual
                    and out.shape
                    and id(out) not in self.plan.settled
                ):
                    names[var] = self.constrain(read(var), plan.outs[k], eqns, eqn)
                    changed = True
                    spec = None if spec == plan.outs[k] else spec
                if spec is not None:
                    names[var] = self.constrain(read(var), spec, eqns, eqn)
                    changed = True
        outvars = [read(v) for v in frame.jaxpr.outvars]
        if frame.parent is not None and frame.parent.name in ("scan", "while", "cond"):
            outvars = self.leave(frame, outvars, eqns)
        if not changed and outvars == list(frame.jaxpr.outvars):
            return frame.jaxpr
        return frame.jaxpr.replace(eqns=eqns, outvars=outvars)

    def boundary(self, op: Op) -> list[Spec | None]:
        """The specs in which control flow takes its operands: carries lie as the body keeps them."""
        needs: list[Spec | None] = [None] * len(op.ins)
        p = op.eqn.params
        if op.name == "scan":
            inner = op.frames[0].ins()
            consts, carries = scan_counts(p)
            for i in range(consts, consts + carries):
                needs[i] = self.plan.specs[id(inner[i])]
        elif op.name == "while":
            inner = op.frames[1].ins()
            n = len(op.outs)
            needs[len(needs) - n :] = [self.plan.specs[id(v)] for v in inner[len(inner) - n :]]
        return needs

    def leave(self, frame: Frame, outvars: list[Any], eqns: list[Any]) -> list[Any]:
        parent = frame.parent
        assert parent is not None
        p = parent.eqn.params
        targets: list[Spec | None] = [None] * len(outvars)
        if parent.name == "scan":
            inner = frame.ins()
            consts, carries = scan_counts(p)
            for k in range(carries):
                targets[k] = self.plan.specs[id(inner[consts + k])]
        elif parent.name == "while" and frame is parent.frames[1]:
            inner = frame.ins()
            targets = [self.plan.specs[id(v)] for v in inner[len(inner) - len(outvars) :]]
        elif parent.name == "cond":
            targets = [self.plan.specs[id(v)] for v in parent.outs]
        out = list(outvars)
        for k, (var, spec) in enumerate(zip(frame.jaxpr.outvars, targets, strict=True)):
            if spec is None or isinstance(var, Literal) or not frame.ops:
                continue
            if self.plan.specs.get(id(frame.env[var])) != spec:
                out[k] = self.constrain(out[k], spec, eqns, frame.ops[-1].eqn)
        return out

    def result(self, op: Op, out: Value, manual: bool) -> Spec | None:
        """The constraint that a result needs: none where it follows from the operands, or stays a partial sum."""
        plan = self.plan.ops.get(id(op))
        if id(out) in self.plan.unsettled and id(out) not in self.plan.settled:
            return None
        spec = self.plan.specs.get(id(out))
        if spec is None or not spec:
            return None
        if id(out) in self.plan.settled:
            return spec
        if op.frames:
            if op.name not in ("scan", "while", "cond"):
                return None
            return spec if any(spec) else None
        if plan is None or op.name in FREE or id(out) in self.plan.generated:
            return None
        natural = plan.outs[op.outs.index(out)]
        if op.rule is None or manual:
            return spec if natural != spec else None
        return spec if any(spec) or any(any(n) for n in plan.ins if n) else None

    def is_manual(self, op: Op, plan: OpPlan | None) -> bool:
        """Whether an op is partitioned here: XLA's partitioner must not touch it, or cannot.

        So are ops that work along a split dim, and those around which such a dim rests split though they get it whole.
        """
        if plan is None or plan.factor_axes is None or op.rule is None:
            return False
        bits = op.name in BITWISE and op.outs[0].aval.dtype != bool
        if op.name in MANUAL or (bits and any(plan.factor_axes)):
            return True
        if any(axes and kind == "permutation" for axes, kind in zip(plan.factor_axes, op.rule.kinds, strict=False)):
            return True
        return any(
            entry and any(op.rule.kinds[f] == "permutation" for f in factors)
            for value, dims in [*zip(op.ins, op.rule.ins, strict=True), *zip(op.outs, op.rule.outs, strict=True)]
            if value is not None and dims
            for entry, factors in zip(self.plan.specs.get(id(value), ()), dims, strict=False)
        )

    def manual(self, op: Op, invars: list[Any], eqns: list[Any]) -> dict[Any, Any]:
        """The op under ``shard_map``: its local form, partial results settled."""
        plan, eqn = self.plan.ops[id(op)], op.eqn
        axes = plan.factor_axes or []
        rests = [
            self.plan.specs[id(v)] if id(v) in self.plan.settled else natural
            for v, natural in zip(op.outs, plan.outs, strict=True)
        ]
        partials = plan.partial or [()] * len(op.outs)
        after: list[Spec] = []
        for natural, rest, partial in zip(plan.outs, rests, partials, strict=True):
            scatter, _ = settlement(natural, rest, partial, plan.kind)
            after.append(tuple((*entry, *scatter.get(i, ())) for i, entry in enumerate(natural)))
        arrays = [(i, v) for i, v in enumerate(invars) if not isinstance(v, Literal)]

        def local(*xs):
            given = {i: x for (i, _), x in zip(arrays, xs, strict=True)}
            operands = [given[i] if i in given else literal(v) for i, v in enumerate(invars)]
            results = run_local(op, axes, operands, self.sizes)
            return tuple(
                settle(y, natural, rest, partial, plan.kind, self.sizes)[0]
                for y, natural, rest, partial in zip(results, plan.outs, rests, partials, strict=True)
            )

        needs = [need if need is not None else whole_shape(v) for need, v in zip(plan.ins, invars, strict=True)]
        run = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(to_partition_spec(needs[i]) for i, _ in arrays),
            out_specs=tuple(map(to_partition_spec, after)),
            check_vma=False,
        )
        traced = make_jaxpr(run, *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for _, v in arrays])
        inner: dict[Any, Any] = dict(zip(traced.jaxpr.invars, (v for _, v in arrays), strict=True))
        for var, const in zip(traced.jaxpr.constvars, traced.consts, strict=True):  # tables that a kernel is made with
            inner[var] = Literal(const, var.aval)
        for e in traced.jaxpr.eqns:
            eqns.append(e.replace(invars=[v if isinstance(v, Literal) else inner.get(v, v) for v in e.invars],
                                  source_info=eqn.source_info))  # fmt: skip
        return dict(zip(eqn.outvars, traced.jaxpr.outvars, strict=True))


def whole_shape(var: Any) -> Spec:
    return ((),) * len(var.aval.shape)
