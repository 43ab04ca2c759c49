"""Arrays of tests: shapes alone, and drawn ones."""

import math

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


def count_weights(target):
    """Number of weights of a target (step, (state, batch), dims)."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(target[1][0]["params"]))


def drawn(shapes, rest, **below):
    """Arrays for the shapes (state, batch) of a target: zeros for the optimizer, normal floats, integers.

    Args:
      below: name of a leaf of the batch → exclusive bound of its integers; ``rest``: of the others.
    """
    rng = np.random.default_rng(0)

    def array(path, x):
        keys = [getattr(key, "key", None) for key in path]
        if "opt" in keys:
            return np.zeros(x.shape, x.dtype)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return rng.integers(0, below.get(keys[-1], rest), x.shape, dtype=x.dtype)
        return (rng.normal(size=x.shape) / np.sqrt(x.shape[-2] if x.ndim > 1 else 1)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(array, shapes)
