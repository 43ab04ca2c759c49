"""The row of each choice in a buffer: integer bookkeeping on one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshpar_kernels.routing.plan import RoutePlan


class Sorted(NamedTuple):
    """n choices sorted by expert, and by index within one expert.

    Attributes:
      expert: int32 [n], expert of every choice; E for an unused one.
      position: int32 [n], position of every choice in the sorted order; -1 for an unused one.
      order: int32 [n], the choice at every position; undefined past the last one.
      offsets: int32 [E + 1], first position of each expert, and the number of used choices.
    """

    expert: jax.Array
    position: jax.Array
    order: jax.Array
    offsets: jax.Array

    @classmethod
    def of(cls, plan: RoutePlan) -> Sorted:
        """The choices of a plan that have rows; the plan has their order, so nothing is sorted."""
        position = plan.rows.reshape(-1)
        local_expert = jnp.where(position >= 0, plan.expert.reshape(-1), plan.counts.shape[0])
        order = jnp.pad(plan.sources, (0, position.shape[0] - plan.buffer_rows))
        return cls(local_expert, position, order, plan.offsets)


class Window(NamedTuple):
    """The rows of a buffer with a slot of `rows` rows for every bucket of experts.

    Attributes:
      slots: int32 [n], row of every choice; -1 if it is not in this window.
      sources: int32 [buckets·rows], choice in every row; -1 for an empty row.
      sizes: int32 [buckets, E / buckets], rows of every expert.
      counts: int32 [buckets], choices of a bucket, in this window or not.
    """

    slots: jax.Array
    sources: jax.Array
    sizes: jax.Array
    counts: jax.Array


def window(choices: Sorted, buckets: int, rows: int, first: jax.Array | int) -> Window:
    """The `Window` of the choices at positions first…first+rows-1 of each bucket of adjacent experts, in the order of
    experts."""
    n, experts = choices.order.shape[0], choices.offsets.shape[0] - 1
    each = experts // buckets
    starts = choices.offsets[::each]
    counts = starts[1:] - starts[:-1]
    bucket = jnp.minimum(choices.expert // each, buckets - 1)
    ahead = choices.position - starts[bucket] - first
    in_window = (choices.position >= 0) & (ahead >= 0) & (ahead < rows)
    slots = jnp.where(in_window, bucket * rows + ahead, -1)
    position = first + jnp.arange(rows, dtype=jnp.int32)[None, :]
    index = jnp.clip(starts[:-1, None] + position, 0, max(n - 1, 0))
    live = position < counts[:, None]
    sources = jnp.where(live, choices.order[index], -1) if n else jnp.full((buckets, rows), -1, jnp.int32)
    edges = [x.reshape(buckets, each) - starts[:-1, None] - first for x in (choices.offsets[:-1], choices.offsets[1:])]
    begin, end = (jnp.clip(x, 0, rows) for x in edges)
    return Window(slots, sources.reshape(-1), end - begin, counts)


def merge(sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """The permutation that sorts by expert the rows of several slots, each of which is sorted by expert; nothing is
    sorted.

    Args:
      sizes: int32 [slots, E], rows of every expert in each slot; at most `rows` in a slot.

    Returns:
      (int32 [slots·rows], new position of every row, -1 if it is empty; int32 [slots·rows], the row at every position,
        or -1).
    """
    slots, experts = sizes.shape
    # the first rows of the runs, in the order of the slots and in the order of the experts
    begins = jnp.arange(slots, dtype=jnp.int32)[:, None] * rows + jnp.cumsum(sizes, 1) - sizes
    ends = jnp.cumsum(sizes.T.reshape(-1))
    targets = (ends - sizes.T.reshape(-1)).reshape(experts, slots).T
    row = jnp.arange(slots * rows, dtype=jnp.int32)

    def run_of(starts: jax.Array) -> jax.Array:
        return jnp.maximum(jnp.searchsorted(starts, row, side="right").astype(jnp.int32) - 1, 0)

    run = run_of(begins.reshape(-1))
    ahead = row - begins.reshape(-1)[run]
    position = jnp.where(ahead < sizes.reshape(-1)[run], targets.reshape(-1)[run] + ahead, -1)
    run = run_of(targets.T.reshape(-1))
    source = begins.T.reshape(-1)[run] + row - targets.T.reshape(-1)[run]
    return position, jnp.where(row < ends[-1], source, -1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "sources", "rows", "row_sources", "row_scale", "group_sizes", "most", "dropped"],
    meta_fields=["strategy", "axis_name", "devices", "tokens", "exchange"],
)
@dataclasses.dataclass(frozen=True)
class Dispatch:
    """The rows of one device's choices: the data with which `expert_combine` sends results back. A pytree.

    Attributes:
      slots, sources: choice → row, row → choice of the buffer that was sent (a2a) or of the experts' buffer (ring,
        local).
      rows, row_sources: the same between the received rows and the experts' buffer (a2a only).
      row_scale: float32 [R], weight of each row of the experts' buffer, for `grouped_matmul`; None without weights.
      group_sizes: int32 [E / devices], rows of each expert of this device, for `grouped_matmul`.
      most: int32 [], the largest number of rows that one buffer had to hold, from first position 0 on: of this device
        for one other (a2a), of all devices for this one (ring, local). A buffer of that many rows drops nothing.
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

    @property
    def lhs_indices(self) -> tuple[jax.Array, jax.Array | None]:
        """For `grouped_matmul`: the received row of which each row of the experts' buffer is a copy, int32 [R], -1 for
        unused rows; and the inverse, int32 [received rows, k], None if most choices of a token have no row."""
        if self.row_sources is not None:
            indices = self.row_sources
        else:
            indices = jnp.where(self.sources >= 0, self.sources // max(self.slots.shape[1], 1), -1)
        if self.rows is not None:
            return indices, self.rows
        return indices, None if sparse(self.slots, self.sources) else self.slots


def sparse(slots: jax.Array, sources: jax.Array) -> bool:
    """Whether most choices have no row (Expert Choice: k = E possible rows of a token), so that a gather of each would
    be wasteful."""
    return slots.size > 2 * sources.size
