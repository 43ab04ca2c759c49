"""Routing in plain `jax.numpy`: the definition, and the implementation where there is no kernel."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Choice = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""`expert` [T, k], `weight` [T, k], `rank` [T, k], `counts` [E] as in `RoutePlan`."""


class Router(NamedTuple):
    """The options of `meshpar_kernels.route` that decide on the choices and their weights."""

    k: int
    score: str
    groups: int
    top_groups: int
    group_top: int
    renormalize: bool
    scale: float


def _valid(logits: jax.Array) -> jax.Array:
    """bool [T, 1]: rows that can be routed, with no NaN, no +inf, and a logit above -inf."""
    bad = jnp.isnan(logits) | (logits == jnp.inf)
    return ~bad.any(-1, keepdims=True) & (logits > -jnp.inf).any(-1, keepdims=True)


def _scores(logits: jax.Array, score: str) -> jax.Array:
    """Score of each expert: float32 [T, E], 0 in rows that cannot be routed."""
    valid = _valid(logits)
    safe = jnp.where(valid, logits, 0.0)
    if score == "softmax":
        value = jax.nn.softmax(safe, axis=-1)
    else:
        value = jax.nn.sigmoid(safe)
    return jnp.where(valid, value, 0.0)


def weights(logits: jax.Array, expert: jax.Array, how: Router) -> jax.Array:
    """Weights of given choices, as a differentiable function of the logits.

    Args:
      logits: float [T, E].
      expert: int32 [T, k]; E for no choice.

    Returns:
      float32 [T, k].
    """
    experts = logits.shape[-1]
    made = expert < experts
    score_te = _scores(logits.astype(jnp.float32), how.score)
    chosen = jnp.take_along_axis(score_te, jnp.minimum(expert, experts - 1), axis=-1)
    chosen = jnp.where(made, chosen, 0.0)
    if how.renormalize:
        total = chosen.sum(-1, keepdims=True)
        positive = total > 0
        chosen = jnp.where(positive, chosen / jnp.where(positive, total, 1.0), 0.0)
    return chosen * how.scale


def _group_mask(value: jax.Array, how: Router) -> jax.Array:
    """bool [T, E]: experts of the `top_groups` best groups. `value` is -inf for experts that cannot be chosen."""
    tokens, experts = value.shape
    size = experts // how.groups
    top = lax.top_k(value.reshape(tokens, how.groups, size), min(how.group_top, size))[0]
    total = jnp.where(top > -jnp.inf, top, 0.0).sum(-1)
    total = jnp.where(top[..., 0] > -jnp.inf, total, -jnp.inf)
    best = lax.top_k(total, how.top_groups)[1]
    allowed = jax.nn.one_hot(best, how.groups, dtype=jnp.int32).sum(1) > 0
    return jnp.repeat(allowed, size, axis=1)


def route(logits: jax.Array, bias: jax.Array | None, how: Router) -> Choice:
    """Choices of each token; see `meshpar_kernels.route`."""
    tokens, experts = logits.shape
    logits = logits.astype(jnp.float32)
    reachable = _valid(logits) & (logits > -jnp.inf)
    value = _scores(logits, how.score)
    if bias is not None:
        bias = bias.astype(jnp.float32)
        reachable &= ~jnp.isnan(bias)
        value = value + bias
    key = logits if bias is None else value
    if how.groups > how.top_groups:
        reachable &= _group_mask(jnp.where(reachable, value, -jnp.inf), how)
    key = jnp.where(reachable, key, -jnp.inf)
    best, expert = lax.top_k(key, how.k)
    expert = jnp.where(best > -jnp.inf, expert, experts).astype(jnp.int32)
    weight = weights(logits, expert, how)

    chosen = jax.nn.one_hot(expert.reshape(-1), experts, dtype=jnp.int32)
    before = jnp.cumsum(chosen, axis=0) - chosen
    rank = (before * chosen).sum(-1).reshape(tokens, how.k)
    rank = jnp.where(expert < experts, rank, -1)
    return expert, weight, rank, chosen.sum(0, dtype=jnp.int32)


def gather_sum(x: jax.Array, index: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Row i of the result is the sum over j of `weight[i, j] · x[index[i, j]]`, in float32, cast to x's dtype.

    Args:
      x: [N, H].
      index: int32 [M, k]; an index outside of 0…N-1 adds nothing, whatever x and the weight contain.
      weight: float32 [M, k], or None for ones.

    Returns:
      [M, H] in x's dtype.
    """
    rows, k = index.shape
    total = jnp.zeros((rows, x.shape[1]), jnp.float32)
    if x.shape[0] == 0:
        return total.astype(x.dtype)
    for j in range(k):
        selected = (index[:, j] >= 0) & (index[:, j] < x.shape[0])
        term = x[jnp.where(selected, index[:, j], 0)].astype(jnp.float32)
        if weight is not None:
            term = term * weight[:, j, None]
        total = total + jnp.where(selected[:, None], term, 0.0)
    return total.astype(x.dtype)
