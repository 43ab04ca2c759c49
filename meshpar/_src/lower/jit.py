"""The ``"jit"`` lowering: the program with sharding constraints where the plan reshards or reduces a value; XLA partitions it.

The constraints are written by a walk over the jaxpr of each frame and not over the steps, since steps inline calls: a derivative
from outside needs each ``custom_jvp``, ``custom_vjp`` and ``checkpoint`` as a call with its own operands. The steps in the body of
a call may read shards that are resharded outside of it, and these are no operands of the call.

Sharded convolutions are partitioned by this lowering, with a ``shard_map`` around the op, because XLA's partitioner multiplies some
of their gradients by the size of an idle mesh axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Mesh, NamedSharding

from ...errors import UnsupportedError
from ..compat.jax import (
    HOST_MEMORY,
    abstract_array,
    bind,
    close_over,
    constraint_params,
    literal_array,
    make_generated_jaxpr,
    on_host,
    sharding_constraint_p,
    with_weak_type,
)
from ..compat.loop_operands import loop_parts
from ..compat.quirks import short_strides
from ..layout import AnyMesh, Spec, to_partition_spec
from ..plan.plan import Plan
from ..plan.planner import planned_as_traced
from ..plan.resharding import reshard
from ..plan.shard_map_inside_jit import ManualOps
from ..plan.shard_shapes import replicated_spec
from ..plan.steps import Loop, Run, Scatter, Shard, spec_after
from ..program.ir import Frame, Op, Value
from ..program.jaxprs import Atom, inline, with_bodies, with_eqns
from ..rules import run_local
from ..rules.local_forms import plain_params
from ..rules.mesh_in_shard_map import Grid
from .collectives import combined

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def lower_to_jit(
    plan: Plan, mesh: Mesh, bound: Collection[Any] = ()
) -> tuple[Callable[..., list[Any]], list[NamedSharding], list[NamedSharding]]:
    """(a function from flat inputs to flat results, shardings of the inputs, shardings of the results).

    The function is to be called under ``jax.jit`` with these shardings. The derivative of a rewritten program is the derivative of
    the program as traced.

    Args:
      bound: names of the axes that the caller has bound (``jax.vmap(…, axis_name=)``).

    Raises:
      UnsupportedError: a ``shard_map`` of the user's own over one of these.
    """
    closed = plan.program.closed
    jaxpr = _FrameWriter(_Lowering(plan, mesh, bound), plan.program.root).jaxpr()
    run = close_over(ClosedJaxpr(jaxpr, closed.consts))
    arguments = plan.body.inputs[len(closed.consts) :]
    ins = [sharding_of(s, mesh) for s in arguments]
    outs = [sharding_of(s, mesh) for s in plan.body.outputs if s is not None]
    weak = [v.aval.weak_type for v in plan.program.outputs]

    def typed(*xs: Any) -> list[Any]:  # the local form of an op under a shard_map has strong types
        return [with_weak_type(x, w) for x, w in zip(run(*xs), weak, strict=True)]

    function = typed
    if plan.program.traced is not plan.program and plan.program.is_derived_as_traced:
        # a rewritten program computes values that its results do not depend on: rows that pad a dim, slots of a pipeline without
        # a microbatch. Where these are not differentiable (log, 1 / x, a norm of zeros), their derivative would be 0 · inf
        function = jax.custom_jvp(typed)

        @function.defjvp
        def _(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            """JVP rule: the derivative of the program as traced."""
            return jax.jvp(lower_to_jit(planned_as_traced(plan), mesh, bound)[0], primals, tangents)

    return function, ins, outs


def sharding_of(shard: Shard, mesh: AnyMesh) -> NamedSharding:
    """The sharding of an argument or result: its spec, and host memory if the shard is stored there."""
    memory = HOST_MEMORY if shard.on_host else None
    return NamedSharding(mesh, to_partition_spec(shard.spec), memory_kind=memory)


class _Lowering:
    """The lowering of one plan to a jaxpr with sharding constraints, which XLA partitions.

    Attributes:
      runs: op → step of the plan, without ops that are input-independent.
      recomputed: (value, spec) → step that recomputes the value for a copy in this spec.
      reduces: partial value → its reduction.
      stored: value → its stored spec; None: a literal.
      params: spec → the parameters of a sharding constraint.
      partial: values that are partial in some shard.
      hoisted: control-flow op → shards that are resharded before it.
    """

    def __init__(self, plan: Plan, mesh: Mesh, bound: Collection[Any] = ()):
        """Index the steps of a plan by op and value; ``bound``: axis names that the caller has bound by ``jax.vmap``."""
        self.plan, self.mesh = plan, mesh
        self.bound = frozenset(bound)
        cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
        self.grid = Grid(plan.sizes, plan.torus, cpu, bound, factored=False)
        self.params: dict[Spec, dict[str, Any]] = {}
        steps = list(plan.body.all_steps)
        runs = [s for s in steps if isinstance(s, Run) and not (s.results and s.results[0].is_constant)]
        copies = [s for s in runs if s.results and plan.placements[s.results[0].value].made is not s.results[0]]
        self.recomputed = {(s.results[0].value, s.results[0].spec): s for s in copies}
        self.runs = {s.op: s for s in runs if s not in copies}
        self.manual_ops = ManualOps(plan)
        self.reduces, self.stored = self.manual_ops.reduces, self.manual_ops.stored
        self.hoisted = {s.op: s.hoisted for s in steps if isinstance(s, Loop)}
        shards = [s for step in steps for s in (*step.makes, *(s for body in step.bodies for s in body.inputs))]
        self.partial = {s.value for s in shards if s.partial}

    def is_constant(self, value: Value) -> bool:
        """Whether a value is input-independent."""
        placed = self.plan.placements.get(value)
        return placed is not None and placed.stored.is_constant

    def path(self, have: Spec | None, need: Spec, shape: Sequence[int]) -> tuple[Spec, ...]:
        """The specs of the constraints that reshard a value of this shape. Slices, exchanges and all-gathers have one each: with
        one constraint for all, XLA all-gathers the unsliced value."""
        moves = () if have is None else reshard(have, need, shape, self.plan.sizes)
        gathers = [m.before for m in moves if m.op == "all-gather"]
        slices = [m.after for m in moves if m.op == "slice"] if gathers else []
        return tuple(dict.fromkeys((*slices[-1:], *gathers[:1], need)))

    def operand_specs(self, op: Op) -> list[Spec | None]:
        """The specs of the operands of an identity, which is stored where its own names put it, and of control flow: of carries,
        their stored specs in the body; of constants, their specs after a hoisted resharding; None: not constrained."""
        needs: list[Spec | None] = [None] * len(op.ins)
        if op.primitive.family == "identity" and op.outs[0] not in self.partial and op.outs[0] not in self.reduces:
            needs = [self.stored(op.outs[0])]
        if op.primitive.loop:
            parts, inner = loop_parts(op.eqn), op.frames[-1].ins()
            for shard in self.hoisted.get(op, ()):  # of a scan
                for i in parts.consts:
                    if shard.value in (op.ins[i], inner[i]):
                        needs[i] = shard.spec
            for i, carry in zip(parts.carries, parts.carried(inner), strict=True):
                needs[i] = self.stored(carry)
        return needs

    def result_spec(self, op: Op, out: Value, manual: bool) -> Spec | None:
        """The spec of a sharding constraint on a result; None where the operands determine it, or where it is partial."""
        run = self.runs.get(op)
        if out in self.partial and out not in self.reduces:
            return None
        spec = self.stored(out)
        if not spec or out in self.reduces:
            return spec or None
        if op.frames:
            return spec if op.primitive.control_flow and any(spec) else None
        if run is None or op.primitive.free or op.primitive.family == "identity" or self.is_constant(out):
            return None
        produced = run.results[op.outs.index(out)]
        if op.rule is None or manual:
            return spec if produced.spec != spec else None
        return spec if any(spec) or is_constrained(run, produced) else None

    def manual(self, run: Run, invars: Sequence[Atom], eqns: list[JaxprEqn]) -> dict[Var, Atom]:
        """Append a ``shard_map`` of the op's local form, whose partial results are reduced; returns result variable → new
        variable.

        An operand that is partial in the plan is complete here, since the arrays outside of the ``shard_map`` are global. So a
        result is reduced only over the axes along which the op itself makes it partial.
        """
        op, eqn, axes = run.op, run.op.eqn, list(run.axes or ())
        complete = {a for s in run.operands if s is not None for a in s.partial}
        after: list[Spec] = []
        reduced: list[tuple[list[Scatter], tuple[str, ...]]] = []
        for shard in run.results:
            step = self.reduces.get(shard.value) if shard.partial else None
            scatters, over = ((), shard.partial) if step is None else (step.scatters, step.over)
            own = [Scatter(s.dim, tuple(a for a in s.axes if a not in complete), "native") for s in scatters]
            own = [s for s in own if s.axes]
            after.append(spec_after(shard.spec, own))
            reduced.append((own, tuple(a for a in over if a not in complete)))
        arrays = [(i, v) for i, v in enumerate(invars) if not isinstance(v, Literal)]
        grid = self.grid

        def local(*xs):
            """Per device: the op's local form on shards ``xs`` (operands that are not literals), with reductions of its
            partial results."""
            results = run_local(op, axes, _with_literals(invars, xs), grid, run.form)
            return tuple(
                combined(y, shard.spec, scatters, over, shard.kind, grid)
                for y, shard, (scatters, over) in zip(results, run.results, reduced, strict=True)
            )

        needs = [
            replicated_spec(len(v.aval.shape)) if s is None else s.spec
            for s, v in zip(run.operands, eqn.invars, strict=True)
        ]
        mapped: Any = jax.shard_map(
            local,
            mesh=grid.mesh(self.mesh),
            in_specs=tuple(to_partition_spec(grid.spec(needs[i])) for i, _ in arrays),
            out_specs=tuple(to_partition_spec(grid.spec(spec)) for spec in after),
            check_vma=False,
        )
        if self.manual_ops.is_extremum(run):
            mapped = _with_derivative_of(op, invars, mapped)

        def on_device(*xs: Any) -> list[Any]:
            """The op on arrays in device memory, in which masks of local forms are."""
            given = (
                jax.device_put(x, _DEVICE, src=_HOST) if on_host(v) else x for x, (_, v) in zip(xs, arrays, strict=True)
            )
            outs = zip(mapped(*given), run.results, strict=True)
            return [jax.device_put(y, _HOST, src=_DEVICE) if shard.on_host else y for y, shard in outs]

        avals: list[Any] = [v.aval for _, v in arrays]
        like = [abstract_array(a.shape, a.dtype, host=on_host(a)) for a in avals]
        traced = make_generated_jaxpr(on_device, *like)
        results = inline(eqns, traced.jaxpr, traced.consts, [v for _, v in arrays], source_info=eqn.source_info)
        return dict(zip(eqn.outvars, results, strict=True))


class _FrameWriter:
    """Writes the jaxpr of one frame, with sharding constraints on operands and results as the plan has them.

    Attributes:
      eqns: the equations written so far.
      current: variable of the frame → the variable or literal that replaces it.
      resharded: (variable, spec) → the variable with that spec.
      variables: value → its variable in the frame.
    """

    def __init__(self, lowering: _Lowering, frame: Frame):
        self.lowering, self.frame = lowering, frame
        self.eqns: list[JaxprEqn] = []
        self.current: dict[Var, Atom] = {}
        self.resharded: dict[tuple[Atom, Spec], Atom] = {}
        self.variables: dict[Value, Var] = {}
        for var in (*frame.jaxpr.constvars, *frame.jaxpr.invars, *(v for eqn in frame.jaxpr.eqns for v in eqn.outvars)):
            if var in frame.env:
                self.variables.setdefault(frame.env[var], var)

    def jaxpr(self) -> Jaxpr:
        """The jaxpr of the frame; the same object if no equation changes."""
        frame, old = self.frame, self.frame.jaxpr
        if frame.parent is not None and frame.parent.primitive.loop:
            self.constrain_carries(frame.parent)
        for op in frame.ops:
            self.op(op)
        outvars = [self.read(v) for v in old.outvars]
        if frame.parent is not None and frame.parent.primitive.control_flow:
            outvars = self.constrained_results(frame.parent, outvars)
        new = with_eqns(old, self.eqns)
        return new if outvars == list(old.outvars) else new.replace(outvars=outvars)

    def read(self, var: Atom) -> Atom:
        """The current variable or literal in place of a variable of the frame."""
        return var if isinstance(var, Literal) else self.current.get(var, var)

    def constrain(self, var: Atom, spec: Spec, like: JaxprEqn) -> Var:
        """The result of a new sharding constraint on a variable, with the source line of equation ``like``."""
        cache, out = self.lowering.params, Var(var.aval)
        if spec not in cache:
            cache[spec] = constraint_params(NamedSharding(self.lowering.mesh, to_partition_spec(spec)), len(spec))
        self.eqns.append(
            like.replace(
                primitive=sharding_constraint_p, params=cache[spec], invars=[var], outvars=[out], effects=frozenset()
            )
        )
        return out

    def operand(self, var: Atom, value: Value | None, need: Spec | None, op: Op) -> Atom:
        """The variable of ``value`` that an equation reads, with a sharding constraint to the spec ``need`` if its spec
        differs."""
        lowering = self.lowering
        now, stored = self.read(var), lowering.stored(value)
        if value is None or not need or stored == need:
            return now
        key = (now, need)
        run = lowering.recomputed.get((value, need))
        if key not in self.resharded and run is not None and (copy := self.recompute(run)) is not None:
            self.resharded[key] = copy
        if key not in self.resharded:
            local = value.op is not None and value.op.frame.home is self.frame.home
            if local and stored and any(stored) and not lowering.is_constant(value):
                # without this constraint XLA may reshard the operands of a cast: float32 in place of bfloat16
                now = self.constrain(now, stored, op.eqn)
            for spec in lowering.path(stored, need, value.shape):
                now = self.constrain(now, spec, op.eqn)
            self.resharded[key] = now
        return self.resharded[key]

    def recompute(self, run: Run) -> Atom | None:
        """Write the equation of an op that the plan recomputes for a copy of its result; None: it reads a value that this frame
        does not have."""
        eqn, invars = run.op.eqn, list[Atom]()
        for var, value, shard in zip(eqn.invars, run.op.ins, run.operands, strict=True):
            if value is None or shard is None:
                invars.append(var)
                continue
            own, again = self.variables.get(value), self.lowering.recomputed.get((value, shard.spec))
            atom = self.operand(own, value, shard.spec, run.op) if own else again and self.recompute(again)
            if atom is None:
                return None
            invars.append(atom)
        out = Var(eqn.outvars[0].aval)
        self.eqns.append(eqn.replace(invars=invars, outvars=[out]))
        return self.constrain(out, run.results[0].spec, eqn)

    def constrain_carries(self, parent: Op) -> None:
        """Constrain the carries of a loop to their stored specs at the beginning of its body."""
        for var in loop_parts(parent.eqn).carried(self.frame.jaxpr.invars):
            spec = self.lowering.stored(self.frame.env[var])
            if spec and any(spec) and self.frame.ops:
                self.current[var] = self.constrain(var, spec, self.frame.ops[0].eqn)

    def op(self, op: Op) -> None:
        """Write the equation of an op, with constraints on its operands and results and rewritten bodies."""
        lowering, run = self.lowering, self.lowering.runs.get(op)
        marks = op.primitive.family == "identity"  # it only names its operand, or its spec
        planned = () if run is None or marks else run.operands
        needs = [None if s is None else s.spec for s in planned] or lowering.operand_specs(op)
        invars = [self.operand(v, x, need, op) for v, x, need in zip(op.eqn.invars, op.ins, needs, strict=True)]
        manual = lowering.manual_ops.has(run)
        if marks or op.name == "reshard":  # from jax.random; it has no effect on a mesh without Explicit axes
            self.current[op.eqn.outvars[0]] = invars[0]
        elif manual:
            assert run is not None
            self.current.update(lowering.manual(run, invars, self.eqns))
        else:
            self.eqns.append(self.equation(op, invars))
        self.constrain_results(op, run, manual)

    def equation(self, op: Op, invars: list[Atom]) -> JaxprEqn:
        """The equation of an op with other operands and bodies; the same object if nothing changes."""
        lowering, eqn = self.lowering, op.eqn
        new = eqn if all(a is b for a, b in zip(invars, eqn.invars, strict=True)) else eqn.replace(invars=invars)
        if op.name == "slice" and (short := short_strides(eqn.params, op.outs[0].shape)) != eqn.params:
            new = new.replace(params=short)
        if op.primitive.family == "shard_map":  # on the mesh of the plan, whatever mesh it was traced with
            check_unbound(op, lowering.bound)
            new = new.replace(params={**eqn.params, "mesh": lowering.mesh})
        return with_bodies(new, [_FrameWriter(lowering, frame).jaxpr() for frame in op.frames])

    def constrain_results(self, op: Op, run: Run | None, manual: bool) -> None:
        """Constrain the results of an op: to the spec that it produces, if this must be pinned, and to the stored spec."""
        for k, (var, out) in enumerate(zip(op.eqn.outvars, op.outs, strict=True)):
            specs = [self.lowering.result_spec(op, out, manual)]
            pinned = op.primitive.pinned and run is not None and not manual and out not in self.lowering.reduces
            if pinned and run is not None and out.shape:
                produced = run.results[k].spec
                specs = [produced, *(spec for spec in specs if spec != produced)]
            for spec in specs:
                if spec is not None:
                    self.current[var] = self.constrain(self.read(var), spec, op.eqn)

    def constrained_results(self, parent: Op, outvars: list[Atom]) -> list[Atom]:
        """The results of the body of a loop or a branch, constrained to the stored specs of the carries or of the op's results."""
        stored, targets = self.lowering.stored, parent.outs
        if parent.primitive.loop:
            is_body = self.frame is parent.frames[-1]
            targets = loop_parts(parent.eqn).carried(self.frame.ins()) if is_body else []
        out = list(outvars)
        for k, (var, target) in enumerate(zip(self.frame.jaxpr.outvars, targets, strict=False)):
            spec = stored(target)
            if spec is None or isinstance(var, Literal) or not self.frame.ops:
                continue
            if stored(self.frame.env[var]) != spec:
                out[k] = self.constrain(out[k], spec, self.frame.ops[-1].eqn)
        return out


