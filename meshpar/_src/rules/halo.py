"""Halo exchanges: the window of a split dim that each device reads, with elements of other shards.

Example: a convolution with 3 taps over 16 rows in 4 shards. Device p reads rows ``[4p - 1, 4p + 5)``: its shard, one row of the
shard before, and one of the shard after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .exchange_along_dim import ZERO, Exchange, exchange_of, exchanged
from .mesh_in_shard_map import axis_index, table_entry
from .one_owner import is_positive_zero


@dataclass(frozen=True, slots=True)
class ShardWindow:
    """The window that each device reads of a split dim, which an op may pad and dilate.

    Positions count in the padded and dilated dim, elements in the array: element i is at position ``i·dilation``,
    after padding.

    Attributes:
      block: size of a shard; device p has the elements ``[p·block, (p+1)·block)``.
      starts: for every device, the first element of its window; windows may extend outside the array.
      length: number of elements of a window.
      before: for every device, the number of positions of its window before the first element.
      extent: number of positions of a window.
      dilation: the distance between elements.
    """

    block: int
    starts: tuple[int, ...]
    length: int
    before: tuple[int, ...]
    extent: int
    dilation: int = 1

    @classmethod
    def of(cls, block: int, starts: tuple[int, ...], length: int) -> ShardWindow:
        """The window without padding and dilation."""
        return cls(block, starts, length, (0,) * len(starts), length)

    @property
    def exchange(self) -> Exchange:
        """The exchange by which every device gets the elements of its window, with zeros outside of the array."""
        return _exchange(self.block, self.starts, self.length)


@functools.lru_cache(maxsize=4096)
def _exchange(block: int, starts: tuple[int, ...], length: int) -> Exchange:
    element = np.add.outer(starts, np.arange(length))
    return exchange_of(np.where((element >= 0) & (element < len(starts) * block), element, ZERO), block)


def shard_window(block: int, shards: int, step: int, extent: int, low: int = 0, dilation: int = 1) -> ShardWindow:
    """The window in which device p reads the positions ``[p·step - low, p·step - low + extent)`` of a padded and dilated dim.

    Args:
      block: size of a shard.
      shards: number of shards.
      step: positions from the first one of a device to the first one of the next.
      extent: number of positions that a device reads.
      low: padding before element 0 (negative: positions that are removed).
      dilation: element i is at position ``i·dilation``; the positions between have no element.
    """
    positions = [p * step - low for p in range(shards)]
    starts = tuple(-(-a // dilation) for a in positions)
    length = max(1, *((a + extent - 1) // dilation - s + 1 for a, s in zip(positions, starts, strict=True)))
    before = tuple(s * dilation - a for a, s in zip(positions, starts, strict=True))
    return ShardWindow(block, starts, length, before, extent, dilation)


def sliding_window(
    block: int, shards: int, count: int, stride: int, taps: int, tap_dilation: int, low: int, dilation: int = 1
) -> ShardWindow:
    """The window in which a device reads the positions of ``count`` sliding windows, one every ``stride`` positions.

    Each has ``taps`` elements, at distances of ``tap_dilation``. A convolution with 3 taps over 4 rows per shard, and one row of
    padding (``sliding_window(4, 4, 4, 1, 3, 1, 1)``), reads 6 positions from ``4p - 1``. The other arguments are as in
    :func:`shard_window`.
    """
    return shard_window(
        block, shards, count * stride, (count - 1) * stride + (taps - 1) * tap_dilation + 1, low, dilation
    )


def scatter_windows(
    block: int, shards: int, count: int, stride: int, taps: int, low: int
) -> tuple[ShardWindow, ShardWindow]:
    """For the gradient of a pooling, which adds the value of each sliding window to an element in it.

    Args:
      block: elements per device.
      shards: number of shards.
      count: sliding windows per device, one every ``stride`` positions, each of ``taps`` positions.
      low: padding before element 0.

    Returns:
      (the sliding windows that overlap a device's shard, the elements of these windows and of the shard).
    """
    # the first window that overlaps the shard; if it starts inside, the one before, so that the elements include the shard
    begins = [p * block + low for p in range(shards)]
    first = [min(-((taps - 1 - b) // stride), b // stride) for b in begins]
    last = [(p * block + low + block - 1) // stride for p in range(shards)]
    length = max(b - a + 1 for a, b in zip(first, last, strict=True))
    extent = (length - 1) * stride + max(taps, stride)
    elements = tuple(a * stride - low for a in first)
    return ShardWindow.of(count, tuple(first), length), ShardWindow.of(block, elements, extent)


# -- inside a shard_map


@dataclass(eq=False, slots=True)
class Exchanged:
    """The elements of other shards that were received in the body that is being traced, which later ops use again.

    Attributes:
      windows: ``id`` of an array that :func:`fetch_window` returned → the array, and its key: the array of which it is a window,
        dim and window.
      received: (key of an array, key of its elements that are sent) → the array, and the received elements.
    """

    windows: dict[int, tuple[Any, Hashable]] = field(default_factory=dict)
    received: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)

    def name(self, x: Any) -> Hashable:
        """The key of an array: equal for windows that are equal."""
        return self.windows[id(x)][1] if id(x) in self.windows else id(x)


_EXCHANGED: ContextVar[Exchanged | None] = ContextVar("_EXCHANGED", default=None)


@contextmanager
def reusing(exchanged: Exchanged) -> Iterator[None]:
    """A context in which :func:`fetch_window` exchanges equal elements of an array once."""
    token = _EXCHANGED.set(exchanged)
    try:
        yield
    finally:
        _EXCHANGED.reset(token)


def _received(x: Any, key: Hashable, receive: Callable[[], Any]) -> Any:
    """The result of ``receive``, or of an earlier call for the same array and key."""
    known = _EXCHANGED.get()
    if known is None:
        return receive()
    key = (known.name(x), key)
    if key not in known.received:
        known.received[key] = x, receive()  # x stays alive, so that no other array has its id
    return known.received[key][1]


def fetch_window(x: Any, dim: int, axes: Sequence[str], window: ShardWindow, fill: Any = 0) -> Any:
    """Exchange halos, and return the elements of this device's window of a split dim, without padding and dilation.

    Args:
      x: the shard, of size ``window.block`` along ``dim``.
      axes: the axes over which the dim is split, major to minor.
      fill: the value outside the array.

    Returns:
      An array of size ``window.length`` along ``dim``; it is recorded if it is only filled with zeros.
    """
    out, known = exchanged(x, dim, tuple(axes), window.exchange, functools.partial(_received, x)), _EXCHANGED.get()
    if known is not None and isinstance(fill, int) and fill == 0 and out is not x:
        known.windows[id(out)] = out, (known.name(x), tuple(axes), dim, window.starts, window.length)
    is_zero = isinstance(fill, int | float | np.ndarray | np.generic) and is_positive_zero(fill)
    size = len(window.starts) * window.block
    if is_zero or (min(window.starts) >= 0 and max(window.starts) + window.length <= size):
        return out
    element = lax.broadcasted_iota(np.int32, out.shape, dim) + table_entry(window.starts, axis_index(axes))
    return jnp.where((element >= 0) & (element < size), out, jnp.asarray(fill, x.dtype))


def dilate(x: Any, dim: int, axes: Sequence[str], window: ShardWindow, fill: Any) -> Any:
    """A device's window of a padded and dilated dim, from its elements ``x``; ``fill`` at the positions without an
    element.

    ``axes`` split the dim ``dim``.

    Elements ``[a, b]`` with ``dilation=2``, ``before=(1, …)`` and ``extent=4`` give ``[fill, a, fill, b]``.
    """
    if window.dilation == 1 and x.shape[dim] == window.extent:
        return x
    interior = window.dilation - 1
    high = max(0, window.extent - (x.shape[dim] - 1) * window.dilation - 1)
    pads = [(interior, high, interior) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    x = lax.pad(x, jnp.asarray(fill, x.dtype), pads)
    first = tuple(interior - b for b in window.before)
    return lax.dynamic_slice_in_dim(x, table_entry(first, axis_index(axes)), window.extent, dim)
