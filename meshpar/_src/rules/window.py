"""Reductions of sliding windows: pooling, and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .halo import ShardWindow, scatter_windows, sliding_window
from .local_forms import LocalOp, on_shards
from .mesh_in_shard_map import axis_index, table_entry
from .reduce import identity
from .registry import always, register
from .rule import OpRule, exchange_kind, with_halo_sends


def window(eqn, ins, outs) -> OpRule:
    """The rule of an op over windows: dims with a window of 1 pass through; along the others devices exchange halos.

    With a user's own reduction these need replication: its identity, the value outside the array, is unknown.
    """
    p, name = eqn.params, eqn.primitive.name
    is_gradient = name == "select_and_scatter_add"  # (source, operand) → as operand
    small, big = (ins[0], outs[0]) if is_gradient else (outs[0], ins[0])
    kind = "need_replication" if name == "reduce_window" else exchange_kind(eqn)
    r = OpRule()
    narrow, wide = [], []
    windowed: list[int] = []
    for i, (m, n) in enumerate(zip(small, big, strict=True)):
        if p["window_dimensions"][i] == 1 and m == n and tuple(p["padding"][i]) == (0, 0):
            f = r.factor(n)
            narrow.append((f,))
            wide.append((f,))
        else:
            windowed.append(i)
            wide.append((r.factor(n, kind),))
            narrow.append((r.follower(wide[-1][0], m, kind),))
    if is_gradient:
        r.ins = [tuple(narrow), tuple(wide), *((),) * (len(ins) - 2)]
        r.outs = [tuple(wide)]
        for i in windowed:
            for operand in (0, 1):
                r.windows[operand, i] = functools.partial(_pool_gradient_window, p, i, small[i], big[i], operand)
    else:
        arrays = len(ins) // 2 if name == "reduce_window" else len(ins)
        r.ins = [tuple(wide)] * arrays + [()] * (len(ins) - arrays)
        r.outs = [tuple(narrow)] * len(outs)
        for operand in range(arrays):
            for i in windowed:
                r.windows[operand, i] = functools.partial(_pool_window, p, i, small[i], big[i])
    return with_halo_sends(r, eqn, "elements of other shards that windows read")


def _pool_window(p, i: int, small: int, big: int, shards: int) -> ShardWindow:
    """The windows of an operand that devices read along dim i; ``small`` and ``big`` are the sizes of result and operand."""
    stride, taps, gap = (p[key][i] for key in ("window_strides", "window_dimensions", "window_dilation"))
    low, dilation = p["padding"][i][0], p["base_dilation"][i]
    return sliding_window(big // shards, shards, small // shards, stride, taps, gap, low, dilation)


def _pool_gradient_window(p, i: int, small: int, big: int, operand: int, shards: int) -> ShardWindow:
    """The windows of an operand (0: the cotangent, of size ``small``; 1: the pooled array) that devices read along dim i."""
    stride, taps, low = p["window_strides"][i], p["window_dimensions"][i], p["padding"][i][0]
    return scatter_windows(big // shards, shards, small // shards, stride, taps, low)[operand]


def _local_pool(op: LocalOp, *xs: Any) -> list[Any]:
    """The reductions of this device's windows; outside the array, operands have the identity of the reduction."""
    name = op.name
    if name == "select_and_gather_add":  # (tangents, operand)
        fills = [0, _never_selected(xs[1].dtype, op)]
    elif name == "reduce_window_sum":
        fills = [0]
    else:
        fills = [identity("max" if name == "reduce_window_max" else "min", xs[0].dtype)]
    split = [dim for dim, _, _ in op.windows(0)]
    return op.run(
        *(op.with_halo(i, x, fill) for i, (x, fill) in enumerate(zip(xs, fills, strict=True))),
        padding=_without(op.params["padding"], split, (0, 0)),
        base_dilation=_without(op.params["base_dilation"], split, 1),
    )


def _local_select_and_scatter_add(op: LocalOp, source: Any, operand: Any) -> list[Any]:
    """The gradient of a pooling: windows that overlap this device's shard select elements; its shard of the result is returned."""
    shard, split = operand.shape, op.windows(1)
    source = op.with_halo(0, source)
    operand = op.with_halo(1, operand, _never_selected(operand.dtype, op))
    (out,) = op.run(source, operand, padding=_without(op.params["padding"], [d for d, _, _ in split], (0, 0)))
    for dim, axes, read in split:
        first = tuple(p * shard[dim] - s for p, s in enumerate(read.starts))
        out = lax.dynamic_slice_in_dim(out, table_entry(first, axis_index(axes)), shard[dim], dim)
    return [out]


def _never_selected(dtype: Any, op: LocalOp) -> np.ndarray:
    """The scalar that the op's selection (``ge`` or ``le``) prefers to no other."""
    return identity("max" if op.params["select_prim"].name == "ge" else "min", dtype)


def _without(values: Sequence[Any], dims: Sequence[int], plain: Any) -> tuple[Any, ...]:
    """A parameter with one entry per dim, with ``plain`` for the dims whose windows have been exchanged, padded and dilated."""
    return tuple(plain if d in dims else v for d, v in enumerate(values))


register("reduce_window", rule=window, local=on_shards, pinned=True)
register("reduce_window_sum", rule=window, local=_local_pool, pinned=True)
register(  # XLA's partitioner aborts on tangents of extrema along a split dim
    "reduce_window_max", "reduce_window_min", "select_and_gather_add", rule=window, local=_local_pool, manual=always
)
register(  # XLA's partitioner all-gathers it, also along the batch dim
    "select_and_scatter_add", rule=window, local=_local_select_and_scatter_add, manual=always
)
