"""Reads and writes at run-time indices: gather, scatter, dynamic slices and updates.

A dim that is indexed may be split (factors of kind ``indexed``): every device serves the part of each window in its own shard. A
read is masked, and its result partial (:mod:`rules.one_owner`); a write is masked, and its result complete. No collective is
made.

Example: ``x[i]`` of 8 elements in 2 shards, with ``i = [6, 1]``. Device 0 reads ``[-0.0, x[1]]``, device 1 ``[x[6], -0.0]``; the
plan adds these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..compat.jax import aval_of, literal_array
from .local_forms import LocalOp, on_shards
from .mesh_in_shard_map import Factors, axis_index
from .one_owner import is_positive_zero, neutral, only_where
from .partial import WRITES_INTO_ZEROS
from .registry import SplitOp, always, register
from .rule import Kind, NameLink, OpRule, indexed_kind


def _one_index_of_a_split_array(op: SplitOp) -> bool:
    """Whether a gather or scatter of a split array has one index vector: XLA makes it a slice (quirk ``MERGED_SLICES``)."""
    return _has_one_index(op.eqn) and any(op.axes[f] for factors in op.rule.ins[0] for f in factors)


def _has_one_index(eqn: JaxprEqn) -> bool:
    return math.prod(aval_of(eqn.invars[1]).shape[:-1]) == 1


# -- gather and scatter


@dataclass(frozen=True, slots=True)
class LookupDims:
    """The dimension numbers of a gather or scatter, under common names.

    The *window array* is the result of a gather, and the updates of a scatter.

    Attributes:
      collapsed: dims of the array of which an index selects one element.
      indexed: for every component of an index vector, the dim of the array that it indexes.
      batch: dims of the array that are batch dims of the lookup.
      index_batch: for each of these, the dim of the index vectors.
      window: the dims of the window array that are dims of a window, in the order of the array's dims.
    """

    collapsed: tuple[int, ...]
    indexed: tuple[int, ...]
    batch: tuple[int, ...]
    index_batch: tuple[int, ...]
    window: tuple[int, ...]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> LookupDims:
        """The dims of an equation."""
        dn = eqn.params["dimension_numbers"]
        return cls(*(tuple(getattr(dn, field)) for field in _fields(eqn)))

    def dimension_numbers(self, eqn: JaxprEqn) -> Any:
        """The dimension numbers of the equation, with these dims in place of its own."""
        values = (self.collapsed, self.indexed, self.batch, self.index_batch, self.window)
        return eqn.params["dimension_numbers"]._replace(**dict(zip(_fields(eqn), values, strict=True)))

    def window_dims(self, rank: int) -> dict[int, int]:
        """Dim of the array → dim of the window array, for the dims of a window that are not collapsed."""
        single = (*self.collapsed, *self.batch)
        return dict(zip([d for d in range(rank) if d not in single], sorted(self.window), strict=True))

    def batch_dims(self, rank: int) -> list[int]:
        """The dims of the window array that are the leading dims of the index vectors."""
        return [d for d in range(rank) if d not in self.window]


_OF_GATHER = (
    "collapsed_slice_dims start_index_map operand_batching_dims start_indices_batching_dims offset_dims".split()
)
_OF_SCATTER = (
    "inserted_window_dims scatter_dims_to_operand_dims operand_batching_dims scatter_indices_batching_dims update_window_dims"
).split()


def _fields(eqn: JaxprEqn) -> Sequence[str]:
    """The fields of the equation's dimension numbers, in the order of :class:`LookupDims`."""
    return _OF_GATHER if eqn.primitive.name == "gather" else _OF_SCATTER


def _lookup_rule(
    eqn: JaxprEqn, array: Sequence[int], indices: Sequence[int], window: Sequence[int], kind: Kind
) -> OpRule:
    """A rule with three operands: the array, the index vectors and the window array.

    Batch dims and dims of full windows pass through, other dims of the array are indexed, and the leading dims of the index
    vectors are of ``kind``. In ``array[v, e], indices[n, 1], window[n, e]``, v is indexed, n of that kind, and e passes through.
    """
    dims, indexed = LookupDims.of(eqn), indexed_kind(eqn)
    r = OpRule()
    window_factors: dict[int, Factors] = {}
    index_factors: list[Factors] = []
    for i, (n, w) in enumerate(zip(indices[:-1], dims.batch_dims(len(window)), strict=True)):
        window_factors[w] = (r.factor(n, "pass_through" if i in dims.index_batch else kind),)
        index_factors.append(window_factors[w])
    index_factors.append((r.factor(indices[-1], "need_replication"),))
    batch = dict(zip(dims.batch, dims.index_batch, strict=True))
    window_dims = dims.window_dims(len(array))
    array_factors: list[Factors] = []
    for d, n in enumerate(array):
        w = window_dims.get(d)
        if d in batch:
            array_factors.append(index_factors[batch[d]])
        elif w is not None and window[w] == n:
            window_factors[w] = (r.factor(n),)
            array_factors.append(window_factors[w])
        else:
            array_factors.append((r.factor(n, indexed if d in dims.indexed else "need_replication"),))
            if w is not None:
                window_factors[w] = (r.factor(window[w], "need_replication"),)
                r.name_links.append(NameLink(array_factors[-1][0], window_factors[w][0]))
    r.ins = [tuple(array_factors), tuple(index_factors), tuple(window_factors[w] for w in range(len(window)))]
    return r


