"""Definitions of the collective matmuls by a `psum` over zero-padded blocks, for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels.collective_matmul.dot_dims import Axes, Dot, accumulator_dtype


def gather_dots(x: jax.Array, others: list[jax.Array], dots: list[Dot], axis_name: Axes, dim: int) -> list[jax.Array]:
    """The matmuls of the gathered operand: every device writes its block into zeros, and a `psum` adds them up."""
    devices, rows = lax.axis_size(axis_name), x.shape[dim]
    shape = tuple(n * devices if d == dim else n for d, n in enumerate(x.shape))
    placed = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, lax.axis_index(axis_name) * rows, dim)
    full = lax.psum(placed, axis_name)
    return [dot.of(full, other) for dot, other in zip(dots, others, strict=True)]


def dot_scatter(lhs: jax.Array, rhs: jax.Array, dot: Dot, axis_name: Axes, dim: int) -> jax.Array:
    """The matmul, summed over all devices in at least float32, whatever dtype the implementation sends; returns this
    device's block."""
    dtype = dot.dtype(lhs, rhs)
    full = lax.psum(dot(lhs, rhs, accumulator_dtype(dtype)), axis_name)
    rows = full.shape[dim] // lax.axis_size(axis_name)
    own = lax.dynamic_slice_in_dim(full, lax.axis_index(axis_name) * rows, rows, dim)
    return lax.convert_element_type(own, dtype)
