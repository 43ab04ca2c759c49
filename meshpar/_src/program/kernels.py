"""Opaque kernels with a declared factor rule.

A kernel (``pallas_call``, a custom call, a function with collectives of its own) is one primitive in a program. Inference, planner
and both lowerings read its rule, and every device calls the function with its shards.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from meshpar_kernels._choose import OUTLINE

from ...errors import LayoutSyntaxError, RankError, UnsupportedError
from ..compat.jax import one_trace_context, requires_devices
from ..rules.mesh_in_shard_map import Axes, Factors, Send, Shapes
from ..rules.rule import Kind, OpRule

F = TypeVar("F", bound=Callable[..., Any])

kernel_p = Primitive("kernel")
kernel_p.multiple_results = True

_NAME = re.compile(r"([A-Za-z_]\w*'*)([!~]?)\Z")
Dims = tuple[tuple[str, ...], ...]
"""For every dim of an array, the names of its factors, major to minor; ``()``: unnamed and never split."""

Local = Callable[..., Any]
"""(*shards of the operands, axes=…) → shards of the results; ``axes``: factor → the mesh axes that shard it (``()``: none)."""


class ShardCounts(dict[str, int]):
    """Factor → number of its shards.

    Attributes:
      axes: factor → the mesh axes of size > 1 that shard it.
      sizes: axis → size.
    """

    def __init__(self, axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]):
        self.axes = {f: tuple(a for a in own if sizes[a] > 1) for f, own in axes.items()}
        self.sizes = dict(sizes)
        super().__init__({f: math.prod(sizes[a] for a in own) for f, own in self.axes.items()})


KernelSends = Callable[[Sequence[jax.ShapeDtypeStruct], ShardCounts], Sequence["KernelSend"]]
"""(local operands, number of shards of every factor) → the collectives of the local function."""


@dataclass(frozen=True)
class KernelSend:
    """A collective of the local function of a kernel.

    Attributes:
      op: ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``all-to-all`` or ``collective-permute``.
      factors: it runs over the axes of these factors.
      shape, dtype: of the array that a device passes to it.
      why: its purpose, as the cause in the plan.
      times: number of runs in a call.
      axes: its mesh axes, if they are not all axes of some factors (:attr:`ShardCounts.axes`).
      route: of a permute: to the ``next`` device of a ring; ``both`` if another one runs in the other direction meanwhile; ``any
        next`` and ``any both`` if the local function takes any order of devices (:func:`hardware.topology.ring_order`);
        ``mirror``: to the device A - 1 - i.
      hidden: FLOPs of the kernel that are computed meanwhile.
      recomputed: a backward pass that recomputes the kernel makes it too; False: only results of the kernel depend on it.
      transpose: the op of its gradient in such a pass, ``""`` for none; None: the transpose of ``op``, for integers none.
    """

    op: str
    factors: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    why: str
    times: int = 1
    axes: tuple[str, ...] | None = None
    route: str = "next"
    hidden: float = 0.0
    recomputed: bool = True
    transpose: str | None = None

    def over(self, parts: ShardCounts) -> tuple[str, ...]:
        """The mesh axes that it runs over."""
        return tuple(a for f in self.factors for a in parts.axes[f]) if self.axes is None else self.axes


@dataclass(frozen=True)
class KernelWork:
    """FLOPs and temporary memory of the local function of a kernel.

    Attributes:
      flops: of its matmuls on one device; None: the FLOPs of the global function divided by the number of shards.
      memory: peak bytes in addition to operands and results; negative if these are not all live at once.
      backward: peak bytes, in addition to operands and results, of a backward pass that recomputes the kernel; None: ``memory``.
      model_flops: the FLOPs that count for the MFU (:attr:`Time.model_flops`); None: ``flops``.
    """

    flops: float | None
    memory: float
    backward: float | None = None
    model_flops: float | None = None


KernelWorks = Callable[[Sequence[jax.ShapeDtypeStruct], ShardCounts], KernelWork]
"""(local operands, number of shards of every factor) → FLOPs and memory of the local function."""


@dataclass(frozen=True)
class Notation:
    """The parsed text of a kernel rule, from :func:`parse_rule`.

    Attributes:
      text: as the user wrote it.
      ins, outs: for every operand and result, the factors of its dims.
      marks: factor → ``"!"`` (replicated), ``"~"`` (exchanged by the local function) or ``""``.
    """

    text: str
    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    marks: Mapping[str, str] = field(hash=False)

    def kind(self, name: str) -> Kind:
        """The kind of a factor in the rule of an op."""
        mark = self.marks[name]
        if mark:
            return "need_replication" if mark == "!" else "permutation"
        return "pass_through" if any(name in dim for dims in self.outs for dim in dims) else "sum"


def parse_rule(text: str) -> Notation:
    """The Notation of a kernel rule such as ``"batch heads seq!, embed mlp -> batch (heads group)"``.

    Arrays are separated by commas, operands are before the arrow, and results after it. ``dim!`` is replicated, and so is ``_``,
    which has no name; ``dim~`` may be sharded with communication by the local function, and ``(a b)`` is one dim with two factors.

    Raises:
      LayoutSyntaxError: the text is not a rule.
    """
    marks: dict[str, str] = {}
    left, arrow, right = text.partition("->")

    def bad(why: str) -> LayoutSyntaxError:
        """The error for a rule that cannot be parsed, for the reason ``why``."""
        return LayoutSyntaxError(
            f"kernel rule {text!r}: {why}",
            rule=text,
            fixes=[
                'write the dims of every operand and result: "tokens embed, embed mlp -> tokens mlp"',
                "`dim!` and `_` are replicated; `dim~` may be sharded, and the local function exchanges the parts that it "
                "needs; `(a b)` is one dim with two factors",
            ],
        )

    def dims(array: str) -> Dims:
        """The factors of every dim of one array, ``"a (b c)"`` → ``(("a",), ("b", "c"))``; records the marks in
        ``marks``."""
        out: list[tuple[str, ...]] = []
        for token in re.findall(r"\([^()]*\)|[^\s()]+|[()]", array):
            names = token[1:-1].split() if token.startswith("(") and token.endswith(")") else [token]
            factors = []
            for word in () if token in ("_", "_!") else names:
                m = _NAME.match(word)
                if m is None or m[1] == "_":
                    raise bad(f"{word!r} is not a dim")
                marks[m[1]] = marks.get(m[1]) or m[2]  # a mark in one array holds for all
                if m[2] and marks[m[1]] != m[2]:
                    raise bad(f"`{m[1]}` is marked in two ways")
                if any(m[1] in other for other in (*out, factors)):
                    raise bad(f"`{m[1]}` occurs twice in one array")
                factors.append(m[1])
            out.append(tuple(factors))
        return tuple(out)

    if not arrow or not left.strip():
        raise bad("it has no `->` with operands before it")
    ins = tuple(dims(a) for a in left.split(","))
    outs = tuple(dims(a) for a in right.split(","))
    return Notation(text, ins, outs, marks)


def cached(make: F) -> F:
    """A function of a kernel, and of hashable arguments, whose results the kernel caches."""

    @functools.wraps(make)
    def call(kernel: Kernel, *key: Any) -> Any:
        if (make, key) not in kernel.memo:
            kernel.memo[make, key] = make(kernel, *key)
        return kernel.memo[make, key]

    return call  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class Kernel:
    """An opaque function with a factor rule, which a program contains as one op; made by :func:`meshpar.kernel_rule`.

    It has a global form, ``fn``, and may have a local form: a function that computes it on the shards of one device.

    Attributes:
      fn: (*operands) → results, on global arrays or shards alike.
      notation: its rule.
      local: the local form; None: ``fn``.
      sends, works: collectives, FLOPs and memory of the local form; None: not declared.
      name: in reports.
      permutation_partial: see :class:`rules.rule.OpRule`.
      forms: other kernels of the same rule and results; a plan chooses one by the exposed seconds of its collectives.
      forward: of the backward pass of a kernel: the kernel, and its operands if they are not the first ones of the backward pass. A
        model needs twice its FLOPs, as for the backward pass of a matmul.
      options: the static keyword arguments of its call; none under ``jax.vmap`` and in derivatives.
      memo: results of functions that are :func:`cached`: gradients.
    """

    fn: Callable[..., Any]
    notation: Notation
    local: Local | None
    sends: KernelSends | None
    name: str
    permutation_partial: bool = False
    works: KernelWorks | None = None
    forms: tuple[Kernel, ...] = ()
    forward: tuple[Kernel, tuple[Any, ...] | None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def jitted(self) -> Any:
        """The function on global arrays under one ``jax.jit``, which caches its traces and executables."""
        return jax.jit(self.fn)

    def shapes(self, *xs: Any) -> Any:
        """The results for operands with these shapes and dtypes, as ``ShapeDtypeStruct``s."""
        with OUTLINE(True), one_trace_context():
            return self.jitted.eval_shape(*xs)

    def sizes(self, shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]] = ()) -> dict[str, int]:
        """factor → size, for operands and results of these shapes.

        Raises:
          RankError: an operand has another rank than in the rule.
          UnsupportedError: a factor has two sizes, or the sizes of merged factors don't follow from the shapes.
        """
        arrays = [*zip(self.notation.ins, shapes, strict=True), *zip(self.notation.outs, out_shapes, strict=False)]
        sizes: dict[str, int] = {}
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
        waiting.sort(key=lambda item: len(item[0]))  # dims of one factor first: merged dims are divided by their sizes
        for factors, n in waiting:
            unknown = [f for f in factors if f not in sizes]
            known = math.prod(sizes[f] for f in factors if f in sizes)
            if len(unknown) > 1 or (n % known if known else n):
                raise self._mismatch(factors, n, sizes)
            if unknown:
                sizes[unknown[0]] = n // known if known else n
            elif known != n:
                raise self._mismatch(factors, n, sizes)
        return sizes

    def _mismatch(self, factors: Sequence[str], n: int, sizes: Mapping[str, int]) -> UnsupportedError:
        """The error for a dim of size ``n`` that is not the product of its factors."""
        known = ", ".join(f"{f} = {sizes[f]}" for f in factors if f in sizes)
        return UnsupportedError(
            f"kernel {self.name}: a dim of size {n} is not `{' '.join(factors)}`"
            + (f" where {known}" if known else ""),
            rule=self.notation.text,
            fixes=[
                "use one name for dims of one size only, and give each merged factor a dim of its own in some operand"
            ],
        )

    def op_rule(
        self, shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]
    ) -> OpRule:
        """The factor rule for operands of these shapes."""
        sizes = self.sizes(shapes, out_shapes)
        index = {f: i for i, f in enumerate(sizes)}
        r = OpRule([], [], list(sizes.values()), [self.notation.kind(f) for f in sizes])
        r.permutation_partial = self.permutation_partial

        def dims(array: Dims, shape: Sequence[int]) -> tuple[Factors, ...]:
            return tuple(
                tuple(index[f] for f in factors) if factors else (r.factor(n, "need_replication"),)
                for factors, n in zip(array, shape, strict=True)
            )

        r.ins = [dims(d, s) for d, s in zip(self.notation.ins, shapes, strict=True)]
        r.outs = [dims(d, s) for d, s in zip(self.notation.outs, out_shapes, strict=True)]
        if (sends := self.sends) is not None:

            def listed(local: Shapes, axes: Axes, sizes: Mapping[str, int]) -> list[Send]:
                """The collectives of the kernel's local function.

                Args:
                  local: shapes of the operands on one device.
                  axes: for each factor of the op rule, the mesh axes that shard it.
                  sizes: mesh axis → size.
                """
                avals = [jax.ShapeDtypeStruct(s, d) for s, d in zip(local, dtypes, strict=True)]
                parts = ShardCounts({f: axes[i] for f, i in index.items()}, sizes)
                return [
                    Send(s.op, (), tuple(s.shape), s.dtype, s.why, s.times, s.over(parts), None, s.route, s.hidden)
                    for s in sends(avals, parts)
                ]

            r.sends = listed
            others = [form.op_rule(shapes, out_shapes, dtypes).sends for form in self.forms]
            r.forms = tuple(filter(None, others))
        return r

    def work(
        self, avals: Sequence[Any], axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]
    ) -> KernelWork | None:
        """FLOPs and memory of one device, for local operands ``avals``; None: the kernel declares no work.

        ``axes``: factor → the mesh axes that shard it; ``sizes``: mesh axis → size.
        """
        if self.works is None:
            return None
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        return self.works(structs, ShardCounts({f: tuple(axes.get(f, ())) for f in self.notation.marks}, sizes))

    def on_shards(self, *xs: Any, axes: Mapping[str, tuple[str, ...]]) -> list[Any]:
        """The results of one device for its shards."""
        out = self.fn(*xs) if self.local is None else self.local(*xs, axes=axes)
        return jax.tree.leaves(out)

    def batched(self, where: Sequence[int | None]) -> Kernel:
        """The kernel under ``jax.vmap``, with one more dim in operands at ``where`` (None: not batched) and first in results."""
        name = next(word for word in ("vmap", *(f"vmap{i}" for i in range(99))) if word not in self.notation.marks)
        ins = tuple(
            dims if d is None else (*dims[:d], (name,), *dims[d:])
            for dims, d in zip(self.notation.ins, where, strict=True)
        )
        outs = tuple(((name,), *dims) for dims in self.notation.outs)
        notation = Notation(f"{self.notation.text} (vmap)", ins, outs, {**self.notation.marks, name: ""})
        over = functools.partial(jax.vmap, in_axes=tuple(where))

        def local(*xs: Any, axes: Mapping[str, tuple[str, ...]]) -> Any:
            inner: Any = self.local
            return over(functools.partial(inner, axes=axes))(*xs)

        def of_each(declared: Any, avals: Sequence[jax.ShapeDtypeStruct], parts: ShardCounts) -> tuple[int, Any]:
            """(size of the batch dim, the result of ``declared`` for the operands without it)."""
            pairs = list(zip(avals, where, strict=True))
            one = [
                a if d is None else jax.ShapeDtypeStruct((*a.shape[:d], *a.shape[d + 1 :]), a.dtype) for a, d in pairs
            ]
            return next(a.shape[d] for a, d in pairs if d is not None), declared(one, parts)

        def sends(avals: Sequence[jax.ShapeDtypeStruct], parts: ShardCounts) -> list[KernelSend]:
            size, each = of_each(self.sends, avals, parts)
            return [replace(s, shape=(size, *s.shape), hidden=size * s.hidden) for s in each]

        def works(avals: Sequence[Any], parts: ShardCounts) -> KernelWork:
            """FLOPs and memory of the batched kernel: of one element, times the number of local elements."""
            size, each = of_each(self.works, avals, parts)
            scaled: Any = (n if n is None else size * n for n in astuple(each))
            return KernelWork(*scaled)

        fn, forms = over(lambda *xs: jax.tree.leaves(self.fn(*xs))), tuple(form.batched(where) for form in self.forms)
        own: Any = {"local": self.local and local, "sends": self.sends and sends, "works": self.works and works}
        return replace(self, fn=fn, notation=notation, **own, forms=forms, forward=None, options={}, memo={})


def _batch(args: Sequence[Any], where: Sequence[Any], *, kernel: Kernel) -> tuple[list[Any], list[int]]:
    out = kernel_p.bind(*args, kernel=kernel.batched(where))
    return out, [0] * len(out)


kernel_p.def_impl(lambda *xs, kernel: jax.tree.leaves(kernel.jitted(*xs)))
kernel_p.def_abstract_eval(
    lambda *avals, kernel: [ShapedArray(o.shape, o.dtype) for o in jax.tree.leaves(kernel.shapes(*avals))]
)
mlir.register_lowering(
    kernel_p, mlir.lower_fun(lambda *xs, kernel: jax.tree.leaves(kernel.fn(*xs)), multiple_results=True)
)
requires_devices(kernel_p)
batching.primitive_batchers[kernel_p] = _batch
