"""Grouped matmuls by tokamax's `ragged_dot`, which chooses among its own kernels; tokamax is imported when one is traced."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from meshpar_kernels._choose import Unsupported
from meshpar_kernels.grouped_matmul.problem import Problem, matmul_problem, transpose_problem
from meshpar_kernels.grouped_matmul.reference import activate, precision

_LAST, _FIRST = (((1,), (2,)), ((), ())), (((1,), (1,)), ((), ()))
"""Dimension numbers of [M, K] by [G, N, K] and by [G, K, N]."""


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def unsupported(group_offset: jax.Array | None, rhs_scale: Sequence[jax.Array] = ()) -> Unsupported:
    """Reasons why tokamax cannot run with these arguments; empty if it can."""
    reasons = []
    if not _installed():
        reasons.append(
            'tokamax is not installed: pip install "meshpar[tokamax]" (tokamax 0.0.17 needs Python 3.12 and jax 0.11.1)'
        )
    if group_offset is not None:
        reasons.append("its kernels for GPUs and XLA take no group_offset")
    if rhs_scale:
        reasons.append("rhs_scale is not passed on")
    return Unsupported(reasons)


def _in_a_group(problem: Problem) -> jax.Array:
    """bool [M, 1]: rows of a group."""
    return (jnp.arange(problem.rows) < problem.bounds[-1])[:, None]


def _ragged_dot(lhs, rhs, problem: Problem, dims, *, contracts_rows: bool, out_dtype) -> jax.Array:
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes=jnp.diff(problem.bounds),
        ragged_dot_dimension_numbers=jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=dims, lhs_ragged_dimensions=[0], rhs_group_dimensions=[] if contracts_rows else [0]
        ),
        precision=precision(lhs.dtype),
        preferred_element_type=out_dtype,
    )


def grouped_matmul(
    lhs: jax.Array, rhs: Sequence[jax.Array], group_sizes, group_offset, row_scale, rhs_scale=(), *,
    transpose_rhs: bool, activation: str | None, out_dtype: jnp.dtype,
) -> jax.Array:  # fmt: skip
    """As `reference.grouped_matmul`: a `ragged_dot` for each rhs, activation and row factors by XLA."""
    del rhs_scale
    problem = matmul_problem(lhs.shape[0], rhs[0], group_sizes, group_offset, transpose_rhs=transpose_rhs)
    plain = activation is None and len(rhs) == 1 and row_scale is None
    how = {"contracts_rows": False, "out_dtype": out_dtype if plain else jnp.dtype(jnp.float32)}
    value = activate([_ragged_dot(lhs, m, problem, _LAST if transpose_rhs else _FIRST, **how) for m in rhs], activation)
    if row_scale is not None:
        value = value * row_scale[:, None]
    return jnp.where(_in_a_group(problem), value, 0).astype(out_dtype)


def grouped_matmul_transpose(
    lhs: jax.Array, rhs: jax.Array, group_sizes, group_offset, row_scale, *, groups: int, out_dtype: jnp.dtype
) -> jax.Array:
    """As `reference.grouped_matmul_transpose`: a `ragged_dot` that contracts rows. Rows of no group are set to 0
    beforehand."""
    problem = transpose_problem(lhs, rhs, group_sizes, group_offset, groups=groups)
    if row_scale is not None:
        rhs = (rhs.astype(jnp.float32) * row_scale[:, None]).astype(rhs.dtype)
    lhs, rhs = (jnp.where(_in_a_group(problem), x, 0) for x in (lhs, rhs))
    return _ragged_dot(lhs, rhs, problem, (((0,), (0,)), ((), ())), contracts_rows=True, out_dtype=out_dtype)
