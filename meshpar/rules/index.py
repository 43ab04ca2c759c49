"""Reads and writes at run-time indices: gather, scatter, dynamic slices and updates.

A dim that is indexed may be sharded (factors of kind ``indexed``): every device serves the part of each window that lies in its own
block. A read is masked and leaves a partial result (:mod:`meshpar.rules.owned`); a write is masked and complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..compat.jax import literal_array
from .local import LocalOp
from .owned import neutral, only_where
from .registry import SplitOp, always, register
from .rule import Kind, NameLink, OpRule, indexed_kind
from .spmd import axis_index


def _one_row(eqn: Any) -> bool:
    """Whether a gather or scatter has one index vector: the compiler makes it a slice."""
    return math.prod(eqn.invars[1].aval.shape[:-1]) == 1


def _one_row_of_a_split_array(op: SplitOp) -> bool:
    """MERGED_SLICES of :mod:`meshpar.compat.quirks`."""
    return _one_row(op.eqn) and any(op.axes[f] for factors in op.rule.ins[0] for f in factors)


def gather(eqn, ins, outs) -> OpRule:
    """Batch dims of the indices and full windows pass through; sharding a dim that is indexed leaves a partial result."""
    p = eqn.params
    dn = p["dimension_numbers"]
    operand, indices = ins[0], ins[1]
    (out,) = outs
    indexed = indexed_kind(eqn)
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
            op.append((r.factor(n, indexed if d in dn.start_index_map else "need_replication"),))
        else:
            o = next(offset)
            if size == n:
                f = (r.factor(n),)
                op.append(f)
                result[o] = f
            else:
                op.append((r.factor(n, indexed if d in dn.start_index_map else "need_replication"),))
                result[o] = (r.factor(size, "need_replication"),)
                r.name_links.append(NameLink(op[-1][0], result[o][0]))
    r.ins = [tuple(op), tuple(idx), *((),) * (len(ins) - 2)]
    r.outs = [tuple(result[d] for d in range(len(out)))]
    return r


def _local_gather(at: LocalOp, operand: Any, indices: Any) -> list[Any]:
    """A masked read: each element comes from the device that has it; one that is filled comes from the first device."""
    p, dn = at.params, at.params["dimension_numbers"]
    sizes = at.eqn.params["slice_sizes"]
    sharded = [d for d in dn.start_index_map if at.of(at.rule.ins[0][d]) and _is_indexed(at, d)]
    single = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
    whole = at.eqn.invars[0].aval.shape
    window = [operand.shape[d] if n == whole[d] and d not in single else n for d, n in enumerate(sizes)]
    if not sharded:
        return at.run(operand, indices, slice_sizes=tuple(window))
    mode = p["mode"]
    spread = dict(zip([d for d in range(len(sizes)) if d not in single], sorted(dn.offset_dims), strict=True))
    batch = [d for d in range(len(at.out)) if d not in dn.offset_dims]
    # a broken promise is clamped, as XLA does on one device
    clamp = mode in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    at_index = _Windows.of(at, operand, indices, dn.start_index_map, sharded, batch, spread, window, clamp)
    columns = dict(at_index.columns)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:  # the local gather fills: its index is out of bounds as well
        d = sharded[0]
        columns[d] = jnp.where(at_index.valid, columns[d], operand.shape[d])
    numbers = dn._replace(
        offset_dims=tuple(o for d, o in spread.items() if d not in sharded),
        collapsed_slice_dims=tuple(sorted({*dn.collapsed_slice_dims, *sharded})),
        start_indices_batching_dims=tuple(at_index.place[i] for i in dn.start_indices_batching_dims),
    )
    (out,) = at.run(
        operand, jnp.stack([columns[d] for d in dn.start_index_map], -1), dimension_numbers=numbers,
        slice_sizes=tuple(1 if d in sharded else n for d, n in enumerate(window)), indices_are_sorted=False,
        unique_indices=False,
    )  # fmt: skip
    own = at_index.own
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        first = axis_index(tuple(a for d in sharded for a in at.of(at.rule.ins[0][d]))) == 0
        own = (own & at_index.valid) | (~at_index.valid & first)
    return [only_where(lax.broadcast_in_dim(own, out.shape, at_index.dims), out)]


register(
    "gather", rule=gather, local=_local_gather, pinned=True, manual=_one_row_of_a_split_array, slice=True, lookup=True
)


_SCATTER: dict[str, Kind] = {
    **dict.fromkeys(("scatter-add", "scatter-sub"), "sum"),
    **dict.fromkeys(("scatter", "scatter-mul", "scatter-min", "scatter-max"), "need_replication"),
}
"""Kind of the factors of the updates. Of order-dependent or idempotent scatters every device needs all updates."""


def scatter(eqn, ins, outs) -> OpRule:
    """Full windows pass through; the updates of a sum are contracted; a dim that is indexed may be sharded: writes are masked."""
    kind, indexed = _SCATTER[eqn.primitive.name], indexed_kind(eqn)
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
            op.append((r.factor(n, indexed if d in dn.scatter_dims_to_operand_dims else "need_replication"),))
        else:
            w = next(window)
            if updates[w] == n:
                f = (r.factor(n),)
                op.append(f)
                upd[w] = f
            else:
                op.append((r.factor(n, indexed if d in dn.scatter_dims_to_operand_dims else "need_replication"),))
                upd[w] = (r.factor(updates[w], "need_replication"),)
                r.name_links.append(NameLink(op[-1][0], upd[w][0]))
    r.ins = [tuple(op), tuple(idx), tuple(upd[d] for d in range(len(updates)))]
    r.outs = [tuple(op)]
    return r


def _local_scatter(at: LocalOp, operand: Any, indices: Any, updates: Any) -> list[Any]:
    """Every device writes those of its updates that lie in its block; a partial result has the operand on one device only."""
    p, dn = at.params, at.params["dimension_numbers"]
    partial = tuple(a for f, k in enumerate(at.rule.kinds) if k == "sum" for a in at.of((f,)))
    if partial and not is_broadcast_zero(at.op.ins[0]):
        operand = only_where(axis_index(partial) == 0, operand)
    into = dn.scatter_dims_to_operand_dims
    sharded = [d for d in into if at.of(at.rule.ins[0][d]) and _is_indexed(at, d)]
    if not sharded:
        return at.run(operand, indices, updates)
    spread = dict(zip([d for d in range(operand.ndim) if d not in (*dn.inserted_window_dims, *dn.operand_batching_dims)],
                      sorted(dn.update_window_dims), strict=True))  # fmt: skip
    window = [updates.shape[spread[d]] if d in spread else 1 for d in range(operand.ndim)]
    batch = [d for d in range(updates.ndim) if d not in dn.update_window_dims]
    clamp = p["mode"] == lax.GatherScatterMode.CLIP
    at_index = _Windows.of(at, operand, indices, into, sharded, batch, spread, window, clamp)
    numbers = dn._replace(
        update_window_dims=tuple(u for d, u in spread.items() if d not in sharded),
        inserted_window_dims=tuple(sorted({*dn.inserted_window_dims, *sharded})),
        scatter_indices_batching_dims=tuple(at_index.place[i] for i in dn.scatter_indices_batching_dims),
    )
    columns, write = dict(at_index.columns), at_index.own & at_index.valid
    if math.prod(write.shape) == 1:  # a start beyond the operand: MERGED_SLICES of meshpar.compat.quirks
        index = jnp.stack([columns[d] for d in into], -1)
        full = lax.broadcast_in_dim(write, updates.shape, at_index.dims)
        kept = _unchanged(at.op.name, operand, index, updates, numbers)
        updates = jnp.where(full, updates, kept)
        mode = lax.GatherScatterMode.CLIP
    else:  # masked writes are out of bounds, and distinct
        d = sharded[0]
        number = lax.iota(columns[d].dtype, math.prod(write.shape)).reshape(write.shape) if p["unique_indices"] else 0
        columns[d] = jnp.where(write, columns[d], operand.shape[d] + number)
        index, mode = jnp.stack([columns[d] for d in into], -1), lax.GatherScatterMode.FILL_OR_DROP
    return at.run(operand, index, updates, dimension_numbers=numbers, indices_are_sorted=False, mode=mode)


def _unchanged(name: str, operand: Any, index: Any, updates: Any, numbers: Any) -> Any:
    """The updates of a scatter that change nothing."""
    if name == "scatter-add":
        return neutral(updates.dtype)
    if name in ("scatter-sub", "scatter-mul"):
        return np.asarray(name == "scatter-mul", updates.dtype)
    read = lax.GatherDimensionNumbers(
        numbers.update_window_dims, numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims,
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims,
    )  # fmt: skip
    sizes = [1] * operand.ndim
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [d for d in range(operand.ndim) if d not in single]
    for d, u in zip(windows, numbers.update_window_dims, strict=True):
        sizes[d] = updates.shape[u]
    return lax.gather(operand, index, read, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def is_broadcast_zero(value: Any) -> bool:
    """Whether a value of a program is a broadcast of a literal zero, as ``jnp.zeros`` makes."""
    op = getattr(value, "op", None)
    if op is None or not op.primitive.broadcast or op.ins[0] is not None:
        return False
    return not np.any(literal_array(op.eqn.invars[0]))


for _name in _SCATTER:
    register(
        _name,
        rule=scatter,
        local=_local_scatter,
        pinned=True,
        manual=_one_row_of_a_split_array,
        lookup=True,
        scatter=True,
        adds_rows=_SCATTER[_name] == "sum",
    )


def _is_indexed(at: LocalOp, d: int) -> bool:
    """Whether a dim of the operand is indexed, and not a full window or a batch dim."""
    return all(at.rule.kinds[f] == "indexed" for f in at.rule.ins[0][d])


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a gather or scatter on one device, those along sharded dims taken apart into single elements.

    Windows of 3 elements at 2 indices along a sharded dim are 2 x 3 single elements: that dim of the updates (or of the result)
    becomes a batch dim, and the index vectors have it too.

    Attributes:
      dims: the batch dims, as dims of the updates or the result.
      place: of every batch dim of the original index vectors, its position among ``dims``.
      columns: dim of the operand → its component of the index vectors: within this device's block (clamped to it) where the dim is
        sharded, else the window's start in the array.
      own: which elements lie in this device's block.
      valid: which of the original windows lie within the array; all do where starts are clamped.
    """

    dims: tuple[int, ...]
    place: tuple[int, ...]
    columns: dict[int, Any]
    own: Any
    valid: Any

    @classmethod
    def of(
        cls, at: LocalOp, operand: Any, indices: Any, into: Sequence[int], sharded: Sequence[int], batch: Sequence[int],
        spread: dict[int, int], window: Sequence[int], clamp: bool,
    ) -> _Windows:  # fmt: skip
        """The windows at some index vectors.

        Args:
          operand, indices: shards.
          into: the dims that the components of an index vector index; sharded: those of them that are sharded.
          batch: the dims of the updates (or result) that are the batch dims of the indices.
          spread: dim of the operand → dim of the updates (or result), for the dims of a window that are not dropped.
          window: the size of a window along every dim of the operand; a full window is that of the shard.
          clamp: starts are clamped so that windows lie within the array; else windows that do not are not valid.
        """
        apart = {d: spread[d] for d in sharded if d in spread}
        dims = tuple(sorted((*batch, *apart.values())))
        place = tuple(dims.index(b) for b in batch)
        sizes = dict(zip(batch, indices.shape[:-1], strict=True)) | {u: window[d] for d, u in apart.items()}
        shape = tuple(sizes[u] for u in dims)
        whole = at.eqn.invars[0].aval.shape
        dtype = index_dtype(whole)
        columns: dict[int, Any] = {}
        own = valid = jnp.ones(shape, bool)
        for c, d in enumerate(into):
            last = (whole if d in sharded else operand.shape)[d] - window[d]
            start = as_index(indices[..., c], last + 1, dtype)
            if clamp:
                start = lax.clamp(dtype.type(0), start, dtype.type(last))
            start = lax.broadcast_in_dim(start, shape, place)
            valid = valid & (start >= 0) & (start <= last)
            if d in sharded:
                if d in apart:
                    start = start + lax.broadcasted_iota(dtype, shape, dims.index(apart[d]))
                size = operand.shape[d]
                start = start - lax.convert_element_type(at.offset(at.rule.ins[0][d], size), dtype)
                own = own & (start >= 0) & (start < size)
                start = lax.clamp(dtype.type(0), start, dtype.type(size - 1))
            columns[d] = start
        return cls(dims, place, columns, own, valid)


