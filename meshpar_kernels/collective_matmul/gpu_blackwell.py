"""The fused matmuls on Blackwell GPUs (sm_100a, Mosaic GPU): `tcgen05` overlapped with copies over NVLink.

One warp loads and one issues the matmuls. A second warpgroup writes, sends or adds up tiles. The accumulators have two
slots in tensor memory, so that one tile is multiplied while the tile before it is written or sent. A gather has a third
warpgroup, which sends this device's rows.

The protocol of stages and accumulator slots is the protocol of `grouped_matmul.blackwell`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels.collective_matmul.gpu_hopper import Roles
from meshpar_kernels.collective_matmul.gpu_order import BlockOrder
from meshpar_kernels.grouped_matmul import blackwell
from meshpar_kernels.grouped_matmul.gpu_common import smem

PARTS, LAYOUT = 1, "TCGEN05"
"""As in `gpu_hopper`."""

SENDING = 2
"""Index of the sending warpgroup."""


def warpgroups(sends: bool) -> int:
    """Warpgroups of a block."""
    return SENDING + sends


def walk(gpu: Any, order: BlockOrder, num_sms: int, memory: list[Any], transposed: bool, roles: Roles) -> None:
    """The loops over this block's tiles: a warpgroup loads and multiplies, another one stores, a third one pushes.

    Args:
      num_sms, memory, transposed, roles: as in `gpu_hopper.walk`.
    """
    x_smem, w_smem, acc, *barriers = memory

    def matmuls(_, i, stage, total):
        weights = w_smem.at[stage].T if transposed else w_smem.at[stage]
        gpu.tcgen05_mma(total, x_smem.at[stage], weights, accumulate=i > 0)

    def write_tile(tile_at, _steps, _step, used):
        def store(total):
            roles.store(*tile_at, 0, functools.partial(blackwell.load_columns, gpu, total))

        blackwell.read_accumulator(gpu, acc, used, barriers, store)

    each, finish = order.each(num_sms), functools.partial(roles.finish, 0)
    blackwell.walk(gpu, order.tile, acc, barriers, each, roles.load, matmuls, write_tile, finish=finish)
    if roles.push is not None:
        pl.when(lax.axis_index("warpgroup") == SENDING)(roles.push)


def memory(gpu: Any, order: BlockOrder, transposed: bool, dtype: Any) -> list[Any]:
    """Scratch of a kernel: stages of x and w in shared memory, TMEM accumulators [m, 2 · n], and the barriers `full`,
    `empty`, `done` and `read`."""
    tile = order.tile
    w_tile = (tile.n, tile.k) if transposed else (tile.k, tile.n)
    tensor_core = {"num_arrivals": 1, "orders_tensor_core": True}
    return [
        smem(gpu, (tile.stages, tile.m, tile.k), dtype),
        smem(gpu, (tile.stages, *w_tile), dtype),
        gpu.TMEM((tile.m, 2 * tile.n), jnp.float32),
        gpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        gpu.Barrier(num_barriers=tile.stages, **tensor_core),
        gpu.Barrier(num_barriers=2, **tensor_core),
        gpu.Barrier(num_barriers=2, **tensor_core),
    ]
