"""The ``"shard_map"`` lowering: one ``shard_map`` around the program, in which every device runs the steps of the plan.

It is an interpreter of steps on local arrays. The steps determine all collectives, their algorithms and their order. The lowered
function has the derivatives of the ``"jit"`` lowering.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding

from ..compat.equation_templates import SourceInfo, Templates
from ..compat.jax import (
    abstract_array,
    at_source,
    bind,
    close_over,
    equations,
    literal_array,
    make_generated_jaxpr,
    may_be_differentiated,
    on_host,
    source_of,
    used_inputs,
    with_weak_type,
    zeros,
)
from ..compat.quirks import opaque, with_rows
from ..layout import AnyMesh, to_partition_spec
from ..plan.plan import Plan
from ..plan.shard_shapes import local_shape, replicated_spec
from ..plan.steps import Barrier, Body, Branch, Call, Constant, Loop, Reduce, Reshard, Run, Shard, Step
from ..program.ir import Op
from ..rules import check_local, refusal, run_local
from ..rules.halo import Exchanged, reusing
from ..rules.local_forms import unsupported
from ..rules.mesh_in_shard_map import Grid, axis_index, fine_names, slice_to_spec
from ..rules.registry import Refusal
from .collectives import follow, reduced
from .jit import is_constrained, lower_to_jit, sharding_of
from .local_constraints import constrain_local
from .reduction_dim_order import TransposedSums
from .rings import run_gather_ring, run_reduce_ring


def lower_to_shard_map(
    plan: Plan, mesh: AnyMesh, bound: Collection[Any] = ()
) -> tuple[Callable[..., list[Any]], list[NamedSharding], list[NamedSharding]]:
    """(a function from flat inputs to flat results, shardings of the inputs, shardings of the results).

    The derivative of the function is the derivative of the ``"jit"`` lowering, so that functions with custom derivatives, and
    extrema over sharded dims, have the same derivative as without a layout.

    Args:
      bound: names of the axes that the caller has bound (``jax.vmap(…, axis_name=)``).

    Raises:
      UnsupportedError: an op without a local form.
    """
    program, body = plan.program, plan.body
    consts = list(program.closed.consts)
    arguments = body.inputs[len(consts) :]
    outputs = [s for s in body.outputs if s is not None]
    grid = Grid(plan.sizes, plan.torus, isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu", bound)
    empty = [0 in s.value.shape for s in body.inputs]

    def on_device(*xs: Any) -> tuple[Any, ...]:
        given = iter(xs)
        operands = [
            zeros(local_shape(s.value.shape, s.spec, plan.sizes), s.value.aval.dtype) if e else next(given)
            for s, e in zip(body.inputs, empty, strict=True)
        ]
        return tuple(_Device(grid, plan).run(body, operands))

    run = jax.shard_map(  # operands without elements are left out: Shardy rejects several of them
        on_device,
        mesh=grid.mesh(mesh),
        in_specs=tuple(to_partition_spec(grid.spec(s.spec)) for s, e in zip(body.inputs, empty, strict=True) if not e),
        out_specs=tuple(to_partition_spec(grid.spec(s.spec)) for s in outputs),
        check_vma=False,
    )

    def typed(*xs: Any) -> list[Any]:
        results = run(*(x for x, e in zip(xs, empty, strict=True) if not e))
        return [with_weak_type(x, v.aval.weak_type) for x, v in zip(results, program.outputs, strict=True)]

    like = [jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in consts]
    like += [abstract_array(v.shape, v.aval.dtype, v.aval.weak_type, on_host(v.aval)) for v in program.inputs]
    closed = make_generated_jaxpr(typed, *like)
    call = close_over(closed)
    # JAX neither transfers nor donates unused arguments, but does not find them within a custom_jvp
    used = used_inputs(closed)[len(consts) :]
    avals = [(v.shape, v.aval.dtype) for v in program.inputs]

    def every(xs: Sequence[Any]) -> list[Any]:
        """All arguments, with zeros in place of unused ones."""
        given = iter(xs)
        return [next(given) if u else zeros(*aval) for u, aval in zip(used, avals, strict=True)]

    def on_used(*xs: Any) -> list[Any]:
        return call(*consts, *every(xs))

    ins, outs = ([sharding_of(s, mesh) for s in part] for part in (arguments, outputs))
    function = on_used

    def partitioned() -> Callable[..., list[Any]]:
        """The function of the used arguments as the ``"jit"`` lowering has it."""
        assert isinstance(mesh, Mesh)
        lowered = lower_to_jit(plan, mesh, bound)[0]
        return lambda *xs: lowered(*every(xs))

    if bound and any(e.primitive.name == "custom_vjp_call" for e in equations(program.closed)):
        function = jax.custom_vjp(on_used)  # JAX has no vmap of the forward derivative of a custom_vjp
        function.defvjp(lambda *xs: jax.vjp(partitioned(), *xs), lambda pullback, given: pullback(given))
    elif may_be_differentiated(closed):
        function = jax.custom_jvp(on_used)
        function.defjvp(lambda primals, tangents: jax.jvp(partitioned(), primals, tangents))
    return lambda *xs: function(*itertools.compress(xs, used)), ins, outs


class _Device:
    """Runs the steps of a plan on the shards of one device, inside a ``shard_map``, while JAX traces it.

    Attributes:
      plan: the plan.
      x: shard → the local array.
      orders: the orders of dims in which partial values can be computed.
      exchanged: the halos that the ops of the body have received.
      templates: of the equations of steps of the body.
    """

    def __init__(self, grid: Grid, plan: Plan):
        self.sizes, self.plan = grid, plan
        self.x: dict[Shard, Any] = {}
        self.orders = TransposedSums(grid)
        self.exchanged = Exchanged()
        self.templates = Templates()

    def run(self, body: Body, xs: Sequence[Any]) -> list[Any]:
        """The results of a body for its inputs."""
        self.x.update(zip(body.inputs, xs, strict=True))
        with reusing(self.exchanged):
            for step in body.steps:
                kind, xs, matmul = self.signature(step)
                sources = [self.source(step)]
                if kind is None:
                    with at_source(sources[0]):
                        _RUN[type(step)](self, step)
                else:
                    if matmul is not None:
                        sources.append(source_of(matmul.eqn, matmul.where))
                    trace = functools.partial(self.trace, step, sources[0])
                    results = self.templates.run(self.templates.key(kind, xs), xs, trace, sources)
                    self.x.update(zip(step.makes, results, strict=True))
                if isinstance(step, Run) and not step.in_ring:
                    self.orders.ran(step, xs, [self.x[s] for s in step.results])
        return [self.x[s] for s in body.outputs if s is not None]

    def trace(self, step: Step, source: SourceInfo) -> list[Any]:
        """The arrays that a step makes."""
        with at_source(source):
            _RUN[type(step)](self, step)
        return [self.x[s] for s in step.makes]

    def source(self, step: Step) -> SourceInfo:
        """The source line and name stack of the op of a step, with the name scope of its loop or collectives."""
        op, names = step.op, [self.plan.loop_name(step)] if isinstance(step, Loop) else []
        scope = " + ".join(dict.fromkeys([*names, *map(self.plan.scope_name, step.sends)]))
        return source_of(None, None, scope) if op is None else source_of(op.eqn, op.where, scope)

    def signature(self, step: Step) -> tuple[Hashable | None, Sequence[Any], Op | None]:
        """(a key, equal for steps that add equal equations to operands of equal types; their operands; the matmul among these
        equations). The first is None if the equations depend on more: on halos that are received already, on what makes the
        operand of a scatter."""
        op, what = step.op, None
        if isinstance(step, Run) and not step.in_ring:
            eqn, rule, entry = step.op.eqn, step.op.rule, step.op.primitive
            if step.collectives or eqn.effects:
                pass
            elif rule is None and entry.local is None and entry.family != "barrier":
                what = (eqn.primitive, *eqn.params.items(), *_literals(step))
            elif rule is not None and rule.known and not rule.windows and entry.family != "scatter":
                constrained = () if self.sizes.cpu else tuple(is_constrained(step, s) for s in step.results)
                what = rule, step.axes, step.rows, constrained  # equal rules have equal literals
            return what, [self.x[s] for s in step.reads], None
        if isinstance(step, Reshard) and step.ring is None and op is not None:
            return (step.path, step.separate_buffer), [self.x[step.source]], None
        if isinstance(step, Reduce) and step.ring is None and op is not None:
            order, source = self.orders.best(self.x[step.source], step), step.source
            scatters = tuple((s.dim, s.axes, s.algorithm) for s in step.scatters)
            rule = None if order.matmul is None else order.matmul.rule
            what = step.path, scatters, step.over, source.kind, source.spec, order.permutation, rule
            return what, order.arrays, order.matmul
        return None, [], None

    def constant(self, step: Constant) -> None:
        spec = step.result.spec
        self.x[step.result] = slice_to_spec(step.array, replicated_spec(len(spec)), spec, self.sizes)

    def reshard(self, step: Reshard) -> None:
        if step.ring is not None:
            run_gather_ring(step, step.ring, self.x, self.sizes)
        else:
            self.x[step.result] = follow(self.x[step.source], step.path, self.sizes, step.separate_buffer)

    def reduce(self, step: Reduce) -> None:
        """Run a reduction: all-reduces and reduce-scatters of a partial value, or a reduce-scatter ring; then the
        reshards after it."""
        if step.ring is None:
            x = self.orders.reduced(self.x[step.source], step)
        else:
            x = run_reduce_ring(step, step.ring, self.x, self.sizes)
            x = reduced(x, step, self.sizes, begun=len(self.sizes.ring(step.ring.axes)[0]))
        self.x[step.result] = follow(x, step.path, self.sizes)

    def op(self, step: Run) -> None:
        """Run an op on the local arrays of its operands; a matmul in a reduce-scatter ring is only recorded for the
        ring."""
        op = step.op
        if step.in_ring == "gather":
            return  # the ring has computed it
        if step.in_ring == "reduce":  # computed chunk by chunk when its result is reduced
            if op.primitive.family == "dot" and step.axes is not None:
                self.x[step.results[0]] = op, self.operands(step)
            return
        xs = self.operands(step)
        if op.primitive.family == "identity":
            results = xs
        elif op.rule is None:
            results = run_local(op, (), xs, self.sizes)
        elif op.rule.known:
            axes = list(step.axes or ())
            check_local(op, axes, self.sizes)
            if step.rows > 1:
                matmul = lambda *xs: run_local(op, axes, xs, self.sizes)[0]  # noqa: E731
                results = [with_rows(matmul, xs, op.eqn.params["dimension_numbers"], step.rows)]
            else:
                results = run_local(op, axes, xs, self.sizes, step.form)
            if not self.sizes.cpu:
                results = [
                    constrain_local(x) if is_constrained(step, s) else x
                    for x, s in zip(results, step.results, strict=True)
                ]
        else:
            results = _foreign(step, xs)
        self.x.update(zip(step.results, results, strict=True))

    def operands(self, step: Run) -> list[Any]:
        return [
            literal_array(var) if s is None else self.x[s]
            for var, s in zip(step.op.eqn.invars, step.operands, strict=True)
        ]

    def barrier(self, step: Barrier) -> None:
        """Copy values behind an optimization barrier, or behind an opaque one that XLA cannot see through."""
        xs = [self.x[s] for s in step.sources]
        if step.opaque:
            xs = list(map(opaque, xs))
        else:
            xs, _ = lax.optimization_barrier((xs, [self.x[s] for s in step.after]))
        self.x.update(zip(step.results, xs, strict=True))

    def inside(self, body: Body, xs: Sequence[Any]) -> list[Any]:
        """The results of the body of a loop or branch. Its other values are dropped, since they belong to an inner trace."""
        outer = self.x, self.orders, self.exchanged, self.templates
        self.x, self.orders, self.exchanged, self.templates = dict(self.x), self.orders.copy(), Exchanged(), Templates()
        try:
            return self.run(body, xs)
        finally:
            self.x, self.orders, self.exchanged, self.templates = outer

    def call(self, step: Call) -> None:
        self.run(step.body, [])

    def loop(self, step: Loop) -> None:
        """Run a scan or while loop; of a carry that is partial, all devices of a group but the first begin with zeros."""
        p, body, carries = step.op.eqn.params, step.body, len(step.inits)
        avals = [s.value.aval for s in body.inputs]
        first = []
        for init, inner in zip(step.inits, body.inputs, strict=False):
            x = self.x[init]
            axes = fine_names([a for a in inner.partial if self.sizes[a] > 1], self.sizes)
            if (
                axes and not init.partial
            ):  # the initial value on one device of each group that is reduced, zeros on the others
                x = jnp.where(axis_index(axes) == 0, x, jnp.zeros((), x.dtype))
            first.append(_strong(x, inner.value.aval))
        if step.op.primitive.family != "scan":
            cond = step.inner[0]
            results = lax.while_loop(
                lambda carry: self.inside(cond, carry)[0],
                lambda carry: [_strong(x, a) for x, a in zip(self.inside(body, carry), avals, strict=True)],
                first,
            )
        else:
            outs = [v.aval for v in body.frame.jaxpr.outvars]

            def one(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                results = [_strong(x, a) for x, a in zip(self.inside(body, [*carry, *xs]), outs, strict=True)]
                return results[:carries], results[carries:]

            stacks = [self.x[s] for s in step.stacks]
            carry, ys = lax.scan(one, first, stacks, length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
            results = [*carry, *ys]
        self.x.update(zip(step.results, results, strict=True))

    def branch(self, step: Branch) -> None:
        """Run the branch at the local index by ``lax.switch``."""
        index = literal_array(step.op.eqn.invars[0]) if step.index is None else self.x[step.index]

        def run(body: Body) -> Callable[[], list[Any]]:
            avals = [v.aval for v in body.frame.jaxpr.outvars]
            return lambda: [_strong(x, a) for x, a in zip(self.inside(body, []), avals, strict=True)]

        results = lax.switch(lax.convert_element_type(index, np.int32), [run(b) for b in step.branches])
        self.x.update(zip(step.results, results, strict=True))


_RUN: dict[type[Step], Callable[[_Device, Any], None]] = {
    Constant: _Device.constant, Reshard: _Device.reshard, Reduce: _Device.reduce, Run: _Device.op,
    Barrier: _Device.barrier, Call: _Device.call, Loop: _Device.loop, Branch: _Device.branch,
}  # fmt: skip


def _literals(step: Run) -> list[Hashable]:
    """The literal operands of an op, with their positions."""
    if None not in step.operands:
        return []
    literals = [(k, literal_array(v)) for k, v in enumerate(step.op.eqn.invars) if isinstance(v, Literal)]
    return [(k, x.dtype, x.tobytes()) for k, x in literals]


def _foreign(step: Run, xs: Sequence[Any]) -> list[Any]:
    """The results of an op without a factor rule, which every device computes completely.

    Raises:
      UnsupportedError: it cannot run on one device.
    """
    op, cause = step.op, None
    refused = refusal(op, (), {})
    if refused is None:
        try:
            return bind(op.eqn, xs, op.eqn.params)
        except Exception as e:
            cause, refused = e, Refusal(f"has no factor rule, and cannot run on one device: {e}".splitlines()[0])
    fixes = ("or write it without this op, and let the layout shard it",)
    raise unsupported(op, refused._replace(fixes=fixes)) from cause


def _strong(x: Any, aval: Any) -> Any:
    """The array in the dtype of a loop's carry, without a weak type."""
    return x if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) else lax.convert_element_type(x, aval.dtype)
