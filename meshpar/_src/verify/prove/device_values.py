"""Values that depend on the coordinates of the device: offsets, masks, and their relation to global values.

A term that depends on coordinates through a few integer ops is evaluated, for all coordinates and all values of its one index, and
compared with the law that a lemma needs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .relation import Context, Rel, Unverified, require
from .term import Term, constant, is_zero, number_of

MAX_VALUES = 1 << 25
"""Evaluated elements; a larger table is not verified."""
INTEGERS = frozenset("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64".split())


def _div(x: Any, y: Any) -> Any:
    require(bool(np.all(y != 0)), "a quotient by 0")
    q = x // y
    return q + ((q * y != x) & ((x < 0) != (y < 0)))  # towards 0


POINTWISE: dict[str, Callable[..., Any]] = {
    "add": lambda *xs: functools.reduce(np.add, xs), "sub": np.subtract, "mul": np.multiply, "max": np.maximum,
    "min": np.minimum, "div": _div, "rem": lambda x, y: x - _div(x, y) * y, "sign": np.sign, "convert": lambda x: x,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "not": np.logical_not,
    "clamp": lambda lo, x, hi: np.minimum(np.maximum(x, lo), hi),
    "select_n": lambda c, *xs: np.where(c, xs[1], xs[0]),
}  # fmt: skip
"""Ops of integers and booleans that are evaluated."""


def function_of(term: Term) -> Callable[..., Any] | None:
    """How the value of an integer or boolean term follows from those of its operands, by element; None: it is a leaf."""
    if not all(t.dtype in INTEGERS for t in (term, *term.args)):
        return None
    if term.op == "scale":
        by = term.params
        return (lambda x: x * np.asarray(int(by)).astype(x.dtype)) if by.denominator == 1 else None
    if term.op == "reshape":
        same = [n for n in term.shape if n != 1] == [n for n in term.args[0].shape if n != 1]
        return (lambda x: x) if same else None
    other = term.dtype != "bool" if term.op == "not" else term.op == "select_n" and len(term.args) != 3
    return None if other else POINTWISE.get(term.op)


def subterms(*terms: Term) -> Iterator[Term]:
    """The terms that terms are evaluated from, leaves included, each once."""
    seen: set[int] = set()
    stack = list(terms)
    while stack:
        t = stack.pop()
        if t.number not in seen:
            seen.add(t.number)
            yield t
            if function_of(t) is not None:
                stack.extend(t.args)


def leaves(*terms: Term) -> list[Term]:
    """The values that terms are evaluated from, except numbers and coordinates."""
    known = "literal", "axis_index", "entry_block"
    return [t for t in subterms(*terms) if t.op not in known and function_of(t) is None]


def evaluate(
    ctx: Context, axes: Sequence[str], terms: Sequence[Term], leaf: Term | None = None, values: Any = (0,)
) -> list[np.ndarray]:
    """The values of terms, by element: rows for the devices along axes, the first of them major, columns for values of their leaf.

    Raises:
      Unverified: they depend on more, or have too many values.
    """
    shape = ctx.size(axes), len(values)
    require(math.prod(shape) <= MAX_VALUES, "an index with too many values")
    done = {} if leaf is None else {leaf.number: np.asarray(values).astype(leaf.dtype)[None]}

    def value(t: Term) -> np.ndarray:
        if t.number not in done:
            number, function = number_of(t), function_of(t)
            if t.op in ("axis_index", "entry_block"):
                require(t.axes <= set(axes), "an index that depends on the device along another axis")
                found = ctx.index((t.params,) if t.op == "axis_index" else t.params[0], axes)[:, None]
                found = constant(t.args[0])[found] if t.args else found
            elif number is not None:
                found = np.asarray([[number]])
            elif function is None:
                raise Unverified("an index that depends on data and on the device")
            else:
                found = function(*map(value, t.args))
            done[t.number] = np.asarray(found).astype(t.dtype)
        return done[t.number]

    return [np.broadcast_to(value(t), shape) for t in terms]


def axes_of(ctx: Context, term: Term) -> tuple[str, ...]:
    """The axes on whose coordinates a term depends, in the order of the mesh."""
    return tuple(a for a in ctx.sizes if a in term.axes)


def orders(axes: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Some of the axes, in any order."""
    axes = tuple(axes)
    return itertools.chain.from_iterable(itertools.permutations(axes, k) for k in range(len(axes) + 1))


