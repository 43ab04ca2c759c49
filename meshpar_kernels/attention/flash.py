"""Attention of the queries and keys on one device, in chunks, with log-sum-exps by which partial results are merged.

The forward pass has a running maximum and sum of the softmax (Milakov & Gimelshein, "Online normalizer calculation for
softmax", 2018), and computes the scores of one chunk of queries by one chunk of keys at a time. The backward pass
recomputes the scores, and the softmax from the log-sum-exp (FlashAttention-2, Dao 2023, algorithm 2).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels._numerics import precision, wide
from meshpar_kernels.attention.masks import NOWHERE, Mask

Q_CHUNK, K_CHUNK = 512, 1024


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Static arguments of the attention of one device.

    Attributes:
      scale: factor on the scores q·k.
      softcap: scores s become cap·tanh(s / cap); None: they stay.
      chunks: queries and keys in one block of scores.
    """

    mask: Mask
    scale: float
    softcap: float | None = None
    chunks: tuple[int, int] = (Q_CHUNK, K_CHUNK)


class Queries(NamedTuple):
    """x [B, Q, H, D]; pos int32 [Q]; seg int32 [B, Q] or None."""

    x: jax.Array
    pos: jax.Array
    seg: jax.Array | None


class Keys(NamedTuple):
    """k [B, K, Hkv, D]; v [B, K, Hkv, Dv]; pos int32 [K]; seg int32 [B, K] or None. H is a multiple of Hkv."""

    k: jax.Array
    v: jax.Array
    pos: jax.Array
    seg: jax.Array | None


