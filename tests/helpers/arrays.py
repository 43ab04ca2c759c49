"""Arrays of tests: shapes alone, and drawn ones."""

import jax
import jax.numpy as jnp
import numpy as np

F32, BF16 = 4, 2


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def normal(rng, *shape):
    """Standard normal, float32."""
    return rng.normal(size=shape).astype(np.float32)


def weights(rng, *shape):
    """Normal, float32, divided by the root of the first dim: so that matmuls keep the magnitude."""
    return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
