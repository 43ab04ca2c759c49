"""Sorting and selection: sort, top-k, the place of an extremum."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .local import LocalOp, on_shards
from .reduce import reduced_dims
from .registry import always, register
from .rule import OpRule, exchange_kind
from .spmd import Send, axis_index


def sort(eqn, ins, outs) -> OpRule:
    """The dim that is sorted needs replication."""
    r = OpRule([], [], strong=True)
    axis = eqn.params["dimension"]
    dims = tuple((r.factor(n, "need_replication" if i == axis else "pass_through"),) for i, n in enumerate(ins[0]))
    r.ins, r.outs = [dims] * len(ins), [dims] * len(outs)
    return r


register("sort", rule=sort, local=on_shards, pinned=True)


def candidates(size: int, k: int, itemsize: int, index_size: int) -> int | None:
    """How many (value, index) pairs every device sends of ``size`` values to find k; None: sending all values is cheaper."""
    k = min(k, size)
    return k if k * (itemsize + index_size) < size * itemsize else None


def _pairs(r: OpRule, axis: int, k: int, dtype, index, why: str) -> None:
    """Send the k best values of every block with their indices, or the block where that is less."""
    (factor,) = r.ins[0][axis]
    dtype, index = np.dtype(dtype) if r.kinds[factor] == "permutation" else None, np.dtype(index)

    def sends(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> list[Send]:
        (shape,) = shapes
        best = candidates(shape[axis], k, np.dtype(dtype).itemsize, index.itemsize)
        if best is None:
            return [Send("all-gather", (factor,), shape, dtype, "all values: the best of every block would be more")]
        piece = (*shape[:axis], best, *shape[axis + 1 :])
        return [Send("all-gather", (factor,), piece, d, why) for d in (dtype, index)]

    r.sends = sends


def top_k(eqn, ins, outs) -> OpRule:
    """Each device finds the best k of its block, and all of them the best k of these; approximate: the dim needs replication."""
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(ins[0])
    exact = eqn.primitive.name == "top_k"
    r = OpRule([], [])
    kind = exchange_kind(eqn) if exact else "need_replication"
    dims = tuple((r.factor(n, kind if i == axis else "pass_through"),) for i, n in enumerate(ins[0]))
    k = (r.factor(outs[0][axis], "need_replication"),)
    r.ins = [dims]
    r.outs = [tuple(k if i == axis else d for i, d in enumerate(dims))] * len(outs)
    if exact:
        best = "the best of every block, and where they are"
        _pairs(r, axis, outs[0][axis], eqn.invars[0].aval.dtype, eqn.outvars[1].aval.dtype, best)
    return r


def _local_top_k(at: LocalOp, x: Any) -> list[Any]:
    """The best k of every block, and the best k of these; among equals the lowest index, as candidates stand in its order."""
    p = at.params
    axis, k = p.get("axis", -1) % x.ndim, p["k"]
    axes = at.of(at.rule.ins[0][axis])
    if not axes:
        return at.run(x)
    index = at.eqn.outvars[1].aval.dtype
    best = candidates(x.shape[axis], k, x.dtype.itemsize, jnp.dtype(index).itemsize)
    gather = functools.partial(lax.all_gather, axis_name=axes, axis=axis, tiled=True)
    if best is None:
        return at.run(gather(x))
    values, places = at.run(x, k=best)
    places = places + lax.convert_element_type(axis_index(axes) * x.shape[axis], index)
    values, places = gather(values), gather(places)
    values, chosen = at.run(values)
    return [values, jnp.take_along_axis(places, chosen, axis)]


register("top_k", rule=top_k, local=_local_top_k, manual=always)  # XLA's partitioner gathers, also along the batch
register("approx_top_k", rule=top_k, local=on_shards)


def arg_extremum(eqn, ins, outs) -> OpRule:
    """Each device finds the extremum of its block; the pairs of value and index are gathered, and the first extremum wins."""
    (axis,) = eqn.params["axes"]
    r = reduced_dims(ins, outs, (axis,), exchange_kind(eqn))
    found = np.dtype(eqn.params["index_dtype"])
    _pairs(r, axis, 1, eqn.invars[0].aval.dtype, found, "the extremum of every block, and where it is")
    return r


def _local_arg_extremum(at: LocalOp, x: Any) -> list[Any]:
    """``argmax``, ``argmin``: the extremum of every block, and the first that no other exceeds."""
    p = at.params
    (axis,) = p["axes"]
    axes = at.of(at.rule.ins[0][axis])
    if not axes:
        return at.run(x)
    gather = functools.partial(lax.all_gather, axis_name=axes, axis=axis, tiled=True)
    if candidates(x.shape[axis], 1, x.dtype.itemsize, jnp.dtype(p["index_dtype"]).itemsize) is None:
        return at.run(gather(x))
    (place,) = at.run(x)
    place = jnp.expand_dims(place, axis)
    values = gather(jnp.take_along_axis(x, place, axis))
    places = gather(place + lax.convert_element_type(axis_index(axes) * x.shape[axis], place.dtype))
    (chosen,) = at.run(values)
    return [jnp.squeeze(jnp.take_along_axis(places, jnp.expand_dims(chosen, axis), axis), axis)]


register("argmax", "argmin", rule=arg_extremum, local=_local_arg_extremum, reduction=True, pinned=True)
