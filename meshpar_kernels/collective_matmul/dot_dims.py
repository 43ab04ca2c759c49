"""A `dot_general` whose operand is received, or whose result is sent, block by block: the dims along which the blocks
are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

Dims = tuple[int, ...]
Axes = str | tuple[str, ...]


@dataclass(frozen=True)
class Dot:
    """The parameters of a `lax.dot_general`.

    Attributes:
      dimension_numbers: ((contracting dims of lhs, of rhs), (batch dims of lhs, of rhs)).
      side: index of the gathered operand: 0 or 1.
      precision, preferred_element_type: as in `lax.dot_general`.
    """

    dimension_numbers: tuple[tuple[Dims, Dims], tuple[Dims, Dims]]
    side: int = 0
    precision: Any = None
    preferred_element_type: Any = None

    def __call__(self, lhs: jax.Array, rhs: jax.Array, dtype: Any = None) -> jax.Array:
        """The `lax.dot_general` of lhs and rhs, with result dtype `dtype` if one is given."""
        kind = self.preferred_element_type if dtype is None else dtype
        numbers = self.dimension_numbers
        return lax.dot_general(lhs, rhs, numbers, precision=self.precision, preferred_element_type=kind)

    def of(self, gathered: jax.Array, other: jax.Array, dtype: Any = None) -> jax.Array:
        """The matmul of the gathered operand and the other one, in the order of `side`."""
        return self(gathered, other, dtype) if self.side == 0 else self(other, gathered, dtype)

    def dtype(self, lhs: Any, rhs: Any) -> Any:
        """The dtype of the result."""
        if self.preferred_element_type is not None:
            return jnp.dtype(self.preferred_element_type)
        return jnp.promote_types(lhs.dtype, rhs.dtype)

    def shape(self, lhs: Sequence[int], rhs: Sequence[int]) -> tuple[int, ...]:
        """The shape of the result for operands of these shapes."""
        (lc, rc), (lb, rb) = self.dimension_numbers
        return (
            *(lhs[d] for d in lb),
            *(n for d, n in enumerate(lhs) if d not in (*lc, *lb)),
            *(n for d, n in enumerate(rhs) if d not in (*rc, *rb)),
        )


def place_of(dot: Dot, side: int, dim: int, ranks: tuple[int, int]) -> tuple[Literal["free", "contract", "batch"], int]:
    """The role of an operand's dim in a `dot_general`: ("free", result dim), ("contract" or "batch", dim of the other
    operand).

    A batch dim is the dim of the result with the same index among the batch dims.
    """
    contract, batch = dot.dimension_numbers
    if dim in contract[side]:
        return "contract", contract[1 - side][contract[side].index(dim)]
    if dim in batch[side]:
        return "batch", batch[1 - side][batch[side].index(dim)]
    free = [(s, d) for s in (0, 1) for d in range(ranks[s]) if d not in contract[s] and d not in batch[s]]
    return "free", len(batch[0]) + free.index((side, dim))


def block_of(dot: Dot, out_dim: int, ranks: tuple[int, int]) -> list[tuple[int, int]]:
    """(operand, dim) pairs that a dim of the result corresponds to: one pair for a free dim, two for a batch dim."""
    contract, batch = dot.dimension_numbers
    if out_dim < len(batch[0]):
        return [(s, batch[s][out_dim]) for s in (0, 1)]
    free = [(s, d) for s in (0, 1) for d in range(ranks[s]) if d not in contract[s] and d not in batch[s]]
    return [free[out_dim - len(batch[0])]]


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype in which sums of this dtype are accumulated: at least float32."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
