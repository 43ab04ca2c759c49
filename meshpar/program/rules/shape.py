"""Ops that move dims about: broadcasts, transposes, reshapes, slices, concatenations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .rule import Factors, OpRule, einsum, rule


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
    return _window(ins[0], outs[0])


@rule("dynamic_slice")
def dynamic_slice(eqn, ins, outs) -> OpRule:
    r = _window(ins[0], outs[0])
    r.ins += [()] * (len(ins) - 1)
    return r


def _window(whole, part, moved: Sequence[bool] = ()) -> OpRule:
    r = OpRule([], [], linear=(0,))
    left, right = [], []
    for n, m, apart in zip(whole, part, moved or (False,) * len(whole), strict=True):
        if n == m and not apart:
            f = r.factor(n)
            left.append((f,))
            right.append((f,))
        else:
            left.append((r.factor(n, "whole"),))
            right.append((r.factor(m, "whole"),))
            r.kin.append((left[-1][0], right[-1][0]))
    r.ins, r.outs = [tuple(left)], [tuple(right)]
    return r


@rule("pad")
def pad(eqn, ins, outs) -> OpRule:
    """Dims that are not padded run through; one that is moved (``(1, -1, 0)``) is whole, though its size stays."""
    padded = [config != (0, 0, 0) for config in eqn.params["padding_config"]]
    r = _window(ins[0], outs[0], padded)
    r.linear = ()
    r.ins.append(())
    return r


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
    axis = eqn.params["dimension"]
    r = OpRule([], [])
    out = tuple((r.factor(n, "whole" if i == axis else "map"),) for i, n in enumerate(outs[0]))
    for shape in ins:
        mine = list(out)
        mine[axis] = (r.factor(shape[axis], "whole"),)
        r.kin.append((mine[axis][0], out[axis][0]))
        r.ins.append(tuple(mine))
    r.outs = [out]
    return r


@rule("split")
def split(eqn, ins, outs) -> OpRule:
    axis = eqn.params["axis"]
    r = OpRule([], [], linear=(0,))
    operand = tuple((r.factor(n, "whole" if i == axis else "map"),) for i, n in enumerate(ins[0]))
    for shape in outs:
        mine = list(operand)
        mine[axis] = (r.factor(shape[axis], "whole"),)
        r.kin.append((operand[axis][0], mine[axis][0]))
        r.outs.append(tuple(mine))
    r.ins = [operand]
    return r


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
    r = OpRule([], [], strong=True)
    dims = tuple((r.factor(n, "whole" if i in eqn.params["dimensions"] else "map"),) for i, n in enumerate(ins[0]))
    r.ins, r.outs = [dims], [dims]
    return r


@rule("iota", "random_bits", "empty")
def generate(eqn, ins, outs) -> OpRule:
    """Made where it is needed: every device makes its part (random bits from the global index)."""
    r = OpRule([], [])
    r.ins = [r.factors(s, "whole") for s in ins]
    r.outs = [r.factors(s) for s in outs]
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
