"""Floating-point arrays in 8 bits: a code per element and a power of two per block of the last dim.

The format follows Rouhani et al., *Microscaling Data Formats for Deep Learning* (2023): each block stores an exponent in 8
bits, by which its elements are scaled. A scale is a power of two, so that scaling does not round: only codes are rounded, to the
nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import UnsupportedError

DTYPES = ("int8", "float8_e4m3fn")

_HEADROOM = {"int8": 6, "uint8": 7, "float8_e4m3fn": 7}
"""For each dtype of codes h: a block is scaled so that its largest magnitude is in [2**h, 2**(h + 1))."""

_NOT_FINITE = 255
"""Biased exponent of float32's infinities and NaN."""


class Coded(NamedTuple):
    """An array in 8 bits.

    Attributes:
      codes: one per element, with the shape of the array.
      exponents: uint8, biased exponent of each block's scale; the array's shape with the number of blocks as last dim.
    """

    codes: Any
    exponents: Any


@dataclass(frozen=True)
class BlockCode:
    """Encoder and decoder of float32 arrays in 8 bits per element.

    Attributes:
      dtype: ``"int8"`` or ``"float8_e4m3fn"``.
      block: elements of the last dim with a common scale. A dim that it does not divide, and None, have one scale for the dim.
      nonnegative: the elements are at least 0 and are stored as square roots, in codes of uint8 whatever ``dtype`` is. An element
        above 0 has a code above 0.
    """

    dtype: str = "int8"
    block: int | None = None
    nonnegative: bool = False

    def __post_init__(self) -> None:
        """Raise UnsupportedError if ``dtype`` is not a dtype of codes or ``block`` is below 1."""
        if self.dtype not in DTYPES:
            raise UnsupportedError(f"no 8-bit code has the dtype {self.dtype!r}", fixes=[" or ".join(DTYPES)])
        if self.block is not None and self.block < 1:
            raise UnsupportedError(f"block={self.block}, which must be at least 1", fixes=["block=32"])

    @property
    def code_dtype(self) -> str:
        """The dtype of stored codes."""
        return "uint8" if self.nonnegative else self.dtype

    def blocks(self, size: int) -> int:
        """The number of blocks of a last dim of ``size`` elements."""
        return size // self.block if self.block and size % self.block == 0 and size else 1

    def encode(self, x: jax.Array) -> Coded:
        """The code of an array [..., n]; a block with an infinity or NaN decodes to NaN."""
        x = x.astype(jnp.float32)
        if self.nonnegative:
            x = jnp.sqrt(x)
        blocks = self.blocks(x.shape[-1])
        magnitude = jnp.abs(x)
        if blocks == 1:
            largest = magnitude.max(-1, keepdims=True)
        else:
            largest = magnitude.reshape(*x.shape[:-1], blocks, -1).max(-1)
        highest = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
        exponents = jnp.maximum(highest - _HEADROOM[self.code_dtype], 1)
        inverse = jax.lax.bitcast_convert_type((254 - exponents) << 23, jnp.float32)
        scaled = x * per_element(inverse, x.shape)
        exponents = jnp.where(highest == _NOT_FINITE, _NOT_FINITE, exponents)
        return Coded(rounded(scaled, self.code_dtype), exponents.astype(jnp.uint8))

    def decode(self, coded: Coded) -> jax.Array:
        """The float32 array of a code."""
        exponents = coded.exponents.astype(jnp.int32)
        scale = jax.lax.bitcast_convert_type(exponents << 23, jnp.float32)
        scale = jnp.where(exponents == _NOT_FINITE, jnp.nan, scale)
        x = coded.codes.astype(jnp.float32) * per_element(scale, coded.codes.shape)
        return x * x if self.nonnegative else x


def rounded(x: jax.Array, dtype: str) -> jax.Array:
    """Scaled elements as codes: to the nearest; in uint8, an element above 0 has a code above 0."""
    if dtype == "uint8":
        codes = jnp.clip(jnp.round(x), 0.0, 255.0)
        return jnp.where(x > 0, jnp.maximum(codes, 1.0), codes).astype(jnp.uint8)
    return jnp.clip(jnp.round(x), -127.0, 127.0).astype(jnp.int8) if dtype == "int8" else x.astype(dtype)


def per_element(per_block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One value per block as an array that broadcasts to ``shape``.

    Args:
      per_block: of the rank of ``shape``; a dim with n blocks is repeated for their elements, one of size 1 is not.
    """
    for dim, (blocks, size) in enumerate(zip(per_block.shape, shape, strict=True)):
        if 1 < blocks < size:
            per_block = jnp.repeat(per_block, size // blocks, axis=dim)
    return per_block