def gather(eqn, ins, outs) -> OpRule:
    """The rule of ``gather``: batch dims of the indices and full windows pass through; the result is partial over split
    dims that are indexed."""
    r = _lookup_rule(eqn, ins[0], ins[1], outs[0], "pass_through")
    return r.maps([*r.ins[:2], *((),) * (len(ins) - 2)], [r.ins[2]])


def _split_indexed_dims(op: LocalOp, dims: LookupDims) -> list[int]:
    """The dims of the array that are indexed and split."""
    return [d for d in dims.indexed if op.axes_of(op.rule.ins[0][d]) and _is_indexed(op, d)]


def _local_gather(op: LocalOp, operand: Any, indices: Any) -> list[Any]:
    """A masked read: a device reads the elements in its shard; device 0 contributes the fill value of an index out of bounds."""
    dims, mode = LookupDims.of(op.eqn), op.params["mode"]
    sizes, shape = op.eqn.params["slice_sizes"], op.eqn.invars[0].aval.shape
    window_dims, split = dims.window_dims(operand.ndim), _split_indexed_dims(op, dims)
    window = [operand.shape[d] if n == shape[d] and d in window_dims else n for d, n in enumerate(sizes)]
    if not split:
        return op.run(operand, indices, slice_sizes=tuple(window))
    # PROMISE_IN_BOUNDS: indices out of bounds are clamped, as by XLA on one device
    clamp = mode in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    local = _LocalWindows.of(op, operand, indices, window, len(op.out_shape), clamp)
    columns, own = dict(local.columns), local.own
    if mode == lax.GatherScatterMode.FILL_OR_DROP:  # out of bounds for the local gather too, which fills the element
        columns[split[0]] = jnp.where(local.valid, columns[split[0]], operand.shape[split[0]])
        is_first = axis_index(tuple(a for d in split for a in op.axes_of(op.rule.ins[0][d]))) == 0
        own = (own & local.valid) | (~local.valid & is_first)
    index = jnp.stack([columns[d] for d in dims.indexed], -1)
    sizes = tuple(1 if d in split else n for d, n in enumerate(window))
    changed = {"slice_sizes": sizes, "indices_are_sorted": False, "unique_indices": False}
    (out,) = op.run(operand, index, dimension_numbers=local.dims.dimension_numbers(op.eqn), **changed)
    return [only_where(lax.broadcast_in_dim(own, out.shape, local.batch_dims), out)]


register("gather", rule=gather, local=_local_gather, pinned=True, manual=_one_index_of_a_split_array, family="gather")


_SCATTER_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("scatter-add", "scatter-sub"), "sum"),
    **dict.fromkeys(("scatter", "scatter-mul", "scatter-min", "scatter-max"), "need_replication"),
}
"""By primitive, the kind of the factors of updates. All devices need all updates if these are ordered or idempotent."""

LOOKUPS = ("gather", *_SCATTER_KINDS)
"""The primitives with :class:`LookupDims`."""


def scatter(eqn, ins, outs) -> OpRule:
    """The rule of ``scatter``: full windows pass through; added updates are contracted; split dims that are indexed are
    written by masked writes."""
    array, indices, updates = ins
    r = _lookup_rule(eqn, array, indices, updates, _SCATTER_KINDS[eqn.primitive.name])
    r.outs = [r.ins[0]]
    return r


