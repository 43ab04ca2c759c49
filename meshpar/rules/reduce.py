"""Reductions, scans along a dim, sorting, windows and linear algebra."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from .reach import Reach, candidates, exchanged, own_kind, scattered, sliding
from .rule import Kind, OpRule, Send, rule

_KINDS: dict[str, Kind] = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
}


@rule(*_KINDS)
def reduce(eqn, ins, outs) -> OpRule:
    kind = _KINDS[eqn.primitive.name]
    return _reduce(ins, outs, eqn.params["axes"], kind)


@rule("argmax", "argmin")
def arg_extremum(eqn, ins, outs) -> OpRule:
    """Each device finds the extremum of its block; the pairs of value and index are gathered, and the first extremum wins."""
    (axis,) = eqn.params["axes"]
    r = _reduce(ins, outs, (axis,), own_kind(eqn))
    found = np.dtype(eqn.params["index_dtype"])
    _pairs(r, axis, 1, eqn.invars[0].aval.dtype, found, "the extremum of every block, and where it is")
    return r


@rule("reduce_xor")
def reduce_xor(eqn, ins, outs) -> OpRule:
    """Each device reduces its block; the results are gathered and combined."""
    r = _reduce(ins, outs, eqn.params["axes"], own_kind(eqn))
    split, dtype = [r.ins[0][a][0] for a in eqn.params["axes"]], eqn.invars[0].aval.dtype

    def sends(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> list[Send]:
        kept = tuple(n for i, n in enumerate(shapes[0]) if i not in eqn.params["axes"])
        return [Send("all-gather", tuple(split), kept, dtype, "the result of every block")]

    r.sends = sends
    return r


def _pairs(r: OpRule, axis: int, k: int, dtype, index, why: str) -> None:
    """Send the k best values of every block with their indices, or the block where that is less."""
    (factor,) = r.ins[0][axis]
    dtype, index = np.dtype(dtype) if r.kinds[factor] == "own" else None, np.dtype(index)

    def sends(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> list[Send]:
        (shape,) = shapes
        best = candidates(shape[axis], k, np.dtype(dtype).itemsize, index.itemsize)
        if best is None:
            return [Send("all-gather", (factor,), shape, dtype, "all values: the best of every block would be more")]
        piece = (*shape[:axis], best, *shape[axis + 1 :])
        return [Send("all-gather", (factor,), piece, d, why) for d in (dtype, index)]

    r.sends = sends


@rule("reduce")
def reduce_general(eqn, ins, outs) -> OpRule:
    n = len(ins) // 2
    r = _reduce(ins[:1], outs[:1], eqn.params["dimensions"], "whole")
    r.ins = r.ins * n + [()] * n
    r.outs = r.outs * n
    return r


def _reduce(ins, outs, axes, kind: Kind) -> OpRule:
    r = OpRule([], [])
    dims = tuple((r.factor(n, kind if i in axes else "map"),) for i, n in enumerate(ins[0]))
    r.ins = [dims]
    kept = tuple(d for i, d in enumerate(dims) if i not in axes)
    if len(outs[0]) == len(ins[0]):  # keepdims
        kept = tuple((r.factor(1),) if i in axes else d for i, d in enumerate(dims))
    r.outs = [kept]
    return r


def _along(ins, outs, axes, kind: Kind = "whole") -> OpRule:
    """Operands and results of one shape, of a kind along some dims."""
    r = OpRule([], [], strong=True)
    dims = tuple((r.factor(n, kind if i in axes else "map"),) for i, n in enumerate(ins[0]))
    r.ins = [dims if len(s) == len(dims) else () for s in ins]
    r.outs = [dims] * len(outs)
    return r


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(eqn, ins, outs) -> OpRule:
    """Each device runs over its block; the totals of the blocks are gathered, and those before its own combined in."""
    axis = eqn.params["axis"]
    r = _along(ins, outs, (axis,), own_kind(eqn))
    r.linear = (0,) if eqn.primitive.name == "cumsum" else ()

    def sends(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> list[Send]:
        total = (*shapes[0][:axis], 1, *shapes[0][axis + 1 :])
        return [Send("all-gather", r.ins[0][axis], total, eqn.outvars[0].aval.dtype, "the total of every block")]

    r.sends = sends
    return r


@rule("sort")
def sort(eqn, ins, outs) -> OpRule:
    return _along(ins, outs, (eqn.params["dimension"],))


@rule("top_k", "approx_top_k")
def top_k(eqn, ins, outs) -> OpRule:
    """Each device finds the best k of its block, and all of them the best k of these; an approximate search is done whole."""
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(ins[0])
    exact = eqn.primitive.name == "top_k"
    r = OpRule([], [])
    kind = own_kind(eqn) if exact else "whole"
    dims = tuple((r.factor(n, kind if i == axis else "map"),) for i, n in enumerate(ins[0]))
    k = (r.factor(outs[0][axis], "whole"),)
    r.ins = [dims]
    r.outs = [tuple(k if i == axis else d for i, d in enumerate(dims))] * len(outs)
    if exact:
        best = "the best of every block, and where they are"
        _pairs(r, axis, outs[0][axis], eqn.invars[0].aval.dtype, eqn.outvars[1].aval.dtype, best)
    return r


@rule(
    "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window",
    "select_and_gather_add", "select_and_scatter_add",
)  # fmt: skip
def window(eqn, ins, outs) -> OpRule:
    """Dims with a window of 1 run through; along the others devices exchange what windows reach over the edge of a block.

    With a computation of the user's they are whole: there is no value to put outside the array that surely changes nothing.
    """
    p, name = eqn.params, eqn.primitive.name
    back = name == "select_and_scatter_add"  # (source, operand) -> like operand
    small, big = (ins[0], outs[0]) if back else (outs[0], ins[0])
    own = "whole" if name == "reduce_window" else own_kind(eqn)
    r = OpRule([], [])
    narrow, wide = [], []
    moved: list[int] = []
    for i, (m, n) in enumerate(zip(small, big, strict=True)):
        if p["window_dimensions"][i] == 1 and m == n and tuple(p["padding"][i]) == (0, 0):
            f = r.factor(n)
            narrow.append((f,))
            wide.append((f,))
        else:
            moved.append(i)
            narrow.append((r.factor(m, own),))
            wide.append((r.factor(n, own),))
            r.kin.append((wide[-1][0], narrow[-1][0]))
            if own == "own":
                r.links.append(r.kin[-1])
    if back:
        r.ins = [tuple(narrow), tuple(wide), *((),) * (len(ins) - 2)]
        r.outs = [tuple(wide)]
        for i in moved:
            for operand in (0, 1):
                r.reaches[operand, i] = functools.partial(_back_reach, p, i, small[i], big[i], operand)
    else:
        arrays = len(ins) // 2 if name == "reduce_window" else len(ins)
        r.ins = [tuple(wide)] * arrays + [()] * (len(ins) - arrays)
        r.outs = [tuple(narrow)] * len(outs)
        for operand in range(arrays):
            for i in moved:
                r.reaches[operand, i] = functools.partial(_window_reach, p, i, small[i], big[i])
    return exchanged(r, eqn, "what the windows reach over the edge of a block")


def _window_reach(p, i: int, small: int, big: int, parts: int) -> Reach:
    return sliding(
        big // parts, parts, small // parts, p["window_strides"][i], p["window_dimensions"][i], p["window_dilation"][i],
        p["padding"][i][0], p["base_dilation"][i],
    )  # fmt: skip


def _back_reach(p, i: int, small: int, big: int, operand: int, parts: int) -> Reach:
    every, taps, low = p["window_strides"][i], p["window_dimensions"][i], p["padding"][i][0]
    return scattered(big // parts, parts, small // parts, every, taps, low)[operand]


@rule("custom_linear_solve")
def linear_solve(eqn, ins, outs) -> OpRule:
    """Nothing is split; the solutions have the names of the right-hand sides, the last operands."""
    r = OpRule([], [])
    r.ins = [r.factors(s, "whole") for s in ins]
    r.outs = r.ins[len(ins) - len(outs) :]
    return r


@rule("triangular_solve")
def triangular_solve(eqn, ins, outs) -> OpRule:
    """Batch dims and right-hand sides run through; the matrix is whole: ``op(a) x = b``, or ``x op(a) = b``."""
    p = eqn.params
    (*batch, n, _), sides = ins[0], ins[1]
    left = p["left_side"]
    r = OpRule([], [])
    lead = r.factors(batch)
    given, found, each = r.factor(n, "whole"), r.factor(n, "whole"), r.factor(sides[-1 if left else -2])
    # left: rows of op(a) are those of b, columns of op(a) are rows of x; right: the other way round
    rows, columns = (given, found) if left != bool(p["transpose_a"]) else (found, given)
    r.ins = [(*lead, (rows,), (columns,))]
    for f, where in ((given, r.ins), (found, r.outs)):
        where.append((*lead, (f,), (each,)) if left else (*lead, (each,), (f,)))
    return r


@rule("fft")
def fft(eqn, ins, outs) -> OpRule:
    n = len(eqn.params["fft_lengths"])
    return _batched(ins, outs, n)


@rule(
    "cholesky", "eigh", "eig", "lu", "qr", "svd", "householder_product", "geqrf", "schur", "hessenberg",
    "tridiagonal", "tridiagonal_solve", "lu_pivots_to_permutation",
)  # fmt: skip
def matrix(eqn, ins, outs) -> OpRule:
    rank = max(map(len, ins))
    return _batched(ins, outs, 2 if rank >= 2 else rank)


def _batched(ins, outs, core: int) -> OpRule:
    """Leading dims that all operands and results share run through; the last ``core`` ones are whole."""
    r = OpRule([], [])
    rank = len(ins[0]) - core
    lead = tuple((r.factor(n),) for n in ins[0][:rank])

    def dims(shape):
        if tuple(shape[:rank]) == tuple(ins[0][:rank]):
            return lead + tuple((r.factor(n, "whole"),) for n in shape[rank:])
        return r.factors(shape, "whole")

    r.ins, r.outs = [dims(s) for s in ins], [dims(s) for s in outs]
    return r
