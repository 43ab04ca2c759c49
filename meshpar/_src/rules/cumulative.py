"""Cumulative sums, products and extrema along a dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .local_forms import LocalOp
from .mesh_in_shard_map import Send, Shapes, axis_index
from .partial import LINEAR_ALONG, Law, along
from .registry import register
from .rule import OpRule, exchange_kind, one_shape

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": jnp.logaddexp,
}


def cumulative(eqn, ins, outs) -> OpRule:
    """The rule of a cumulative op: each device scans its shard, and adds the totals of the shards before it, which are
    all-gathered: ``[1]`` per device."""
    axis = eqn.params["axis"]
    r = one_shape(ins, outs, exchange_kind(eqn), (axis,))

    def sends(shapes: Shapes, *_: Any) -> list[Send]:
        total = (*shapes[0][:axis], 1, *shapes[0][axis + 1 :])
        return [Send("all-gather", r.ins[0][axis], total, eqn.outvars[0].aval.dtype, "the total of every shard")]

    r.sends = sends
    return r


def _local_cumulative(op: LocalOp, x: Any) -> list[Any]:
    """The scan of this device's shard, combined with the total of the shards before it (after it, in reverse): shape unchanged."""
    axis = op.params["axis"]
    axes = op.axes_of(op.rule.ins[0][axis])
    if not axes:
        return op.run(x)
    if op.name not in ("cummax", "cummin"):
        return [_with_offset(op, axes, x)]

    @jax.custom_jvp
    def extrema(x: Any) -> Any:
        return _with_offset(op, axes, x)

    @extrema.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
        """JVP rule: the tangents of the op on the all-gathered operand, from which each device takes its shard."""
        # the share of the cotangent that each of several equal elements gets depends on the order in which all are compared
        if tangents[0].dtype == jax.dtypes.float0:
            return extrema(*primals), tangents[0]
        x, t = ((lax.all_gather(y, axes, axis=axis, tiled=True),) for y in (*primals, *tangents))
        _, t = jax.jvp(lambda x: op.run(x)[0], x, t)
        n = primals[0].shape[axis]
        return extrema(*primals), lax.dynamic_slice_in_dim(t, axis_index(axes) * n, n, axis)

    return [extrema(x)]


def _with_offset(op: LocalOp, axes: tuple[str, ...], x: Any) -> Any:
    """The scan of a shard that is one of several along ``axes``.

    In 2 shards, the cumulative sum of ``[1, 2, 3, 4]`` scans ``[1, 3]`` and ``[3, 7]``; device 1 adds the total 3 of device 0.
    """
    axis, reverse = op.params["axis"], op.params["reverse"]
    (scanned,) = op.run(x)
    total = lax.slice_in_dim(scanned, 0, 1, axis=axis) if reverse else lax.slice_in_dim(scanned, -1, None, axis=axis)
    totals = lax.all_gather(total, axes, axis=axis, tiled=True)
    (running,) = op.run(totals)
    device, last = axis_index(axes), totals.shape[axis] - 1
    # the first device in order adds nothing, but its slice has to exist
    before = jnp.clip(device + 1 if reverse else device - 1, 0, last)
    offset = lax.dynamic_slice_in_dim(running, before, 1, axis)
    is_first = device == (last if reverse else 0)
    return jnp.where(is_first, scanned, _COMBINE[op.name](*jnp.broadcast_arrays(offset, scanned)))


_LAWS: dict[str, tuple[Law, ...]] = {"cumsum": (LINEAR_ALONG,), "cummax": (along("max"),), "cummin": (along("min"),)}

for _name in _COMBINE:
    register(_name, rule=cumulative, local=_local_cumulative, pinned=True, partial=_LAWS.get(_name, ()))
