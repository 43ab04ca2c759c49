"""Gather and scatter: embedding lookups, their gradients, and indexing at large."""

from __future__ import annotations

from .rule import Kind, OpRule, rule


@rule("gather")
def gather(eqn, ins, outs) -> OpRule:
    """Index dims and whole slices run through; a dim that is looked up may be split: others contribute zeros."""
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
    idx.append((r.factor(indices[-1], "whole"),))
    offset = iter(sorted(dn.offset_dims))
    op: list[tuple[int, ...]] = []
    paired = dict(zip(dn.operand_batching_dims, dn.start_indices_batching_dims, strict=True))
    for d, n in enumerate(operand):
        size = p["slice_sizes"][d]
        if d in paired:
            op.append(idx[paired[d]])
        elif d in dn.collapsed_slice_dims:
            op.append((r.factor(n, "sum" if d in dn.start_index_map else "whole"),))
        else:
            o = next(offset)
            if size == n:
                f = (r.factor(n),)
                op.append(f)
                result[o] = f
            else:
                op.append((r.factor(n, "whole"),))
                result[o] = (r.factor(size, "whole"),)
                r.kin.append((op[-1][0], result[o][0]))
    r.ins = [tuple(op), tuple(idx), *((),) * (len(ins) - 2)]
    r.outs = [tuple(result[d] for d in range(len(out)))]
    return r


_SCATTER: dict[str, Kind] = {
    "scatter": "whole",
    "scatter-add": "sum",
    "scatter_add": "sum",
    "scatter-sub": "sum",
    "scatter_sub": "sum",
    "scatter-mul": "whole",
    "scatter_mul": "whole",
    "scatter-min": "whole",
    "scatter_min": "whole",
    "scatter-max": "whole",
    "scatter_max": "whole",
}


@rule(*_SCATTER)
def scatter(eqn, ins, outs) -> OpRule:
    """Window dims run through; updates are contracted; a dim that is written by index may be split (others are masked)."""
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
        f = (r.factor(n, "map" if i in batched else kind),)
        idx.append(f)
        upd[scatter_dims[i]] = f
    idx.append((r.factor(indices[-1], "whole"),))
    window = iter(sorted(dn.update_window_dims))
    op: list[tuple[int, ...]] = []
    for d, n in enumerate(operand):
        if d in paired:
            op.append(idx[paired[d]])
        elif d in dn.inserted_window_dims:
            op.append((r.factor(n, "map" if kind == "sum" else "whole"),))
        else:
            w = next(window)
            if updates[w] == n:
                f = (r.factor(n),)
                op.append(f)
                upd[w] = f
            else:
                op.append((r.factor(n, "whole"),))
                upd[w] = (r.factor(updates[w], "whole"),)
                r.kin.append((op[-1][0], upd[w][0]))
    r.ins = [tuple(op), tuple(idx), tuple(upd[d] for d in range(len(updates)))]
    r.outs = [tuple(op)]
    return r
