"""`RoutePlan`: the experts of each token, and the rows of its choices in the experts' buffer."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["expert", "weight", "counts", "rank", "offsets", "dropped", "order"],
    meta_fields=["capacity"],
)
@dataclasses.dataclass(frozen=True)
class RoutePlan:
    """The choices of T tokens, k of E experts each. A pytree.

    A buffer of R = T·k rows (with a capacity: min(T·k, E·capacity)) has the choices that were not dropped, sorted by
    expert, in the order of the tokens within an expert, without gaps. `permute` fills it, `grouped_matmul(buffer, ...,
    plan.group_sizes)` multiplies it, and `combine` adds up its rows by token.

    Attributes:
      expert: int32 [T, k], best first. E if no choice was possible: the token's logits contain NaN or +inf, or fewer
        than k of them are above -inf.
      weight: float32 [T, k]; 0 without a choice.
      counts: int32 [E], choices of each expert, dropped or not.
      rank: int32 [T, k], index among the choices of the same expert, in the order of tokens; -1 without a choice.
      offsets: int32 [E + 1], first row of each expert in the buffer; `offsets[E]` rows are used.
      dropped: int32 [], choices without a row: beyond the capacity, or not made.
      capacity: largest number of rows of an expert; None: no limit.
      order: int32 [T·k], `sources` of the used rows, if a sort has computed it; None: it is computed from `rank`.
    """

    expert: jax.Array
    weight: jax.Array
    counts: jax.Array
    rank: jax.Array
    offsets: jax.Array
    dropped: jax.Array
    capacity: int | None = None
    order: jax.Array | None = None

    @classmethod
    def of(cls, expert: jax.Array, experts: int) -> RoutePlan:
        """The plan of given choices: int [T, k]; a number outside of 0…E-1 is no choice; weights are 1.

        It is a counting sort by XLA's stable sort.
        """
        expert = expert.astype(jnp.int32)  # a narrow dtype cannot count the experts
        chosen = (expert >= 0) & (expert < experts)
        expert = jnp.where(chosen, expert, experts)
        flat = expert.reshape(-1)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        every = jnp.arange(experts + 1, dtype=jnp.int32)
        offsets = jnp.searchsorted(flat[order], every, side="left").astype(jnp.int32)
        column_index = jnp.arange(flat.shape[0], dtype=jnp.int32)
        column_index = jnp.zeros_like(flat).at[order].set(column_index, unique_indices=True).reshape(expert.shape)
        return cls(
            expert=expert,
            weight=chosen.astype(jnp.float32),
            counts=offsets[1:] - offsets[:-1],
            rank=jnp.where(chosen, column_index - offsets[expert], -1),
            offsets=offsets,
            dropped=flat.shape[0] - offsets[-1],
            order=order,
        )

    @property
    def buffer_rows(self) -> int:
        """R, the number of rows of the buffer: a Python int that depends only on shapes and capacity."""
        tokens, k = self.expert.shape
        if self.capacity is None:
            return tokens * k
        return min(tokens * k, self.counts.shape[0] * self.capacity)

    @property
    def group_sizes(self) -> jax.Array:
        """int32 [E]: used rows of each expert, for `grouped_matmul`."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def rows(self) -> jax.Array:
        """int32 [T, k]: row of each choice in the buffer; -1 for a dropped one."""
        return self._flat_rows().reshape(self.expert.shape[::-1]).T

    @property
    def sources(self) -> jax.Array:
        """int32 [R]: choice of each row of the buffer, as token·k + index; -1 for an unused row."""
        tokens, k = self.expert.shape
        size = self.buffer_rows
        if tokens == 0:
            return jnp.full((size,), -1, jnp.int32)
        if self.order is not None:
            return jnp.where(jnp.arange(size) < self.offsets[-1], self.order, -1)
        rows = self._flat_rows()
        target = jnp.where(rows < 0, size, rows)
        number = jnp.arange(rows.size, dtype=jnp.int32)
        choice = number % tokens * k + number // tokens
        empty = jnp.full((size,), -1, jnp.int32)
        return empty.at[target].set(choice, mode="drop", unique_indices=False)

    def _flat_rows(self) -> jax.Array:
        """int32 [k·T]: `rows` of every first choice, then of every second choice, ….

        An array with few columns fills 128 lanes on a TPU: [8192, 8] integers take 4 MiB, these 256 KiB.
        """
        experts = self.counts.shape[0]
        expert, rank = self.expert.T.reshape(-1), self.rank.T.reshape(-1)
        admitted = expert < experts
        if self.capacity is not None:
            admitted &= rank < self.capacity
        return jnp.where(admitted, self.offsets[jnp.minimum(expert, experts - 1)] + rank, -1)
