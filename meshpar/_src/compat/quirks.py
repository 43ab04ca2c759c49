"""Workarounds for defects of compilers.

A constant has the pytest id of the test that shows the defect, and fails once the compiler is fixed. The text after it says which
results are wrong or slow without the workaround, in which version of the compiler, and when the workaround can be removed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

REDUCE_SCATTER_SHAPES = "tests/lower/test_quirks.py::test_scatters_that_the_tpu_compiler_makes_all_reduces"
"""Some reduce-scatters are compiled to an all-reduce and a slice, which sends twice the bytes: if a dim after the scattered one is
second to last and not a multiple of 8 (it is padded), if a scattered last dim of 2-byte elements leaves an odd number of 128-lane
tiles per device, and if a dim of size 1 precedes the scattered one. The compiler may choose a layout in which another dim is last:
:mod:`passes.all_reduce_choice` then plans an all-reduce over all torus dimensions, since the first stage would be one.

In libtpu 0.0.42; the workaround can be removed when libtpu compiles the plain reduce-scatters of that test as reduce-scatters.
"""

LATE_GRADIENTS = "tests/passes/test_examples.py::test_gradients_of_layers_are_not_left_to_the_end"
"""The weight gradients of a network are all computed last, while everything gathered for them stays in memory. In a loop, gathered
weights stay in memory until the gradients have been sent.

In libtpu 0.0.42, default effort; the workaround can be removed when the compiler's scheduler bounds live memory.
"""

LOOPS_BEFORE_REDUCTIONS = "tests/passes/test_examples.py::test_the_example_of_a_pass"
"""Partial gradients and gathered weights stay in memory while independent loops run first.

In libtpu 0.0.42, default effort; the workaround can be removed with LATE_GRADIENTS.
"""

LATE_RESULTS = "tests/passes/test_examples.py::test_the_example_of_a_pass"
"""Results that no matmul depends on, such as the loss, are computed at the end of the program, and their operands (float32 logits)
stay in memory during the backward pass.

In libtpu 0.0.42, default effort; the workaround can be removed with LATE_GRADIENTS.
"""

LATE_SLICE = "tests/passes/test_examples.py::test_a_smaller_reduction_is_sliced_at_once_and_no_loop_waits_for_it"
"""If a reduce-scatter is compiled to an all-reduce, the slice is computed where the result is read, and the full-size sum stays in
memory until then.

In libtpu 0.0.42; the workaround can be removed when libtpu compiles these reduce-scatters as reduce-scatters.
"""

STACK_CAST_BEFORE_LOOP = "tests/passes/test_barriers.py::test_slices_that_a_loop_rounds_are_apart"
"""If a loop casts the slices of a stacked float array to a narrower dtype, the compiler casts the full stack before the loop, and
both arrays are in memory. It moves casts and copies through an optimization barrier.

In libtpu 0.0.42; the workaround can be removed when a plain barrier around the slice is enough.
"""

FUSED_EPILOGUE = "tests/passes/test_examples.py::test_the_example_of_a_pass"
"""If several arrays are computed from the result of a matmul (the backward pass of silu(gate) * up), all of them are computed in
the matmul's kernel, tile by tile, while its matrix units wait. A matmul that reads its operands in tiles gets smaller tiles for
each other array of its kernel (the backward pass of a norm).

In libtpu 0.0.42; the workaround can be removed when these kernels take no longer than the matmul and then the elementwise ops.
"""

MOVED_VIEWS = "tests/lower/test_quirks.py::test_transposes_that_the_compiler_moves_through_elementwise_ops"
"""Before it partitions, XLA moves transposes and slices through elementwise ops and matmuls. In the backward pass of an attention
with materialized scores, the softmax's gradient is then computed in the dim orders of two matmuls: one more pass over the scores,
and more exponentials (11 of 170 Mcycles of a Llama of 12 layers on v5p). A sharding constraint is a copy until the program is
partitioned, and nothing moves through it.