def _local_scatter(op: LocalOp, operand: Any, indices: Any, updates: Any) -> list[Any]:
    """A masked write: a device writes the updates in its shard; if they are split, only device 0 adds to the operand."""
    p, dims = op.params, LookupDims.of(op.eqn)
    partial = tuple(a for f, k in enumerate(op.rule.kinds) if k == "sum" for a in op.axes_of((f,)))
    if partial and not is_broadcast_zero(op.operands[0]):
        operand = only_where(axis_index(partial) == 0, operand)
    window_dims, split = dims.window_dims(operand.ndim), _split_indexed_dims(op, dims)
    if not split:
        return op.run(operand, indices, updates)
    window = [updates.shape[window_dims[d]] if d in window_dims else 1 for d in range(operand.ndim)]
    clamp = p["mode"] == lax.GatherScatterMode.CLIP
    local = _LocalWindows.of(op, operand, indices, window, updates.ndim, clamp)
    columns, write = dict(local.columns), local.own & local.valid
    one = math.prod(write.shape) == 1  # quirk MERGED_SLICES: no index may be beyond the operand
    applied = applies_function(op.eqn)
    if not one:  # indices of masked writes are out of bounds, and distinct
        d = split[0]
        number = lax.iota(columns[d].dtype, math.prod(write.shape)).reshape(write.shape) if p["unique_indices"] else 0
        columns[d] = jnp.where(write, columns[d], operand.shape[d] + number)
    index = jnp.stack([columns[d] for d in dims.indexed], -1)
    if one and not applied:  # the elements that are present are written
        mask = lax.broadcast_in_dim(write, updates.shape, local.batch_dims)
        updates = jnp.where(mask, updates, _updates_without_effect(op.name, operand, index, updates, local.dims))
    mode = lax.GatherScatterMode.CLIP if one else lax.GatherScatterMode.FILL_OR_DROP
    numbers = local.dims.dimension_numbers(op.eqn)
    (out,) = op.run(operand, index, updates, dimension_numbers=numbers, indices_are_sorted=False, mode=mode)
    return [jnp.where(write.reshape(()), out, operand) if one and applied else out]


def applies_function(eqn: JaxprEqn) -> bool:
    """Whether a scatter writes a user's function of the elements, as ``x.at[i].apply(f)``: no update is without effect."""
    return eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None


