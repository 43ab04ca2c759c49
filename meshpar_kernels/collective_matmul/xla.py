"""The collective matmuls with XLA's own collectives, before or after the matmul."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from meshpar_kernels.collective_matmul.dot_dims import Axes, Dot, accumulator_dtype


def gather_dots(x: jax.Array, others: list[jax.Array], dots: list[Dot], axis_name: Axes, dim: int) -> list[jax.Array]:
    """One all-gather, then the matmuls."""
    x = lax.all_gather(x, axis_name, axis=dim, tiled=True)
    return [dot.of(x, other) for dot, other in zip(dots, others, strict=True)]


def dot_scatter(
    lhs: jax.Array, rhs: jax.Array, dot: Dot, axis_name: Axes, dim: int, *, comm_dtype: Any = None
) -> jax.Array:
    """The matmul, then one reduce-scatter."""
    dtype = dot.dtype(lhs, rhs)
    full = dot(lhs, rhs, accumulator_dtype(dtype))
    if comm_dtype is not None:
        full = lax.convert_element_type(full, comm_dtype)
    out = lax.psum_scatter(full, axis_name, scatter_dimension=dim, tiled=True)
    return lax.convert_element_type(out, dtype)
