"""Matmuls of operands in 8 and 4 bits with scales, forward and backward.

Every scale is a power of two, which rounds nothing, times the float8_e4m3fn scale of an NVFP4 block. A scale is the
smallest with which no code overflows.

Formats:
  ``float8``: a scale for each array, of its present largest magnitude; float8_e4m3fn, and float8_e5m2 for gradients
    (Micikevicius et al., *FP8 Formats for Deep Learning*, 2022).
  ``mxfp8``: a scale for each 32 contracted elements; float8_e4m3fn for all operands (Rouhani et al., *Microscaling Data Formats for
    Deep Learning*, 2023; Mishra et al., *Recipes for Pre-training LLMs with MXFP8*, 2025).
  ``nvfp4``: a float8_e4m3fn scale for each 16 contracted elements, and one for the array; float4_e2m1fn. Gradients are rounded
    stochastically, and both operands of a weight's gradient are rotated by a random Hadamard matrix of 16 contracted
    elements (NVIDIA, *Pretraining Large Language Models with NVFP4*, 2025).

In the block formats the tile of a weight with a common scale is as wide as it is long (32 × 32, 16 × 16), so that one copy of the
weight serves the forward and the backward pass, as in the NVFP4 recipe.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..program.primitives import in_blocks_p, times_power_p

NOT_FINITE = 255
"""Biased exponent of float32's infinities and NaN."""
MIN_EXPONENT = 27
"""Biased exponent of the smallest scale, 2**-100: its inverse is a finite float32."""
LARGEST_E2M1 = 6.0


class Scaled(NamedTuple):
    """An operand of a scaled matmul: ``codes * scales * 2**(exponent - 127)``.

    Attributes:
      codes: float8; a dim with blocks is two: the blocks, and the elements of each.
      scales: of each block, with dims of size 1 for its elements: uint8 biased exponents, or float8_e4m3fn; None: no blocks.
      exponent: uint8 scalar, the biased exponent of the scale of the array; None: it has none.
    """

    codes: jax.Array
    scales: jax.Array | None
    exponent: jax.Array | None

    @property
    def values(self) -> jax.Array:
        """The array without its common scale: the codes, or their products with block scales in bfloat16, which are exact."""
        if self.scales is None:
            return self.codes
        scales = power(self.scales) if self.scales.dtype == jnp.uint8 else self.scales
        shape: list[int] = []
        for n, blocks in zip(self.codes.shape, scales.shape, strict=True):
            shape = [*shape[:-1], shape[-1] * n] if blocks < n else [*shape, n]
        return (self.codes.astype(jnp.bfloat16) * scales.astype(jnp.bfloat16)).reshape(shape)


