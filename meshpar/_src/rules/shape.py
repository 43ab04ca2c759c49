"""Ops that move elements: broadcasts, transposes, reshapes, slices, concatenations; and iota, which makes an array from indices."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..compat.jax import aval_of
from .halo import ShardWindow, fetch_window, shard_window
from .local_forms import LocalOp, on_shards
from .mesh_in_shard_map import Axes, Factors, Send, Shapes, axis_index
from .one_owner import only_where
from .partial import CONCATENATES, MOVES, PADS_WITH_ZEROS
from .registry import register
from .rule import (
    Kind,
    NameLink,
    OpRule,
    exchange_kind,
    independent_of_data,
    indexed_kind,
    leading,
    one_shape,
    replicated,
    with_halo_sends,
)


def broadcast_in_dim(eqn, ins, outs) -> OpRule:
    """The rule of ``broadcast_in_dim``: dims of unchanged size, and dims that only the result has, pass through.

    A dim of size 1 that is broadcast to a larger size has a factor of its own, which the result's dim does not share.
    """
    (out,) = outs
    r = OpRule()
    result = r.factors(out)
    dims = eqn.params["broadcast_dimensions"]
    operand = tuple(result[d] if n == out[d] else (r.factor(n),) for n, d in zip(ins[0], dims, strict=True))
    return r.maps([operand, *((),) * (len(ins) - 1)], [result])


def _local_shape(op: LocalOp, *xs: Any) -> list[Any]:
    """The op with the shape of this device's shard of the result."""
    return op.run(*xs, shape=op.out_shape)


_ADDS_ONES = replace(MOVES, holds=lambda eqn: eqn.invars[0].aval.size == eqn.outvars[0].aval.size)
_BROADCAST: dict[str, Any] = {"family": "broadcast", "partial": (_ADDS_ONES,), "fusible": True, "free": True}
register("broadcast_in_dim", rule=broadcast_in_dim, local=_local_shape, **_BROADCAST)


def transpose(eqn, ins, outs) -> OpRule:
    """The rule of ``transpose``: all dims pass through."""
    r = OpRule(strong=True)
    dims = r.factors(ins[0])
    return r.maps([dims], [tuple(dims[i] for i in eqn.params["permutation"])])


register("transpose", rule=transpose, local=on_shards, view=True, free=True, partial=(MOVES,), family="transpose")


def reshape_order(eqn: JaxprEqn) -> Sequence[int]:
    """The order in which a ``reshape`` takes the dims of its operand: it may transpose first. In order for a ``squeeze``."""
    order = eqn.params["dimensions"] if eqn.primitive.name == "reshape" else None
    return range(len(aval_of(eqn.invars[0]).shape)) if order is None else order