In XLA, jax 0.10.2, with libtpu 0.0.42; the workaround can be removed when the program of that test has one exponential without
constraints.
"""

GATHER_NOT_IN_PLACE = "tests/passes/test_examples.py::test_the_example_of_a_pass"
"""An all-gather is never written into the memory of a donated argument: all donated arguments whose results are gathered are copied
at the start of the program.

In libtpu 0.0.42; the workaround can be removed when an all-gather is written into a donated buffer.
"""

SLICE_BEFORE_ALL_TO_ALL = "tests/lower/test_collectives.py::test_a_slice_before_an_all_to_all"
"""A slice of the program before an all-to-all is treated as one of the slices that the all-to-all exchanges, though its layout may
differ: wrong numbers.

In XLA for CPUs, jax 0.10.2; the workaround can be removed when the fuzzer finds no wrong number without the workaround.
"""

MERGED_SLICES = "tests/lower/test_quirks.py::test_a_slice_of_a_slice_stays_within_it"
"""A dynamic slice of a dynamic slice becomes one dynamic slice, whose start is no longer clamped to the first one. A scattered row
is such a slice if its target is sliced by device; a device that does not have the row then reads another one.

In XLA, jax 0.10.2; the workaround can be removed when the oldest supported JAX is 0.12.
"""

BATCHED_CONTRACTION = "tests/lower/test_quirks.py::test_a_batched_sum_of_which_one_axis_is_scattered"
"""A matmul with batch dims gives wrong numbers if its contracted dim is split over two axes, and a split batch dim of the result is
to be split over one of these as well.

In XLA's partitioner, jax 0.10.2 and 0.12.0.1; the workaround can be removed when the partitioner compiles the plain matmul of that
test correctly.
"""

LONG_STRIDE = "tests/lower/test_quirks.py::test_one_element_with_a_long_stride"
"""A slice that takes one element of a split dim, with a stride longer than a device's shard, gives wrong numbers, or does not
compile.

In XLA's partitioner, jax 0.10.2 and 0.12.0.1; the workaround can be removed when the partitioner compiles the plain slice of that
test correctly.
"""

QUEUED_RUNS = "tests/lower/test_quirks.py::test_many_calls_in_flight"
"""A device can have 32 runs in flight. A call that starts another run blocks one of the threads that the runs need (as many as
devices or cores, whichever are more). With few cores, a program with collectives that is called often without waiting for its
results deadlocks, and is aborted after 40 seconds.

In XLA for CPUs, jax 0.10.2; the workaround can be removed when the oldest supported JAX is 0.12.
"""
MAX_QUEUED_RUNS = 8
"""Runs on several CPU devices after which the results are waited for; eager ops in between use slots too (:data:`QUEUED_RUNS`)."""
_runs = itertools.count(1)

LOST_NAN = "tests/lower/test_quirks.py::test_a_nan_in_an_extremum_over_devices"
"""An all-reduce by maximum or minimum treats comparisons with NaN as false: the NaN of one device is lost.

In XLA for CPUs, jax 0.10.2; the workaround can be removed when the plain all-reduce of that test returns NaN.
"""

PERMUTED_AXES = "tests/lower/test_quirks.py::test_a_matmul_over_axes_in_another_order_than_the_mesh"
"""A matmul of operands sharded over two axes in another order than the mesh's, whose result is sharded over them along another dim,
takes the blocks of a replicated operand in the order of the mesh: the values are wrong.

In XLA's partitioner, jax 0.10.2 and 0.12.0; the workaround can be removed when the plain matmul of that test is right.
"""

GROUP_WINDOW = "tests/lower/test_quirks.py::test_a_dilated_convolution_whose_operands_the_compiler_exchanges"
"""It exchanges the operands of a convolution with a large kernel. A spatial dim without padding whose window has as many elements
as the dilation of the input, and moves by one less, is then treated as a group dim, also if the input has another size: the process
is aborted. The gradient of an upsampling convolution with one row per device is such a convolution.

