"""Quantization of arrays to 8 bits with a scale for each block of contiguous elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
"""Dtype of the codes → the code of the largest element of a block."""


def quantize(x: jax.Array, dtype: Any, block: int, leading: int = 0) -> tuple[jax.Array, jax.Array]:
    """(codes [*leading dims, rows, columns], scales float32 [*leading dims, rows, columns / block]) of x.

    A block is `block` elements along the last dim, or, if they do not divide it, of the flattened dims after the leading
    ones, padded with zeros. The scale is the largest absolute value of the block over `LARGEST`; a block with a NaN or an
    infinity has a NaN or infinite scale, so that all of it is NaN after `dequantize`.

    The error of an element is at most scale / 2 for int8 (1/254 of the largest of its block), and for float8_e4m3fn
    max(|x| / 16, scale / 1024), besides the rounding of float32.
    """
    lead, rest = x.shape[:leading], x.shape[leading:]
    if rest and rest[-1] % block == 0:
        rows = x.reshape(*lead, -1, rest[-1])
    else:
        flat = x.reshape(*lead, -1)
        flat = jnp.pad(flat, [(0, 0)] * leading + [(0, -flat.shape[-1] % block)])
        rows = flat.reshape(*lead, -1, block)
    wide = rows.astype(jnp.float32)
    blocks = wide.reshape(*wide.shape[:-1], -1, block)
    scale = jnp.abs(blocks).max(-1) / LARGEST[jnp.dtype(dtype)]
    factor = jnp.where(scale > 0, 1 / scale, 0.0)  # an infinite factor would make NaN of zeros
    factor = jnp.where(jnp.isfinite(factor), factor, 0.0)
    scaled = (blocks * factor[..., None]).reshape(wide.shape)
    most = LARGEST[jnp.dtype(dtype)]
    scaled = jnp.clip(scaled, -most, most)  # 1 / scale is rounded
    codes = jnp.round(scaled) if dtype == jnp.int8 else scaled
    return jnp.where(jnp.isnan(codes), 0, codes).astype(dtype), scale


def dequantize(codes: jax.Array, scale: jax.Array, shape: Sequence[int], leading: int = 0) -> jax.Array:
    """float32 [*leading dims, *shape]: the inverse of `quantize`; `shape` is of the dims after the leading ones."""
    blocks = codes.astype(jnp.float32).reshape(*scale.shape, -1) * scale[..., None]
    flat = blocks.reshape(*codes.shape[:leading], -1)[..., : math.prod(shape)]
    return flat.reshape(*codes.shape[:leading], *shape)
