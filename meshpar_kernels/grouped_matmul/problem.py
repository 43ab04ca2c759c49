"""Values derived from the operands before a kernel or loop runs: sizes, first rows of the groups, padded row factors."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshpar_kernels.grouped_matmul.schedule import group_bounds


class Problem(NamedTuple):
    """Sizes of one grouped matmul, or of one transpose.

    Attributes:
      rows: M, rows of lhs in the order of the groups (after a gather).
      k: columns of lhs.
      n: columns of the result.
      groups: G, groups of the weights (or of the transpose's result).
      bounds: from `group_bounds`, int32 [G + 1].
    """

    rows: int
    k: int
    n: int
    groups: int
    bounds: jax.Array


def matmul_problem(
    rows: int, rhs: jax.Array, group_sizes: jax.Array, group_offset: jax.Array | None, *, transpose_rhs: bool
) -> Problem:
    """The sizes of [rows, K] times rhs[G, K, N] or, with `transpose_rhs`, rhs[G, N, K]."""
    groups, k, n = (rhs.shape[0], *rhs.shape[:0:-1]) if transpose_rhs else rhs.shape
    return Problem(rows, k, n, groups, group_bounds(group_sizes, rows, group_offset, groups))


def transpose_problem(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, group_offset: jax.Array | None, *, groups: int
) -> Problem:
    """The sizes of [M, K]ᵀ times [M, N] by groups."""
    (rows, k), n = lhs.shape, rhs.shape[1]
    return Problem(rows, k, n, groups, group_bounds(group_sizes, rows, group_offset, groups))


def padded_scale(row_scale: jax.Array, tile: int) -> jax.Array:
    """[M] → float32 [⌈M / tile⌉·tile], padded so that the factors of every tile can be loaded."""
    return jnp.pad(row_scale.astype(jnp.float32), (0, -row_scale.shape[0] % tile))
