"""Opaque kernels with a declared factor rule: ``mp.kernel_rule``.

A kernel (``pallas_call``, a custom call, a function that talks to other devices itself) is one primitive here: inference,
plan and both lowerings read its rule, and every device calls the function with its shards.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ..errors import LayoutSyntaxError, RankError, UnsupportedError
from .rules.rule import Factors, Kind, OpRule, Send, rule

kernel_p = Primitive("kernel")
kernel_p.multiple_results = True

_NAME = re.compile(r"([A-Za-z_]\w*'*)([!~]?)\Z")
Dims = tuple[tuple[str, ...], ...]
"""For every dim of an array, the factors that it is made of, major to minor."""

Local = Callable[..., Any]
"""(*shards, axes=…) → shards; ``axes`` maps every factor to the mesh axes that split it (``()``: none)."""


class Parts(dict[str, int]):
    """Factor → number of parts it is split into.

    Attributes:
      axes: factor → the mesh axes that split it.
      sizes: axis → size.
    """

    def __init__(self, axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]):
        self.axes = {f: tuple(a for a in got if sizes[a] > 1) for f, got in axes.items()}
        self.sizes = dict(sizes)
        super().__init__({f: math.prod(sizes[a] for a in got) for f, got in self.axes.items()})


KernelSends = Callable[[Sequence[jax.ShapeDtypeStruct], Parts], Sequence["KernelSend"]]
"""(local operands, number of parts of every factor) → what the local function sends."""


@dataclass(frozen=True)
class KernelSend:
    """One collective that the local function of a kernel makes.

    Attributes:
      op: ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``all-to-all`` or ``collective-permute``.
      factors: over the axes of which factors it runs.
      shape, dtype: of the array that a device passes in.
      why: what it is for; stands in the plan.
      times: how often it is made.
      axes: the mesh axes, where they are not those of whole factors (`Parts.axes` has them).
    """

    op: str
    factors: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    why: str
    times: int = 1
    axes: tuple[str, ...] | None = None

    def over(self, parts: Parts) -> tuple[str, ...]:
        """The mesh axes it runs over."""
        return tuple(a for f in self.factors for a in parts.axes[f]) if self.axes is None else self.axes


@dataclass(frozen=True)
class KernelWork:
    """What the local function of a kernel computes and holds.

    Attributes:
      flops: of its products.
      memory: bytes at most beyond its operands and results.
    """

    flops: float
    memory: float


KernelWorks = Callable[[Sequence[jax.ShapeDtypeStruct], Parts], KernelWork]
"""(local operands, number of parts of every factor) → what the local function computes and holds."""

_TRANSPOSED = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}


@dataclass(frozen=True)
class Notation:
    """A parsed rule: the factors of every dim of operands and results, and what happens to each factor."""

    text: str
    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    marks: Mapping[str, str] = field(hash=False)

    def kind(self, name: str) -> Kind:
        mark = self.marks[name]
        if mark:
            return "whole" if mark == "!" else "own"
        return "map" if any(name in dim for dims in self.outs for dim in dims) else "sum"


def parse_rule(text: str) -> Notation:
    """``"batch heads seq!, embed mlp -> batch (heads group)"`` → the factors of every dim.

    Raises:
      LayoutSyntaxError: text that is no rule.
    """
    marks: dict[str, str] = {}
    left, arrow, right = text.partition("->")

    def bad(why: str) -> LayoutSyntaxError:
        return LayoutSyntaxError(
            f"kernel rule {text!r}: {why}",
            rule=text,
            fixes=[
                'write the dims of every operand and result: "tokens embed, embed mlp -> tokens mlp"',
                "`dim!` is needed whole by every device; `dim~` may be split, and the local function exchanges it; "
                "`(a b)` is one dim made of two factors",
            ],
        )

    def dims(array: str) -> Dims:
        out: list[tuple[str, ...]] = []
        for token in re.findall(r"\([^()]*\)|[^\s()]+|[()]", array):
            names = token[1:-1].split() if token.startswith("(") and token.endswith(")") else [token]
            mine = []
            for word in names:
                m = _NAME.match(word)
                if m is None:
                    raise bad(f"{word!r} is not a dim")
                if marks.setdefault(m[1], m[2]) != m[2]:
                    if m[2] and marks[m[1]]:
                        raise bad(f"`{m[1]}` is marked in two ways")
                    marks[m[1]] = marks[m[1]] or m[2]  # one mark speaks for all
                if any(m[1] in other for other in (*out, mine)):
                    raise bad(f"`{m[1]}` stands twice in one array")
                mine.append(m[1])
            out.append(tuple(mine))
        return tuple(out)

    if not arrow or not left.strip():
        raise bad("it has no `->` with operands before it")
    ins = tuple(dims(a) for a in left.split(","))
    outs = tuple(dims(a) for a in right.split(","))
    return Notation(text, ins, outs, marks)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A function on whole arrays, its rule, and what one device does."""

    fn: Callable[..., Any]
    notation: Notation
    local: Local | None
    sends: KernelSends | None
    name: str
    own_partial: bool = False
    works: KernelWorks | None = None
    _backward: dict[Any, Kernel] = field(default_factory=dict, repr=False)

    def sizes(self, shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]] = ()) -> dict[str, int]:
        """The size of every factor.

        Raises:
          RankError: an operand whose rank is not that of the rule.
          UnsupportedError: sizes that contradict each other, or of merged factors that cannot be told.
        """
        arrays = [*zip(self.notation.ins, shapes, strict=True), *zip(self.notation.outs, out_shapes, strict=False)]
        found: dict[str, int] = {}
        waiting: list[tuple[tuple[str, ...], int]] = []
        for dims, shape in arrays:
            if len(dims) != len(shape):
                raise RankError(
                    f"kernel {self.name}: the rule {self.notation.text!r} gives {len(dims)} dims to an array of rank {len(shape)}",
                    shape=shape,
                    rule=self.notation.text,
                )
            waiting += [(factors, n) for factors, n in zip(dims, shape, strict=True) if factors]
        waiting.sort(key=lambda item: len(item[0]))
        for factors, n in waiting:
            unknown = [f for f in factors if f not in found]
            known = math.prod(found[f] for f in factors if f in found)
            if len(unknown) > 1 or (n % known if known else n):
                raise self._mismatch(factors, n, found)
            if unknown:
                found[unknown[0]] = n // known if known else n
            elif known != n:
                raise self._mismatch(factors, n, found)
        return found

    def _mismatch(self, factors: Sequence[str], n: int, found: Mapping[str, int]) -> UnsupportedError:
        known = ", ".join(f"{f} = {found[f]}" for f in factors if f in found)
        return UnsupportedError(
            f"kernel {self.name}: a dim of size {n} is not `{' '.join(factors)}`"
            + (f" where {known}" if known else ""),
            rule=self.notation.text,
            fixes=["name each size once, and give factors that are merged a dim of their own in some operand"],
        )

    def op_rule(
        self, shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]
    ) -> OpRule:
        """The factor rule for operands of these shapes."""
        sizes = self.sizes(shapes, out_shapes)
        index = {f: i for i, f in enumerate(sizes)}
        r = OpRule([], [], list(sizes.values()), [self.notation.kind(f) for f in sizes], own_partial=self.own_partial)

        def dims(array: Dims, shape: Sequence[int]) -> tuple[Factors, ...]:
            return tuple(
                tuple(index[f] for f in factors) if factors else (r.factor(n, "whole"),)
                for factors, n in zip(array, shape, strict=True)
            )

        r.ins = [dims(d, s) for d, s in zip(self.notation.ins, shapes, strict=True)]
        r.outs = [dims(d, s) for d, s in zip(self.notation.outs, out_shapes, strict=True)]
        if (sends := self.sends) is not None:

            def listed(
                local: Sequence[tuple[int, ...]], axes: Sequence[tuple[str, ...]], sizes: Mapping[str, int]
            ) -> list[tuple[Send, tuple[str, ...]]]:
                avals = [jax.ShapeDtypeStruct(s, d) for s, d in zip(local, dtypes, strict=True)]
                parts = Parts({f: axes[i] for f, i in index.items()}, sizes)
                return [
                    (Send(s.op, (), tuple(s.shape), s.dtype, s.why, s.times), s.over(parts))
                    for s in sends(avals, parts)
                ]

            r.sends_over = listed
        return r

    def work(
        self, avals: Sequence[Any], axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]
    ) -> KernelWork | None:
        """What one device computes and holds, where the kernel says so; ``avals`` are its operands, local ones."""
        if self.works is None:
            return None
        names = dict.fromkeys(self.notation.marks)
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        return self.works(structs, Parts({f: tuple(axes.get(f, ())) for f in names}, sizes))

    def on_shards(self, *xs: Any, axes: Mapping[str, tuple[str, ...]]) -> list[Any]:
        """What one device does."""
        out = self.fn(*xs) if self.local is None else self.local(*xs, axes=axes)
        return jax.tree.leaves(out)

    # -- the other direction

    def backward(self, floats: Sequence[bool], float_outs: Sequence[bool]) -> Kernel:
        """From operands and floating cotangents to the cotangents of the floating operands; the kernel is run again.

        A cotangent of what several devices computed alike is shared out among them; what each finds for an operand that
        lies whole along axes over which the kernel exchanges is a partial sum over these.
        """
        key = tuple(floats), tuple(float_outs)
        if key not in self._backward:
            self._backward[key] = self._make_backward(*key)
        return self._backward[key]

    def _make_backward(self, floats: tuple[bool, ...], float_outs: tuple[bool, ...]) -> Kernel:
        notation, n = self.notation, len(self.notation.ins)
        cotangents = tuple(dims for dims, f in zip(notation.outs, float_outs, strict=True) if f)
        own = [f for f in notation.marks if notation.kind(f) == "own"]

        def local(*args: Any, axes: Mapping[str, tuple[str, ...]]) -> list[Any]:
            cts = list(args[n:])
            for k, dims in enumerate(cotangents):
                mine = {a for dim in dims for f in dim for a in axes[f]}
                alike = tuple({a: None for f in own for a in axes[f] if a not in mine})
                if alike:
                    cts[k] = cts[k] / jax.lax.axis_size(alike)
            run = self.fn if self.local is None else functools.partial(self.local, axes=axes)
            return _vjp(run, args[:n], cts)

        def sends(avals: Sequence[jax.ShapeDtypeStruct], parts: Parts) -> list[KernelSend]:
            assert self.sends is not None
            forward = list(self.sends(avals[:n], parts))
            return [*forward, *(_transposed(s, parts) for s in forward)]

        return Kernel(
            lambda *args: _vjp(self.fn, args[:n], args[n:]),
            Notation(
                f"{notation.text} (backward)",
                (*notation.ins, *cotangents),
                tuple(dims for dims, f in zip(notation.ins, floats, strict=True) if f),
                notation.marks,
            ),
            local, None if self.sends is None else sends, f"{self.name} backward", own_partial=True,
        )  # fmt: skip

    def batched(self, where: Sequence[int | None]) -> Kernel:
        """The kernel with one more dim, first in the results."""
        name = next(f"{word}" for word in ("vmap", *(f"vmap{i}" for i in range(99))) if word not in self.notation.marks)
        ins = tuple(
            dims if d is None else (*dims[:d], (name,), *dims[d:])
            for dims, d in zip(self.notation.ins, where, strict=True)
        )
        outs = tuple(((name,), *dims) for dims in self.notation.outs)
        notation = Notation(f"{self.notation.text} (vmap)", ins, outs, {**self.notation.marks, name: ""})
        fn = jax.vmap(lambda *xs: jax.tree.leaves(self.fn(*xs)), in_axes=tuple(where))
        inner, plain = self.local, self.sends

        def local(*xs: Any, axes: Mapping[str, tuple[str, ...]]) -> Any:
            assert inner is not None
            return jax.vmap(functools.partial(inner, axes=axes), in_axes=tuple(where))(*xs)

        def alone(avals: Sequence[jax.ShapeDtypeStruct]) -> tuple[int, list[jax.ShapeDtypeStruct]]:
            """(size of the new dim, the operands without it)."""
            one = [
                a if d is None else jax.ShapeDtypeStruct((*a.shape[:d], *a.shape[d + 1 :]), a.dtype)
                for a, d in zip(avals, where, strict=True)
            ]
            return next(a.shape[d] for a, d in zip(avals, where, strict=True) if d is not None), one

        def sends(avals: Sequence[jax.ShapeDtypeStruct], parts: Parts) -> list[KernelSend]:
            assert plain is not None
            size, one = alone(avals)
            return [replace(s, shape=(size, *s.shape)) for s in plain(one, parts)]

        work = self.works

        def works(avals: Sequence[Any], parts: Parts) -> KernelWork:
            assert work is not None
            size, one = alone(avals)
            each = work(one, parts)
            return KernelWork(size * each.flops, size * each.memory)

        return Kernel(
            fn, notation, inner and local, plain and sends, self.name, self.own_partial, works if work else None
        )


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
    kept = [i for i, x in enumerate(xs) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def of(*some: Any) -> list[Any]:
        args = list(xs)
        for i, x in zip(kept, some, strict=True):
            args[i] = x
        return [y for y in jax.tree.leaves(fn(*args)) if jnp.issubdtype(y.dtype, jnp.inexact)]

    out, back = jax.vjp(of, *[xs[i] for i in kept])
    floats = [ct for ct in cts if jnp.issubdtype(ct.dtype, jnp.inexact)]
    return list(back([ct.astype(y.dtype) for ct, y in zip(floats, out, strict=True)]))


@rule("kernel")
def _kernel_rule(eqn, ins, outs) -> OpRule:
    return eqn.params["kernel"].op_rule(ins, outs, [v.aval.dtype for v in eqn.invars])


def _flat(*xs: Any, kernel: Kernel) -> list[Any]:
    return jax.tree.leaves(kernel.fn(*xs))


def _batch(args: Sequence[Any], where: Sequence[Any], *, kernel: Kernel) -> tuple[list[Any], list[int]]:
    out = kernel_p.bind(*args, kernel=kernel.batched(where))
    return out, [0] * len(out)


kernel_p.def_impl(lambda *xs, kernel: jax.jit(functools.partial(_flat, kernel=kernel))(*xs))
kernel_p.def_abstract_eval(
    lambda *avals, kernel: [
        ShapedArray(o.shape, o.dtype) for o in jax.eval_shape(functools.partial(_flat, kernel=kernel), *avals)
    ]
)
mlir.register_lowering(kernel_p, mlir.lower_fun(_flat, multiple_results=True))
batching.primitive_batchers[kernel_p] = _batch


def kernel_rule(
    text: str,
    *,
    local: Local | None = None,
    sends: KernelSends | None = None,
    works: KernelWorks | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how a kernel may be split: ``@mp.kernel_rule("tokens embed, embed mlp -> tokens mlp")``.

    The function is called with the shards of its operands, on every device, under both lowerings. Without a mesh it is called
    as it is. Its names are its own: which dims of the program they are follows from the operands.

    Args:
      text: the dims of every operand and result, a comma between arrays (``""`` between commas: a scalar). A name that no
        result has is contracted: split, it leaves partial sums. ``seq!``: every device needs all of it. ``tokens~``: it may be
        split, and ``local`` exchanges what it needs. ``(kv_heads group)``: one dim made of two factors, of which
        ``kv_heads``, the major one, may be split.
      local: ``(*shards, axes={name: mesh axes that split it}) → shards of the results``, called under ``shard_map``;
        needed where a name is marked ``~``. Default: the function itself.
      sends: ``(local operands as ShapeDtypeStruct, {name: parts}) → [KernelSend, …]``: what ``local`` sends, for the plan;
        needed with ``~``.
      works: ``(local operands as ShapeDtypeStruct, {name: parts}) → KernelWork``: the FLOPs of ``local`` and what it holds beyond
        its operands and results, for the plan's time and memory. Default: the products that are found in the function, divided
        by the number of parts, and nothing.

    Returns:
      A decorator for a function of arrays (and static keyword arguments, which ``local``, ``sends`` and ``works`` get too) to
      an array or a tuple of arrays. It is differentiable in reverse mode if the function (or ``local``) is: the backward
      pass calls it again.

    Raises:
      LayoutSyntaxError: text that is no rule, or ``~`` without ``local`` and ``sends``.
      RankError, UnsupportedError: (when called) operands that the rule does not fit.
    """
    notation = parse_rule(text)
    own = [f for f, mark in notation.marks.items() if mark == "~"]
    if own and (local is None or sends is None):
        raise LayoutSyntaxError(
            f"kernel rule {text!r}: `{own[0]}~` needs `local=` and `sends=`",
            rule=text,
            fixes=[f"write `{own[0]}!` if every device needs all of it, or pass what one device does and sends"],
        )

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(fn, "__name__", "kernel")

        @functools.cache
        def made(static: tuple[tuple[str, Any], ...]) -> Kernel:
            options = dict(static)
            if not options:
                return Kernel(fn, notation, local, sends, name, works=works)
            return Kernel(
                functools.partial(fn, **options), notation, local and functools.partial(local, **options),
                sends and functools.partial(sends, **options), name, works=works and functools.partial(works, **options),
            )  # fmt: skip

        @functools.wraps(fn)
        def call(*args: Any, **static: Any) -> Any:
            kernel = made(tuple(sorted(static.items())))
            args = tuple(jnp.asarray(x) for x in args)
            if len(args) != len(notation.ins):
                raise RankError(
                    f"kernel {name}: {len(args)} operands, but the rule {text!r} has {len(notation.ins)}", rule=text
                )
            kernel.sizes([x.shape for x in args])
            shapes = jax.eval_shape(kernel.fn, *args)
            leaves, tree = jax.tree.flatten(shapes)
            if len(leaves) != len(notation.outs):
                raise RankError(
                    f"kernel {name}: {len(leaves)} results, but the rule {text!r} has {len(notation.outs)}", rule=text
                )
            kernel.sizes([x.shape for x in args], [y.shape for y in leaves])
            return jax.tree.unflatten(tree, _differentiable(kernel)(*args))

        return call

    return decorate


@functools.cache
def _differentiable(kernel: Kernel) -> Callable[..., Any]:
    @jax.custom_vjp
    def run(*xs: Any) -> list[Any]:
        return kernel_p.bind(*xs, kernel=kernel)

    def backward(xs: tuple[Any, ...], cts: Sequence[Any]) -> tuple[Any, ...]:
        floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in xs]
        float_outs = [ct.dtype != jax.dtypes.float0 for ct in cts]
        kept = [ct for ct, f in zip(cts, float_outs, strict=True) if f]
        grads = iter(_differentiable(kernel.backward(floats, float_outs))(*xs, *kept))
        return tuple(
            next(grads) if f else np.zeros(x.shape, jax.dtypes.float0) for x, f in zip(xs, floats, strict=True)
        )

    run.defvjp(lambda *xs: (run(*xs), xs), backward)
    return run
