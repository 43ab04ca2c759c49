"""Ops that move dims about: broadcasts, transposes, reshapes, slices, concatenations; and arrays made from no data."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .halo import ShardWindow, fetch_window, halo_exchange, shard_window
from .local import LocalOp, on_shards
from .owned import only_where
from .partial import MOVES
from .registry import register
from .rule import Kind, NameLink, OpRule, einsum, exchange_kind, indexed_kind, with_halo_sends
from .spmd import Factors, Send, axis_index


def broadcast_in_dim(eqn, ins, outs) -> OpRule:
    (out,) = outs
    r = OpRule([], [])
    result = r.factors(out)
    dims = eqn.params["broadcast_dimensions"]
    operand = tuple(result[d] if n == out[d] else (r.factor(n),) for n, d in zip(ins[0], dims, strict=True))
    r.ins = [operand, *((),) * (len(ins) - 1)]
    r.outs = [result]
    return r


def _local_broadcast(at: LocalOp, *xs: Any) -> list[Any]:
    return at.run(*xs, shape=at.out)


register("broadcast_in_dim", rule=broadcast_in_dim, local=_local_broadcast, fusible=True, free=True, broadcast=True)


def transpose(eqn, ins, outs) -> OpRule:
    r = OpRule([], [], strong=True)
    dims = r.factors(ins[0])
    r.ins, r.outs = [dims], [tuple(dims[i] for i in eqn.params["permutation"])]
    return r


register("transpose", rule=transpose, local=on_shards, view=True, free=True, partial=(MOVES,), transpose=True)


def reshape_order(eqn: Any) -> Sequence[int]:
    """The order in which a ``reshape`` takes the dims of its operand: it may transpose first. In order for a ``squeeze``."""
    order = eqn.params["dimensions"] if eqn.primitive.name == "reshape" else None
    return range(len(eqn.invars[0].aval.shape)) if order is None else order


def reshape(eqn, ins, outs) -> OpRule:
    """The coarsest factors that both shapes are products of; a run that has none (``[6, 4] → [4, 6]``) needs replication."""
    order = reshape_order(eqn)
    a, b = [ins[0][d] for d in order], outs[0]
    r = OpRule([], [], strong=True)
    left: list[Factors] = [()] * len(a)
    right: list[Factors] = [()] * len(b)
    for xs, ys in _runs(a, b):
        found = _common_factors([a[x] for x in xs], [b[y] for y in ys])
        if found is None:
            for x in xs:
                left[x] = (r.factor(a[x], "need_replication"),)
            for y in ys:
                right[y] = (r.factor(b[y], "need_replication"),)
            continue
        for size, x, y in found:
            f = r.factor(size)
            left[xs[x]] += (f,)
            right[ys[y]] += (f,)
    operand: list[Factors] = [()] * len(a)
    for d, factors in zip(order, left, strict=True):
        operand[d] = factors
    r.ins = [tuple(operand), *((),) * (len(ins) - 1)]
    r.outs = [tuple(right)]
    return r


def _local_reshape(at: LocalOp, *xs: Any) -> list[Any]:
    return at.run(*xs, new_sizes=at.out)


register("reshape", rule=reshape, local=_local_reshape, view=True, partial=(MOVES,), reshape=True)
register("squeeze", rule=reshape, local=on_shards, view=True, free=True, partial=(MOVES,), reshape=True, squeeze=True)


def _runs(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The dims (larger than 1) of two shapes between their common boundaries; all of them where some size is 0."""
    if 0 in (*a, *b):
        yield list(range(len(a))), list(range(len(b)))
        return
    rest = [y for y in range(len(b)) if b[y] != 1]
    xs: list[int] = []
    ys: list[int] = []
    pa = pb = 1
    for x in (x for x in range(len(a)) if a[x] != 1):
        xs.append(x)
        pa *= a[x]
        while pb < pa:
            ys.append(rest.pop(0))
            pb *= b[ys[-1]]
        if pa == pb:
            yield xs, ys
            xs, ys, pa, pb = [], [], 1, 1


