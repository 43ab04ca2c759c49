"""The ragged all-to-all on NVIDIA GPUs (Mosaic GPU): TMA writes rows into peers' memory, over NVLink.

Each block of the grid takes every n-th row of every run: from memory into one of a few slots of shared memory, and from there to
the receiver. It tells the receiver once its copies of a run are complete, which releases them to the system; a receiver waits
until all blocks of all senders have. Counts are zero when XLA lets all devices begin a launch together. A peer that
the copy engine writes to must be known when the launch is prepared, so there is one loop for each.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._nvlink import Peers, machine_reasons
from meshpar_kernels.dispatch.runs import Runs

__all__ = ["BLOCKS", "send", "unsupported"]

BLOCKS = 64
"""Blocks of the grid. Each has a few rows in flight; less than half of the multiprocessors saturate NVLink."""

AHEAD = 2
"""Rows that are fetched before the one that is sent."""

LAG = 2
"""Copies to a peer in flight before the oldest is waited for."""

SLOTS = AHEAD + LAG + 1
SMEM_BYTES = 200 << 10
"""Shared memory for the slots."""

BOX = 256
"""Most elements of a copy in one dimension."""


def unsupported(dtype: Any, width: int, devices: int, axes: tuple[str, ...] = ()) -> Unsupported:
    """Why the kernel cannot move rows of `width` elements between so many devices."""
    reasons = []
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32):
        reasons.append(f"the rows are {jnp.dtype(dtype)}; the kernel takes float32, bfloat16, float16 and int32")
    elif SLOTS * width * jnp.dtype(dtype).itemsize > SMEM_BYTES:
        reasons.append(f"{SLOTS} rows of {width} elements are more than {SMEM_BYTES >> 10} KiB of shared memory")
    if width % 128:
        reasons.append(f"a row has {width} elements, which must be a multiple of 128")
    return Unsupported([*reasons, *machine_reasons(devices, axes)])


def _kernel(
    runs, operand, result, slots, loaded, *, gpu: Any, axes: tuple[str, ...], sizes: tuple[int, ...], blocks: int
):
    """Start, size and target of the run for each device are one after the other in `runs`."""
    devices = math.prod(sizes)
    block = lax.axis_index("block")
    peers = Peers.of(axes, sizes)
    arrived = pl.get_global(gpu.SemaphoreType.REGULAR)

    for hop in range(devices):
        receiver = lax.rem(peers.rank + hop, jnp.int32(devices))
        start, size, target = (runs[field * devices + receiver] for field in range(3))
        device = peers.device(receiver)
        dst = gpu.remote_ref(result, device) if hop else result
        own = lax.div(jnp.maximum(size - block, 0) + (blocks - 1), jnp.int32(blocks))

        def one(i: Any, _: Any, start=start, target=target, dst=dst, own=own) -> None:
            @pl.when(i < own)
            def _():
                slot = lax.rem(i, jnp.int32(SLOTS))
                gpu.copy_gmem_to_smem(operand.at[start + block + i * blocks], slots.at[slot], loaded.at[slot])

            now = i - AHEAD

            @pl.when(now >= 0)
            def _():
                slot = lax.rem(now, jnp.int32(SLOTS))
                gpu.barrier_wait(loaded.at[slot])
                gpu.copy_smem_to_gmem(slots.at[slot], dst.at[target + block + now * blocks])
                gpu.wait_smem_to_gmem(LAG)

        # pipeline prologue and epilogue: the first iterations only fetch a row, the last ones only send one
        lax.fori_loop(0, jnp.where(own > 0, own + AHEAD, 0), one, None)
        gpu.wait_smem_to_gmem(0)
        if hop:
            pl.semaphore_signal(arrived, 1, device_id=device)

    @pl.when(block == 0)
    def _():
        pl.semaphore_wait(arrived, (devices - 1) * blocks, decrement=False)


def send(
    operand: jax.Array, units: int, rows: int, runs: Runs, axes: tuple[str, ...], sizes: tuple[int, ...],
    blocks: int = BLOCKS,
) -> jax.Array:  # fmt: skip
    """Send runs of units to all devices of a group, and take theirs.

    Args:
      operand: [N, a, b], a unit being [a, b]: `rows` rows one after the other.
      units: N of the result. Units without a sender keep the content of the memory.
      runs: in units, that fit: the kernel checks nothing, and hangs if devices do not agree.
      axes, sizes: mesh axes of the group, and their sizes.
      blocks: of the grid; more than there are multiprocessors run one after the other.
    """
    gpu = _compat.mosaic_gpu()
    width = math.prod(operand.shape[1:]) // rows
    lanes = BOX if width % BOX == 0 else 128
    row = (width // lanes, lanes)
    numbers = (jnp.stack([runs.start, runs.size, runs.target]).reshape(-1) * rows).astype(jnp.int32)
    out = gpu.kernel(
        functools.partial(_kernel, gpu=gpu, axes=axes, sizes=sizes, blocks=blocks),
        out_type=jax.ShapeDtypeStruct((units * rows, *row), operand.dtype),
        scratch_types=[gpu.SMEM((SLOTS, *row), operand.dtype), gpu.Barrier(num_barriers=SLOTS)],
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="meshpar_ragged_all_to_all",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane),
    )(numbers, operand.reshape(-1, *row))
    out = _compat.same_varying(out, operand, numbers)[0]  # Mosaic GPU results lose their varying mesh axes
    return out.reshape(units, *operand.shape[1:])