def index_dtype(shape: Sequence[int]) -> np.dtype:
    """The dtype in which the local forms calculate indices into an array of this shape."""
    return np.dtype(np.int32 if max(shape, default=0) < np.iinfo(np.int32).max else np.int64)


def as_index(i: Any, size: int, dtype: np.dtype) -> Any:
    """Indices of any integer type as a wide signed type; those below 0 become -1, those of at least ``size`` become ``size``."""
    info = jnp.iinfo(i.dtype)
    least, most = max(-1, int(info.min)), min(size, int(info.max))
    return lax.clamp(np.asarray(least, i.dtype), i, np.asarray(most, i.dtype)).astype(dtype)


# -- dynamic slices and updates


def dynamic_slice(eqn, ins, outs) -> OpRule:
    """Full dims pass through; the others are indexed."""
    r = _slice_rule(eqn, ins[0], outs[0], 1)
    r.ins, r.outs = [r.ins[0], *((),) * (len(ins) - 1)], [r.ins[1]]
    return r


def dynamic_update_slice(eqn, ins, outs) -> OpRule:
    """Dims that the update fills pass through; the others are indexed."""
    r = _slice_rule(eqn, ins[0], ins[1], 2)
    r.ins, r.outs = [*r.ins, *((),) * (len(ins) - 2)], [r.ins[0]]
    return r


