"""Global values as expressions: an op, its params and its operands, each distinct expression once (hash consing).

A term represents the same array on every device. Its value may depend on mesh coordinates (``axis_index``): such a term is one
array for each coordinate along ``axes``. Two equal terms are equal arrays; two different terms may be equal arrays that the
normal form does not identify.

A dim of size 1 in the shape of a term broadcasts, as in NumPy: a term of shape [8, 1] represents the array of shape [8, n],
whatever n, that is constant along its second dim. So a block of a constant is a constant, and needs no size.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ...compat.jax import aval_of


@dataclass(eq=False, repr=False, slots=True)
class Term:
    """An expression; see the module.

    Attributes:
      op: the name of the op, or a leaf: ``input``, ``literal``, ``array``, ``axis_index``, ``carry``, ``elem``.
      params: of the op; hashable, and independent of the sizes of dims that the op only carries along.
      args: the operands.
      shape: sizes; 1 broadcasts.
      dtype: the name of the dtype.
      number: the order of creation.
      axes: the mesh axes on whose coordinates the value depends.
    """

    op: str
    params: Any
    args: tuple[Term, ...]
    shape: tuple[int, ...]
    dtype: str
    number: int
    axes: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.axes = frozenset(a for t in self.args for a in t.axes)
        if self.op == "axis_index":
            self.axes = frozenset([self.params])
        elif self.op.endswith("_block"):  # of the device's block along the axes
            self.axes |= frozenset(self.params[0])
        elif self.op == "devices":  # the values of all devices along axes, side by side
            self.axes -= frozenset(self.params[0])

    def __repr__(self) -> str:
        return f"{self.op}#{self.number}"


class Terms:
    """The terms of one proof. Methods return the one term for an expression, in normal form.

    The normal form: operands of commutative ops are sorted; copies, reshapes of reshapes and transposes of transposes are merged;
    multiplication and division by a number is a ``scale`` by an exact fraction; a matmul has no transposed operands, and an order
    of operands that does not depend on how it was written.
    """

    def __init__(self) -> None:
        self.table: dict[Hashable, Term] = {}
        self.known: set[int] = set()
        self.uses: dict[Hashable, list[Term]] = {}  # op and numbers of operands → terms, with any params
        self.equal: dict[int, Term] = {}  # number of a term → the term that it is equal to

    def make(
        self, op: str, params: Hashable, args: Iterable[Term], shape: Sequence[int], dtype: Any, sort: bool = False
    ) -> Term:
        """The term of an op; ``sort``: its operands commute."""
        args = tuple(args)
        if op == "add":  # (x + y) + z and x + (y + z) are one sum, of integers without the numbers 0
            args = tuple(t for a in args for t in (a.args if a.op == "add" and a.dtype == str(dtype) else (a,)))
            args = tuple(a for a in args if is_float(dtype) or not is_zero(a)) or args[:1]
            if len(args) == 1 and args[0].shape == tuple(shape):
                return args[0]
        if sort:
            args = tuple(sorted(args, key=lambda t: t.number))
        shape, dtype = tuple(map(int, shape)), str(dtype)
        key = op, params, tuple(a.number for a in args), shape, dtype
        found = self.table.get(key)
        if found is None:
            found = self.table[key] = Term(op, params, args, shape, dtype, len(self.table))
            self.uses.setdefault((op, *key[2]), []).append(found)
        return self.equal.get(found.number, found)

    def pointwise(
        self, op: str, params: Hashable, args: Sequence[Term], shape: Sequence[int], dtype: Any, sort: bool = False
    ) -> Term:
        """The term of an op by element. One of equal slices is the slice of one."""
        found = next((t for t in args if t.op in ("slice", "take")), None)
        if found is not None:
            d, table = found.params[0], table_of(found)
            size = found.args[0].shape[d]
            moved = [(t.op, t.params) == (found.op, found.params) and t.args[0].shape[d] == size for t in args]
            if all(m or t.shape[d] == 1 for m, t in zip(moved, args, strict=True)):
                inner = [t.args[0] if m else t for m, t in zip(moved, args, strict=True)]
                sizes = [size if k == d else n for k, n in enumerate(shape)]
                return self.take(self.pointwise(op, params, inner, sizes, dtype, sort), d, table)
        return self.make(op, params, args, shape, dtype, sort)

    def is_known(self, term: Term) -> bool:
        """Whether the function as it was written has this value: the better of several relations that all hold."""
        return term.number in self.known

    def literal(self, value: Any, dtype: Any, rank: int = 0) -> Term:
        """A number, broadcast to any shape of a rank."""
        x = np.asarray(value)
        if is_float(dtype):
            x = x.astype(np.dtype(dtype)).astype(np.float64)
        elif "int" in str(dtype):
            x = x.astype(np.dtype(dtype))
        number = x.item()
        return self.make("literal", repr(number), (), (1,) * rank, dtype)

    def array(self, value: Any) -> Term:
        """A constant array: a literal if all elements are equal."""
        x = np.asarray(value)
        if x.size and x.dtype.kind in "fiubV" and x.tobytes() == x.flat[0].tobytes() * x.size:  # 0.0 is not -0.0
            return self.literal(x.flat[0], x.dtype, x.ndim)
        return self.make("array", (x.shape, x.tobytes()), (), x.shape, x.dtype)

    def reshape(self, x: Term, shape: Sequence[int]) -> Term:
        """The elements in the same order in another shape."""
        shape = tuple(map(int, shape))
        if x.op == "reshape":
            x = x.args[0]
        if shape == x.shape:
            return x
        if x.op == "array":
            return self.array(constant(x).reshape(shape))
        if x.op == "literal" or (x.op == "iota" and math.prod(shape) in shape):
            return self.make(x.op, x.params, x.args, shape, x.dtype)
        return self.make("reshape", None, (x,), shape, x.dtype)

    def transpose(self, x: Term, order: Sequence[int]) -> Term:
        """Dim ``i`` of the result is dim ``order[i]``. One that moves only dims of size 1 is a reshape."""
        order = tuple(map(int, order))
        shape = tuple(x.shape[d] for d in order)
        if x.op == "transpose":
            return self.transpose(x.args[0], [x.params[d] for d in order])
        moved = [d for d in order if x.shape[d] != 1]
        if moved == sorted(moved):
            return self.reshape(x, shape)
        return self.make("transpose", order, (x,), shape, x.dtype)

    def take(self, x: Term, dim: int, table: np.ndarray) -> Term:
        """The elements of a table along a dim. One that is an arithmetic progression is a ``slice``; the others are ``take``."""
        table = table.astype(np.int64)
        if x.op in ("slice", "take") and x.params[0] == dim:
            x, table = x.args[0], table_of(x)[table]
        if x.op in ("slice", "take") and x.params[0] > dim:  # those of smaller dims first
            return self.take(self.take(x.args[0], dim, table), x.params[0], table_of(x))
        if x.op == "transpose":
            return self.transpose(self.take(x.args[0], x.params[dim], table), x.params)
        if x.op == "reshape":  # of another dim
            (inner,), before = x.args, math.prod(x.shape[:dim])
            for k, m in enumerate(inner.shape):
                if m == x.shape[dim] != 1 and math.prod(inner.shape[:k]) == before:
                    shape = (*x.shape[:dim], len(table), *x.shape[dim + 1 :])
                    return self.reshape(self.take(inner, k, table), shape)
        n, steps = len(table), np.unique(np.diff(table))
        if n == x.shape[dim] and (table == np.arange(n)).all():
            return x
        shape = (*x.shape[:dim], n, *x.shape[dim + 1 :])
        if n and len(steps) < 2 and (steps > 0).all():
            return self.make("slice", (dim, int(table[0]), int(steps[0]) if n > 1 else 1), (x,), shape, x.dtype)
        return self.make("take", (dim, table.tobytes()), (x,), shape, x.dtype)

    def concatenate_slices(self, terms: Sequence[Term], dim: int) -> Term | None:
        """The elements of slices of one array along a dim, one slice after the other; None: they are of several arrays."""
        bases = {t.args[0] if t.op in ("slice", "take") and t.params[0] == dim else t for t in terms}
        if len(bases) > 1:
            return None
        (x,) = bases
        return self.take(x, dim, np.concatenate([np.arange(x.shape[dim]) if t is x else table_of(t) for t in terms]))

    def scale(self, x: Term, by: Fraction) -> Term:
        """A number times ``x``, exact in the reals."""
        if by == 1:
            return x
        if x.op == "scale" and x.params:
            return self.scale(x.args[0], x.params * by)
        number = number_of(x)
        if number is not None and is_float(x.dtype) and math.isfinite(number):
            value = Fraction(number) * by
            if abs(value) < 1 << 1023:
                sign = number if by >= 0 else -number  # also of 0.0
                return self.literal(math.copysign(float(value), sign), x.dtype, len(x.shape))
        return x if number == 0 else self.pointwise("scale", by, (x,), x.shape, x.dtype)

    def add(self, x: Term, y: Term) -> Term:
        """The sum of terms of one rank."""
        return self.pointwise("add", (), (x, y), np.broadcast_shapes(x.shape, y.shape), x.dtype, sort=True)

    def expand(self, x: Term, dim: int, size: int) -> Term:
        """``x``, constant along ``dim``, with ``size`` elements there."""
        if x.shape[dim] != 1 or size == 1:
            return x
        shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
        return self.make("expand", dim, (x,), shape, x.dtype)

    def convert(self, x: Term, dtype: Any) -> Term:
        """``x`` in another dtype."""
        dtype, number = str(dtype), number_of(x)
        if x.dtype == dtype:
            return x
        if x.op == "convert" and x.args[0].dtype == dtype and x.dtype in ("float32", "float64") and is_float(dtype):
            wide = x.dtype == "float64" or dtype != "float64"
            return (
                x.args[0] if wide else self.pointwise("convert", None, (x,), x.shape, dtype)
            )  # wider numbers and back
        if x.op == "convert" and x.args[0].dtype == dtype == "bool":  # the numbers 0 and 1, and back
            return x.args[0]
        if number is not None and (is_float(dtype) or ("int" in dtype and not is_float(x.dtype))):  # integers wrap
            return self.literal(number, dtype, len(x.shape))
        return self.pointwise("convert", None, (x,), x.shape, dtype)


def constant(term: Term) -> np.ndarray:
    """The elements of a term ``array``."""
    return np.frombuffer(term.params[1], term.dtype).reshape(term.params[0])


def table_of(term: Term) -> np.ndarray:
    """The elements that a ``slice`` or a ``take`` has of its operand along its dim."""
    if term.op == "take":
        return np.frombuffer(term.params[1], np.int64)
    d, start, step = term.params
    return start + step * np.arange(term.shape[d])


def is_float(dtype: Any) -> bool:
    """Whether a dtype, or its name, is of real floating-point numbers, also of the narrow ones that NumPy does not know."""
    return str(dtype).startswith(("float", "bfloat"))


def number_of(term: Term) -> float | int | bool | None:
    """The number of a real literal; None for other terms."""
    text, dtype = str(term.params), term.dtype
    if term.op != "literal" or not (is_float(dtype) or "int" in dtype or dtype == "bool"):
        return None
    return float(text) if is_float(dtype) else text == "True" if dtype == "bool" else int(text)


def is_zero(term: Term) -> bool:
    """Whether a term is the number 0 in all elements."""
    while term.op == "expand":
        (term,) = term.args
    return number_of(term) == 0


def frozen(value: Any) -> Any:
    """A param of an equation as a hashable value; numbers of NumPy as Python's, and equal jaxprs as equal values."""
    if isinstance(value, ClosedJaxpr) and value.jaxpr is not value:  # from jax 0.12 on one class, its own ``jaxpr``
        return frozen(value.jaxpr), frozen(value.consts)
    if isinstance(value, Jaxpr):
        numbers: dict[Any, int] = {}
        name = lambda v: frozen(v.val) if isinstance(v, Literal) else numbers.setdefault(v, len(numbers))  # noqa: E731
        typed = lambda vs: tuple((name(v), str(aval_of(v))) for v in vs)  # noqa: E731
        made = typed([*value.constvars, *value.invars])
        eqns = [(typed(e.invars), e.primitive.name, frozen(e.params), typed(e.outvars)) for e in value.eqns]
        return made, tuple(eqns), typed(value.outvars), frozen(getattr(value, "consts", ()))
    if isinstance(value, dict):
        return tuple(sorted((k, frozen(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return tuple(map(frozen, value))
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__array__"):
        x = np.asarray(value)
        return x.shape, str(x.dtype), x.tobytes()
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return value