In XLA's algebraic simplifier, jax 0.10.2 (CPU), and libtpu 0.0.42; the workaround can be removed when the plain convolution of that
test compiles.
"""

SINGLE_ROW = "tests/lower/test_quirks.py::test_a_matmul_of_one_row_is_computed_with_eight"
"""A matmul with one row is computed by the vector units, which process 160 weights in a cycle on v6e: four layers of projections of
int8 weights take 5 times as long as reading the weights at default effort, and 7 times at fast effort. With 8 rows the matrix units
compute them in 1.4 and 1.6 times that.

In libtpu 0.0.42; the workaround can be removed when the compiler computes such a matmul by the matrix units.
"""
MATMUL_ROWS = 8
"""Rows with which a matmul of one row is computed (:data:`SINGLE_ROW`)."""

QUIRKS: dict[str, str] = {name: test for name, test in globals().items() if name.isupper() and isinstance(test, str)}
"""Name of every workaround that has code of its own → its test. Primitives that XLA's partitioner gets wrong in general are marked,
by ``pinned`` and ``manual``, in their entries (:mod:`rules.registry`).

The tables of :mod:`hardware.compiler_constants` name those that a version of the TPU compiler has on a chip."""


def psum_scatter(x: Any, axes: str | tuple[str, ...], dim: int) -> Any:
    """``lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)``, in a shape that the TPU compiler keeps as a reduce-scatter.

    See :data:`REDUCE_SCATTER_SHAPES`.
    """
    parts = lax.axis_size(axes)
    shape, scattered = reduce_scatter_shape(x.shape, dim, parts, x.dtype.itemsize)
    local = tuple(n // parts if i == dim else n for i, n in enumerate(x.shape))
    return lax.reshape(lax.psum_scatter(lax.reshape(x, shape), axes, scatter_dimension=scattered, tiled=True), local)


def reduce_scatter_shape(shape: tuple[int, ...], dim: int, parts: int, itemsize: int) -> tuple[tuple[int, ...], int]:
    """(shape to which an array is reshaped before it is reduce-scattered, the dim that is scattered then).

    Unchanged if the TPU compiler handles the shape (:data:`REDUCE_SCATTER_SHAPES`). Otherwise the dims after ``dim`` are merged if
    the second to last would be padded, and a last dim with an odd number of lane tiles per device is split into (parts, rest). The
    caller removes dims of size 1 before ``dim``.

    Args:
      shape: of the local array.
      dim: the dim that is scattered.
      parts: number of devices.
      itemsize: bytes of an element.

    Examples:
      (2048, 4, 128) scattered over dim 0: ((2048, 512), 0).
    """
    n, after = shape[dim], shape[dim + 1 :]
    if len(after) > 1 and after[-2] % 8:
        return (*shape[: dim + 1], math.prod(after)), dim
    if dim and not after and itemsize == 2 and n % (parts * 128) == 0 and n // (parts * 128) % 2:
        return (math.prod(shape[:dim]), parts, n // parts), 1
    return shape, dim


def with_rows(matmul: Callable[..., Any], xs: Sequence[Any], dimension_numbers: Any, rows: int) -> Any:
    """``matmul(*xs)``, a ``dot_general`` one of whose operands is one row, computed with ``rows`` of which one is not zero.

    See :data:`SINGLE_ROW`.

    Args:
      matmul: the function of both operands.
      dimension_numbers: as in ``lax.dot_general``.
    """
    contracted, batch = dimension_numbers
    free = [[d for d in range(x.ndim) if d not in (*c, *b)] for x, c, b in zip(xs, contracted, batch, strict=True)]
    side = next(k for k in range(2) if free[k] and all(xs[k].shape[d] == 1 for d in free[k]))
    padding = [(0, rows - 1 if d == free[side][0] else 0) for d in range(xs[side].ndim)]
    padded = [jnp.pad(x, padding) if k == side else x for k, x in enumerate(xs)]
    return lax.slice_in_dim(matmul(*padded), 0, 1, axis=len(batch[0]) + (len(free[0]) if side else 0))


def not_a_group(
    x: Any, dim: int, window: int, stride: int, padding: tuple[int, int], dilation: int
) -> tuple[Any, tuple[int, int]]:
    """(input, padding) of an equivalent convolution along one spatial dim that XLA does not treat as a group dim.

    See :data:`GROUP_WINDOW`. The input gets one more element, which negative padding removes.
    """
    if padding != (0, 0) or dilation != window or stride != window - 1 or x.shape[dim] == window:
        return x, padding
    return lax.pad(x, np.zeros((), x.dtype), [(0, int(d == dim), 0) for d in range(x.ndim)]), (0, -dilation)


def opaque(x: Any) -> Any:
    """A float array, bitcast to integers and back with an optimization barrier between (:data:`STACK_CAST_BEFORE_LOOP`).

    Arrays of other dtypes are returned unchanged.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    (bits,) = lax.optimization_barrier([lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))])
    return lax.bitcast_convert_type(bits, x.dtype)


