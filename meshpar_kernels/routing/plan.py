"""`RoutePlan`: which token goes to which expert, and to which row of the experts' buffer."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

__all__ = ["RoutePlan"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["expert", "weight", "counts", "rank", "offsets", "dropped"],
    meta_fields=["capacity"],
)
@dataclasses.dataclass(frozen=True)
class RoutePlan:
    """The choices of T tokens, k of E experts each. A pytree.

    A buffer of R = T·k rows (with a capacity: min(T·k, E·capacity)) holds the kept choices sorted
    by expert, in the order of the tokens within an expert, without gaps: `permute` fills it,
      `grouped_matmul(buffer, ..., plan.group_sizes)` works on it,
    `combine` sums it back.

    Attributes:
      expert: int32 [T, k], best first. E where a choice could not be made: the token's logits hold
        NaN or +inf, or fewer than k of them are above -inf.
      weight: float32 [T, k]; 0 where no choice was made.
      counts: int32 [E], choices of each expert, kept or not.
      rank: int32 [T, k], place among the choices of the same expert, in the order of tokens; -1
        without a choice.
      offsets: int32 [E + 1], first row of each expert in the buffer; `offsets[E]` rows are in use.
      dropped: int32 [], choices that got no row: beyond the capacity, or not made.
      capacity: most rows an expert may have; None: no limit.
    """

    expert: jax.Array
    weight: jax.Array
    counts: jax.Array
    rank: jax.Array
    offsets: jax.Array
    dropped: jax.Array
    capacity: int | None = None

    @property
    def buffer_rows(self) -> int:
        """R, the number of rows of the buffer: a Python int that depends on shapes and capacity
        only."""
        tokens, k = self.expert.shape
        if self.capacity is None:
            return tokens * k
        return min(tokens * k, self.counts.shape[0] * self.capacity)

    @property
    def group_sizes(self) -> jax.Array:
        """Rows in use of each expert: int32 [E], for `grouped_matmul`."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def rows(self) -> jax.Array:
        """Row of each choice in the buffer: int32 [T, k], -1 where it was dropped."""
        experts = self.counts.shape[0]
        chosen = jnp.minimum(self.expert, experts - 1)
        kept = (self.expert < experts) & (self.rank < self.group_sizes[chosen])
        return jnp.where(kept, self.offsets[chosen] + self.rank, -1)

    @property
    def sources(self) -> jax.Array:
        """Choice that each row of the buffer holds, as token·k + place: int32 [R], -1 where the
        row is not in use."""
        rows = self.rows.reshape(-1)
        size = self.buffer_rows
        target = jnp.where(rows < 0, size, rows)
        choice = jnp.arange(rows.size, dtype=jnp.int32)
        empty = jnp.full((size,), -1, jnp.int32)
        return empty.at[target].set(choice, mode="drop", unique_indices=False)
