"""Which choice goes into which row of a buffer: bookkeeping in integers, on one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Dispatch", "Sorted", "Window", "sort_choices", "window"]


class Sorted(NamedTuple):
    """Choices sorted by bucket, in their order within one.

    Attributes:
      bucket: int32 [n], of every choice; the number of buckets for a choice that is in none.
      order: int32 [n], the choices, sorted.
      place: int32 [n], place of every choice in its bucket.
      counts: int32 [buckets].
    """

    bucket: jax.Array
    order: jax.Array
    place: jax.Array
    counts: jax.Array


def sort_choices(bucket: jax.Array, buckets: int) -> Sorted:
    """Sort n choices by bucket, keeping their order (a counting sort by way of XLA's stable one)."""
    n = bucket.shape[0]
    bucket = jnp.where((bucket >= 0) & (bucket < buckets), bucket, buckets).astype(jnp.int32)
    order = jnp.argsort(bucket, stable=True).astype(jnp.int32)
    ends = jnp.searchsorted(bucket[order], jnp.arange(buckets + 1, dtype=jnp.int32), side="right").astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    rank = jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)
    return Sorted(bucket, order, rank - starts[bucket], (ends - starts)[:buckets])


class Window(NamedTuple):
    """The rows of a buffer with a slot of `rows` rows for every bucket.

    Attributes:
      slots: int32 [n], row of every choice; -1 if it is not in this window.
      sources: int32 [buckets·rows], choice in every row; -1 where there is none.
    """

    slots: jax.Array
    sources: jax.Array


def window(choices: Sorted, rows: int, first: jax.Array | int) -> Window:
    """The choices with places first…first+rows-1 of each bucket."""
    buckets, n = choices.counts.shape[0], choices.order.shape[0]
    ahead = choices.place - first
    here = (choices.bucket < buckets) & (ahead >= 0) & (ahead < rows)
    slots = jnp.where(here, choices.bucket * rows + ahead, -1)
    starts = jnp.cumsum(choices.counts) - choices.counts
    place = first + jnp.arange(rows, dtype=jnp.int32)[None, :]
    index = jnp.minimum(starts[:, None] + place, max(n - 1, 0))
    live = place < choices.counts[:, None]
    sources = jnp.where(live, choices.order[index], -1) if n else jnp.full((buckets, rows), -1, jnp.int32)
    return Window(slots, sources.reshape(-1))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "sources", "rows", "row_sources", "row_scale", "group_sizes", "most", "dropped"],
    meta_fields=["strategy", "axis_name", "devices", "tokens", "exchange"],
)
@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Where one device's rows went: what `expert_combine` needs to bring them back. A pytree.

    Attributes:
      slots, sources: choice → row, row → choice of the buffer that was sent (a2a) or of the experts (ring, local).
      rows, row_sources: the same between what arrived and the experts' buffer (a2a only).
      row_scale: float32 [R], weight of each row of the experts' buffer, for `grouped_matmul`; None if none was given.
      group_sizes: int32 [E / devices], rows of each expert of this device, for `grouped_matmul`.
      most: int32 [], the largest number of rows that one buffer had to hold, from first place 0 on: of this device for one
        other (a2a), of all devices for this one (ring, local). A buffer of that many rows drops nothing.
      dropped: int32 [], choices beyond this window: of this device (a2a), for this device (ring, local).
    """

    slots: jax.Array
    sources: jax.Array
    rows: jax.Array | None
    row_sources: jax.Array | None
    row_scale: jax.Array | None
    group_sizes: jax.Array
    most: jax.Array
    dropped: jax.Array
    strategy: str
    axis_name: str | tuple[str, ...] | None
    devices: int
    tokens: int
    exchange: str | None = None
