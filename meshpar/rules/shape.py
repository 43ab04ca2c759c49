"""Ops that move dims about: broadcasts, transposes, reshapes, slices, concatenations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from .reach import Reach, exchange, exchanged, own_kind, reach
from .rule import Factors, Kind, OpRule, Send, einsum, rule


@rule("broadcast_in_dim")
def broadcast_in_dim(eqn, ins, outs) -> OpRule:
    (out,) = outs
    r = OpRule([], [], linear=())
    result = r.factors(out)
    dims = eqn.params["broadcast_dimensions"]
    operand = tuple(result[d] if n == out[d] else (r.factor(n),) for n, d in zip(ins[0], dims, strict=True))
    r.ins = [operand, *((),) * (len(ins) - 1)]
    r.outs = [result]
    return r


@rule("transpose")
def transpose(eqn, ins, outs) -> OpRule:
    r = OpRule([], [], strong=True, linear=(0,))
    dims = r.factors(ins[0])
    r.ins, r.outs = [dims], [tuple(dims[i] for i in eqn.params["permutation"])]
    return r


@rule("reshape", "squeeze", "expand_dims")
def reshape(eqn, ins, outs) -> OpRule:
    """The coarsest factors that both shapes are products of; a run that has none (``[6, 4] → [4, 6]``) is whole."""
    order = eqn.params["dimensions"] if eqn.primitive.name == "reshape" else None
    order = range(len(ins[0])) if order is None else order  # a reshape may transpose its operand first
    a, b = [ins[0][d] for d in order], outs[0]
    r = OpRule([], [], strong=True, linear=(0,))
    left: list[Factors] = [()] * len(a)
    right: list[Factors] = [()] * len(b)
    for xs, ys in _runs(a, b):
        found = _common_factors([a[x] for x in xs], [b[y] for y in ys])
        if found is None:
            for x in xs:
                left[x] = (r.factor(a[x], "whole"),)
            for y in ys:
                right[y] = (r.factor(b[y], "whole"),)
            continue
        for size, x, y in found:
            f = r.factor(size)
            left[xs[x]] += (f,)
            right[ys[y]] += (f,)
    operand: list[Factors] = [()] * len(a)
    for d, factors in zip(order, left, strict=True):
        operand[d] = factors
    r.ins = [tuple(operand), *((),) * (len(ins) - 1)]
    r.outs = [tuple(right)]
    return r


def _runs(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The dims (larger than 1) of two shapes between their common boundaries; all of them where some size is 0."""
    if 0 in (*a, *b):
        yield list(range(len(a))), list(range(len(b)))
        return
    rest = [y for y in range(len(b)) if b[y] != 1]
    xs: list[int] = []
    ys: list[int] = []
    pa = pb = 1
    for x in (x for x in range(len(a)) if a[x] != 1):
        xs.append(x)
        pa *= a[x]
        while pb < pa:
            ys.append(rest.pop(0))
            pb *= b[ys[-1]]
        if pa == pb:
            yield xs, ys
            xs, ys, pa, pb = [], [], 1, 1


def _common_factors(a: list[int], b: list[int]) -> list[tuple[int, int, int]] | None:
    """(size, dim of a, dim of b) of the factors of a run, major to minor; None where there are none."""
    a, b = list(a), list(b)
    if 0 in (*a, *b):
        return None
    out = []
    i = j = 0
    while i < len(a) and j < len(b):
        size = min(a[i], b[j])
        if a[i] % size or b[j] % size:
            return None
        out.append((size, i, j))
        a[i] //= size
        b[j] //= size
        i += a[i] == 1
        j += b[j] == 1
    return out


@rule("slice")
def slice_(eqn, ins, outs) -> OpRule:
    """Dims that are taken whole run through; of another one devices exchange what their blocks of the part are made of.

    One element of a dim (the last token) is a partial sum: who has it brings it, the others zeros.
    """
    r = _window(ins[0], outs[0], own_kind(eqn))
    p = eqn.params
    r.own_partial = True
    for d, (n, m) in enumerate(zip(ins[0], outs[0], strict=True)):
        if n != m and m > 1:
            every = p["strides"][d] if p["strides"] else 1
            r.reaches[0, d] = functools.partial(_slice_reach, p["start_indices"][d], every, n, m)
    return exchanged(r, eqn, "what lies in another block")


