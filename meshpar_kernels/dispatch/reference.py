"""Definitions of the exchanges by all-gathers, for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    axis_name: str | tuple[str, ...],
) -> jax.Array:
    """The ragged all-to-all: every device all-gathers all operands and selects the rows that are sent to it."""
    me = lax.axis_index(axis_name)
    operands = lax.all_gather(operand, axis_name)
    starts, sizes, targets = (lax.all_gather(x, axis_name)[:, me] for x in (input_offsets, send_sizes, output_offsets))
    row = jnp.arange(output.shape[0])
    for source in range(operands.shape[0]):
        ahead = row - targets[source]
        own = (ahead >= 0) & (ahead < sizes[source])
        taken = operands[source][jnp.clip(starts[source] + ahead, 0, operand.shape[0] - 1)]
        output = jnp.where(own.reshape(-1, *(1,) * (output.ndim - 1)), taken, output)
    return output
