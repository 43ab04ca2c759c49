"""Workarounds for compilers: each with where it was seen, what goes wrong, the test that shows it, and when it can go."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True, slots=True)
class Quirk:
    """What a compiler does that the lowering works around.

    Attributes:
      compiler: the compiler and the version in which it was seen.
      wrong: what goes wrong without the workaround.
      test: the test that shows it, as pytest names it; it fails once the compiler is mended.
      remove: when the workaround can go.
    """

    compiler: str
    wrong: str
    test: str
    remove: str


SCATTER_SHAPES = Quirk(
    compiler="libtpu 0.0.42",
    wrong="Some reduce-scatters are compiled to an all-reduce and a slice, which sends twice the bytes: over a dim before a "
    "second-to-last dim that is no multiple of 8 (it is padded), over a last dim of 2-byte elements of which an odd number of 128 "
    "lanes is kept, and over a dim behind one of size 1.",
    test="tests/lower/test_quirks.py::test_scatters_that_the_tpu_compiler_makes_all_reduces",
    remove="when libtpu compiles the plain reduce-scatters of that test as reduce-scatters",
)

LONG_HELD = Quirk(
    compiler="libtpu 0.0.42, default effort",
    wrong="All weights' gradients of a network are made last, with all that was gathered for them in memory; in a loop gathered "
    "weights are held until the gradients are on their way.",
    test="tests/passes/test_schedule.py::test_gradients_of_layers_are_not_left_to_the_end",
    remove="when the scheduler bounds live memory by itself",
)
LARGE_BUFFER_BYTES = 2**24
"""Bytes of operands or results on a device from which on it matters how long they are held (:data:`LONG_HELD`)."""

LOOPS_FIRST = Quirk(
    compiler="libtpu 0.0.42, default effort",
    wrong="Whole gradients, and what was gathered, are kept in memory while independent loops run first.",
    test="tests/passes/test_barriers.py::test_a_loop_waits_for_what_was_large_before_it",
    remove="with LONG_HELD",
)
SERIALIZED_REDUCTION_BYTES = 2**26
"""Bytes of a reduce-scattered sum on a device for which the next loop waits (:data:`LOOPS_FIRST`)."""

CUT_LATE = Quirk(
    compiler="libtpu 0.0.42",
    wrong="A reduce-scatter that is compiled to an all-reduce is cut where its result is read; the whole sum is held until then.",
    test="tests/passes/test_barriers.py::test_a_large_scattered_sum_is_cut_where_it_is_made",
    remove="when reduce-scatters stay what they are",
)
SLICE_BARRIER_BYTES = SERIALIZED_REDUCTION_BYTES // 4
"""Bytes of a sum on a device from which on its scattered part stands behind a barrier (:data:`CUT_LATE`)."""

ROUNDED_STACK = Quirk(
    compiler="libtpu 0.0.42",
    wrong="A stack of floats that a loop rounds slice by slice is rounded whole before the loop, and both are held; casts and "
    "copies pass an optimization barrier.",
    test="tests/passes/test_barriers.py::test_slices_that_a_loop_rounds_are_apart",
    remove="when a plain barrier around the slice is enough",
)

JOINED_EPILOGUE = Quirk(
    compiler="libtpu 0.0.42",
    wrong="Where several arrays are computed from the result of a product, all of them are computed inside it, one tile after "
    "the other, while its matrix units wait: the way back of silu(gate) * up. A product that reads its operands tile by tile gets "
    "smaller tiles from every array beside it: the way back of a norm.",
    test="tests/passes/test_barriers.py::test_a_product_of_which_several_operands_are_made_is_apart",
    remove="when these kernels take no longer than the product and the elementwise ops one after the other",
)
EPILOGUE_LIMITS = {"v5e": (3, 64), "v5p": (0, 32), "v6e": (1, 64), "tpu7x": (0, 32)}
"""The chips on which a matmul with a result of at least ``LARGE_BUFFER_BYTES`` bytes is compiled to a separate kernel
(:data:`JOINED_EPILOGUE`): of how many matmuls at most several arrays are computed (on v6e the kernel takes no longer than its
matmul where gate and up are computed in it), and MiB
of an operand that stays in VMEM. A product with a larger one on both sides always stands apart; of v5p and tpu7x no other does."""

ALL_REDUCE_CHIPS = ("v4", "v5e", "v5p", "v6e")
"""The chips for which XLA's partitioner (libtpu 0.0.42) was seen to leave a sum whole where every device gets a part of its
own; for tpu7x it scatters them (Llama 3 8B under FSDP sends 47.8 GB a step there)."""

COPIED_STACK = Quirk(
    compiler="libtpu 0.0.42",
    wrong="Products that a loop stacks lie as it makes them, features innermost. Where the products of the loop on the way back "
    "take tokens innermost, each slice is cut out of the stack and copied twice.",
    test="tests/passes/test_barriers.py::test_products_that_a_loop_stacks_lie_as_they_are_read",
    remove="when no slice of what is kept of gate and up is copied on the way back (row 9 of benchmarks/maxtext.py)",
)
COPIED_STACK_CHIPS = ("v6e",)
"""The chips whose products on the way back take tokens innermost (:data:`COPIED_STACK`)."""

MOVED_VIEWS = Quirk(
    compiler="XLA, jax 0.10.2, with libtpu 0.0.42",
    wrong="Before it partitions, XLA moves transposes and slices through elementwise ops and matmuls. In the backward pass "
    "of an attention with materialized scores, the softmax's gradient is then computed in the dim orders of two "
    "matmuls: one more pass over the scores, and more exponentials (11 of 170 Mcycles of a Llama of 12 layers on "
    "v5p). A sharding constraint is a copy until the program is partitioned, and nothing moves through it.",
    test="tests/lower/test_quirks.py::test_transposes_that_the_compiler_moves_through_elementwise_ops",
    remove="when the program of that test has one exponential without constraints",
)

NOT_IN_PLACE = Quirk(
    compiler="libtpu 0.0.42",
    wrong="Nothing is gathered into the memory of an argument: all donated arguments whose results are gathered are copied when "
    "the program begins.",
    test="tests/passes/test_barriers.py::test_results_in_place_of_arguments_are_gathered_one_after_the_other",
    remove="when a gather is written into a donated buffer",
)

EXCHANGED_SLICE = Quirk(
    compiler="XLA for CPUs, jax 0.10.2",
    wrong="A slice of the program's own before an all-to-all is taken for one that the all-to-all cuts, which may lie otherwise: "
    "wrong numbers.",
    test="tests/lower/test_collectives.py::test_a_slice_before_an_all_to_all",
    remove="when the fuzzer finds nothing without it",
)

MERGED_SLICES = Quirk(
    compiler="XLA, jax 0.10.2",
    wrong="A dynamic slice of a dynamic slice becomes one, whose start is no longer held within the first. A scattered row is "
    "such a slice where what it is added to is cut by device; on devices that do not hold the row, another is read.",
    test="tests/lower/test_quirks.py::test_a_slice_of_a_slice_stays_within_it",
    remove="when the oldest JAX is 0.12",
)

BATCHED_SUM = Quirk(
    compiler="XLA's partitioner, jax 0.10.2 and 0.12.0.1",
    wrong="A product with batch dims whose contracted dim is split over two axes, and of whose result a split batch dim is to be "
    "split over one of these as well, comes out wrong.",
    test="tests/lower/test_quirks.py::test_a_batched_sum_of_which_one_axis_is_scattered",
    remove="when the partitioner gets the plain product of that test right",
)

LONG_STRIDE = Quirk(
    compiler="XLA's partitioner, jax 0.10.2 and 0.12.0.1",
    wrong="A slice that takes one element of a split dim, with a stride longer than a device's part of it, comes out wrong, or is "
    "not compiled.",
    test="tests/lower/test_quirks.py::test_one_element_with_a_long_stride",
    remove="when the partitioner gets the plain slice of that test right",
)

RUNS_AHEAD = Quirk(
    compiler="XLA for CPUs, jax 0.10.2",
    wrong="Of a device, 32 runs may be under way; what starts another waits, in one of the threads that the runs need, of which "
    "there are as many as devices or cores, whichever are more. With few cores a program with collectives that is called often "
    "enough without a wait hangs, and is aborted after 40 seconds.",
    test="tests/lower/test_quirks.py::test_many_calls_under_way",
    remove="when the oldest JAX is 0.12",
)
RUNS_ON_CPUS = 8
"""Runs on several CPU devices after which all are waited for: there is room for the eager ops between them (:data:`RUNS_AHEAD`)."""
_runs = itertools.count(1)

LOST_NAN = Quirk(
    compiler="XLA for CPUs, jax 0.10.2",
    wrong="An all-reduce by maximum or minimum takes a comparison with NaN for false: a NaN of one device is lost.",
    test="tests/lower/test_quirks.py::test_a_nan_in_an_extremum_over_devices",
    remove="when the plain all-reduce of that test returns NaN",
)

QUIRKS = (
    SCATTER_SHAPES, LONG_HELD, LOOPS_FIRST, CUT_LATE, ROUNDED_STACK, NOT_IN_PLACE, EXCHANGED_SLICE, MERGED_SLICES,
    BATCHED_SUM, LONG_STRIDE, RUNS_AHEAD, JOINED_EPILOGUE, COPIED_STACK, MOVED_VIEWS, LOST_NAN,
)  # fmt: skip
"""Every workaround of passes and lowerings. What XLA's partitioner gets wrong of a primitive stands in :mod:`meshpar.rules`."""


