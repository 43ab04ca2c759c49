"""Shapes and bytes of shards, and bytes on the wire."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..layout import Spec
from ..program.ir import Value


def replicated_spec(rank: int) -> Spec:
    """The spec of an array of this rank that every device holds whole."""
    return ((),) * rank


def shard_count(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Into how many parts some axes split a dim."""
    return sizes[axes[0]] if len(axes) == 1 else math.prod(sizes[a] for a in axes)


def local_shape(shape: Sequence[int], spec: Spec | None, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one shard; uneven shards rounded up."""
    if spec is None or not any(spec):
        return tuple(shape)
    return tuple(-(-n // shard_count(axes, sizes)) if axes else n for n, axes in zip(shape, spec, strict=True))


def value_bytes(value: Value, spec: Spec, sizes: Mapping[str, int]) -> float:
    """Bytes of one shard of a value; uneven shards rounded up."""
    return itemsize(value.aval) * math.prod(local_shape(value.shape, spec, sizes))


def itemsize(aval: Any) -> float:
    """Bytes of an element, in memory and on the wire: 4-bit types half of one, keys of threefry 8."""
    return _itemsize(aval.dtype)


@functools.cache
def _itemsize(dtype: Any) -> float:
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        return 8
    return 0.5 if dtype.name in ("int4", "uint4") else dtype.itemsize


def format_axes(axes: Sequence[str]) -> str:
    """Axes for people: ``\\`data\\`+\\`model\\```."""
    return "+".join(f"`{a}`" for a in axes)
