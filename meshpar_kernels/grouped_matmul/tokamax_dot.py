"""Grouped matmuls by tokamax's `ragged_dot`, which chooses among its own kernels; tokamax is imported when one is traced."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp

from meshpar_kernels._choose import Unsupported
from meshpar_kernels._numerics import precision
from meshpar_kernels.grouped_matmul.activations import activate
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, Problem, TransposeProblem

_LAST, _FIRST = (((1,), (2,)), ((), ())), (((1,), (1,)), ((), ()))
"""Dimension numbers of [M, K] by [G, N, K] and by [G, K, N]."""


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def unsupported(p: Problem) -> Unsupported:
    """Reasons why tokamax cannot run this problem; empty if it can."""
    reasons = []
    if not _installed():
        reasons.append(
            'tokamax is not installed: pip install "meshpar[tokamax]" (tokamax 0.0.17 needs Python 3.12 and jax 0.11.1)'
        )
    if p.group_offset is not None:
        reasons.append("its kernels for GPUs and XLA take no group_offset")
    if isinstance(p, MatmulProblem) and p.rhs_scale:
        reasons.append("rhs_scale is not passed on")
    return Unsupported(reasons)


def _in_a_group(p: Problem, bounds: jax.Array) -> jax.Array:
    """bool [M, 1]: rows of a group."""
    return (jnp.arange(p.key.rows) < bounds[-1])[:, None]


def _ragged_dot(lhs, rhs, bounds: jax.Array, dims, *, contracts_rows: bool, out_dtype) -> jax.Array:
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes=jnp.diff(bounds),
        ragged_dot_dimension_numbers=jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=dims, lhs_ragged_dimensions=[0], rhs_group_dimensions=[] if contracts_rows else [0]
        ),
        precision=precision(lhs.dtype),
        preferred_element_type=out_dtype,
    )


def grouped_matmul(p: MatmulProblem) -> jax.Array:
    """As `reference.grouped_matmul`: a `ragged_dot` for each rhs, activation and row factors by XLA."""
    bounds = p.bounds()
    plain = p.activation is None and len(p.rhs) == 1 and p.row_scale is None
    how = {"contracts_rows": False, "out_dtype": p.out_dtype if plain else jnp.dtype(jnp.float32)}
    dims = _LAST if p.transpose_rhs else _FIRST
    value = activate([_ragged_dot(p.lhs, m, bounds, dims, **how) for m in p.rhs], p.activation)
    if p.row_scale is not None:
        value = value * p.row_scale[:, None]
    return jnp.where(_in_a_group(p, bounds), value, 0).astype(p.out_dtype)


def grouped_matmul_transpose(p: TransposeProblem) -> jax.Array:
    """As `reference.grouped_matmul_transpose`: a `ragged_dot` that contracts rows. Rows of no group are set to 0
    beforehand."""
    bounds = p.bounds()
    lhs, rhs = (jnp.where(_in_a_group(p, bounds), x, 0) for x in (p.lhs, p.scaled_rhs()))
    return _ragged_dot(lhs, rhs, bounds, (((0,), (0,)), ((), ())), contracts_rows=True, out_dtype=p.out_dtype)
