"""Reductions of partial sums on local arrays: all-reduce, and reduce-scatter of one dim."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar_kernels.collectives import coloured, in_order

from ..errors import UnsupportedError
from ..layout import Spec
from ..plan.collectives import Form, reduces, settlement
from ..program.ir import Value
from ..rules.spmd import Grid, Sizes, fine_names, shape_in


def check_blocks(value: Value, spec: Spec, sizes: Sizes) -> None:
    """Raises UnsupportedError where a dim does not divide over the axes that split it."""
    for i, (n, axes) in enumerate(zip(value.shape, spec, strict=True)):
        parts = math.prod(sizes[a] for a in axes)
        if n % parts:
            raise UnsupportedError(
                f"dim {i} of size {n} does not divide over {'+'.join(axes)} ({parts} parts)",
                path=value.path,
                shape=value.shape,
                fixes=['use lowering="jit", which pads', f"or a size that is a multiple of {parts}"],
            )


def _scatter(x: Any, axes: Sequence[str], dim: int, form: Form, sizes: Sizes) -> Any:
    """Sum over axes of the factored mesh, and keep this device's block of a dim.

    Dims of size 1 before it are left out meanwhile: with one the TPU compiler makes an all-reduce, which sends twice the bytes.
    """
    if not axes:
        return x
    ones = tuple(i for i in range(dim) if x.shape[i] == 1)
    if ones:
        return lax.expand_dims(_scatter(lax.squeeze(x, ones), axes, dim - len(ones), form, sizes), ones)
    if form == "coloured":
        return coloured("reduce_scatter", x, axes, dim)
    if form == "hierarchical":
        assert isinstance(sizes, Grid)
        between = sizes.between_slices
        order = sorted(range(len(axes)), key=lambda k: axes[k] in between)  # what crosses slices is the smallest
        return in_order("reduce_scatter", x, axes, dim, order)
    stages = [tuple(axes)] if form == "native" or not isinstance(sizes, Grid) else axes
    for stage in stages:
        parts = lax.axis_size(stage)
        shape, at = scattered_as(x.shape, dim, parts, x.dtype.itemsize)
        kept = tuple(n // parts if i == dim else n for i, n in enumerate(x.shape))
        x = lax.psum_scatter(lax.reshape(x, shape), stage, scatter_dimension=at, tiled=True)
        x = lax.reshape(x, kept)
    return x


def scattered_as(shape: tuple[int, ...], dim: int, parts: int, itemsize: int) -> tuple[tuple[int, ...], int]:
    """In which shape an array is reduce-scattered over a dim, and which dim that is then: as it is, where that will do.

    Two more cases in which the TPU compiler (libtpu 0.0.42) makes an all-reduce: a dim before the last that is padded to 8, and
    a last dim of which an odd number of 128 lanes of two bytes is kept. So the dims behind are made one, or the last is split.
    """
    n, after = shape[dim], shape[dim + 1 :]
    if len(after) > 1 and after[-2] % 8:
        return (*shape[: dim + 1], math.prod(after)), dim
    if dim and not after and itemsize == 2 and n % (parts * 128) == 0 and n // (parts * 128) % 2:
        return (math.prod(shape[:dim]), parts, n // parts), 1
    return shape, dim


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extremum(x: Any, axes: tuple[str, ...], largest: bool) -> Any:
    """The largest (smallest) of what devices have; its derivative, which JAX leaves out, is theirs who have it, in equal shares."""
    return (lax.pmax if largest else lax.pmin)(x, axes)


@_extremum.defjvp
def _(axes: tuple[str, ...], largest: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    out = _extremum(x, axes, largest)
    if t.dtype == jax.dtypes.float0:
        return out, t
    mine = (x == out).astype(x.dtype)
    return out, lax.psum(mine * t, axes) / lax.psum(mine, axes)


@dataclass(frozen=True)
class Extremum:
    """An extremum that is unsettled: of this device's shard of what it was taken, over which dims, and how it was turned since.

    What is settled has a derivative of its own: to all elements that equal it, in equal shares.
    """

    x: Any
    dims: tuple[int, ...]
    largest: bool
    views: tuple[Callable[[Any], Any], ...] = ()

    def turned(self, view: Callable[[Any], Any]) -> Extremum:
        return replace(self, views=(*self.views, view))

    def settled(self, found: Any, axes: tuple[str, ...]) -> Any:
        """What devices found together over axes."""
        return _shared(found, self.x, replace(self, x=None), axes)

    def seen(self, x: Any) -> Any:
        return functools.reduce(lambda x, view: view(x), self.views, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _shared(found: Any, x: Any, of: Extremum, axes: tuple[str, ...]) -> Any:
    del x, of, axes
    return found


@_shared.defjvp
def _(of: Extremum, axes: tuple[str, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    (found, x), (t, tx) = primals, tangents
    if t.dtype == jax.dtypes.float0:
        return _shared(found, x, of, axes), t
    mine = (x.max if of.largest else x.min)(of.dims)
    equal = (x == lax.expand_dims(mine, of.dims)).astype(x.dtype)
    held = (of.seen(mine) == found).astype(x.dtype)
    whole, count = (lax.psum(held * of.seen(y.sum(of.dims)), axes) for y in (equal * tx, equal))
    return _shared(found, x, of, axes), whole / count


def settle(
    x: Any, have: Spec, rest: Spec, axes: Sequence[str], kind: str, sizes: Sizes, forms: Mapping[int, Form] | None = None,
    begun: bool = False,
) -> tuple[Any, Spec]:  # fmt: skip
    """Make a partial value whole, as :func:`meshpar.plan.collectives.settlement` says: (the shard, its spec).

    Args:
      forms: dim → how it is scattered, as the plan says; one torus dimension after the other where it says nothing.
      begun: a ring has scattered it over the first axis (of the factored mesh) already: the others follow one after the other.
    """
    scatter, reduce = settlement(have, rest, axes, kind)
    dtype = x.dtype
    if 0 in x.shape:
        spec = tuple((*s, *scatter.get(i, ())) for i, s in enumerate(have))
        return jnp.zeros(shape_in(x.shape, have, spec, sizes), dtype), spec
    if dtype == np.bool_:  # a sum of booleans is a lookup, in which one device has the value
        x = x.astype(np.uint8)
    spec = have
    for i, got in scatter.items():
        spec = tuple((*s, *got) if k == i else s for k, s in enumerate(spec))
        got = fine_names([a for a in got if sizes[a] > 1], sizes)
        form = "staged" if begun else (forms or {}).get(i, "staged")
        x, begun = _scatter(x, got[begun:], i, form, sizes), False
    reduce = fine_names([a for a in reduce if sizes[a] > 1], sizes)
    if reduce and reduces(kind, dtype):
        x = lax.psum(x, reduce) if kind == "sum" else _extremum(x, reduce, kind in ("max", "or"))
    elif reduce:
        every = lax.all_gather(x, reduce, axis=0)
        together = {"prod": jnp.multiply, "and": jnp.bitwise_and, "or": jnp.bitwise_or}[kind]
        x = functools.reduce(together, [every[k] for k in range(every.shape[0])])
    return x.astype(dtype), spec
