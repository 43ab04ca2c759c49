"""The other direction of a kernel: with what its forward pass kept, or run again.

What a function on whole arrays keeps for its backward pass is found by tracing it: every dim of every kept array is matched
with the factors of the rule by its size, so that kept arrays are split as operands are. Where that cannot be told, and for
kernels that exchange (what one device keeps is not a part of what the whole function keeps), the backward pass runs the
kernel again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ..compat.jax import equations, parts_by_result
from ..errors import UnsupportedError
from ..rules import having
from .kernels import Dims, Kernel, KernelSend, KernelWork, Notation, Parts, kernel_p

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Sizes that tell which factors a dim is made of."""

CHEAP = having(lambda p: p.cheap)
"""What is made from the operands again rather than kept."""

Source = tuple[str, int]
"""Where an array of a pullback is found: ``("operand", i)``, ``("result", j)``, ``("kept", k)``, or ``("made", n)``: the n-th is
made from operands again."""


def differentiable(kernel: Kernel) -> Callable[..., Any]:
    """The kernel as a function that can be differentiated in reverse mode."""
    return kernel.remembered("differentiable", lambda: _with_gradient(kernel))


def _with_gradient(kernel: Kernel) -> Callable[..., Any]:
    @jax.custom_vjp
    def run(*xs: Any) -> list[Any]:
        return kernel_p.bind(*xs, kernel=kernel)

    def forward(*xs: Any) -> tuple[list[Any], Any]:
        kept = keeping(kernel, xs)
        if kept is None:
            return run(*xs), (_Static(None), xs)
        out = differentiable(kept.forward)(*xs)
        pools = {"operand": xs, "result": out[: kept.results], "kept": out[kept.results :]}
        return list(pools["result"]), (_Static(kept), tuple(pools[which][i] for which, i in kept.saved))

    def backward(saved: Any, cts: Sequence[Any]) -> tuple[Any, ...]:
        kept, arrays = saved[0].value, saved[1]
        float_outs = [ct.dtype != jax.dtypes.float0 for ct in cts]
        cts = [ct for ct, f in zip(cts, float_outs, strict=True) if f]
        if kept is None:
            avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
            back = again(kernel, tuple(map(_inexact, avals)), tuple(float_outs))
        else:
            avals, back = kept.avals, kept.backward
        grads = iter(differentiable(back)(*arrays, *cts))
        return tuple(next(grads) if _inexact(x) else np.zeros(x.shape, jax.dtypes.float0) for x in avals)

    run.defvjp(forward, backward)
    return run


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Static:
    value: Any


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


# -- with what the forward pass kept


@dataclass(frozen=True, eq=False)
class Kept:
    """A kernel in two halves.

    Attributes:
      forward: operands → results, and what is kept beside them.
      backward: what is saved, cotangents of the floating results → cotangents of the floating operands.
      results: how many results the kernel has.
      saved: where each saved array comes from.
      avals: the operands.
    """

    forward: Kernel
    backward: Kernel
    results: int
    saved: tuple[Source, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]


def keeping(kernel: Kernel, xs: Sequence[Any]) -> Kept | None:
    """The two halves of a kernel for operands like these; None where what it keeps cannot be split as the operands are."""
    if kernel.local is not None:
        return None
    avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs)
    key = tuple((x.shape, str(x.dtype)) for x in avals)
    return kernel.remembered(("kept", key), lambda: _halves(kernel, avals))


def _halves(kernel: Kernel, avals: tuple[jax.ShapeDtypeStruct, ...]) -> Kept | None:
    found = _dims_of_kept(kernel, avals)
    if found is None:
        return None
    pulled, kept = found
    notation = kernel.notation
    float_outs = [_inexact(y) for y in jax.tree.leaves(kernel.shapes(*avals))]
    cotangents = tuple(d for d, f in zip(notation.outs, float_outs, strict=True) if f)
    dims_of = {"operand": notation.ins, "result": notation.outs, "kept": kept}
    saved = tuple(
        dict.fromkeys([s for s in pulled.sources if s[0] != "made"] + [("operand", i) for i in pulled.remade])
    )
    known = {
        f for dims in (*(dims_of[w][i] for w, i in saved), *cotangents) for dim in dims if len(dim) == 1 for f in dim
    }
    for i, operand in enumerate(notation.ins):  # whose sizes, on a device, nothing else tells
        if ("operand", i) not in saved and not {f for dim in operand for f in dim} <= known:
            saved = (*saved, ("operand", i))

    def back(*args: Any) -> list[Any]:
        here = _pull_traced(kernel, _operands(kernel, avals, backward.sizes([x.shape for x in args])))
        if here.sources != pulled.sources:
            raise UnsupportedError(
                f"kernel {kernel.name}: on shards it keeps other arrays for its backward pass than on whole ones",
                rule=notation.text,
                fixes=["define its gradient (jax.custom_vjp) out of two kernels, each with a rule of its own"],
            )
        at = dict(zip(saved, args, strict=False))
        operands = {i: x for (which, i), x in at.items() if which == "operand"}
        leaves = [here.make(i, operands) if which == "made" else at[which, i] for which, i in here.sources]
        return list(jax.tree.unflatten(here.tree, leaves)(list(args[len(saved) :])))

    def forward(*xs: Any) -> list[Any]:
        results, pull = _pull(kernel, xs)
        leaves = jax.tree.leaves(pull)
        return [*results, *(x for x, (which, _) in zip(leaves, pulled.sources, strict=True) if which == "kept")]

    backward = Kernel(
        back,
        Notation(
            f"{notation.text} (backward)",
            (*(dims_of[w][i] for w, i in saved), *cotangents),
            tuple(d for d, x in zip(notation.ins, avals, strict=True) if _inexact(x)),
            notation.marks,
        ),
        None, None, f"{kernel.name} backward",
    )  # fmt: skip
    both = Notation(notation.text, notation.ins, (*notation.outs, *kept), notation.marks)
    return Kept(Kernel(forward, both, None, None, kernel.name), backward, len(notation.outs), saved, avals)


