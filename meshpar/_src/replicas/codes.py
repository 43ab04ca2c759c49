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
        return _packed(x >= 0), jnp.abs(x).mean(dims, keepdims=True)

    def decode(code: Any, shape: tuple[int, ...]) -> jax.Array:
        packed, mean = code
        return mean * (2.0 * _unpacked(packed, shape) - 1.0)

    return Code(encode, decode)


def threshold(size: float) -> Code:
    """2 bits per element: ``size``, which is above 0, if it is at least that, ``-size`` if it is at most that, else 0."""

    def encode(x: jax.Array) -> Any:
        return _packed(jnp.stack([x >= size, x <= -size], 1))

    def decode(code: Any, shape: tuple[int, ...]) -> jax.Array:
        high, low = jnp.unstack(_unpacked(code, (shape[0], 2, *shape[1:])), axis=1)
        return size * (high - low)

    return Code(encode, decode)


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
        size = float(number or 0)
    except ValueError:
        size = math.nan
    if kind in DTYPES and not number:
        return eight_bits(kind)
    if text == "sign":
        return sign()
    if kind == "topk" and 0 < size <= 1:
        return top_k(size)
    if kind == "threshold" and 0 < size < math.inf:
        return threshold(size)
    fix = "int8, float8_e4m3fn, sign, topk:0.01 (a fraction of each row), threshold:0.001 (a size above 0)"
    raise UnsupportedError(f"mp.replicas.coded: there is no code {text!r}", fixes=[fix])


def _packed(bits: jax.Array) -> jax.Array:
    """Booleans [..., n] as bytes [..., n / 8]; unchanged if bytes would not be full."""
    return bits if bits.shape[-1] % 8 else jnp.packbits(bits, -1)


def _unpacked(packed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of :func:`_packed` for booleans of this shape, as numbers 0 and 1 in float32."""
    return (packed if packed.shape[-1] == shape[-1] else jnp.unpackbits(packed, -1)).astype(jnp.float32)