def reshape(eqn, ins, outs) -> OpRule:
    """The rule of ``reshape``: the coarsest common factors of both shapes pass through; dims without any
    (``[6, 4] → [4, 6]``) need replication.

    ``[8, 6] → [2, 4, 6]`` has the factors 2, 4 and 6: dim 0 of the operand consists of the first two.
    """
    order, b = reshape_order(eqn), outs[0]
    a = [ins[0][d] for d in order]
    if 0 in (*a, *b):
        return replicated(eqn, ins, outs)
    r = OpRule(strong=True)
    left: list[Factors] = [()] * len(a)
    right: list[Factors] = [()] * len(b)
    # the sizes before each dim, multiplied; where both shapes have the same number, a run of dims with equal factors ends
    begins = [list(itertools.accumulate(shape, operator.mul, initial=1)) for shape in (a, b)]
    for start, stop in itertools.pairwise(sorted({*begins[0]} & {*begins[1]})):
        bounds = [n for n in sorted({*begins[0], *begins[1]}) if start <= n <= stop]
        # for every bound, the dim of each shape that begins there or contains it
        xs, ys = ([bisect.bisect(of, n) - 1 for n in bounds[:-1]] for of in begins)
        if all(n % m == 0 for m, n in itertools.pairwise(bounds)):
            for (m, n), x, y in zip(itertools.pairwise(bounds), xs, ys, strict=True):
                f = r.factor(n // m)
                left[x] += (f,)
                right[y] += (f,)
        else:
            left = [(r.factor(n, "need_replication"),) if x in xs else left[x] for x, n in enumerate(a)]
            right = [(r.factor(n, "need_replication"),) if y in ys else right[y] for y, n in enumerate(b)]
    operand = tuple(left[order.index(d)] for d in range(len(a)))
    return r.maps([operand, *((),) * (len(ins) - 1)], [tuple(right)])


def _local_reshape(op: LocalOp, *xs: Any) -> list[Any]:
    return op.run(*xs, new_sizes=op.out_shape)


register("reshape", rule=reshape, local=_local_reshape, view=True, partial=(MOVES,), family="reshape")
register("squeeze", rule=reshape, local=on_shards, view=True, free=True, partial=(MOVES,), family="squeeze")


def slice_(eqn, ins, outs) -> OpRule:
    """The rule of ``slice``: dims of full size pass through; along the others devices exchange halos, so that the slice
    is split over the same axes.

    A slice of one element (the last token) is read on the device that has it, with no exchange: the dim is indexed, the result
    partial.
    """
    p = eqn.params
    elements = [range(*limits) for limits in zip(p["start_indices"], p["limit_indices"], strict=True)]
    r = _resizing_rule(ins[0], outs[0], exchange_kind(eqn), elements)
    for d, (n, m) in enumerate(zip(ins[0], outs[0], strict=True)):
        if n != m and m == 1:
            r.kinds[r.ins[0][d][0]] = indexed_kind(eqn)
        elif n != m:
            stride = p["strides"][d] if p["strides"] else 1
            r.windows[0, d] = functools.partial(_window, -p["start_indices"][d], stride, 1, n, m)
    return with_halo_sends(r, eqn, "elements of other shards")


def _window(low: int, stride: int, dilation: int, size: int, count: int, shards: int) -> ShardWindow:
    """The window of a dim of ``size`` that each device reads for its shard of ``count`` elements: every ``stride``-th position of
    the dim after padding by ``low`` and dilation."""
    n = count // shards
    return shard_window(size // shards, shards, n * stride, (n - 1) * stride + 1, low, dilation)


def _local_slice(op: LocalOp, x: Any) -> list[Any]:
    """A slice of this device's window; along a dim with one selected element, a masked read."""
    p = op.params
    strides = p["strides"] or (1,) * x.ndim
    starts, ends = list(p["start_indices"]), list(p["limit_indices"])
    exchanged = [dim for dim, _, _ in op.windows(0)]
    x, is_owner = op.with_halo(0, x), None
    for d, (factors, out_factors) in enumerate(zip(op.rule.ins[0], op.rule.outs[0], strict=True)):
        if d in exchanged or factors == out_factors:  # all elements of the window or shard
            starts[d], ends[d] = 0, x.shape[d]
        elif op.axes_of(factors):  # one element, which one device has
            index = starts[d] - op.offset(factors, x.shape[d])
            x = lax.dynamic_slice_in_dim(x, jnp.clip(index, 0, x.shape[d] - 1), 1, d)
            has_it = (index >= 0) & (index < op.rule.sizes[factors[0]] // op.shard_count(factors))
            is_owner = has_it if is_owner is None else is_owner & has_it
            starts[d], ends[d] = 0, 1
    (out,) = op.run(x, start_indices=tuple(starts), limit_indices=tuple(ends), strides=p["strides"] and strides)
    return [out if is_owner is None else only_where(is_owner, out)]


_MOVED: dict[str, Any] = {"fusible": True, "pinned": True}
"""Traits of ops that select or move elements along a dim."""

register("slice", rule=slice_, local=_local_slice, family="slice", **_MOVED)


def _resizing_rule(operand, result, kind: Kind, elements: Sequence[range], moved: Sequence[bool] = ()) -> OpRule:
    """A rule in which dims of equal size pass through, and dims that differ in size, or are ``moved``, are factors of ``kind``.

    Args:
      operand, result: shapes of one rank.
      elements: for every dim, the range of the larger array's elements that the smaller one has.
      moved: for every dim, whether elements change their index although the size may be the same.
    """
    r = OpRule()
    left, right = [], []
    for d, (n, m) in enumerate(zip(operand, result, strict=True)):
        is_moved = bool(moved) and moved[d]
        if n == m and not is_moved:
            f = r.factor(n)
            left.append((f,))
            right.append((f,))
        else:
            left.append((r.factor(n, "need_replication" if is_moved and m == 1 else kind),))
            right.append((r.factor(m, kind if m > 1 else "need_replication"),))
            if n > 1 and m > 1:
                pair = left[-1][0], right[-1][0]
                larger, smaller = pair if n >= m else (pair[1], pair[0])
                r.name_links.append(NameLink(larger, smaller, elements[d] if n != m else None))
                if kind == "permutation":
                    r.sharded_like.append(pair)
    return r.maps([tuple(left)], [tuple(right)])


def pad(eqn, ins, outs) -> OpRule:
    """The rule of ``pad``: dims without padding pass through; along the others devices exchange halos, so that the
    result is split over the same axes.

    An operand's dim of size 1 needs replication: the device whose shard of the result has the element selects it.
    """
    config = eqn.params["padding_config"]
    elements = [
        range(max(low, 0), m - max(high, 0)) if m > n else range(max(-low, 0), n - max(-high, 0))
        for (low, high, _), n, m in zip(config, ins[0], outs[0], strict=True)
    ]
    r = _resizing_rule(ins[0], outs[0], exchange_kind(eqn), elements, [tuple(c) != (0, 0, 0) for c in config])
    r.ins.append(())
    for d, (low, high, inner) in enumerate(config):
        if (low, high, inner) != (0, 0, 0) and ins[0][d] > 1:
            r.windows[0, d] = functools.partial(_window, low, 1, inner + 1, ins[0][d], outs[0][d])
    return with_halo_sends(r, eqn, "elements of other shards")


def _local_pad(op: LocalOp, x: Any, fill: Any) -> list[Any]:
    """This device's window of the padded array; along a dim of one element, a select between the element and ``fill``."""
    config = list(op.params["padding_config"])
    exchanged = [dim for dim, _, _ in op.windows(0)]
    x = op.with_halo(0, x, fill)
    for d, (factors, out_factors) in enumerate(zip(op.rule.ins[0], op.rule.outs[0], strict=True)):
        if d in exchanged:
            config[d] = (0, 0, 0)
        elif factors != out_factors and op.axes_of(out_factors):  # one element is padded to a shard
            count = op.out_shape[d]
            shape = (*x.shape[:d], count, *x.shape[d + 1 :])
            index = lax.broadcasted_iota(np.int32, shape, d) + op.offset(out_factors, count)
            x, config[d] = jnp.where(index == config[d][0], x, jnp.asarray(fill, x.dtype)), (0, 0, 0)
    return op.run(x, fill, padding_config=tuple(config))


register("pad", rule=pad, local=_local_pad, family="pad", partial=(PADS_WITH_ZEROS,), **_MOVED)


def concatenate(eqn, ins, outs) -> OpRule:
    """The rule of ``concatenate``: along the concatenated dim devices exchange halos of the operands; other dims pass
    through."""
    axis = eqn.params["dimension"]
    r = OpRule()
    out, r.ins = _part_factors(r, eqn, outs[0], [shape[axis] for shape in ins], axis)
    r.outs = [out]
    for i, start in enumerate(_starts(shape[axis] for shape in ins)):
        r.windows[i, axis] = functools.partial(_window, start, 1, 1, ins[i][axis], outs[0][axis])
    return with_halo_sends(r, eqn, "elements of other shards")


def _part_factors(
    r: OpRule, eqn: JaxprEqn, shape: Sequence[int], sizes: Sequence[int], axis: int
) -> tuple[tuple[Factors, ...], list[tuple[Factors, ...]]]:
    """(factors of an array, factors of each part), for an array that is the concatenation of parts along an axis.

    Args:
      r: the rule to which factors and links are added.
      shape: of the array.
      sizes: of the parts along ``axis``.
    """
    kind = exchange_kind(eqn)
    factors = r.factors(shape, kind, (axis,))
    parts_factors: list[tuple[Factors, ...]] = []
    for size, start in zip(sizes, _starts(sizes), strict=True):
        part = r.follower(factors[axis][0], size, kind, range(start, start + size))
        parts_factors.append((*factors[:axis], (part,), *factors[axis + 1 :]))
    return factors, parts_factors


def _starts(sizes: Iterable[int]) -> list[int]:
    """The index of the first element of each part in their concatenation: ``[0, 3, 8]`` for sizes ``[3, 5, 2]``."""
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def _local_concatenate(op: LocalOp, *xs: Any) -> list[Any]:
    """This device's shard of the result, selected from its windows of the operands, which are each as large as the shard."""
    axis = op.params["dimension"]
    axes = op.axes_of(op.rule.outs[0][axis])
    if not axes:
        return op.run(*xs)
    count = op.out_shape[axis]
    out, start = None, 0
    index = lax.broadcasted_iota(np.int32, op.out_shape, axis) + axis_index(axes) * count
    for i, x in enumerate(xs):
        window = op.with_halo(i, x)
        out = window if out is None else jnp.where(index < start, out, window)
        start += op.eqn.invars[i].aval.shape[axis]
    return [out]


register(
    "concatenate", rule=concatenate, local=_local_concatenate, family="concatenate", partial=(CONCATENATES,), **_MOVED
)


def split(eqn, ins, outs) -> OpRule:
    """The rule of ``split``: along the dim that is split into parts devices exchange halos, so that every part is split
    over the same axes."""
    axis = eqn.params["axis"]
    r = OpRule()
    if len(outs) == 1:  # an identity, as in the inverse of `ravel_pytree` of a single array
        dims = [r.factors(ins[0])]
        return r.maps(dims, dims)
    operand, r.outs = _part_factors(r, eqn, ins[0], [shape[axis] for shape in outs], axis)
    (factor,) = operand[axis]
    r.ins = [operand]
    dtype = np.dtype(eqn.invars[0].aval.dtype)

    def sends(shapes: Shapes, axes: Axes, sizes: Mapping[str, int]) -> list[Send]:
        windows = _split_windows(eqn.params["sizes"], math.prod(sizes[a] for a in axes[factor]))
        why = "elements of other shards"
        return [s for w in windows for s in w.exchange.sends(shapes[0], axis, factor, dtype, why)]

    r.sends = sends
    return r


def _split_windows(sizes: Sequence[int], shards: int) -> list[ShardWindow]:
    """For every part, the window of the operand that each device reads for its shard of the part."""
    return [_window(-start, 1, 1, sum(sizes), n, shards) for start, n in zip(_starts(sizes), sizes, strict=True)]


def _local_split(op: LocalOp, x: Any) -> list[Any]:
    """This device's shards of the parts, one halo exchange each."""
    axis = op.params["axis"]
    factors = op.rule.ins[0][axis]
    axes = op.axes_of(factors)
    if len(op.rule.outs) == 1:
        return [x]
    if not axes:
        return op.run(x)
    windows = _split_windows(op.params["sizes"], op.shard_count(factors))
    return [fetch_window(x, axis, axes, window) for window in windows]


register("split", rule=split, local=_local_split, family="split", **_MOVED)


def tile(eqn, ins, outs) -> OpRule:
    """The rule of ``tile``: a tiled dim of the result consists of the repetitions (major) and of the operand's dim:
    ``[4] → [3·4]``."""
    r = OpRule()
    operand = r.factors(ins[0])
    result = []
    for reps, dim in zip(eqn.params["reps"], operand, strict=True):
        result.append(dim if reps == 1 else (r.factor(reps), *dim))
    return r.maps([operand], [tuple(result)])


def _local_tile(op: LocalOp, x: Any) -> list[Any]:
    reps = tuple(n // max(m, 1) for n, m in zip(op.out_shape, x.shape, strict=True))
    return op.run(x, reps=reps)


register("tile", rule=tile, local=_local_tile, fusible=True)


def stack(eqn, ins, outs) -> OpRule:
    """The rule of ``stack``: the new dim needs replication; the others pass through."""
    r = OpRule()
    dims = r.factors(ins[0])
    axis = eqn.params["axis"]
    return r.maps([dims] * len(ins), [(*dims[:axis], (r.factor(len(ins), "need_replication"),), *dims[axis:])])


register("stack", rule=stack, local=on_shards, fusible=True, partial=(CONCATENATES,))


def unstack(eqn, ins, outs) -> OpRule:
    """The rule of ``unstack``: the removed dim needs replication; the others pass through."""
    r = OpRule()
    axis = eqn.params["axis"]
    dims = r.factors(ins[0], "need_replication", (axis,))
    return r.maps([dims], [(*dims[:axis], *dims[axis + 1 :])] * len(outs))


register("unstack", rule=unstack, local=on_shards, fusible=True)


def device_put(eqn, ins, outs) -> OpRule:
    """The rule of ``device_put``: all dims pass through. An equation with several operands is separated into one per
    operand (``per_operand``)."""
    return one_shape(ins, outs, "pass_through", ())


def _local_device_put(op: LocalOp, x: Any) -> list[Any]:
    """A copy in the memory space, host or device, of the result's aval."""
    (out,) = op.eqn.outvars
    return [jax.device_put(x, out.aval.memory_space)]


register("device_put", rule=device_put, local=_local_device_put, view=True, family="transfer")


def rev(eqn, ins, outs) -> OpRule:
    """The rule of ``rev``: along a reversed dim devices exchange shards: device p of 4 gets the shard of device 3 - p."""
    r = one_shape(ins, outs, exchange_kind(eqn), eqn.params["dimensions"])
    for d in eqn.params["dimensions"]:
        r.windows[0, d] = functools.partial(_rev_window, ins[0][d])
    return with_halo_sends(r, eqn, "the shard at the opposite end")


def _rev_window(size: int, shards: int) -> ShardWindow:
    """The window of a reversed dim that each device reads: the shard at the opposite end."""
    n = size // shards
    return ShardWindow.of(n, tuple((shards - 1 - p) * n for p in range(shards)), n)


register("rev", rule=rev, local=lambda op, x: op.run(op.with_halo(0, x)), **_MOVED)


def _local_iota(op: LocalOp, *xs: Any) -> list[Any]:
    """This device's shard of the iota, counted from the shard's offset."""
    d, shape = op.params["dimension"], op.out_shape
    factors = op.rule.outs[0][d]
    if not op.axes_of(factors):
        return op.run(*xs, shape=shape)
    index = lax.broadcasted_iota(np.int32, shape, d) + op.offset(factors, shape[d])
    return [index.astype(op.params["dtype"])]  # converted last, so that it is rounded once


register("iota", rule=independent_of_data, local=_local_iota, fusible=True, free=True)
register("empty", rule=independent_of_data, local=_local_shape, fusible=True)


def bitcast_convert_type(eqn, ins, outs) -> OpRule:
    """The rule of ``bitcast_convert_type``: dims pass through; the minor dim that a change of width adds or removes
    (``float32[8] → uint8[8, 4]``) needs replication."""
    return leading(ins, outs, min(len(ins[0]), len(outs[0])), strong=len(ins[0]) == len(outs[0]))


register("bitcast_convert_type", rule=bitcast_convert_type, local=on_shards, fusible=True)