def separate_all_gather(x: Any, axes: Sequence[str], dim: int) -> Any:
    """An all-gather along ``dim`` into a buffer that is not the result's (:data:`GATHER_NOT_IN_PLACE`)."""
    shards = lax.all_gather(x, tuple(axes), axis=0, tiled=False)
    y = jnp.moveaxis(shards, 0, dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return y if dim else opaque(y)  # for dim 0 the transpose is no copy


def before_exchange(x: Any, cpu: bool) -> Any:
    """The operand of an all-to-all or a collective-permute; on CPUs behind a barrier (:data:`SLICE_BEFORE_ALL_TO_ALL`)."""
    return lax.optimization_barrier([x])[0] if cpu else x


def extremum(x: Any, axes: Sequence[str], kind: str, cpu: bool) -> Any:
    """The elementwise maximum or minimum over mesh axes, inside ``shard_map``; NaN if the element is NaN on any device.

    On CPUs (:data:`LOST_NAN`) floats are compared as signed integers of the same width and order: the bits of negative numbers
    except the sign are inverted. NaN becomes the largest integer (the smallest for a minimum).

    Args:
      kind: ``"max"`` or ``"min"``.
      cpu: the devices are CPUs.
    """
    combine = lax.pmax if kind == "max" else lax.pmin
    if not cpu or not jnp.issubdtype(x.dtype, jnp.floating):
        return combine(x, axes)
    bits = np.dtype(f"int{8 * x.dtype.itemsize}")
    limits = np.iinfo(bits)

    def ordered(n: Any) -> Any:  # its own inverse
        return jnp.where(n < 0, n ^ np.asarray(limits.max, bits), n)

    n = ordered(lax.bitcast_convert_type(x, bits))
    n = combine(jnp.where(jnp.isnan(x), np.asarray(limits.max if kind == "max" else limits.min, bits), n), axes)
    return lax.bitcast_convert_type(ordered(n), x.dtype)


def short_strides(params: dict[str, Any], shape: Sequence[int]) -> dict[str, Any]:
    """The parameters of an equivalent ``slice`` without strides in dims where the result, of ``shape``, has one element.

    See :data:`LONG_STRIDE`.
    """
    if params["strides"] is None or 1 not in shape:
        return params
    starts, ends, strides = (params[k] for k in ("start_indices", "limit_indices", "strides"))
    ends = tuple(a + 1 if n == 1 else b for n, a, b in zip(shape, starts, ends, strict=True))
    strides = tuple(1 if n == 1 else s for n, s in zip(shape, strides, strict=True))
    return {**params, "limit_indices": ends, "strides": strides}


def with_bounded_queue(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A function that calls ``run``; each :data:`MAX_QUEUED_RUNS`-th call waits for its own results (:data:`QUEUED_RUNS`).

    Calls are counted over all such functions of the process, since they share the queue.
    """

    def paced(*xs: Any) -> list[Any]:
        results = run(*xs)
        if next(_runs) % MAX_QUEUED_RUNS == 0:
            jax.block_until_ready(results)  # no effect on tracers
        return results

    return paced