def psum_scatter(x: Any, axes: str | tuple[str, ...], dim: int) -> Any:
    """``lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)`` in a shape that stays one (:data:`SCATTER_SHAPES`)."""
    parts = lax.axis_size(axes)
    shape, at = scattered_as(x.shape, dim, parts, x.dtype.itemsize)
    kept = tuple(n // parts if i == dim else n for i, n in enumerate(x.shape))
    return lax.reshape(lax.psum_scatter(lax.reshape(x, shape), axes, scatter_dimension=at, tiled=True), kept)


def scattered_as(shape: tuple[int, ...], dim: int, parts: int, itemsize: int) -> tuple[tuple[int, ...], int]:
    """In which shape an array is reduce-scattered over a dim, and which dim that is then: as it is, where that will do.

    The dims behind are made one where the second to last would be padded; a last dim of which an odd number of lanes is kept is
    split by parts (:data:`SCATTER_SHAPES`). The caller leaves out dims of size 1 before it.

    Args:
      shape: of the local array.
      dim: that is scattered.
      parts: devices that it is scattered over.
      itemsize: bytes of an element.
    """
    n, after = shape[dim], shape[dim + 1 :]
    if len(after) > 1 and after[-2] % 8:
        return (*shape[: dim + 1], math.prod(after)), dim
    if dim and not after and itemsize == 2 and n % (parts * 128) == 0 and n // (parts * 128) % 2:
        return (math.prod(shape[:dim]), parts, n // parts), 1
    return shape, dim


def opaque(x: Any) -> Any:
    """An array of floats as it is, behind an optimization barrier through integers of the same width (:data:`ROUNDED_STACK`)."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    (bits,) = lax.optimization_barrier([lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))])
    return lax.bitcast_convert_type(bits, x.dtype)


def separate_all_gather(x: Any, axes: Sequence[str], dim: int) -> Any:
    """An all-gather into other memory than that of the result (:data:`NOT_IN_PLACE`)."""
    pieces = lax.all_gather(x, tuple(axes), axis=0, tiled=False)
    y = jnp.moveaxis(pieces, 0, dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return y if dim else opaque(y)  # there is nothing to move in front


def before_exchange(x: Any, cpu: bool) -> Any:
    """What is sent in an all-to-all or a permute (:data:`EXCHANGED_SLICE`)."""
    return lax.optimization_barrier([x])[0] if cpu else x


def extremum(x: Any, axes: Sequence[str], kind: str, cpu: bool) -> Any:
    """The maximum or minimum of arrays over devices, NaN where one of them is NaN.

    On CPUs (:data:`LOST_NAN`) floating-point numbers are compared as signed integers of the same width, in the same order: the bits
    of negative numbers but for the sign are inverted. NaN becomes the largest integer (the smallest, for a minimum).
    """
    combine = lax.pmax if kind == "max" else lax.pmin
    if not cpu or not jnp.issubdtype(x.dtype, jnp.floating):
        return combine(x, axes)
    bits = np.dtype(f"int{8 * x.dtype.itemsize}")
    ends = np.iinfo(bits)

    def ordered(n: Any) -> Any:  # its own inverse
        return jnp.where(n < 0, n ^ np.asarray(ends.max, bits), n)

    n = ordered(lax.bitcast_convert_type(x, bits))
    n = combine(jnp.where(jnp.isnan(x), np.asarray(ends.max if kind == "max" else ends.min, bits), n), axes)
    return lax.bitcast_convert_type(ordered(n), x.dtype)


def short_strides(params: dict[str, Any], shape: Sequence[int]) -> dict[str, Any]:
    """The parameters of a slice with a result of this shape: where that is one element, it ends there (:data:`LONG_STRIDE`)."""
    if params["strides"] is None or 1 not in shape:
        return params
    starts, ends, strides = (params[k] for k in ("start_indices", "limit_indices", "strides"))
    ends = tuple(a + 1 if n == 1 else b for n, a, b in zip(shape, starts, ends, strict=True))
    strides = tuple(1 if n == 1 else s for n, s in zip(shape, strides, strict=True))
    return {**params, "limit_indices": ends, "strides": strides}


def not_far_ahead(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A program over several CPU devices whose calls do not pile up (:data:`RUNS_AHEAD`)."""

    def paced(*xs: Any) -> list[Any]:
        results = run(*xs)
        if next(_runs) % RUNS_ON_CPUS == 0:
            jax.block_until_ready(results)  # what is traced has nothing to wait for
        return results

    return paced
