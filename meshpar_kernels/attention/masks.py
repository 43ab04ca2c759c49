"""Visibility of keys: causal, sliding-window and segment masks by global position, and the zig-zag order of tokens."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

NOWHERE = -1
"""The position of a key that no query sees (padding of a chunk)."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """The static part of a mask; segment ids are separate arrays.

    Attributes:
      causal: a query sees no later key.
      window: a query sees the keys less than `window` positions away; if causal, itself and the window - 1 keys before
        it.
    """

    causal: bool = False
    window: int | None = None

    def allowed(self, q_pos, k_pos):
        """Whether queries at these positions see keys at those; the arguments broadcast."""
        is_visible = k_pos != NOWHERE
        away = q_pos - k_pos
        if self.causal:
            is_visible = is_visible & (away >= 0)
        if self.window is not None:
            is_visible = is_visible & (away < self.window)
            if not self.causal:
                is_visible = is_visible & (away > -self.window)
        return is_visible

    def visible(
        self, q_pos: jax.Array, k_pos: jax.Array, q_seg: jax.Array | None, k_seg: jax.Array | None
    ) -> jax.Array:
        """bool [B or 1, Q, K], of positions [Q] and [K] and segment ids [B, Q] and [B, K]."""
        is_visible = self.allowed(q_pos[:, None], k_pos[None, :])[None]
        if q_seg is not None and k_seg is not None:
            is_visible = is_visible & (q_seg[:, :, None] == k_seg[:, None, :])
        return is_visible

    def any_visible(
        self, q_pos: jax.Array, k_pos: jax.Array, q_seg: jax.Array | None, k_seg: jax.Array | None
    ) -> jax.Array:
        """bool []: False only where no query sees any key, by the extremes of positions and segment ids."""
        real = k_pos != NOWHERE
        least, most = jnp.where(real, k_pos, np.iinfo(np.int32).max).min(), k_pos.max()
        is_visible = real.any() & self.reaches(q_pos.min(), q_pos.max(), least, most)
        if q_seg is not None and k_seg is not None:
            is_visible &= ((q_seg.min(1) <= k_seg.max(1)) & (k_seg.min(1) <= q_seg.max(1))).any()
        return is_visible

    def all_visible(
        self, q_pos: jax.Array, k_pos: jax.Array, q_seg: jax.Array | None, k_seg: jax.Array | None
    ) -> jax.Array:
        """bool []: True only where every query sees every key, by the extremes of positions and segment ids."""
        nearest, farthest = q_pos.min() - k_pos.max(), q_pos.max() - k_pos.min()
        is_visible = (k_pos != NOWHERE).all()
        if self.causal:
            is_visible &= nearest >= 0
        if self.window is not None:
            is_visible &= farthest < self.window
            if not self.causal:
                is_visible &= nearest > -self.window
        if q_seg is not None and k_seg is not None:
            least, most = jnp.minimum(q_seg.min(1), k_seg.min(1)), jnp.maximum(q_seg.max(1), k_seg.max(1))
            is_visible &= (least == most).all()
        return is_visible

    def reaches(self, q_first, q_last, k_first, k_last):
        """Whether some query of a run of positions sees some key of another; both ends included."""
        nearest, farthest = q_first - k_last, q_last - k_first  # of query position - key position
        is_visible = farthest >= nearest
        if self.causal:
            is_visible &= farthest >= 0
        if self.window is not None:
            is_visible &= nearest < self.window
            if not self.causal:
                is_visible &= farthest > -self.window
        return is_visible


# -- the order of tokens


def positions(index, total: int, zigzag: int):
    """Position of the token at `index` in an array of `total` tokens.

    Args:
      index: int array (NumPy or JAX), 0…total-1.
      zigzag: the tokens are in zig-zag order for so many devices; 1: in order.
    """
    if zigzag == 1:
        return index
    chunk = total // (2 * zigzag)
    slot, within = index // chunk, index % chunk
    device = slot // 2
    return (device + slot % 2 * (2 * zigzag - 1 - 2 * device)) * chunk + within


def zigzag(x: jax.Array, devices: int, axis: int = 1) -> jax.Array:
    """Put tokens in zig-zag order: split in 2·A blocks, device i gets blocks i and 2A - 1 - i, so that causal work is
    balanced.

    Args:
      x: full (unsharded) array, tokens along `axis`.
      devices: A; 1 leaves the order as it is.

    Returns:
      The reordered array: sharding its `axis` over A devices gives each device its two blocks. `unzigzag` is the
        inverse.

    Raises:
      ValueError: the length of `axis` is no multiple of 2·A.
    """
    return _take_blocks("zigzag", x, devices, axis, inverse=False)


def unzigzag(x: jax.Array, devices: int, axis: int = 1) -> jax.Array:
    """The inverse of `zigzag`: tokens in the order of their positions. Arguments and errors are the same."""
    return _take_blocks("unzigzag", x, devices, axis, inverse=True)


def _take_blocks(op: str, x: jax.Array, devices: int, axis: int, *, inverse: bool) -> jax.Array:
    """The array with its 2·A blocks of `axis` in zig-zag order, or (`inverse`) from zig-zag order back in the order of
    their positions.

    Raises:
      ValueError: `devices` is below 1, or the length of `axis` is no multiple of 2·A.
    """
    axis %= x.ndim
    if devices < 1:
        raise ValueError(f"{op}: devices={devices} must be at least 1")
    if devices == 1:
        return x
    if x.shape[axis] % (2 * devices):
        raise ValueError(
            f"{op}: {x.shape[axis]} tokens (axis {axis} of {list(x.shape)}) do not divide into 2·{devices} blocks; "
            f"pad to a multiple of {2 * devices}"
        )
    order = positions(np.arange(2 * devices), 2 * devices, devices)
    order = np.argsort(order) if inverse else order
    blocks = x.reshape(*x.shape[:axis], 2 * devices, -1, *x.shape[axis + 1 :])
    return jnp.take(blocks, order, axis=axis).reshape(x.shape)


# -- static visibility (NumPy)


def runs(first: int, length: int, total: int, zigzag: int) -> Iterator[tuple[int, int]]:
    """(first, last) position of each run of consecutive positions among the tokens `first` … `first + length - 1` of
    the array."""
    chunk = total if zigzag == 1 else total // (2 * zigzag)
    at, end = first, first + length
    while at < end:
        stop = min(end, (at // chunk + 1) * chunk)
        start = int(positions(np.asarray(at), total, zigzag))
        yield start, start + stop - at - 1
        at = stop


@functools.lru_cache(maxsize=256)
def devices_seen(mask: Mask, devices: int, q_len: int, k_len: int, zigzag: int) -> tuple[int, ...]:
    """The offsets d for which the queries of some device i see a key of device (i - d) mod `devices`; lengths of one device."""
    held = [[list(runs(i * n, n, n * devices, zigzag)) for i in range(devices)] for n in (q_len, k_len)]
    return tuple(
        d
        for d in range(devices)
        if any(
            bool(mask.reaches(*a, *b)) for i in range(devices) for a in held[0][i] for b in held[1][(i - d) % devices]
        )
    )


@functools.lru_cache(maxsize=256)
def visible_pairs(mask: Mask, devices: int, q_len: int, k_len: int, zigzag: int) -> tuple[int, ...]:
    """For each device, the number of pairs of one of its queries and a key that it sees; full lengths, without
    segments, in closed form."""

    def seen_by(first: int, last: int) -> int:
        """Σ over queries first…last of the number of visible keys."""
        behind = 0 if not mask.window else mask.window
        edges = {first, last}
        for edge in (k_len - 1, k_len - 1 + behind, behind - 1, k_len - behind):
            edges |= {e for e in (edge - 1, edge, edge + 1) if first <= e <= last}
        points = sorted(edges)

        def one(p: int) -> int:
            low = 0 if mask.window is None else max(0, p - mask.window + 1)
            high = p if mask.causal else (k_len - 1 if mask.window is None else p + mask.window - 1)
            return max(0, min(high, k_len - 1) - low + 1)

        total = one(points[0])
        for a, b in itertools.pairwise(points):  # linear between the edges
            total += (one(a + 1) + one(b)) * (b - a) // 2
        return total

    each = q_len // devices
    return tuple(sum(seen_by(*run) for run in runs(i * each, each, q_len, zigzag)) for i in range(devices))
