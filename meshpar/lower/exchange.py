"""How a reduce-scatter is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from meshpar_kernels.collectives import coloured, in_order

from ..hardware.collective_time import Form
from ..rules.spmd import Grid, Sizes


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
