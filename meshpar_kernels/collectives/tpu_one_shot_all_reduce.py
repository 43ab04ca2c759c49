"""The one-shot all-reduce on TPU (Mosaic), by remote DMA."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._collective_ids import collective_id
from meshpar_kernels._numerics import cost
from meshpar_kernels.collectives.choose import SMALL_BYTES
from meshpar_kernels.collectives.run_by_ppermute import rank_of


def coordinates(rank: jax.Array, axes: Sequence[str], sizes: Sequence[int]) -> Any:
    """{mesh axis: coordinate} of a group rank (row-major), the form in which kernels name devices."""
    found: dict[str, Any] = {}
    for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
        found[axis] = lax.rem(rank, jnp.int32(size))
        rank = lax.div(rank, jnp.int32(size))
    return found


def entry_barrier(devices: Sequence[Any]) -> None:
    """Block until these devices have entered the kernel, so that their buffers can be written.

    Signals the barrier semaphore of each device once, and waits for as many signals. The relation must be symmetric:
    each of `devices` must list this device as often as this device lists it.
    """
    barrier = pltpu.get_barrier_semaphore()
    for device in devices:
        pl.semaphore_signal(barrier, 1, device_id=device)
    pl.semaphore_wait(barrier, len(devices))


def remote_copies(
    kernel: Callable[..., None], name: str, axes: Sequence[str], out: Any, nbytes: int, sent: int, **options: Any
) -> Callable[..., Any]:
    """`pl.pallas_call` of a kernel that copies between the memories of devices and computes nothing.

    Args:
      name: of the public function; it determines the collective id.
      axes: mesh axes of the group.
      out: shape and dtype of the result.
      nbytes: bytes of the operand, which are read and written once.
      sent: bytes that go to other devices.
      options: options of `pl.pallas_call`.
    """
    return pl.pallas_call(
        kernel,
        out_shape=out,
        compiler_params=pltpu.CompilerParams(collective_id=collective_id(name, axes)),
        cost_estimate=cost(0, 2 * nbytes, remote=sent),
        name=f"meshpar_{name}",
        **options,
    )


# --- small all-reduce --------------------------------------------------------------------------------


def small_unsupported(shape: Sequence[int], dtype: jnp.dtype, group: int, axes: Sequence[str] = ()) -> Unsupported:
    """Reasons why the one-shot kernel cannot sum an array of this shape and dtype over `group` devices of these axes;
    empty if it can."""
    reasons = _compat.ici_reasons(axes)
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    vmem = _compat.tpu_vmem_limit()
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.int32):
        reasons.append(f"x is {dtype}; the kernel takes float32, bfloat16 and int32")
    if nbytes > SMALL_BYTES:
        reasons.append(f"x has {nbytes} bytes, more than {SMALL_BYTES >> 20} MiB: use all_reduce")
    elif nbytes * (group + 2) + (1 << 20) > vmem:
        reasons.append(f"{group + 2} arrays of {nbytes} bytes do not fit {vmem >> 20} MiB of VMEM: use all_reduce")
    return Unsupported(reasons)


def _small_kernel(x_ref, out_ref, recv_buffer, sent_sem, recv_sem, *, axes, sizes):
    """The one-shot all-reduce: sends this device's array to all others, and adds up the received arrays. There is no
    grid.

    The sum is in the order of the ranks, so it is the same on all devices. It is accumulated in float32 (int32 for
    int32).

    Args:
      x_ref: VMEM input [rows, 128].
      out_ref: VMEM output [rows, 128].
      recv_buffer: VMEM scratch [devices, rows, 128]; row r is written by the device of rank r. Devices wait for an
        entry barrier before they write into the buffers of others.
      sent_sem, recv_sem: DMA semaphores.
      axes, sizes: mesh axes of the group, the first major, and their sizes.
    """
    group = math.prod(sizes)
    rank = rank_of(axes)
    others = [coordinates(lax.rem(rank + k, jnp.int32(group)), axes, sizes) for k in range(1, group)]
    entry_barrier(others)
    copies = [
        pltpu.make_async_remote_copy(x_ref, recv_buffer.at[rank], sent_sem, recv_sem, device_id=other)
        for other in others
    ]
    for copy in copies:
        copy.start()
    recv_buffer[rank] = x_ref[...]
    for copy in copies:
        copy.wait()
    wide = jnp.int32 if x_ref.dtype == jnp.int32 else jnp.float32
    rows = x_ref.shape[0]
    step = math.gcd(rows, 256)

    @pl.loop(0, rows // step)
    def add(k):
        """out[rows of step k] = the sum of the rows of all devices."""
        row_slice = pl.ds(k * step, step)
        total = recv_buffer[0, row_slice].astype(wide)
        for r in range(1, group):
            total += recv_buffer[r, row_slice].astype(wide)
        out_ref[row_slice] = total.astype(out_ref.dtype)


def all_reduce_small(x: jax.Array, axes: tuple[str, ...], sizes: tuple[int, ...]) -> jax.Array:
    """As `api.all_reduce_small`, for arrays without reasons from `small_unsupported`."""
    group = math.prod(sizes)
    flat = x.reshape(-1)
    pack = 128 * 32 // x.dtype.itemsize  # a multiple of the register tile
    rows = -(-flat.size // pack) * pack // 128
    flat = jnp.pad(flat, (0, rows * 128 - flat.size)).reshape(rows, 128)
    nbytes = flat.size * x.dtype.itemsize
    out = pl.pallas_call(
        functools.partial(_small_kernel, axes=axes, sizes=sizes),
        in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        out_shape=_compat.out_struct(flat.shape, x.dtype, x),
        scratch_shapes=[pltpu.VMEM((group, rows, 128), x.dtype), pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id("all_reduce_small", axes), vmem_limit_bytes=_compat.tpu_vmem_limit()
        ),
        cost_estimate=cost((group - 1) * flat.size, 2 * nbytes, remote=(group - 1) * nbytes),
        name="meshpar_all_reduce_small",
    )(_compat.one_slice("all_reduce_small", axes, flat))
    return out.reshape(-1)[: x.size].reshape(x.shape)
