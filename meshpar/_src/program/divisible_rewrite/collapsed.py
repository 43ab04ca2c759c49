"""Rewrites of reshapes that merge dims, and of matmuls that can be applied before such a reshape.

``jnp.vdot`` and solvers (L-BFGS, conjugate gradients) contract arrays that they ravel first; a dense layer may flatten batch and
sequence. Any other op reads the reshaped array.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax import lax

from ..ir import Value
from .rewriter import Site
from .views import CollapsedView, collapsed_groups

Groups = tuple[tuple[int, ...], ...]


def reshape(site: Site) -> bool:
    """Rewrite a reshape of a collapsed view, to one of its source, or one that merges dims, to a view.

    It is a view only if shards of the merged dims are not blocks of the result; else False.
    """
    if len(site.op.ins) > 1 or site.transposes:
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


def dot_general(site: Site) -> bool:
    """Rewrite a matmul of a collapsed view, to one with the dims that its contracted, batch and free dims merge; else False."""
    if site.op.primitive.family != "dot":
        return False
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

    def expanded(k: int) -> CollapsedView:
        """Operand k with every dim split into its group."""
        view, own = views[k], tuple(groups[k])
        if isinstance(view, CollapsedView) and view.groups == own:
            return view
        return CollapsedView(
            site.emit(lambda x: lax.reshape(x, [n for group in own for n in group]), site.read(k)), own
        )

    sources = [expanded(0), expanded(1)]

    def source_dims(dims: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(view.source_dims(some) for view, some in zip(sources, dims, strict=True))

    atom = site.emit_op([v.source for v in sources], dimension_numbers=(source_dims(contract), source_dims(batch)))
    free = [[g for d, g in enumerate(groups[k]) if d not in contract[k] and d not in batch[k]] for k in (0, 1)]
    merged = (*(groups[0][d] for d in batch[0]), *free[0], *free[1])
    return site.define(0, atom if all(len(g) == 1 for g in merged) else CollapsedView(atom, merged))
