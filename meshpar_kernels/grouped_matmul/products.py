"""One product, without gradient: which implementation, with which tile."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels._choose import Unsupported, by_default, dispatch
from meshpar_kernels.grouped_matmul import gpu, reference, tpu, tpu_tiles, tpu_transpose, xla
from meshpar_kernels.routing import gpu as routing_gpu
from meshpar_kernels.routing import reference as routing_reference
from meshpar_kernels.routing import tpu_gather

__all__ = ["Options", "gather", "product", "transpose_product"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is fixed while tracing."""

    transpose_rhs: bool
    activation: str | None
    out_dtype: jnp.dtype
    implementation: str | None
    tile: tuple[int, int, int] | None
    gather: str | None = None
    num_sms: int | None = None


def _dispatch(options: Options, op: str, functions: Mapping[str, Any], *args: Any) -> jax.Array:
    return dispatch(op, options.implementation, functions, "xla", *args)


GATHER = "grouped_matmul's lhs_indices"


def gather(options: Options, lhs: jax.Array, indices: jax.Array | None) -> jax.Array:
    """`lhs[indices]` by the implementation asked for; of indices [M, k] the sum over each row's."""
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
    }
    return _dispatch(options, GATHER, functions, lhs, index)


def product(
    options: Options, lhs: jax.Array, rhs: Sequence[jax.Array], group_sizes, group_offset, row_scale, indices=None
) -> jax.Array:
    """`grouped_matmul` of the rows of lhs in their order, or of `lhs[indices]`."""
    halves = len(rhs)
    k, n = lhs.shape[1], rhs[0].shape[1] if options.transpose_rhs else rhs[0].shape[2]
    rows = lhs.shape[0] if indices is None else indices.shape[0]
    if 0 in (rows, *lhs.shape, *rhs[0].shape):
        return jnp.zeros((rows, n), options.out_dtype)
    if indices is not None and options.implementation is None and options.gather is None and not by_default(GATHER):
        lhs, indices = gather(options, lhs, indices), None
    itemsize = lhs.dtype.itemsize
    gpu_tile = (
        gpu.pick_tile(n, itemsize, halves) if options.tile is None else gpu.make_tile(*options.tile, itemsize, halves)
    )
    kwargs = {
        "transpose_rhs": options.transpose_rhs,
        "activation": options.activation,
        "out_dtype": options.out_dtype,
    }

    def plain(function):
        def call(lhs, rhs, group_sizes, group_offset, row_scale, indices):
            return function(lhs, rhs, group_sizes, group_offset, indices, row_scale, **kwargs)

        return call

    by_gpu = functools.partial(gpu.grouped_matmul, tile=gpu_tile, num_sms=options.num_sms, **kwargs)
    cannot = gpu.matmul_unsupported(
        lhs, options.out_dtype, gpu_tile, halves, k=k, n=n, transpose_rhs=options.transpose_rhs
    )
    if indices is not None:
        cannot = Unsupported((*cannot, *routing_gpu.gather_sum_unsupported(lhs, indices[:, None])))
    functions = {
        "pallas_tpu": _on_tpu(options, lhs, rhs, indices, n, kwargs),
        "pallas_gpu": cannot or _gathering_first(routing_gpu.gather_sum, by_gpu),
        "xla": plain(xla.grouped_matmul),
        "reference": plain(reference.grouped_matmul),
    }
    if indices is not None and options.gather == "fused" and options.implementation is not None:
        reason = Unsupported(["it gathers the rows before the product (gather='fused' is the TPU kernel's)"])
        functions = {name: f if name == "pallas_tpu" else reason for name, f in functions.items()}
    return _dispatch(options, "grouped_matmul", functions, lhs, rhs, group_sizes, group_offset, row_scale, indices)


def _gathering_first(gather_sum, function):
    """`function` of `lhs[indices]`, where there are indices."""

    def call(lhs, rhs, group_sizes, group_offset, row_scale, indices):
        if indices is not None:
            lhs = gather_sum(lhs, indices.astype(jnp.int32)[:, None], None)
        return function(lhs, rhs, group_sizes, group_offset, row_scale)

    return call


def _on_tpu(options: Options, lhs: jax.Array, rhs: Sequence[jax.Array], indices, n: int, kwargs):
    """The TPU kernel, or why it cannot run; with its own gather where that is asked for or pays.

    It pays where one stretch of columns holds the whole result. Else every stretch would copy the rows again, which
    costs the scalar core more than reading them in order, and they are gathered first.
    """
    rows, k = lhs.shape[0] if indices is None else indices.shape[0], lhs.shape[1]

    def tile_of(gathered: bool) -> tpu_tiles.Tile | None:
        if options.tile is not None:
            return tpu_tiles.Tile(*options.tile)
        return tpu_tiles.pick_tile(rows, k, n, rhs[0].shape[0], lhs.dtype.itemsize, len(rhs), gathered=gathered)

    if indices is not None and options.gather != "first":
        tile = tile_of(True)
        reasons = tpu_tiles.unsupported(lhs, rhs[0], n, tile, transpose_rhs=options.transpose_rhs)
        if tile is not None and not reasons and (options.gather == "fused" or tile.n == n):
            return functools.partial(tpu.grouped_matmul, tile=tile, **kwargs)
        if options.gather == "fused":
            return reasons
    tile = tile_of(False)
    reasons = tpu_tiles.unsupported(lhs, rhs[0], n, tile, transpose_rhs=options.transpose_rhs)
    if indices is not None:
        reasons = Unsupported((*reasons, *tpu_gather.gather_sum_unsupported(lhs, indices[:, None])))
    if tile is None:
        return reasons
    return reasons or _gathering_first(
        tpu_gather.gather_sum, functools.partial(tpu.grouped_matmul, tile=tile, **kwargs)
    )


def transpose_product(options: Options, groups: int, lhs, rhs, group_sizes, group_offset, row_scale) -> jax.Array:
    """`grouped_matmul_transpose`."""
    k, n = lhs.shape[1], rhs.shape[1]
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((groups, k, n), options.out_dtype)
    tile = (
        tpu_tiles.pick_transpose_tile(lhs.shape[0], k, n, groups, lhs.dtype.itemsize)
        if options.tile is None
        else tpu_tiles.Tile(*options.tile)
    )
    itemsize = lhs.dtype.itemsize
    gpu_tile = gpu.pick_tile(n, itemsize) if options.tile is None else gpu.make_transpose_tile(options.tile, itemsize)
    kwargs = {"groups": groups, "out_dtype": options.out_dtype}
    functions = {
        "pallas_tpu": tpu_tiles.unsupported(lhs, rhs, n, tile)
        or functools.partial(tpu_transpose.grouped_matmul_transpose, tile=tile, **kwargs),
        "pallas_gpu": gpu.transpose_unsupported(lhs, options.out_dtype, gpu_tile, k=k, n=n)
        or functools.partial(gpu.grouped_matmul_transpose, tile=gpu_tile, num_sms=options.num_sms, **kwargs),
        "xla": functools.partial(xla.grouped_matmul_transpose, **kwargs),
        "reference": functools.partial(reference.grouped_matmul_transpose, **kwargs),
    }
    return _dispatch(options, "grouped_matmul_transpose", functions, lhs, rhs, group_sizes, group_offset, row_scale)
