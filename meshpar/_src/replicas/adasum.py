"""Adasum: a combination of gradients that adds orthogonal ones and averages parallel ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ...errors import UnsupportedError
from ..dims import path_matches
from .trees import as_updates, gathered, live_only, map_updates, weights_of


def adasum(
    *, stacked: str = "", replicas: int | None = None, dim: str = "replica"
) -> optax.GradientTransformationExtraArgs:
    """Combine the updates of replicas in pairs: ``(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b``.

    Maleki et al., *Scaling Distributed Training with Adaptive Summation* (2021): orthogonal updates are added, equal ones averaged.
    Pairs of neighbours are combined first, then pairs of pairs. ``a·b`` is computed per update (per layer). The updates are
    all-gathered: a device sends ``R - 1`` times its own, for R replicas. An update of zeros, or of a replica with a NaN or
    infinity, leaves the other of its pair unchanged.

    Args:
      stacked: pattern of tree paths (``"*layers*"``) of updates [replica, layers, ...], for which ``a·b`` is computed per layer.
      replicas, dim: as for :func:`mean`.

    Returns:
      A transformation of updates [replica, ...]. Its result has the replica dim if the parameters have it.

    Raises:
      UnsupportedError: (when updating) the number of replicas is not a power of two.
      RankError, DivisibilityError, UnknownDimError: as for :func:`mean`.

    Example:
      >>> tx = mp.replicas.adasum(replicas=2)
      >>> w = jnp.zeros(2)
      >>> tx.update(jnp.array([[2.0, 0.0], [0.0, 4.0]]), tx.init(w), w)[0].tolist()
      [2.0, 4.0]
      >>> tx.update(jnp.array([[2.0, 0.0], [2.0, 0.0]]), tx.init(w), w)[0].tolist()
      [2.0, 0.0]
    """

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> tuple[Any, Any]:
        weights, shared = weights_of("adasum", updates, params, dim=dim, replicas=replicas)
        count = weights.shape[0]
        if count & (count - 1):
            text = f"mp.replicas.adasum: {count} replicas are not a power of two"
            raise UnsupportedError(text, dim=dim, fixes=["2, 4, 8, … replicas"])

        def one(path: str, x: jax.Array) -> tuple[jax.Array]:
            rows = list(gathered(live_only(x, weights), dim))
            while len(rows) > 1:
                pairs = zip(rows[::2], rows[1::2], strict=True)
                rows = [_combined(a, b, bool(stacked) and path_matches(stacked, path)) for a, b in pairs]
            return (as_updates(rows[0], x, shared),)

        return *map_updates(one, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _combined(a: jax.Array, b: jax.Array, layered: bool) -> jax.Array:
    """The combination of two updates; ``layered``: with ``a·b`` per index of the first dim."""
    dims = tuple(range(int(layered), a.ndim))

    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x * y).sum(dims, keepdims=True)

    def share(x: jax.Array) -> jax.Array:
        """``a·b / 2|x|²``; 0 for zeros."""
        size = dot(x, x)
        return jnp.where(size > 0, dot(a, b) / (2 * jnp.where(size > 0, size, 1.0)), 0.0)

    return (1 - share(a)) * a + (1 - share(b)) * b
