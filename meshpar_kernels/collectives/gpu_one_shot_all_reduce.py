"""The one-shot all-reduce over NVLink (Mosaic GPU): each device writes its array to all others, and adds up the
received arrays.

The array is cut into chunks; thread block b handles the chunks b, b + blocks, …. It writes them into the receive
buffers of all devices, signals block b on each device, waits for one signal from each, and adds up the chunks in the
order of the devices. So a block waits only for blocks with its own index. `multimem`, the reduction in the NVLink
switch, is not used: its order of summation is unspecified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._mosaic_gpu_launch import launch_blocks
from meshpar_kernels._nvlink import DeviceGroup, machine_reasons
from meshpar_kernels.collectives.choose import SMALL_BYTES

THREADS = 128
VECTORS = 4
"""16-byte loads of a thread for one chunk."""

BLOCKS = 64
"""Largest number of thread blocks, all of which must run at the same time; fewer if there are fewer chunks."""


def small_unsupported(shape: Sequence[int], dtype: jnp.dtype, group: int, axes: Sequence[str] = ()) -> Unsupported:
    """Reasons why the one-shot kernel cannot sum an array of this shape and dtype; empty if it can."""
    reasons = []
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32):
        reasons.append(f"x is {dtype}; the kernel takes float32, bfloat16, float16 and int32")
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    if nbytes > SMALL_BYTES:
        reasons.append(f"x has {nbytes} bytes, more than {SMALL_BYTES >> 20} MiB: use all_reduce")
    return Unsupported([*reasons, *machine_reasons(group, axes)])


def _kernel(x, out, recv_buffer, *, gpu: Any, axes, sizes, chunk: int, vector: int, blocks: int):
    """The one-shot all-reduce, for one thread block (one warpgroup): handles every `blocks`-th chunk of the array.

    Args:
      x: GMEM input [elements], a multiple of `chunk`.
      out: GMEM output [elements]: the sum, accumulated in float32 (int32 for int32).
      recv_buffer: GMEM output [devices, elements]; row r is written by the device of rank r.
      axes, sizes: mesh axes of the group, the first major, and their sizes.
      chunk: elements that a block loads at once.
      vector: elements of one 16-byte load of a thread.
      blocks: thread blocks of the grid. Each has an arrival semaphore, which counts the devices and is not reset.
    """
    nvlink = DeviceGroup.of(axes, sizes)
    devices = math.prod(sizes)
    arrived = pl.get_global(gpu.SemaphoreType.REGULAR((blocks,)))
    block = lax.axis_index("block")
    num_chunks = x.shape[0] // chunk
    num_own = lax.div(num_chunks - block + (blocks - 1), jnp.int32(blocks))
    layout = gpu.Layout.WG_STRIDED((chunk,), vector)
    wide = jnp.int32 if x.dtype == jnp.int32 else jnp.float32

    def chunk_slice(i: Any) -> Any:
        return pl.ds((block + i * blocks) * chunk, chunk)

    def write(i: Any, _: None) -> None:
        """Write chunk i of x into row `rank` of the receive buffers of all devices, this one included."""
        value = _compat.load_gmem(x, chunk_slice(i), layout)

        def to(r: Any, _: None) -> None:
            gpu.remote_ref(recv_buffer, nvlink.device(r))[nvlink.rank, chunk_slice(i)] = value

        lax.fori_loop(0, devices, to, None)

    def signal(r: Any, _: None) -> None:
        pl.semaphore_signal(arrived.at[block], 1, device_id=nvlink.device(r))

    def add_up(i: Any, _: None) -> None:
        """out[chunk i] = the sum of the rows of the receive buffer, in the order of the ranks."""

        def add(r: Any, total: jax.Array) -> jax.Array:
            return total + _compat.load_gmem(recv_buffer, (r, chunk_slice(i)), layout).astype(wide)

        first = _compat.load_gmem(recv_buffer, (0, chunk_slice(i)), layout).astype(wide)
        out[chunk_slice(i)] = lax.fori_loop(1, devices, add, first).astype(out.dtype)

    lax.fori_loop(0, num_own, write, None)
    lax.fori_loop(0, devices, signal, None)
    pl.semaphore_wait(arrived.at[block], devices, decrement=False)
    lax.fori_loop(0, num_own, add_up, None)


def all_reduce_small(x: jax.Array, axes: Sequence[str], sizes: Sequence[int]) -> jax.Array:
    """The sum of x over all devices, accumulated in float32 (integers in int32), bit-identical on all devices; at most 4 MiB."""
    vector = 16 // x.dtype.itemsize
    chunk = THREADS * VECTORS * vector
    flat = jnp.pad(x.reshape(-1), (0, -x.size % chunk))
    recv_buffer = _compat.out_struct((math.prod(sizes), flat.size), x.dtype, x)
    out = launch_blocks(
        _kernel, "all_reduce_small", [_compat.out_struct(flat.shape, x.dtype, x), recv_buffer], flat,
        blocks=min(BLOCKS, flat.size // chunk), axes=tuple(axes), sizes=tuple(sizes), chunk=chunk, vector=vector,
    )  # fmt: skip
    return out[: x.size].reshape(x.shape)
