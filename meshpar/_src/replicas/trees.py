"""Trees of updates with a leading replica dim: checks, weights of the replicas, means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import DivisibilityError, RankError, UnsupportedError
from ..compat.jax import is_tracer
from ..program.primitives import named, reduce_in, rename


def paths_of(tree: Any) -> list[str]:
    """The path of each leaf, in JAX's order: ``layers/up``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in leaves]


def count_replicas(updates: Any, name: str, dim: str, replicas: int | None = None) -> int:
    """The number of replicas of a tree of updates: the size of the first dim of every leaf.

    Args:
      name: of the transformation, for errors.
      dim: name of the replica dim, for errors.
      replicas: the number that the transformation was made for; None: any.

    Raises:
      RankError: a leaf is a scalar.
      DivisibilityError: first dims have different sizes, or not ``replicas``.
      UnsupportedError: a leaf is not a floating-point array, or there is no leaf.
    """
    fixes = [f"updates have the dim `{dim}` first: gradients of jax.vmap(jax.grad(loss)) over replicas of the batch"]
    expected = replicas
    for path, x in zip(paths_of(updates), jax.tree.leaves(updates), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            text = f"mp.replicas.{name}: `{path}` is an array of {x.dtype}; updates are floating-point"
            raise UnsupportedError(text, path=path, fixes=["exclude it with optax.masked"])
        if not x.ndim:
            raise RankError(
                f"mp.replicas.{name}: `{path}` is a scalar and has no dim `{dim}`", path=path, dim=dim, fixes=fixes
            )
        expected = x.shape[0] if expected is None else expected
        if x.shape[0] != expected:
            text = f"mp.replicas.{name}: the first dim of `{path}` has {x.shape[0]} elements, not {expected} replicas"
            raise DivisibilityError(text, path=path, shape=x.shape, dim=dim, fixes=fixes)
    if expected is None:
        raise UnsupportedError(f"mp.replicas.{name}: there are no updates", fixes=fixes)
    return expected


def map_updates(fn: Callable[..., tuple[Any, ...]], updates: Any, *others: Any) -> tuple[Any, ...]:
    """The trees of the results of ``fn(path, update, *leaves of others)``, a tuple for each update; another tree may be None."""
    leaves, structure = jax.tree.flatten(updates)
    rows = [[None] * len(leaves) if tree is None else structure.flatten_up_to(tree) for tree in others]
    results = [fn(*args) for args in zip(paths_of(updates), leaves, *rows, strict=True)]
    return tuple(structure.unflatten(x) for x in zip(*results, strict=True))


def require_dim(x: jax.Array, dim: str) -> jax.Array:
    """The same array; planning stops with an UnknownDimError if none of its dims is called ``dim``."""
    return rename(x, **{dim: dim})


def gathered(tree: Any, dim: str) -> Any:
    """The same tree, with the dim ``dim`` of every leaf renamed, so that no rule shards it: every replica has all rows."""
    return jax.tree.map(lambda x: rename(x, **{dim: f"every_{dim}"}), tree)


def zeros_for(params: Any, replicas: int | None, dim: str) -> Any:
    """Zeros with the shapes and dtypes of updates: of the parameters, with ``replicas`` rows if they have no replica dim."""
    if replicas is None:
        return jax.tree.map(jnp.zeros_like, params)

    def one(x: Any) -> jax.Array:
        return named(jnp.zeros((replicas, *x.shape), x.dtype), (dim, *("_",) * x.ndim))

    return jax.tree.map(one, params)


def weights_of(
    name: str, updates: Any, params: Any, *weights: Any, dim: str, replicas: int | None
) -> tuple[jax.Array, bool]:
    """(the weights of the replicas [replica], whether they share their parameters), after a check of the updates.

    The first of ``weights`` that is not None is taken. The weight of a replica with a NaN or infinity in any update is 0.

    Raises:
      RankError, DivisibilityError, UnsupportedError: as for :func:`count_replicas` and :func:`check_weight`.
    """
    given = next((w for w in weights if w is not None), None)
    weight = check_weight(given, count_replicas(updates, name, dim, replicas), name)
    leaves = jax.tree.leaves(updates)
    finite = jnp.stack([jnp.isfinite(x).all(tuple(range(1, x.ndim))) for x in leaves]).all(0)
    return require_dim(jnp.where(finite, weight, 0.0), dim), are_shared(updates, params, replicas)


def are_shared(updates: Any, params: Any, replicas: int | None) -> bool:
    """Whether the replicas have common parameters, which have no replica dim.

    Args:
      params: parameters, as passed to ``update``; None: unknown.
      replicas: the argument of the transformation; a number says that parameters are shared.
    """
    if params is None:
        return replicas is not None
    return all(u.ndim == p.ndim + 1 for u, p in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True))


def check_weight(weight: Any, replicas: int, name: str) -> jax.Array:
    """The weights of replicas as float32 [replica]; None: ones.

    Raises:
      RankError: there is not one weight per replica.
      UnsupportedError: concrete weights are all zero, or one is negative or not finite.
    """
    if weight is None:
        return jnp.ones(replicas, jnp.float32)
    if np.shape(weight) != (replicas,):
        text = f"mp.replicas.{name}: weight has the shape {list(np.shape(weight))}, not [{replicas}]"
        raise RankError(text, shape=np.shape(weight), fixes=[f"one weight for each of the {replicas} replicas"])
    if not is_tracer(weight) and getattr(weight, "is_fully_addressable", True):
        values = np.asarray(weight, np.float64)
        if not np.isfinite(values).all() or (values < 0).any():
            text = f"mp.replicas.{name}: weight={values.tolist()} has a weight that is negative or not finite"
            raise UnsupportedError(text, fixes=["0 leaves a replica out, 1 counts it"])
        if not values.any():
            text = f"mp.replicas.{name}: weight={values.tolist()} leaves all {replicas} replicas out"
            raise UnsupportedError(text, fixes=["at least one weight above 0"])
    return jnp.asarray(weight, jnp.float32)


def per_replica(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Weights [replica] in a shape that broadcasts to ``x`` [replica, ...]."""
    return weights.reshape(-1, *(1,) * (x.ndim - 1))


def wide(x: jax.Array) -> jax.Array:
    """``x`` in float32, or in float64 if it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def live_only(x: jax.Array, weights: jax.Array) -> jax.Array:
    """``x`` [replica, ...] as :func:`wide`, with zeros in replicas of weight 0."""
    return jnp.where(per_replica(weights, x) > 0, wide(x), 0.0)


def weighted_mean(x: jax.Array, weights: jax.Array, dtype: Any = None) -> jax.Array:
    """``Σ_r w_r x_r / Σ_r w_r`` as :func:`wide`, for ``x`` [replica, ...]; the sum over devices is in ``dtype``."""
    total = (live_only(x, weights) * per_replica(weights, x)).sum(0)
    if dtype is not None:
        total = wide(reduce_in(total, dtype))
    return total / weights.sum()


def as_updates(mean: jax.Array, update: jax.Array, shared: bool) -> jax.Array:
    """A mean [...] in the dtype of an update, with the update's replica dim unless parameters are shared."""
    mean = mean.astype(update.dtype)
    return mean if shared else jnp.broadcast_to(mean, update.shape)
