"""The ``"jit"`` lowering: the program with sharding constraints where the plan moves or settles something; XLA partitions.

Convolutions that are split are partitioned here, by a ``shard_map`` around the op: XLA's partitioner multiplies some of
their gradients by the size of an idle mesh axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.sharding import Mesh, NamedSharding

from .._compat import close_over, constraint_params, new_var, replace_body, scan_counts, sharding_constraint_p
from ..layout import Spec, to_partition_spec
from ..plan.plan import Plan
from ..program.graph import Frame, Op, Value

MANUAL = frozenset({"conv_general_dilated"})
# Made where they are used, or moved at no cost: XLA lays these out as their neighbours need them.
FREE = frozenset({"iota", "broadcast_in_dim", "squeeze", "expand_dims", "transpose"})


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
            manual = op.name in MANUAL and plan is not None and any(plan.factor_axes or ())
            if op.name == "reshard":  # jax.random makes them; without explicit axes they say nothing
                names[eqn.outvars[0]] = invars[0]
                changed = True
            elif manual:
                names.update(self.manual(op, invars, eqns))
                changed = True
            else:
                eqns.append(new)
            for var, out in zip(eqn.outvars, op.outs, strict=True):
                spec = self.result(op, out, manual)
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

    def manual(self, op: Op, invars: list[Any], eqns: list[Any]) -> dict[Any, Any]:
        """The op under ``shard_map``: local, then summed over the axes that split its contracted factors."""
        plan, eqn = self.plan.ops[id(op)], op.eqn
        (out,) = op.outs
        natural, axes = plan.outs[0], plan.factor_axes or []
        rest = self.plan.specs[id(out)] if id(out) in self.plan.settled else natural
        params = local_conv_params(op, axes, self.sizes)
        scatter = [(a, i) for i, entry in enumerate(rest) for a in entry if a in plan.partial and entry[-1] == a]
        after = tuple((*entry, *(a for a, k in scatter if k == i)) for i, entry in enumerate(natural))
        reduce = tuple(a for a in plan.partial if a not in {a for a, _ in scatter})

        def local(*xs):
            y = eqn.primitive.bind(*xs, **params)
            for a, i in scatter:
                y = lax.psum_scatter(y, a, scatter_dimension=i, tiled=True)
            return lax.psum(y, reduce) if reduce else y

        in_specs = tuple(to_partition_spec(s) for s in plan.ins if s is not None)
        run = jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=to_partition_spec(after), check_vma=False
        )
        traced = jax.make_jaxpr(run)(*[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars])
        inner = dict(zip(traced.jaxpr.invars, invars, strict=True))
        for e in traced.jaxpr.eqns:
            eqns.append(e.replace(invars=[v if isinstance(v, Literal) else inner.get(v, v) for v in e.invars],
                                  source_info=eqn.source_info))  # fmt: skip
        return {eqn.outvars[0]: traced.jaxpr.outvars[0]}


def local_conv_params(op: Op, axes: list[tuple[str, ...]], sizes: dict[str, int]) -> dict[str, Any]:
    """The parameters of the convolution that one device does: group counts divided where groups are split."""
    params = dict(op.eqn.params)
    rule = op.rule
    assert rule is not None
    for key, side, spec in (
        ("feature_group_count", 0, params["dimension_numbers"].lhs_spec[1]),
        ("batch_group_count", 0, params["dimension_numbers"].lhs_spec[0]),
    ):
        if params[key] > 1:
            group = rule.ins[side][spec][0]
            params[key] //= math.prod(sizes[a] for a in axes[group])
    return params
