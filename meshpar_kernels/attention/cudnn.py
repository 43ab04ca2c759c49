"""Attention of the queries and keys on one device by NVIDIA's cuDNN: flash attention for Ampere GPUs and newer, forward
and backward.

It is the default on GPUs where it can run: bfloat16 and float16, and masks that need no positions (`Layout`): no mask; a
causal mask (with or without a window) of queries and keys that are aligned; or a causal mask of keys in blocks, each of
which is aligned with the queries, or visible to all of them, or to none. That is known at trace time, except which
blocks are visible: each block is one call, and the results are merged by their log-sum-exps.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.attention.flash import Keys, Queries, Softmax, merge, nothing
from meshpar_kernels.attention.masks import Mask

__all__ = ["Layout", "backward", "forward", "unsupported"]


class Layout(NamedTuple):
    """What is known at trace time about the positions of queries and keys.

    Attributes:
      aligned: query i and key i have the same position, and positions ascend by one.
      parts: lengths of the runs of keys, each of which is visible to all queries or to none; (): not known.
      block: the keys are all tokens in the order of their positions, in blocks of this length, and the queries are the
        tokens of one block; 0: not known.
    """

    aligned: bool = False
    parts: tuple[int, ...] = ()
    block: int = 0


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
    elif s.mask.causal and not (
        (layout.aligned and q.x.shape[1] == k.k.shape[1]) or (s.mask.window is None and (layout.parts or layout.block))
    ):
        reasons.append("a causal mask of queries and keys that are neither aligned nor in blocks")
    if architecture < (8, 0):
        reasons.append(f"the GPU is sm_{architecture[0]}{architecture[1]}; cuDNN's flash attention begins with sm_80")
    return Unsupported((*reasons, *_compat.cudnn_reasons()))


def _how(s: Softmax) -> dict[str, Any]:
    return {"scale": s.scale, "causal": s.mask.causal, "window": s.mask.window}


def _unmasked(s: Softmax) -> Softmax:
    return dataclasses.replace(s, mask=Mask())


def _slice(k: Keys, first: Any, length: int) -> Keys:
    """The keys [first, first + length), without segment ids."""
    heads, values = (lax.dynamic_slice_in_dim(a, first, length, axis=1) for a in (k.k, k.v))
    return Keys(heads, values, lax.dynamic_slice_in_dim(k.pos, first, length), None)


def _starts(parts: tuple[int, ...]) -> list[int]:
    return [sum(parts[:n]) for n in range(len(parts))]


def forward(s: Softmax, q: Queries, k: Keys, *, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """See `flash.forward`; the result is computed in the precision of q."""
    if not s.mask.causal or layout.aligned:
        return _forward(s, q, k)
    if layout.block:
        own = q.pos[0] // layout.block

        def add(i: Any, done: Any) -> Any:
            return merge(done, _forward(_unmasked(s), q, _slice(k, i * layout.block, layout.block)))

        return lax.fori_loop(0, own, add, _forward(s, q, _slice(k, own * layout.block, layout.block)))
    done = nothing(q.x, k.v.shape[3])
    for first, length in zip(_starts(layout.parts), layout.parts, strict=True):
        part = _slice(k, first, length)
        visible = s.mask.any_visible(q.pos, part.pos, None, None)
        merged = lambda done, part=part: merge(done, _forward(_unmasked(s), q, part))  # noqa: E731
        done = lax.cond(visible, merged, lambda done: done, done)
    return done


def _forward(s: Softmax, q: Queries, k: Keys) -> tuple[jax.Array, jax.Array]:
    """One call of cuDNN: the result and the log-sum-exps, float32."""
    out, lse = _compat.cudnn_forward(q.x, k.k, k.v, **_how(s))
    return _compat.same_varying(q.x, out.astype(jnp.float32), jnp.swapaxes(lse, 1, 2))[1:]


def backward(
    s: Softmax, q: Queries, k: Keys, grad: jax.Array, lse: jax.Array, dots: jax.Array, out: jax.Array, *, layout: Layout
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `flash.backward`; `out` is the result over all keys, from which cuDNN computes Σ grad·out of each row itself."""
    del dots
    saved = jnp.swapaxes(lse, 1, 2).astype(jnp.float32), out.astype(q.x.dtype), grad.astype(q.x.dtype)

    def through(s: Softmax, k: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One call of cuDNN: the gradients through these keys, float32."""
        grads = _compat.cudnn_backward(q.x, k.k, k.v, *saved, **_how(s))
        return _compat.same_varying(q.x, *(g.astype(jnp.float32) for g in grads))[1:]

    if not s.mask.causal or layout.aligned:
        return through(s, k)
    zeros = _compat.same_varying(q.x, *(jnp.zeros(a.shape, jnp.float32) for a in (q.x, k.k, k.v)))[1:]

    def add(total: Any, s: Softmax, first: Any, length: int) -> Any:
        """The gradients with those through the keys [first, first + length) added to them."""
        d_q, d_k, d_v = through(s, _slice(k, first, length))
        insert = lax.dynamic_update_slice_in_dim
        return total[0] + d_q, insert(total[1], d_k, first, axis=1), insert(total[2], d_v, first, axis=1)

    if layout.block:
        block, own = layout.block, q.pos[0] // layout.block
        total = add(zeros, s, own * block, block)
        return lax.fori_loop(0, own, lambda i, total: add(total, _unmasked(s), i * block, block), total)
    total = zeros
    for first, length in zip(_starts(layout.parts), layout.parts, strict=True):
        visible = s.mask.any_visible(q.pos, k.pos[first : first + length], None, None)
        added = lambda total, first=first, length=length: add(total, _unmasked(s), first, length)  # noqa: E731
        total = lax.cond(visible, added, lambda total: total, total)
    return total
