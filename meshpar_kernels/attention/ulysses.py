"""Ulysses: all-to-alls reshard the operands from the sequence to the heads, and the result back (Jacobs et al. 2023).

Between them each device has all tokens of some heads. If there are fewer K/V heads than devices, each K/V head is
copied to the devices whose query heads use it, so more of K and V is sent. Over several mesh axes the heads may be
exchanged over the last ones only: then a device has the tokens of its group, which a ring over the other axes attends
to (USP; Fang & Zhao 2024).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels.attention import ring
from meshpar_kernels.attention.context import Context
from meshpar_kernels.attention.options import Operands


def refusal(heads: int, kv_heads: int, devices: int) -> str | None:
    """The reason why these heads cannot be sharded over the devices; None if they can."""
    if heads % devices:
        return f"{heads} heads do not divide over {devices} devices"
    if kv_heads % devices and devices % kv_heads:
        return f"{kv_heads} K/V heads neither divide over {devices} devices nor can be copied evenly to them"
    return None


def inner_axes(c: Context, strategy: str, heads: int, kv_heads: int) -> int | str:
    """Number of the last axes over which a strategy exchanges heads, or the reason why it cannot run: all for "ulysses",
    none without it, and for "ring+ulysses" as many as the heads permit, but not all."""
    if strategy == "ulysses":
        return refusal(heads, kv_heads, c.devices) or len(c.axes)
    if strategy != "ring+ulysses" or c.devices == 1:
        return 0
    if len(c.axes) < 2:
        return "the sequence is not sharded over two mesh axes"
    sizes = [n for _, n in c.stages]
    able = [n for n in range(1, len(sizes)) if refusal(heads, kv_heads, math.prod(sizes[-n:])) is None]
    return max(able) if able else str(refusal(heads, kv_heads, sizes[-1]))


def copies(kv_heads: int, devices: int) -> int:
    """Number of devices to which each K/V head is sent."""
    return max(1, devices // kv_heads)


def _to_heads(c: Context, x: jax.Array) -> jax.Array:
    """[B, S/A, H, …] → [B, S, H/A, …]."""
    return lax.all_to_all(x, c.axes, split_axis=2, concat_axis=1, tiled=True)


def _to_tokens(c: Context, x: jax.Array) -> jax.Array:
    """[B, S, H/A, …] → [B, S/A, H, …]."""
    return lax.all_to_all(x, c.axes, split_axis=1, concat_axis=2, tiled=True)


def _exchange(c: Context, x: Operands) -> Operands:
    """The operands of all tokens of the axes of `c` for this device's heads, by all-to-alls; K/V heads are repeated if
    there are fewer than devices."""

    def gathered(a: jax.Array | None, axis: int) -> jax.Array | None:
        return None if a is None else lax.all_gather(a, c.axes, axis=axis, tiled=True)

    many = copies(x.k.shape[2], c.devices)
    k, v = (_to_heads(c, jnp.repeat(a, many, axis=2)) for a in (x.k, x.v))
    return Operands(_to_heads(c, x.q), k, v, gathered(x.q_seg, 1), gathered(x.k_seg, 1), gathered(x.pos, 0))


def forward(c: Context, x: Operands) -> tuple[jax.Array, jax.Array]:
    """([B, Q, H, Dv] in q's dtype, log-sum-exp float32 [B, Q, H]) of this device's queries over all devices' keys."""
    inner = c.exchange
    out, lse = ring.forward(c.outer, _exchange(inner, x))
    return _to_tokens(inner, out.astype(x.q.dtype)), _to_tokens(inner, lse)


def backward(
    c: Context, x: Operands, out: jax.Array, grad: jax.Array, lse: jax.Array, dots: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q (in its dtype), k and v (float32 if a head was copied). q, k and v are exchanged again; the result
    only if cuDNN uses it (XLA removes an unused exchange)."""
    inner = c.exchange
    grad, lse, dots, out = (_to_heads(inner, a) for a in (grad, lse, dots, out))
    d_q, d_k, d_v = ring.backward(c.outer, _exchange(inner, x), out, grad, lse, dots)
    many = copies(x.k.shape[2], inner.devices)

    def home(a: jax.Array, dtype: jnp.dtype) -> jax.Array:
        if many == 1:
            return _to_tokens(inner, a.astype(dtype))
        a = _to_tokens(inner, a)
        return a.reshape(*a.shape[:2], -1, many, a.shape[-1]).sum(3)

    return _to_tokens(inner, d_q.astype(x.q.dtype)), home(d_k, x.k.dtype), home(d_v, x.v.dtype)
