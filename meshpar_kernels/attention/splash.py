"""Attention of the queries and keys on one device by JAX's splash attention, Pallas kernels for TPUs, forward and
backward.

It takes the masks that cuDNN takes (`blocks.Layout`), softcaps, and segment ids of aligned queries and keys. It is the
default on TPUs where it can run, by the compiler's cycles; no device has timed it for this package.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.attention import library_calls_per_block as blocks
from meshpar_kernels.attention.flash import Keys, Queries, Softmax
from meshpar_kernels.attention.library_calls_per_block import Layout

LANES = 128
"""Queries and keys of a block are multiples of this."""

WIDTH = 64
"""The width of a head must be a multiple of this."""

MAX_TOKENS = 32768
"""Queries or keys of one call. The mask is cut to blocks in Python while JAX traces, which takes seconds for this many."""


def unsupported(s: Softmax, q: Queries, k: Keys, layout: Layout) -> Unsupported:
    """Reasons why splash attention cannot take these operands; empty if it can."""
    reasons = blocks.mask_reasons(s, q, k, layout)
    if q.x.dtype != jnp.bfloat16:
        reasons.append(f"operands are {q.x.dtype}; splash attention multiplies in bfloat16")
    widths = q.x.shape[3], k.v.shape[3]
    if any(n % WIDTH for n in widths):
        reasons.append(f"head_dim is {' and '.join(map(str, widths))}, no multiple of {WIDTH}")
    lengths = q.x.shape[1], k.k.shape[1]
    if any(n % LANES or n == 0 for n in lengths) or 0 in q.x.shape:
        reasons.append(f"{lengths[0]} queries and {lengths[1]} keys on a device are no multiples of {LANES}")
    if max(lengths) > MAX_TOKENS:
        reasons.append(f"{max(lengths)} queries or keys in one call are more than {MAX_TOKENS}")
    if (q.seg is not None or k.seg is not None) and not (layout.aligned and lengths[0] == lengths[1]):
        reasons.append("segment ids of queries and keys that are not aligned: a query may see no key")
    if s.mask.window is not None and not (s.mask.causal or (layout.aligned and lengths[0] == lengths[1])):
        reasons.append("a window of queries and keys that are not aligned")
    return Unsupported(reasons)


def _heads_first(*arrays: jax.Array) -> list[jax.Array]:
    return [jnp.swapaxes(a, 1, 2) for a in arrays]


def _scaled(s: Softmax, q: Queries) -> jax.Array:
    return (q.x.astype(jnp.float32) * s.scale).astype(q.x.dtype)


def forward(s: Softmax, q: Queries, k: Keys, *, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """See `flash.forward`; the result is rounded to the precision of q, and so is scale·q."""

    def call(s: Softmax, q: Queries, k: Keys) -> tuple[jax.Array, jax.Array]:
        """One call: the result and the log-sum-exps, float32."""
        segments = None if q.seg is None else (q.seg, q.seg if k.seg is None else k.seg)
        x, keys, values = _heads_first(_scaled(s, q), k.k, k.v)
        out, lse = _compat.splash_forward(
            x, keys, values, segments, causal=s.mask.causal, window=s.mask.window, softcap=s.softcap
        )
        out, lse = _heads_first(out.astype(jnp.float32), lse)
        return _compat.same_varying(q.x, out, lse)[1:]

    return blocks.forward(call, s, q, k, layout=layout)


def backward(
    s: Softmax, q: Queries, k: Keys, grad: jax.Array, lse: jax.Array, dots: jax.Array, out: jax.Array, *, layout: Layout
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `flash.backward`; `out` is not used."""
    del out
    lse, dots, grad = _heads_first(lse.astype(jnp.float32), dots, grad.astype(q.x.dtype))

    def call(s: Softmax, k: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One call: the gradients through these keys, float32."""
        segments = None if q.seg is None else (q.seg, q.seg if k.seg is None else k.seg)
        x, keys, values = _heads_first(_scaled(s, q), k.k, k.v)
        options: dict[str, Any] = {"causal": s.mask.causal, "window": s.mask.window, "softcap": s.softcap}
        grads = _compat.splash_backward(x, keys, values, segments, lse, dots, grad, **options)
        d_q, d_k, d_v = _heads_first(*(g.astype(jnp.float32) for g in grads))
        return _compat.same_varying(q.x, d_q * s.scale, d_k, d_v)[1:]

    return blocks.backward(call, s, q, k, layout=layout)
