"""Relayouts on local arrays: bringing a shard from one spec to another, step by step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..layout import Spec
from ..plan.resharding import Step, axis_size, part_of, relayout, whole_axes
from ..rules.spmd import Grid, Sizes, axis_index, fine_names, on_words, shape_in


def bring(x: Any, have: Spec, need: Spec, sizes: Sizes, apart: bool = False) -> Any:
    """Move a shard to another spec, by the steps that :func:`meshpar.plan.resharding.relayout` lists.

    Args:
      apart: what is gathered is put into other memory than it was gathered in.
    """
    if have == need:
        return x
    if 0 in x.shape:
        return jnp.zeros(shape_in(x.shape, have, need, sizes), x.dtype)
    mesh = {a: sizes[a] for a in sizes.fine} if isinstance(sizes, Grid) else sizes
    on_cpus = isinstance(sizes, Grid) and sizes.cpu
    for step in relayout(have, need, shape_in(x.shape, have, ((),) * len(have), sizes), mesh):
        at = _Devices(step, mesh, lambda axes: fine_names(axes, sizes))
        if step.op == "slice":
            x = _cut(at, x)
        elif step.op == "all-gather":
            x = on_words(x, functools.partial(_all_gather, at, apart=apart))
        else:
            if on_cpus:  # else the program's slices of x are taken for those that XLA cuts, which may lie otherwise
                x = on_words(x, lambda x: lax.optimization_barrier([x])[0])
            x = on_words(x, functools.partial(_SENDS[step.op], at))
    return x


class _Devices:
    """A step on a mesh: which axes a dim gains and loses in it, and what JAX is to be told.

    Attributes:
      gains, loses: dim → axes, or parts of axes.
      fine: axes → the names that they have inside the ``shard_map``.
    """

    def __init__(self, step: Step, sizes: Sizes, fine: Callable[[Sequence[str]], tuple[str, ...]]):
        self.step, self.sizes, self.fine = step, sizes, fine
        pairs = list(enumerate(zip(step.before, step.after, strict=True)))
        self.gains = {i: b[len(a) :] for i, (a, b) in pairs if len(b) > len(a)}
        self.loses = {i: a[len(b) :] for i, (a, b) in pairs if len(a) > len(b)}

    def count(self, axes: Sequence[str]) -> int:
        return math.prod(axis_size(a, self.sizes) for a in axes)

    def place(self, axes: Sequence[str]) -> Any:
        """This device's place along axes and parts of axes, the first one major."""
        if not any(map(part_of, axes)):
            return axis_index(self.fine(axes))
        place: Any = 0
        for axis in axes:
            name, before, size = part_of(axis) or (axis, 1, self.sizes[axis])
            mine = axis_index(self.fine([name])) // (self.sizes[name] // (before * size)) % size
            place = place * size + mine
        return place

    def over(self) -> dict[str, Any]:
        """What ``lax`` is told: axes, and where parts of axes take part, the groups of devices along these axes."""
        axes = self.step.axes
        if not any(map(part_of, axes)):
            return {"axis_name": self.fine(axes), "axis_index_groups": None}
        names = numbering(axes, self.sizes)
        places = _places(names, self.sizes)
        mine = _number(axes, places, self.sizes)
        others = [part for name in names for part in _others(name, axes, self.sizes)]
        group = _number(others, places, self.sizes)
        devices = np.lexsort((mine, group)).reshape(-1, self.step.group)
        return {"axis_name": self.fine(names), "axis_index_groups": devices.tolist()}


def _cut(at: _Devices, x: Any) -> Any:
    for i, axes in at.gains.items():
        n = x.shape[i] // at.count(axes)
        x = lax.dynamic_slice_in_dim(x, at.place(axes) * n, n, i)
    return x


