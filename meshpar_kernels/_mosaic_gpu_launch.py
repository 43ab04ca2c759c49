"""The launch of Mosaic GPU kernels whose thread blocks are one warpgroup each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from meshpar_kernels import _compat


def launch_blocks(
    kernel: Callable[..., None], name: str, out_type: Any, *operands: jax.Array, blocks: int, **options: Any
) -> jax.Array:
    """The first result of `kernel(*refs, gpu=gpu, blocks=blocks, **options)`, for each thread block of the grid axis "block".

    Args:
      name: of the kernel.
      out_type: of the result, or a list with the receive buffers after it.
      blocks: thread blocks of the grid.
      options: keyword arguments of the kernel.
    """
    gpu = _compat.mosaic_gpu()
    out = gpu.kernel(
        functools.partial(kernel, gpu=gpu, blocks=blocks, **options),
        out_type=out_type,
        scratch_types=[],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name=f"meshpar_{name}",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane),
    )(*operands)
    out = out[0] if isinstance(out_type, list) else out
    return _compat.same_varying(out, *operands)[0]  # Mosaic GPU results lose their varying mesh axes
