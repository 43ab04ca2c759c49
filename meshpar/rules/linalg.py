"""Linear algebra, and Fourier transforms: leading dims are a batch, the matrices (transformed dims) need replication."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from .local import LocalOp, on_shards
from .registry import always, register
from .rule import OpRule
from .spmd import Grid, axis_index


def _batched(ins, outs, core: int) -> OpRule:
    """Leading dims that all operands and results share pass through; the last ``core`` ones need replication."""
    r = OpRule([], [])
    rank = len(ins[0]) - core
    lead = tuple((r.factor(n),) for n in ins[0][:rank])

    def dims(shape):
        if tuple(shape[:rank]) == tuple(ins[0][:rank]):
            return lead + tuple((r.factor(n, "need_replication"),) for n in shape[rank:])
        return r.factors(shape, "need_replication")

    r.ins, r.outs = [dims(s) for s in ins], [dims(s) for s in outs]
    return r


def matrix(eqn, ins, outs) -> OpRule:
    rank = max(map(len, ins))
    return _batched(ins, outs, 2 if rank >= 2 else rank)


register(
    "cholesky", "eigh", "eig", "lu", "qr", "svd", "householder_product", "geqrf", "schur", "hessenberg",
    "tridiagonal", "tridiagonal_solve", "lu_pivots_to_permutation", "geqp3", "ormqr", "cholesky_update",
    rule=matrix, local=on_shards,
)  # fmt: skip


def symmetric_product(eqn, ins, outs) -> OpRule:
    """``alpha a aᵀ + beta c``: batch dims pass through, columns of ``a`` are contracted, the others need replication."""
    *batch, n, k = ins[0]
    r = OpRule([], [])
    lead, (rows, columns) = r.factors(batch), r.factors((n, n), "need_replication")
    r.ins = [(*lead, rows, (r.factor(k, "sum"),)), (*lead, rows, columns)]
    r.outs = [r.ins[1]]
    return r


def _local_symmetric_product(at: LocalOp, a: Any, c: Any) -> list[Any]:
    """A partial product includes ``c`` on one device only."""
    axes = at.of(at.rule.ins[0][-1])
    return at.run(a, jnp.where(axis_index(axes) == 0, c, jnp.zeros((), c.dtype)) if axes else c)


register("symmetric_product", rule=symmetric_product, local=_local_symmetric_product)


def triangular_solve(eqn, ins, outs) -> OpRule:
    """``op(a) x = b`` or ``x op(a) = b``: batch dims and right-hand sides pass through, the dims of the matrix need replication."""
    p = eqn.params
    (*batch, n, _), sides = ins[0], ins[1]
    left = p["left_side"]
    r = OpRule([], [])
    lead = r.factors(batch)
    given, found = r.factor(n, "need_replication"), r.factor(n, "need_replication")
    each = r.factor(sides[-1 if left else -2])
    # left: rows of op(a) are those of b, columns of op(a) are rows of x; right: the other way round
    rows, columns = (given, found) if left != bool(p["transpose_a"]) else (found, given)
    r.ins = [(*lead, (rows,), (columns,))]
    for f, where in ((given, r.ins), (found, r.outs)):
        where.append((*lead, (f,), (each,)) if left else (*lead, (each,), (f,)))
    return r


register("triangular_solve", rule=triangular_solve, local=on_shards)


def linear_solve(eqn, ins, outs) -> OpRule:
    """Everything needs replication; the solutions have the names of the right-hand sides, the last operands."""
    r = OpRule([], [])
    r.ins = [r.factors(s, "need_replication") for s in ins]
    r.outs = r.ins[len(ins) - len(outs) :]
    return r


register("custom_linear_solve", rule=linear_solve)


def fft(eqn, ins, outs) -> OpRule:
    n = len(eqn.params["fft_lengths"])
    return _batched(ins, outs, n)


def _local_fft(at: LocalOp, x: Any) -> list[Any]:
    """XLA's CPU compiler gives the operand of a transform, or of its derivative, an order of dims that it then refuses: where a
    batch dim is 1, and where what follows is scattered. One dim has one order."""
    cpu = isinstance(at.sizes, Grid) and at.sizes.cpu

    def flat(x):
        return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape) if cpu else x

    batch = x.shape[: x.ndim - len(at.params["fft_lengths"])]
    x = flat(x)
    (y,) = at.run(x.reshape(*([math.prod(batch)] * (math.prod(batch) != 1)), *x.shape[len(batch) :]))
    return [flat(y.reshape(*batch, *y.shape[y.ndim - x.ndim + len(batch) :]))]


register("fft", rule=fft, local=_local_fft, manual=always)
