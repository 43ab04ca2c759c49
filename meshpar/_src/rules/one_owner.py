"""Arrays of which one device, the owner, contributes each element: the contribution of the other devices, and the sum of all.

A read at an index along a split dim makes such an array: the device with the index in its shard contributes the element, the others
:func:`neutral`. The sum has the bits of the owner's element: the sign of a zero and the payload of a NaN are preserved, and so are
dtypes without an addition (random keys) or without a zero (``float8_e8m0fnu``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .mesh_in_shard_map import on_words


def neutral(dtype: Any) -> np.ndarray:
    """The scalar that a device contributes to an element that it does not own: -0.0 for floats that are added, else zero bits."""
    dtype = np.dtype(dtype)
    if _added(dtype):
        return np.asarray(-0.0, dtype) if dtype.kind != "c" else np.asarray(complex(-0.0, -0.0), dtype)
    return np.zeros(dtype.itemsize, np.uint8).view(dtype).reshape(())


def adds_nothing(dtype: Any) -> bool:
    """Whether :func:`neutral` is a zero: then contributions may also be scaled, converted, and added to other partial values."""
    plain = not jnp.issubdtype(dtype, jax.dtypes.extended)
    return plain and bool(neutral(dtype).astype(np.complex128) == 0)


def is_positive_zero(scalar: Any) -> bool:
    """Whether a scalar that is known at trace time is zero, and not a negative zero."""
    scalar = np.asarray(scalar)
    return not scalar.any() and not any(scalar.tobytes())


def only_where(mask: Any, x: Any) -> Any:
    """``x`` where a mask is true, else :func:`neutral`.

    Args:
      mask: a boolean scalar, or an array of the shape of ``x``.
      x: an array of any dtype, random keys included.
    """

    def masked(y: Any) -> Any:
        full = lax.broadcast_in_dim(mask, y.shape, range(np.ndim(mask)))
        return lax.select(full, y, jnp.full(y.shape, neutral(y.dtype)))

    return on_words(x, masked)


def addable(x: Any, cpu: bool) -> tuple[Any, Callable[[Any], Any]]:
    """(the array to all-reduce in place of ``x``, the function that recovers the elements from the result).

    Floats of at least 2 bytes are added unchanged: x + -0.0 is x. On CPUs XLA's all-reduce starts from +0.0 and flushes subnormal
    numbers, and some narrower floats have no zero; these are added as unsigned integers of the same width.

    Args:
      x: a contribution to an array whose elements have one owner each.
      cpu: whether XLA's CPU compiler makes the all-reduce.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        impl = jax.random.key_impl(x)
        return jax.random.key_data(x), lambda y: jax.random.wrap_key_data(y, impl=impl)
    dtype = np.dtype(x.dtype)
    if dtype == np.bool_:
        return x.astype(np.uint8), lambda y: y.astype(np.bool_)
    if jnp.issubdtype(dtype, jnp.integer):
        wide = np.dtype(np.int8) if jnp.iinfo(dtype).bits < 8 else dtype
        return x.astype(wide), lambda y: y.astype(dtype)
    if _added(dtype) and not cpu:
        return x, lambda y: y
    if dtype.kind == "c":
        words, restore = addable(jnp.stack([x.real, x.imag], -1), cpu)
        return words, lambda y: lax.complex(*jnp.moveaxis(restore(y), -1, 0))
    bits = jnp.finfo(dtype).bits
    word = np.dtype(f"uint{max(bits, 8)}")
    as_bits = jnp.uint4 if bits == 4 else word
    sign = word.type(1 << (bits - 1) if _added(dtype) else 0)  # maps the bits of neutral to 0
    words = lax.bitcast_convert_type(x, as_bits).astype(word) ^ sign
    return words, lambda y: lax.bitcast_convert_type((y ^ sign).astype(as_bits), dtype)


def _added(dtype: np.dtype) -> bool:
    """Whether contributions of a dtype are added as numbers on accelerators: floats and complex numbers of at least 2 bytes."""
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and dtype.itemsize > 1
