"""The fused matmuls on Hopper GPUs (sm_90a, Mosaic GPU): `wgmma` overlapped with copies over NVLink.

A block has three warpgroups: two that multiply and one that loads. They share a ring of shared-memory stages, with the
protocol of `grouped_matmul.hopper`. In a gather a second warp of the loading warpgroup sends this device's rows, and the
loading warp waits until the chunks of a tile's rows have arrived before it loads them. In a scatter the multiplying
warpgroups send partial results, and add the received ones to their own in the last step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels.collective_matmul.gpu_order import BlockOrder
from meshpar_kernels.grouped_matmul import hopper
from meshpar_kernels.grouped_matmul.gpu_common import ROWS, smem

PARTS = hopper.CONSUMERS
"""Warpgroups that share the rows of a tile."""

LAYOUT = "WGMMA"
"""Mosaic GPU layout of results in registers."""


class Roles(NamedTuple):
    """What the warps of a block do with each of its tiles, and after the last one.

    Attributes:
      load: (tile index, ring step, row tile, column tile) → function (K step, stage, barrier) that starts the copies of a
        stage of x and w.
      store: (tile index, ring step, row tile, column tile, part, columns): writes or sends one of `PARTS` parts of the
        rows of a tile; `columns(left, width)` are float32 columns of the part in registers.
      finish: (part): called after the last tile.
      push: sends this device's rows, concurrently with the tiles; None: nothing is sent.
    """

    load: Callable[..., Any]
    store: Callable[..., None]
    finish: Callable[[Any], None] = lambda part: None
    push: Callable[[], None] | None = None


def warpgroups(sends: bool) -> int:
    """Warpgroups of a block; a sender is a warp of the loading warpgroup."""
    del sends
    return PARTS + 1


def walk(gpu: Any, order: BlockOrder, num_sms: int, memory: list[Any], transposed: bool, roles: Roles) -> None:
    """The loops over this block's tiles: one warp loads stages, `PARTS` warpgroups multiply and store, one warp pushes.

    Args:
      num_sms: thread blocks of the grid.
      memory: refs of `memory`.
      transposed: w is [columns, K].
      roles: what the warps do with each tile.
    """
    x_smem, w_smem, full, empty = memory
    part = lax.axis_index("warpgroup")

    def compute(tile_at, steps, step, _):
        """Compute one tile: allocate a float32 accumulator [ROWS, n] in registers, multiply all its stages, and store
        it."""

        def with_acc(acc):
            """Multiply all stages of the tile into `acc`, and store it."""

            def matmuls(_, slot):
                weights = w_smem.at[slot].T if transposed else w_smem.at[slot]
                gpu.wgmma(acc, x_smem.at[slot, pl.ds(part * ROWS, ROWS)], weights)

            hopper.multiply_stages(gpu, step, steps, order.tile.stages, full, empty, matmuls)
            value = acc[...]
            roles.store(*tile_at, part, lambda left, width: value[:, left : left + width])

        pl.run_scoped(with_acc, gpu.ACC((ROWS, order.tile.n), jnp.float32))

    finish = functools.partial(roles.finish, part)
    hopper.walk(gpu, order.tile, (full, empty), order.each(num_sms), roles.load, compute, roles.push, finish)


def memory(gpu: Any, order: BlockOrder, transposed: bool, dtype: Any) -> list[Any]:
    """Scratch of a kernel: stages of x and w in shared memory, and the barriers `full` and `empty`, one for each stage."""
    tile = order.tile
    w_tile = (tile.n, tile.k) if transposed else (tile.k, tile.n)
    return [
        smem(gpu, (tile.stages, tile.m, tile.k), dtype),
        smem(gpu, (tile.stages, *w_tile), dtype),
        gpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        gpu.Barrier(num_arrivals=PARTS, num_barriers=tile.stages),
    ]
