"""Codes of gradients: each replica encodes its own, the codes are exchanged, and every replica decodes all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import UnsupportedError
from ..layers.block_codes import DTYPES, BlockCode


class Code(NamedTuple):
    """Encoder and decoder of arrays [replica, ...] in float32.

    Attributes:
      encode: from an array to a tree of arrays, each with the replica dim first; each replica's code depends on its own elements
        only.
      decode: from a code and a shape to the array of this shape, with rounding or other losses of the code.
    """

    encode: Callable[[jax.Array], Any]
    decode: Callable[[Any, tuple[int, ...]], jax.Array]


def eight_bits(dtype: str) -> Code:
    """8 bits per element and 8 per row (last dim): :class:`BlockCode` without blocks."""
    code = BlockCode(dtype)
    return Code(code.encode, lambda coded, shape: code.decode(coded))


def sign() -> Code:
    """1 bit per element: its sign, times the mean magnitude.

    There is one mean per replica; for arrays [replica, a, b, c, …] one per index of ``a`` (stacked layers).
    """

    def encode(x: jax.Array) -> Any:
        dims = tuple(range(2 if x.ndim > 3 else 1, x.ndim))
        return pack((x >= 0).astype(jnp.uint8), 1), jnp.abs(x).mean(dims, keepdims=True)

    def decode(code: Any, shape: tuple[int, ...]) -> jax.Array:
        packed, mean = code
        return mean * (2.0 * unpack(packed, 1, shape).astype(jnp.float32) - 1.0)

    return Code(encode, decode)


def threshold(size: float) -> Code:
    """2 bits per element: ``size``, which is above 0, if it is at least that, ``-size`` if it is at most that, else 0."""

    def encode(x: jax.Array) -> Any:
        return pack(jnp.where(x >= size, 2, jnp.where(x <= -size, 0, 1)).astype(jnp.uint8), 2)

    return Code(encode, lambda code, shape: size * (unpack(code, 2, shape).astype(jnp.float32) - 1.0))


def top_k(fraction: float) -> Code:
    """The values and indices of the elements of largest magnitude of each row (last dim): a fraction of them, at least one."""

    def encode(x: jax.Array) -> Any:
        size = x.shape[-1]
        _, at = jax.lax.top_k(jnp.abs(x), max(1, round(fraction * size)))
        return jnp.take_along_axis(x, at, -1), at.astype(jnp.uint16 if size <= 2**16 else jnp.int32)

    def decode(code: Any, shape: tuple[int, ...]) -> jax.Array:
        values, at = code
        return jnp.put_along_axis(jnp.zeros(shape), at.astype(jnp.int32), values, -1, inplace=False)

    return Code(encode, decode)


def code_of(text: str) -> Code:
    """The code of this text: ``int8``, ``float8_e4m3fn``, ``sign``, ``topk:0.01``, ``threshold:0.001``.

    Raises:
      UnsupportedError: there is no such code.
    """
    kind, _, number = text.partition(":")
    try:
        size = float(number) if number else None
    except ValueError:
        size = math.nan
    if size is None and kind in DTYPES:
        return eight_bits(kind)
    if size is None and kind == "sign":
        return sign()
    if kind == "topk" and size is not None and 0 < size <= 1:
        return top_k(size)
    if kind == "threshold" and size is not None and 0 < size < math.inf:
        return threshold(size)
    fix = "int8, float8_e4m3fn, sign, topk:0.01 (a fraction of each row), threshold:0.001 (a size above 0)"
    raise UnsupportedError(f"mp.replicas.coded: there is no code {text!r}", fixes=[fix])


def pack(values: jax.Array, bits: int) -> jax.Array:
    """Numbers below ``2**bits`` [..., n] as bytes [..., n * bits / 8]; unchanged if bytes would not be full."""
    per_byte = 8 // bits
    if values.shape[-1] % per_byte:
        return values
    grouped = values.reshape(*values.shape[:-1], -1, per_byte)
    return (grouped << _shifts(bits)).sum(-1, dtype=jnp.uint8)


def unpack(packed: jax.Array, bits: int, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of :func:`pack`, for values of this shape."""
    if packed.shape[-1] == shape[-1]:
        return packed
    return ((packed[..., None] >> _shifts(bits)) & jnp.uint8(2**bits - 1)).reshape(*packed.shape[:-1], shape[-1])


def _shifts(bits: int) -> jax.Array:
    return jnp.arange(0, 8, bits, dtype=jnp.uint8)
