"""The ragged all-to-all on TPU (Mosaic): remote DMA from the rows of the sender straight to their final rows at the receiver."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.collectives.run_by_ppermute import rank_of
from meshpar_kernels.collectives.tpu_one_shot_all_reduce import coordinates, remote_copies
from meshpar_kernels.dispatch.runs import Runs

BLOCK_BYTES = 512 << 10
"""Largest number of bytes of one copy. Runs are sent round-robin by blocks, so that a run does not wait for all of the run
before it. A block takes about 10 µs on one link, or the time that it takes to start the copy if that is longer."""


def unit_of(rows: int, itemsize: int) -> int:
    """Rows of a register tile, if `rows` is a multiple; else 1."""
    pack = 32 // itemsize
    return 1 if rows % pack else pack


def unsupported(dtype: Any, width: int) -> Unsupported:
    """Why the kernel cannot move rows of `width` elements."""
    reasons = []
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.int32):
        reasons.append(f"the rows are {jnp.dtype(dtype)}; the kernel takes float32, bfloat16 and int32")
    if width % 128:
        reasons.append(f"a row has {width} elements, which must be a multiple of 128")
    return Unsupported(reasons)


def _each_length(block: int) -> list[int]:
    """Copy sizes for the remainder of a run, which is shorter than a block: powers of two, the largest first."""
    return [1 << k for k in reversed(range(block.bit_length() - 1))]


def _kernel(runs_ref, operand, *rest, axes: tuple[str, ...], sizes: tuple[int, ...], block: int):
    """The ragged all-to-all, without a grid: an entry barrier with all devices, then all copies, then waits for all
    sent and received units.

    All counts are in units: slices of the leading dim, which has no register tiles. A copy has a static length, so a
    run is sent in chunks of `block` units, round-robin over the receivers, and its remainder in powers of two. DMA
    semaphores count bytes, so a wait for all bytes of a direction needs no order.

    Args:
      runs_ref: scalar prefetch int32 [4 · devices]: the starts of the runs for all devices, their sizes, their target
        units at the receivers, and the sizes of the received runs.
      operand: HBM input [units, a, b].
      rest: optionally an HBM input that is aliased with the result; HBM output [units, a, b]; DMA semaphores for sends,
        receives and local copies.
      axes, sizes: mesh axes of the group, the first major, and their sizes.
      block: units of one copy, a power of two.
    """
    result, sent_sem, recv_sem, copy_sem = rest[-4:]
    devices = math.prod(sizes)
    rank = rank_of(axes)

    def number(field: int, device: Any) -> jax.Array:
        return runs_ref[field * devices + device]

    def total(field: int) -> jax.Array:
        """Sum of a field of `runs_ref` over all devices but this one."""
        everything = lax.fori_loop(0, devices, lambda i, n: n + number(field, i), jnp.int32(0))
        return everything - number(field, rank)

    def receiver(k: Any) -> jax.Array:
        return lax.rem(rank + k, jnp.int32(devices))

    def part(device: Any, ahead: Any, length: int) -> tuple[Any, Any]:
        """(source, target) refs of `length` units of the run for a device, from unit `ahead` of the run on."""
        src, dst = number(0, device) + ahead, number(2, device) + ahead
        return operand.at[pl.ds(src, length)], result.at[pl.ds(dst, length)]

    def send(device: Any, ahead: Any, length: int) -> None:
        source, target = part(device, ahead, length)
        pltpu.make_async_remote_copy(
            source, target, sent_sem, recv_sem, device_id=coordinates(device, axes, sizes)
        ).start()

    def keep(ahead: Any, length: int) -> None:
        pltpu.make_async_copy(*part(rank, ahead, length), copy_sem).start()

    def rest_of(size: jax.Array, act: Callable[[Any, int], None]) -> None:
        for length in _each_length(block):
            pl.when((size & length) != 0)(functools.partial(act, size - (size & (2 * length - 1)), length))

    def copy_rows(size: jax.Array, act: Callable[[Any, int], None]) -> None:
        pl.loop(0, lax.div(size, jnp.int32(block)))(lambda b: act(b * block, block))
        rest_of(size, act)

    barrier = pltpu.get_barrier_semaphore()

    @pl.loop(1, devices)
    def _(k):
        pl.semaphore_signal(barrier, 1, device_id=coordinates(receiver(k), axes, sizes))

    copy_rows(number(1, rank), keep)  # its own rows, before the other devices have entered
    pl.semaphore_wait(barrier, devices - 1)
    longest = lax.fori_loop(1, devices, lambda k, most: jnp.maximum(most, number(1, receiver(k))), jnp.int32(0))

    @pl.loop(0, lax.div(longest, jnp.int32(block)))
    def _(b):
        @pl.loop(1, devices)
        def _(k):
            size = number(1, receiver(k))
            pl.when(b < lax.div(size, jnp.int32(block)))(lambda: send(receiver(k), b * block, block))

    @pl.loop(1, devices)
    def _(k):
        rest_of(number(1, receiver(k)), functools.partial(send, receiver(k)))

    # DMA semaphores count bytes, so waits need not match the copies one by one
    def like(ahead: Any, length: int):
        del ahead
        chunk = result.at[pl.ds(0, length)]
        neighbour = coordinates(receiver(1), axes, sizes)
        return pltpu.make_async_remote_copy(chunk, chunk, sent_sem, recv_sem, device_id=neighbour)

    def own(ahead: Any, length: int) -> None:
        del ahead
        chunk = result.at[pl.ds(0, length)]
        pltpu.make_async_copy(chunk, chunk, copy_sem).wait()

    copy_rows(total(3), lambda ahead, length: like(ahead, length).wait_recv())
    copy_rows(total(1), lambda ahead, length: like(ahead, length).wait_send())
    copy_rows(number(1, rank), own)


def send(
    operand: jax.Array, output: jax.Array | None, units: int, runs: Runs, axes: tuple[str, ...], sizes: tuple[int, ...]
) -> jax.Array:
    """Send runs of units to all devices of a group, and receive the runs that they send: [units, a, b].

    Args:
      operand: [N, a, b]; a unit is [a, b].
      output: [units, a, b], the content of units without a sender; None: it is undefined.
      units: leading dim of the result.
      runs: in units. They must be within bounds and agree between the devices: the kernel does not check it, and hangs
        otherwise.
      axes, sizes: mesh axes of the group, and their sizes.
    """
    unit = math.prod(operand.shape[1:]) * operand.dtype.itemsize
    most = max(1, min(len(operand), units, BLOCK_BYTES // unit))
    block = 1 << (most.bit_length() - 1)
    numbers = jnp.stack([runs.start, runs.size, runs.target, runs.recv_size]).reshape(-1).astype(jnp.int32)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    given = [] if output is None else [output]
    nbytes = operand.size * operand.dtype.itemsize
    return remote_copies(  # the cost is as if all rows of the operand were sent, equally many to each device
        functools.partial(_kernel, axes=axes, sizes=sizes, block=block), "ragged_all_to_all", axes,
        _compat.out_struct((units, *operand.shape[1:]), operand.dtype, operand, *given), nbytes,
        nbytes * (math.prod(sizes) - 1) // math.prod(sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(), in_specs=[anywhere] * (1 + len(given)), out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA] * 3,
        ),
        input_output_aliases={2: 0} if given else {},
    )(numbers, _compat.one_slice("ragged_all_to_all", axes, operand), *given)  # fmt: skip
