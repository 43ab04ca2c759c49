"""Launches of the GPU kernels of grouped matmuls, on the operands of the public functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshpar_kernels import _compat
from meshpar_kernels.grouped_matmul.gpu_common import CLUSTER, Tile, cluster_count
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, TransposeProblem, padded_scale
from meshpar_kernels.grouped_matmul.schedule import span_tile_steps


def launch(
    kernel: Callable[..., None], out_type: Any, scratch: list[Any], operands: Sequence[jax.Array], *, warpgroups: int,
    num_sms: int, name: str, cluster: int = 1, approx_math: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Launch `kernel(*refs, gpu=gpu, num_sms=num_sms, **options)`, with refs of the operands, results and scratch.

    Args:
      warpgroups: of a thread block.
      num_sms: multiprocessors to use; the grid axis "multiprocessor" is the index of the cluster.
      approx_math: use approximate exponentials and divisions.
    """
    gpu = _compat.mosaic_gpu()
    clusters = {"cluster": (cluster,), "cluster_names": (CLUSTER,)} if cluster > 1 else {}
    return gpu.kernel(
        functools.partial(kernel, gpu=gpu, num_sms=num_sms, **options),
        out_type=out_type,
        scratch_types=scratch,
        grid=(cluster_count(num_sms, cluster),),
        grid_names=("multiprocessor",),
        **clusters,
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=f"meshpar_{name}",
        compiler_params=gpu.CompilerParams(approx_math=approx_math, lowering_semantics=gpu.LoweringSemantics.Lane),
    )(*operands)


def launch_matmul(
    kernel: Callable[..., None], scratch: list[Any], p: MatmulProblem, *, height: int, tile: Tile, **options: Any
) -> jax.Array:
    """Launch the kernel of a grouped matmul.

    Args:
      kernel: called with the refs (`Spans`, lhs, each rhs, scales of the rows if there are any, result, scratch).
      height: rows of a tile step.
      options: options of `launch`, and further keyword arguments of the kernel.
    """
    operands = [*span_tile_steps(p.bounds(), p.key.rows, height), p.lhs, *p.rhs]
    if p.row_scale is not None:
        operands.append(padded_scale(p.row_scale, height))
    return launch(
        kernel, _compat.out_struct(p.out_shape, p.out_dtype, p.lhs, *p.rhs), scratch, operands,
        name="grouped_matmul", cluster=tile.cluster, approx_math=True, shape=(p.key.k, p.key.n), tile=tile,
        transpose_rhs=p.transpose_rhs, activation=p.activation, num_rhs=len(p.rhs), scaled=p.row_scale is not None,
        **options,
    )  # fmt: skip


def launch_transpose(
    kernel: Callable[..., None], scratch: list[Any], p: TransposeProblem, *, tile: Tile, **options: Any
) -> jax.Array:
    """Launch the kernel of the transpose; the tile [m, n] is of [K, N], and `tile.k` rows are one step.

    `row_scale` is multiplied into rhs before the kernel. XLA fuses the multiplication into the operation that computes
    rhs; without such an operation, it costs a copy of rhs.

    Args:
      kernel: called with the refs (group bounds int32 [G + 1], lhs, rhs, result, scratch).
      options: as in `launch_matmul`.
    """
    bounds, rhs = p.bounds(), p.scaled_rhs()
    return launch(
        kernel, _compat.out_struct(p.out_shape, p.out_dtype, p.lhs, rhs), scratch, (bounds, p.lhs, rhs),
        name="grouped_matmul_transpose", cluster=tile.cluster, shape=(p.key.k, p.key.n, p.groups), tile=tile, **options,
    )  # fmt: skip