def _slice_rule(eqn: Any, whole: Sequence[int], part: Sequence[int], first: int) -> OpRule:
    """A rule with an array and a window of it as operands; the index of dim d is operand ``first + d``."""
    r, kind = OpRule([], []), indexed_kind(eqn)
    array, window = [], []
    for n, m in zip(whole, part, strict=True):
        f = r.factor(n, "pass_through" if n == m else kind)
        array.append((f,))
        window.append((f,) if n == m else (r.factor(m, "need_replication"),))
        if n != m and m > 1:
            r.name_links.append(NameLink(f, window[-1][0]))
    r.ins = [tuple(array), tuple(window)]
    return r


@dataclass(frozen=True, slots=True)
class _Window:
    """The window of a dynamic slice or update on one device, along every dim.

    Attributes:
      starts: where the local window starts in this device's block; clamped here, since XLA clamps the start of a slice of a slice
        with the size of the second only (MERGED_SLICES of :mod:`meshpar.compat.quirks`).
      sizes: of the local window: at most the size of the block.
      shifts: dim → by how many elements the local window starts behind the whole one, where the dim is sharded and indexed.
    """

    starts: tuple[Any, ...]
    sizes: tuple[int, ...]
    shifts: dict[int, Any]

    @classmethod
    def of(cls, at: LocalOp, x: Any, starts: Sequence[Any], window: Sequence[int]) -> _Window:
        """The local window of a window of these sizes (of a shard, where it is full)."""
        whole = at.eqn.invars[0].aval.shape
        dtype = index_dtype(whole)
        places, sizes, shifts = [], [], {}
        for d, (i, n, m) in enumerate(zip(starts, x.shape, window, strict=True)):
            sharded = bool(at.of(at.rule.ins[0][d])) and _is_indexed(at, d)
            last = (whole[d] if sharded else n) - m
            start = lax.clamp(dtype.type(0), as_index(i, last, dtype), dtype.type(last))
            if sharded:
                begin = start - lax.convert_element_type(at.offset(at.rule.ins[0][d], n), dtype)
                m = min(m, n)
                start = lax.clamp(dtype.type(0), begin, dtype.type(n - m))
                shifts[d] = start - begin
            places.append(start)
            sizes.append(m)
        return cls(tuple(places), tuple(sizes), shifts)

    def mask(self, shape: Sequence[int], window: Sequence[int], sign: int) -> Any:
        """Which elements of an array of this shape are in the window of the other, ``sign`` * shift elements further on."""
        own: Any = np.True_
        for d, shift in self.shifts.items():
            place = lax.broadcasted_iota(shift.dtype, shape, d) + sign * shift
            own = own & (place >= 0) & (place < window[d])
        return own