def order_of(ctx: Context, axes: Sequence[str], offsets: np.ndarray, step: int) -> tuple[tuple[str, ...], int] | None:
    """(some of the axes, base) so that the offset of each device is ``base`` plus ``step`` times its index along the axes; None if
    there are none."""
    base = int(offsets.min())
    for order in orders(axes):
        if (offsets == base + step * ctx.index(order, axes)).all():
            return order, base
    return None


def resolved(ctx: Context, rel: Rel, operands: Sequence[Rel]) -> Rel:
    """The relation of an elementwise result to a value that does not depend on coordinates, or a simpler one by a law."""
    for law in (global_iota, masked, index_in_range, folded):
        try:
            found = law(ctx, rel, operands) if rel.term.axes or law in (index_in_range, folded) else None
        except Unverified:
            continue
        if found is not None:
            return found
    return rel


def global_iota(ctx: Context, rel: Rel, _: Sequence[Rel]) -> Rel | None:
    """iota(n) + n k, on the device k, is its block of iota(n K); one element is, if the function as written has this iota."""
    one, found = rel.shape == (1,), leaves(rel.term)
    dims = [0] if one else [d for d, n in enumerate(rel.term.shape) if n != 1]
    if len(dims) != 1 or [t.op for t in found] != ["iota"] * (not one) or rel.spec[dims[0]] or rel.term.dtype == "bool":
        return None
    (d,), n, axes = dims, rel.shape[dims[0]], axes_of(ctx, rel.term)
    (values,) = evaluate(ctx, axes, [rel.term], *found, values=np.arange(n))
    order, base = order_of(ctx, axes, values[:, 0], n) or ((), -1)
    if base or not (values == values[:, :1] + np.arange(n)).all():
        return None
    shape = tuple(n * ctx.size(order) if k == d else 1 for k in range(len(rel.shape)))
    term = ctx.terms.make("iota", None, (), shape, rel.term.dtype)
    if one and not ctx.terms.is_known(term):
        return None
    return replace(rel, term=term, spec=tuple(order if k == d else () for k in range(len(shape))))


def index_in_range(ctx: Context, rel: Rel, operands: Sequence[Rel]) -> Rel | None:
    """where(i < 0, i + n, i) = i, of an index i of an extremum of n elements."""
    if rel.term.op != "select_n" or rel.term.dtype not in INTEGERS or len(operands) != 3:
        return None
    own, (at, *more) = operands[1], leaves(rel.term) or [rel.term]
    if more or rel.term.axes - at.axes or leaves(own.term) != [at] or at.op not in ("arg_block", "argmax", "argmin"):
        return None
    n = at.params[1] if at.op == "arg_block" else at.args[0].shape[at.params[0]]
    found, index = evaluate(ctx, (), [rel.term, own.term], at, np.arange(n))
    return own if (found == index).all() and rel.term.shape == own.term.shape else None


def folded(ctx: Context, rel: Rel, _: Sequence[Rel]) -> Rel | None:
    """An op of integers that are constant arrays is a constant array."""
    function, args = function_of(rel.term), rel.term.args
    constants = [constant(t) if t.op == "array" else number_of(t) for t in args]
    if function is None or all(t.op != "array" for t in args) or any(c is None for c in constants):
        return None
    found = np.asarray(function(*(np.asarray(c, t.dtype) for c, t in zip(constants, args, strict=True))))
    return replace(rel, term=ctx.terms.array(np.broadcast_to(found, rel.term.shape).astype(rel.term.dtype)))


