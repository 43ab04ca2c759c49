"""Rewrites of slices, splits, reversals, zero padding and concatenations to indexed views.

Each returns False if the dims that the op changes are not split.

Program: layers that mix each token with the one before (RWKV), ``concatenate([zeros, x[:, :-1]], 1)``, whose gradient splits and
pads; ``rev``: generalized advantage estimation, an associative scan from the last time step to the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...compat.jax import on_host
from ...rules.exchange_along_dim import ANY, ZERO
from ..ir import Value
from .rewriter import Site, rearranged, representation
from .views import DimIndices, IndexedView, PaddedDim

MAX_CONCATENATED = 4
"""Concatenations of parts of more arrays than this are copied."""


def define_indexed(site: Site, k: int, tables: Mapping[int, np.ndarray], composed: bool = False) -> bool:
    """Represent result k by an indexed view of operand 0, i.e. by that array and, for each changed dim, a table of its indices.

    Changed dims that are not split are rearranged before the view is made.

    Returns:
      True if it is represented so; False if no changed dim is split.

    Args:
      tables: for every dim that the op changes, the indices of its elements in the operand.
      composed: whether a view of this op alone is read through its tables; else by the copy of the op.
    """
    view = site.indexed(0)
    mapped = {d: t for d, t in tables.items() if d in view.indices or site.shards(site.op.ins[0], d) > 1}
    others = {d: t for d, t in tables.items() if d not in mapped}
    if not mapped:
        return False
    source, indices = view.source, dict(view.indices)
    for d, table in mapped.items():
        indices[d] = indices[d].take(table) if d in indices else DimIndices(table, site.shards(site.op.ins[0], d))
    if not all(len(dim.table) for dim in indices.values()):
        return False
    if others:
        source = site.emit(lambda x: rearranged(x, others), source)
    return site.define(k, IndexedView(source, indices, (site, k), composed or bool(view.indices)))


def slice_(site: Site) -> bool:
    """Rewrite a slice."""
    p, shape = site.params, site.shape(0)
    limits = list(zip(p["start_indices"], p["limit_indices"], p["strides"] or (1,) * len(shape), strict=True))
    tables = {d: np.arange(*limits[d]) for d, n in enumerate(shape) if limits[d] != (0, n, 1)}
    return define_indexed(site, 0, tables)


def split(site: Site) -> bool:
    """Rewrite a split to one view per part; a split into one part is an identity."""
    if len(site.op.outs) == 1:
        return site.define(0, representation(site.scope, site.op.eqn.invars[0]))
    d = site.params["axis"]
    ends = np.cumsum(site.params["sizes"])
    return all(
        define_indexed(site, k, {d: np.arange(end - n, end)})
        for k, (n, end) in enumerate(zip(site.params["sizes"], ends, strict=True))
    )


def rev(site: Site) -> bool:
    """Rewrite a reversal."""
    tables = {d: np.arange(site.shape(0)[d])[::-1] for d in site.params["dimensions"]}
    return define_indexed(site, 0, tables)


def pad(site: Site) -> bool:
    """Rewrite padding with a literal zero; False for other padding."""
    if not site.is_zero(1):
        return False
    tables = {}
    for d, (low, high, interior) in enumerate(site.params["padding_config"]):
        if (low, high, interior) != (0, 0, 0):
            n = site.shape(0)[d]
            table = np.full(n + max(n - 1, 0) * interior, ZERO)
            table[:: interior + 1] = np.arange(n)
            table = np.concatenate([np.full(max(low, 0), ZERO), table, np.full(max(high, 0), ZERO)])
            tables[d] = table[max(-low, 0) : len(table) - max(-high, 0)]
    return define_indexed(site, 0, tables)


def concatenate(site: Site) -> bool:
    """Rewrite a concatenation of parts of one array and zeros to a view of that array; of several arrays, by :func:`_selected`."""
    d = site.params["dimension"]
    operands: list[IndexedView | int] = []  # an integer: as many zeros
    for k, (atom, value) in enumerate(zip(site.op.eqn.invars, site.op.ins, strict=True)):
        operands.append(atom.aval.shape[d] if site.is_zero(k) else _indexed_along(site, k, d, value))
    views = [v for v in operands if isinstance(v, IndexedView)]
    one_source = all(v.source is views[0].source for v in views)
    if len(views) == len(operands) and not one_source:
        return _selected(site, d, views)
    if not views or not one_source or any(d not in v.indices for v in views):
        return False
    others = [{k: dim.table.tolist() for k, dim in v.indices.items() if k != d} for v in views]
    if any(o != others[0] for o in others):
        return False
    table = np.concatenate([v.indices[d].table if isinstance(v, IndexedView) else np.full(v, ZERO) for v in operands])
    indices = {**views[0].indices, d: DimIndices(table, views[0].indices[d].shards)}
    return site.define(0, IndexedView(views[0].source, indices, (site, 0), True))


def _indexed_along(site: Site, k: int, d: int, value: Value | None) -> IndexedView:
    """Operand k as an indexed view, also along dim d if that is split."""
    view, shards = site.indexed(k), site.shards(value, d)
    if d in view.indices or shards == 1:
        return view
    return IndexedView(view.source, {**view.indices, d: DimIndices(np.arange(site.shape(k)[d]), shards)})


def _selected(site: Site, d: int, views: Sequence[IndexedView]) -> bool:
    """Rewrite a concatenation of parts of several arrays: move each to its position in an array of full size, and select."""
    shards = max((v.indices[d].shards for v in views if d in v.indices), default=1)
    too_many = len(views) > MAX_CONCATENATED
    if shards == 1 or too_many or any(v.indices.keys() - {d} for v in views) or site.has_extended_dtype():
        return False
    if any(on_host(v.source) for v in views):  # masks are in device memory
        return False
    sizes = [v.shape[d] for v in views]
    dim, ends = PaddedDim(sum(sizes), shards), np.cumsum(sizes).tolist()
    moved = []
    for view, size, end in zip(views, sizes, ends, strict=True):
        table = np.full(dim.padded_size, ANY)
        table[end - size : end] = view.indices[d].table if d in view.indices else np.arange(size)
        moved.append(site.emit(lambda x, table=table: rearranged(x, {d: table}), view.source))

    def select(*xs: Any) -> Any:
        out = xs[-1]
        for x, end in reversed(list(zip(xs[:-1], ends, strict=False))):
            out = jnp.where(lax.broadcasted_iota(np.int32, x.shape, d) < end, x, out)
        return out

    return site.define_padded(0, site.emit(select, *moved), {d: dim})
