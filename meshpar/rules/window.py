"""Windows that slide over dims: pooling and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .halo import ShardWindow, scatter_windows, sliding_window
from .local import LocalOp, on_shards
from .reduce import identity
from .registry import always, register
from .rule import NameLink, OpRule, exchange_kind, with_halo_sends
from .spmd import axis_index, table_entry


def window(eqn, ins, outs) -> OpRule:
    """Dims with a window of 1 pass through; along the others devices exchange halos.

    With a computation of the user's they need replication: no value is known that changes nothing outside the array.
    """
    p, name = eqn.params, eqn.primitive.name
    back = name == "select_and_scatter_add"  # (source, operand) -> like operand
    small, big = (ins[0], outs[0]) if back else (outs[0], ins[0])
    kind = "need_replication" if name == "reduce_window" else exchange_kind(eqn)
    r = OpRule([], [])
    narrow, wide = [], []
    moved: list[int] = []
    for i, (m, n) in enumerate(zip(small, big, strict=True)):
        if p["window_dimensions"][i] == 1 and m == n and tuple(p["padding"][i]) == (0, 0):
            f = r.factor(n)
            narrow.append((f,))
            wide.append((f,))
        else:
            moved.append(i)
            narrow.append((r.factor(m, kind),))
            wide.append((r.factor(n, kind),))
            r.name_links.append(NameLink(wide[-1][0], narrow[-1][0]))
            if kind == "permutation":
                r.sharded_like.append((wide[-1][0], narrow[-1][0]))
    if back:
        r.ins = [tuple(narrow), tuple(wide), *((),) * (len(ins) - 2)]
        r.outs = [tuple(wide)]
        for i in moved:
            for operand in (0, 1):
                r.windows[operand, i] = functools.partial(_pool_gradient_window, p, i, small[i], big[i], operand)
    else:
        arrays = len(ins) // 2 if name == "reduce_window" else len(ins)
        r.ins = [tuple(wide)] * arrays + [()] * (len(ins) - arrays)
        r.outs = [tuple(narrow)] * len(outs)
        for operand in range(arrays):
            for i in moved:
                r.windows[operand, i] = functools.partial(_pool_window, p, i, small[i], big[i])
    return with_halo_sends(r, eqn, "what the windows reach over the edge of a block")


def _pool_window(p, i: int, small: int, big: int, parts: int) -> ShardWindow:
    return sliding_window(
        big // parts, parts, small // parts, p["window_strides"][i], p["window_dimensions"][i], p["window_dilation"][i],
        p["padding"][i][0], p["base_dilation"][i],
    )  # fmt: skip


def _pool_gradient_window(p, i: int, small: int, big: int, operand: int, parts: int) -> ShardWindow:
    every, taps, low = p["window_strides"][i], p["window_dimensions"][i], p["padding"][i][0]
    return scatter_windows(big // parts, parts, small // parts, every, taps, low)[operand]


def _local_pool(at: LocalOp, *xs: Any) -> list[Any]:
    """Sums and extrema of windows: halos, and outside the array the value that changes nothing."""
    name = at.op.name
    if name == "select_and_gather_add":  # (tangents, operand)
        fills = [0, _never_selected(xs[1].dtype, at)]
    elif name == "reduce_window_sum":
        fills = [0]
    else:
        fills = [identity("max" if name == "reduce_window_max" else "min", xs[0].dtype)]
    split = [dim for dim, _, _ in at.windows(0)]
    return at.run(
        *(at.with_halo(i, x, fill) for i, (x, fill) in enumerate(zip(xs, fills, strict=True))),
        padding=_without(at.params["padding"], split, (0, 0)),
        base_dilation=_without(at.params["base_dilation"], split, 1),
    )


def _local_select_and_scatter_add(at: LocalOp, source: Any, operand: Any) -> list[Any]:
    """The gradient of a pooling: every window that touches this device's block selects again; the block is kept."""
    blocks, split = operand.shape, at.windows(1)
    source = at.with_halo(0, source)
    operand = at.with_halo(1, operand, _never_selected(operand.dtype, at))
    (out,) = at.run(source, operand, padding=_without(at.params["padding"], [d for d, _, _ in split], (0, 0)))
    for dim, axes, by in split:
        first = tuple(p * blocks[dim] - s for p, s in enumerate(by.exchange.starts))
        out = lax.dynamic_slice_in_dim(out, table_entry(first, axis_index(axes)), blocks[dim], dim)
    return [out]


def _never_selected(dtype: Any, at: LocalOp) -> np.ndarray:
    """The scalar that the op's selection (``ge`` or ``le``) prefers to no other."""
    return identity("max" if at.params["select_prim"].name == "ge" else "min", dtype)


def _without(values: Sequence[Any], dims: Sequence[int], plain: Any) -> tuple[Any, ...]:
    """A parameter by dim, with a plain value along the dims whose windows have been fetched."""
    return tuple(plain if d in dims else v for d, v in enumerate(values))


register("reduce_window", rule=window, local=on_shards, pinned=True)
register("reduce_window_sum", rule=window, local=_local_pool, pinned=True)
register(  # XLA's partitioner aborts at the tangents of extrema whose windows it splits
    "reduce_window_max",
    "reduce_window_min",
    "select_and_gather_add",
    rule=window,
    local=_local_pool,
    manual=always,
)
register(  # which XLA's partitioner gathers, also along the batch
    "select_and_scatter_add", rule=window, local=_local_select_and_scatter_add, manual=always
)