def _pull(kernel: Kernel, xs: Sequence[Any]) -> tuple[list[Any], Any]:
    """(results, pullback from cotangents of the floating results to those of the floating operands)."""
    kept = [i for i, x in enumerate(xs) if _inexact(x)]
    floating: list[bool] = []

    def of(*some: Any) -> tuple[list[Any], list[Any]]:
        args = list(xs)
        for i, x in zip(kept, some, strict=True):
            args[i] = x
        out = jax.tree.leaves(kernel.fn(*args))
        floating[:] = map(_inexact, out)
        return [y for y in out if _inexact(y)], [y for y in out if not _inexact(y)]

    some, pull, others = jax.vjp(of, *[xs[i] for i in kept], has_aux=True)
    a, b = iter(some), iter(others)
    return [next(a) if f else next(b) for f in floating], pull


@dataclass(frozen=True, eq=False)
class _Pulled:
    """A pullback, traced.

    Attributes:
      tree: its structure.
      sources: where each of its arrays is found.
      shapes: of its arrays.
      jaxpr: operands → its arrays.
      parts: (jaxpr, numbers of the operands that it reads) of each array.
    """

    tree: Any
    sources: tuple[Source, ...]
    shapes: list[tuple[int, ...]]
    jaxpr: Any
    parts: list[tuple[Any, list[int]]]

    @property
    def remade(self) -> list[int]:
        """The operands that arrays are made from again."""
        return sorted({i for (which, k) in self.sources if which == "made" for i in self.parts[k][1]})

    def make(self, k: int, operands: Mapping[int, Any]) -> Any:
        """Array `k`, made from the operands again."""
        part, read = self.parts[k]
        return jaxpr_as_fun(ClosedJaxpr(part, self.jaxpr.consts))(*[operands[i] for i in read])[0]


def _pull_traced(kernel: Kernel, avals: Sequence[jax.ShapeDtypeStruct]) -> _Pulled:
    trees: list[Any] = []
    sources: list[Source] = []

    def arrays(*xs: Any) -> list[Any]:
        results, pull = _pull(kernel, xs)
        leaves, tree = jax.tree.flatten(pull)
        trees.append(tree)
        known = [("operand", i, x) for i, x in enumerate(xs)] + [("result", j, y) for j, y in enumerate(results)]
        sources.extend(next(((which, i) for which, i, x in known if x is leaf), ("kept", 0)) for leaf in leaves)
        return leaves

    closed = jax.make_jaxpr(arrays)(*avals)
    parts = parts_by_result(closed.jaxpr)
    count = 0
    for k, (which, _) in enumerate(sources):
        if which == "kept":
            made = not any(e.primitive.name not in CHEAP for e in equations(parts[k][0]))
            sources[k] = ("made", k) if made else ("kept", count)
            count += not made
    return _Pulled(trees[0], tuple(sources), [v.aval.shape for v in closed.jaxpr.outvars], closed, parts)


def _operands(kernel: Kernel, avals: Sequence[Any], sizes: Mapping[str, int]) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(tuple(math.prod(sizes[f] for f in dim) for dim in dims), x.dtype)
        for dims, x in zip(kernel.notation.ins, avals, strict=True)
    ]


