"""Dense all-to-all and collective-permute on NVIDIA GPUs: the ragged exchange with runs of equal size, over NVLink."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.collectives.run_by_ppermute import rank_of
from meshpar_kernels.dispatch import gpu
from meshpar_kernels.dispatch.runs import Runs

ROW_BYTES = 16 << 10
"""Largest number of bytes of a row, which is one copy."""


def unsupported(dtype: Any, axes: Sequence[str], sizes: Sequence[int]) -> Unsupported:
    """Reasons why the kernel cannot send arrays of this dtype between the devices of these mesh axes; empty if it can."""
    dtype = jnp.dtype(dtype)
    reasons = gpu.unsupported(jnp.int32, 128, math.prod(sizes), tuple(axes))
    if dtype == jnp.bool_ or dtype.itemsize not in (1, 2, 4):
        reasons = Unsupported(
            (f"x is {dtype}; the kernel takes dtypes of 1, 2 and 4 bytes, without booleans", *reasons)
        )
    return reasons


def _width(words: int) -> int:
    """Words of a row: the largest power of two times 128 that divides `words`, or that pads them by at most a sixteenth."""
    width, most = 128 * math.gcd(-(-words // 128), ROW_BYTES // 512), ROW_BYTES // 4
    while width < most and -words % (2 * width) * 16 <= words:
        width *= 2
    return width


def _as_rows(blocks: jax.Array) -> jax.Array:
    """[n, …] → int32 [n · rows, 1, words]: the bytes of each block in rows of at most `ROW_BYTES`, padded to full rows."""
    n, packed = len(blocks), 4 // blocks.dtype.itemsize
    flat = blocks.reshape(n, -1)
    width = _width(-(-flat.shape[1] // packed))
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % (width * packed))))
    flat = flat.reshape(n, -1, packed) if packed > 1 else flat
    return lax.bitcast_convert_type(flat, jnp.int32).reshape(-1, 1, width)


def _as_blocks(rows: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """The inverse of `_as_rows`."""
    n = shape[0]
    flat = lax.bitcast_convert_type(rows.reshape(n, -1), dtype).reshape(n, -1)
    return flat[:, : math.prod(shape[1:])].reshape(shape)


def all_to_all(x: jax.Array, axes: tuple[str, ...], sizes: tuple[int, ...]) -> jax.Array:
    """[devices, …] → [devices, …]: block i goes to device i, and block i of the result is from device i."""
    rows = _as_rows(x)
    devices = math.prod(sizes)
    units = len(rows) // devices
    start = jnp.arange(devices, dtype=jnp.int32) * units
    size = jnp.full(devices, units, jnp.int32)
    own = jnp.broadcast_to(rank_of(axes) * units, (devices,))
    rows, *runs = _compat.same_varying(rows, *_compat.varying_over(axes, start, size, own, start, size, own))
    out = gpu.send(rows, len(rows), 1, Runs(*runs), axes, sizes)
    return _as_blocks(out, x.shape, x.dtype)


def collective_permute(
    x: jax.Array, axes: tuple[str, ...], sizes: tuple[int, ...], pairs: Sequence[tuple[int, int]]
) -> jax.Array:
    """The array of the device that sends to this device, zeros without one; `pairs` are (source, target) ranks."""
    rows = _as_rows(x[None])
    devices = math.prod(sizes)
    target, receives = [-1] * devices, [False] * devices
    for s, t in pairs:
        target[s], receives[t] = t, True
    rank = rank_of(axes)
    zero = jnp.zeros(devices, jnp.int32)
    size = jnp.where(jnp.arange(devices) == jnp.asarray(target, jnp.int32)[rank], len(rows), 0).astype(jnp.int32)
    rows, *runs = _compat.same_varying(rows, *_compat.varying_over(axes, zero, size, zero, zero, zero, zero))
    out = _as_blocks(gpu.send(rows, len(rows), 1, Runs(*runs), axes, sizes), (1, *x.shape), x.dtype)[0]
    return out if all(receives) else jnp.where(jnp.asarray(receives)[rank], out, 0)
