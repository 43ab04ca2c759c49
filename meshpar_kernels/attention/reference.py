"""Attention in plain `jax.numpy`, with all scores in memory: the definition, and its gradients by their formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshpar_kernels._numerics import wide
from meshpar_kernels.attention.flash import Keys, Queries, Softmax


def _scores(s: Softmax, q: Queries, k: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(scores [B, H, Q, K], -inf for masked keys; derivative of the softcap; keys for each query head [B, K, H, D])."""
    keys = jnp.repeat(k.k.astype(wide(k.k)), q.x.shape[2] // k.k.shape[2], axis=2)
    raw = jnp.einsum("bqhd,bkhd->bhqk", q.x.astype(wide(q.x)), keys, precision="highest") * s.scale
    slope = jnp.ones_like(raw)
    if s.softcap is not None:
        slope = 1.0 - jnp.tanh(raw / s.softcap) ** 2
        raw = s.softcap * jnp.tanh(raw / s.softcap)
    return jnp.where(s.mask.visible(q.pos, k.pos, q.seg, k.seg)[:, None], raw, -jnp.inf), slope, keys


def forward(s: Softmax, q: Queries, k: Keys) -> tuple[jax.Array, jax.Array]:
    """See `flash.forward`."""
    scores, _, _ = _scores(s, q, k)
    top = scores.max(-1, keepdims=True, initial=-jnp.inf)
    p = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = p.sum(-1, keepdims=True)
    p = p / jnp.where(total > 0, total, 1.0)
    values = jnp.repeat(k.v.astype(wide(k.v)), q.x.shape[2] // k.v.shape[2], axis=2)
    out = jnp.einsum("bhqk,bkhd->bqhd", p, values, precision="highest")
    lse = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    return out, jnp.moveaxis(lse[..., 0], 1, 2)


def backward(
    s: Softmax, q: Queries, k: Keys, grad: jax.Array, lse: jax.Array, dots: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `flash.backward`."""
    scores, slope, keys = _scores(s, q, k)
    lse, dots = (jnp.moveaxis(a, 2, 1)[..., None] for a in (lse, dots))
    p = jnp.exp(scores - jnp.where(lse == -jnp.inf, jnp.inf, lse))
    grad = grad.astype(wide(grad))
    values = jnp.repeat(k.v.astype(wide(k.v)), q.x.shape[2] // k.v.shape[2], axis=2)
    d_p = jnp.einsum("bqhd,bkhd->bhqk", grad, values, precision="highest")
    d_s = p * (d_p - dots) * slope * s.scale

    def of_groups(x: jax.Array, heads: int) -> jax.Array:
        return x.reshape(*x.shape[:2], heads, -1, x.shape[-1]).sum(3)

    d_q = jnp.einsum("bhqk,bkhd->bqhd", d_s, keys, precision="highest")
    d_k = jnp.einsum("bhqk,bqhd->bkhd", d_s, q.x.astype(wide(q.x)), precision="highest")
    d_v = jnp.einsum("bhqk,bqhd->bkhd", p, grad, precision="highest")
    return d_q, of_groups(d_k, k.k.shape[2]), of_groups(d_v, k.v.shape[2])
