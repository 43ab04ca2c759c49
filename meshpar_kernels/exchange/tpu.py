"""Dense all-to-all and collective-permute on TPU (Mosaic): remote DMA from HBM to HBM, one copy for each block."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._collective_ids import id_reasons
from meshpar_kernels.collectives.run_by_ppermute import rank_of
from meshpar_kernels.collectives.tpu_one_shot_all_reduce import coordinates, remote_copies


def unsupported(dtype: Any, axes: Sequence[str], sizes: Sequence[int]) -> Unsupported:
    """Reasons why the kernels cannot send arrays of this dtype over these mesh axes; empty if they can."""
    del sizes
    reasons = _compat.ici_reasons(axes)
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_ or dtype.itemsize not in (1, 2, 4):
        reasons.append(f"x is {dtype}; the kernel takes dtypes of 1, 2 and 4 bytes, without booleans")
    if dtype == jnp.float16:
        reasons.append('x is float16, which Mosaic does not have on TPUs: cast it to bfloat16, or use "native"')
    return Unsupported([*reasons, *id_reasons(axes)])


def _group_barrier(axes: Sequence[str], sizes: Sequence[int]) -> None:
    """Block until all devices of the group have entered the kernel, so that their buffers can be written.

    All of them, not only those that this device writes to: a device may be in the next call of this kernel, which has
    other pairs, and its signal would be counted as the signal of another device.
    """
    rank, devices = rank_of(axes), math.prod(sizes)
    barrier = pltpu.get_barrier_semaphore()

    @pl.loop(1, devices)
    def _(k):
        device = lax.rem(rank + k, jnp.int32(devices))
        pl.semaphore_signal(barrier, 1, device_id=coordinates(device, axes, sizes))

    pl.semaphore_wait(barrier, devices - 1)


def _all_to_all_kernel(x_ref, out_ref, sent_sem, recv_sem, copy_sem, *, axes, sizes):
    """The all-to-all, without a grid: starts a copy to each device, then waits for all sent and received blocks.

    Args:
      x_ref: HBM input [devices, rows, columns]; block i is sent to device i.
      out_ref: HBM output [devices, rows, columns]; block i is received from device i.
      sent_sem, recv_sem, copy_sem: DMA semaphores, of sent, received and local blocks.
      axes, sizes: mesh axes of the group, the first major, and their sizes.
    """
    devices, rank = math.prod(sizes), rank_of(axes)

    def send(k: Any) -> Any:
        """The copy of a block to the device of rank `rank + k`; the block of any other device has as many bytes."""
        device = lax.rem(rank + k, jnp.int32(devices))
        return pltpu.make_async_remote_copy(
            x_ref.at[device], out_ref.at[rank], sent_sem, recv_sem, device_id=coordinates(device, axes, sizes)
        )

    own = pltpu.make_async_copy(x_ref.at[rank], out_ref.at[rank], copy_sem)
    own.start()
    _group_barrier(axes, sizes)

    @pl.loop(1, devices)
    def _(k):
        send(k).start()

    @pl.loop(1, devices)
    def _(k):
        send(k).wait_recv()
        send(k).wait_send()

    own.wait()


def _permute_kernel(ends_ref, x_ref, *rest, axes, sizes):
    """The collective-permute, without a grid.

    Args:
      ends_ref: scalar prefetch int32 [2]: the rank that this device sends to, and the rank that it receives from; -1: none.
      x_ref: HBM input [rows, columns].
      rest: optionally an HBM input of zeros that is aliased with the result; HBM output [rows, columns]; DMA semaphores of
        sent, received and local arrays.
      axes, sizes: mesh axes of the group, the first major, and their sizes.
    """
    out_ref, sent_sem, recv_sem, copy_sem = rest[-4:]
    rank = rank_of(axes)
    target, source = ends_ref[0], ends_ref[1]
    own = pltpu.make_async_copy(x_ref, out_ref, copy_sem)
    pl.when(target == rank)(lambda: own.start())
    _group_barrier(axes, sizes)

    def copy(device: Any) -> Any:
        return pltpu.make_async_remote_copy(
            x_ref, out_ref, sent_sem, recv_sem, device_id=coordinates(jnp.maximum(device, 0), axes, sizes)
        )

    sends = (target >= 0) & (target != rank)
    pl.when(sends)(lambda: copy(target).start())
    pl.when((source >= 0) & (source != rank))(lambda: copy(source).wait_recv())
    pl.when(sends)(lambda: copy(target).wait_send())
    pl.when(target == rank)(lambda: own.wait())


def _as_rows(blocks: jax.Array, leading: int) -> jax.Array:
    """[*leading dims, …] → [*leading dims, rows, columns]. A last dim that is a multiple of 128 remains; otherwise the block
    is flattened to rows of 128, which copies it but sends no padding of register tiles."""
    lead, block = blocks.shape[:leading], blocks.shape[leading:]
    if len(block) > 1 and block[-1] % 128 == 0:
        return blocks.reshape(*lead, -1, block[-1])
    flat = blocks.reshape(*lead, -1)
    unit = 128 * 32 // blocks.dtype.itemsize
    flat = jnp.pad(flat, [(0, 0)] * leading + [(0, -flat.shape[-1] % unit)])
    return flat.reshape(*lead, -1, 128)


def _as_blocks(rows: jax.Array, shape: Sequence[int], leading: int) -> jax.Array:
    """The inverse of `_as_rows`."""
    flat = rows.reshape(*rows.shape[:leading], -1)[..., : math.prod(shape[leading:])]
    return flat.reshape(shape)


def all_to_all(x: jax.Array, axes: tuple[str, ...], sizes: tuple[int, ...]) -> jax.Array:
    """[devices, …] → [devices, …]: block i goes to device i, and block i of the result is from device i."""
    rows = _as_rows(x, 1)
    devices = math.prod(sizes)
    sent = rows.size * rows.dtype.itemsize * (devices - 1) // devices
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = remote_copies(
        functools.partial(_all_to_all_kernel, axes=axes, sizes=sizes), "all_to_all", axes,
        _compat.out_struct(rows.shape, rows.dtype, rows), rows.size * rows.dtype.itemsize, sent,
        in_specs=[anywhere], out_specs=anywhere, scratch_shapes=[pltpu.SemaphoreType.DMA] * 3,
    )(_compat.one_slice("all_to_all", axes, rows))  # fmt: skip
    return _as_blocks(out, x.shape, 1)


def collective_permute(
    x: jax.Array, axes: tuple[str, ...], sizes: tuple[int, ...], pairs: Sequence[tuple[int, int]]
) -> jax.Array:
    """The array of the device that sends to this device, zeros without one; `pairs` are (source, target) ranks."""
    rows = _as_rows(x, 0)
    devices = math.prod(sizes)
    ends = np.full((devices, 2), -1, np.int32)
    for source, target in pairs:
        ends[source, 0], ends[target, 1] = target, source
    (own_ends,) = _compat.varying_over(axes, jnp.asarray(ends)[rank_of(axes)])
    given = [] if (ends[:, 1] >= 0).all() else [jnp.zeros_like(rows)]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    sent = rows.size * rows.dtype.itemsize
    out = remote_copies(
        functools.partial(_permute_kernel, axes=axes, sizes=sizes), "collective_permute", axes,
        _compat.out_struct(rows.shape, rows.dtype, rows), sent, sent,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(), in_specs=[anywhere] * (1 + len(given)), out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA] * 3,
        ),
        input_output_aliases={2: 0} if given else {},
    )(own_ends, _compat.one_slice("collective_permute", axes, rows), *given)  # fmt: skip
    return _as_blocks(out, x.shape, 0)