def masked(ctx: Context, rel: Rel, operands: Sequence[Rel]) -> Rel | None:
    """Where exactly one device of a group has x, and the others 0, the sum over the group is x. So each row of a sharded table is
    on one device, which reads it; the others add 0."""
    if rel.term.op != "select_n" or len(operands) != 3:
        return None
    condition, *cases = operands
    mask = condition.term
    for x, zero, wanted in ((cases[1], cases[0], True), (cases[0], cases[1], False)):
        term, partial = x.term, rel.partial | mask.axes
        extremum = rel.partial and rel.kind != "sum"
        if not mask.axes or extremum or not is_zero(zero.term) or rel.partial & mask.axes:
            continue
        kind = "one" if zero.term.params == "-0.0" and not rel.partial else "sum"
        element = element_of_block(ctx, mask, x) if wanted else None
        if element is not None:
            return Rel(element.term, rel.shape, element.spec, partial, kind)
        if x.sharded & mask.axes:
            continue
        if not mask.axes & term.axes and all(n == 1 for n in mask.shape) and not leaves(mask):
            (chosen,) = evaluate(ctx, axes_of(ctx, mask), [mask])
            if (chosen == wanted).sum() == 1:
                return Rel(term, rel.shape, x.spec, partial, kind)
        elif wanted and term.op == "gather_block":
            rows = gathered(ctx, mask, term)
            if rows is not None:
                return Rel(rows, rel.shape, rel.spec, partial, kind)
    return None


@dataclass(frozen=True, slots=True)
class Rows:
    """How devices access rows of an array of which each has a block of ``n``, along axes.

    Attributes:
      local: the index in the block.
      mask: where a device gathers; None: a scatter, which drops indices out of range.
    """

    axes: tuple[str, ...]
    n: int
    local: Term
    mask: Term | None = None


def constant_rows(index: Term, numbers: Any, rank: int) -> np.ndarray | None:
    """The rows along one dim that a gather at a constant index reads; None: it is another gather."""
    if index.op != "array" or len(index.shape) != 2 or len(numbers.start_index_map) != 1:
        return None
    (d,), others = numbers.start_index_map, tuple(k for k in range(rank) if k not in numbers.start_index_map)
    rows = (numbers.collapsed_slice_dims, numbers.offset_dims, numbers.operand_batching_dims) == ((d,), others, ())
    return constant(index).astype(np.int64).ravel() if rows else None


def gathered(ctx: Context, mask: Term, block: Term) -> Term | None:
    """The rows of a sharded table, where each device masks those that it reads of its block."""
    (axes, n, params, batch), (table, local) = block.params, block.args
    shape = tuple(m for k, m in enumerate(mask.shape) if k in batch)
    if mask.axes != set(axes) or shape != local.shape[:-1] or math.prod(shape) != math.prod(mask.shape):
        return None

    def made(index: Term, _: str) -> Term:
        numbers = dict(params)["numbers"]
        at = constant_rows(index, numbers, len(table.shape))
        if at is not None and ((at >= 0) & (at < table.shape[numbers.start_index_map[0]])).all():
            return ctx.terms.take(table, numbers.start_index_map[0], at)
        return ctx.terms.make("gather", params, (table, index), block.shape, block.dtype)

    return owned(ctx, Rows(axes, n, local, mask), [str(dict(params)["mode"])], made)


def element_of_block(ctx: Context, mask: Term, x: Rel) -> Rel | None:
    """x[i] along a sharded dim, of which each device masks the one element of its block that it has or reads."""
    term, spec = x.term, x.spec
    if term.op == "slice_block":
        (axes, n, d), (table, local) = term.params, term.args
    else:
        found = [d for d, s in enumerate(spec) if mask.axes.intersection(s)]
        if len(found) != 1 or x.fragmented or x.shape[found[0]] != 1:
            return None
        (d,), n, table = found, 1, term
        axes, local = spec[d], ctx.terms.literal(0, "int32")
    if mask.axes != set(axes) or math.prod(mask.shape) != 1:
        return None

    def put(x: Term, index: Term) -> Term:
        """The slice of one dim before the slices of later ones."""
        sizes = [1 if k == d else m for k, m in enumerate(x.shape)]
        if x.op == "dynamic_slice" and x.params > d:
            return ctx.terms.make(x.op, x.params, (put(x.args[0], index), x.args[1]), sizes, x.dtype)
        return ctx.terms.make("dynamic_slice", d, (x, index), sizes, x.dtype)

    def made(index: Term, _: str) -> Term:
        return put(table, index)

    row = owned(ctx, Rows(axes, n, local, ctx.terms.reshape(mask, ())), ["CLIP"], made)
    return None if row is None else Rel(row, x.shape, tuple(() if k == d else s for k, s in enumerate(spec)))