def _einsum(text: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(text, a, b, precision=precision(a.dtype), preferred_element_type=wide(a))


# -- chunks


def _cut(x: jax.Array, axis: int, size: int, fill: int | None = 0) -> jax.Array:
    """[…, n, …] → [chunks, …, size, …], padded with `fill` (None: with the last)."""
    n = x.shape[axis]
    if n % size:
        widths = [(0, size - n % size if d == axis else 0) for d in range(x.ndim)]
        x = jnp.pad(x, widths, mode="edge") if fill is None else jnp.pad(x, widths, constant_values=fill)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _join(x: jax.Array, axis: int, n: int) -> jax.Array:
    """Undo `_cut`: [chunks, …, size, …] → […, n, …]."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, n, axis=axis)


def _grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, Q, H, …] → [B, Hkv, G, Q, …]."""
    x = x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def _ungrouped(x: jax.Array) -> jax.Array:
    """[B, Hkv, G, Q, …] → [B, Q, H, …]."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _query_chunks(q: Queries, size: int, kv_heads: int, *more: jax.Array) -> tuple:
    """(x, pos, seg, more) in chunks; x and more [n, B, Hkv, G, size, …]."""
    wide = [_cut(_grouped(a, kv_heads), 3, size) for a in (q.x, *more)]
    seg = None if q.seg is None else _cut(q.seg, 1, size, None)
    return wide[0], _cut(q.pos, 0, size, None), seg, *wide[1:]


def _key_chunks(k: Keys, size: int) -> Keys:
    """Chunks [n, B, Hkv, size, D]."""
    heads, values = (_cut(jnp.moveaxis(a, 1, 2), 2, size) for a in (k.k, k.v))
    return Keys(heads, values, _cut(k.pos, 0, size, NOWHERE), None if k.seg is None else _cut(k.seg, 1, size, None))


def _scores(s: Softmax, x: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scores [B, Hkv, G, q, k], derivative of the softcap at each score), float32."""
    raw = _einsum("bhgqd,bhkd->bhgqk", x, k) * s.scale
    if s.softcap is None:
        return raw, jnp.ones((), wide(x))
    turned = jnp.tanh(raw / s.softcap)
    return s.softcap * turned, 1.0 - turned * turned


def _seen(s: Softmax, pos: jax.Array, seg: jax.Array | None, k: Keys) -> jax.Array:
    return s.mask.visible(pos, k.pos, seg, k.seg)[:, None, None]


# -- forward


def forward(s: Softmax, q: Queries, k: Keys) -> tuple[jax.Array, jax.Array]:
    """Attention of q over k.

    Returns:
      (result float32 [B, Q, H, Dv], log-sum-exp of the scores float32 [B, Q, H]); 0 and -inf for a query that sees no
        key.
    """
    batch, length, heads, _ = q.x.shape
    kv_heads = k.k.shape[2]
    if 0 in q.x.shape or 0 in k.v.shape:
        return nothing(q.x, k.v.shape[3])
    sizes = min(s.chunks[0], length), min(s.chunks[1], k.pos.shape[0])
    keys = _key_chunks(k, sizes[1])

    def rows(chunk):
        """(result, log-sum-exp) of one chunk of queries over all keys, [B, Hkv, G, q, …]; a scan over chunks of keys."""
        x, pos, seg = chunk
        shape = (batch, kv_heads, heads // kv_heads, sizes[0])
        start = _compat.same_varying(
            x,
            jnp.full(shape, -jnp.inf, wide(x)),
            jnp.zeros(shape, wide(x)),
            jnp.zeros((*shape, k.v.shape[3]), wide(x)),
        )[1:]

        def add(carry, key: Keys):
            """Scan step: add one chunk of keys to (maximum, sum of exponentials, weighted values); skipped if no pair
            is visible."""

            def block(carry):
                """(maximum, sum, weighted values) with this chunk of keys included; the earlier ones are rescaled."""
                top, total, out = carry
                scores, _ = _scores(s, x, key.k)
                scores = jnp.where(_seen(s, pos, seg, key), scores, -jnp.inf)
                new = jnp.maximum(top, scores.max(-1))
                safe = jnp.where(new == -jnp.inf, 0.0, new)  # -inf - -inf is NaN
                p = jnp.exp(scores - safe[..., None])
                fade = jnp.exp(top - safe)
                part = _einsum("bhgqk,bhkd->bhgqd", p.astype(key.v.dtype), key.v)
                return new, total * fade + p.sum(-1), out * fade[..., None] + part

            is_visible = s.mask.any_visible(pos, key.pos, seg, key.seg)
            return lax.cond(is_visible, block, lambda carry: carry, carry), None

        (top, total, out), _ = lax.scan(add, start, keys)
        some = total > 0
        total = jnp.where(some, total, 1.0)
        return out / total[..., None], jnp.where(some, top + jnp.log(total), -jnp.inf)

    out, lse = lax.map(rows, _query_chunks(q, sizes[0], kv_heads))
    return _ungrouped(_join(out, 3, length)), _ungrouped(_join(lse, 3, length))


def nothing(x: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """The result of `forward` for queries x [B, Q, H, D] without keys: zeros of `width` values, and log-sum-exps of
    -inf."""
    zeros = jnp.zeros((*x.shape[:3], width), wide(x))
    return _compat.same_varying(x, zeros, jnp.full(x.shape[:3], -jnp.inf, wide(x)))[1:]


def merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(result, log-sum-exp) over the keys of both, from the (result, log-sum-exp) over two disjoint sets of keys."""
    top = jnp.maximum(a[1], b[1])
    safe = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(a[1] - safe), jnp.exp(b[1] - safe)
    total = weights[0] + weights[1]
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out = (a[0] * weights[0][..., None] + b[0] * weights[1][..., None]) / total[..., None]
    return out, jnp.where(some, safe + jnp.log(total), -jnp.inf)


# -- backward


def backward(
    s: Softmax, q: Queries, k: Keys, grad: jax.Array, lse: jax.Array, dots: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q.x, k.k and k.v, in float32, from these keys alone.

    Args:
      grad: [B, Q, H, Dv], the gradient of the result over all keys.
      lse: float32 [B, Q, H], the log-sum-exp over all keys of the softmax.
      dots: float32 [B, Q, H], `row_dots` of `grad` and the result over all keys.
    """
    length, kv_heads = q.x.shape[1], k.k.shape[2]
    if 0 in q.x.shape or 0 in k.v.shape:
        zeros = [jnp.zeros(a.shape, wide(a)) for a in (q.x, k.k, k.v)]
        return _compat.same_varying(q.x, *zeros)[1:]
    sizes = min(s.chunks[0], length), min(s.chunks[1], k.pos.shape[0])
    keys = _key_chunks(k, sizes[1])
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # a query that sees no key: every exp(score - lse) is 0
    x, pos, seg, grads, lses, dotses = _query_chunks(q, sizes[0], kv_heads, grad, lse, dots)
    many = jnp.arange(x.shape[0])

    def columns(d_x, key: Keys):
        """Scan step over chunks of keys: (d_q so far, this chunk's d_k and d_v); a scan over chunks of queries."""
        zeros = _compat.same_varying(x, *(jnp.zeros(a.shape, wide(a)) for a in (key.k, key.v)))[1:]

        def add(carry, chunk):
            """Scan step: add the gradients of one chunk of queries; skipped if no pair is visible."""
            d_x, d_k, d_v = carry
            i, x, pos, seg, grad, lse, dots = chunk

            def block():
                """(d_q, d_k, d_v) of one chunk of queries and one of keys, float32."""
                scores, slope = _scores(s, x, key.k)
                p = jnp.where(_seen(s, pos, seg, key), jnp.exp(scores - lse[..., None]), 0.0)
                d_p = _einsum("bhgqd,bhkd->bhgqk", grad.astype(key.v.dtype), key.v)
                d_s = (p * (d_p - dots[..., None]) * slope * s.scale).astype(x.dtype)
                return (
                    _einsum("bhgqk,bhkd->bhgqd", d_s, key.k),
                    _einsum("bhgqk,bhgqd->bhkd", d_s, x),
                    _einsum("bhgqk,bhgqd->bhkd", p.astype(grad.dtype), grad),
                )

            nothing = _compat.same_varying(x, jnp.zeros(x.shape, wide(x)), *zeros)[1:]
            is_visible = s.mask.any_visible(pos, key.pos, seg, key.seg)
            parts = lax.cond(is_visible, block, lambda: nothing)
            return (d_x.at[i].add(parts[0]), d_k + parts[1], d_v + parts[2]), None

        (d_x, d_k, d_v), _ = lax.scan(add, (d_x, *zeros), (many, x, pos, seg, grads, lses, dotses))
        return d_x, (d_k, d_v)

    start = _compat.same_varying(x, jnp.zeros(x.shape, wide(x)))[1]
    d_x, (d_k, d_v) = lax.scan(columns, start, keys)
    d_k, d_v = (jnp.moveaxis(_join(a, 2, k.pos.shape[0]), 2, 1) for a in (d_k, d_v))
    return _ungrouped(_join(d_x, 3, length)), d_k, d_v