def _dims_of_kept(kernel: Kernel, avals: Sequence[Any]) -> tuple[_Pulled, tuple[Dims, ...]] | None:
    """(the pullback, the dims of what has to be kept for it).

    The kernel is traced with every factor that may be split of size 1, and again each with a prime of its own: the dims of
    what is kept grow by the primes of the factors that they are made of. What lacks a factor may be another value on every
    device, or one that all have alike; it is not kept.
    """
    notation = kernel.notation
    sizes = kernel.sizes([x.shape for x in avals])
    split = [f for f in sizes if notation.kind(f) != "need_replication"]
    if len(split) > len(PRIMES):
        return None
    primes = dict(zip(split, PRIMES, strict=False))
    merged = {frozenset(dim): dim for dims in (*notation.ins, *notation.outs) for dim in dims}
    try:
        small = _pull_traced(kernel, _operands(kernel, avals, {**sizes, **dict.fromkeys(primes, 1)}))
        large = _pull_traced(kernel, _operands(kernel, avals, {**sizes, **primes}))
    except Exception:  # any: functions refuse sizes in ways of their own
        _pull_traced(kernel, avals)  # what cannot be differentiated at its own sizes either says so here
        return None
    if small.sources != large.sources:
        return None
    found: list[Dims] = []
    for (which, _), one, many in zip(large.sources, small.shapes, large.shapes, strict=True):
        if which != "kept":
            continue
        dims = []
        for a, b in zip(one, many, strict=True):
            mine = frozenset(f for f, p in primes.items() if a and b % (a * p) == 0)
            if b != a * math.prod(primes[f] for f in mine) or (len(mine) > 1 and mine not in merged):
                return None
            dims.append(merged[mine] if len(mine) > 1 else tuple(mine))
        if {f for dim in dims for f in dim} != set(primes):
            return None
        found.append(tuple(dims))
    return large, tuple(found)


# -- run again


def again(kernel: Kernel, floats: tuple[bool, ...], float_outs: tuple[bool, ...]) -> Kernel:
    """From operands and floating cotangents to the cotangents of the floating operands; the kernel is run again.

    A cotangent of what several devices computed alike is shared out among them; what each finds for an operand that
    lies whole along axes over which the kernel exchanges is a partial sum over these.
    """
    return kernel.remembered(("again", floats, float_outs), lambda: _backward_again(kernel, floats, float_outs))


def _backward_again(kernel: Kernel, floats: tuple[bool, ...], float_outs: tuple[bool, ...]) -> Kernel:
    notation, n = kernel.notation, len(kernel.notation.ins)
    cotangents = tuple(dims for dims, f in zip(notation.outs, float_outs, strict=True) if f)
    own = [f for f in notation.marks if notation.kind(f) == "permutation"]

    def local(*args: Any, axes: Mapping[str, tuple[str, ...]]) -> list[Any]:
        cts = list(args[n:])
        for k, dims in enumerate(cotangents):
            mine = {a for dim in dims for f in dim for a in axes[f]}
            alike = tuple({a: None for f in own for a in axes[f] if a not in mine})
            if alike:
                cts[k] = cts[k] / jax.lax.axis_size(alike)
        run = kernel.fn if kernel.local is None else functools.partial(kernel.local, axes=axes)
        return _vjp(run, args[:n], cts)

    def sends(avals: Sequence[jax.ShapeDtypeStruct], parts: Parts) -> list[KernelSend]:
        assert kernel.sends is not None
        forward = list(kernel.sends(avals[:n], parts))
        return [*forward, *(_transposed(s, parts) for s in forward)]

    def works(avals: Sequence[jax.ShapeDtypeStruct], parts: Parts) -> KernelWork:
        assert kernel.works is not None
        forward = kernel.works(avals[:n], parts)
        held = forward.memory if forward.backward is None else forward.backward
        return KernelWork(None if forward.flops is None else 3 * forward.flops, held)

    return Kernel(
        lambda *args: _vjp(kernel.fn, args[:n], args[n:]),
        Notation(
            f"{notation.text} (backward)",
            (*notation.ins, *cotangents),
            tuple(dims for dims, f in zip(notation.ins, floats, strict=True) if f),
            notation.marks,
        ),
        local, None if kernel.sends is None else sends, f"{kernel.name} backward", permutation_partial=True,
        works=None if kernel.works is None else works,
    )  # fmt: skip


def _transposed(s: KernelSend, parts: Parts) -> KernelSend:
    """What a collective becomes when it is differentiated."""
    group, shape = math.prod(parts.sizes[a] for a in s.over(parts)), s.shape
    if s.op == "all-gather":
        shape = (group, *shape)
    elif s.op == "reduce-scatter":
        shape = (math.prod(shape) // group,)
    op = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}.get(s.op, s.op)
    return replace(s, op=op, shape=shape, why=f"{s.why}, backward")


def _vjp(fn: Callable[..., Any], xs: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
    """The cotangents of the floating operands."""
    kept = [i for i, x in enumerate(xs) if _inexact(x)]

    def of(*some: Any) -> list[Any]:
        args = list(xs)
        for i, x in zip(kept, some, strict=True):
            args[i] = x
        return [y for y in jax.tree.leaves(fn(*args)) if _inexact(y)]

    out, back = jax.vjp(of, *[xs[i] for i in kept])
    floats = [ct for ct in cts if _inexact(ct)]
    return list(back([ct.astype(y.dtype) for ct, y in zip(floats, out, strict=True)]))
