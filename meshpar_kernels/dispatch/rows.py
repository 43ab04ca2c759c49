"""Copying rows into a buffer and summing them back: dense in gathers, or sparse in scatters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels.dispatch.plan import sparse
from meshpar_kernels.routing.api import moved


def spread(x: jax.Array, slots: jax.Array, sources: jax.Array, implementation: str | None) -> jax.Array:
    """[T, H] → [R, H]: row r of the result is the token of choice `sources[r]`, or 0 if that is negative."""
    if 0 in x.shape or 0 in slots.shape:
        return jnp.zeros((sources.shape[0], x.shape[1]), x.dtype)
    if not sparse(slots, sources):
        copied: Any = moved("permute", implementation, x, None, slots, sources)
        return copied
    token = jnp.maximum(sources, 0) // slots.shape[1]
    return jnp.where((sources >= 0)[:, None], x[token], 0)


def sum_back(
    y: jax.Array, weight: jax.Array | None, slots: jax.Array, sources: jax.Array, implementation: str | None
) -> jax.Array:
    """Sum over a token's choices of weight · row, in float32, in y's dtype: [R, H] → [T, H]."""
    if 0 in y.shape or 0 in slots.shape:
        return jnp.zeros((slots.shape[0], y.shape[1]), y.dtype)
    if not sparse(slots, sources):
        summed: Any = moved("combine", implementation, y, weight, slots, sources)
        return summed
    live = sources >= 0
    rows = jnp.where(live[:, None], y, 0).astype(jnp.float32)
    if weight is not None:
        rows = rows * jnp.where(live, weight.reshape(-1)[jnp.maximum(sources, 0)], 0.0)[:, None]
    token = jnp.where(live, sources // slots.shape[1], slots.shape[0])
    total = jnp.zeros((slots.shape[0], y.shape[1]), jnp.float32)
    return total.at[token].add(rows, mode="drop").astype(y.dtype)


def choices_to_rows(values: jax.Array, slots: jax.Array, sources: jax.Array) -> jax.Array:
    """[T, k] → [R]: the value of the choice of each row, 0 for an empty row. The transpose is a gather too."""
    if values.size == 0:
        return jnp.zeros(sources.shape, values.dtype)
    rows: Any = moved("permute", "reference", values.reshape(-1, 1), None, slots.reshape(-1, 1), sources)
    return rows[:, 0]