def _common_factors(a: list[int], b: list[int]) -> list[tuple[int, int, int]] | None:
    """(size, dim of a, dim of b) of the factors of a run, major to minor; None where there are none."""
    a, b = list(a), list(b)
    if 0 in (*a, *b):
        return None
    out = []
    i = j = 0
    while i < len(a) and j < len(b):
        size = min(a[i], b[j])
        if a[i] % size or b[j] % size:
            return None
        out.append((size, i, j))
        a[i] //= size
        b[j] //= size
        i += a[i] == 1
        j += b[j] == 1
    return out


def slice_(eqn, ins, outs) -> OpRule:
    """Dims that are not cut pass through; along the others devices exchange what their blocks of the slice are made of.

    One element of a dim (the last token) is read from the device that has it: the dim is indexed.
    """
    p = eqn.params
    lies = [range(*ends) for ends in zip(p["start_indices"], p["limit_indices"], strict=True)]
    r = _part(ins[0], outs[0], exchange_kind(eqn), lies)
    for factors, n, m in zip(r.ins[0], ins[0], outs[0], strict=True):
        if n != m and m == 1:
            r.kinds[factors[0]] = indexed_kind(eqn)
    for d, (n, m) in enumerate(zip(ins[0], outs[0], strict=True)):
        if n != m and m > 1:
            every = p["strides"][d] if p["strides"] else 1
            r.windows[0, d] = functools.partial(_slice_window, p["start_indices"][d], every, n, m)
    return with_halo_sends(r, eqn, "what lies in another block")


