"""Gathered K/V: every device all-gathers keys and values and computes its own queries (context parallelism of Llama 3,
2024)."""

from __future__ import annotations

import jax
from jax import lax

from meshpar_kernels.attention.context import Context
from meshpar_kernels.attention.flash import Keys, Queries
from meshpar_kernels.attention.library_calls_per_block import Layout
from meshpar_kernels.attention.options import Operands


def _all_keys(c: Context, x: Operands) -> Keys:
    """K, V, positions and segment ids of all devices, all-gathered along the sequence."""

    def full(a: jax.Array) -> jax.Array:
        return lax.all_gather(a, c.axes, axis=1, tiled=True)

    seg = x.key_segments
    return Keys(full(x.k), full(x.v), c.all_positions(x.pos, x.k.shape[1]), None if seg is None else full(seg))


def _mine(c: Context, x: Operands) -> Queries:
    return Queries(x.q, c.own_positions(x.pos, x.q.shape[1]), x.q_seg)


def _layout(c: Context, x: Operands) -> Layout:
    each = x.k.shape[1]
    return Layout(block=each if c.all_or_none(x.q.shape[1], each) else 0)


def forward(c: Context, x: Operands) -> tuple[jax.Array, jax.Array]:
    """(float32 [B, Q, H, Dv], log-sum-exp float32 [B, Q, H]) of this device's queries over all devices' keys."""
    return c.forward(_mine(c, x), _all_keys(c, x), _layout(c, x))


def backward(
    c: Context, x: Operands, out: jax.Array, grad: jax.Array, lse: jax.Array, dots: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, in float32 or wider. K and V are gathered again, their gradients reduce-scattered."""
    d_q, d_k, d_v = c.backward(_mine(c, x), _all_keys(c, x), grad, lse, dots, out, _layout(c, x))
    d_k = c.scattered(d_k, 1)
    if c.ring_scatter:  # sequentially: both at once would need more memory
        d_k, d_v = lax.optimization_barrier((d_k, d_v))
    return d_q, d_k, c.scattered(d_v, 1)
