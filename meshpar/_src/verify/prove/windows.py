"""Sliding windows along dims that are sharded or in fragments: whether those of a device are windows of the full array.

The elements that each window reads are evaluated, on the device through the table of its fragments, and in the function's op as
written: the same elements in the same order, and outside of the array the value that does not change the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .device_values import orders
from .non_block_shards import common_fill, element_table, in_mesh_order, with_table
from .relation import Context, Rel, require
from .term import Term

PADDING = ("padding", "lhs_dilation", "base_dilation")
"""Params that differ between an op of fragments and the op as written, along dims in fragments."""


def reads(p: Mapping[str, Any], k: int, n: int, count: int, taps: int) -> np.ndarray:
    """int[count, taps]: the elements that windows read along dim ``k`` of the params; -1: none."""
    gap = p.get("rhs_dilation", p.get("window_dilation", (1,) * len(p["padding"])))[k]
    dilation = p.get("lhs_dilation", p.get("base_dilation", (1,) * len(p["padding"])))[k]
    at = np.arange(count)[:, None] * p["window_strides"][k] + np.arange(taps) * gap - p["padding"][k][0]
    index, rest = np.divmod(at, dilation)
    return np.where((rest == 0) & (index >= 0) & (index < n), index, -1)


def on_devices(
    ctx: Context, x: Rel, d: int, axes: tuple[str, ...], at: np.ndarray, neutral: Sequence[str]
) -> np.ndarray:
    """int[devices along axes, windows, taps]: the elements of the array that windows of fragments read; -1: none.

    Args:
      at: what they read of the fragments.
      neutral: the values that an element outside of the array may have.
    """
    fill, origin = common_fill(None, d, x)
    fits = origin is None and (fill is None or fill[1] in neutral)
    require(fits, "windows of values that are not neutral outside of the array")
    return np.where(at < 0, -1, element_table(ctx, x, d, axes)[:, at, 0])


def candidates(
    ctx: Context, name: str, p: Mapping[str, Any], args: Sequence[Term], dims: Sequence[int]
) -> Iterator[tuple[Term, Any]]:
    """(term, params) of the ops of the function as written that differ from one only by the padding of dims."""
    for term in ctx.terms.uses.get((name, *(t.number for t in args)), ()):
        found = dict(term.params)
        differing = {key for key, value in p.items() if value != found.get(key)}
        along = {k for key in differing & set(PADDING) for k, n in enumerate(p[key]) if n != found[key][k]}
        if ctx.terms.is_known(term) and differing <= set(PADDING) and along <= set(dims):
            yield term, found


def block_of_windows(
    ctx: Context,
    x: Rel,
    d: int,
    local: np.ndarray,
    full: np.ndarray,
    neutral: Sequence[str],
    taps: np.ndarray | None = None,
) -> tuple[str, ...] | None:
    """The axes over which the windows of devices are blocks of all windows; None if they are not.

    Args:
      local, full: what the windows of a device, and all windows, read.
      taps: int[devices along the axes of ``x``, taps]: the taps that each device has of every window.
    """
    axes, (n, m) = in_mesh_order(ctx, x.spec[d]), local.shape
    found = on_devices(ctx, x, d, axes, local, neutral)
    taps = np.arange(m)[None] if taps is None else taps
    for order in orders(axes):
        if n * ctx.size(order) == len(full):
            wanted = full[(n * ctx.index(order, axes))[:, None, None] + np.arange(n)[:, None], taps[:, None]]
            if (wanted == found).all():
                return order
    return None


def scattered(
    ctx: Context, source: Rel, x: Rel, term: Term, d: int, local: np.ndarray, full: np.ndarray, neutral: Sequence[str]
) -> Rel:
    """What windows of a device add to its elements of ``x``: the value of the array at those elements of which the device has
    exactly the windows of the array; ``empty`` at the others."""
    axes = in_mesh_order(ctx, source.spec[d], x.spec[d])
    found, table = on_devices(ctx, x, d, axes, local, neutral), element_table(ctx, x, d, axes).copy()
    of = on_devices(ctx, source, d, axes, np.arange(source.shape[d])[:, None], ("0.0",))[..., 0]
    for k, windows in enumerate(of):
        same = (windows >= 0) & (full[windows] == found[k]).all(1)
        index = table[k, :, 0]
        once = len(set(windows[windows >= 0])) == (windows >= 0).sum()
        once &= len(set(index[index >= 0])) == (index >= 0).sum()
        counts = [
            (index[:, None, None] == reads).sum((1, 2)) for reads in (full, found[k][windows >= 0], found[k][same])
        ]
        right = (counts[0] == counts[1]) & (counts[1] == counts[2]) & (index >= 0) & once
        table[k, :, 0] = np.where(right, index, -1)
    return with_table(ctx, replace(x.placed({d: ()}), term=term), d, axes, table, ("empty", None))