def check_unbound(op: Op, bound: Collection[Any]) -> None:
    """Raises UnsupportedError where a ``shard_map`` of the user's own runs over an axis whose name the caller has bound."""
    for axis in op.eqn.params["newly_manual_axes"]:
        if axis in bound:
            raise UnsupportedError(
                f"this shard_map runs over the mesh axis `{axis}`, and the step is called under a vmap with axis_name={axis!r}, "
                "so that its collectives would be over the axis of the vmap",
                axis=axis,
                source=op.source,
                fixes=["give the vmap another axis_name"],
            )


def is_constrained(run: Run, result: Shard) -> bool:
    """Whether a result has a sharding constraint in both lowerings: if its op has a factor rule and an operand or result is
    sharded.

    The results of elementwise ops have none, since their operands determine the sharding.
    """
    if run.op.rule is None or run.op.primitive.free or result.partial or result.is_constant or not result.spec:
        return False
    return any(result.spec) or any(any(s.spec) for s in run.reads)


def _with_literals(operands: Sequence[Atom], xs: Sequence[Any]) -> list[Any]:
    """The arrays of an op's operands, of which ``xs`` are those that are not literals."""
    given = iter(xs)
    return [literal_array(v) if isinstance(v, Literal) else next(given) for v in operands]


def _with_derivative_of(op: Op, operands: Sequence[Atom], run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, a function of an op's operands without literals, with the derivative of the op itself, which XLA partitions."""

    @jax.custom_jvp
    def function(*xs: Any) -> Any:
        return run(*xs)

    @function.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        """JVP rule: the result of ``run``, and the tangents of the op itself on global arrays."""

        def plain(*xs: Any) -> tuple[Any, ...]:
            return tuple(bind(op.eqn, _with_literals(operands, xs), plain_params(op.eqn.params)))

        return function(*primals), jax.jvp(plain, primals, tangents)[1]

    return function
