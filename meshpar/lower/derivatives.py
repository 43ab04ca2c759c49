"""Functions with derivatives of their own (``jax.custom_jvp``, ``jax.custom_vjp``), where the lowered function is differentiated.

The lowering walks their bodies, so that JAX would differentiate these. What comes out of a body is therefore given the function's
own derivative here: a small program that is planned for the shards at hand and lowered as a part of this one. It is traced only
when somebody differentiates the lowered function; gradients inside it are long taken when it is lowered.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from ..compat.jax import bind
from ..errors import JoinWarning
from ..layout import Layout, Spec
from ..plan.planner import make_plan
from ..program.infer import infer
from ..program.ir import Frame, Op, Value
from ..program.trace import trace
from ..rules import having
from ..rules.spmd import fine_names
from .moves import bring

if TYPE_CHECKING:
    from .shard_map import Walk

OWN = having(lambda p: p.own_derivative)


def walk_body(walk: Walk, op: Op, frame: Frame) -> None:
    """The body of a function that has its own derivative: as it is, with that derivative."""
    ins = {id(v): v for v in op.ins if v is not None and _is_float(v)}
    _settle(walk, ins.values())
    if any(i in walk.plan.rings.pending and i not in walk.x for i in ins):
        return walk.frame(frame)  # a term of a sum that is made on a ring later: what adds to it or turns it is linear
    before = {i: walk.x[i] for i in ins if i in walk.x and i not in walk.partial}
    held = [_Held.of(walk, v) for v in ins.values()]
    walk.x.update((i, lax.stop_gradient(x)) for i, x in before.items())
    walk.frame(frame)
    walk.x.update(before)
    _settle(walk, op.outs)
    outs = {id(v): v for v in op.outs if _is_float(v) and id(v) in walk.x and id(v) not in ins}
    results = _attached(walk, op, list(ins.values()), held, list(outs.values())) if ins and outs else []
    walk.x.update(zip(outs, results, strict=False))
    return None


def _settle(walk: Walk, values: Iterable[Value]) -> None:
    """Settle what is no sum of shards that are there."""
    for v in values:
        if id(v) in walk.partial and (walk.partial[id(v)][1] != "sum" or id(v) in walk.plan.rings.scatters):
            walk.settle(v)


def _is_float(v: Value) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


class _Held:
    """How a value lies on the devices: a shard, in which spec, a sum over which axes."""

    def __init__(self, walk: Walk, x: Any, spec: Spec, partial: tuple[str, ...]):
        self.x, self.spec = x, spec
        split = {a for entry in spec for a in entry}
        self.partial = _fine(walk, [a for a in partial if a not in split])
        self.copied = _fine(walk, [a for a in walk.plan.sizes if a not in split and a not in partial])

    @classmethod
    def of(cls, walk: Walk, v: Value) -> _Held:
        spec = walk.rest[id(v)] if id(v) in walk.plan.generated else walk.now[id(v)]
        return cls(walk, walk.at(v, spec), spec, walk.partial.get(id(v), ((), ""))[0])

    def settled(self, x: Any) -> Any:
        """The value, or a tangent of it, with nothing left to sum."""
        return lax.psum(x, self.partial) if self.partial else x

    def parted(self, x: Any) -> Any:
        """What every device has of a tangent."""
        return x / _size(self.partial)

    def gathered(self, x: Any) -> Any:
        """A cotangent: what those say who hold copies adds up."""
        return lax.psum(x, self.copied) if self.copied else x

    def spread(self, x: Any) -> Any:
        """What every device has of a cotangent."""
        return x / _size(self.copied)


def _fine(walk: Walk, axes: Sequence[str]) -> tuple[str, ...]:
    return fine_names([a for a in axes if walk.plan.sizes[a] > 1], walk.sizes)


def _size(axes: tuple[str, ...]) -> int:
    return math.prod(lax.axis_size(a) for a in axes)


def _attached(walk: Walk, op: Op, floats: Sequence[Value], ins: list[_Held], outs: Sequence[Value]) -> list[Any]:
    """The results of a body with the derivative of its function.

    Args:
      floats: its operands that have one; ``ins``: how they lay before the body.
      outs: its results that have one.
    """
    others = list({id(v): v for v in op.ins if v is not None and not _is_float(v)}.values())
    values = [*floats, *others]
    place = {id(v): k for k, v in enumerate(values)}
    results = [next(k for k, out in enumerate(op.outs) if out is v) for v in outs]
    held, ends = [*ins, *(_Held.of(walk, v) for v in others)], [_Held.of(walk, v) for v in outs]
    n, like, specs = len(floats), [v.aval for v in values], [h.spec for h in held]

    def at(rest: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        """The function of its floats, as it is without any layout."""

        def function(*xs: Any) -> tuple[Any, ...]:
            every = (*xs, *rest)
            operands = [
                v.val if isinstance(v, Literal) else every[place[id(x)]]
                for v, x in zip(op.eqn.invars, op.ins, strict=True)
            ]
            found = bind(op.eqn, operands, op.eqn.params)
            return tuple(found[k] for k in results)

        return function

    def forward(*xs: Any) -> Any:
        return jax.jvp(at(xs[2 * n :]), xs[n : 2 * n], xs[:n])[1]

    def backward(*xs: Any) -> Any:
        return jax.vjp(at(xs[n : len(values)]), *xs[:n])[1](xs[len(values) :])

    def settled(xs: Sequence[Any]) -> list[Any]:
        return [h.settled(x) for h, x in zip(held, xs, strict=False)]

    given = [h.x for h in held[:n]], [h.x for h in ends], [h.x for h in held[n:]]
    if op.name == "custom_jvp_call":

        @jax.custom_jvp
        def with_jvp(xs: Any, ys: Any, rest: Any) -> Any:
            del xs, rest
            return ys

        @with_jvp.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            xs, ys, rest = primals
            run = _lowered(walk, forward, [*like[:n], *like], [*specs[:n], *specs], [h.spec for h in ends])
            found = run(*settled(tangents[0]), *settled([*xs, *rest]))
            return with_jvp(xs, ys, rest), [h.parted(t) for h, t in zip(ends, found, strict=True)]

        return with_jvp(*given)

    @jax.custom_vjp
    def with_vjp(xs: Any, ys: Any, rest: Any) -> Any:
        del xs, rest
        return ys

    def pulled_back(kept: Any, cotangents: Any) -> Any:
        xs, rest = kept
        run = _lowered(walk, backward, [*like, *(v.aval for v in outs)], [*specs, *(h.spec for h in ends)], specs[:n])
        found = run(*settled([*xs, *rest]), *(h.gathered(t) for h, t in zip(ends, cotangents, strict=True)))
        mine = [h.spread(t) for h, t in zip(held, found, strict=False)]
        return mine, [jnp.zeros_like(t) for t in cotangents], [None] * len(rest)

    with_vjp.defvjp(lambda xs, ys, rest: (ys, (xs, rest)), pulled_back)
    return with_vjp(*given)


def _lowered(
    walk: Walk, fn: Callable[..., Any], avals: Sequence[Any], have: Sequence[Spec], want: Sequence[Spec]
) -> Callable[..., list[Any]]:
    """A function of whole arrays as one of shards, which come in some specs and leave in others.

    Dims are called after the axes that split them: what a function does along a split dim its own plan finds out.
    """
    entries = list(dict.fromkeys(entry for spec in (*have, *want) for entry in spec if entry))
    names = {entry: f"dim{k}" for k, entry in enumerate(entries)}
    dims = [tuple(names.get(entry) for entry in spec) for spec in have]
    used = {d for spec in dims for d in spec if d}
    layout = Layout("; ".join(f"{name}: {'+'.join(entry)}" for entry, name in names.items() if name in used))
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    closed, _, leaves = trace(fn, like)
    program = infer(closed, dims, ["" for _ in dims], [None] * len(leaves), ["" for _ in leaves])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JoinWarning)
        plan = make_plan(program, layout, walk.plan.mesh)

    def run(*xs: Any) -> list[Any]:
        placed = [
            bring(x, spec, plan.specs[id(v)], walk.sizes) for x, spec, v in zip(xs, have, program.inputs, strict=True)
        ]
        found = type(walk)(plan, walk.sizes, walk.orders).run(closed.consts, placed)
        return [bring(y, spec, need, walk.sizes) for y, spec, need in zip(found, plan.out_specs, want, strict=True)]

    return run
