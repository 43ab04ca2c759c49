"""Matmuls, row sums, cotangents and cost estimates that several ops have in common."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl


def precision(dtype: Any) -> lax.Precision:
    """Float32 operands are multiplied as such; bfloat16 ones need no more than one pass."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def wide(*arrays: Any) -> Any:
    """The dtype of accumulators: float32, or float64 of float64 operands."""
    return jnp.promote_types(jnp.result_type(*(a.dtype for a in arrays)), jnp.float32)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """a · b contracted over dims (contract[0], contract[1]), accumulated and returned in float32."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision(a.dtype), preferred_element_type=jnp.float32)


def cost(flops: float, nbytes: float, *, transcendentals: float = 0, remote: float = 0) -> pl.CostEstimate:
    """The cost estimate of a kernel that reads and writes `nbytes`, and sends `remote` bytes to other devices."""
    return pl.CostEstimate(int(flops), int(transcendentals), int(nbytes), int(remote))


def no_tangent(x: Any) -> np.ndarray | None:
    """The cotangent of an array of integers, or of None."""
    return None if x is None else np.zeros(x.shape, jax.dtypes.float0)


def row_dots(a: jax.Array, b: jax.Array) -> jax.Array:
    """Σ a·b over the last dim, in float32 or wider."""
    return (a.astype(wide(a)) * b.astype(wide(b))).sum(-1)
