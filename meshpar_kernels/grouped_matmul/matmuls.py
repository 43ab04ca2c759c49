"""One grouped matmul, without gradient: choice of implementation and tile."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels._choose import Unsupported, dispatch
from meshpar_kernels.grouped_matmul import gpu, reference, tokamax_dot, tpu, tpu_tiles, tpu_transpose, xla
from meshpar_kernels.routing import gpu as routing_gpu
from meshpar_kernels.routing import reference as routing_reference
from meshpar_kernels.routing import tpu_gather
from meshpar_kernels.tuning import Config, MatmulKey, lookup


@dataclasses.dataclass(frozen=True)
class Options:
    """Static arguments of a grouped matmul."""

    transpose_rhs: bool
    activation: str | None
    out_dtype: jnp.dtype
    implementation: str | None
    config: Config
    transpose_scale: bool = False


def _dispatch(options: Options, op: str, functions: Mapping[str, Any], *args: Any) -> jax.Array:
    return dispatch(op, options.implementation, functions, "xla", *args)


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
            return reference.gather_rows(lhs, index[:, 0])
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
    return _dispatch(options, GATHER, functions, lhs, index)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def matmul(
    options: Options, lhs: jax.Array, rhs: Sequence[jax.Array], group_sizes, group_offset, row_scale,
    rhs_scale: Sequence[jax.Array] = (),
) -> jax.Array:  # fmt: skip
    """`grouped_matmul` of the rows of lhs in their order.

    Args:
      rhs_scale: for each rhs float32 [G, B, N], or [G, B, K] with `transpose_scale`; (): the weights are not quantized.
    """
    num_rhs = len(rhs)
    (rows, k), n = lhs.shape, rhs[0].shape[1] if options.transpose_rhs else rhs[0].shape[2]
    if 0 in (*lhs.shape, *rhs[0].shape):
        return jnp.zeros((rows, n), options.out_dtype)
    shape = MatmulKey("grouped_matmul", rows, k, n, rhs[0].shape[0], num_rhs, options.transpose_rhs)
    gpu_k, gpu_n = gpu.padded_sizes(lhs, options.out_dtype, k=k, n=n, transpose_rhs=options.transpose_rhs)

    def refuses(tile: gpu.Tile) -> Unsupported:
        """Reasons why the GPU kernels cannot run with this tile; empty if they can."""
        how = {"k": gpu_k, "n": gpu_n, "transpose_rhs": options.transpose_rhs}
        reasons = gpu.matmul_unsupported(lhs, options.out_dtype, tile, num_rhs, **how)
        scaled = (f"rhs is {rhs[0].dtype} with scales; the kernel takes weights of lhs's dtype",) if rhs_scale else ()
        return Unsupported((*scaled, *reasons))

    gpu_tile, num_sms = _on_gpu(options, shape, lhs.dtype, gpu_n, refuses)
    names = ("transpose_rhs", "activation", "out_dtype")
    kwargs: dict[str, Any] = {name: getattr(options, name) for name in names}
    scaled: dict[str, Any] = kwargs | {"transpose_scale": options.transpose_scale}

    def plain(function):
        def call(lhs, rhs, group_sizes, group_offset, row_scale, rhs_scale):
            return function(lhs, rhs, group_sizes, group_offset, None, row_scale, rhs_scale, **scaled)

        return call

    def by_gpu(*operands):
        return gpu.grouped_matmul(*operands[:-1], tile=gpu_tile, num_sms=num_sms, **kwargs)

    tile, reasons = _on_tpu(options, shape, lhs, rhs, rhs_scale)
    functions = {
        "pallas_tpu": reasons or functools.partial(tpu.grouped_matmul, tile=tile, **scaled),
        "pallas_gpu": refuses(gpu_tile) or by_gpu,
        "xla": plain(xla.grouped_matmul),
        "reference": plain(reference.grouped_matmul),
        "tokamax": tokamax_dot.unsupported(group_offset, rhs_scale)
        or functools.partial(tokamax_dot.grouped_matmul, **kwargs),
    }
    operands = (lhs, rhs, group_sizes, group_offset, row_scale, rhs_scale)
    return _dispatch(options, "grouped_matmul", functions, *operands)


def _on_gpu(
    options: Options, shape: MatmulKey, dtype: Any, n: int, refuses: Callable[[gpu.Tile], Unsupported]
) -> tuple[gpu.Tile, int | None]:
    """(tile, blocks of the grid): as requested, else from the tuning table if that fits, else by rule.

    Args:
      n: columns of the result with which the kernel runs.
      refuses: reasons why the kernel cannot run with a tile.
    """
    transposes, config = shape.op == "grouped_matmul_transpose", options.config
    how = {"num_rhs": shape.matrices, "transposes": transposes}

    def made(config: Config) -> gpu.Tile:
        return gpu.make_tile(config, jnp.dtype(dtype).itemsize, **how)

    tuned = lookup("cuda", shape, dtype) if config.tile is None else None
    if tuned is not None and not refuses(made(tuned)):
        config = config.over(tuned)
    if config.tile is None:
        config = gpu.with_tile(config, n, **how)
    return made(config), config.num_sms


def _on_tpu(
    options: Options, shape: MatmulKey, lhs: jax.Array, rhs: Sequence[jax.Array], rhs_scale: Sequence[jax.Array]
) -> tuple[tpu_tiles.Tile | None, Unsupported]:
    """(tile of the TPU kernel, reasons why it cannot run): the tile as requested, else from the tuning table if that
    fits, else by rule; None if no tile fits."""
    _, rows, k, n, *_ = dataclasses.astuple(shape)
    scale, quantized = None, {}
    if rhs_scale:
        scale = rhs_scale[0]
        quantized = {"rhs_itemsize": rhs[0].dtype.itemsize, "scale_bytes": 4 * max(scale.shape[1], 8) * scale.shape[2]}
    tuned = None if rhs_scale else lookup("tpu", shape, lhs.dtype)
    measured = tuned.tile if tuned is not None else None
    if options.config.tile is not None:
        tile = tpu_tiles.Tile(*options.config.tile)
    elif measured is not None and measured[1] == k and n % measured[2] == 0:
        tile = tpu_tiles.Tile(*measured)
    else:
        tile = tpu_tiles.pick_tile(rows, k, n, rhs[0].shape[0], lhs.dtype.itemsize, len(rhs), **quantized)
    return tile, tpu_tiles.unsupported(
        lhs, rhs[0], n, tile, transpose_rhs=options.transpose_rhs, scale=scale,
        scaled_dim=n if options.transpose_scale else k,
    )  # fmt: skip


def transpose_matmul(options: Options, groups: int, lhs, rhs, group_sizes, group_offset, row_scale) -> jax.Array:
    """`grouped_matmul_transpose` by the requested implementation, without gradient."""
    k, n = lhs.shape[1], rhs.shape[1]
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((groups, k, n), options.out_dtype)
    itemsize = lhs.dtype.itemsize
    shape = MatmulKey("grouped_matmul_transpose", lhs.shape[0], k, n, groups)
    tuned = lookup("tpu", shape, lhs.dtype)
    measured = tuned.tile if tuned is not None else None
    if options.config.tile is not None:
        tile = tpu_tiles.Tile(*options.config.tile)
    elif measured is not None and k % measured[1] == 0 and n % measured[2] == 0:
        tile = tpu_tiles.Tile(*measured)
    else:
        tile = tpu_tiles.pick_transpose_tile(lhs.shape[0], k, n, groups, itemsize)
    gpu_k, gpu_n = gpu.padded_sizes(lhs, options.out_dtype, k=k, n=n, transposes=True)
    refuses = functools.partial(gpu.transpose_unsupported, lhs, options.out_dtype, k=gpu_k, n=gpu_n)

    gpu_tile, num_sms = _on_gpu(options, shape, lhs.dtype, gpu_n, refuses)
    kwargs = {"groups": groups, "out_dtype": options.out_dtype}
    functions = {
        "pallas_tpu": tpu_tiles.unsupported(lhs, rhs, n, tile)
        or functools.partial(tpu_transpose.grouped_matmul_transpose, tile=tile, **kwargs),
        "pallas_gpu": refuses(gpu_tile)
        or functools.partial(gpu.grouped_matmul_transpose, tile=gpu_tile, num_sms=num_sms, **kwargs),
        "xla": functools.partial(xla.grouped_matmul_transpose, **kwargs),
        "reference": functools.partial(reference.grouped_matmul_transpose, **kwargs),
        "tokamax": tokamax_dot.unsupported(group_offset)
        or functools.partial(tokamax_dot.grouped_matmul_transpose, **kwargs),
    }
    return _dispatch(options, "grouped_matmul_transpose", functions, lhs, rhs, group_sizes, group_offset, row_scale)
