"""Collectives of arrays that are sent as 8-bit codes with block scales, with gradients: rounding has derivative 1."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels._quantize import dequantize, quantize
from meshpar_kernels.collectives.api import ALGORITHMS, all_gather, reduce_scatter

EXCHANGES = ("native", "pallas", "pallas_tpu", "pallas_gpu")
"""Implementations of `all_to_all`."""


def native_all_to_all(x: jax.Array, axis_name: tuple[str, ...], implementation: str | None = None) -> jax.Array:
    """XLA's all-to-all of the leading dim; the only `implementation` is None."""
    del implementation
    return lax.all_to_all(x, axis_name, 0, 0, tiled=True)


class How(NamedTuple):
    """Static arguments.

    Attributes:
      axes: mesh axes of more than one device; devices: their number.
      dtype: of the codes, int8 or float8_e4m3fn.
      block: elements that share a scale.
      implementation: of the collectives, or None.
      backward_dtype: of the codes of the transpose; None: it is exact.
      all_to_all: the exact all-to-all, with the arguments of `native_all_to_all`.
    """

    axes: tuple[str, ...]
    devices: int
    dtype: Any
    block: int
    implementation: Any = None
    backward_dtype: Any = None
    all_to_all: Callable[..., jax.Array] = native_all_to_all


def _as_bytes(codes: jax.Array) -> jax.Array:
    """The codes as int8: compilers for chips without float8 would send float8 as a wider dtype."""
    return lax.bitcast_convert_type(codes, jnp.int8)


def _tile_dims(shape: tuple[int, ...], block: int) -> tuple[int, ...] | None:
    """(rows / 8, 8, columns / block, block) of an array [rows, columns] of this shape; None if they do not divide."""
    rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 0
    return None if len(shape) < 2 or rows % 8 or columns % block else (rows // 8, 8, columns // block, block)


def _to_tiles(x: jax.Array, shape: tuple[int, ...], block: int) -> jax.Array:
    """[*leading dims, *shape] → [*leading dims, rows / 8, columns / block, 8, block]: with blocks of 128 the order in which
    TPUs store it, so that quantization copies nothing. x itself if the numbers do not divide."""
    dims = _tile_dims(shape, block)
    return x if dims is None else jnp.swapaxes(x.reshape(*x.shape[: x.ndim - len(shape)], *dims), -2, -3)


def _from_tiles(x: jax.Array, shape: tuple[int, ...], block: int) -> jax.Array:
    """The inverse of `_to_tiles`."""
    return x if _tile_dims(shape, block) is None else jnp.swapaxes(x, -2, -3).reshape(*x.shape[:-4], *shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather(how: How, x: jax.Array) -> jax.Array:
    """[m, …] → [A·m, …]. Scales are sent as one row, since a last dim of few scales would be padded to 128."""
    tiles = _to_tiles(x, x.shape, how.block)
    codes, scale = quantize(tiles, how.dtype, how.block)
    send = functools.partial(all_gather, axis_name=how.axes, implementation=how.implementation)
    codes, scale = send(_as_bytes(codes)[None]), send(scale.reshape(1, -1)).reshape(-1, *scale.shape)
    full = dequantize(lax.bitcast_convert_type(codes, how.dtype), scale, tiles.shape, 1)
    return _from_tiles(full, x.shape, how.block).reshape(-1, *x.shape[1:]).astype(x.dtype)


def _received(how: How, x: jax.Array) -> jax.Array:
    """[A·m, …] → float32 [A, m, …]: the blocks that the devices send to this device."""
    shape = (x.shape[0] // how.devices, *x.shape[1:])
    tiles = _to_tiles(x.reshape(how.devices, *shape), shape, how.block)
    codes, scale = quantize(tiles, how.dtype, how.block, 1)
    send = functools.partial(how.all_to_all, axis_name=how.axes, implementation=how.implementation)
    codes, scale = send(_as_bytes(codes)), send(scale.reshape(how.devices, -1)).reshape(scale.shape)
    blocks = dequantize(lax.bitcast_convert_type(codes, how.dtype), scale, tiles.shape[1:], 1)
    return _from_tiles(blocks, shape, how.block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scatter(how: How, x: jax.Array) -> jax.Array:
    """[A·m, …] → [m, …]"""
    return _received(how, x).sum(0).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def swap(how: How, x: jax.Array) -> jax.Array:
    """[A·m, …] → [A·m, …]"""
    return _received(how, x).reshape(x.shape).astype(x.dtype)


def _gather_bwd(how: How, _: None, grad: jax.Array) -> tuple[Any]:
    if how.backward_dtype is None:
        return (reduce_scatter(grad, how.axes, implementation=_algorithm(how)),)
    name = how.implementation if how.implementation in EXCHANGES else None
    return (scatter(how._replace(dtype=how.backward_dtype, implementation=name), grad),)


def _scatter_bwd(how: How, _: None, grad: jax.Array) -> tuple[Any]:
    if how.backward_dtype is None:
        return (all_gather(grad, how.axes, implementation=_algorithm(how)),)
    return (gather(how._replace(dtype=how.backward_dtype, implementation=_algorithm(how)), grad),)


def _swap_bwd(how: How, _: None, grad: jax.Array) -> tuple[Any]:
    if how.backward_dtype is None:
        return (how.all_to_all(grad, how.axes, implementation=how.implementation),)
    return (swap(how._replace(dtype=how.backward_dtype), grad),)


def _algorithm(how: How) -> Any:
    """The implementation of this name of the exact collectives, else None."""
    return how.implementation if how.implementation in ALGORITHMS else None


gather.defvjp(lambda how, x: (gather(how, x), None), _gather_bwd)
scatter.defvjp(lambda how, x: (scatter(how, x), None), _scatter_bwd)
swap.defvjp(lambda how, x: (swap(how, x), None), _swap_bwd)
