"""Local forms of ops that read over the edge of a block: convolutions, pooling, slices, padding, concatenation.

What each device reads and who sends it is worked out in :mod:`meshpar.rules.reach`; here it is sent, and the op is
done on what came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..rules.reach import Exchange, Hop, Reach
from ..rules.shape import split_reaches
from .exchange import axis_index, permute

if TYPE_CHECKING:
    from .local import Local


def window(x: Any, dim: int, axes: Sequence[str], by: Exchange, fill: Any = 0) -> Any:
    """Each device's window of a split dim.

    Args:
      x: the shard; ``by.block`` along the dim.
      axes: that split the dim, major to minor.
      by: who sends what; device p gets ``[starts[p], starts[p] + length)`` of the whole dim.
      fill: what stands outside the array.

    Returns:
      An array of ``by.length`` along the dim.
    """
    zero = isinstance(fill, int | float | np.ndarray | np.generic) and not np.any(fill)
    fill = jnp.asarray(fill, x.dtype)
    here = axis_index(axes)
    if by.gather:
        x = lax.all_gather(x, tuple(axes), axis=dim, tiled=True)
        low = max(0, -min(by.starts))
        high = max(0, max(by.starts) + by.length - x.shape[dim])
        x = _padded(x, dim, fill, low, high)
        return lax.dynamic_slice_in_dim(x, _of(by.starts, here) + low, by.length, dim)
    shift = by.shift
    distances = [hop.pairs[0][0] - hop.pairs[0][1] for hop in by.hops]
    by_distance = all(s - t == d for hop, d in zip(by.hops, distances, strict=True) for s, t in hop.pairs)
    if shift is not None and by_distance and len(set(distances)) == len(distances):
        out = _joined(x, dim, axes, by, fill, shift, dict(zip(distances, by.hops, strict=True)))
        if zero or by.inside:  # who gets nothing gets zeros
            return out
        place = lax.broadcasted_iota(np.int32, out.shape, dim) + _of(by.starts, here)
        return jnp.where((place >= 0) & (place < by.parts * by.block), out, fill)
    # A piece stands out of the window by less than its length; one that nobody sent goes past its end.
    margin = max(by.own.length, *(hop.length for hop in by.hops), 0)
    shape = (*x.shape[:dim], by.length + 2 * margin, *x.shape[dim + 1 :])
    out = lax.broadcast(fill, shape)
    for hop in (by.own, *by.hops):
        if not hop.length:
            continue
        piece = lax.dynamic_slice_in_dim(x, _of(hop.starts, here), hop.length, dim)
        if hop is not by.own:
            piece = permute(piece, axes, hop.pairs)
        out = lax.dynamic_update_slice_in_dim(out, piece, _of(hop.offsets, here) + margin, dim)
    return lax.slice_in_dim(out, margin, margin + by.length, axis=dim)


def _joined(x: Any, dim: int, axes: Sequence[str], by: Exchange, fill: Any, shift: int, hops: dict[int, Hop]) -> Any:
    """The window where it begins at the same place of every block: pieces of the blocks, side by side."""
    pieces = []
    for d in range(shift // by.block, (shift + by.length - 1) // by.block + 1):
        first, last = max(shift, d * by.block), min(shift + by.length, (d + 1) * by.block)
        if d == 0:
            pieces.append(lax.slice_in_dim(x, first, last, axis=dim))
        elif d in hops:
            piece = lax.slice_in_dim(x, first - d * by.block, last - d * by.block, axis=dim)
            pieces.append(permute(piece, axes, hops[d].pairs))
        else:
            pieces.append(lax.broadcast(fill, (*x.shape[:dim], last - first, *x.shape[dim + 1 :])))
    return lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]


def _of(table: Sequence[int], here: Any) -> Any:
    """This device's entry."""
    if len(set(table)) == 1:
        return np.int32(table[0])
    return jnp.asarray(np.asarray(table, np.int32))[here]


def _padded(x: Any, dim: int, fill: Any, low: int, high: int, inner: int = 0) -> Any:
    if (low, high, inner) == (0, 0, 0):
        return x
    return lax.pad(x, fill, [(low, high, inner) if d == dim else (0, 0, 0) for d in range(x.ndim)])


