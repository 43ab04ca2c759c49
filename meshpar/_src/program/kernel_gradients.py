"""Gradients of kernels: the backward pass reads residuals of the forward pass, or recomputes the kernel.

The residuals of a kernel are found by tracing its function on global arrays. Their dims are matched with the factors of the rule by
size, so that residuals are sharded as operands are. If the factors don't follow from the sizes, or if the kernel has a local form
(whose residuals are not shards of the global ones), the backward pass recomputes the kernel.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ...errors import UnsupportedError
from ..compat.jax import equations, parts_by_result
from ..rules import primitive
from .kernels import Dims, Kernel, KernelSend, KernelWork, Notation, ShardCounts, cached, kernel_p

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Sizes of factors from which the factors of a dim follow."""

Source = tuple[str, int]
"""The source of an array of a pullback: ``("operand", i)``, ``("result", j)``, ``("residual", k)``, or ``("recomputed", n)``:
array n of the pullback, recomputed from operands."""


@cached
def differentiable(kernel: Kernel) -> Callable[..., Any]:
    """A ``jax.custom_vjp`` function that runs the kernel: it is differentiable in reverse mode."""

    @jax.custom_vjp
    def run(*xs: Any) -> list[Any]:
        return kernel_p.bind(*xs, kernel=kernel)

    def forward(*xs: Any) -> tuple[list[Any], Any]:
        """Forward pass of the ``custom_vjp``: (results, residuals), with the residuals as ``(_Static(passes), arrays)``."""
        passes = forward_backward(kernel, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs))
        out = differentiable(passes.forward)(*xs)
        results = len(kernel.notation.outs)
        pools = {"operand": xs, "result": out[:results], "residual": out[results:]}
        return list(pools["result"]), (_Static(passes), tuple(pools[which][i] for which, i in passes.saved))

    def backward(saved: Any, cts: Sequence[Any]) -> tuple[Any, ...]:
        """Backward pass of the ``custom_vjp``: a cotangent for each operand, ``float0`` zeros for an integer operand.

        Args:
          saved: the residuals of ``forward``.
          cts: a cotangent for each result; cotangents of integer results (``float0``) are left out of the kernel's
              operands.
        """
        passes, arrays = saved[0].value, saved[1]
        grads = iter(differentiable(passes.backward)(*arrays, *(ct for ct in cts if ct.dtype != jax.dtypes.float0)))
        return tuple(next(grads) if _inexact(x) else np.zeros(x.shape, jax.dtypes.float0) for x in passes.avals)

    run.defvjp(forward, backward)
    return run


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Static:
    value: Any


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


# -- with residuals


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """A kernel's forward pass and its backward pass, each as a kernel with a rule.

    Attributes:
      forward: operands → results, then residuals; the kernel itself if the backward pass recomputes it.
      backward: saved arrays, cotangents of the floating-point results → cotangents of the floating-point operands.
      saved: the source of each saved array.
      avals: shapes and dtypes of the operands.
    """

    forward: Kernel
    backward: Kernel
    saved: tuple[Source, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]


@cached
def forward_backward(kernel: Kernel, avals: tuple[jax.ShapeDtypeStruct, ...]) -> ForwardBackward:
    """The forward and backward pass for these operands; the latter recomputes the kernel if its residuals cannot be sharded as the
    operands are."""
    notation, floats = kernel.notation, tuple(map(_inexact, avals))
    float_outs = tuple(map(_inexact, jax.tree.leaves(kernel.shapes(*avals))))
    cotangents = tuple(itertools.compress(notation.outs, float_outs))
    traced = _residual_dims(kernel, avals) if kernel.local is None else None
    if traced is None:
        operands = tuple(("operand", i) for i in range(len(avals)))
        return ForwardBackward(kernel, recomputing_backward(kernel, floats, float_outs), operands, avals)
    pulled, residuals = traced
    dims_of = {"operand": notation.ins, "result": notation.outs, "residual": residuals}
    recomputed_from = [("operand", i) for i in pulled.recomputed_from]
    saved = list(dict.fromkeys([*(s for s in pulled.sources if s[0] != "recomputed"), *recomputed_from]))
    arrays = (*(dims_of[w][i] for w, i in saved), *cotangents)
    known = {f for dims in arrays for dim in dims if len(dim) == 1 for f in dim}
    for i, operand in enumerate(notation.ins):  # operands without which a device does not know the size of a factor
        if ("operand", i) not in saved and not {f for dim in operand for f in dim} <= known:
            saved.append(("operand", i))

    def back(*args: Any) -> list[Any]:
        """(*residuals, *cotangents) → the cotangents of the float operands, on global arrays or on the shards of one
        device.

        Residuals that follow from operands are recomputed. Raises UnsupportedError if the trace on shards saves other
        residuals.
        """
        local = _pull_traced(kernel, _operands(kernel, avals, backward.sizes([x.shape for x in args])))
        if local.sources != pulled.sources:
            raise UnsupportedError(
                f"kernel {kernel.name}: it saves other residuals on shards than on global arrays",
                rule=notation.text,
                fixes=["define its gradient (jax.custom_vjp) with two kernels, each with a rule of its own"],
            )
        at = dict(zip(saved, args, strict=False))
        operands = {i: x for (which, i), x in at.items() if which == "operand"}
        leaves = [local.recompute(i, operands) if which == "recomputed" else at[which, i] for which, i in local.sources]
        return list(jax.tree.unflatten(local.tree, leaves)(list(args[len(saved) :])))

    def forward(*xs: Any) -> list[Any]:
        results, pull = _pull(kernel.fn, xs)
        leaves = jax.tree.leaves(pull)
        return [*results, *(x for x, (which, _) in zip(leaves, pulled.sources, strict=True) if which == "residual")]

    ins = (*(dims_of[w][i] for w, i in saved), *cotangents)
    rule = _backward_rule(notation, ins, floats)
    backward = Kernel(back, rule, None, None, f"{kernel.name} backward", forward=(kernel, avals))
    both = replace(notation, outs=(*notation.outs, *residuals))
    forward_kernel = Kernel(forward, both, None, None, kernel.name)
    return ForwardBackward(forward_kernel, backward, tuple(saved), avals)


