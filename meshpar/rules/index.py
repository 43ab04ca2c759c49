"""Gather and scatter: embedding lookups, their gradients, and indexing at large.

A dim that is looked up may be split: every device looks up what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .local import LocalOp, on_shards
from .registry import SplitOp, register
from .rule import Kind, NameLink, OpRule
from .spmd import axis_index


def _one_row(eqn: Any) -> bool:
    """Whether a gather or scatter has one index vector: the compiler makes it a slice."""
    return math.prod(eqn.invars[1].aval.shape[:-1]) == 1


def _one_row_of_a_split_array(op: SplitOp) -> bool:
    """MERGED_SLICES of :mod:`meshpar.compat.quirks`."""
    return _one_row(op.eqn) and any(op.axes[f] for factors in op.rule.ins[0] for f in factors)


def gather(eqn, ins, outs) -> OpRule:
    """Index dims and full slices pass through; a dim that is looked up may be split, and leaves a partial sum."""
    p = eqn.params
    dn = p["dimension_numbers"]
    operand, indices = ins[0], ins[1]
    (out,) = outs
    r = OpRule([], [])
    batch = [d for d in range(len(out)) if d not in dn.offset_dims]
    result: dict[int, tuple[int, ...]] = {}
    idx: list[tuple[int, ...]] = []
    for i, n in enumerate(indices[:-1]):
        f = (r.factor(n),)
        idx.append(f)
        result[batch[i]] = f
    idx.append((r.factor(indices[-1], "need_replication"),))
    offset = iter(sorted(dn.offset_dims))
    op: list[tuple[int, ...]] = []
    paired = dict(zip(dn.operand_batching_dims, dn.start_indices_batching_dims, strict=True))
    for d, n in enumerate(operand):
        size = p["slice_sizes"][d]
        if d in paired:
            op.append(idx[paired[d]])
        elif d in dn.collapsed_slice_dims:
            op.append((r.factor(n, "sum" if d in dn.start_index_map else "need_replication"),))
        else:
            o = next(offset)
            if size == n:
                f = (r.factor(n),)
                op.append(f)
                result[o] = f
            else:
                op.append((r.factor(n, "need_replication"),))
                result[o] = (r.factor(size, "need_replication"),)
                r.name_links.append(NameLink(op[-1][0], result[o][0]))
    r.ins = [tuple(op), tuple(idx), *((),) * (len(ins) - 2)]
    r.outs = [tuple(result[d] for d in range(len(out)))]
    return r


def _local_gather(at: LocalOp, operand: Any, indices: Any) -> list[Any]:
    """A masked lookup: a partial sum, 0 where another device holds the element."""
    p = at.params
    dn, mode = p["dimension_numbers"], p["mode"]
    window = tuple(
        operand.shape[d] if at.of(f) and d not in dn.collapsed_slice_dims and d not in dn.operand_batching_dims else n
        for d, (n, f) in enumerate(zip(p["slice_sizes"], at.rule.ins[0], strict=True))
    )
    split = _looked_up(at, dn.start_index_map)
    if not split:
        return at.run(operand, indices, slice_sizes=window)
    # a promise that is broken is clipped, as the compiler does on one device
    clip = mode in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    local, mine, inside = _local_index(at, indices, split, operand.shape, clip)
    column = jnp.arange(local.shape[-1])
    for c, d in split:
        local = jnp.where(column == c, jnp.clip(local, 0, operand.shape[d] - 1), local)
    (out,) = at.run(operand, local.astype(indices.dtype), slice_sizes=window, indices_are_sorted=False)
    at_index = [d for d in range(out.ndim) if d not in dn.offset_dims]

    def spread(mask: Any) -> Any:
        return lax.broadcast_in_dim(mask, out.shape, at_index)

    out = jnp.where(spread(mine), out, jnp.zeros((), out.dtype))
    if mode == lax.GatherScatterMode.FILL_OR_DROP:  # nobody holds it: one device fills it
        first = axis_index(tuple(a for _, d in split for a in at.of(at.rule.ins[0][d]))) == 0
        out = jnp.where(spread(~inside & first), _fill(p["fill_value"], out.dtype), out)
    return [out]


def _fill(value: Any, dtype: Any) -> Any:
    if value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            value = np.nan
        elif jnp.issubdtype(dtype, jnp.signedinteger):
            value = jnp.iinfo(dtype).min
        else:
            value = True if dtype == np.bool_ else jnp.iinfo(dtype).max
    return jnp.asarray(value, dtype)


register("gather", rule=gather, local=_local_gather, pinned=True, manual=_one_row_of_a_split_array)


_SCATTER: dict[str, Kind] = {
    **dict.fromkeys(("scatter-add", "scatter-sub"), "sum"),
    **dict.fromkeys(("scatter", "scatter-mul", "scatter-min", "scatter-max"), "need_replication"),
}
"""Kind of the factors of the updates. Of order-dependent or idempotent scatters every device needs all updates."""


def scatter(eqn, ins, outs) -> OpRule:
    """Window dims pass through; updates are contracted; a dim that is written by index may be split (others are masked)."""
    kind = _SCATTER[eqn.primitive.name]
    p = eqn.params
    dn = p["dimension_numbers"]
    operand, indices, updates = ins
    r = OpRule([], [])
    paired = dict(zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims, strict=True))
    batched = set(paired.values())
    scatter_dims = [d for d in range(len(updates)) if d not in dn.update_window_dims]
    upd: dict[int, tuple[int, ...]] = {}
    idx: list[tuple[int, ...]] = []
    for i, n in enumerate(indices[:-1]):
        f = (r.factor(n, "pass_through" if i in batched else kind),)
        idx.append(f)
        upd[scatter_dims[i]] = f
    idx.append((r.factor(indices[-1], "need_replication"),))
    window = iter(sorted(dn.update_window_dims))
    op: list[tuple[int, ...]] = []
    for d, n in enumerate(operand):
        if d in paired:
            op.append(idx[paired[d]])
        elif d in dn.inserted_window_dims:
            op.append((r.factor(n, "pass_through" if kind == "sum" else "need_replication"),))
        else:
            w = next(window)
            if updates[w] == n:
                f = (r.factor(n),)
                op.append(f)
                upd[w] = f
            else:
                op.append((r.factor(n, "need_replication"),))
                upd[w] = (r.factor(updates[w], "need_replication"),)
                r.name_links.append(NameLink(op[-1][0], upd[w][0]))
    r.ins = [tuple(op), tuple(idx), tuple(upd[d] for d in range(len(updates)))]
    r.outs = [tuple(op)]
    return r


def _local_scatter_sum(at: LocalOp, operand: Any, indices: Any, updates: Any) -> list[Any]:
    """Every device writes the updates it has into what it holds; a partial result includes the operand on one device only."""
    dn, mode = at.params["dimension_numbers"], at.params["mode"]
    partial = tuple(a for f, k in enumerate(at.rule.kinds) if k == "sum" for a in at.of((f,)))
    if partial and not _zeros(at.op.ins[0]):
        operand = jnp.where(axis_index(partial) == 0, operand, jnp.zeros((), operand.dtype))
    split = _looked_up(at, dn.scatter_dims_to_operand_dims)
    if not split:
        return at.run(operand, indices, updates)
    local, mine, _ = _local_index(at, indices, split, operand.shape, mode == lax.GatherScatterMode.CLIP)
    if _one_row(at.eqn):  # a start beyond the operand: MERGED_SLICES of meshpar.compat.quirks
        at_index = [d for d in range(updates.ndim) if d not in dn.update_window_dims]
        updates = jnp.where(lax.broadcast_in_dim(mine, updates.shape, at_index), updates, jnp.zeros((), updates.dtype))
        local = jnp.where(mine[..., None], local, 0)
    else:
        column = jnp.arange(local.shape[-1])
        for c, d in split:  # dropped
            local = jnp.where((column == c) & ~mine[..., None], operand.shape[d], local)
    return at.run(operand, local, updates, mode=lax.GatherScatterMode.FILL_OR_DROP)


def _zeros(value: Any) -> bool:
    """Whether an operand is zeros that the program makes."""
    op = getattr(value, "op", None)
    if op is None or op.name != "broadcast_in_dim" or op.ins[0] is not None:
        return False
    return not np.any(op.eqn.invars[0].val)


for _name, _kind in _SCATTER.items():
    if _kind == "sum":
        register(_name, rule=scatter, local=_local_scatter_sum, pinned=True, manual=_one_row_of_a_split_array)
    else:
        register(_name, rule=scatter, local=on_shards, pinned=True)


def _looked_up(at: LocalOp, into: Sequence[int]) -> list[tuple[int, int]]:
    """(component of the index vector, dim of the operand) where that dim is split and taken one by one."""
    window = at.params.get("slice_sizes")
    taken = at.params["dimension_numbers"]
    single = taken.collapsed_slice_dims if window is not None else taken.inserted_window_dims
    return [(c, d) for c, d in enumerate(into) if d in single and at.of(at.rule.ins[0][d])]


def _local_index(
    at: LocalOp, indices: Any, split: list[tuple[int, int]], local: Sequence[int], clip: bool
) -> tuple[Any, Any, Any]:
    """(the index vectors within this device's shard, which of them lie in it, which lie in the whole array)."""
    whole = at.eqn.invars[0].aval.shape
    indices = indices if jnp.issubdtype(indices.dtype, jnp.signedinteger) else indices.astype(np.int64 if (
        indices.dtype.itemsize == 8) else np.int32)  # fmt: skip
    mine = inside = np.True_
    columns = [indices[..., c] for c in range(indices.shape[-1])]
    for c, d in split:
        i = columns[c]
        if clip:
            i = jnp.clip(i, 0, whole[d] - 1)
        known = (i >= 0) & (i < whole[d])
        i = i - lax.convert_element_type(at.offset(at.rule.ins[0][d], local[d]), i.dtype)
        here = (i >= 0) & (i < local[d])
        mine, inside = mine & here, inside & known
        columns[c] = i
    return jnp.stack(columns, -1), mine, inside
