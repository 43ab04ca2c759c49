"""Rewrites of reshapes that merge dims, and of ops that can be applied before such a reshape.

Each returns False if no operand is a collapsed view (for a reshape: if the result is not one either).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from ..ir import Value
from ..primitives import name_dims_p
from .rewriter import Site
from .views import CollapsedView, collapsed_groups

Groups = tuple[tuple[int, ...], ...]


def reshape(site: Site) -> bool:
    """Rewrite a reshape of a collapsed view, to one of its source, or one that merges dims, to a view.

    It is a view only if shards of the merged dims are not blocks of the result.
    """
    if site.is_literal(0) or len(site.op.ins) > 1 or site.transposes:
        return False
    view, shape = site.view(0), site.out_shape
    if isinstance(view, CollapsedView):
        source = view.source
        return site.define(
            0, source if source.aval.shape == shape else site.emit(lambda x: lax.reshape(x, shape), source)
        )
    if view is not None or site.op.primitive.family == "squeeze":
        return False
    groups = collapsed_groups(site.shape(0), shape)
    if groups is None or not _shards_are_scattered(site, site.op.ins[0], groups):
        return False
    return site.define(0, CollapsedView(site.read(0), groups))


def _shards_are_scattered(site: Site, value: Value | None, groups: Groups) -> bool:
    """Whether a shard of the merged dims is not a block of the result: columns in ``[rows, columns] → [rows·columns]``."""
    start = 0
    for group in groups:
        shards = [site.shards(value, d) for d in range(start, start + len(group))]
        last = max((k for k, count in enumerate(shards) if count > 1), default=0)
        if any(count != n for count, n in zip(shards[:last], group[:last], strict=True)):
            return True
        start += len(group)
    return False


def _read_expanded(site: Site, k: int, groups: Groups) -> Any:
    """The atom of operand k with every dim split into a group of sizes; a dim of size 1 becomes dims of size 1."""
    view, shape = site.view(k), site.shape(k)
    if isinstance(view, CollapsedView) and view.groups == groups:
        return view.source
    if not shape:
        return site.read(k)
    sizes = [n for m, group in zip(shape, groups, strict=True) for n in ((1,) * len(group) if m == 1 else group)]
    return site.emit(lambda x: lax.reshape(x, sizes), site.read(k))


def elementwise(site: Site) -> bool:
    """Rewrite an elementwise op, to one on the view's source and on other operands that are reshaped to its dims."""
    operands = [site.view(k) for k in range(len(site.op.ins)) if site.shape(k) == site.out_shape]
    view = next((v for v in operands if isinstance(v, CollapsedView)), None)
    if view is None or len(site.op.eqn.outvars) != 1 or site.has_extended_dtype():
        return False
    if site.op.eqn.primitive is name_dims_p:  # the names of the merged dims
        return False
    atoms = [_read_expanded(site, k, view.groups) for k in range(len(site.op.ins))]
    return site.define(0, CollapsedView(site.emit_reshaped(atoms, view.source.aval.shape), view.groups))


def reduce(site: Site) -> bool:
    """Rewrite a reduction, to one over the dims that the reduced dims merge."""
    view, axes = site.view(0), site.params["axes"]
    if not isinstance(view, CollapsedView):
        return False
    atom = site.emit_op([view.source], axes=view.source_dims(axes))
    return site.define_collapsed(atom, tuple(g for d, g in enumerate(view.groups) if d not in axes))


def dot_general(site: Site) -> bool:
    """Rewrite a matmul, to one with the dims that its contracted, batch and free dims merge."""
    views = [site.view(k) for k in (0, 1)]
    if not any(isinstance(v, CollapsedView) for v in views):
        return False
    contract, batch = site.params["dimension_numbers"]
    groups: list[list[tuple[int, ...]]] = [
        list(v.groups) if isinstance(v, CollapsedView) else [(n,) for n in site.shape(k)] for k, v in enumerate(views)
    ]
    for pairs in (contract, batch):
        for i, j in zip(*pairs, strict=True):
            a, b = groups[0][i], groups[1][j]
            if a != b and min(len(a), len(b)) > 1:
                return False
            groups[0][i] = groups[1][j] = max(a, b, key=len)
    expanded = [CollapsedView(_read_expanded(site, k, tuple(groups[k])), tuple(groups[k])) for k in (0, 1)]

    def source_dims(dims: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(view.source_dims(some) for view, some in zip(expanded, dims, strict=True))

    atom = site.emit_op([v.source for v in expanded], dimension_numbers=(source_dims(contract), source_dims(batch)))
    free = [[g for d, g in enumerate(groups[k]) if d not in contract[k] and d not in batch[k]] for k in (0, 1)]
    return site.define_collapsed(atom, (*(groups[0][d] for d in batch[0]), *free[0], *free[1]))