def spread(x: Any, dim: int, axes: Sequence[str], by: Reach, fill: Any) -> Any:
    """The places of the dilated dim that a device looks at, of the window that was brought; ``fill`` between elements."""
    if by.dilation == 1 and x.shape[dim] == by.extent:
        return x
    room = by.dilation - 1
    high = max(0, by.extent - (x.shape[dim] - 1) * by.dilation - 1)
    x = _padded(x, dim, jnp.asarray(fill, x.dtype), room, high, room)
    first = tuple(room - b for b in by.before)
    return lax.dynamic_slice_in_dim(x, _of(first, axis_index(axes)), by.extent, dim)


def reaches(at: Local, operand: int) -> list[tuple[int, tuple[str, ...], Reach]]:
    """(dim, the axes that split it, what each device reads) of an operand."""
    out = []
    for factor, dim, make in at.rule.reaches_of(operand):
        if axes := at.of((factor,)):
            out.append((dim, axes, make(at.parts((factor,)))))
    return out


def brought(at: Local, operand: int, x: Any, fill: Any = 0) -> Any:
    """All that this device reads of an operand, with what the op pads and dilates, along the dims that are split."""
    for dim, axes, by in reaches(at, operand):
        x = spread(window(x, dim, axes, by.window, fill), dim, axes, by, fill)
    return x


def _without(values: Sequence[Any], dims: Sequence[int], plain: Any) -> tuple[Any, ...]:
    """A parameter by dim, where the dims that were brought need it no more."""
    return tuple(plain if d in dims else v for d, v in enumerate(values))


def conv(at: Local, lhs: Any, rhs: Any) -> list[Any]:
    """A convolution: halos of the input; group counts are divided where groups are split."""
    p, spec = at.params, at.params["dimension_numbers"].lhs_spec
    changed: dict[str, Any] = {}
    for key, d in (("feature_group_count", spec[1]), ("batch_group_count", spec[0])):
        if p[key] > 1:
            changed[key] = p[key] // at.parts(at.rule.ins[0][d][:1])
    padding, dilation = list(p["padding"]), list(p["lhs_dilation"])
    for dim, axes, by in reaches(at, 0):
        k = spec[2:].index(dim)
        lhs = window(lhs, dim, axes, by.window)
        if len(set(by.before)) == 1:  # the convolution itself dilates
            low = by.before[0]
            padding[k] = (low, by.extent - low - (lhs.shape[dim] - 1) * by.dilation - 1)
        else:
            lhs, padding[k], dilation[k] = spread(lhs, dim, axes, by, 0), (0, 0), 1
    return at.run(lhs, rhs, padding=tuple(padding), lhs_dilation=tuple(dilation), **changed)


def pool(at: Local, *xs: Any) -> list[Any]:
    """Sums and extrema of windows: halos, and outside the array the value that changes nothing."""
    name = at.op.name
    if name == "select_and_gather_add":  # (tangents, operand)
        fills = [0, _never(xs[1].dtype, at.params["select_prim"].name)]
    elif name == "reduce_window_sum":
        fills = [0]
    else:
        fills = [_never(xs[0].dtype, "ge" if name == "reduce_window_max" else "le")]
    split = [dim for dim, _, _ in reaches(at, 0)]
    return at.run(
        *(brought(at, i, x, fill) for i, (x, fill) in enumerate(zip(xs, fills, strict=True))),
        padding=_without(at.params["padding"], split, (0, 0)),
        base_dilation=_without(at.params["base_dilation"], split, 1),
    )


def select_and_scatter_add(at: Local, source: Any, operand: Any) -> list[Any]:
    """The gradient of a pooling: every window that touches this device's block selects again; the block is kept."""
    blocks, split = operand.shape, reaches(at, 1)
    source = brought(at, 0, source)
    operand = brought(at, 1, operand, _never(operand.dtype, at.params["select_prim"].name))
    (out,) = at.run(source, operand, padding=_without(at.params["padding"], [d for d, _, _ in split], (0, 0)))
    for dim, axes, by in split:
        first = tuple(p * blocks[dim] - s for p, s in enumerate(by.window.starts))
        out = lax.dynamic_slice_in_dim(out, _of(first, axis_index(axes)), blocks[dim], dim)
    return [out]


