"""XLA's own collectives: over all axes at once, over one axis after another in any order, and hierarchical."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def native(kind: str, x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """One collective of XLA over all axes."""
    if kind == "all_gather":
        return lax.all_gather(x, tuple(axes), axis=0, tiled=True)
    if kind == "reduce_scatter":
        return lax.psum_scatter(x, tuple(axes), scatter_dimension=0, tiled=True)
    return lax.psum(x, tuple(axes))


def staged(kind: str, x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """One collective of XLA for each axis. A gather begins with the minor axis, a scatter with the major one, which
    leaves the blocks in order."""
    if kind == "all_gather":
        for axis in reversed(axes):
            x = lax.all_gather(x, axis, axis=0, tiled=True)
        return x
    if kind == "reduce_scatter":
        for axis in axes:
            x = lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
        return x
    flat, shape = _padded(x, math.prod(lax.axis_size(a) for a in axes))
    flat = staged("all_gather", staged("reduce_scatter", flat, axes), axes)
    return flat[: x.size].reshape(shape)


def hierarchical(kind: str, x: jax.Array, axes: Sequence[str], outer: Sequence[str]) -> jax.Array:
    """A collective that sends as little as possible over the slow axes `outer`.

    A gather begins with them and a scatter ends with them. An all-reduce reduces only the shard that the reduce-scatter
    over the inner axes leaves.
    """
    inner = [a for a in axes if a not in outer]
    outside = [a for a in axes if a in outer]
    sizes = [lax.axis_size(a) for a in axes]
    if kind == "all_reduce":
        flat, shape = _padded(x, math.prod(lax.axis_size(a) for a in inner))
        part = lax.psum(staged("reduce_scatter", flat, inner), tuple(outside))
        return staged("all_gather", part, inner)[: x.size].reshape(shape)
    order = [axes.index(a) for a in inner + outside]
    if kind == "all_gather":
        every = staged("all_gather", staged("all_gather", x, outside), inner)
        blocks = every.reshape(*[sizes[k] for k in order], *x.shape)
        back = [order.index(k) for k in range(len(order))]
        blocks = blocks.transpose(*back, *range(len(order), blocks.ndim))
        return blocks.reshape(-1, *x.shape[1:])
    blocks = x.reshape(*sizes, x.shape[0] // math.prod(sizes), *x.shape[1:])
    blocks = blocks.transpose(*order, *range(len(order), blocks.ndim)).reshape(x.shape)
    return staged("reduce_scatter", staged("reduce_scatter", blocks, inner), outside)


def scatter_in_order(x: jax.Array, axes: Sequence[str], dim: int, order: Sequence[int]) -> jax.Array:
    """A reduce-scatter along `dim` by one collective of XLA for each axis, in the order of these indices of the axes; the
    blocks of the result are in the order of the devices, the first axis major."""
    sizes = [lax.axis_size(a) for a in axes]
    block = x.shape[dim] // math.prod(sizes)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    x = x.reshape(*before, *sizes, block, *after)
    for k in order:
        x = lax.psum_scatter(x, axes[k], scatter_dimension=dim + k, tiled=True)
    return x.reshape(*before, block, *after)


def gather_sum(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum of x over all devices in the order of the ranks, in float32 (integers in their own dtype), by an
    all-gather."""
    every = lax.all_gather(x, tuple(axes), axis=0, tiled=False).reshape(-1, *x.shape)
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x.dtype
    total = every[0].astype(wide)
    for one in every[1:]:
        total += one.astype(wide)
    return total.astype(x.dtype)


def _padded(x: jax.Array, parts: int) -> tuple[jax.Array, tuple[int, ...]]:
    """(x as one row, padded with zeros to a multiple of `parts`; the shape of x)."""
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % parts)), x.shape
