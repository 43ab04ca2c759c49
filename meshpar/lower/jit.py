"""The ``"jit"`` lowering: the program with sharding constraints where the plan reshards or reduces something; XLA partitions.

Convolutions that are split are partitioned here, by a ``shard_map`` around the op: XLA's partitioner multiplies some of
their gradients by the size of an idle mesh axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.sharding import Mesh, NamedSharding

from ..compat.jax import (
    HOST_MEMORY,
    bind,
    close_over,
    constraint_params,
    literal_array,
    make_generated_jaxpr,
    new_var,
    replace_body,
    scan_counts,
    sharding_constraint_p,
    with_weak_type,
)
from ..compat.quirks import short_strides
from ..errors import UnsupportedError
from ..layout import AnyMesh, Spec, to_partition_spec
from ..plan.manual import ManualOps
from ..plan.plan import Plan
from ..plan.resharding import reshard
from ..plan.spec import replicated_spec
from ..plan.steps import Loop, Reduce, Run, Shard
from ..program.ir import Frame, Op, Value
from ..rules import having, run_local
from ..rules.local import plain_params
from ..rules.spmd import Grid
from .collectives import combined

PINNED = having(lambda p: p.pinned)
FREE = having(lambda p: p.free)


def lower_to_jit(
    plan: Plan, mesh: Mesh, bound: Collection[Any] = ()
) -> tuple[Callable[..., list[Any]], list[NamedSharding], list[NamedSharding]]:
    """(a function from flat inputs to flat results, shardings of the inputs, shardings of the results).

    The function is to be called under ``jax.jit`` with these shardings.

    Args:
      bound: names of the axes that the caller has bound (``jax.vmap(…, axis_name=)``).

    Raises:
      UnsupportedError: a ``shard_map`` of the user's own over one of these.
    """
    closed = plan.program.closed
    jaxpr = _Rewriter(plan, mesh, bound).frame(plan.program.root)
    run = close_over(ClosedJaxpr(jaxpr, closed.consts))
    arguments = plan.body.inputs[len(closed.consts) :]
    ins = [sharding_of(s, mesh) for s in arguments]
    outs = [sharding_of(s, mesh) for s in plan.body.outputs if s is not None]
    weak = [v.aval.weak_type for v in plan.program.outputs]

    def typed(*xs: Any) -> list[Any]:  # the local form of an op under a shard_map has strong types
        return [with_weak_type(x, w) for x, w in zip(run(*xs), weak, strict=True)]

    return typed, ins, outs


def sharding_of(shard: Shard, mesh: AnyMesh) -> NamedSharding:
    """The sharding of an argument or result: its spec, and the host's memory where it lies there."""
    memory = HOST_MEMORY if shard.on_host else None
    return NamedSharding(mesh, to_partition_spec(shard.spec), memory_kind=memory)


