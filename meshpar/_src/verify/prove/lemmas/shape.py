"""Ops that move elements: reshapes, transposes, slices, padding. All are linear, and monotone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from jax.extend.core import JaxprEqn

from ....compat.jax import aval_of
from ..laws import act, partial_of
from ..non_block_shards import concatenate_fragments, pad_fragments, take_positions
from ..relation import Context, Rel, out_dtype, out_shape, require
from ..term import Term
from .table import lemma


@lemma("iota")
def iota(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The index along a dim, constant along the others."""
    shape = out_shape(eqn)
    dims = tuple(n if d == eqn.params["dimension"] else 1 for d, n in enumerate(shape))
    if math.prod(dims) == 1:
        return [ctx.replicated(ctx.terms.literal(0, out_dtype(eqn), len(shape)), shape)]
    return [ctx.replicated(ctx.terms.make("iota", None, (), dims, out_dtype(eqn)), shape)]


@lemma("empty")
def empty(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Elements of which nothing is known."""
    shape = out_shape(eqn)
    return [ctx.replicated(ctx.terms.make("empty", None, (), (1,) * len(shape), out_dtype(eqn)), shape)]


@lemma("broadcast_in_dim")
def broadcast(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """A block of a constant is the constant."""
    x, shape = rels[0], out_shape(eqn)
    dims = [int(d) for d in eqn.params["broadcast_dimensions"]]
    require(dims == sorted(dims), "a broadcast that transposes")
    if math.prod(shape) == math.prod(x.shape) and not x.fragmented:
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
    (x,), order = rels, eqn.params.get("dimensions") if eqn.primitive.name == "reshape" else None
    return [reshaped(ctx, x if order is None else transposed(ctx, x, order), out_shape(eqn))]


def reshaped(ctx: Context, x: Rel, shape: tuple[int, ...]) -> Rel:
    """The result of a reshape."""
    if x.term.op == "array" and x.shape == (1,) and x.spec[0] and not shape and not x.partial:  # of a table
        return ctx.replicated(ctx.terms.make("entry_block", (x.spec[0],), (x.term,), (), x.term.dtype), ())
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
    starts, free, before = [], [], 1
    for n in shape:
        starts.append(before)
        over = [(a, b) for a, b in constant if n > 1 and a < before * n and before < b]
        if any(before < a or b < before * n for a, b in over):
            return  # a dim of the result is constant in part
        free.append(bool(over))
        before *= n
    choices = [[d for d, s in enumerate(starts) if s == at and not free[d]] for at, _ in digits]
    for places in itertools.product(*choices):
        if list(places) != sorted(places):
            continue
        spec: list[tuple[str, ...]] = [()] * len(shape)
        for (_, axis), d in zip(digits, places, strict=True):
            spec[d] += (axis,)
        yield [1 if free[d] else n * ctx.size(spec[d]) for d, n in enumerate(shape)], spec


@lemma("transpose")
def transpose(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Dims with their specs, in another order."""
    return [transposed(ctx, rels[0], eqn.params["permutation"])]


def transposed(ctx: Context, x: Rel, order: Sequence[int]) -> Rel:
    """The result of a transpose."""
    return x.of(ctx.terms.transpose(x.term, order), [x.shape[d] for d in order], [x.spec[d] for d in order])


def sliced(ctx: Context, x: Rel, d: int, start: int, size: int, stride: int = 1) -> Rel:
    """Elements of one dim; of a block, fragments."""
    if x.term.shape[d] == 1 or (size == x.shape[d] and stride == 1):
        return replace(x, shape=x.resized(d, size))
    return taken(ctx, x, d, start + stride * np.arange(size))


def taken(ctx: Context, x: Rel, d: int, at: np.ndarray) -> Rel:
    """Elements of one dim at positions that all devices have; of a block, fragments."""
    if x.spec[d]:
        return take_positions(ctx, x, d, at[None])
    return x.of(ctx.terms.take(x.term, d, at), x.resized(d, len(at)), x.spec)


@lemma("rearrange")
def rearrange(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The elements of a table along a dim, which is given as arithmetic progressions."""
    (x,), d = rels, int(eqn.params["dimension"])
    at = np.concatenate([first + step * np.arange(n) for first, step, n in eqn.params["runs"]])
    require(x.term.shape[d] != 1 and bool((at >= 0).all()), "a table with zeros, or of a constant")
    return [taken(ctx, x, d, at)]


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


def uniform(term: Term) -> str | None:
    """The number that all elements of a term are, as the text in a literal; None: they are not one number."""
    while term.op == "expand":
        (term,) = term.args
    return term.params if term.op == "literal" else None


@lemma("concatenate", "stack")
def concatenate(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Blocks that are sharded alike along the other dims, one after the other; all are partial over the same axes, or 0.
    Fragments of one array are fragments of it."""
    d = int(eqn.params["dimension" if eqn.primitive.name == "concatenate" else "axis"])
    if eqn.primitive.name == "stack":
        put = lambda xs, x: (*xs[:d], x, *xs[d:])  # noqa: E731
        rels = [r.of(ctx.terms.reshape(r.term, put(r.term.shape, 1)), put(r.shape, 1), put(r.spec, ())) for r in rels]
    if len(rels) == 1:
        return list(rels)
    fragments = concatenate_fragments(ctx, rels, d)
    if fragments is not None:
        return [fragments]
    widths, partial = tuple(r.shape[d] for r in rels), partial_of(rels, "values side by side")
    inner = [k for k, r in enumerate(rels) if uniform(r.term) is None]
    values = {uniform(r.term) for k, r in enumerate(rels) if k not in inner}
    if len(inner) == len(values) == 1 and rels[inner[0]].term.shape[d] == widths[inner[0]]:  # padding with a number
        (k,), (value,) = inner, (ctx.terms.make("literal", text, (), (), rels[0].term.dtype) for text in values)
        low, high = sum(widths[:k]), sum(widths[k + 1 :])
        if not low + high:
            return [rels[k]]
        params, numbers = ((d, (low, high, 0)),), [rels[k], ctx.replicated(value, ())]
        labels = range(len(rels[k].shape)), ()
        return act(ctx, eqn, numbers, ins=labels, unsharded=[d], params=params, partial=partial, op="pad")
    complete = all(r.term.shape[d] == n for r, n in zip(rels, widths, strict=True))
    term = ctx.terms.concatenate_slices([r.term for r in rels], d) if complete else None
    return act(ctx, eqn, rels, unsharded=[d], params=(d, widths), partial=partial, op="concatenate", term=term)


@lemma("pad")
def pad(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Padding of dims that are not sharded, or in fragments; of partial sums, with zeros."""
    config = {d: tuple(map(int, c)) for d, c in enumerate(eqn.params["padding_config"]) if any(c)}
    for d in [d for d in config if rels[0].spec[d]]:
        rels = [pad_fragments(ctx, rels[0], d, config.pop(d), rels[1]), rels[1]]
    if not config:
        return [rels[0]]
    return act(ctx, eqn, rels, unsharded=config, params=tuple(config.items()), partial=partial_of(rels, "padding"))


@lemma("rev")
def rev(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The elements of dims in the opposite order; a constant is the same in every order."""
    (x,) = rels
    for d in sorted(d for d in eqn.params["dimensions"] if x.term.shape[d] != 1):
        x = taken(ctx, x, d, np.arange(x.shape[d])[::-1])
    return [x]
