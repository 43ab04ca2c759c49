"""Derivatives of a lowered program, taken from outside: the lowered derivatives of the program that was traced.

A rewritten program computes values that its results do not depend on: rows that pad a dim, and the slots of a pipeline in which a
stage has no microbatch. They may be functions of zeros. Where these are not differentiable (``log``, ``1 / x``, a norm), the
derivative of the rewritten program would be 0 · inf. So the lowered program is one op, whose derivatives are planned and lowered as
programs of their own: the forward derivative, and its transpose, which recomputes the program's values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ..dims import Dims
from ..program.ir import Program

Flat = Callable[..., list[Any]]
"""A function of flat arrays."""

Lower = Callable[[Flat, Sequence[Dims]], Flat]
"""(function, dims of its operands) → the function, planned and lowered."""


@dataclass(eq=False, slots=True)
class _Lowered:
    """A function and its lowered form.

    Attributes:
      run: the lowered function.
      function: the function that it computes.
      names: the dims of the operands, and of the results.
      avals: of the results.
      lower: lowers derivatives.
      derived: derivatives by the positions of the operands that they are linear in.
      pullback: of a forward derivative, (primals, cotangents of all results) → cotangents of the tangents; else None. JAX
        does not transpose the forward derivative of a ``custom_vjp``.
    """

    run: Flat
    function: Flat
    names: tuple[Sequence[Dims], Sequence[Dims]]
    avals: Sequence[Any]
    lower: Lower
    derived: dict[Any, _Lowered] = field(default_factory=dict)
    pullback: Flat | None = None

    def derivative(
        self, key: Any, fn: Flat, names: tuple[Sequence[Dims], Sequence[Dims]], avals: Sequence[Any]
    ) -> _Lowered:
        """The lowered form of a derivative ``fn``, which is lowered once."""
        if key not in self.derived:
            self.derived[key] = _Lowered(self.lower(fn, names[0]), fn, names, avals, self.lower)
        return self.derived[key]


def with_lowered_derivatives(run: Flat, program: Program, lower: Lower) -> Flat:
    """A lowered program with the derivatives of ``program.traced``; ``run`` itself if that is not rewritten, or has effects."""
    traced = program.traced
    if traced is program or not program.is_derived_as_traced:
        return run
    names = tuple([tuple(map(traced.dims, side)) for side in (traced.inputs, traced.outputs)])
    of = _Lowered(run, jaxpr_as_fun(traced.closed), names, traced.closed.out_avals, lower)  # type: ignore[arg-type]
    return lambda *xs: lowered_p.bind(*xs, of=of)


lowered_p = Primitive("lowered")
lowered_p.multiple_results = True
lowered_p.def_impl(lambda *xs, of: of.run(*xs))
lowered_p.def_abstract_eval(lambda *xs, of: list(of.avals))
mlir.register_lowering(lowered_p, mlir.lower_fun(lambda *xs, of: of.run(*xs), multiple_results=True))


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, of: _Lowered) -> tuple[list[Any], list[Any]]:
    """The op, and the lowered program of its tangents."""
    moving = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero and _is_float(jax.typeof(primals[i])))
    count, floats = len(primals), [k for k, a in enumerate(of.avals) if _is_float(a)]

    def at(primals: Sequence[Any]) -> Flat:
        """The floats of the results as a function of the operands that have tangents."""

        def function(*moved: Any) -> list[Any]:
            operands = [*primals]
            for i, x in zip(moving, moved, strict=True):
                operands[i] = x
            outs = of.function(*operands)
            return [outs[k] for k in floats]

        return function

    def tangent(*xs: Any) -> list[Any]:
        return jax.jvp(at(xs[:count]), tuple(xs[i] for i in moving), tuple(xs[count:]))[1]

    ins, outs = of.names
    names = [*ins, *(ins[i] for i in moving)], [outs[k] for k in floats]
    avals = [of.avals[k].update(weak_type=False) for k in floats]

    def pullback(*xs: Any) -> list[Any]:
        return list(jax.vjp(at(xs[:count]), *(xs[i] for i in moving))[1]([*xs[count:]]))

    linear = of.derivative(("jvp", moving), tangent, names, avals)
    linear.pullback = pullback
    found = iter(lowered_p.bind(*primals, *(tangents[i] for i in moving), of=linear) if moving else [])
    return lowered_p.bind(*primals, of=of), [
        next(found) if moving and _is_float(a) else ad.Zero(a.to_tangent_aval()) for a in of.avals
    ]


def _transpose(cotangents: Sequence[Any], *operands: Any, of: _Lowered) -> list[Any]:
    """The lowered program of the cotangents of the operands that the function is linear in."""
    unknown = tuple(i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
    given = tuple(k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero)
    like = [operands[i].aval for i in unknown]
    known = [i for i in range(len(operands)) if i not in unknown]

    def back(*xs: Any) -> list[Any]:
        if of.pullback is not None and unknown == tuple(range(len(known), len(operands))):
            cotangent_of = dict(zip(given, xs[len(known) :], strict=True))
            return of.pullback(
                *xs[: len(known)], *(cotangent_of.get(k, jnp.zeros(a.shape, a.dtype)) for k, a in enumerate(of.avals))
            )

        def at(*moved: Any) -> list[Any]:
            full = dict(zip(known, xs, strict=False)) | dict(zip(unknown, moved, strict=True))
            outs = of.function(*(full[i] for i in range(len(operands))))
            return [outs[k] for k in given]

        return list(jax.vjp(at, *(jnp.zeros(a.shape, a.dtype) for a in like))[1]([*xs[len(known) :]]))

    ins, outs = of.names
    names = [*(ins[i] for i in known), *(outs[k] for k in given)], [ins[i] for i in unknown]
    transposed = of.derivative(("transpose", unknown, given), back, names, like)
    found: list[Any] = [ad.Zero(a) for a in like]
    if given:
        found = lowered_p.bind(*(operands[i] for i in known), *(cotangents[k] for k in given), of=transposed)
    by_position = dict(zip(unknown, found, strict=True))
    return [by_position.get(i) for i in range(len(operands))]


def _batched(xs: Sequence[Any], dims: Sequence[int | None], *, of: _Lowered) -> tuple[list[Any], list[int]]:
    """The lowered program of ``jax.vmap`` of the function; the dim that it adds has no name."""
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)

    def mapped(*xs: Any) -> list[Any]:
        return jax.vmap(of.function, in_axes=tuple(dims))(*xs)

    ins, outs = of.names
    names = (
        [n if d is None else (*n[:d], None, *n[d:]) for n, d in zip(ins, dims, strict=True)],
        [(None, *n) for n in outs],
    )
    avals = [a.update(shape=(size, *a.shape)) for a in of.avals]
    batched = of.derivative(("vmap", size, tuple(dims)), mapped, names, avals)
    return lowered_p.bind(*xs, of=batched), [0] * len(avals)


ad.primitive_jvps[lowered_p] = _jvp
ad.primitive_transposes[lowered_p] = _transpose
batching.primitive_batchers[lowered_p] = _batched