def _local_dynamic_slice(at: LocalOp, x: Any, *starts: Any) -> list[Any]:
    """A masked read: the elements of the window that lie in this device's block."""
    window = at.out
    by = _Window.of(at, x, starts, window)
    (out,) = at.run(x, *by.starts, slice_sizes=by.sizes)
    if not by.shifts:
        return [out]
    for d, shift in by.shifts.items():
        out = _rolled(out, d, -shift, window[d])
    return [only_where(by.mask(window, by.sizes, -1), out)]


def _local_dynamic_update_slice(at: LocalOp, x: Any, update: Any, *starts: Any) -> list[Any]:
    """A masked write: the part of the window that lies in this device's block is replaced, the rest of the block is kept."""
    window = update.shape
    by = _Window.of(at, x, starts, window)
    if by.shifts:
        for d, shift in by.shifts.items():
            update = _rolled(update, d, shift, by.sizes[d])
        update = jnp.where(by.mask(by.sizes, window, 1), update, lax.dynamic_slice(x, by.starts, by.sizes))
    return at.run(x, update, *by.starts)


def _rolled(x: Any, d: int, shift: Any, size: int) -> Any:
    """``size`` elements of an array along a dim: element i is ``x[i + shift]`` where that exists, else any element."""
    have = x.shape[d]
    n = -(-max(have, size) // have) * have
    if n == 1:
        return x
    x = lax.concatenate([x] * -(-(n + size) // have), d)
    start = lax.rem(shift, shift.dtype.type(n))
    return lax.dynamic_slice_in_dim(x, jnp.where(start < 0, start + n, start), size, d)


register("dynamic_slice", rule=dynamic_slice, local=_local_dynamic_slice, fusible=True, manual=always, slice=True)
register("dynamic_update_slice", rule=dynamic_update_slice, local=_local_dynamic_update_slice, pinned=True)
