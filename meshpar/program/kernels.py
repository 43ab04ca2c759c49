"""Opaque kernels with a declared factor rule.

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
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from meshpar_kernels._choose import OUTLINE

from ..compat.jax import one_trace_context
from ..errors import LayoutSyntaxError, RankError, UnsupportedError
from ..rules.rule import Kind, OpRule
from ..rules.spmd import Factors, Send

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
      flops: of its products; None: those that are found in the function, divided by the number of parts.
      memory: bytes at most beyond its operands and results; below zero where these are not all needed at once.
      backward: bytes at most beyond operands and results of a backward pass that runs it again; None: as many as ``memory``.
    """

    flops: float | None
    memory: float
    backward: float | None = None


KernelWorks = Callable[[Sequence[jax.ShapeDtypeStruct], Parts], KernelWork]
"""(local operands, number of parts of every factor) → what the local function computes and holds."""


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
            return "need_replication" if mark == "!" else "permutation"
        return "pass_through" if any(name in dim for dims in self.outs for dim in dims) else "sum"


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
    """A function on whole arrays, its rule, and what one device does.

    Attributes:
      memo: what was found out about it, or made of it; it lives as long as the kernel.
    """

    fn: Callable[..., Any]
    notation: Notation
    local: Local | None
    sends: KernelSends | None
    name: str
    permutation_partial: bool = False
    works: KernelWorks | None = None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def remembered(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, made once for this kernel and this key."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    @property
    def jitted(self) -> Any:
        """The function on whole arrays under one ``jax.jit``, which keeps what was traced and compiled for their shapes."""
        return self.remembered("jitted", lambda: jax.jit(self.fn))

    def shapes(self, *xs: Any) -> Any:
        """The results for operands like these, as ``ShapeDtypeStruct``."""
        with OUTLINE(True), one_trace_context():
            return self.jitted.eval_shape(*xs)

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
                    fixes=[f"name {len(shape)} dims in the rule, `_` for one without a name"],
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
        r = OpRule(
            [],
            [],
            list(sizes.values()),
            [self.notation.kind(f) for f in sizes],
            permutation_partial=self.permutation_partial,
        )

        def dims(array: Dims, shape: Sequence[int]) -> tuple[Factors, ...]:
            return tuple(
                tuple(index[f] for f in factors) if factors else (r.factor(n, "need_replication"),)
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
            flops, back = (None if n is None else size * n for n in (each.flops, each.backward))
            return KernelWork(flops, size * each.memory, back)

        return Kernel(
            fn, notation, inner and local, plain and sends, self.name, self.permutation_partial, works if work else None
        )


def _flat(*xs: Any, kernel: Kernel) -> list[Any]:
    return jax.tree.leaves(kernel.fn(*xs))


def _batch(args: Sequence[Any], where: Sequence[Any], *, kernel: Kernel) -> tuple[list[Any], list[int]]:
    out = kernel_p.bind(*args, kernel=kernel.batched(where))
    return out, [0] * len(out)


kernel_p.def_impl(lambda *xs, kernel: jax.tree.leaves(kernel.jitted(*xs)))
kernel_p.def_abstract_eval(
    lambda *avals, kernel: [ShapedArray(o.shape, o.dtype) for o in jax.tree.leaves(kernel.shapes(*avals))]
)
mlir.register_lowering(kernel_p, mlir.lower_fun(_flat, multiple_results=True))
batching.primitive_batchers[kernel_p] = _batch
