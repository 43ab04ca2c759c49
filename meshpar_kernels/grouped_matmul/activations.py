"""The activations of grouped matmuls, in `jax.nn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

ACTIVATIONS: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda x: x,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,  # with tanh
    "relu": jax.nn.relu,
}


def activate(matmuls: Sequence[jax.Array], activation: str | None) -> jax.Array:
    """From the float32 matmuls [M, N] with each matrix: act(first), times the second if there are two."""
    value = ACTIVATIONS[activation](matmuls[0])
    return value if len(matmuls) == 1 else value * matmuls[1]
