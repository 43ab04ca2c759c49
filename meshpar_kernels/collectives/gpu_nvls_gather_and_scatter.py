"""All-gather and reduce-scatter in the NVLink switch (NVLS, Mosaic GPU): multicast stores, and loads that the switch reduces.

The arrays are cut into chunks; thread block b handles the chunks b, b + blocks, …. At its end block b signals block b of every
device with a multicast signal, and waits for one signal from each: after a gather, that all have stored; after a scatter, that
all have read this device's operand, which may then be freed. XLA starts the launch on all devices after their operands are
ready.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._mosaic_gpu_launch import launch_blocks
from meshpar_kernels._nvlink import DeviceGroup, machine_reasons

THREADS = 128
VECTORS = 4
"""16-byte accesses of a thread for one chunk."""

BLOCKS = 32
"""Largest number of thread blocks, all of which must run at the same time; fewer if there are fewer chunks."""

SUMMED = (jnp.float32, jnp.bfloat16, jnp.float16)
"""Dtypes that the switch adds up in vectors of 16 bytes; 16-bit ones are accumulated in float32 and rounded once."""


def unsupported(kind: str, dtype: Any, axes: Sequence[str], devices: int) -> Unsupported:
    """Reasons why the kernels cannot gather or scatter arrays of this dtype over these mesh axes; empty if they can."""
    dtype, reasons = jnp.dtype(dtype), []
    if kind == "reduce_scatter" and dtype not in SUMMED:
        reasons.append(f"x is {dtype}; the switch adds up float32, bfloat16 and float16")
    elif dtype == jnp.bool_ or dtype.itemsize not in (1, 2, 4):
        reasons.append(f"x is {dtype}; the kernel takes dtypes of 1, 2 and 4 bytes, without booleans")
    mesh = jax.sharding.get_abstract_mesh()
    others = [n for n, size in mesh.shape.items() if n not in axes and size > 1]
    if others:
        reasons.append(f"the mesh has the axis {others[0]!r} too; multicast is over all devices of the mesh")
    if any(kind != AxisType.Manual for kind in mesh.axis_types):
        reasons.append("some axes of the mesh are not manual; multicast is over all axes of the surrounding shard_map")
    return Unsupported([*reasons, *machine_reasons(devices, axes)])


def _each_chunk(gpu: Any, work: Any, arrived: Any, *, axes: Any, devices: int, chunks: int, blocks: int) -> None:
    """Call `work(first element)` for each chunk of this block; then signal the same block of all devices, and wait for
    theirs."""
    block = lax.axis_index("block")
    num_own = lax.div(chunks - block + (blocks - 1), jnp.int32(blocks))
    lax.fori_loop(0, num_own, lambda i, _: work(block + i * blocks), None)
    gpu.semaphore_signal_multicast(arrived.at[block], collective_axes=axes)
    pl.semaphore_wait(arrived.at[block], devices, decrement=False)


def _gather_kernel(x, out, *, gpu: Any, axes, sizes, every, chunk: int, vector: int, blocks: int):
    """The all-gather, for one thread block (one warpgroup).

    Args:
      x: GMEM input int32 [elements], a multiple of `chunk`.
      out: GMEM output int32 [devices, elements]; row r is stored by the device of rank r on all devices.
      axes, sizes: mesh axes of the group, the first major, and their sizes.
      every: all axes of the mesh.
      chunk, vector: elements that a block stores at once, and that a thread does.
      blocks: thread blocks of the grid.
    """
    nvlink = DeviceGroup.of(axes, sizes)
    layout = gpu.Layout.WG_STRIDED((chunk,), vector)
    arrived = pl.get_global(gpu.SemaphoreType.REGULAR((blocks,)))

    def store(number: Any) -> None:
        elements = pl.ds(number * chunk, chunk)
        gpu.multimem_store(_compat.load_gmem(x, elements, layout), out.at[nvlink.rank, elements], every)

    how = {"axes": every, "devices": math.prod(sizes), "chunks": x.shape[0] // chunk, "blocks": blocks}
    _each_chunk(gpu, store, arrived, **how)


def _scatter_kernel(x, out, *, gpu: Any, axes, sizes, every, chunk: int, vector: int, blocks: int):
    """The reduce-scatter, for one thread block; arguments as in `_gather_kernel`.

    Args:
      x: GMEM input [devices, elements]; row r is reduced by the device of rank r.
      out: GMEM output [elements].
    """
    nvlink = DeviceGroup.of(axes, sizes)
    layout = gpu.Layout.WG_STRIDED((chunk,), vector)
    arrived = pl.get_global(gpu.SemaphoreType.REGULAR((blocks,)))

    def reduce(number: Any) -> None:
        elements = pl.ds(number * chunk, chunk)
        total = gpu.multimem_load_reduce(x.at[nvlink.rank, elements], collective_axes=every, reduction_op="add")
        out[elements] = gpu.layout_cast(total, layout)

    how = {"axes": every, "devices": math.prod(sizes), "chunks": out.shape[0] // chunk, "blocks": blocks}
    _each_chunk(gpu, reduce, arrived, **how)


def _call(kernel: Any, name: str, x: jax.Array, shape: tuple[int, ...], axes, sizes) -> jax.Array:
    """Run a kernel; `shape` of the result."""
    vector = 16 // x.dtype.itemsize
    chunk = THREADS * VECTORS * vector
    every = tuple(jax.sharding.get_abstract_mesh().axis_names)
    return launch_blocks(
        kernel, name, _compat.out_struct(shape, x.dtype, x), x, blocks=min(BLOCKS, x.shape[-1] // chunk),
        axes=tuple(axes), sizes=tuple(sizes), every=every, chunk=chunk, vector=vector,
    )  # fmt: skip


def all_gather(x: jax.Array, axes: Sequence[str], sizes: Sequence[int]) -> jax.Array:
    """[m, …] → [devices · m, …], blocks in the order of the ranks."""
    packed = 4 // x.dtype.itemsize
    flat = x.reshape(-1)
    flat = jnp.pad(flat, (0, -flat.size % (THREADS * VECTORS * 4 * packed)))
    words = lax.bitcast_convert_type(flat.reshape(-1, packed) if packed > 1 else flat, jnp.int32)
    every = _call(_gather_kernel, "nvls_all_gather", words, (math.prod(sizes), words.size), axes, sizes)
    blocks = lax.bitcast_convert_type(every, x.dtype).reshape(len(every), -1)[:, : x.size]
    return blocks.reshape(-1, *x.shape[1:])


def reduce_scatter(x: jax.Array, axes: Sequence[str], sizes: Sequence[int]) -> jax.Array:
    """[devices · m, …] → [m, …]: this device's block of the sum."""
    devices = math.prod(sizes)
    shape = (x.shape[0] // devices, *x.shape[1:])
    rows = x.reshape(devices, -1)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % (THREADS * VECTORS * 16 // x.dtype.itemsize))))
    out = _call(_scatter_kernel, "nvls_reduce_scatter", rows, (rows.shape[1],), axes, sizes)
    return out[: math.prod(shape)].reshape(shape)
