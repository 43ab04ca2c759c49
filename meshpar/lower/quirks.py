"""Workarounds for compilers: each with where it was seen, what goes wrong, the test that shows it, and when it can go."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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

QUIRKS = (SCATTER_SHAPES,)
"""Every workaround of the lowering."""


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