def owned(ctx: Context, rows: Rows, modes: Sequence[str], made: Callable[[Term, str], Term]) -> Term | None:
    """The value ``made(index, mode)`` of the function as written, for an index among the terms within a local one, of which each
    row is accessed by the one device that has it.

    Args:
      modes: of the gather or scatter as written, for an index out of range.
    """
    shape = rows.local.shape
    for t in subterms(rows.local, *([] if rows.mask is None else [rows.mask])):
        if not t.axes and t.dtype in INTEGERS - {"bool"} and math.prod(t.shape) == math.prod(shape):
            for mode in modes:
                value = made(ctx.terms.reshape(t, shape), mode)
                free = [t, *(leaf for leaf in leaves(t) if leaf is not t)]
                if ctx.terms.is_known(value) and any(_each_once(ctx, rows, mode, t, leaf) for leaf in free[:2]):
                    return value
    return None


def _breaks(ctx: Context, axes: Sequence[str], terms: Sequence[Term], index: Term) -> int | None:
    """A bound of the values of an index at which terms of it change their form; None if there is none that is known.

    Terms that add numbers to the index, compare, choose and clamp are piecewise linear in it, of slope -1, 0 or 1. The first
    and the last piece begin within the sum of the numbers, which depend on the device at most.
    """
    bound = 0
    for t in subterms(*terms):
        if t is index or not any(s is index for s in subterms(t)):
            continue
        numbers = [a for a in t.args if not any(s is index for s in subterms(a))]
        many = t.op in ("add", "sub") and len(t.args) - len(numbers) > 1
        bits = t.op in ("and", "or") and t.dtype != "bool"
        narrow = t.op == "convert" and t.dtype != "bool" and np.dtype(t.dtype).itemsize < np.dtype(index.dtype).itemsize
        if t.op in ("mul", "div", "rem") or (t.op == "scale" and abs(t.params) != 1) or many or bits or narrow:
            return None
        bound += sum(int(np.abs(v.astype(np.int64)).max()) for v in evaluate(ctx, axes, numbers))
    return bound


def _each_once(ctx: Context, rows: Rows, mode: str, index: Term, leaf: Term) -> bool:
    """The law of :func:`owned`, for all values of an index, from those of the term ``leaf`` that it depends on.

    These are the values within the last number at which the terms change their form, and as many at the ends of its dtype, at
    which they wrap.

    For each value, by ``mode``, a row of the full array is accessed, or none. If there is one, the device that has it accesses
    this row of its block; no other device accesses any.
    """
    n, total = rows.n, rows.n * ctx.size(rows.axes)
    terms = [index, rows.local] if rows.mask is None else [index, rows.local, rows.mask]
    try:
        bound = _breaks(ctx, rows.axes, terms, leaf)
        if bound is None or (bound := bound + total) > MAX_VALUES:
            return False
        ends = np.iinfo(leaf.dtype)
        near = [np.arange(-bound, bound + 1), ends.min + np.arange(bound), ends.max - np.arange(bound)]
        values = np.concatenate([part.astype(leaf.dtype) for part in near])
        wanted, row, *masks = evaluate(ctx, rows.axes, terms, leaf, values)
    except Unverified:
        return False
    row, wanted = row.astype(np.int64), wanted.astype(np.int64)
    first = n * np.arange(ctx.size(rows.axes))[:, None]
    inside = (wanted >= 0) & (wanted < total)
    defined = inside if "PROMISE" in mode else np.ones_like(inside)
    if "CLIP" in mode:
        row = np.clip(row, 0, n - 1) if masks else row
        wanted, inside = np.clip(wanted, 0, total - 1), np.ones_like(inside)
    in_block = (row >= 0) & (row < n)
    right = np.where(inside, in_block & (row + first == wanted), ~in_block)
    own, owners = (masks[0], 1) if masks else (in_block, inside[0])
    return bool(((own.sum(0) == owners) | ~defined[0]).all() and (right | ~own | ~defined).all())
