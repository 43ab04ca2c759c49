"""Values that depend on the coordinates of the device: offsets, masks, and what they are in terms of global values.

A term that depends on coordinates through a few integer ops is evaluated, for all coordinates and all values of its one index, and
compared with the law that a lemma needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .relation import Context, Rel, Unverified, require
from .term import Term, Terms, is_zero, number_of

MAX_VALUES = 1 << 25
"""Evaluated elements; a larger table is not verified."""


def _div(x: Any, y: Any) -> Any:
    q = np.abs(x) // np.maximum(np.abs(y), 1)
    return np.where((x < 0) != (y < 0), -q, q)


POINTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "div": _div,
    "rem": lambda x, y: x - _div(x, y) * y, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or, "not": np.logical_not,
    "clamp": lambda lo, x, hi: np.minimum(np.maximum(x, lo), hi), "sign": np.sign,
    "select_n": lambda c, *xs: np.where(c, xs[1], xs[0]),
}  # fmt: skip
"""Ops of 64-bit integers and booleans that are evaluated."""


def is_pointwise(term: Term) -> bool:
    """Whether a term is evaluated from its operands; the others are leaves."""
    if term.op in ("literal", "axis_index"):
        return True
    if term.op == "not":
        return term.dtype == "bool"
    if term.op == "convert":
        return _integer(term) and _integer(term.args[0])
    if term.op == "reshape":
        units = [n for n in term.shape if n != 1] == [n for n in term.args[0].shape if n != 1]
        return units and _integer(term)
    return (term.op in POINTWISE or term.op == "scale") and _integer(term) and len(term.args) <= 3


def _integer(term: Term) -> bool:
    return term.dtype in ("int32", "int64", "uint32", "bool", "int8", "int16", "uint8", "uint16")


def parts(term: Term) -> Iterator[Term]:
    """The terms that a term is evaluated from, leaves included, each once."""
    seen: set[int] = set()
    stack = [term]
    while stack:
        t = stack.pop()
        if t.number not in seen:
            seen.add(t.number)
            yield t
            if is_pointwise(t):
                stack.extend(t.args)


def leaves(term: Term) -> list[Term]:
    """The values that a term is evaluated from, apart from numbers and coordinates."""
    return [t for t in parts(term) if not is_pointwise(t)]


def evaluate(term: Term, at: Mapping[str, Any], values: Mapping[int, Any]) -> Any:
    """The value of a term, by element, for coordinates ``at`` and values of its leaves."""
    done: dict[int, Any] = dict(values)

    def value(t: Term) -> Any:
        if t.number not in done:
            if t.op == "axis_index":
                done[t.number] = at[str(t.params)]
            elif t.op == "literal":
                number = number_of(t)
                require(number is not None, f"the number {t.params}")
                done[t.number] = np.asarray(number)
            elif t.op == "scale":
                by: Any = t.params
                require(by.denominator == 1, "a fraction of an integer")
                done[t.number] = value(t.args[0]) * int(by)
            elif t.op == "reshape":
                done[t.number] = value(t.args[0])
            elif t.op == "convert":
                x = value(t.args[0])
                done[t.number] = x != 0 if t.dtype == "bool" else np.asarray(x).astype(np.int64)
            else:
                require(is_pointwise(t), f"the value of {t.op} on each device")
                done[t.number] = POINTWISE[t.op](*map(value, t.args))
        return done[t.number]

    return value(term)


def table(ctx: Context, term: Term) -> tuple[tuple[str, ...], np.ndarray]:
    """(axes, the value of a scalar for each device along them, the first axis major).

    Raises:
      Unverified: it depends on more than the coordinates.
    """
    axes = tuple(a for a in ctx.sizes if a in term.axes)
    require(not leaves(term), "an offset that depends on data and on the device")
    at = ctx.coordinates(axes)
    return axes, np.broadcast_to(np.asarray(evaluate(term, at, {})), (ctx.size(axes),))


def order_of(ctx: Context, axes: Sequence[str], offsets: np.ndarray, step: int) -> tuple[tuple[str, ...], int] | None:
    """(axes, base) so that the offset of each device is ``base`` plus ``step`` times its index along the axes; None if there are
    none."""
    at, base = ctx.coordinates(axes), int(offsets.min())
    for order in itertools.permutations(axes):
        if (offsets == base + step * ctx.linear(order, at)).all():
            return order, base
    return None


def resolved(ctx: Context, rel: Rel, operands: Sequence[Rel]) -> Rel:
    """The relation of an elementwise result to a value that does not depend on coordinates, if a law gives one."""
    if not rel.term.axes or not ctx.sizes:
        return rel
    for law in (global_iota, masked):
        found = law(ctx, rel, operands)
        if found is not None:
            return found
    return rel


def global_iota(ctx: Context, rel: Rel, _: Sequence[Rel]) -> Rel | None:
    """iota(n) + n k, on the device k, is its block of iota(n K)."""
    dims = [d for d, n in enumerate(rel.term.shape) if n != 1]
    found = leaves(rel.term)
    if len(dims) != 1 or len(found) != 1 or found[0].op != "iota" or rel.spec[dims[0]] or rel.term.dtype == "bool":
        return None
    (d,), (leaf,), n = dims, found, rel.shape[dims[0]]
    axes = tuple(a for a in ctx.sizes if a in rel.term.axes)
    if ctx.size(axes) * n > MAX_VALUES or not is_pointwise(rel.term):
        return None
    at = {a: x[:, None] for a, x in ctx.coordinates(axes).items()}
    values = np.broadcast_to(evaluate(rel.term, at, {leaf.number: np.arange(n)[None]}), (ctx.size(axes), n))
    order = order_of(ctx, axes, values[:, 0], n)
    if order is None or not (values == values[:, :1] + np.arange(n)).all():
        return None
    shape = tuple(n * ctx.size(order[0]) if k == d else 1 for k in range(len(rel.shape)))
    term = ctx.terms.make("iota", None, (), shape, rel.term.dtype)
    if order[1]:
        base = ctx.terms.literal(order[1], rel.term.dtype, len(shape))
        term = ctx.terms.make("add", (), (term, base), shape, rel.term.dtype, sort=True)
    return replace(rel, term=term, spec=tuple(order[0] if k == d else () for k in range(len(shape))))


def masked(ctx: Context, rel: Rel, operands: Sequence[Rel]) -> Rel | None:
    """Where exactly one device of a group has x, and the others 0, the sum over the group is x."""
    if rel.term.op != "select_n" or len(operands) != 3:
        return None
    condition, *cases = operands
    axes = condition.term.axes
    for x, zero, wanted in ((cases[1], cases[0], True), (cases[0], cases[1], False)):
        if not axes or not is_zero(zero.term) or rel.partial & axes or axes & x.sharded:
            continue
        kind = "one" if zero.term.params == "-0.0" and not rel.partial else "sum"
        if not leaves(condition.term) and not axes & x.term.axes and all(n == 1 for n in condition.term.shape):
            names, chosen = table(ctx, condition.term)
            if (chosen == wanted).sum() == 1:
                assert frozenset(names) == axes
                return replace(rel, term=x.term, spec=x.spec, partial=rel.partial | axes, kind=kind)
        if wanted and x.term.op == "gather_block" and x.term.axes <= axes | x.term.args[0].axes:
            term = owned_gather(ctx, condition, x)
            if term is not None:
                return replace(rel, term=term, partial=rel.partial | axes, kind=kind)
    return None


def index_values(terms: Sequence[Term], bound: int) -> tuple[Term, np.ndarray] | None:
    """(the one leaf of terms, all values that it is evaluated at): every integer within the sum of all numbers in the terms, beyond
    which no comparison changes, and the extremes of int32."""
    found = {t.number: t for term in terms for t in leaves(term)}
    if len(found) != 1:
        return None
    limit = bound + sum(abs(int(number_of(t) or 0)) for term in terms for t in parts(term) if t.op == "literal")
    if limit > MAX_VALUES >> 3:
        return None
    ends = np.iinfo(np.int32)
    (leaf,) = found.values()
    return leaf, np.concatenate([[ends.min, ends.min + 1], np.arange(-limit, limit + 1), [ends.max]]).astype(np.int64)


def global_index(ctx: Context, local: Term, made: Callable[[Term], Term]) -> Iterator[tuple[Term, Term]]:
    """(global index, the term ``made`` of it), for the index terms within a local index with which the function as written has
    this term."""
    for t in parts(local):
        if not t.axes and t.dtype == local.dtype and np.prod(t.shape) == np.prod(local.shape):
            index = ctx.terms.reshape(t, local.shape)
            term = made(index)
            if ctx.terms.is_known(term):
                yield index, term


def owned_gather(ctx: Context, condition: Rel, x: Rel) -> Term | None:
    """Each row of a sharded table is on one device, which reads it; the others add 0."""
    block: Any = x.term.params
    operand, local = x.term.args
    axes, _, n, params, batch = block
    if any(m != 1 and k not in batch for k, m in enumerate(condition.term.shape)):
        return None
    total = n * ctx.size(axes)
    for index, term in global_index(
        ctx, local, lambda i: ctx.terms.make("gather", params, (operand, i), x.term.shape, x.term.dtype)
    ):
        found = index_values([condition.term, local, index], total)
        if found is None or ctx.size(axes) * len(found[1]) > MAX_VALUES:
            continue
        leaf, values = found
        at = {a: c[:, None] for a, c in ctx.coordinates(axes).items()}
        if condition.term.axes != set(axes) or not local.axes <= set(axes):
            continue
        where = {leaf.number: values[None]}
        own, row, wanted = (np.asarray(evaluate(t, at, where)) for t in (condition.term, local, index))
        own, row, wanted = np.broadcast_arrays(own, row, wanted)
        first = n * np.asarray(ctx.linear(axes, at))
        mode = str(dict(params)["mode"])
        inside = (wanted >= 0) & (wanted < total)
        defined = inside if "PROMISE" in mode else np.ones_like(inside)
        if "CLIP" in mode:
            row, wanted = np.clip(row, 0, n - 1), np.clip(wanted, 0, total - 1)
            inside = np.ones_like(inside)
        right = np.where(inside, row + first == wanted, (row < 0) | (row >= n))
        right &= np.where(inside, (row >= 0) & (row < n), True)
        if ((own.sum(0) == 1) | ~defined.any(0)).all() and (right | ~own | ~defined).all():
            return term
    return None


def owned_scatter(ctx: Context, axes: tuple[str, ...], n: int, mode: str, local: Term, index: Term) -> bool:
    """Whether each device adds exactly the updates of its rows: those of other devices are out of range, and dropped."""
    total = n * ctx.size(axes)
    found = index_values([local, index], total)
    if (
        found is None
        or ctx.size(axes) * len(found[1]) > MAX_VALUES
        or "FILL" not in mode
        or not local.axes <= set(axes)
    ):
        return False
    leaf, values = found
    at = {a: c[:, None] for a, c in ctx.coordinates(axes).items()}
    row, wanted = (np.asarray(evaluate(t, at, {leaf.number: values[None]})) for t in (local, index))
    first = n * np.asarray(ctx.linear(axes, at))
    mine = (wanted >= first) & (wanted < first + n)
    return bool(np.where(mine, row + first == wanted, (row < 0) | (row >= n)).all())


def sharded_start(ctx: Context, start: Term, n: int, total: int) -> tuple[str, ...] | None:
    """The axes along which ``start`` is ``n`` times the index of the device, so that slices of ``n`` of ``total`` are blocks; a
    slice that begins beyond the last block is moved back to it."""
    try:
        axes, offsets = table(ctx, start)
    except Unverified:
        return None
    if ctx.size(axes) * n > total:
        return None
    order = order_of(ctx, axes, np.clip(offsets, 0, total - n), n)
    return None if order is None or order[1] or ctx.size(axes) * n != total else order[0]


def ordered(terms: Terms, x: Term, kind: str) -> Term:
    """The integers that are in the order of floats, of ``x``; NaN is the largest (of a minimum: the smallest) of them."""
    dtype = f"int{8 * np.dtype(x.dtype).itemsize}"
    n = flipped(terms, terms.make("bitcast", None, (x,), x.shape, dtype))
    nan = terms.make("ne", (), (x, x), x.shape, "bool")
    limit = np.iinfo(dtype).max if kind == "max" else np.iinfo(dtype).min
    return terms.make("select_n", (), (nan, n, terms.literal(limit, dtype, len(x.shape))), x.shape, dtype)


def flipped(terms: Terms, n: Term) -> Term:
    """Integers whose order is that of the floats with these bits: of negative numbers, all bits except the sign are inverted."""
    rank = len(n.shape)
    negative = terms.make("lt", (), (n, terms.literal(0, n.dtype, rank)), n.shape, "bool")
    largest = terms.literal(np.iinfo(n.dtype).max, n.dtype, rank)
    inverted = terms.make("xor", (), (n, largest), n.shape, n.dtype, sort=True)
    return terms.make("select_n", (), (negative, n, inverted), n.shape, n.dtype)


def image_of(terms: Terms, term: Term, kind: str) -> Term | None:
    """The x of which a term is :func:`ordered`."""
    if term.op != "select_n" or term.args[0].op != "ne":
        return None
    x = term.args[0].args[0]
    return x if term is ordered(terms, x, kind) else None


def unordered(terms: Terms, term: Term, dtype: str) -> Term | None:
    """The x of dtype ``dtype`` of which a term is :func:`flipped` :func:`ordered`: its bits are those of x."""
    if term.op != "select_n" or term.args[0].op != "lt":
        return None
    n = term.args[1]
    x = image_of(terms, n, "max") or image_of(terms, n, "min")
    return x if x is not None and x.dtype == dtype and term is flipped(terms, n) else None


def bits_of(term: Term) -> bool:
    """Whether a term is the bits of floats with the sign inverted: of the neutral element of addition, -0.0, all bits are 0."""
    if term.op != "xor":
        return False
    for x, sign in (term.args, term.args[::-1]):
        if x.op == "bitcast" and x.args[0].dtype.startswith(("float", "bfloat")):
            width = 8 * np.dtype(x.args[0].dtype).itemsize
            if number_of(sign) == 1 << (width - 1) and x.dtype == f"uint{width}":
                return True
    return False
