"""All-gather, reduce-scatter and all-to-all whose arrays are sent in 8 bits with block scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels import _compat
from meshpar_kernels._quantize import LARGEST
from meshpar_kernels.collectives import coded
from meshpar_kernels.collectives.api import ALGORITHMS, group
from meshpar_kernels.collectives.coded import EXCHANGES, How
from meshpar_kernels.exchange.dense import all_to_all


def quantized_all_gather(
    x: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    dtype: Any = jnp.int8,
    block: int = 128,
    implementation: str | None = None,
    backward_dtype: Any = None,
) -> jax.Array:
    """All-gather of blocks that are sent in 8 bits with a float32 scale for each `block` elements. Call it inside
    `jax.shard_map`.

    All devices get the same values, this device's own block included. Each element is sent as 1 + 4 / block bytes: 1.94
    times less than bfloat16 for blocks of 128. Limit: as of `all_gather` for so many bytes, and one read and one write of
    memory for each of the codes and the results. It pays over slow links (DCN between slices); it has not been timed on a
    device.

    Memory in addition to x and the result: the received codes, a byte for each element of the result.

    Error: of an element x whose block has the largest absolute value m, at most m / 254 with int8, and at most
    max(abs(x) / 16, m / 458752) with float8_e4m3fn, besides one rounding to x's dtype. A block with a NaN or an infinity
    becomes NaN.

    Source: quantized weight gathering of ZeRO++ (Wang et al. 2023).

    Example, weights sharded over slices::

        full = jax.shard_map(
            lambda w: quantized_all_gather(w, "dcn"), mesh=mesh, in_specs=P("dcn"), out_specs=P(), check_vma=False
        )(w)

    Args:
      x: [..., m, ...], this device's block; float32, bfloat16 or float16.
      axis_name: the mesh axis, or several, major first.
      axis: the dim that grows.
      dtype: of the codes, int8 or float8_e4m3fn. They are sent as int8.
      block: elements of x that share a scale: along its last dim if they divide it (128 does not copy x on TPUs), else of
        the flattened array.
      implementation: of the `all_gather` of codes and scales; None: "native".
      backward_dtype: dtype of the codes of the transpose, a `quantized_reduce_scatter` with the same blocks; None: the
        transpose is an exact `reduce_scatter`.

    Returns:
      [..., A·m, ...] in x's dtype. Differentiable: rounding has derivative 1 (straight-through), so the derivative is the
        transpose of an exact all-gather.

    Raises:
      ValueError: axes, dims, dtypes or blocks that do not fit, or x sharded outside of `shard_map`.
      NotImplementedError: "pallas" cannot run these arguments; with every reason.
    """
    op = "quantized_all_gather"
    how = _check(op, x, axis_name, axis, dtype, block, implementation, backward_dtype, ALGORITHMS)
    return _along(axis, coded.gather, how, x)


def quantized_reduce_scatter(
    x: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    dtype: Any = jnp.int8,
    block: int = 128,
    implementation: str | None = None,
    backward_dtype: Any = None,
) -> jax.Array:
    """Reduce-scatter of arrays that are sent in 8 bits with a float32 scale for each `block` elements. Call it inside
    `jax.shard_map`.

    Each device quantizes its array once, sends every block to its device by an all-to-all, and adds up the received blocks
    in float32 in the order of the devices. So an addend is rounded once, and not at every hop as in a ring. Each element is
    sent as 1 + 4 / block bytes. Limit: as of `all_to_all` for so many bytes. It pays over slow links (DCN between slices),
    where it is best preceded by an exact `reduce_scatter` over the axes inside of a slice; it has not been timed on a
    device.

    Error: at most the sum over the devices of the errors of one element in `quantized_all_gather`, besides one rounding to
    x's dtype: with int8 the sum of m / 254, with m the largest absolute value of the addend's block. A block with a NaN or an
    infinity in any addend becomes NaN.

    Source: quantized gradient communication of ZeRO++ (Wang et al. 2023).

    Example, gradients over slices after an exact reduction inside of each::

        def reduced(g):
            return quantized_reduce_scatter(reduce_scatter(g, "ici"), "dcn")

        shards = jax.shard_map(reduced, mesh=mesh, in_specs=P(), out_specs=P(("ici", "dcn")), check_vma=False)(g)

    Args:
      x: [..., A·m, ...].
      axis_name, axis, dtype, block: as in `quantized_all_gather`.
      implementation: of the `all_to_all` of codes and scales, "native" or a kernel; None: "native".
      backward_dtype: dtype of the codes of the transpose, a `quantized_all_gather` with the same blocks; None: the
        transpose is an exact `all_gather`.

    Returns:
      [..., m, ...] in x's dtype. Differentiable as `quantized_all_gather` is.

    Raises:
      ValueError: as `quantized_all_gather`; or the dim is no multiple of the number of devices.
      NotImplementedError: the requested kernel cannot run; with every reason.
    """
    how = _check(
        "quantized_reduce_scatter", x, axis_name, axis, dtype, block, implementation, backward_dtype, EXCHANGES
    )
    return _along(axis, coded.scatter, how, x)


def quantized_all_to_all(
    x: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    dtype: Any = jnp.int8,
    block: int = 128,
    implementation: str | None = None,
    backward_dtype: Any = None,
) -> jax.Array:
    """All-to-all of blocks that are sent in 8 bits with a float32 scale for each `block` elements. Call it inside
    `jax.shard_map`.

    All blocks are rounded, the one that stays on its device included. Each element is sent as 1 + 4 / block bytes. Limit: as of
    `all_to_all` for so many bytes, and one read and one write of memory for each of the codes and the results. It has not
    been timed on a device.

    Error: as of `quantized_all_gather`.

    Source: the dispatch of DeepSeek-V3 (2024, section 3.3), which quantizes tokens in blocks of 1 × 128 to float8_e4m3fn.

    Example, tokens [devices · rows, embed] to the devices of their experts::

        received = quantized_all_to_all(tokens, "expert", dtype=jnp.float8_e4m3fn, backward_dtype=jnp.float8_e4m3fn)

    Args:
      x: [..., A·m, ...]; block i along `axis` is sent to device i.
      axis_name, axis, dtype, block: as in `quantized_all_gather`; received blocks are concatenated along `axis`.
      implementation: as in `quantized_reduce_scatter`.
      backward_dtype: dtype of the codes of the transpose, a `quantized_all_to_all` with the same blocks; None: the
        transpose is an exact `all_to_all`.

    Returns:
      x's shape and dtype. Differentiable as `quantized_all_gather` is.

    Raises:
      ValueError, NotImplementedError: as `quantized_reduce_scatter`.
    """
    how = _check("quantized_all_to_all", x, axis_name, axis, dtype, block, implementation, backward_dtype, EXCHANGES)
    return _along(axis, coded.swap, how, x)


def _along(axis: int, function: Callable[[How, Any], Any], how: How, x: jax.Array) -> jax.Array:
    """`function` of x along a dim; x itself for one device, or no element."""
    if not how.axes or not x.size:
        return x
    (moved,) = _compat.varying_over(how.axes, jnp.moveaxis(x, axis, 0))
    return jnp.moveaxis(function(how, moved), 0, axis)


def _check(
    op: str, x: Any, axis_name: Any, axis: int, dtype: Any, block: int, implementation: str | None, backward_dtype: Any,
    implementations: Sequence[str],
) -> How:  # fmt: skip
    """The static arguments. Raises ValueError for invalid arguments."""
    axes, sizes = group(op, x, axis_name)
    if implementation not in (None, *implementations):
        raise ValueError(
            f"{op}: no implementation {implementation!r}; there are {', '.join(map(repr, implementations))}"
        )
    if implementation == "hierarchical":
        raise ValueError(f"{op}: implementation='hierarchical' has no outer axes; call {op} once for each axis")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{op}: x{list(x.shape)} has no dimension {axis}")
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"{op}: x is {x.dtype}; it must be float32, bfloat16 or float16: cast it")
    for name, d in (("dtype", dtype), ("backward_dtype", backward_dtype)):
        if not (d is None and name == "backward_dtype") and jnp.dtype(d) not in LARGEST:
            known = " or ".join(map(str, LARGEST))
            raise ValueError(f"{op}: {name}={jnp.dtype(d).name} must be {known}")
    if block < 1:
        raise ValueError(f"{op}: block={block} must be at least 1; 128 fits TPUs")
    devices = math.prod(sizes)
    if implementations is EXCHANGES and x.shape[axis] % devices:
        raise ValueError(
            f"{op}: dimension {axis} of x{list(x.shape)} is no multiple of the {devices} devices of {', '.join(axes)}; pad it"
        )
    back = None if backward_dtype is None else jnp.dtype(backward_dtype)
    return How(axes, devices, jnp.dtype(dtype), block, implementation, back, all_to_all)