def _slice_window(start: int, every: int, size: int, count: int, parts: int) -> ShardWindow:
    n = count // parts
    return shard_window(size // parts, parts, n * every, (n - 1) * every + 1, -start)


def _local_slice(at: LocalOp, x: Any) -> list[Any]:
    p = at.params
    strides = p["strides"] or (1,) * x.ndim
    starts, ends = list(p["start_indices"]), list(p["limit_indices"])
    exchanged = [dim for dim, _, _ in at.windows(0)]
    x, mine = at.with_halo(0, x), None
    for d, (mine_in, mine_out) in enumerate(zip(at.rule.ins[0], at.rule.outs[0], strict=True)):
        if d in exchanged or (mine_in == mine_out and at.of(mine_in)):  # all that is here
            starts[d] = 0 if d in exchanged else starts[d]
            ends[d] = x.shape[d]
        elif at.of(mine_in):  # one element, which one device has
            place = starts[d] - at.offset(mine_in, x.shape[d])
            x = lax.dynamic_slice_in_dim(x, jnp.clip(place, 0, x.shape[d] - 1), 1, d)
            here = (place >= 0) & (place < at.rule.sizes[mine_in[0]] // at.parts(mine_in))
            mine = here if mine is None else mine & here
            starts[d], ends[d] = 0, 1
    (out,) = at.run(x, start_indices=tuple(starts), limit_indices=tuple(ends), strides=p["strides"] and strides)
    return [out if mine is None else only_where(mine, out)]


register("slice", rule=slice_, local=_local_slice, fusible=True, pinned=True, slice=True, static_slice=True)


def _part(operand, result, kind: Kind, lies: Sequence[range] = (), moved: Sequence[bool] = ()) -> OpRule:
    """Dims of equal sizes pass through; where sizes differ, or elements are `moved`, the factors are of `kind` and linked.

    Args:
      lies: of every dim, the elements of the larger array that the smaller one is.
    """
    r = OpRule([], [])
    left, right = [], []
    for d, (n, m) in enumerate(zip(operand, result, strict=True)):
        apart = bool(moved) and moved[d]
        if n == m and not apart:
            f = r.factor(n)
            left.append((f,))
            right.append((f,))
        else:
            left.append((r.factor(n, "need_replication" if apart and m == 1 else kind),))
            right.append((r.factor(m, kind if m > 1 else "need_replication"),))
            if n > 1 and m > 1:
                pair = left[-1][0], right[-1][0]
                whole, piece = pair if n >= m else (pair[1], pair[0])
                r.name_links.append(NameLink(whole, piece, lies[d] if lies and n != m else None))
                if kind == "permutation":
                    r.sharded_like.append(pair)
    r.ins, r.outs = [tuple(left)], [tuple(right)]
    return r


def pad(eqn, ins, outs) -> OpRule:
    """Dims that are not padded pass through; along the others devices exchange what their blocks of the result are made of.

    An operand dim of size 1 needs replication: the device in whose block its element belongs puts it there.
    """
    config = eqn.params["padding_config"]
    lies = [
        range(max(low, 0), m - max(high, 0)) if m > n else range(max(-low, 0), n - max(-high, 0))
        for (low, high, _), n, m in zip(config, ins[0], outs[0], strict=True)
    ]
    r = _part(ins[0], outs[0], exchange_kind(eqn), lies, [tuple(c) != (0, 0, 0) for c in config])
    r.ins.append(())
    for d, (low, high, inner) in enumerate(config):
        if (low, high, inner) != (0, 0, 0) and ins[0][d] > 1 and outs[0][d] > 1:
            r.windows[0, d] = functools.partial(_pad_window, low, inner + 1, ins[0][d], outs[0][d])
    return with_halo_sends(r, eqn, "what lies in another block")


def _pad_window(low: int, dilation: int, size: int, count: int, parts: int) -> ShardWindow:
    n = count // parts
    return shard_window(size // parts, parts, n, n, low, dilation)


def _local_pad(at: LocalOp, x: Any, fill: Any) -> list[Any]:
    config = list(at.params["padding_config"])
    exchanged = [dim for dim, _, _ in at.windows(0)]
    x = at.with_halo(0, x, fill)
    for d, (mine_in, mine_out) in enumerate(zip(at.rule.ins[0], at.rule.outs[0], strict=True)):
        if d in exchanged:
            config[d] = (0, 0, 0)
        elif mine_in != mine_out and at.of(mine_out):  # one element becomes a block
            count = at.out[d]
            shape = (*x.shape[:d], count, *x.shape[d + 1 :])
            place = lax.broadcasted_iota(np.int32, shape, d) + at.offset(mine_out, count)
            x, config[d] = jnp.where(place == config[d][0], x, jnp.asarray(fill, x.dtype)), (0, 0, 0)
    return at.run(x, fill, padding_config=tuple(config))


register("pad", rule=pad, local=_local_pad, fusible=True, pinned=True)


def concatenate(eqn, ins, outs) -> OpRule:
    """Along the concatenated dim devices exchange what their blocks of the result are made of."""
    axis, kind = eqn.params["dimension"], exchange_kind(eqn)
    r = OpRule([], [])
    out = tuple((r.factor(n, kind if i == axis else "pass_through"),) for i, n in enumerate(outs[0]))
    starts = itertools.accumulate((shape[axis] for shape in ins), initial=0)
    for i, (shape, start) in enumerate(zip(ins, starts, strict=False)):
        mine = list(out)
        mine[axis] = (r.factor(shape[axis], kind),)
        r.name_links.append(NameLink(out[axis][0], mine[axis][0], range(start, start + shape[axis])))
        r.ins.append(tuple(mine))
        r.windows[i, axis] = functools.partial(_pad_window, start, 1, shape[axis], outs[0][axis])
        if kind == "permutation":
            r.sharded_like.append((out[axis][0], mine[axis][0]))
    r.outs = [out]
    return with_halo_sends(r, eqn, "what lies in another block")


def _local_concatenate(at: LocalOp, *xs: Any) -> list[Any]:
    """Along a sharded dim, a device's block of the result is selected from one window of each operand."""
    axis = at.params["dimension"]
    axes = at.of(at.rule.outs[0][axis])
    if not axes:
        return at.run(*xs)
    count = at.out[axis]
    out, start, here = None, 0, axis_index(axes) * count
    place = lax.broadcasted_iota(np.int32, at.out, axis) + here
    for i, x in enumerate(xs):
        part = at.with_halo(i, x)
        out = part if out is None else jnp.where(place < start, out, part)
        start += at.eqn.invars[i].aval.shape[axis]
    return [out]


register("concatenate", rule=concatenate, local=_local_concatenate, fusible=True, pinned=True, concatenation=True)


def split(eqn, ins, outs) -> OpRule:
    """Along the dim that is split devices exchange what their blocks of the pieces are made of."""
    axis, kind = eqn.params["axis"], exchange_kind(eqn)
    r = OpRule([], [])
    if len(outs) == 1:  # all of it: `ravel_pytree` of a single array, put back
        r.ins = r.outs = [tuple((r.factor(n),) for n in ins[0])]
        return r
    operand = tuple((r.factor(n, kind if i == axis else "pass_through"),) for i, n in enumerate(ins[0]))
    (whole,) = operand[axis]
    starts = itertools.accumulate((shape[axis] for shape in outs), initial=0)
    for shape, start in zip(outs, starts, strict=False):
        mine = list(operand)
        mine[axis] = (r.factor(shape[axis], kind),)
        r.name_links.append(NameLink(whole, mine[axis][0], range(start, start + shape[axis])))
        r.outs.append(tuple(mine))
        if kind == "permutation":
            r.sharded_like.append((whole, mine[axis][0]))
    r.ins = [operand]
    dtype = eqn.invars[0].aval.dtype

    def sends(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> list[Send]:
        why = "what lies in another block"
        windows = _split_windows(eqn.params["sizes"], parts[whole])
        return [s for w in windows for s in w.exchange.sends(shapes[0], axis, whole, np.dtype(dtype), why)]

    r.sends = sends
    return r


def _split_windows(sizes: Sequence[int], parts: int) -> list[ShardWindow]:
    """What each device reads for its block of every piece."""
    starts = itertools.accumulate(sizes, initial=0)
    return [_slice_window(start, 1, sum(sizes), n, parts) for start, n in zip(starts, sizes, strict=False)]


def _local_split(at: LocalOp, x: Any) -> list[Any]:
    axis = at.params["axis"]
    axes = at.of(at.rule.ins[0][axis])
    if len(at.rule.outs) == 1:
        return [x]
    if not axes:
        return at.run(x)
    by = _split_windows(at.params["sizes"], at.parts(at.rule.ins[0][axis]))
    return [fetch_window(x, axis, axes, r.exchange) for r in by]


register("split", rule=split, local=_local_split, fusible=True, pinned=True, static_slice=True)


def tile(eqn, ins, outs) -> OpRule:
    """A dim that is repeated is made of the repeats (major) and of the operand's dim."""
    r = OpRule([], [])
    operand = r.factors(ins[0])
    result = []
    for reps, dim in zip(eqn.params["reps"], operand, strict=True):
        result.append(dim if reps == 1 else (r.factor(reps), *dim))
    r.ins, r.outs = [operand], [tuple(result)]
    return r


def _local_tile(at: LocalOp, x: Any) -> list[Any]:
    reps = tuple(n // max(m, 1) for n, m in zip(at.out, x.shape, strict=True))
    return at.run(x, reps=reps)


register("tile", rule=tile, local=_local_tile, fusible=True)


def stack(eqn, ins, outs) -> OpRule:
    r = OpRule([], [])
    dims = r.factors(ins[0])
    axis = eqn.params["axis"]
    r.ins = [dims] * len(ins)
    r.outs = [(*dims[:axis], (r.factor(len(ins), "need_replication"),), *dims[axis:])]
    return r


register("stack", rule=stack, local=on_shards, fusible=True)


def unstack(eqn, ins, outs) -> OpRule:
    r = OpRule([], [])
    axis = eqn.params["axis"]
    dims = tuple((r.factor(n, "need_replication" if i == axis else "pass_through"),) for i, n in enumerate(ins[0]))
    r.ins, r.outs = [dims], [(*dims[:axis], *dims[axis + 1 :])] * len(outs)
    return r


register("unstack", rule=unstack, local=on_shards, fusible=True)


def device_put(eqn, ins, outs) -> OpRule:
    """The same dims in another memory. An equation of several operands is split into one per operand (``per_operand``)."""
    (shape,) = ins
    r = OpRule([], [], strong=True)
    r.ins = r.outs = [r.factors(shape)]
    return r


def _local_device_put(at: LocalOp, x: Any) -> list[Any]:
    """Copy to the memory, host or device, of the result's aval."""
    (out,) = at.eqn.outvars
    return [jax.device_put(x, out.aval.memory_space)]


register(
    "device_put",
    rule=device_put,
    local=_local_device_put,
    view=True,
    transfer=True,
    per_operand=("devices", "srcs", "copy_semantics"),
)


def rev(eqn, ins, outs) -> OpRule:
    """Along a dim that is reversed devices exchange their blocks."""
    r = OpRule([], [], strong=True)
    moved, kind = eqn.params["dimensions"], exchange_kind(eqn)
    dims = tuple((r.factor(n, kind if i in moved else "pass_through"),) for i, n in enumerate(ins[0]))
    r.ins, r.outs = [dims], [dims]
    for d in moved:
        r.windows[0, d] = functools.partial(_rev_window, ins[0][d])
    return with_halo_sends(r, eqn, "the block at the other end")


def _rev_window(size: int, parts: int) -> ShardWindow:
    n = size // parts
    return ShardWindow(halo_exchange(n, tuple((parts - 1 - p) * n for p in range(parts)), n), (0,) * parts, n, 1)


def _local_rev(at: LocalOp, x: Any) -> list[Any]:
    return at.run(at.with_halo(0, x))


register("rev", rule=rev, local=_local_rev, fusible=True, pinned=True)


def from_no_data(eqn, ins, outs) -> OpRule:
    """All dims pass through: every device makes its part."""
    r = OpRule([], [])
    r.ins = [r.factors(s, "need_replication") for s in ins]
    r.outs = [r.factors(s) for s in outs]
    return r


def _local_iota(at: LocalOp, *xs: Any) -> list[Any]:
    d, shape = at.params["dimension"], at.out
    factors = at.rule.outs[0][d]
    if not at.of(factors):
        return at.run(*xs, shape=shape)
    place = lax.broadcasted_iota(np.int32, shape, d) + at.offset(factors, shape[d])
    return [place.astype(at.params["dtype"])]  # rounded once


def _local_empty(at: LocalOp, *xs: Any) -> list[Any]:
    return at.run(*xs, shape=at.out)


register("iota", rule=from_no_data, local=_local_iota, fusible=True, free=True)
register("empty", rule=from_no_data, local=_local_empty, fusible=True)


def bitcast_convert_type(eqn, ins, outs) -> OpRule:
    rank = min(len(ins[0]), len(outs[0]))
    letters = "abcdefghijklm"[:rank]
    a = letters + "y" * (len(ins[0]) - rank)
    b = letters + "z" * (len(outs[0]) - rank)
    r = einsum([a], [b], ins, outs, strong=len(ins[0]) == len(outs[0]))
    for extra in "yz":
        if extra in a:
            r.kinds[r.ins[0][-1][0]] = "need_replication"
        if extra in b:
            r.kinds[r.outs[0][-1][0]] = "need_replication"
    return r


register("bitcast_convert_type", rule=bitcast_convert_type, local=on_shards, fusible=True)
