"""Attention of the queries and keys on one device by NVIDIA's cuDNN: flash attention for Ampere GPUs and newer, forward
and backward.

It is the default on GPUs where it can run: bfloat16 and float16, and masks that need no positions: no mask, or a causal
mask (with or without a window) if queries and keys are aligned or chunked (`blocks.Layout`). That is known at trace
time.
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


def unsupported(s: Softmax, q: Queries, k: Keys, layout: Layout) -> Unsupported:
    """Reasons why cuDNN cannot take these operands; empty if it can."""
    reasons = []
    if q.x.dtype not in (jnp.bfloat16, jnp.float16):
        reasons.append(f"operands are {q.x.dtype}; cuDNN takes bfloat16 and float16")
    architecture = _compat.gpu_architecture()
    most = 256 if architecture >= (9, 0) else 128
    width, v_width = q.x.shape[3], k.v.shape[3]
    if width != v_width or width > most or width % 8:
        reasons.append(f"head_dim is {width} and {v_width}; cuDNN takes one for both, a multiple of 8 up to {most}")
    if 0 in (*q.x.shape, *k.v.shape):
        reasons.append("there are no queries or no keys")
    if s.softcap is not None:
        reasons.append("softcap")
    if q.seg is not None or k.seg is not None:
        reasons.append("segment ids")
    if s.mask.window is not None and not s.mask.causal:
        reasons.append("a window to both sides")
    reasons += blocks.mask_reasons(s, q, k, layout)
    if architecture < (8, 0):
        reasons.append(f"the GPU is sm_{architecture[0]}{architecture[1]}; cuDNN's flash attention begins with sm_80")
    return Unsupported((*reasons, *_compat.cudnn_reasons()))


def _how(s: Softmax) -> dict[str, Any]:
    return {"scale": s.scale, "causal": s.mask.causal, "window": s.mask.window}


def _call(s: Softmax, q: Queries, k: Keys) -> tuple[jax.Array, jax.Array]:
    """One call of cuDNN: the result and the log-sum-exps, float32."""
    out, lse = _compat.cudnn_forward(q.x, k.k, k.v, **_how(s))
    return _compat.same_varying(q.x, out.astype(jnp.float32), jnp.swapaxes(lse, 1, 2))[1:]


def forward(s: Softmax, q: Queries, k: Keys, *, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """See `flash.forward`; the result is computed in the precision of q."""
    return blocks.forward(_call, s, q, k, layout=layout)


def backward(
    s: Softmax, q: Queries, k: Keys, grad: jax.Array, lse: jax.Array, dots: jax.Array, out: jax.Array, *, layout: Layout
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `flash.backward`; `out` is the result over all keys, from which cuDNN computes Σ grad·out of each row itself."""
    del dots
    saved = jnp.swapaxes(lse, 1, 2).astype(jnp.float32), out.astype(q.x.dtype), grad.astype(q.x.dtype)

    def call(s: Softmax, k: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One call of cuDNN: the gradients through these keys, float32."""
        grads = _compat.cudnn_backward(q.x, k.k, k.v, *saved, **_how(s))
        return _compat.same_varying(q.x, *(g.astype(jnp.float32) for g in grads))[1:]

    return blocks.backward(call, s, q, k, layout=layout)
