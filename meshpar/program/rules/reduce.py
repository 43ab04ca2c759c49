"""Reductions, scans along a dim, sorting, windows and linear algebra."""

from __future__ import annotations

from .rule import Kind, OpRule, rule

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


@rule("argmax", "argmin", "reduce_xor")
def reduce_whole(eqn, ins, outs) -> OpRule:
    return _reduce(ins, outs, eqn.params["axes"], "whole")


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


def _along(ins, outs, axes) -> OpRule:
    """Operands and results of one shape, whole along some dims."""
    r = OpRule([], [], strong=True)
    dims = tuple((r.factor(n, "whole" if i in axes else "map"),) for i, n in enumerate(ins[0]))
    r.ins = [dims if len(s) == len(dims) else () for s in ins]
    r.outs = [dims] * len(outs)
    return r


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(eqn, ins, outs) -> OpRule:
    r = _along(ins, outs, (eqn.params["axis"],))
    r.linear = (0,) if eqn.primitive.name == "cumsum" else ()
    return r


@rule("sort")
def sort(eqn, ins, outs) -> OpRule:
    return _along(ins, outs, (eqn.params["dimension"],))


@rule("top_k", "approx_top_k")
def top_k(eqn, ins, outs) -> OpRule:
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(ins[0])
    r = OpRule([], [])
    dims = tuple((r.factor(n, "whole" if i == axis else "map"),) for i, n in enumerate(ins[0]))
    k = (r.factor(outs[0][axis], "whole"),)
    r.ins = [dims]
    r.outs = [tuple(k if i == axis else d for i, d in enumerate(dims))] * len(outs)
    return r


@rule(
    "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window",
    "select_and_gather_add", "select_and_scatter_add",
)  # fmt: skip
def window(eqn, ins, outs) -> OpRule:
    """Dims with a window of 1 run through; along the others only the name passes."""
    p = eqn.params
    small, big = outs[0], ins[0]
    if eqn.primitive.name == "select_and_scatter_add":  # (source, operand) -> like operand
        small, big = ins[0], outs[0]
    r = OpRule([], [])
    narrow, wide = [], []
    for i, (m, n) in enumerate(zip(small, big, strict=True)):
        if p["window_dimensions"][i] == 1 and m == n:
            f = r.factor(n)
            narrow.append((f,))
            wide.append((f,))
        else:
            narrow.append((r.factor(m, "whole"),))
            wide.append((r.factor(n, "whole"),))
            r.kin.append((wide[-1][0], narrow[-1][0]))
    if eqn.primitive.name == "select_and_scatter_add":
        r.ins = [tuple(narrow), tuple(wide), *((),) * (len(ins) - 2)]
        r.outs = [tuple(wide)]
    else:
        r.ins = [tuple(wide) if len(s) == len(big) else () for s in ins]
        r.outs = [tuple(narrow)] * len(outs)
    return r


@rule("custom_linear_solve")
def linear_solve(eqn, ins, outs) -> OpRule:
    """Nothing is split; the solutions have the names of the right-hand sides, the last operands."""
    r = OpRule([], [])
    r.ins = [r.factors(s, "whole") for s in ins]
    r.outs = r.ins[len(ins) - len(outs) :]
    return r


@rule("fft")
def fft(eqn, ins, outs) -> OpRule:
    n = len(eqn.params["fft_lengths"])
    return _batched(ins, outs, n)


@rule(
    "cholesky", "eigh", "eig", "lu", "qr", "svd", "triangular_solve", "householder_product", "geqrf", "schur", "hessenberg",
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
