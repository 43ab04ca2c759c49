"""Attention on one device by a library whose masks need no positions: one call if queries and keys are aligned, else a
call for each block of keys that is visible, merged by the log-sum-exps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels._numerics import wide
from meshpar_kernels.attention.flash import Keys, Queries, Softmax, merge, nothing
from meshpar_kernels.attention.masks import Mask

Forward = Callable[[Softmax, Queries, Keys], tuple[jax.Array, jax.Array]]
Backward = Callable[[Softmax, Keys], tuple[jax.Array, jax.Array, jax.Array]]


class Layout(NamedTuple):
    """Facts known at trace time about the positions of queries and keys.

    Attributes:
      aligned: query i and key i have the same position, and positions ascend by one.
      parts: lengths of the runs of keys, each of which is visible to all queries or to none; (): not known.
      block: the keys are all tokens in the order of their positions, cut to this length, and the queries are the
        tokens of one block; 0: not known.
    """

    aligned: bool = False
    parts: tuple[int, ...] = ()
    block: int = 0


def mask_reasons(s: Softmax, q: Queries, k: Keys, layout: Layout) -> list[str]:
    """Reasons why masks by the order of queries and keys are not the mask by their positions; empty if they are."""
    if not s.mask.causal or (layout.aligned and q.x.shape[1] == k.k.shape[1]):
        return []
    if s.mask.window is None and (layout.parts or layout.block):
        return []
    return ["a causal mask of queries and keys that are neither aligned nor chunked"]


def _unmasked(s: Softmax) -> Softmax:
    return dataclasses.replace(s, mask=Mask())


def _slice(k: Keys, first: Any, length: int) -> Keys:
    """The keys [first, first + length), without segment ids."""
    heads, values = (lax.dynamic_slice_in_dim(a, first, length, axis=1) for a in (k.k, k.v))
    return Keys(heads, values, lax.dynamic_slice_in_dim(k.pos, first, length), None)


def _starts(parts: tuple[int, ...]) -> list[int]:
    return [sum(parts[:n]) for n in range(len(parts))]


def forward(call: Forward, s: Softmax, q: Queries, k: Keys, *, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """`flash.forward` by calls of a library, each with its own mask of aligned queries and keys, or without a mask."""
    if not s.mask.causal or layout.aligned:
        return call(s, q, k)
    if layout.block:
        own = q.pos[0] // layout.block

        def add(i: Any, done: Any) -> Any:
            return merge(done, call(_unmasked(s), q, _slice(k, i * layout.block, layout.block)))

        return lax.fori_loop(0, own, add, call(s, q, _slice(k, own * layout.block, layout.block)))
    done = nothing(q.x, k.v.shape[3])
    for first, length in zip(_starts(layout.parts), layout.parts, strict=True):
        part = _slice(k, first, length)
        visible = s.mask.any_visible(q.pos, part.pos, None, None)
        merged = lambda done, part=part: merge(done, call(_unmasked(s), q, part))  # noqa: E731
        done = lax.cond(visible, merged, lambda done: done, done)
    return done


def backward(
    call: Backward, s: Softmax, q: Queries, k: Keys, *, layout: Layout
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`flash.backward` by calls of a library: `call(softmax, keys)` returns the float32 gradients of the queries, keys and
    values through these keys."""
    if not s.mask.causal or layout.aligned:
        return call(s, k)
    zeros = _compat.same_varying(q.x, *(jnp.zeros(a.shape, wide(a)) for a in (q.x, k.k, k.v)))[1:]

    def add(total: Any, s: Softmax, first: Any, length: int) -> Any:
        """The gradients with those through the keys [first, first + length) added to them."""
        d_q, d_k, d_v = call(s, _slice(k, first, length))
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
