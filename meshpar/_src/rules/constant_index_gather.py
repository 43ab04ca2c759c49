"""``rearrange``: selects elements along one dim by a constant table, as rolls, permutations and slices of any size do.

Traced programs do not contain this primitive. :mod:`program.divisible_rewrite` makes it from slices, concatenations and
lookups by constants along a split dim: one table composes several of them, and shows which elements every device needs of the
others.

Example: ``jnp.roll(x, 1)`` of 8 elements has the table ``[7, 0, 1, 2, 3, 4, 5, 6]``. In 4 shards, device p needs element ``2p -
1`` of the device before it: one collective permute of one element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .exchange_along_dim import Runs, exchange, exchanged, runs_of, table_of, taken
from .local_forms import LocalOp
from .mesh_in_shard_map import Axes, Send, Shapes
from .registry import register
from .rule import OpRule, exchange_kind

rearrange_p = Primitive("rearrange")


def rearrange(x: Any, dim: int, table: Sequence[int] | np.ndarray) -> Any:
    """``x[..., table, ...]`` along a dim, with zeros for entries ``ZERO``, and any values for ``ANY`` (:mod:`.exchange`)."""
    return rearrange_p.bind(x, dimension=dim, runs=runs_of(table))


def _impl(x: Any, *, dimension: int, runs: Runs) -> Any:
    return taken([x], dimension, table_of(runs).tolist())


def _abstract(x: Any, *, dimension: int, runs: Runs) -> Any:
    return x.update(shape=(*x.shape[:dimension], sum(n for _, _, n in runs), *x.shape[dimension + 1 :]))


def _transpose(ct: Any, x: Any, **table: Any) -> tuple[Any, ...]:
    return jax.linear_transpose(functools.partial(_impl, **table), x.aval)(ct)


def _batch(args: Any, dims: Any, *, dimension: int, runs: Runs) -> Any:
    (x,), (d,) = args, dims
    return rearrange_p.bind(x, dimension=dimension + (d <= dimension), runs=runs), d


rearrange_p.def_impl(_impl)
rearrange_p.def_abstract_eval(_abstract)
mlir.register_lowering(rearrange_p, mlir.lower_fun(_impl, multiple_results=False))
ad.deflinear2(rearrange_p, _transpose)
batching.primitive_batchers[rearrange_p] = _batch


def rearranged(eqn, ins, outs) -> OpRule:
    """The rule of ``rearrange``: other dims pass through; along the dim of the table, ``[n] → [m]`` split over the same
    axes, devices exchange elements."""
    dim, runs, kind = eqn.params["dimension"], eqn.params["runs"], exchange_kind(eqn)
    r = OpRule()
    operand = r.factors(ins[0], kind, (dim,))
    (source,) = operand[dim]
    made = r.follower(source, outs[0][dim], kind)
    r.ins, r.outs = [operand], [(*operand[:dim], (made,), *operand[dim + 1 :])]

    def sends(shapes: Shapes, axes: Axes, sizes: Mapping[str, int]) -> list[Send]:
        by = exchange(ins[0][dim], math.prod(sizes[a] for a in axes[source]), runs)
        return by.sends(shapes[0], dim, source, eqn.invars[0].aval.dtype, "elements of other shards")

    r.sends = sends
    return r


def _local_rearrange(op: LocalOp, x: Any) -> list[Any]:
    """The shard of a rearranged array, ``[n / shards] → [m / shards]`` along ``params["dimension"]``; ``[shard]``.

    ``params["runs"]`` gives the index in the operand of each of the m elements. Elements of other shards are received by collective
    permutes, or selected from the all-gathered array.
    """
    dim, runs = op.params["dimension"], op.params["runs"]
    factors = op.rule.ins[0][dim]
    axes = op.axes_of(factors)
    if not axes:
        return [taken([x], dim, table_of(runs).tolist())]
    size = op.eqn.invars[0].aval.shape[dim]
    return [exchanged(x, dim, axes, exchange(size, op.shard_count(factors), runs))]


register("rearrange", rule=rearranged, local=_local_rearrange, fusible=True, pinned=True)