def _never(dtype: Any, select: str) -> Any:
    """The value that is never selected over another."""
    if dtype == np.bool_:
        return np.asarray(select != "ge")
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return np.asarray(info.min if select == "ge" else info.max, dtype)
    infinite = np.asarray(-np.inf if select == "ge" else np.inf, dtype)
    if np.isinf(infinite.astype(np.float64)):
        return infinite
    info = jnp.finfo(dtype)
    return np.asarray(info.min if select == "ge" else info.max, dtype)


def slice_(at: Local, x: Any) -> list[Any]:
    p = at.params
    strides = p["strides"] or (1,) * x.ndim
    starts, ends = list(p["start_indices"]), list(p["limit_indices"])
    brings = [dim for dim, _, _ in reaches(at, 0)]
    x, mine = brought(at, 0, x), None
    for d, (mine_in, mine_out) in enumerate(zip(at.rule.ins[0], at.rule.outs[0], strict=True)):
        if d in brings or (mine_in == mine_out and at.of(mine_in)):  # all that is here
            starts[d] = 0 if d in brings else starts[d]
            ends[d] = x.shape[d]
        elif at.of(mine_in):  # one element, which one device has
            place = starts[d] - at.offset(mine_in, x.shape[d])
            x = lax.dynamic_slice_in_dim(x, jnp.clip(place, 0, x.shape[d] - 1), 1, d)
            here = (place >= 0) & (place < at.rule.sizes[mine_in[0]] // at.parts(mine_in))
            mine = here if mine is None else mine & here
            starts[d], ends[d] = 0, 1
    (out,) = at.run(x, start_indices=tuple(starts), limit_indices=tuple(ends), strides=p["strides"] and strides)
    return [out if mine is None else jnp.where(mine, out, jnp.zeros((), out.dtype))]


def pad(at: Local, x: Any, fill: Any) -> list[Any]:
    config = list(at.params["padding_config"])
    brings = [dim for dim, _, _ in reaches(at, 0)]
    x = brought(at, 0, x, fill)
    for d, (mine_in, mine_out) in enumerate(zip(at.rule.ins[0], at.rule.outs[0], strict=True)):
        if d in brings:
            config[d] = (0, 0, 0)
        elif mine_in != mine_out and at.of(mine_out):  # one element becomes a block
            count = at.out[d]
            shape = (*x.shape[:d], count, *x.shape[d + 1 :])
            place = lax.broadcasted_iota(np.int32, shape, d) + at.offset(mine_out, count)
            x, config[d] = jnp.where(place == config[d][0], x, jnp.asarray(fill, x.dtype)), (0, 0, 0)
    return at.run(x, fill, padding_config=tuple(config))


def rev(at: Local, x: Any) -> list[Any]:
    return at.run(brought(at, 0, x))


def concatenate(at: Local, *xs: Any) -> list[Any]:
    """Along a split dim, a device's block of the result is made of windows of the operands; each is outside the others."""
    axis = at.params["dimension"]
    axes = at.of(at.rule.outs[0][axis])
    if not axes:
        return at.run(*xs)
    count = at.out[axis]
    out, start, here = None, 0, axis_index(axes) * count
    place = lax.broadcasted_iota(np.int32, at.out, axis) + here
    for i, x in enumerate(xs):
        part = brought(at, i, x)
        out = part if out is None else jnp.where(place < start, out, part)
        start += at.eqn.invars[i].aval.shape[axis]
    return [out]


def split(at: Local, x: Any) -> list[Any]:
    axis = at.params["axis"]
    axes = at.of(at.rule.ins[0][axis])
    if not axes:
        return at.run(x)
    by = split_reaches(at.params["sizes"], at.parts(at.rule.ins[0][axis]))
    return [window(x, axis, axes, r.window) for r in by]


FORMS: dict[str, Callable[..., list[Any]]] = {
    "conv_general_dilated": conv,
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add"), pool),
    "select_and_scatter_add": select_and_scatter_add,
    "slice": slice_,
    "pad": pad,
    "rev": rev,
    "concatenate": concatenate,
    "split": split,
}
