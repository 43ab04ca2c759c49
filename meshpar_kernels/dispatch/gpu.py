"""The ragged all-to-all on NVIDIA GPUs (Mosaic GPU): TMA writes rows into the memory of remote GPUs, over NVLink.

With n blocks in the grid, block b handles the rows b, b + n, … of every run. A row is copied from global memory into a
slot of shared memory, and from there to the receiver. When its copies of a run are complete, which releases them to the
system, the block signals the receiver; a receiver waits for the signals of all blocks of all senders. The semaphores
are zero when XLA starts a launch on all devices. A GPU that TMA writes to must be known when the launch is prepared, so
the kernel has one loop for each receiver.
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
from meshpar_kernels._nvlink import DeviceGroup, machine_reasons
from meshpar_kernels.dispatch.runs import Runs

BLOCKS = 64
"""Blocks of the grid. Each has a few rows in flight; less than half of the multiprocessors saturate NVLink."""

AHEAD = 2
"""Rows that are prefetched before the row that is sent."""

LAG = 2
"""Copies to a remote GPU in flight before the sender waits for the oldest."""

SLOTS = AHEAD + LAG + 1
SMEM_BYTES = 200 << 10
"""Bytes of shared memory for the slots."""

BOX = 256
"""Largest number of elements of a copy in one dim."""


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
    """The ragged all-to-all, for one thread block: sends every `blocks`-th row of each run to its receiver.

    Args:
      runs: GMEM int32 [3 · devices]: the starts of the runs for all devices, then their sizes, then their target rows
        at the receiver; in rows.
      operand: GMEM input [rows, *row].
      result: GMEM output [rows of the result, *row], which remote GPUs write.
      slots: SMEM [SLOTS, *row].
      loaded: one barrier for each slot, which counts the arrival of its row.
      axes, sizes: mesh axes of the group, the first major, and their sizes.
      blocks: thread blocks of the grid.
    """
    devices = math.prod(sizes)
    block = lax.axis_index("block")
    nvlink = DeviceGroup.of(axes, sizes)
    arrived = pl.get_global(gpu.SemaphoreType.REGULAR)

    for hop in range(devices):
        receiver = lax.rem(nvlink.rank + hop, jnp.int32(devices))
        start, size, target = (runs[field * devices + receiver] for field in range(3))
        device = nvlink.device(receiver)
        dst = gpu.remote_ref(result, device) if hop else result
        own = lax.div(jnp.maximum(size - block, 0) + (blocks - 1), jnp.int32(blocks))

        def one(i: Any, _: Any, start=start, target=target, dst=dst, own=own) -> None:
            """Iteration i: fetch row i of this block's share of the run, and send row i - AHEAD."""

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
    """Send runs of units to all devices of a group, and receive the runs that they send: [units, a, b].

    Args:
      operand: [N, a, b]; a unit [a, b] is `rows` rows in sequence.
      units: leading dim of the result. Units without a sender have undefined content.
      rows: rows of a unit.
      runs: in units. They must be within bounds and agree between the devices: the kernel does not check it, and hangs
        otherwise.
      axes, sizes: mesh axes of the group, and their sizes.
      blocks: thread blocks of the grid. If there are more than multiprocessors, they run sequentially.
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
