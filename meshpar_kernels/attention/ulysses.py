"""Ulysses: all-to-alls reshard the operands from the sequence to the heads, and the result back (Jacobs et al. 2023).

Between them each device has all tokens of some heads. If there are fewer K/V heads than devices, each K/V head is
copied to the devices whose query heads use it, so more of K and V is sent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels.attention.blocks import Layout
from meshpar_kernels.attention.context import Context
from meshpar_kernels.attention.flash import Keys, Queries
from meshpar_kernels.attention.options import Operands


def refusal(heads: int, kv_heads: int, devices: int) -> str | None:
    """The reason why these heads cannot be sharded over the devices; None if they can."""
    if heads % devices:
        return f"{heads} heads do not divide over {devices} devices"
    if kv_heads % devices and devices % kv_heads:
        return f"{kv_heads} K/V heads neither divide over {devices} devices nor can be copied evenly to them"
    return None


def copies(kv_heads: int, devices: int) -> int:
    """Number of devices to which each K/V head is sent."""
    return max(1, devices // kv_heads)


def _to_heads(c: Context, x: jax.Array) -> jax.Array:
    """[B, S/A, H, …] → [B, S, H/A, …]."""
    return lax.all_to_all(x, c.axes, split_axis=2, concat_axis=1, tiled=True)


def _to_tokens(c: Context, x: jax.Array) -> jax.Array:
    """[B, S, H/A, …] → [B, S/A, H, …]."""
    return lax.all_to_all(x, c.axes, split_axis=1, concat_axis=2, tiled=True)


def _whole(c: Context, x: jax.Array | None) -> jax.Array | None:
    return None if x is None else lax.all_gather(x, c.axes, axis=1, tiled=True)


def _exchange(c: Context, x: Operands) -> tuple[Queries, Keys]:
    """Queries and keys of all tokens for this device's heads, by all-to-alls; K/V heads are repeated if there are fewer
    than devices."""
    each = c.all_positions(x.q.shape[1]), c.all_positions(x.k.shape[1])
    many = copies(x.k.shape[2], c.devices)
    k, v = (_to_heads(c, jnp.repeat(a, many, axis=2)) for a in (x.k, x.v))
    q_seg = _whole(c, x.q_seg)
    k_seg = q_seg if x.k_seg is None else _whole(c, x.k_seg)
    return Queries(_to_heads(c, x.q), each[0], q_seg), Keys(k, v, each[1], k_seg)


def forward(c: Context, x: Operands) -> tuple[jax.Array, jax.Array]:
    """([B, Q, H, Dv] in q's dtype, log-sum-exp float32 [B, Q, H]) of this device's queries over all devices' keys."""
    out, lse = c.forward(*_exchange(c, x), Layout(aligned=c.in_order))
    return _to_tokens(c, out.astype(x.q.dtype)), _to_tokens(c, lse)


def backward(
    c: Context, x: Operands, out: jax.Array, grad: jax.Array, lse: jax.Array, dots: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q (in its dtype), k and v (float32 if a head was copied). q, k and v are exchanged again; the result
    only if cuDNN uses it (XLA removes an unused exchange)."""
    grad, lse, dots, out = (_to_heads(c, a) for a in (grad, lse, dots, out))
    d_q, d_k, d_v = c.backward(*_exchange(c, x), grad, lse, dots, out, Layout(aligned=c.in_order))
    many = copies(x.k.shape[2], c.devices)

    def home(a: jax.Array, dtype: jnp.dtype) -> jax.Array:
        if many == 1:
            return _to_tokens(c, a.astype(dtype))
        a = _to_tokens(c, a)
        return a.reshape(*a.shape[:2], -1, many, a.shape[-1]).sum(3)

    return _to_tokens(c, d_q.astype(x.q.dtype)), home(d_k, x.k.dtype), home(d_v, x.v.dtype)
