"""The ``"shard_map"`` lowering: one ``shard_map`` over the whole program, partitioned as the plan says.

A walk over the program's frames with local arrays, in step with the planner's: every operand is brought from where it lies
to where its op needs it, the op does this device's part, partial sums stay unsettled as long as the plan leaves them so.
Nothing is decided here, and nothing is sent that the plan does not list.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..compat.jax import at_line_of, bind, close_over, make_jaxpr, source_line, with_weak_type
from ..errors import UnsupportedError
from ..layout import AnyMesh, Spec, to_partition_spec
from ..passes.donation import gathered_apart, in_place
from ..plan.collectives import local_bytes
from ..plan.plan import Plan
from ..plan.planner import IDENTITIES
from ..program.ir import Frame, Op, Value
from .bodies import HANDLERS, call, literal, whole
from .exchange import Extremum, Grid, check_blocks, fine_names
from .generated import generate
from .local import run_elementwise, run_local
from .moves import bring
from .orders import Orders
from .rings import gathered, run_ring, scattered

LARGE = 2**26
"""Bytes of a partial sum on a device from which on it is settled before the next loop begins."""
NOT_INSIDE = frozenset({"shard_map", "custom_partitioning", "xla_pmap"})


def lower_to_shard_map(
    plan: Plan, mesh: AnyMesh
) -> tuple[Callable[..., list[Any]], list[NamedSharding], list[NamedSharding]]:
    """(a function from flat inputs to flat results, shardings of the inputs, shardings of the results).

    Raises:
      UnsupportedError: an op that one device cannot do its part of.
    """
    program = plan.program
    specs = [plan.specs[id(v)] for v in program.inputs]
    cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    grid = Grid(plan.sizes, plan.torus, cpu)
    for value, spec in [
        *((v, plan.specs[id(v)]) for v in program.inputs),
        *zip(program.outputs, plan.out_specs, strict=True),
    ]:
        check_blocks(value, spec, plan.sizes)
    consts = list(program.closed.consts)

    def local(*xs: Any) -> tuple[Any, ...]:
        return tuple(Walk(plan, grid, Orders(grid)).run(xs[: len(consts)], xs[len(consts) :]))

    run = jax.shard_map(
        local,
        mesh=grid.mesh(mesh),
        in_specs=(*[PartitionSpec()] * len(consts), *(to_partition_spec(grid.spec(s)) for s in specs)),
        out_specs=tuple(to_partition_spec(grid.spec(s)) for s in plan.out_specs),
        check_vma=False,
    )

    def typed(*xs: Any) -> list[Any]:
        return [with_weak_type(x, v.aval.weak_type) for x, v in zip(run(*xs), program.outputs, strict=True)]

    like = [jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in consts]
    like += [jax.ShapeDtypeStruct(v.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in program.inputs]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10_000))  # long chains of values made from no data
    try:
        call = close_over(make_jaxpr(typed, *like))
    finally:
        sys.setrecursionlimit(limit)
    ins, outs = ([NamedSharding(mesh, to_partition_spec(s)) for s in part] for part in (specs, plan.out_specs))
    return lambda *xs: call(*consts, *xs), ins, outs


@dataclass(eq=False, slots=True)
class Here:
    """What has been moved and made in a body that JAX traces by itself.

    Attributes:
      copies: (frame, value, spec) → the shard moved there, once for all ops of a frame.
      made: (value, spec) → a shard of a value made from no data.
      came: results that the next loop waits for.
      ringed: results of products that a ring has made already, by ``id(op)``.
      done: ids of ops that ran ahead of their place, for a ring.
      waiting_for: operands of products that are made block by block when their sum is settled, by ``id(op)``.
      raw: what products wait for, as its op leaves it, by ``id(value)``.
      extrema: those that are unsettled, by ``id(value)``.
    """

    copies: dict[tuple[int, int, Spec], Any] = field(default_factory=dict)
    made: dict[tuple[int, Spec], Any] = field(default_factory=dict)
    came: list[Any] = field(default_factory=list)
    ringed: dict[int, Any] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    waiting_for: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    raw: dict[int, Any] = field(default_factory=dict)
    extrema: dict[int, Extremum] = field(default_factory=dict)


class Walk:
    """The program on one device.

    Attributes:
      x: the shard of every value, by ``id(value)``; values made from no data are made where they are used.
      now: where it lies.
      partial: (axes, kind) of the values that are unsettled.
      here: what has been moved and made in the body at hand.
      hoisted: (value of a loop body, spec) → the shard moved there before the loop.
      replacing: ids of the results that take the place of donated arguments.
      replaced: the last of those that was gathered.
      orders: in which orders of their dims partial sums can be had.
    """

    def __init__(self, plan: Plan, grid: Grid, orders: Orders):
        self.plan, self.sizes, self.rest, self.orders = plan, grid, plan.specs, orders
        self.x: dict[int, Any] = {}
        self.now: dict[int, Spec] = {}
        self.partial: dict[int, tuple[tuple[str, ...], str]] = {}
        self.here = Here()
        self.hoisted: dict[tuple[int, Spec], Any] = {}
        self.replacing = {id(plan.program.outputs[k]) for k in in_place(plan)}
        self.replaced: list[Any] = []

    def run(self, consts: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        program = self.plan.program
        for value, x in zip(program.inputs, xs, strict=True):
            self.put(value, x, self.rest[id(value)])
        self.enter_consts(program.root, consts)
        self.frame(program.root)
        outs = []
        for var, value, spec in zip(program.root.jaxpr.outvars, program.outputs, self.plan.out_specs, strict=True):
            if isinstance(var, Literal):
                self.put(value, literal(var), whole(value))
            self.settle(value)
            outs.append(self.moved(value, spec) if id(value) in self.plan.generated else self.rests(value, spec))
        return outs

    def put(self, value: Value, x: Any, spec: Spec) -> None:
        self.x[id(value)], self.now[id(value)] = x, spec
        if id(value) in self.plan.order.awaited:
            self.here.raw.setdefault(id(value), x)

    def enter_consts(self, frame: Frame, consts: Sequence[Any]) -> None:
        for var, c in zip(frame.jaxpr.constvars, consts, strict=True):
            self.put(frame.env[var], c, whole(frame.env[var]))

    @contextlib.contextmanager
    def own_trace(self) -> Iterator[None]:
        """A body that JAX traces by itself: what is moved or made in it is not there outside."""
        before, self.here = self.here, Here()
        try:
            yield
        finally:
            self.here = before

    # -- ops

    def frame(self, frame: Frame) -> None:
        for op in self.plan.order.ops(frame):
            if id(op) in self.here.done:
                continue
            if op.outs and all(id(v) in self.plan.generated for v in op.outs) and not (op.frames or op.eqn.effects):
                continue
            with at_line_of(op.eqn, op.where):
                self.op(op)

    def op(self, op: Op) -> None:
        if op.frames:
            HANDLERS.get(op.name, call)(self, op)
        elif op.name in IDENTITIES:
            self.identity(op)
        elif op.name == "optimization_barrier":
            self.barrier(op)
        elif id(op.outs[0]) in self.plan.passed if op.outs else False:
            self.pass_on(op)
        elif op.rule is None:
            self.elementwise(op)
        else:
            self.by_rule(op)

    def literal(self, op: Op, i: int) -> Any:
        return literal(op.eqn.invars[i])

    def elementwise(self, op: Op) -> None:
        plan, (out,) = self.plan.ops[id(op)], op.outs
        (x,) = run_elementwise(op, self.operands(op, plan.ins))
        self.put(out, x, plan.outs[0])
        self.finish(out)

    def by_rule(self, op: Op) -> None:
        plan = self.plan.ops[id(op)]
        assert plan.factor_axes is not None
        ring = self.plan.rings.gathers.get(id(op))
        xs = [] if ring is not None else self.operands(op, plan.ins)
        if ring is None and id(op) in self.plan.order.after:
            xs = self.after_what_is_first(xs, self.plan.order.after[id(op)])
        if ring is not None:
            results = [gathered(self, ring, op)]
        elif id(op.outs[0]) in self.plan.rings.pending if op.outs else False:
            self.here.waiting_for[id(op)] = (xs[0], xs[1])
            self.now[id(op.outs[0])] = plan.outs[0]
            self.partial[id(op.outs[0])] = plan.partial[0], plan.kind
            return
        elif op.rule is not None and not op.rule.known:
            results = self.foreign(op, xs)
        else:
            results = run_local(op, plan.factor_axes, xs, self.sizes)
        for k, (out, x, spec) in enumerate(zip(op.outs, results, plan.outs, strict=True)):
            self.put(out, x, spec)
            if plan.partial and plan.partial[k]:
                self.partial[id(out)] = plan.partial[k], plan.kind
                self.orders.product(op, xs, x)
                if op.name in ("reduce_max", "reduce_min"):
                    self.here.extrema[id(out)] = Extremum(xs[0], tuple(op.eqn.params["axes"]), op.name == "reduce_max")
            else:
                self.finish(out)

    def foreign(self, op: Op, xs: Sequence[Any]) -> list[Any]:
        """An op without a rule: every device does all of it."""
        why = "has no factor rule, and cannot be nested in the shard_map that the lowering makes"
        if op.name not in NOT_INSIDE:
            try:
                return bind(op.eqn, xs, op.eqn.params)
            except Exception as e:
                why = f"has no factor rule, and cannot run on one device: {e}".splitlines()[0]
        raise UnsupportedError(
            f"{op.name} {why}",
            shape=op.outs[0].shape if op.outs else None,
            source=source_line(op.eqn),
            fixes=['use lowering="jit"', "or write it without, and let the layout split it"],
        )

    def pass_on(self, op: Op) -> None:
        """A linear op on partial sums: each device does it to its own."""
        plan, (out,) = self.plan.passed[id(op.outs[0])], op.outs
        if id(out) in self.plan.rings.pending:
            self.now[id(out)], self.partial[id(out)] = plan.outs[0], (plan.partial[0], plan.kind)
            return
        xs = [self.literal(op, i) if v is None else self.at(v, self.rest[id(v)]) for i, v in enumerate(op.ins)]

        def passed(xs: Sequence[Any]) -> Any:
            (x,) = run_elementwise(op, xs) if op.rule is None else run_local(op, plan.factor_axes or [], xs, self.sizes)
            return x

        x = passed(xs)
        self.orders.passed(op, xs[0], x)
        self.put(out, x, plan.outs[0])
        self.partial[id(out)] = plan.partial[0], plan.kind
        self.still_extreme(out, op.ins[0], lambda x: passed([x]))

    def identity(self, op: Op) -> None:
        (value,), (out,) = op.ins, op.outs
        if value is None:
            self.put(out, self.literal(op, 0), whole(out))
        elif id(value) in self.partial:
            self.put(out, self.x[id(value)], self.now[id(value)])
            self.still_partial(out, value)
        else:
            self.put(out, self.x[id(value)], self.now[id(value)])
            self.finish(out)

    def barrier(self, op: Op) -> None:
        xs = []
        for i, (value, out) in enumerate(zip(op.ins, op.outs, strict=True)):
            if value is None:
                xs.append(self.literal(op, i))
                self.now[id(out)] = whole(out)
                continue
            spec = self.rest[id(value)] if id(value) in self.plan.generated else self.now[id(value)]
            xs.append(self.at(value, spec))
            self.now[id(out)] = spec
            if id(value) in self.partial:
                self.still_partial(out, value)
        for out, x in zip(op.outs, bind(op.eqn, xs, op.eqn.params), strict=True):
            self.x[id(out)] = x

    def still_partial(self, out: Value, value: Value) -> None:
        self.partial[id(out)] = self.partial[id(value)]
        self.still_extreme(out, value)

    def still_extreme(self, out: Value, value: Value | None, view: Callable[[Any], Any] | None = None) -> None:
        """A result is a view of what may be an extremum that is unsettled."""
        of = self.here.extrema.get(id(value))
        if of is not None:
            self.here.extrema[id(out)] = of if view is None else of.turned(view)

    # -- the order of loops and of products

    def after_what_is_first(self, xs: list[Any], values: Sequence[Value]) -> list[Any]:
        """The operands of a product, made to wait for other values (:mod:`meshpar.passes.schedule` says why)."""
        xs, _ = lax.optimization_barrier((xs, [self.here.raw[id(v)] for v in values]))
        return xs

    def after_what_came(self, carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        """A loop's operands, made to wait for the loops and the large sums before it.

        The compiler may order what is independent as it likes, and likes to keep whole gradients and gathered weights
        waiting while it runs other loops first.
        """
        came, self.here.came = self.here.came, []
        if not came:
            return carry, xs
        carry, xs, _ = lax.optimization_barrier((carry, xs, came))
        return carry, xs

    # -- moving values

    def operands(self, op: Op, needs: Sequence[Spec | None]) -> list[Any]:
        """The operands of an op, settled, each in the spec that it needs."""
        for v in op.ins:
            if v is not None:
                self.settle(v)
        return [
            self.literal(op, i) if v is None or need is None else self.operand(op, v, need)
            for i, (v, need) in enumerate(zip(op.ins, needs, strict=True))
        ]

    def operand(self, op: Op, value: Value, need: Spec) -> Any:
        if id(value) in self.plan.generated:
            return generate(self, value, need)
        if self.now[id(value)] == need:
            return self.x[id(value)]
        if (id(value), need) in self.hoisted:
            return self.hoisted[id(value), need]
        key = (id(op.frame), id(value), need)
        if key not in self.here.copies and key in self.plan.rings.kept:
            run_ring(self, self.plan.rings.kept[key])
        if key not in self.here.copies:
            self.here.copies[key] = self.moved(value, need)
        return self.here.copies[key]

    def moved(self, value: Value, need: Spec) -> Any:
        if id(value) in self.plan.generated:
            return generate(self, value, need)
        return bring(self.x[id(value)], self.now[id(value)], need, self.sizes)

    def at(self, value: Value, spec: Spec) -> Any:
        """A value where it lies."""
        return generate(self, value, spec) if id(value) in self.plan.generated else self.x[id(value)]

    def settle(self, value: Value) -> None:
        axes, kind = self.partial.pop(id(value), ((), "sum"))
        if not axes:
            return
        rest = self.rest[id(value)]
        ring = self.plan.rings.scatters.get(id(value))
        x, times = (self.x[id(value)], 1.0) if ring is None else scattered(self, ring, value.aval.dtype)
        size, algorithms = x.size * times, self.plan.algorithms.get(id(value))
        x, spec = self.orders.settle(x, self.now[id(value)], rest, axes, kind, algorithms, begun=ring is not None)
        if id(value) in self.here.extrema and (over := fine_names([a for a in axes if self.sizes[a] > 1], self.sizes)):
            x = self.here.extrema.pop(id(value)).settled(x, over)
        if x.size < size and size * x.dtype.itemsize >= LARGE // 4:
            # where it is sent whole: cut here, not where it is read
            (x,) = lax.optimization_barrier([x])
        if x.size < size and size * x.dtype.itemsize >= LARGE:
            self.here.came.append(x)
        self.put(value, bring(x, spec, rest, self.sizes), rest)

    def finish(self, out: Value) -> None:
        """Bring a result to the spec in which it rests."""
        rest = self.rest[id(out)]
        if self.now[id(out)] != rest:
            self.put(out, self.rests(out, rest), rest)

    def rests(self, value: Value, spec: Spec) -> Any:
        """A value where it stays; large results in place of arguments in turn (:mod:`meshpar.passes.donation` says why)."""
        x, have = self.x[id(value)], self.now[id(value)]
        size = local_bytes(value.shape, x.dtype.itemsize, spec, self.sizes)
        if id(value) not in self.replacing or not gathered_apart(size, x.nbytes):
            return bring(x, have, spec, self.sizes)
        if self.replaced:
            x, _ = lax.optimization_barrier((x, self.replaced))
        x = bring(x, have, spec, self.sizes, apart=True)
        self.replaced = [x]
        return x