def _pull(fn: Callable[..., Any], xs: Sequence[Any]) -> tuple[list[Any], Any]:
    """(results, pullback: cotangents of the floating-point results → cotangents of the floating-point operands)."""
    floats = [i for i, x in enumerate(xs) if _inexact(x)]
    floating: list[bool] = []

    def of(*some: Any) -> tuple[list[Any], list[Any]]:
        """(float results, other results) as a function of the float operands; the other operands are constants. Also
        fills ``floating``."""
        args = list(xs)
        for i, x in zip(floats, some, strict=True):
            args[i] = x
        out = jax.tree.leaves(fn(*args))
        floating[:] = map(_inexact, out)
        return [y for y in out if _inexact(y)], [y for y in out if not _inexact(y)]

    some, pull, others = jax.vjp(of, *[xs[i] for i in floats], has_aux=True)
    a, b = iter(some), iter(others)
    return [next(a) if f else next(b) for f in floating], pull


@dataclass(frozen=True, eq=False)
class _Pulled:
    """A pullback (the function that ``jax.vjp`` returns) of a kernel, traced to a jaxpr that computes its arrays.

    Attributes:
      tree: its tree structure.
      sources: the source of each array in it.
      shapes: of these arrays.
      jaxpr: operands → these arrays.
      parts: for each array, (the jaxpr that computes it, indices of the operands that this reads).
    """

    tree: Any
    sources: tuple[Source, ...]
    shapes: list[tuple[int, ...]]
    jaxpr: ClosedJaxpr
    parts: list[tuple[Any, list[int]]]

    @property
    def recomputed_from(self) -> list[int]:
        """The indices of the operands that arrays are recomputed from."""
        return sorted({i for (which, k) in self.sources if which == "recomputed" for i in self.parts[k][1]})

    def recompute(self, k: int, operands: Mapping[int, Any]) -> Any:
        """Array ``k``, recomputed from the operands."""
        part, read = self.parts[k]
        return jaxpr_as_fun(ClosedJaxpr(part, self.jaxpr.consts))(*[operands[i] for i in read])[0]


def _pull_traced(kernel: Kernel, avals: Sequence[jax.ShapeDtypeStruct]) -> _Pulled:
    """The pullback of a kernel, traced for operands of these shapes and dtypes, with the source of each array in it."""
    trees: list[Any] = []
    sources: list[Source] = []

    def arrays(*xs: Any) -> list[Any]:
        """The array leaves of the pullback for operands ``xs``; records its tree, and for each leaf whether it is an
        operand or result."""
        results, pull = _pull(kernel.fn, xs)
        leaves, tree = jax.tree.flatten(pull)
        trees.append(tree)
        known = [("operand", i, x) for i, x in enumerate(xs)] + [("result", j, y) for j, y in enumerate(results)]
        sources.extend(next(((which, i) for which, i, x in known if x is leaf), ("residual", 0)) for leaf in leaves)
        return leaves

    closed = jax.make_jaxpr(arrays)(*avals)
    parts = parts_by_result(closed.jaxpr)
    count = 0
    for k, (which, _) in enumerate(sources):
        if which == "residual":
            cheap = all(primitive(e.primitive.name).cheap for e in equations(parts[k][0]))
            sources[k] = ("recomputed", k) if cheap else ("residual", count)
            count += not cheap
    return _Pulled(trees[0], tuple(sources), [v.aval.shape for v in closed.jaxpr.outvars], closed, parts)


def _operands(kernel: Kernel, avals: Sequence[Any], sizes: Mapping[str, int]) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(
            tuple(math.prod(sizes[f] for f in dim) if dim else n for dim, n in zip(dims, x.shape, strict=True)), x.dtype
        )
        for dims, x in zip(kernel.notation.ins, avals, strict=True)
    ]


