"""Sorting and selection: sort, top-k, argmax and argmin."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .local_forms import LocalOp, on_shards
from .mesh_in_shard_map import Send, Shapes, axis_index
from .reduce import reduced_dims
from .registry import always, register
from .rule import OpRule, exchange_kind, one_shape

Select = Callable[[Any, int], Sequence[Any]]
"""(array, k) → (its k best values, their indices)."""


def sort(eqn, ins, outs) -> OpRule:
    """The rule of ``sort``: the sorted dim needs replication; the others pass through."""
    return one_shape(ins, outs, "need_replication", (eqn.params["dimension"],))


register("sort", rule=sort, local=on_shards, pinned=True)


def candidates(size: int, k: int, itemsize: int, index_size: int) -> int | None:
    """How many (value, index) pairs each device sends of its ``size`` values, to find the k best; None: all values are fewer bytes.

    Args:
      itemsize, index_size: bytes of a value and of an index.
    """
    k = min(k, size)
    return k if k * (itemsize + index_size) < size * itemsize else None


def _gather_candidates(r: OpRule, axis: int, k: int, dtype, index, why: str) -> None:
    """Set the rule's ``sends``: all-gathers of the k best values of each shard and their indices, or of the shards if that is less.

    A dim that cannot be exchanged needs replication, and sends nothing: of random keys, whose dtype NumPy does not have.

    Args:
      dtype, index: of values and indices.
    """
    (factor,) = r.ins[0][axis]
    if r.kinds[factor] != "permutation":
        return
    dtype, index = np.dtype(dtype), np.dtype(index)

    def sends(shapes: Shapes, *_: Any) -> list[Send]:
        """The two all-gathers (values, indices) of the candidates of a shard of ``shapes[0]``, or one all-gather of all
        its values."""
        (shape,) = shapes
        best = candidates(shape[axis], k, dtype.itemsize, index.itemsize)
        if best is None:
            every = "all values, which are fewer bytes than the best of every shard"
            return [Send("all-gather", (factor,), shape, dtype, every)]
        sent = (*shape[:axis], best, *shape[axis + 1 :])
        return [Send("all-gather", (factor,), sent, d, why) for d in (dtype, index)]

    r.sends = sends


def top_k(eqn, ins, outs) -> OpRule:
    """The rule of ``top_k``: each device selects the k best of its shard, and then of all-gathered candidates;
    ``approx_top_k`` needs replication."""
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(ins[0])
    exact = eqn.primitive.name == "top_k"
    r = OpRule()
    kind = exchange_kind(eqn) if exact else "need_replication"
    dims = r.factors(ins[0], kind, (axis,))
    k = (r.factor(outs[0][axis], "need_replication"),)
    r.ins = [dims]
    r.outs = [tuple(k if i == axis else d for i, d in enumerate(dims))] * len(outs)
    if exact:
        why = "the best values of every shard and their indices"
        _gather_candidates(r, axis, outs[0][axis], eqn.invars[0].aval.dtype, eqn.outvars[1].aval.dtype, why)
    return r


def _best_of_all(op: LocalOp, x: Any, axis: int, k: int, index: Any, select: Select) -> Sequence[Any]:
    """(the k best values of all shards, their indices), from all-gathered candidates or values, as :func:`_gather_candidates` says.

    Of equal values the lowest index is first, as candidates are in that order.

    Args:
      axis: the dim of ``x`` that is searched.
      index: the dtype of indices.
      select: (array, k) → (its k best values along the dim, their indices).
    """
    axes = op.axes_of(op.rule.ins[0][axis])
    if not axes:
        return select(x, k)
    gather = functools.partial(lax.all_gather, axis_name=axes, axis=axis, tiled=True)
    # if k candidates with their indices are more bytes than all values, these are gathered instead
    best = candidates(x.shape[axis], k, x.dtype.itemsize, jnp.dtype(index).itemsize)
    if best is None:
        return select(gather(x), k)
    values, indices = select(x, best)
    indices = gather(indices + lax.convert_element_type(axis_index(axes) * x.shape[axis], index))
    values, chosen = select(gather(values), k)
    return values, jnp.take_along_axis(indices, chosen, axis)


def _local_top_k(op: LocalOp, x: Any) -> list[Any]:
    """The k best of the candidates of all shards."""
    axis = op.params.get("axis", -1) % x.ndim
    index = op.eqn.outvars[1].aval.dtype
    return list(_best_of_all(op, x, axis, op.params["k"], index, lambda x, k: op.run(x, k=k)))


# XLA all-gathers it, also along the batch dim
register("top_k", family="top_k", rule=top_k, local=_local_top_k, manual=always)
register("approx_top_k", family="top_k", rule=top_k, local=on_shards)


def arg_extremum(eqn, ins, outs) -> OpRule:
    """The rule of ``argmax`` and ``argmin``: each device finds the extremum of its shard; values and indices are
    all-gathered, and the first extremum is selected."""
    (axis,) = eqn.params["axes"]
    r = reduced_dims(ins, (axis,), exchange_kind(eqn))
    index, why = np.dtype(eqn.params["index_dtype"]), "the extremum of every shard and its index"
    _gather_candidates(r, axis, 1, eqn.invars[0].aval.dtype, index, why)
    return r


def _local_arg_extremum(op: LocalOp, x: Any) -> list[Any]:
    """The index of the first extremum of all shards, on every device."""
    (axis,) = op.params["axes"]

    def select(x: Any, _k: int) -> tuple[Any, Any]:
        index = jnp.expand_dims(op.run(x)[0], axis)
        return jnp.take_along_axis(x, index, axis), index

    _, index = _best_of_all(op, x, axis, 1, op.params["index_dtype"], select)
    return [jnp.squeeze(index, axis)]


register("argmax", "argmin", rule=arg_extremum, local=_local_arg_extremum, family="reduction", pinned=True)
