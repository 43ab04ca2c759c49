"""Running sums, products and extrema along a dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .local import LocalOp
from .partial import LINEAR_ALONG, Law, along
from .registry import register
from .rule import OpRule, exchange_kind
from .spmd import Send, axis_index

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": jnp.logaddexp,
}


def cumulative(eqn, ins, outs) -> OpRule:
    """Each device scans its block; the totals of the blocks are gathered, and those before its own combined in."""
    axis = eqn.params["axis"]
    r = OpRule([], [], strong=True)
    kind = exchange_kind(eqn)
    dims = tuple((r.factor(n, kind if i == axis else "pass_through"),) for i, n in enumerate(ins[0]))
    r.ins, r.outs = [dims], [dims]

    def sends(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> list[Send]:
        total = (*shapes[0][:axis], 1, *shapes[0][axis + 1 :])
        return [Send("all-gather", r.ins[0][axis], total, eqn.outvars[0].aval.dtype, "the total of every block")]

    r.sends = sends
    return r


def _local_cumulative(at: LocalOp, x: Any) -> list[Any]:
    """Scan the block, and combine in the total of the blocks before (after, in reverse)."""
    axis = at.params["axis"]
    axes = at.of(at.rule.ins[0][axis])
    if not axes:
        return at.run(x)
    if at.op.name not in ("cummax", "cummin"):
        return [_with_offset(at, axes, x)]

    @jax.custom_jvp
    def extrema(x: Any) -> Any:
        return _with_offset(at, axes, x)

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


def _with_offset(at: LocalOp, axes: tuple[str, ...], x: Any) -> Any:
    axis, reverse = at.params["axis"], at.params["reverse"]
    (mine,) = at.run(x)
    total = lax.slice_in_dim(mine, 0, 1, axis=axis) if reverse else lax.slice_in_dim(mine, -1, None, axis=axis)
    totals = lax.all_gather(total, axes, axis=axis, tiled=True)
    (running,) = at.run(totals)
    here, last = axis_index(axes), totals.shape[axis] - 1
    before = jnp.clip(here + 1 if reverse else here - 1, 0, last)
    others = lax.dynamic_slice_in_dim(running, before, 1, axis)
    first = here == (last if reverse else 0)
    return jnp.where(first, mine, _COMBINE[at.op.name](*jnp.broadcast_arrays(others, mine)))


_LAWS: dict[str, tuple[Law, ...]] = {"cumsum": (LINEAR_ALONG,), "cummax": (along("max"),), "cummin": (along("min"),)}

for _name in _COMBINE:
    register(_name, rule=cumulative, local=_local_cumulative, pinned=True, partial=_LAWS.get(_name, ()))
