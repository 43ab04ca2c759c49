"""Gossip: each replica averages its parameters with one other replica's."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...errors import RankError, UnsupportedError
from .trees import are_shared, count_replicas, require_dim


class GossipState(NamedTuple):
    """State of :func:`gossip`.

    Attributes:
      count: int32, the number of updates.
    """

    count: Any


def gossip(shift: int | str = 1, *, dim: str = "replica") -> optax.GradientTransformationExtraArgs:
    """Average the parameters of each replica with another's, and add the updates: ``p_r ← (p_r + p_s) / 2 + u_r``.

    Decentralized SGD (Lian et al., *Can Decentralized Algorithms Outperform Centralized Algorithms?*, 2017) with one neighbour:
    ``s = r - shift`` modulo the number of replicas. With ``"exponential"`` the shift is 1, 2, 4, … in successive steps (GossipGraD,
    Daily et al., 2018; Assran et al., *Stochastic Gradient Push*, 2019), so that each replica's parameters reach all R replicas
    in log2(R) steps. One collective-permute sends each device's parameters once. It is the last transformation of a chain.

    Args:
      shift: distance of the neighbour, or ``"exponential"``.
      dim: name of the replica dim, which parameters and updates have first.

    Raises:
      UnsupportedError: ``shift`` is neither a number nor ``"exponential"``; (when updating) it is a multiple of the number of
        replicas, or ``update`` has no parameters.
      RankError: (when updating) the parameters have no replica dim.
      DivisibilityError, UnknownDimError: as for :func:`mean`.

    Example:
      >>> tx = mp.replicas.gossip(shift=1)
      >>> w = jnp.array([[0.0], [4.0]])
      >>> updates, state = tx.update(jnp.zeros_like(w), tx.init(w), w)
      >>> (w + updates).tolist()
      [[2.0], [2.0]]
    """
    if not isinstance(shift, int) and shift != "exponential":
        raise UnsupportedError(
            f"mp.replicas.gossip: shift={shift!r}", fixes=["a number of replicas, such as 1", '"exponential"']
        )

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> tuple[Any, GossipState]:
        count = count_replicas(updates, "gossip", dim)
        if params is None:
            fix = "tx.update(updates, state, params)"
            raise UnsupportedError("mp.replicas.gossip averages parameters, which `update` was not given", fixes=[fix])
        if are_shared(updates, params, None):
            fix = "a copy of the parameters for each replica, stacked along the first dim"
            raise RankError(f"mp.replicas.gossip: the parameters have no dim `{dim}`", dim=dim, fixes=[fix])
        if isinstance(shift, int) and shift % count == 0:
            text = f"mp.replicas.gossip: with shift={shift}, each of {count} replicas is its own neighbour"
            raise UnsupportedError(text, fixes=["a shift that is not a multiple of the number of replicas"])
        shifts = [shift] if isinstance(shift, int) else [2**k for k in range(max(1, (count - 1).bit_length()))]
        params = jax.tree.map(lambda p: require_dim(p, dim), params)
        moved = [functools.partial(_shifted, shift=s) for s in shifts]
        others = jax.lax.switch(state.count % len(shifts), moved, params) if len(moved) > 1 else moved[0](params)
        mixed = jax.tree.map(lambda u, p, o: u + ((o - p) * 0.5).astype(u.dtype), updates, params, others)
        return mixed, GossipState(state.count + 1)

    return optax.GradientTransformationExtraArgs(lambda params: GossipState(jnp.zeros((), jnp.int32)), update)


def _shifted(params: Any, shift: int) -> Any:
    """Row r of every array is its row ``r - shift``."""
    return jax.tree.map(lambda p: jnp.roll(p, shift, 0), params)
