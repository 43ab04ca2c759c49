"""The operands and options of one grouped matmul, or of one transpose: the argument of every implementation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels.grouped_matmul.schedule import group_bounds
from meshpar_kernels.tuning_table import MatmulKey

STATIC: dict[str, Any] = {"static": True}
"""Metadata of the fields that are no arrays, for `jax.tree_util.register_dataclass`."""
QUANTIZED = (jnp.int8, jnp.float8_e4m3fn)
"""Dtypes of weights with scales."""


class Grouped:
    """The parts that `MatmulProblem` and `TransposeProblem` have in common. Arrays may be shapes and dtypes only, where no
    bounds are computed."""

    group_sizes: Any
    group_offset: Any

    @property
    def key(self) -> MatmulKey:
        """The sizes."""
        raise NotImplementedError

    def bounds(self) -> jax.Array:
        """int32 [G + 1]: from `group_bounds`."""
        return group_bounds(self.group_sizes, self.key.rows, self.group_offset, self.key.groups)

    def in_a_group(self, x: jax.Array) -> jax.Array:
        """x [M], with 0 in rows of no local group."""
        bounds, row = self.bounds(), jnp.arange(self.key.rows)
        return jnp.where((row >= bounds[0]) & (row < bounds[-1]), x, 0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MatmulProblem(Grouped):
    """One grouped matmul of rows in the order of their groups: [M, K] by G matrices → [M, N]. A pytree.

    Attributes:
      lhs: [M, K].
      rhs: one matrix of each group, [G, K, N], or a pair of them, a gate and its factor; [G, N, K] with `transpose_rhs`.
      group_sizes, group_offset, row_scale, activation, out_dtype: as in `grouped_matmul`.
      rhs_scale: for each rhs float32 [G, B, N], or [G, B, K] with `transpose_scale`; (): the weights are not quantized.
    """

    lhs: Any
    rhs: tuple[Any, ...]
    group_sizes: Any
    group_offset: Any = None
    row_scale: Any = None
    rhs_scale: tuple[Any, ...] = ()
    transpose_rhs: bool = dataclasses.field(default=False, metadata=STATIC)
    activation: str | None = dataclasses.field(default=None, metadata=STATIC)
    out_dtype: Any = dataclasses.field(default=None, metadata=STATIC)
    transpose_scale: bool = dataclasses.field(default=False, metadata=STATIC)

    @property
    def key(self) -> MatmulKey:
        """The sizes."""
        groups, k, n = self.rhs[0].shape
        k, n = (n, k) if self.transpose_rhs else (k, n)
        return MatmulKey("grouped_matmul", self.lhs.shape[0], k, n, groups, len(self.rhs), self.transpose_rhs)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.key.rows, self.key.n


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransposeProblem(Grouped):
    """The transpose of a grouped matmul with respect to its weights: [M, K]ᵀ by [M, N] → [G, K, N]. A pytree.

    Attributes:
      lhs: [M, K].
      rhs: [M, N].
      group_sizes, group_offset, row_scale, groups, out_dtype: as in `grouped_matmul_transpose`.
    """

    lhs: Any
    rhs: Any
    group_sizes: Any
    group_offset: Any = None
    row_scale: Any = None
    groups: int = dataclasses.field(default=0, metadata=STATIC)
    out_dtype: Any = dataclasses.field(default=None, metadata=STATIC)

    @property
    def key(self) -> MatmulKey:
        """The sizes."""
        (rows, k), n = self.lhs.shape, self.rhs.shape[1]
        return MatmulKey("grouped_matmul_transpose", rows, k, n, self.groups)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.groups, self.key.k, self.key.n

    def scaled_rhs(self) -> jax.Array:
        """rhs times `row_scale`, multiplied in float32 and rounded to rhs's dtype; rhs itself without scales."""
        if self.row_scale is None:
            return self.rhs
        return (self.rhs.astype(jnp.float32) * self.row_scale.astype(jnp.float32)[:, None]).astype(self.rhs.dtype)


Problem = MatmulProblem | TransposeProblem


def padded_scale(row_scale: jax.Array, tile: int) -> jax.Array:
    """[M] → float32 [⌈M / tile⌉·tile], padded so that the factors of every tile can be loaded."""
    return jnp.pad(row_scale.astype(jnp.float32), (0, -row_scale.shape[0] % tile))


def dequantized(p: MatmulProblem, matrix: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """One group's matrix times its scales, rounded to `dtype`.

    Args:
      matrix: [K, N], or [N, K] with `p.transpose_rhs`.
      scale: [B, N], of B blocks of K; or, with `p.transpose_scale`, [B, K], of B blocks of N.
    """
    blocks, width = scale.shape
    factors = jnp.broadcast_to(scale[:, None], (blocks, matrix.size // (blocks * width), width)).reshape(-1, width)
    factors = factors if p.transpose_rhs == p.transpose_scale else factors.T
    return (matrix.astype(jnp.float32) * factors).astype(dtype)
