"""Ops that move elements: reshapes, transposes, slices, padding. All are linear, and monotone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn

from ..relation import Context, Rel, aval_of, out_dtype, out_shape, require
from ..term import is_zero
from .table import lemma


@lemma("iota")
def iota(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The index along a dim, constant along the others."""
    shape = out_shape(eqn)
    dims = tuple(n if d == eqn.params["dimension"] else 1 for d, n in enumerate(shape))
    if math.prod(dims) == 1:
        return [ctx.replicated(ctx.terms.literal(0, out_dtype(eqn), len(shape)), shape)]
    return [ctx.replicated(ctx.terms.make("iota", None, (), dims, out_dtype(eqn)), shape)]


@lemma("broadcast_in_dim")
def broadcast(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """A block of a constant is the constant."""
    x, shape = rels[0], out_shape(eqn)
    dims = [int(d) for d in eqn.params["broadcast_dimensions"]]
    require(dims == sorted(dims), "a broadcast that transposes")
    if math.prod(shape) == math.prod(x.shape):
        return [reshaped(ctx, x, shape)]
    sizes = [1] * len(shape)
    spec: list[tuple[str, ...]] = [()] * len(shape)
    for k, d in enumerate(dims):
        require(x.shape[k] == shape[d] or x.term.shape[k] == 1, "a broadcast of a block of one element")
        sizes[d], spec[d] = x.term.shape[k], x.spec[k]
    return [x.of(ctx.terms.reshape(x.term, sizes), shape, spec)]


@lemma("reshape", "squeeze", "expand_dims")
def reshape(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Elements do not change their order. With the index of an element written in digits, major to minor, those of the device and
    those within its block, the digits of the operand and of the result are the same.

    Of several results that hold, one that the function as written has, or a value that was reshaped before; then one with the axes
    of the dims of the operand.
    """
    require(eqn.params.get("dimensions") is None or eqn.primitive.name != "reshape", "a reshape that transposes")
    return [reshaped(ctx, rels[0], out_shape(eqn))]


def reshaped(ctx: Context, x: Rel, shape: tuple[int, ...]) -> Rel:
    """The result of a reshape."""
    found = list(_reshapes(ctx, x, shape))
    if not found:
        x = ctx.expanded(x, range(len(x.shape)))
        found = list(_reshapes(ctx, x, shape))
    require(bool(found), f"a reshape of {list(x.shape)} sharded over {x.spec} to {list(shape)}")
    made = [x.of(ctx.terms.reshape(x.term, sizes), shape, spec) for sizes, spec in found]
    known = [m for m in made if ctx.terms.is_known(m.term)] or [m for m in made if m.term.op != "reshape"]
    return max(known or made, key=lambda m: sum(axes in x.spec for axes in m.spec if axes))


def _reshapes(ctx: Context, x: Rel, shape: tuple[int, ...]) -> Iterator[tuple[list[int], list[tuple[str, ...]]]]:
    """(sizes of the term, spec) of results of a local reshape. A device digit stands before the local digits of its dim: at the
    same product of the local sizes before it, in the operand and the result."""
    if math.prod(shape) == 0:
        require(x.shape == shape, "a reshape of no elements")
        yield list(x.term.shape), list(x.spec)
        return
    before = 1
    constant, digits = [], []  # (start, stop) of constant dims; (products of local sizes before, axes) of device digits
    for n, size, axes in zip(x.shape, x.term.shape, x.spec, strict=True):
        if size == 1 and n > 1:
            constant.append((before, before * n))
        digits += [(before, a) for a in axes]
        before *= n
    starts, before = [], 1
    for n in shape:
        starts.append(before)
        before *= n
    free = []
    for n, start in zip(shape, starts, strict=True):
        inside = [c for c in constant if c[0] < start * n and c[1] > start]
        whole = all((c[0] <= start and start * n <= c[1]) or _ones(c, start, n) for c in inside)
        if n > 1 and inside and not (whole and any(c[0] <= start and start * n <= c[1] for c in inside)):
            return
        free.append(n > 1 and bool(inside))
    for c in constant:  # a constant dim is made of dims of the result
        if c[0] not in [*starts, before] or c[1] not in [*starts, before]:
            return
    choices = [[d for d, s in enumerate(starts) if s == at and not free[d]] for at, _ in digits]
    for places in itertools.product(*choices):
        if list(places) != sorted(places):
            continue
        spec: list[tuple[str, ...]] = [()] * len(shape)
        for (_, axis), d in zip(digits, places, strict=True):
            spec[d] += (axis,)
        yield [1 if free[d] else n * ctx.size(spec[d]) for d, n in enumerate(shape)], spec


def _ones(constant: tuple[int, int], start: int, n: int) -> bool:
    return constant[0] >= start * n or constant[1] <= start


@lemma("transpose")
def transpose(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Dims with their specs, in another order."""
    x, order = rels[0], eqn.params["permutation"]
    return [x.of(ctx.terms.transpose(x.term, order), out_shape(eqn), [x.spec[d] for d in order])]


def carried(
    ctx: Context,
    eqn: JaxprEqn,
    x: Rel,
    dims: Sequence[int],
    params: Any,
    constant: bool = False,
    args: Sequence[Rel] = (),
) -> list[Rel]:
    """The results of an op that acts along dims, which must not be sharded, and carries the others along.

    Args:
      dims: the dims that the op acts along; the result has them at the same position.
      params: of the op, without sizes of the other dims.
      constant: the result is constant where the operand is.
      args: further operands, of the term only.
    """
    for d in dims:
        require(not x.spec[d], f"it acts along dim {d}, which is sharded over {', '.join(x.spec[d])}")
    if not constant:
        x = ctx.expanded(x, dims)
    out = []
    for k, var in enumerate(eqn.outvars):
        sizes = [
            aval_of(var).shape[d] if d in dims and (n != 1 or not constant) else n for d, n in enumerate(x.term.shape)
        ]
        numbered = params if len(eqn.outvars) == 1 else (*params, k)
        terms = (x.term, *(a.term for a in args))
        term = ctx.terms.make(eqn.primitive.name, numbered, terms, sizes, aval_of(var).dtype)
        out.append(x.of(term, aval_of(var).shape, x.spec))
    return out


def sliced(ctx: Context, x: Rel, d: int, start: int, size: int, stride: int = 1) -> Rel:
    """Elements of one dim, which must not be sharded."""
    if x.term.shape[d] == 1 or (size == x.shape[d] and stride == 1):
        return replace(x, shape=(*x.shape[:d], size, *x.shape[d + 1 :]))
    require(not x.spec[d], f"a slice of dim {d}, which is sharded over {', '.join(x.spec[d])}")
    sizes = (*x.term.shape[:d], size, *x.term.shape[d + 1 :])
    term = ctx.terms.make("slice", (d, start, stride), (x.term,), sizes, x.term.dtype)
    return x.of(term, (*x.shape[:d], size, *x.shape[d + 1 :]), x.spec)


@lemma("slice")
def slice_(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Slices of dims one after the other; a dim that is complete is carried along."""
    x = rels[0]
    strides = eqn.params["strides"] or (1,) * len(x.shape)
    for d, (start, stride, n) in enumerate(zip(eqn.params["start_indices"], strides, out_shape(eqn), strict=True)):
        x = sliced(ctx, x, d, int(start), n, int(stride))
    return [x]


@lemma("split", "unstack")
def split(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Consecutive slices of a dim."""
    d, start, out = int(eqn.params["axis"]), 0, []
    for var in eqn.outvars:
        n = aval_of(var).shape[d] if eqn.primitive.name == "split" else 1
        part = sliced(ctx, rels[0], d, start, n)
        if eqn.primitive.name == "unstack":
            drop = lambda xs: (*xs[:d], *xs[d + 1 :])  # noqa: E731
            part = part.of(ctx.terms.reshape(part.term, drop(part.term.shape)), drop(part.shape), drop(part.spec))
        out.append(part)
        start += n
    return out


@lemma("concatenate", "stack")
def concatenate(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Blocks that are sharded alike along the other dims, one after the other; all are partial over the same axes, or 0."""
    d = int(eqn.params["dimension" if eqn.primitive.name == "concatenate" else "axis"])
    if eqn.primitive.name == "stack":
        put = lambda xs, x: (*xs[:d], x, *xs[d:])  # noqa: E731
        rels = [r.of(ctx.terms.reshape(r.term, put(r.term.shape, 1)), put(r.shape, 1), put(r.spec, ())) for r in rels]
    if len(rels) == 1:
        return [rels[0]]
    some = next((r for r in rels if r.partial), None)
    if some is not None:
        same = all(
            (r.partial, r.kind) == (some.partial, some.kind) or (is_zero(r.term) and some.kind == "sum") for r in rels
        )
        require(same, "values that are partial over different axes, side by side", refused=True)
    sizes = [1] * len(rels[0].shape)
    spec: list[tuple[str, ...]] = [()] * len(rels[0].shape)
    for k in range(len(sizes)):
        if k != d:
            found = {(r.term.shape[k], r.spec[k]) for r in rels if r.term.shape[k] != 1}
            require(len(found) <= 1, f"operands sharded differently along dim {k}", refused=True)
            if found:
                ((sizes[k], spec[k]),) = found
    for r in rels:
        require(not r.spec[d], f"operands side by side along dim {d}, which is sharded")
    sizes[d] = out_shape(eqn)[d]
    rels = [ctx.expanded(r, [d]) for r in rels]
    widths = tuple(r.shape[d] for r in rels)
    term = ctx.terms.make("concatenate", (d, widths), (r.term for r in rels), sizes, out_dtype(eqn))
    return [(some or rels[0]).of(term, out_shape(eqn), spec)]


@lemma("pad")
def pad(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Padding of dims that are not sharded; of partial sums, with zeros."""
    x, value = rels
    require(
        not value.partial and (not x.partial or (x.kind == "sum" and is_zero(value.term))), "padding of a partial value"
    )
    config = tuple(tuple(map(int, c)) for c in eqn.params["padding_config"])
    dims = [d for d, c in enumerate(config) if c != (0, 0, 0)]
    return carried(ctx, eqn, x, dims, tuple((d, config[d]) for d in dims), args=[value])


@lemma("rev")
def rev(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The elements of dims that are not sharded in the opposite order."""
    dims = tuple(sorted(d for d in eqn.params["dimensions"] if rels[0].term.shape[d] != 1))
    return carried(ctx, eqn, rels[0], dims, dims, constant=True) if dims else [rels[0]]
