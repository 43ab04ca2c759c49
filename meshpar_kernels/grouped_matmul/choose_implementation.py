"""One grouped matmul, without gradient: choice of implementation and tile."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels._choose import dispatch
from meshpar_kernels.config import Config
from meshpar_kernels.grouped_matmul import gpu, reference, tokamax_dot, tpu, tpu_transpose
from meshpar_kernels.grouped_matmul import tpu_tile_sizes as tpu_tiles
from meshpar_kernels.grouped_matmul import xla_tile_loop as xla
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, Problem
from meshpar_kernels.routing import gpu as routing_gpu
from meshpar_kernels.routing import reference as routing_reference
from meshpar_kernels.routing import tpu_gather
from meshpar_kernels.tuning_table import lookup


@dataclasses.dataclass(frozen=True)
class Options:
    """How a grouped matmul runs: arguments of `grouped_matmul` that do not change its result."""

    implementation: str | None
    config: Config


GATHER = "grouped_matmul's lhs_indices"


def gather(options: Options, lhs: jax.Array, indices: jax.Array | None) -> jax.Array:
    """`lhs[indices]` by the requested implementation; for indices [M, k] the sum over each row's indices."""
    if indices is None:
        return lhs
    index = indices.astype(jnp.int32).reshape(indices.shape[0], -1)
    if 0 in lhs.shape or 0 in index.shape:
        return routing_reference.gather_sum(lhs, index, None)

    def plain(lhs, index):
        if index.shape[1] == 1:
            return _gather_rows(lhs, index[:, 0])
        return routing_reference.gather_sum(lhs, index, None)

    def kernel(function):
        return lambda lhs, index: function(lhs, index, None)

    functions = {
        "pallas_tpu": tpu_gather.gather_sum_unsupported(lhs, index) or kernel(tpu_gather.gather_sum),
        "pallas_gpu": routing_gpu.gather_sum_unsupported(lhs, index) or kernel(routing_gpu.gather_sum),
        "xla": plain,
        "reference": plain,
        "tokamax": plain,
    }
    return dispatch(GATHER, options.implementation, functions, "xla", lhs, index)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def run(options: Options, p: Problem) -> jax.Array:
    """The matmul, or the transpose, by the requested implementation."""
    op = p.key.op
    if 0 in (*p.lhs.shape, *jax.tree.leaves(p.rhs)[0].shape):
        return jnp.zeros(p.out_shape, p.out_dtype)
    tpu_tile = _tpu_tile(options.config, p)
    gpu_tile, num_sms = _gpu_tile(options.config, p)
    kernel = tpu_transpose.grouped_matmul_transpose if p.key.transposes else tpu.grouped_matmul
    functions: dict[str, Any] = {
        "pallas_tpu": tpu_tiles.unsupported(p, tpu_tile) or functools.partial(kernel, tile=tpu_tile),
        "pallas_gpu": gpu.unsupported(p, gpu_tile) or functools.partial(gpu.run, tile=gpu_tile, num_sms=num_sms),
        "xla": getattr(xla, op),
        "reference": getattr(reference, op),
        "tokamax": tokamax_dot.unsupported(p) or getattr(tokamax_dot, op),
    }
    return dispatch(op, options.implementation, functions, "xla", p)


def _gpu_tile(config: Config, p: Problem) -> tuple[gpu.Tile, int | None]:
    """(tile, blocks of the grid): as requested, else from the tuning table if that fits, else by rule."""
    itemsize = p.lhs.dtype.itemsize
    tuned = lookup("cuda", p.key, p.lhs.dtype) if config.tile is None else None
    if tuned is not None and not gpu.unsupported(p, gpu.make_tile(tuned, itemsize, p.key)):
        config = config.over(tuned)
    if config.tile is None:
        config = gpu.with_tile(config, gpu.padded_sizes(p))
    return gpu.make_tile(config, itemsize, p.key), config.num_sms


def _tpu_tile(config: Config, p: Problem) -> tpu_tiles.Tile | None:
    """The tile of the TPU kernel as requested, else from the tuning table if that fits, else by rule; None if no tile
    fits."""
    if config.tile is not None:
        return tpu_tiles.Tile(*config.tile)
    sizes, scales = p.key, p.rhs_scale if isinstance(p, MatmulProblem) else ()
    if scales:
        blocks, width = scales[0].shape[1:]
        rhs_itemsize = jax.tree.leaves(p.rhs)[0].dtype.itemsize
        return tpu_tiles.pick_tile(sizes, p.lhs.dtype.itemsize, rhs_itemsize, 4 * max(blocks, 8) * width)
    tuned = lookup("tpu", sizes, p.lhs.dtype)
    if tuned is not None and tuned.tile is not None:
        _, k, n = tuned.tile
        if (sizes.k % k == 0 if sizes.transposes else sizes.k == k) and sizes.n % n == 0:
            return tpu_tiles.Tile(*tuned.tile)
    return tpu_tiles.pick_tile(sizes, p.lhs.dtype.itemsize)


def _gather_rows(lhs: jax.Array, indices: jax.Array) -> jax.Array:
    """`lhs[indices]`, with zeros where an index is out of range."""
    in_range = (indices >= 0) & (indices < lhs.shape[0])
    return jnp.where(in_range[:, None], lhs[jnp.where(in_range, indices, 0)], 0)
