"""Gathered K/V: every device gets all keys and values, and keeps its own queries (context parallelism of Llama 3, 2024)."""

from __future__ import annotations

import jax
from jax import lax

from meshpar_kernels.attention.context import Context
from meshpar_kernels.attention.flash import Keys, Queries

__all__ = ["backward", "forward"]


def _all_keys(c: Context, k: jax.Array, v: jax.Array, seg: jax.Array | None) -> Keys:
    pos = c.all_positions(k.shape[1])
    k, v = (lax.all_gather(x, c.axes, axis=1, tiled=True) for x in (k, v))
    return Keys(k, v, pos, None if seg is None else lax.all_gather(seg, c.axes, axis=1, tiled=True))


def forward(
    c: Context, q: jax.Array, k: jax.Array, v: jax.Array, q_seg: jax.Array | None, k_seg: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(float32 [B, Q, H, Dv], log-sum-exp float32 [B, Q, H]) of this device's queries over all devices' keys."""
    mine = Queries(q, c.positions(c.rank(), q.shape[1]), q_seg)
    return c.forward(mine, _all_keys(c, k, v, q_seg if k_seg is None else k_seg))


def backward(
    c: Context,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_seg: jax.Array | None,
    k_seg: jax.Array | None,
    grad: jax.Array,
    lse: jax.Array,
    dots: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Float32 gradients of q, k and v. K and V are gathered again, their gradients reduce-scattered in float32."""
    mine = Queries(q, c.positions(c.rank(), q.shape[1]), q_seg)
    d_q, d_k, d_v = c.backward(mine, _all_keys(c, k, v, q_seg if k_seg is None else k_seg), grad, lse, dots)
    d_k, d_v = (lax.psum_scatter(x, c.axes, scatter_dimension=1, tiled=True) for x in (d_k, d_v))
    return d_q, d_k, d_v