class _Rewriter:
    def __init__(self, plan: Plan, mesh: Mesh, bound: Collection[Any] = ()):
        self.plan, self.mesh = plan, mesh
        self.sizes = plan.sizes
        self.bound = frozenset(bound)
        self.grid = Grid(plan.sizes, {}, bound=bound)
        self.cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
        self.params: dict[Spec, dict[str, Any]] = {}
        steps = list(plan.body.all_steps)
        self.runs = {s.op: s for s in steps if isinstance(s, Run) and not (s.results and s.results[0].is_constant)}
        self.reduces = {s.source.value: s for s in steps if isinstance(s, Reduce)}
        self.manual_ops = ManualOps(plan)
        self.hoisted = {s.op: s.hoisted for s in steps if isinstance(s, Loop)}
        made = [s for step in steps for s in (*step.makes, *(s for body in step.bodies for s in body.inputs))]
        self.unreduced = {s.value for s in made if s.partial}

    def rest(self, value: Value | None) -> Spec | None:
        """The spec in which a value rests; None: a literal."""
        placed = None if value is None else self.plan.placements.get(value)
        return None if placed is None else placed.stored.spec

    def is_free(self, value: Value) -> bool:
        """Whether a value is made from no data."""
        placed = self.plan.placements.get(value)
        return placed is not None and placed.stored.is_constant

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

    def sliced_first(self, have: Spec | None, need: Spec) -> tuple[Spec, ...]:
        """The specs through which a value comes to the one that is needed: in one that cuts and gathers, XLA gathers all of it."""
        moves = () if have is None else reshard(have, need, self.sizes)
        cut = [m.after for m in moves if m.op == "slice"]
        return (cut[-1], need) if moves and cut and moves[-1].op == "all-gather" else (need,)

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
            now, rest = read(var), self.rest(value)
            if value is None or need is None or not need or rest == need:
                return now
            key = (now, need)
            if key not in placed:
                changed = True
                made = value.op is not None and value.op.frame.home is frame.home
                if made and rest and any(rest) and not self.is_free(value):
                    now = self.constrain(
                        now, rest, eqns, op.eqn
                    )  # else XLA may send what it is made of: float32 for bfloat16
                for spec in self.sliced_first(rest, need):
                    now = self.constrain(now, spec, eqns, op.eqn)
                placed[key] = now
            return placed[key]

        if frame.parent is not None and frame.parent.primitive.loop:
            n = len(frame.jaxpr.invars)
            p = frame.parent.eqn.params
            first, last = n - len(frame.parent.outs), n
            if frame.parent.primitive.scan:
                first, carries = scan_counts(p)
                last = first + carries
            for var in frame.jaxpr.invars[first:last]:
                spec = self.rest(frame.env[var])
                if spec and any(spec) and frame.ops:
                    names[var] = self.constrain(var, spec, eqns, frame.ops[0].eqn)
                    changed = True
        for op in frame.ops:
            eqn, run = op.eqn, self.runs.get(op)
            if op.primitive.identity:
                (value,), (out,) = op.ins, op.outs
                spec = self.rest(out)
                assert spec is not None
                now = read(eqn.invars[0])
                if out in self.reduces:
                    now = self.constrain(now, spec, eqns, eqn)
                elif value is not None and out not in self.unreduced and self.rest(value) != spec:
                    now = at(eqn.invars[0], value, spec, op)
                names[eqn.outvars[0]] = now
                changed = True
                continue
            if run is not None:
                needs = [None if s is None else s.spec for s in run.operands]
            else:
                needs = self.boundary(op)
            invars = [at(v, x, need, op) for v, x, need in zip(eqn.invars, op.ins, needs, strict=True)]
            if any(a is not b for a, b in zip(invars, eqn.invars, strict=True)):
                changed = True
            new = eqn.replace(invars=invars)
            if op.name == "slice" and (short := short_strides(eqn.params, op.outs[0].shape)) != eqn.params:
                new = new.replace(params=short)
                changed = True
            if op.primitive.shard_map:  # over the devices of the plan, whatever it was traced for
                check_unbound(op, self.bound)
                new = new.replace(params={**eqn.params, "mesh": self.mesh})
                changed = True
            if op.frames:
                bodies = [self.frame(f) for f in op.frames]
                if any(b is not f.jaxpr for b, f in zip(bodies, op.frames, strict=True)):
                    new = replace_body(new, bodies)
                    changed = True
            manual = self.manual_ops.has(run)
            if op.name == "reshard":  # jax.random makes them; without explicit axes they say nothing
                names[eqn.outvars[0]] = invars[0]
                changed = True
            elif manual:
                assert run is not None
                names.update(self.manual(run, invars, eqns))
                changed = True
            else:
                eqns.append(new)
            for k, (var, out) in enumerate(zip(eqn.outvars, op.outs, strict=True)):
                spec = self.result(op, out, manual)
                if op.name in PINNED and run is not None and not manual and out.shape and out not in self.reduces:
                    names[var] = self.constrain(read(var), run.results[k].spec, eqns, eqn)
                    changed = True
                    spec = None if spec == run.results[k].spec else spec
                if spec is not None:
                    names[var] = self.constrain(read(var), spec, eqns, eqn)
                    changed = True
        outvars = [read(v) for v in frame.jaxpr.outvars]
        if frame.parent is not None and frame.parent.primitive.control_flow:
            outvars = self.leave(frame, outvars, eqns)
        if not changed and outvars == list(frame.jaxpr.outvars):
            return frame.jaxpr
        return frame.jaxpr.replace(eqns=eqns, outvars=outvars)

    def boundary(self, op: Op) -> list[Spec | None]:
        """The specs in which control flow takes its operands: carries as the body keeps them, constants as resharded before it."""
        needs: list[Spec | None] = [None] * len(op.ins)
        p = op.eqn.params
        if op.primitive.scan:
            inner = op.frames[0].ins()
            consts, carries = scan_counts(p)
            for shard in self.hoisted.get(op, ()):
                for i in range(consts):
                    if shard.value in (op.ins[i], inner[i]):
                        needs[i] = shard.spec
            for i in range(consts, consts + carries):
                needs[i] = self.rest(inner[i])
        elif op.primitive.loop:
            inner = op.frames[1].ins()
            n = len(op.outs)
            needs[len(needs) - n :] = [self.rest(v) for v in inner[len(inner) - n :]]
        return needs

    def leave(self, frame: Frame, outvars: list[Any], eqns: list[Any]) -> list[Any]:
        parent = frame.parent
        assert parent is not None
        p = parent.eqn.params
        targets: list[Spec | None] = [None] * len(outvars)
        if parent.primitive.scan:
            inner = frame.ins()
            consts, carries = scan_counts(p)
            for k in range(carries):
                targets[k] = self.rest(inner[consts + k])
        elif parent.primitive.loop and frame is parent.frames[1]:
            inner = frame.ins()
            targets = [self.rest(v) for v in inner[len(inner) - len(outvars) :]]
        elif parent.primitive.branch:
            targets = [self.rest(v) for v in parent.outs]
        out = list(outvars)
        for k, (var, spec) in enumerate(zip(frame.jaxpr.outvars, targets, strict=True)):
            if spec is None or isinstance(var, Literal) or not frame.ops:
                continue
            if self.rest(frame.env[var]) != spec:
                out[k] = self.constrain(out[k], spec, eqns, frame.ops[-1].eqn)
        return out

    def result(self, op: Op, out: Value, manual: bool) -> Spec | None:
        """The constraint that a result needs: none where it follows from the operands, or stays a partial sum."""
        run = self.runs.get(op)
        if out in self.unreduced and out not in self.reduces:
            return None
        spec = self.rest(out)
        if spec is None or not spec:
            return None
        if out in self.reduces:
            return spec
        if op.frames:
            if not op.primitive.control_flow:
                return None
            return spec if any(spec) else None
        if run is None or op.name in FREE or self.is_free(out):
            return None
        made = run.results[op.outs.index(out)]
        if op.rule is None or manual:
            return spec if made.spec != spec else None
        return spec if any(spec) or is_constrained(run, made) else None

    def manual(self, run: Run, invars: list[Any], eqns: list[Any]) -> dict[Any, Any]:
        """The op under ``shard_map``: its local form, unreduced results reduced."""
        op, eqn, axes = run.op, run.op.eqn, list(run.axes or ())
        after: list[Spec] = []
        reduced: list[tuple[tuple[Any, ...], tuple[str, ...]]] = []
        for shard in run.results:
            step = self.reduces.get(shard.value)
            if step is not None and shard.partial:
                after.append(step.scattered)
                reduced.append((step.scatters, step.over))
            else:
                after.append(shard.spec)
                reduced.append(((), shard.partial))
        arrays = [(i, v) for i, v in enumerate(invars) if not isinstance(v, Literal)]

        grid = self.grid if self.bound else self.sizes

        def local(*xs):
            given = {i: x for (i, _), x in zip(arrays, xs, strict=True)}
            operands = [given[i] if i in given else literal_array(v) for i, v in enumerate(invars)]
            results = run_local(op, axes, operands, grid)
            return tuple(
                combined(y, shard.spec, scatters, over, shard.kind, grid, cpu=self.cpu)
                for y, shard, (scatters, over) in zip(results, run.results, reduced, strict=True)
            )

        needs = [
            replicated_spec(len(v.aval.shape)) if s is None else s.spec
            for s, v in zip(run.operands, invars, strict=True)
        ]
        mapped: Any = jax.shard_map(
            local,
            mesh=self.grid.mesh(self.mesh),
            in_specs=tuple(to_partition_spec(self.grid.spec(needs[i])) for i, _ in arrays),
            out_specs=tuple(to_partition_spec(self.grid.spec(spec)) for spec in after),
            check_vma=False,
        )
        if self.manual_ops.is_extremum(run):
            mapped = _with_derivative_of(op, invars, mapped)
        traced = make_generated_jaxpr(mapped, *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for _, v in arrays])
        inner: dict[Any, Any] = dict(zip(traced.jaxpr.invars, (v for _, v in arrays), strict=True))
        for var, const in zip(traced.jaxpr.constvars, traced.consts, strict=True):  # tables that a kernel is made with
            inner[var] = Literal(const, var.aval)
        for e in traced.jaxpr.eqns:
            eqns.append(e.replace(invars=[v if isinstance(v, Literal) else inner.get(v, v) for v in e.invars],
                                  source_info=eqn.source_info))  # fmt: skip
        return dict(zip(eqn.outvars, traced.jaxpr.outvars, strict=True))