def _all_gather(at: _Devices, x: Any, apart: bool = False) -> Any:
    (dim,) = at.loses
    if not apart:
        return lax.all_gather(x, axis=dim, tiled=True, **at.over())
    pieces = lax.all_gather(x, axis=0, tiled=False, **at.over())
    x = jnp.moveaxis(pieces, 0, dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return x if dim else through_integers(x)  # there is nothing to move in front


@jax.custom_jvp
def through_integers(x: Any) -> Any:
    """An array of floats as it is, but no other type, place or copy of it can be read through this.

    Integers of the same bits are seen as other values; they have no derivative, so that of the identity is said.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    (bits,) = lax.optimization_barrier([lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))])
    return lax.bitcast_convert_type(bits, x.dtype)


through_integers.defjvp(lambda primals, tangents: (through_integers(*primals), *tangents))


def _all_to_all(at: _Devices, x: Any) -> Any:
    axes = at.step.axes
    if list(at.gains.values()) == [axes] == list(at.loses.values()):
        return lax.all_to_all(
            x, split_axis=next(iter(at.gains)), concat_axis=next(iter(at.loses)), tiled=True, **at.over()
        )
    # Every dim that gains is cut; the pieces stand in front in the order of the group, and the received ones go where they belong.
    shape: list[int] = []
    place: dict[str, int] = {}
    for i, n in enumerate(x.shape):
        for a in at.gains.get(i, ()):
            place[a] = len(shape)
            shape.append(axis_size(a, at.sizes))
        shape.append(n // at.count(at.gains.get(i, ())))
    front = [place[a] for a in axes]
    x = lax.transpose(lax.reshape(x, shape), (*front, *(k for k in range(len(shape)) if k not in front)))
    local = x.shape[len(front) :]
    x = lax.reshape(x, (at.step.group, *local))
    x = lax.all_to_all(x, split_axis=0, concat_axis=0, tiled=True, **at.over())
    x = lax.reshape(x, (*(axis_size(a, at.sizes) for a in axes), *local))
    order: list[int] = []
    for i in range(len(local)):
        order += [*(axes.index(a) for a in at.loses.get(i, ())), len(front) + i]
    return lax.reshape(lax.transpose(x, order), [n * at.count(at.loses.get(i, ())) for i, n in enumerate(local)])


def _permute(at: _Devices, x: Any) -> Any:
    return lax.ppermute(x, at.fine(numbering(at.step.axes, at.sizes)), permutation(at.step, at.sizes))


_SENDS: dict[str, Callable[[_Devices, Any], Any]] = {
    "all-to-all": _all_to_all,
    "collective-permute": _permute,
}


# -- devices by number


def numbering(axes: Sequence[str], sizes: Sizes) -> tuple[str, ...]:
    """The axes along which devices are numbered, in the order of the mesh: JAX numbers so, in whatever order they are named."""
    names = whole_axes(axes)
    return tuple(a for a in sizes if a in names)


def permutation(step: Step, sizes: Sizes) -> list[tuple[int, int]]:
    """(source, target) for every device of a permute, numbered along its axes in the order of the mesh.

    A device that holds its target shard keeps it; of several others that hold a shard, each sends it to one device.
    """
    places = _places(numbering(step.axes, sizes), sizes)
    holds, wants = (
        list(zip(*(_number(entry, places, sizes).tolist() for entry in spec), strict=True))
        for spec in (step.before, step.after)
    )
    pairs: list[tuple[int, int]] = []
    free: dict[tuple[int, ...], list[int]] = {}
    for k, (held, wanted) in enumerate(zip(holds, wants, strict=True)):
        if held == wanted:
            pairs.append((k, k))
        else:
            free.setdefault(held, []).append(k)
    pairs += [(free[w].pop(0), k) for k, (h, w) in enumerate(zip(holds, wants, strict=True)) if h != w]
    return sorted(pairs)


def _places(names: Sequence[str], sizes: Sizes) -> Mapping[str, np.ndarray]:
    """axis → the place along it of every device, numbered along these axes, the first one major."""
    shape = [sizes[a] for a in names]
    return dict(zip(names, np.indices(shape).reshape(len(shape), -1), strict=True))


def _number(axes: Sequence[str], places: Mapping[str, np.ndarray], sizes: Sizes) -> np.ndarray:
    """The place of every device along axes and parts of axes, the first one major; axes without places count as 0."""
    number = np.zeros_like(next(iter(places.values())))
    for axis in axes:
        name, before, size = part_of(axis) or (axis, 1, sizes[axis])
        number *= size
        if name in places:
            number += places[name] // (sizes[name] // (before * size)) % size
    return number


def _others(name: str, axes: Sequence[str], sizes: Sizes) -> list[str]:
    """The parts of an axis that are not among these."""
    mine = sorted(p[1:] for a in axes if (p := part_of(a)) and p[0] == name)
    out, done = [], 1
    for before, size in [*mine, (sizes[name], 1)] if mine else []:
        if before > done:
            out.append(f"{name}:({done}){before // done}")
        done = before * size
    return out
