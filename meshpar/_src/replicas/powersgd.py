"""PowerSGD: means of gradients as products of two small matrices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...errors import UnsupportedError
from ..dims import path_matches
from .trees import as_updates, live_only, map_updates, paths_of, per_replica, weighted_mean, weights_of, zeros_for


class PowerSGDState(NamedTuple):
    """State of :func:`powersgd`.

    Attributes:
      right: for each update the right factor [columns, rank] of the last mean (with a dim ``layers`` first if it is stacked);
        0 if the update is sent as it is.
      error: as in :class:`CodedState`.
    """

    right: Any
    error: Any


def powersgd(
    rank: int, *, stacked: str = "", weight: Any = None, replicas: int | None = None, dim: str = "replica"
) -> optax.GradientTransformationExtraArgs:
    """The mean of the updates over replicas, as a product of two matrices of a low rank, with error feedback.

    Vogels et al., *PowerSGD* (2019), algorithms 1 and 2. With ``M_r = g_r + e_r`` as a matrix [rows, columns], one step of power
    iteration from the last right factor Q: ``P = orthogonalize(mean_r(M_r Q))``, ``Q = mean_r(M_rᵀ P)``. The result is ``P Qᵀ``,
    and ``e_r = M_r - P Qᵀ``. All-reduces of P and Q send ``rank · (rows + columns)`` numbers in place of ``rows · columns``.

    Args:
      rank: columns of P and Q; the paper has 1, 2 and 4.
      stacked: pattern of tree paths (``"*layers*"``) of updates [replica, layers, ...] that are one matrix per layer.
      weight, replicas, dim: as for :func:`mean`.

    Returns:
      A transformation of updates [replica, ...]. The last dim of an update has the columns of its matrix, the dims before it the
      rows. Vectors, and matrices for which two factors have no fewer elements, are averaged without a code.

    Raises:
      UnsupportedError: ``rank`` below 1; (when updating) an update is not floating-point, or all weights are 0.
      RankError, DivisibilityError, UnknownDimError: as for :func:`mean`.

    Example:
      >>> tx = mp.replicas.powersgd(1, replicas=2)
      >>> w = jnp.zeros((4, 4))
      >>> low_rank = jnp.outer(jnp.arange(4.0), jnp.ones(4))
      >>> updates, state = tx.update(jnp.stack([low_rank, 3 * low_rank]), tx.init(w), w)
      >>> bool(jnp.allclose(updates, 2 * low_rank, atol=1e-5))
      True
    """
    if rank < 1:
        raise UnsupportedError(f"mp.replicas.powersgd: rank={rank}, which must be at least 1", fixes=["rank=2"])

    def right(path: str, shape: tuple[int, ...], n: int) -> jax.Array:
        """The first right factor for a parameter of this shape, the n-th: normally distributed."""
        lead, matrix = (shape[:1], shape[1:]) if bool(stacked) and path_matches(stacked, path) else ((), shape)
        rows, columns = math.prod(matrix[:-1]), matrix[-1] if matrix else 0
        if len(matrix) < 2 or rank * (rows + columns) >= rows * columns:
            return jnp.zeros((), jnp.float32)
        return jax.random.normal(jax.random.fold_in(jax.random.key(0), n), (*lead, columns, rank))

    def init(params: Any) -> PowerSGDState:
        leaves, structure = jax.tree.flatten(params)
        shapes = [x.shape[1:] if replicas is None else x.shape for x in leaves]
        rights = [right(path, shape, n) for n, (path, shape) in enumerate(zip(paths_of(params), shapes, strict=True))]
        return PowerSGDState(jax.tree.unflatten(structure, rights), zeros_for(params, replicas, dim))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, PowerSGDState]:
        given = extra.get("weight"), weight
        weights, shared = weights_of("powersgd", updates, params, *given, dim=dim, replicas=replicas)

        def one(path: str, x: jax.Array, q: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """An update, its right factor and its error → the mean and the next two."""
            if not q.ndim:
                return as_updates(weighted_mean(x, weights), x, shared), q, error
            total = live_only(x, weights) + error
            mean, q = _low_rank_mean(total, q, weights, bool(stacked) and path_matches(stacked, path))
            lost = (total - mean).astype(error.dtype)
            return as_updates(mean, x, shared), q, jnp.where(per_replica(weights, x) > 0, lost, error)

        means, factors, errors = map_updates(one, updates, state.right, state.error)
        return means, PowerSGDState(factors, errors)

    return optax.GradientTransformationExtraArgs(init, update)


def _low_rank_mean(total: jax.Array, q: jax.Array, weights: jax.Array, stacked: bool) -> tuple[jax.Array, jax.Array]:
    """(``P Qᵀ``, ``Q``) after one power iteration.

    Args:
      total: [replica, rows…, columns], or [replica, layers, rows…, columns] if ``stacked``.
      q: the last right factor.
    """
    rows = "abcdefgh"[: total.ndim - 2 - stacked]
    lead = "l" if stacked else ""
    p = weighted_mean(jnp.einsum(f"r{lead}{rows}n,{lead}nk->r{lead}{rows}k", total, q), weights)
    p = _orthogonal_columns(p, tuple(range(int(stacked), p.ndim - 1)))
    q = weighted_mean(jnp.einsum(f"r{lead}{rows}n,{lead}{rows}k->r{lead}nk", total, p), weights)
    return jnp.einsum(f"{lead}{rows}k,{lead}nk->{lead}{rows}n", p, q), q


def _orthogonal_columns(p: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    """Orthonormal columns (last dim) with the same span, by modified Gram-Schmidt over the dims ``rows``."""
    columns: list[jax.Array] = []
    for k in range(p.shape[-1]):
        column = p[..., k]
        for other in columns:
            column = column - (other * column).sum(rows, keepdims=True) * other
        norm = jnp.sqrt((column * column).sum(rows, keepdims=True))
        columns.append(column / jnp.maximum(norm, 1e-30))
    return jnp.stack(columns, -1)