def _residual_dims(kernel: Kernel, avals: Sequence[Any]) -> tuple[_Pulled, tuple[Dims, ...]] | None:
    """(traced pullback, factors of the dims of each residual); None: they don't follow from the shapes.

    The kernel is traced with all factors that may be sharded of size 1, and with a different prime for each: a dim of a residual
    grows by the primes of its factors. A residual without one of the factors is refused: it may be replicated over the axes of that
    factor or differ between devices.
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
    except Exception:  # a function may raise any error for sizes that it does not support
        _pull_traced(kernel, avals)  # raises if it is not differentiable at its own sizes either
        return None
    if small.sources != large.sources:
        return None
    residuals: list[Dims] = []
    for (which, _), one, many in zip(large.sources, small.shapes, large.shapes, strict=True):
        if which != "residual":
            continue
        dims = []
        for a, b in zip(one, many, strict=True):
            own = frozenset(f for f, p in primes.items() if a and b % (a * p) == 0)
            if b != a * math.prod(primes[f] for f in own) or (len(own) > 1 and own not in merged):
                return None
            dims.append(merged[own] if len(own) > 1 else tuple(own))
        if {f for dim in dims for f in dim} != set(primes):
            return None
        residuals.append(tuple(dims))
    return large, tuple(residuals)


# -- with recomputation


@cached
def recomputing_backward(kernel: Kernel, floats: tuple[bool, ...], float_outs: tuple[bool, ...]) -> Kernel:
    """The backward pass that recomputes the kernel: operands, cotangents → cotangents of the floating-point operands.

    Args:
      floats, float_outs: whether each operand and result is floating-point; others have no cotangent.

    The cotangent of a result that is replicated over axes over which the kernel exchanges data is divided by their size, and the
    cotangent of an operand that is replicated over them is partial over them.
    """
    notation, n = kernel.notation, len(kernel.notation.ins)
    cotangents = tuple(itertools.compress(notation.outs, float_outs))
    own = [f for f in notation.marks if notation.kind(f) == "permutation"]

    def local(*args: Any, axes: Mapping[str, tuple[str, ...]]) -> list[Any]:
        """(*operands, *cotangents) on the shards of one device → the cotangents of the float operands.

        The cotangent of a result that is replicated over axes of a ``~`` factor is divided by the size of these axes, because the
        gradients are summed over them.
        """
        cts = list(args[n:])
        for k, dims in enumerate(cotangents):
            sharded = {a for dim in dims for f in dim for a in axes[f]}
            replicated = tuple({a: None for f in own for a in axes[f] if a not in sharded})
            if replicated:
                cts[k] = cts[k] / jax.lax.axis_size(replicated)
        run = kernel.fn if kernel.local is None else functools.partial(kernel.local, axes=axes)
        return _vjp(run, args[:n], cts)

    def sends(avals: Sequence[jax.ShapeDtypeStruct], parts: ShardCounts) -> list[KernelSend]:
        assert kernel.sends is not None
        forward = list(kernel.sends(avals[:n], parts))
        floats = [s for s in forward if (_inexact(s) if s.transpose is None else s.transpose)]
        both = [*(s for s in forward if s.recomputed), *(_transposed(s, parts) for s in floats)]
        return sorted(both, key=lambda s: s.hidden > 0)  # the hidden ones last, next to the kernel in a timeline

    def works(avals: Sequence[jax.ShapeDtypeStruct], parts: ShardCounts) -> KernelWork:
        assert kernel.works is not None
        forward = kernel.works(avals[:n], parts)
        memory = forward.memory if forward.backward is None else forward.backward
        return KernelWork(None if forward.flops is None else 3 * forward.flops, memory)

    return Kernel(
        lambda *args: _vjp(kernel.fn, args[:n], args[n:]),
        _backward_rule(notation, (*notation.ins, *cotangents), floats),
        local,
        kernel.sends and sends,
        f"{kernel.name} backward",
        permutation_partial=True,
        works=kernel.works and works,
        forms=tuple(recomputing_backward(form, floats, float_outs) for form in kernel.forms),
        forward=(kernel, None),
    )


def _backward_rule(notation: Notation, ins: tuple[Dims, ...], floats: Iterable[bool]) -> Notation:
    """The rule of a backward pass with these operands, whose results are the cotangents of floating-point operands."""
    outs = tuple(itertools.compress(notation.ins, floats))
    return replace(notation, text=f"{notation.text} (backward)", ins=ins, outs=outs)


def _transposed(s: KernelSend, parts: ShardCounts) -> KernelSend:
    """The collective of the backward pass for one of the forward pass."""
    group, shape = math.prod(parts.sizes[a] for a in s.over(parts)), s.shape
    op = s.transpose or {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}.get(s.op, s.op)
    if op != s.op == "all-gather":
        shape = (group, *shape)
    elif op == "all-gather" != s.op:
        shape = (math.prod(shape) // group,)
    return replace(s, op=op, shape=shape, why=f"{s.why}, backward")


def _vjp(fn: Callable[..., Any], xs: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
    """The cotangents of the floating-point operands."""
    results, pull = _pull(fn, xs)
    pairs = zip(filter(_inexact, cts), filter(_inexact, results), strict=True)
    return list(pull([ct.astype(y.dtype) for ct, y in pairs]))
