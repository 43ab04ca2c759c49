"""Specs, shapes and bytes of shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..layout import Spec
from ..program.ir import Value


def replicated_spec(rank: int) -> Spec:
    """The spec of a replicated array of this rank."""
    return ((),) * rank


def shard_count(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """The number of shards of a dim that is sharded over some axes: the product of their sizes."""
    return sizes[axes[0]] if len(axes) == 1 else math.prod(sizes[a] for a in axes)


def local_shape(shape: Sequence[int], spec: Spec | None, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one shard of an array with this global shape; uneven shards rounded up."""
    if spec is None or not any(spec):
        return tuple(shape)
    return tuple(-(-n // shard_count(axes, sizes)) if axes else n for n, axes in zip(shape, spec, strict=True))


def value_bytes(value: Value, spec: Spec, sizes: Mapping[str, int]) -> float:
    """Bytes of one shard of a value; uneven shards rounded up."""
    return itemsize(value.aval) * math.prod(local_shape(value.shape, spec, sizes))


def itemsize(aval: Any) -> float:
    """Bytes of an element in memory and in a collective: 0.5 for 4-bit types, 8 for threefry keys."""
    return itemsize_of(aval.dtype)


@functools.cache
def itemsize_of(dtype: Any) -> float:
    """As :func:`itemsize`, for a dtype."""
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        return 8
    return 0.5 if dtype.name in ("int4", "uint4") else dtype.itemsize


def format_axes(axes: Sequence[str]) -> str:
    """Axes as text: ``\\`data\\`+\\`model\\```."""
    return "+".join(f"`{a}`" for a in axes)
