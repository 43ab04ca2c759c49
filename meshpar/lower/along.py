"""Local forms of ops that work along a dim that is split: running sums, top-k, the place of an extremum."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ..rules.reach import candidates
from .exchange import axis_index

if TYPE_CHECKING:
    from .local import Local

_TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": jnp.logaddexp,
}


def cumulative(at: Local, x: Any) -> list[Any]:
    """Run over the block, and combine in the total of the blocks before (after, in reverse)."""
    axis = at.params["axis"]
    axes = at.of(at.rule.ins[0][axis])
    if not axes:
        return at.run(x)
    if at.op.name not in ("cummax", "cummin"):
        return [_cumulative(at, axes, x)]

    @jax.custom_jvp
    def extrema(x: Any) -> Any:
        return _cumulative(at, axes, x)

    @extrema.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
        # how equal elements share a cotangent follows from the order in which all of them are compared
        if tangents[0].dtype == jax.dtypes.float0:
            return extrema(*primals), tangents[0]
        whole = (lax.all_gather(y, axes, axis=axis, tiled=True) for y in (*primals, *tangents))
        x, t = ((y,) for y in whole)
        _, t = jax.jvp(lambda x: at.run(x)[0], x, t)
        n = primals[0].shape[axis]
        return extrema(*primals), lax.dynamic_slice_in_dim(t, axis_index(axes) * n, n, axis)

    return [extrema(x)]


def _cumulative(at: Local, axes: tuple[str, ...], x: Any) -> Any:
    axis, reverse = at.params["axis"], at.params["reverse"]
    (mine,) = at.run(x)
    total = lax.slice_in_dim(mine, 0, 1, axis=axis) if reverse else lax.slice_in_dim(mine, -1, None, axis=axis)
    totals = lax.all_gather(total, axes, axis=axis, tiled=True)
    (running,) = at.run(totals)
    here, last = axis_index(axes), totals.shape[axis] - 1
    before = jnp.clip(here + 1 if reverse else here - 1, 0, last)
    others = lax.dynamic_slice_in_dim(running, before, 1, axis)
    first = here == (last if reverse else 0)
    return jnp.where(first, mine, _TOGETHER[at.op.name](*jnp.broadcast_arrays(others, mine)))


def top_k(at: Local, x: Any) -> list[Any]:
    """The best k of every block, and the best k of these; among equals the lowest index, as candidates stand in its order."""
    p = at.params
    axis, k = p.get("axis", -1) % x.ndim, p["k"]
    axes = at.of(at.rule.ins[0][axis])
    if not axes:
        return at.run(x)
    index = at.op.outs[1].aval.dtype
    best = candidates(x.shape[axis], k, x.dtype.itemsize, jnp.dtype(index).itemsize)
    gather = functools.partial(lax.all_gather, axis_name=axes, axis=axis, tiled=True)
    if best is None:
        return at.run(gather(x))
    values, places = at.run(x, k=best)
    places = places + lax.convert_element_type(axis_index(axes) * x.shape[axis], index)
    values, places = gather(values), gather(places)
    values, chosen = at.run(values)
    return [values, jnp.take_along_axis(places, chosen, axis)]


def extremum(at: Local, x: Any) -> list[Any]:
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


def reduce_xor(at: Local, x: Any) -> list[Any]:
    axes = at.of(tuple(f for a in at.params["axes"] for f in at.rule.ins[0][a]))
    (mine,) = at.run(x)
    if not axes:
        return [mine]
    every = lax.all_gather(mine, axes, axis=0)
    return [functools.reduce(jnp.bitwise_xor, [every[k] for k in range(every.shape[0])])]


FORMS: dict[str, Callable[..., list[Any]]] = {
    **dict.fromkeys(_TOGETHER, cumulative),
    "top_k": top_k,
    "argmax": extremum,
    "argmin": extremum,
    "reduce_xor": reduce_xor,
}
