"""Rewrites of gathers and scatters: by constants along one dim, and of one element per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from ...rules.exchange_along_dim import ZERO
from ...rules.index import LookupDims
from ..ir import Value
from .rewriter import Site
from .slices import define_indexed
from .views import DimIndices, IndexedView


def own_rows(site: Site) -> bool:
    """Rewrite a lookup of one element per row, ``x[arange(n), i]``: the rows become a batch dim, which may be split.

    Program: the cross-entropy ``log_softmax(logits)[jnp.arange(batch), labels]``.
    """
    op, lookup = site.op, LookupDims.of(site.op.eqn)
    array, index = op.ins[:2]
    if array is None or index is None:
        return False
    components, last = index_components(index), len(index.shape) - 1
    batch = dict(zip(lookup.batch, lookup.index_batch, strict=True))
    remaining = list(range(len(components)))
    for c, (d, component) in enumerate(zip(lookup.indexed, components, strict=False)):
        if component is None or d not in lookup.collapsed or len(remaining) == 1:
            continue
        i = site.rewriter.constants.iota_dim(component)
        # dim `last` of the index vectors has their components, and cannot be a batch dim
        if i is None or i == last or i in batch.values() or index.shape[i] != array.shape[d]:
            continue
        written = None if op.primitive.family == "gather" else op.outs[0]
        if max(site.shards(array, d), site.shards(index, i), site.shards(written, d)) > 1:
            remaining.remove(c)
            batch[d] = i
    if len(remaining) == len(components):
        return False
    dims = LookupDims(
        tuple(d for d in lookup.collapsed if d not in batch),
        tuple(lookup.indexed[c] for c in remaining),
        tuple(sorted(batch)),
        tuple(batch[d] for d in sorted(batch)),
        lookup.window,
    )
    atoms = [site.read(k) for k in range(len(op.ins))]

    def without_rows(x: Any) -> Any:
        return lax.concatenate([lax.slice_in_dim(x, c, c + 1, axis=last) for c in remaining], last)

    atoms[1] = site.emit(without_rows, atoms[1])
    numbers = dims.dimension_numbers(op.eqn)
    return site.define(0, site.emit_op(atoms, dimension_numbers=numbers, indices_are_sorted=False))


def index_components(index: Value) -> Sequence[Value | None]:
    """The values that are concatenated to index vectors, one per component; None for each if they are made otherwise."""
    op, last = index.op, len(index.shape) - 1
    if (
        op is not None
        and op.primitive.family == "concatenate"
        and op.eqn.params["dimension"] == last
        and len(op.ins) == index.shape[last]
    ):
        return op.ins
    return [None] * index.shape[last]


def constant_gather(site: Site) -> bool:
    """Rewrite a gather along one dim by constant indices, ``x[np.array([3, 1, 2])]``, to an indexed view.

    Program: a sequence in the zigzag order of balanced causal attention.
    """
    rows = _constant_rows(site)
    return rows is not None and define_indexed(site, 0, dict([rows]), composed=True)


def constant_scatter_add(site: Site) -> bool:
    """Rewrite a scatter-add into zeros at distinct constant indices along one dim to a view.

    Program: the gradient of a sequence in zigzag order.
    """
    rows = _constant_rows(site) if site.is_zero(0) else None
    if rows is None:
        return False
    d, table = rows
    shards, view = site.shards(site.op.outs[0], d), site.indexed(2)
    if len(set(table.tolist())) < len(table) or (shards == 1 and d not in view.indices):
        return False
    inverse = np.full(site.shape(0)[d], ZERO)
    inverse[table] = np.arange(len(table))
    added = view.indices.get(d) or DimIndices(np.arange(len(table)), 1)
    taken = DimIndices(added.take(inverse).table, max(shards, added.shards))
    return site.define(0, IndexedView(view.source, {**view.indices, d: taken}, (site, 0), True))


def _constant_rows(site: Site) -> tuple[int, np.ndarray] | None:
    """(d, constant indices) of a lookup that takes complete rows along dim d of an array, or adds rows to it; None for others.

    The rows are along dim d of the result or of the updates.
    """
    op, dims, shape = site.op, LookupDims.of(site.op.eqn), site.shape(0)
    rows = site.out_shape if op.primitive.family == "gather" else site.shape(2)
    if len(dims.indexed) != 1 or dims.collapsed != dims.indexed or dims.batch or len(rows) != len(shape):
        return None
    (d,) = dims.indexed
    others = tuple(k for k in range(len(shape)) if k != d)
    if dims.window != others or any(rows[k] != shape[k] for k in others):
        return None
    table = site.rewriter.constants.lookup_table(op.ins[1], op.eqn.invars[1], shape[d], site.params["mode"])
    return None if table is None else (d, table)