@dataclass(frozen=True)
class ScaledFormat:
    """A format of the operands of matmuls.

    Attributes:
      dtype, gradient: of the codes of weights and activations, and of gradients.
      block: contracted elements with a common scale; 1: one scale for the array.
    """

    name: str
    dtype: str
    gradient: str
    block: int = 1

    def encode(self, x: jax.Array, blocks: Mapping[int, int], path: str, gradient: bool = False) -> Scaled:
        """An array as an operand.

        Args:
          blocks: dim → elements with a common scale, which divide its size; not used if the array has one scale.
          path: of the weight whose matmul reads the array.
        """
        if self.block == 1:
            dtype = jnp.dtype(self.gradient if gradient else self.dtype)
            wide = x.astype(jnp.float32)
            exponent = exponent_of(jnp.abs(wide).max(), float(jnp.finfo(dtype).max))
            return Scaled((wide / power(exponent)).astype(dtype), None, exponent)
        sizes = [blocks.get(d, 1) for d in range(x.ndim)]
        x = in_blocks_p.bind(x, blocks=tuple(sizes), path=path)
        parts = [[n] if block == 1 else [n // block, block] for n, block in zip(x.shape, sizes, strict=True)]
        inner = [sum(map(len, parts[: d + 1])) - 1 for d, part in enumerate(parts) if len(part) > 1]
        wide = x.astype(jnp.float32).reshape([n for part in parts for n in part])
        largest = jnp.abs(wide).max(inner, keepdims=True)
        if self.name == "nvfp4":
            return _four_bits(wide, largest, gradient)
        exponents = exponent_of(largest, float(jnp.finfo(self.dtype).max))
        return Scaled((wide / power(exponents)).astype(self.dtype), exponents, None)


FORMATS = {
    "float8": ScaledFormat("float8", "float8_e4m3fn", "float8_e5m2"),
    "mxfp8": ScaledFormat("mxfp8", "float8_e4m3fn", "float8_e4m3fn", 32),
    "nvfp4": ScaledFormat("nvfp4", "float4_e2m1fn", "float4_e2m1fn", 16),
}
"""Name → format."""

FORMATS_OF_EXPERTS = {
    "float8": ScaledFormat("float8", "float8_e4m3fn", "float8_e4m3fn", 128),
    "mxfp8": FORMATS["mxfp8"],
}
"""Name → format of grouped matmuls, whose scales are of blocks within a row: they do not depend on the rows that a device has.

``float8``: 128 elements, and 128 × 128 of a weight (DeepSeek-V3 Technical Report, 2024, section 3.3), with powers of two."""


def exponent_of(largest: jax.Array, code: float) -> jax.Array:
    """The biased exponents, as uint8, of the smallest powers of two s with ``largest / s <= code``; 255 if that is not finite."""
    bits = lax.bitcast_convert_type(largest / code, jnp.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return jnp.clip(exponents, MIN_EXPONENT, NOT_FINITE).astype(jnp.uint8)


def power(exponent: jax.Array) -> jax.Array:
    """The float32 power of two with a biased exponent; infinity for 255."""
    return lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)


def _four_bits(x: jax.Array, largest: jax.Array, stochastic: bool) -> Scaled:
    """An array in NVFP4; codes are stored in float8_e4m3fn, which has all values of e2m1.

    Args:
      x: float32, reshaped to blocks; largest: the largest magnitude of each block.
      stochastic: round up with the probability of the distance from the code below. The seed of the random bits is the largest
        magnitude of the array in bfloat16, which is the same under all layouts.
    """
    amax = largest.max()
    exponent = exponent_of(amax, LARGEST_E2M1 * float(jnp.finfo(jnp.float8_e4m3fn).max))
    scales = (largest / (LARGEST_E2M1 * power(exponent))).astype(jnp.float8_e4m3fn)
    scale = scales.astype(jnp.float32) * power(exponent)
    # one inverse: a quotient may be rounded otherwise by a compiler that multiplies by the inverse, and its code differ
    inverse = jnp.where(scale == 0, 0.0, 1 / scale)
    size = jnp.minimum(jnp.abs(x) * inverse, LARGEST_E2M1)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    if stochastic:
        key = jax.random.key(lax.bitcast_convert_type(amax.astype(jnp.bfloat16), jnp.uint16))
        bits = jax.random.bits(key, x.shape, jnp.uint32) >> 8
        steps = jnp.floor(size / step + bits.astype(jnp.float32) * 2.0**-24)
    else:
        steps = jnp.round(size / step)
    return Scaled((jnp.sign(x) * steps * step).astype(jnp.float8_e4m3fn), scales, exponent)


def blocks_along(shape: Sequence[int], dims: Sequence[int], block: int) -> dict[int, int] | None:
    """Dim → its elements in a block of consecutive elements along some dims, the last of which varies fastest.

    ``blocks_along((4, 8, 16), (1, 2), 32) == {2: 16, 1: 2}``. None: there are no such blocks.
    """
    blocks, left = {}, block
    for d in reversed(dims):
        blocks[d] = math.gcd(shape[d], left)
        left //= blocks[d]
        if left > 1 and blocks[d] != shape[d]:
            return None
    return blocks if left == 1 else None


@dataclass(frozen=True)
class Matmul:
    """A matmul of a weight, whose operands a format encodes.

    Attributes:
      dims: the ``dimension_numbers`` of its ``dot_general``.
      avals: the abstract arrays of both operands.
      dtype: of the result.
      weight: position of the weight, 0 or 1.
      path: of the weight.
    """

    format: ScaledFormat
    dims: Any
    avals: tuple[Any, ...]
    dtype: Any
    weight: int
    path: str

    def free(self, side: int) -> list[int]:
        """The dims of an operand that are in the result, batch dims excluded."""
        (contracted, batch) = self.dims[0][side], self.dims[1][side]
        return [d for d in range(self.avals[side].ndim) if d not in contracted and d not in batch]

    def free_in_result(self, side: int) -> list[int]:
        """The dims of the result that an operand's free dims are."""
        start = len(self.dims[1][0]) + (len(self.free(0)) if side else 0)
        return list(range(start, start + len(self.free(side))))

    def blocks(self, side: int) -> dict[int, int] | None:
        """Dim → elements of an operand with a common scale: along contracted dims; of the weight, along free ones as well.

        None: its sizes have no blocks, along contracted dims or along free ones, which the backward pass contracts.
        """
        order = np.argsort(self.dims[0][self.weight])  # of the weight, whose last dim varies fastest
        along = [self.dims[0][side][k] for k in order], self.free(side)
        contracted, free = (blocks_along(self.avals[side].shape, dims, self.format.block) for dims in along)
        if contracted is None or free is None:
            return None
        return contracted | free if side == self.weight else contracted

    def encoded_along(self, x: jax.Array, dims: Sequence[int], gradient: bool) -> Scaled:
        """An operand of the backward pass, with blocks along ``dims``."""
        return self.format.encode(x, blocks_along(x.shape, dims, self.format.block) or {}, self.path, gradient)

    def cotangent(self, side: int, g: Scaled, other: Scaled) -> jax.Array:
        """The gradient of an operand: the matmul of the result's gradient with the other operand, in the dims of the operand."""
        contracted, batch = ((pair[side], pair[1 - side]) for pair in self.dims)
        dims = (self.free_in_result(1 - side), self.free(1 - side)), (range(len(batch[0])), batch[1])
        order = [*batch[0], *self.free(side), *(contracted[0][k] for k in np.argsort(contracted[1]))]
        return lax.transpose(_product(g, other, dims, self.avals[side].dtype), np.argsort(order))


def _product(a: Scaled, b: Scaled, dims: Any, dtype: Any) -> jax.Array:
    """The ``dot_general`` of two operands."""
    wide = jnp.float32 if dtype == jnp.float16 else dtype  # the products of unscaled codes overflow in float16
    out = lax.dot_general(a.values, b.values, dims, preferred_element_type=wide)
    if a.exponent is not None and b.exponent is not None:
        scale = jnp.maximum(power(a.exponent) * power(b.exponent), jnp.finfo(jnp.float32).tiny)
        out = times_power_p.bind(out, scale)
    return out.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled_matmul(matmul: Matmul, a: jax.Array, b: jax.Array, qa: Scaled, qb: Scaled) -> jax.Array:
    """The ``dot_general`` of two arrays, from their encoded operands ``qa`` and ``qb``; gradients are by ``a`` and ``b``."""
    return _product(qa, qb, matmul.dims, matmul.dtype)


def _forward(matmul: Matmul, a: Any, b: Any, qa: Scaled, qb: Scaled) -> tuple[jax.Array, Any]:
    (x, qx), qw = ((a, qa), qb) if matmul.weight else ((b, qb), qa)
    # in a block format, the gradient of the weight needs x with blocks along other dims
    return _product(qa, qb, matmul.dims, matmul.dtype), (x if matmul.format.block > 1 else qx, qw)


def _backward(matmul: Matmul, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    x, qw = saved
    weight, other = matmul.weight, 1 - matmul.weight
    qg = matmul.encoded_along(g, matmul.free_in_result(weight), True)
    gradients: list[Any] = [None] * 4
    gradients[other] = matmul.cotangent(other, qg, qw)
    if matmul.format.block > 1:
        dims = matmul.free_in_result(other), matmul.free(other)
        if matmul.format.name == "nvfp4":
            g, x = (_rotated(v, along) for v, along in zip((g, x), dims, strict=True))
        qg, x = matmul.encoded_along(g, dims[0], True), matmul.encoded_along(x, dims[1], False)
    gradients[weight] = matmul.cotangent(weight, qg, x)
    return tuple(gradients)


scaled_matmul.defvjp(_forward, _backward)


HADAMARD = functools.reduce(np.kron, [np.array([[1, 1], [1, -1]])] * 4)
"""Hadamard matrix [16, 16]; its columns times a fixed vector of random signs rotate the blocks of a weight's gradient."""
SIGNS = np.random.default_rng(2025).choice([-1.0, 1.0], 16)


def _rotated(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Blocks of 16 consecutive elements along some dims, multiplied by an orthogonal matrix; float32."""
    blocks = blocks_along(x.shape, dims, 16) or {}
    d, order = next((d, n) for d, n in blocks.items() if n > 1)
    matrix = (SIGNS[:order, None] * HADAMARD[:order, :order] / math.sqrt(order)).astype(np.float32)
    split = x.astype(jnp.float32).reshape(*x.shape[:d], -1, order, *x.shape[d + 1 :])
    return jnp.moveaxis(jnp.tensordot(split, matrix, (d + 1, 0)), -1, d + 1).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def rounded(form: ScaledFormat, blocks: tuple[tuple[int, int], ...], path: str, x: jax.Array) -> jax.Array:
    """The values of an array's codes, in its dtype; the gradient is that of the array. ``blocks``: (dim, elements), …"""
    return form.encode(x, dict(blocks), path).values.astype(x.dtype)


rounded.defvjp(lambda *args: (rounded(*args), None), lambda *args: (args[-1],))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_rounded_gradient(form: ScaledFormat, y: jax.Array) -> jax.Array:
    """``y``, whose gradient is rounded to the values of codes, with blocks along its last dim."""
    return y


with_rounded_gradient.defvjp(
    lambda _, y: (y, None), lambda form, _, g: (rounded(form, ((g.ndim - 1, form.block),), "", g),)
)
