"""Grouped matmul of 8-bit operands with block scales: the public functions, quantization, and gradients."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshpar_kernels import _compat
from meshpar_kernels._choose import dispatch, refuse_sharded
from meshpar_kernels._quantize import LARGEST, dequantize, quantize
from meshpar_kernels.config import Config, keywords_in_config, only_num_sms
from meshpar_kernels.grouped_matmul import hopper_scaled
from meshpar_kernels.grouped_matmul.api import (
    as_offset,
    check_group_sizes,
    grouped_matmul,
    grouped_matmul_transpose,
)
from meshpar_kernels.grouped_matmul.hopper_scaled import BLOCK


@keywords_in_config("num_sms")
def scaled_grouped_matmul(
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | int | None = None,
    out_dtype: Any = jnp.bfloat16,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Multiply the rows of each group by that group's matrix, both of 8-bit codes with block scales: 1 × 128 of lhs and
    128 × 128 of rhs, as DeepSeek-V3 has them.

    The codes of 128 contracted elements are multiplied and accumulated by the tensor cores (int8 exactly in int32), the
    sums multiplied by the two scales and added up in float32. Limit: the rate of 8-bit matmuls (1979 TFLOP/s on an H100 or
    H200, NVIDIA's datasheet) or one read of the weights, 1 byte each. On an H200 it reaches 605 and 680 TFLOP/s with
    DeepSeek-V3's shapes (`benchmarks/results/device.md`).

    Sources: DeepSeek-V3 Technical Report (2024), section 3.3; DeepGEMM (DeepSeek 2025).

    Example:

        codes, scale = ...                                # float8_e4m3fn [M, K], float32 [M, K / 128]
        out = scaled_grouped_matmul(codes, scale, weights, weights_scale, group_sizes)     # bfloat16 [M, N]

    Args:
      lhs: [M, K], int8 or float8_e4m3fn; K is a multiple of 128.
      lhs_scale: float32 [M, K / 128].
      rhs: [G, N, K], lhs's dtype; N is a multiple of 128.
      rhs_scale: float32 [G, N / 128, K / 128].
      group_sizes, group_offset: as in `grouped_matmul`.
      out_dtype: bfloat16, float16 or float32 in the kernel.
      implementation: "pallas_gpu": the kernel of Hopper GPUs (sm_90a). "xla": dequantizes lhs, and the weights of one group
        at a time, in float32. None: the kernel on Hopper GPUs, else "xla".
      config: `Config(num_sms=...)`: thread blocks of the GPU kernel's grid; None: the number of multiprocessors.

    Returns:
      [M, N]; rows of no group are 0. It has no derivative: see `quantized_grouped_matmul`.

    Raises:
      ValueError: shapes, dtypes or an implementation that do not fit, operands sharded outside of `shard_map`, or a
        derivative.
      NotImplementedError: the requested kernel cannot take these arguments; with every reason.
    """
    op = "scaled_grouped_matmul"
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[2]:
        raise ValueError(f"{op}: lhs must be [M, K] and rhs [G, N, K], got {list(lhs.shape)} and {list(rhs.shape)}")
    (m, k), (groups, n, _) = lhs.shape, rhs.shape
    _check_blocks(op, k, n)
    if lhs.dtype != rhs.dtype or lhs.dtype not in LARGEST:
        raise ValueError(
            f"{op}: lhs and rhs must both be int8 or both float8_e4m3fn, got {lhs.dtype} and {rhs.dtype}; "
            "quantized_grouped_matmul quantizes wider arrays"
        )
    shapes = {"lhs_scale": (lhs_scale, (m, k // BLOCK)), "rhs_scale": (rhs_scale, (groups, n // BLOCK, k // BLOCK))}
    for name, (scale, shape) in shapes.items():
        if scale.shape != shape or scale.dtype != jnp.float32:
            raise ValueError(f"{op}: {name} must be float32 {list(shape)}, got {scale.dtype}{list(scale.shape)}")
    check_group_sizes(op, group_sizes, groups, group_offset)
    refuse_sharded(op, lhs=lhs, lhs_scale=lhs_scale, rhs=rhs, rhs_scale=rhs_scale, group_sizes=group_sizes)
    offset = as_offset(group_offset)
    how = _How(jnp.dtype(out_dtype), implementation, only_num_sms(op, config), lhs.dtype)
    operands = _compat.same_varying(lhs, lhs_scale, rhs, rhs_scale, group_sizes, offset)
    result: Any = _scaled(how, *operands)
    return result


@keywords_in_config("num_sms")
def quantized_grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: Any = jnp.float8_e4m3fn,
    transpose_rhs: bool = False,
    group_offset: jax.Array | int | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """`grouped_matmul` in 8 bits: quantizes lhs by rows and 128 elements of K, rhs by blocks of 128 × 128, and multiplies
    the codes (`scaled_grouped_matmul`).

    Error: with e(x) the error of a quantized element, a result has an error of at most Σ_k e(lhs)·abs(rhs) +
    (abs(lhs) + e(lhs))·e(rhs), besides the rounding of float32 and of the result. e(x) is 1/254 of the largest of its
    block for int8, and max(abs(x) / 16, largest / 458752) for float8_e4m3fn.

    The gradient of lhs is a `scaled_grouped_matmul` too: the cotangent is quantized by rows and 128 elements of N, and the
    weights' codes are transposed, which copies them (a byte each). The gradient of rhs is a
    `grouped_matmul_transpose` of the dequantized lhs and the cotangent in bfloat16 (float32 if lhs is): in 8 bits, blocks of
    128 rows would cross the groups. Both take rounding to have derivative 1.

    Example:

        out = quantized_grouped_matmul(tokens, weights, group_sizes)         # bfloat16 [M, K], [G, K, N] → [M, N]

    Args:
      lhs: [M, K], float32, bfloat16 or float16.
      rhs: [G, K, N], or [G, N, K] with `transpose_rhs`; K and N are multiples of 128.
      group_sizes, group_offset: as in `grouped_matmul`.
      dtype: of the codes: float8_e4m3fn or int8.
      transpose_rhs: contract rhs's last dim. In this layout the codes of the forward pass need no transposition.
      out_dtype: dtype of the result; None: lhs's.
      implementation, config: as in `scaled_grouped_matmul`; the gradient of rhs uses the default of
        `grouped_matmul_transpose`, and "xla" with "xla".

    Returns:
      [M, N]. Differentiable with respect to lhs and rhs. For the backward pass it saves the codes and scales.

    Raises:
      ValueError, NotImplementedError: as `scaled_grouped_matmul`.
    """
    op = "quantized_grouped_matmul"
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[2 if transpose_rhs else 1]:
        layout = "[G, N, K]" if transpose_rhs else "[G, K, N]"
        raise ValueError(f"{op}: lhs must be [M, K] and rhs {layout}, got {list(lhs.shape)} and {list(rhs.shape)}")
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
            raise ValueError(f"{op}: {name} is {x.dtype}; it must be float32, bfloat16 or float16: cast it")
    if jnp.dtype(dtype) not in LARGEST:
        raise ValueError(f"{op}: dtype={jnp.dtype(dtype).name} must be {' or '.join(map(str, LARGEST))}")
    _check_blocks(op, *(rhs.shape[:0:-1] if transpose_rhs else rhs.shape[1:]))
    check_group_sizes(op, group_sizes, rhs.shape[0], group_offset)
    refuse_sharded(op, lhs=lhs, rhs=rhs, group_sizes=group_sizes)
    offset = as_offset(group_offset)
    lhs, rhs, group_sizes, offset = _compat.same_varying(lhs, rhs, group_sizes, offset)
    out_dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    how = _How(out_dtype, implementation, only_num_sms(op, config), jnp.dtype(dtype))
    matmul: Any = _quantized(how, lhs, rhs if transpose_rhs else rhs.swapaxes(1, 2), group_sizes, offset)
    return matmul


class _How(NamedTuple):
    """Static arguments: dtype of the result, implementation, thread blocks, dtype of the codes."""

    out_dtype: Any
    implementation: str | None
    num_sms: int | None
    dtype: Any


def _check_blocks(op: str, k: int, n: int) -> None:
    for name, size in (("K", k), ("N", n)):
        if size % BLOCK or not size:
            raise ValueError(f"{op}: {name}={size} is no multiple of {BLOCK}, the block of a scale; pad it with zeros")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _scaled(how: _How, lhs, lhs_scale, rhs, rhs_scale, group_sizes, offset):
    """`scaled_grouped_matmul` by the chosen implementation."""
    options = {"out_dtype": how.out_dtype, "num_sms": how.num_sms}
    functions = {
        "pallas_gpu": hopper_scaled.unsupported(lhs, how.out_dtype)
        or functools.partial(hopper_scaled.grouped_matmul, **options),
        "xla": functools.partial(_xla, how.out_dtype),
    }
    operands = lhs, lhs_scale, rhs, rhs_scale, group_sizes, offset
    return dispatch("scaled_grouped_matmul", how.implementation, functions, "xla", *operands)


@_scaled.defjvp
def _no_derivative(how, primals, tangents):
    raise ValueError(
        "scaled_grouped_matmul has no derivative: codes and scales are constants. Differentiate quantized_grouped_matmul, "
        "which takes the arrays before quantization, or use jax.lax.stop_gradient"
    )


def _xla(out_dtype: Any, lhs, lhs_scale, rhs, rhs_scale, group_sizes, offset) -> jax.Array:
    """lhs dequantized, and the weights of one group at a time; in float32."""
    wide = dequantize(lhs, lhs_scale, (lhs.shape[1],), 1)
    scale = jnp.repeat(rhs_scale.swapaxes(1, 2), BLOCK, 2)  # [G, blocks of K, N]
    return grouped_matmul(
        wide, rhs, group_sizes, transpose_rhs=True, group_offset=offset, rhs_scale=scale, out_dtype=out_dtype,
        implementation="xla",
    )  # fmt: skip


def _rows(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(codes [M, K], scales [M, K / BLOCK])."""
    codes, scale = quantize(x, dtype, BLOCK, 1)
    return codes.reshape(x.shape), scale.reshape(len(x), -1)


def _squares(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(codes [G, N, K], scales [G, N / BLOCK, K / BLOCK]): blocks of `BLOCK` × `BLOCK`."""
    groups, n, k = x.shape
    blocks = x.reshape(groups, n // BLOCK, BLOCK, k // BLOCK, BLOCK).swapaxes(2, 3)
    codes, scale = quantize(blocks.reshape(groups, -1, BLOCK * BLOCK), dtype, BLOCK * BLOCK, 1)
    codes = codes.reshape(groups, n // BLOCK, k // BLOCK, BLOCK, BLOCK).swapaxes(2, 3)
    return codes.reshape(x.shape), scale.reshape(groups, n // BLOCK, k // BLOCK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized(how: _How, lhs, rhs, group_sizes, offset):
    """lhs [M, K] times rhs [G, N, K] by groups, quantized."""
    return _forward(how, lhs, rhs, group_sizes, offset)[0]


def _forward(how: _How, lhs, rhs, group_sizes, offset):
    (codes, scale), (weights, weights_scale) = _rows(lhs, how.dtype), _squares(rhs, how.dtype)
    out = _scaled(how, codes, scale, weights, weights_scale, group_sizes, offset)
    empty = jnp.zeros(0, lhs.dtype), jnp.zeros(0, rhs.dtype)  # their dtypes
    return out, (codes, scale, weights, weights_scale, group_sizes, offset, *empty)


def _backward(how: _How, saved, grad):
    codes, scale, weights, weights_scale, group_sizes, offset, lhs_like, rhs_like = saved
    grad_codes, grad_scale = _rows(grad, how.dtype)
    transposed = weights.swapaxes(1, 2), weights_scale.swapaxes(1, 2)
    lhs_how = how._replace(out_dtype=lhs_like.dtype)
    lhs_grad = _scaled(lhs_how, grad_codes, grad_scale, *transposed, group_sizes, offset)
    wide = jnp.float32 if lhs_like.dtype == jnp.float32 else jnp.bfloat16
    rows = dequantize(codes, scale, (codes.shape[1],), 1).astype(wide)
    rhs_grad = grouped_matmul_transpose(
        grad.astype(wide), rows, group_sizes, groups=weights.shape[0], group_offset=offset, out_dtype=rhs_like.dtype,
        implementation="xla" if how.implementation == "xla" else None,
    )  # fmt: skip
    return lhs_grad, rhs_grad, None, None


_quantized.defvjp(_forward, _backward)