def _slice_reach(start: int, every: int, size: int, count: int, parts: int) -> Reach:
    n = count // parts
    return reach(size // parts, parts, n * every, (n - 1) * every + 1, -start)


@rule("dynamic_slice")
def dynamic_slice(eqn, ins, outs) -> OpRule:
    r = _window(ins[0], outs[0], "whole")
    r.ins += [()] * (len(ins) - 1)
    return r


def _window(whole, part, kind: Kind, moved: Sequence[bool] = ()) -> OpRule:
    r = OpRule([], [], linear=(0,))
    left, right = [], []
    for n, m, apart in zip(whole, part, moved or (False,) * len(whole), strict=True):
        if n == m and not apart:
            f = r.factor(n)
            left.append((f,))
            right.append((f,))
        else:
            left.append((r.factor(n, "whole" if apart and m == 1 else kind),))
            right.append((r.factor(m, kind if m > 1 else "whole"),))
            if n > 1 and m > 1:
                r.kin.append((left[-1][0], right[-1][0]))
                if kind == "own":
                    r.links.append(r.kin[-1])
    r.ins, r.outs = [tuple(left)], [tuple(right)]
    return r


@rule("pad")
def pad(eqn, ins, outs) -> OpRule:
    """Dims that are not padded run through; of another one devices exchange what their blocks of the result are made of.

    One element that is padded to a dim is put by every device where it belongs in its block.
    """
    config = eqn.params["padding_config"]
    r = _window(ins[0], outs[0], own_kind(eqn), [tuple(c) != (0, 0, 0) for c in config])
    r.linear = ()
    r.ins.append(())
    for d, (low, high, inner) in enumerate(config):
        if (low, high, inner) != (0, 0, 0) and ins[0][d] > 1 and outs[0][d] > 1:
            r.reaches[0, d] = functools.partial(_pad_reach, low, inner + 1, ins[0][d], outs[0][d])
    return exchanged(r, eqn, "what lies in another block")


def _pad_reach(low: int, dilation: int, size: int, count: int, parts: int) -> Reach:
    n = count // parts
    return reach(size // parts, parts, n, n, low, dilation)


@rule("dynamic_update_slice")
def dynamic_update_slice(eqn, ins, outs) -> OpRule:
    """Dims that the update fills run through; in the others the window is whole."""
    whole, part = ins[0], ins[1]
    r = OpRule([], [])
    left, update = [], []
    for n, m in zip(whole, part, strict=True):
        f = r.factor(n, "map" if n == m else "whole")
        left.append((f,))
        update.append((f,) if n == m else (r.factor(m, "whole"),))
        if n != m:
            r.kin.append((f, update[-1][0]))
    r.ins = [tuple(left), tuple(update), *((),) * (len(ins) - 2)]
    r.outs = [tuple(left)]
    return r


@rule("concatenate")
def concatenate(eqn, ins, outs) -> OpRule:
    """Along the dim that is joined devices exchange what their blocks of the result are made of."""
    axis, kind = eqn.params["dimension"], own_kind(eqn)
    r = OpRule([], [])
    out = tuple((r.factor(n, kind if i == axis else "map"),) for i, n in enumerate(outs[0]))
    starts = itertools.accumulate((shape[axis] for shape in ins), initial=0)
    for i, (shape, start) in enumerate(zip(ins, starts, strict=False)):
        mine = list(out)
        mine[axis] = (r.factor(shape[axis], kind),)
        r.kin.append((mine[axis][0], out[axis][0]))
        r.ins.append(tuple(mine))
        r.reaches[i, axis] = functools.partial(_pad_reach, start, 1, shape[axis], outs[0][axis])
        if kind == "own":
            r.links.append((out[axis][0], mine[axis][0]))
    r.outs = [out]
    return exchanged(r, eqn, "what lies in another block")


@rule("split")
def split(eqn, ins, outs) -> OpRule:
    """Along the dim that is cut devices exchange what their blocks of the pieces are made of."""
    axis, kind = eqn.params["axis"], own_kind(eqn)
    r = OpRule([], [], linear=(0,))
    operand = tuple((r.factor(n, kind if i == axis else "map"),) for i, n in enumerate(ins[0]))
    (whole,) = operand[axis]
    for shape in outs:
        mine = list(operand)
        mine[axis] = (r.factor(shape[axis], kind),)
        r.kin.append((whole, mine[axis][0]))
        r.outs.append(tuple(mine))
        if kind == "own":
            r.links.append((whole, mine[axis][0]))
    r.ins = [operand]
    dtype = eqn.invars[0].aval.dtype

    def sends(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> list[Send]:
        reaches = split_reaches(eqn.params["sizes"], parts[whole])
        return [
            s for at in reaches for s in at.window.sends(shapes[0], axis, whole, np.dtype(dtype), "what lies in another block")
        ]  # fmt: skip

    r.sends = sends
    return r


def split_reaches(sizes: Sequence[int], parts: int) -> list[Reach]:
    """What each device reads for its block of every piece."""
    starts = itertools.accumulate(sizes, initial=0)
    return [_slice_reach(start, 1, sum(sizes), n, parts) for start, n in zip(starts, sizes, strict=False)]


@rule("tile")
def tile(eqn, ins, outs) -> OpRule:
    """A dim that is repeated is made of the repeats (major) and of the operand's dim."""
    r = OpRule([], [])
    operand = r.factors(ins[0])
    result = []
    for reps, dim in zip(eqn.params["reps"], operand, strict=True):
        result.append(dim if reps == 1 else (r.factor(reps), *dim))
    r.ins, r.outs = [operand], [tuple(result)]
    return r


@rule("stack")
def stack(eqn, ins, outs) -> OpRule:
    r = OpRule([], [])
    dims = r.factors(ins[0])
    axis = eqn.params["axis"]
    r.ins = [dims] * len(ins)
    r.outs = [(*dims[:axis], (r.factor(len(ins), "whole"),), *dims[axis:])]
    return r


@rule("unstack")
def unstack(eqn, ins, outs) -> OpRule:
    r = OpRule([], [])
    axis = eqn.params["axis"]
    dims = tuple((r.factor(n, "whole" if i == axis else "map"),) for i, n in enumerate(ins[0]))
    r.ins, r.outs = [dims], [(*dims[:axis], *dims[axis + 1 :])] * len(outs)
    return r


@rule("device_put")
def device_put(eqn, ins, outs) -> OpRule:
    r = OpRule([], [], strong=True)
    r.ins = [r.factors(s) for s in ins]
    r.outs = list(r.ins)
    return r


@rule("random_split", "random_wrap", "random_unwrap")
def keys(eqn, ins, outs) -> OpRule:
    """Arrays of keys run through; the keys that a key is split into, and the words that it has, are whole."""
    r = OpRule([], [])
    lead = r.factors(ins[0][: len(outs[0])])
    lead = lead[: len(ins[0]) - (eqn.primitive.name == "random_wrap")]
    r.ins = [lead + r.factors(ins[0][len(lead) :], "whole")]
    r.outs = [lead + r.factors(outs[0][len(lead) :], "whole")]
    return r


@rule("rev")
def rev(eqn, ins, outs) -> OpRule:
    """Along a dim that is reversed devices exchange their blocks."""
    r = OpRule([], [], strong=True)
    moved, kind = eqn.params["dimensions"], own_kind(eqn)
    dims = tuple((r.factor(n, kind if i in moved else "map"),) for i, n in enumerate(ins[0]))
    r.ins, r.outs = [dims], [dims]
    for d in moved:
        r.reaches[0, d] = functools.partial(_rev_reach, ins[0][d])
    return exchanged(r, eqn, "the block at the other end")


def _rev_reach(size: int, parts: int) -> Reach:
    n = size // parts
    return Reach(exchange(n, tuple((parts - 1 - p) * n for p in range(parts)), n), (0,) * parts, n, 1)


@rule("iota", "random_bits", "empty")
def generate(eqn, ins, outs) -> OpRule:
    """Made where it is needed: every device makes its part (random bits from the global index)."""
    r = OpRule([], [])
    r.ins = [r.factors(s, "whole") for s in ins]
    r.outs = [r.factors(s) for s in outs]
    return r


@rule("rng_bit_generator")
def rng_bit_generator(eqn, ins, outs) -> OpRule:
    """Whole: which bits an element gets depends on how the backend lays out the array that it is asked for."""
    r = OpRule([], [])
    key = r.factors(ins[0], "whole")
    r.ins, r.outs = [key], [key, r.factors(outs[1], "whole")]
    return r


@rule("bitcast_convert_type")
def bitcast_convert_type(eqn, ins, outs) -> OpRule:
    rank = min(len(ins[0]), len(outs[0]))
    letters = "abcdefghijklm"[:rank]
    a = letters + "y" * (len(ins[0]) - rank)
    b = letters + "z" * (len(outs[0]) - rank)
    r = einsum([a], [b], ins, outs, strong=len(ins[0]) == len(outs[0]))
    for extra in "yz":
        if extra in a:
            r.kinds[r.ins[0][-1][0]] = "whole"
        if extra in b:
            r.kinds[r.outs[0][-1][0]] = "whole"
    return r