def check_unbound(op: Op, bound: Collection[Any]) -> None:
    """Raises UnsupportedError where a ``shard_map`` of the user's own runs over an axis whose name the caller has bound."""
    for axis in op.eqn.params["newly_manual_axes"]:
        if axis in bound:
            raise UnsupportedError(
                f"this shard_map runs over the mesh axis `{axis}`, and the step is called under a vmap with axis_name={axis!r}, "
                "which its collectives would be taken to mean",
                axis=axis,
                source=op.source,
                fixes=["give the vmap another axis_name"],
            )


def is_constrained(run: Run, result: Shard) -> bool:
    """Whether a result has a sharding constraint in both lowerings: those of ops with a factor rule, where something is sharded.

    Elementwise ops have none, as their operands say how they are sharded.
    """
    if run.op.rule is None or run.op.name in FREE or result.partial or result.is_constant or not result.spec:
        return False
    return any(result.spec) or any(any(s.spec) for s in run.reads)


def _with_derivative_of(op: Op, operands: Sequence[Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the operands of an op that are no literals, with the derivative of the op, which XLA partitions."""

    @jax.custom_jvp
    def function(*xs: Any) -> Any:
        return run(*xs)

    @function.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        def plain(*xs: Any) -> tuple[Any, ...]:
            given = iter(xs)
            every = [literal_array(v) if isinstance(v, Literal) else next(given) for v in operands]
            return tuple(bind(op.eqn, every, plain_params(op.eqn.params)))

        return function(*primals), jax.jvp(plain, primals, tangents)[1]

    return function