def _updates_without_effect(name: str, operand: Any, index: Any, updates: Any, dims: LookupDims) -> Any:
    """Updates with which a scatter at one index vector leaves its operand unchanged."""
    if name == "scatter-add":
        return neutral(updates.dtype)
    if name in ("scatter-sub", "scatter-mul"):
        return np.asarray(name == "scatter-mul", updates.dtype)
    numbers = lax.GatherDimensionNumbers(dims.window, dims.collapsed, dims.indexed, dims.batch, dims.index_batch)
    window_dims = dims.window_dims(operand.ndim)
    sizes = [updates.shape[window_dims[d]] if d in window_dims else 1 for d in range(operand.ndim)]
    return lax.gather(operand, index, numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def is_broadcast_zero(value: Any) -> bool:
    """Whether a value of a program is a broadcast of a literal zero, as ``jnp.zeros`` makes; not of a negative zero."""
    op = getattr(value, "op", None)
    if op is None or op.primitive.family != "broadcast" or op.ins[0] is not None:
        return False
    return is_positive_zero(literal_array(op.eqn.invars[0]))


_ADDS_A_WINDOW = replace(WRITES_INTO_ZEROS, operands=(2, 3), holds=_has_one_index)
"""The gradient of ``jnp.take(x, i, axis)``."""

_WRITES: dict[str, Any] = {"family": "scatter", "pinned": True, "manual": _one_index_of_a_split_array}
for _name in _SCATTER_KINDS:
    _laws = (_ADDS_A_WINDOW,) if _name == "scatter-add" else ()
    register(_name, rule=scatter, local=_local_scatter, partial=_laws, **_WRITES)


def _is_indexed(op: LocalOp, d: int) -> bool:
    """Whether dim d of the array is indexed, and not a batch dim or the dim of a full window."""
    return all(op.rule.kinds[f] == "indexed" for f in op.rule.ins[0][d])


@dataclass(frozen=True, slots=True)
class _LocalWindows:
    """The windows of a gather or scatter on one device, split into single elements along the dims that are indexed and split.

    2 windows of 3 elements along such a dim are 2 x 3 windows of one element: that dim of the window array becomes a batch dim,
    which the index vectors get as well.

    Attributes:
      dims: the dims of the local op.
      batch_dims: the dims of the window array that are batch dims of the local op.
      columns: dim of the array → its component of the local index vectors: an index in this device's shard (clamped to it) if the
        dim is split, else the start of the window in the array.
      own: which elements are in this device's shard.
      valid: which of the program's windows are within the array: all if starts are clamped.
    """

    dims: LookupDims
    batch_dims: tuple[int, ...]
    columns: dict[int, Any]
    own: Any
    valid: Any

    @classmethod
    def of(
        cls, op: LocalOp, operand: Any, indices: Any, window: Sequence[int], rank: int, clamp: bool
    ) -> _LocalWindows:
        """The windows at this device's index vectors.

        Args:
          operand, indices: shards.
          window: the size of a window along every dim of the array; the shard's size for a full window.
          rank: of the window array.
          clamp: whether starts are clamped so that windows are within the array; else windows that are not are invalid.
        """
        dims = LookupDims.of(op.eqn)
        split, window_dims, batch = _split_indexed_dims(op, dims), dims.window_dims(operand.ndim), dims.batch_dims(rank)
        to_batch = {d: window_dims[d] for d in split if d in window_dims}
        batch_dims = tuple(sorted((*batch, *to_batch.values())))
        positions = tuple(batch_dims.index(b) for b in batch)
        sizes = dict(zip(batch, indices.shape[:-1], strict=True)) | {w: window[d] for d, w in to_batch.items()}
        shape = tuple(sizes[w] for w in batch_dims)
        array_shape = op.eqn.invars[0].aval.shape
        dtype = index_dtype(array_shape)
        columns: dict[int, Any] = {}
        own = valid = jnp.ones(shape, bool)
        for c, d in enumerate(dims.indexed):
            last = (array_shape if d in split else operand.shape)[d] - window[d]
            start = as_index(indices[..., c], last + 1, dtype)
            if clamp:
                start = lax.clamp(dtype.type(0), start, dtype.type(last))
            start = lax.broadcast_in_dim(start, shape, positions)
            valid = valid & (start >= 0) & (start <= last)
            if d in split:
                if d in to_batch:
                    start = start + lax.broadcasted_iota(dtype, shape, batch_dims.index(to_batch[d]))
                size = operand.shape[d]
                start = start - lax.convert_element_type(op.offset(op.rule.ins[0][d], size), dtype)
                own = own & (start >= 0) & (start < size)
                start = lax.clamp(dtype.type(0), start, dtype.type(size - 1))
            columns[d] = start
        local_dims = replace(
            dims,
            collapsed=tuple(sorted({*dims.collapsed, *split})),
            index_batch=tuple(positions[i] for i in dims.index_batch),
            window=tuple(w for d, w in window_dims.items() if d not in split),
        )
        return cls(local_dims, batch_dims, columns, own, valid)


def index_dtype(shape: Sequence[int]) -> np.dtype:
    """The dtype in which the local forms calculate indices into an array of this shape: int32, or int64 if that is too small."""
    return np.dtype(np.int32 if max(shape, default=0) < np.iinfo(np.int32).max else np.int64)


def as_index(i: Any, size: int, dtype: np.dtype) -> Any:
    """Indices of any integer dtype, clamped to ``[-1, size]`` and converted to a wide signed dtype."""
    info = jnp.iinfo(i.dtype)
    least, most = max(-1, int(info.min)), min(size, int(info.max))
    return lax.clamp(np.asarray(least, i.dtype), i, np.asarray(most, i.dtype)).astype(dtype)


# -- dynamic slices and updates


def dynamic_slice(eqn, ins, outs) -> OpRule:
    """The rule of ``dynamic_slice``: dims of full size pass through; the others are indexed, and the result is partial
    over them if they are split."""
    r = _window_rule(eqn, ins[0], outs[0])
    return r.maps([r.ins[0], *((),) * (len(ins) - 1)], [r.ins[1]])


def dynamic_update_slice(eqn, ins, outs) -> OpRule:
    """The rule of ``dynamic_update_slice``: dims that the update fills pass through; the others are indexed, and the
    result is complete."""
    r = _window_rule(eqn, ins[0], ins[1])
    return r.maps([*r.ins, *((),) * (len(ins) - 2)], [r.ins[0]])


def _window_rule(eqn: JaxprEqn, array: Sequence[int], window: Sequence[int]) -> OpRule:
    """A rule with two operands of these shapes: an array, and a window of it at a run-time index."""
    r, kind = OpRule(), indexed_kind(eqn)
    array_factors = r.factors(array, kind, [d for d, (n, m) in enumerate(zip(array, window, strict=True)) if n != m])
    window_factors = []
    for factors, n, m in zip(array_factors, array, window, strict=True):
        window_factors.append(factors if n == m else (r.factor(m, "need_replication"),))
        if n != m and m > 1:
            r.name_links.append(NameLink(factors[0], window_factors[-1][0]))
    r.ins = [array_factors, tuple(window_factors)]
    return r


@dataclass(frozen=True, slots=True)
class _LocalWindow:
    """The part of a dynamic slice's or update's window that is in this device's shard.

    Attributes:
      starts: index in the shard at which it starts. It is clamped explicitly, since XLA clamps the start of a slice of a slice with
        the size of the second slice only (quirk ``MERGED_SLICES``).
      sizes: its shape: the window's, and at most the shard's.
      shifts: dim → number of elements from the start of the window to the start of the local window, for dims that are indexed and
        split.
    """

    starts: tuple[Any, ...]
    sizes: tuple[int, ...]
    shifts: dict[int, Any]

    @classmethod
    def of(cls, op: LocalOp, x: Any, starts: Sequence[Any], window: Sequence[int]) -> _LocalWindow:
        """The local window, from the shard, the starts of the window, and its shape (along a full dim, the shard's size)."""
        shape = op.eqn.invars[0].aval.shape
        dtype = index_dtype(shape)
        local_starts, sizes, shifts = [], [], {}
        for d, (i, n, m) in enumerate(zip(starts, x.shape, window, strict=True)):
            is_split = bool(op.axes_of(op.rule.ins[0][d])) and _is_indexed(op, d)
            last = (shape[d] if is_split else n) - m
            start = lax.clamp(dtype.type(0), as_index(i, last, dtype), dtype.type(last))
            if is_split:
                begin = start - lax.convert_element_type(op.offset(op.rule.ins[0][d], n), dtype)
                m = min(m, n)
                start = lax.clamp(dtype.type(0), begin, dtype.type(n - m))
                shifts[d] = start - begin
            local_starts.append(start)
            sizes.append(m)
        return cls(tuple(local_starts), tuple(sizes), shifts)

    def mask(self, shape: Sequence[int], other: Sequence[int], sign: int) -> Any:
        """Which elements of an array of a shape are within another one that starts ``sign * shift`` elements earlier: bool."""
        own: Any = np.True_
        for d, shift in self.shifts.items():
            position = lax.broadcasted_iota(shift.dtype, shape, d) + sign * shift
            own = own & (position >= 0) & (position < other[d])
        return own


def _local_dynamic_slice(op: LocalOp, x: Any, *starts: Any) -> list[Any]:
    """A masked read: the elements of the window that are in this device's shard, at their position in the window."""
    window = op.out_shape
    local = _LocalWindow.of(op, x, starts, window)
    (out,) = op.run(x, *local.starts, slice_sizes=local.sizes)
    if not local.shifts:
        return [out]
    for d, shift in local.shifts.items():
        out = _shifted(out, d, -shift, window[d])
    return [only_where(local.mask(window, local.sizes, -1), out)]


def _local_dynamic_update_slice(op: LocalOp, x: Any, update: Any, *starts: Any) -> list[Any]:
    """A masked write: replaces the elements of the window that are in this device's shard."""
    window = update.shape
    local = _LocalWindow.of(op, x, starts, window)
    if local.shifts:
        for d, shift in local.shifts.items():
            update = _shifted(update, d, shift, local.sizes[d])
        mask = local.mask(local.sizes, window, 1)
        update = jnp.where(mask, update, lax.dynamic_slice(x, local.starts, local.sizes))
    return op.run(x, update, *local.starts)


def _shifted(x: Any, d: int, shift: Any, size: int) -> Any:
    """An array of ``size`` elements along a dim: element i is ``x[i + shift]`` if ``x`` has it, else any element."""
    length = x.shape[d]
    n = -(-max(length, size) // length) * length
    if n == 1:
        return x
    x = lax.concatenate([x] * -(-(n + size) // length), d)
    start = lax.rem(shift, shift.dtype.type(n))
    return lax.dynamic_slice_in_dim(x, jnp.where(start < 0, start + n, start), size, d)


register(
    "dynamic_slice", family="dynamic_slice", rule=dynamic_slice, local=_local_dynamic_slice, fusible=True, manual=always
)
_UPDATE: dict[str, Any] = {"family": "update", "pinned": True, "partial": (WRITES_INTO_ZEROS,)}
register("dynamic_update_slice", rule=dynamic_update_slice, local=_local_dynamic_update_slice, **_UPDATE)


def add_row(eqn, ins, outs) -> OpRule:
    """The rule of ``add_row``: the dims of the row pass through; the dim of the rows is unsharded."""
    rows = OpRule()
    total = rows.factors(ins[0], "need_replication", [0])
    rows.ins, rows.outs = [total, total[1:], total[1 : 1 + len(ins[2])], total[1:2]], [total]
    return rows


register("add_row", rule=add_row, local=on_shards, family="update")
