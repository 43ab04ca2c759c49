"""Linear algebra and Fourier transforms: leading dims are batch dims, and dims of matrices or transforms need replication."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from jax import lax

from .local_forms import LocalOp, on_shards
from .mesh_in_shard_map import Grid
from .registry import always, register
from .rule import OpRule, leading


def _batched(eqn, ins, outs, core: int) -> OpRule:
    """The rule of an op on matrices (``core=2``) or vectors (1): leading dims pass through; the last ``core`` dims of the first
    operand (rows and columns; a diagonal, pivots), and the same of other arrays, need replication."""
    return leading(ins, outs, len(ins[0]) - core)


_OF_MATRICES = """cholesky eigh eig lu qr svd householder_product geqrf schur hessenberg tridiagonal geqp3 ormqr
    cholesky_update symmetric_product"""
register(*_OF_MATRICES.split(), rule=partial(_batched, core=2), local=on_shards)
register("tridiagonal_solve", "lu_pivots_to_permutation", rule=partial(_batched, core=1), local=on_shards)


def triangular_solve(eqn, ins, outs) -> OpRule:
    """The rule of ``triangular_solve``, ``op(a) x = b`` or ``x op(a) = b``: batch dims and right-hand sides pass
    through, and dims of the matrix need replication."""
    p = eqn.params
    (*batch, n, _), sides = ins[0], ins[1]
    left = p["left_side"]
    r = OpRule()
    lead = r.factors(batch)
    given, solved = r.factor(n, "need_replication"), r.factor(n, "need_replication")
    each = r.factor(sides[-1 if left else -2])
    # left: the rows of op(a) are the rows of b, its columns the rows of x; right: the reverse
    rows, columns = (given, solved) if left != bool(p["transpose_a"]) else (solved, given)
    r.ins = [(*lead, (rows,), (columns,))]
    for f, arrays in ((given, r.ins), (solved, r.outs)):
        arrays.append((*lead, (f,), (each,)) if left else (*lead, (each,), (f,)))
    return r


register("triangular_solve", rule=triangular_solve, local=on_shards)


def fft(eqn, ins, outs) -> OpRule:
    """Batch dims pass through; transformed dims need replication."""
    return _batched(eqn, ins, outs, len(eqn.params["fft_lengths"]))


def _local_fft(op: LocalOp, x: Any) -> list[Any]:
    """The transform of this device's batch, with one batch dim.

    XLA's CPU compiler may choose a layout for the operand or result that its FFT rejects (if a batch dim is 1, or if a
    reduce-scatter follows). A barrier around a flat array prevents that, since one dim has one layout.
    """
    cpu = isinstance(op.sizes, Grid) and op.sizes.cpu

    def flat(x):
        return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape) if cpu else x

    batch = x.shape[: x.ndim - len(op.params["fft_lengths"])]
    x = flat(x)
    (y,) = op.run(x.reshape(*([math.prod(batch)] * (math.prod(batch) != 1)), *x.shape[len(batch) :]))
    return [flat(y.reshape(*batch, *y.shape[y.ndim - x.ndim + len(batch) :]))]


register("fft", rule=fft, local=_local_fft, manual=always)
