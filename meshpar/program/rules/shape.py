"""Ops that move dims about: broadcasts, transposes, reshapes, slices, concatenations."""

from __future__ import annotations

from .rule import Factors, OpRule, einsum, rule


@rule("broadcast_in_dim")
def broadcast_in_dim(eqn, ins, outs) -> OpRule:
    (out,) = outs
    r = OpRule([], [], linear=())
    result = r.factors(out)
    dims = eqn.params["broadcast_dimensions"]
    operand = tuple(
        result[d] if n == out[d] else (r.factor(n),) for n, d in zip(ins[0], dims, strict=True)
    )
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
    """The coarsest factors that both shapes are products of; runs that have none (``[6, 4] → [8, 3]``) are whole."""
    a, b = ins[0], outs[0]
    r = OpRule([], [], strong=True, linear=(0,))
    left: list[Factors] = [()] * len(a)
    right: list[Factors] = [()] * len(b)
    i = j = 0
    ra, rb = (a[0] if a else 1), (b[0] if b else 1)  # what is left of the current dims
    pending: list[tuple[int, int, int]] = []
    while i < len(a) or j < len(b):
        if i < len(a) and ra == 1:
            i += 1
            ra = a[i] if i < len(a) else 1
        elif j < len(b) and rb == 1:
            j += 1
            rb = b[j] if j < len(b) else 1
        elif i >= len(a) or j >= len(b):  # a size of 0 somewhere
            pending = [(x, y, 0) for x in range(len(a)) for y in range(len(b))]
            break
        else:
            small = min(ra, rb)
            if max(ra, rb) % small:
                pending.append((i, j, 0))
                break
            f = r.factor(small)
            left[i] += (f,)
            right[j] += (f,)
            ra, rb = ra // small, rb // small
    if pending:  # no common factors from here on: whole
        first_i, first_j = pending[0][0], pending[0][1]
        for x in range(first_i, len(a)):
            for f in left[x]:
                r.kinds[f] = "whole"
            left[x] = (r.factor(a[x], "whole"),)
        for y in range(first_j, len(b)):
            for f in right[y]:
                r.kinds[f] = "whole"
            right[y] = (r.factor(b[y], "whole"),)
        r.strong = False
    r.ins = [tuple(left), *((),) * (len(ins) - 1)]
    r.outs = [tuple(right)]
    return r


@rule("slice")
def slice_(eqn, ins, outs) -> OpRule:
    return _window(ins[0], outs[0])


@rule("dynamic_slice")
def dynamic_slice(eqn, ins, outs) -> OpRule:
    r = _window(ins[0], outs[0])
    r.ins += [()] * (len(ins) - 1)
    return r


def _window(whole, part) -> OpRule:
    r = OpRule([], [], linear=(0,))
    left, right = [], []
    for n, m in zip(whole, part, strict=True):
        if n == m:
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
    r = _window(ins[0], outs[0])
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


@rule("rev")
def rev(eqn, ins, outs) -> OpRule:
    r = OpRule([], [], strong=True)
    dims = tuple(
        (r.factor(n, "whole" if i in eqn.params["dimensions"] else "map"),) for i, n in enumerate(ins[0])
    )
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
