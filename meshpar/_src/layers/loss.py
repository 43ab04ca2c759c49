"""Cross-entropy over a large vocabulary: logits are computed once, chunk by chunk, and never stored completely in float32."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UnsupportedError
from ..compat.jax import default_promotion

MAX_CHUNK_WORDS = 16384
"""Largest number of vocabulary entries per chunk, unless the number of chunks is given."""


@default_promotion()
def cross_entropy(
    logits: jax.Array | tuple[jax.Array, jax.Array], labels: jax.Array, *, mask: jax.Array | None = None,
    ignore: int | None = None, z_loss: float = 0.0, label_smoothing: float = 0.0, over: Literal["vocab", "tokens"] = "vocab",
    chunks: int | None = None,
) -> jax.Array:  # fmt: skip
    """The mean cross-entropy of labels in nats, weighted by ``mask``.

    For a pair (hidden, kernel), logits are computed chunk by chunk and once: the backward pass does not recompute them, as it would
    under ``jax.checkpoint``. Saved for the backward pass, in addition to hidden and kernel:

    - ``over="vocab"``: the exponentials of all logits in hidden's dtype, [..., seq, vocab]. The kernel and its gradient are live
      one chunk at a time: under FSDP, chunks are all-gathered and their gradients reduce-scattered one after the other.
    - ``over="tokens"``: the gradients, computed with the loss; the kernel's in float32, [embed, vocab], with the kernel's layout
      (replicated along a dim that only weights are sharded over, as ``embed`` under FSDP). Logits are live one chunk at a time.

    The first needs less memory while a device has fewer than about 3 × embed tokens. Both send the same bytes, except for
    ``over="tokens"`` under ``lowering="jit"``, where the kernel's gradient is reduced over devices in every chunk. A sharded
    vocabulary stays sharded: the label's logit is selected by comparison, not by indexing. Logits and their reductions are float32.

    Args:
      logits: [..., seq, vocab], or (hidden [..., seq, embed], kernel [embed, vocab]), whose matmul gives the logits; with tied
        embeddings [vocab, embed], ``(hidden, embedding.T)``.
      labels: integers, [..., seq].
      mask: weight of each token, [..., seq]: booleans or floats; None: 1. It has no derivative.
      ignore: a label whose tokens have weight 0 (-100 is usual).
      z_loss: factor of ``(log Z)**2`` in the loss of each token; Z is the sum of the exponentials (PaLM: 1e-4).
      label_smoothing: fraction of each label that is spread uniformly over the vocabulary, 0 to 1.
      over, chunks: of a pair: the dim that is chunked, and the number of chunks. Word v is in chunk ``v % chunks``, token t of a
        sequence in chunk ``t % chunks``, so that sharded dims stay sharded. If the number does not divide the size, their greatest
        common divisor is used. None: as many chunks as leave 16,384 words in each, or the same fraction of the logits.

    Returns:
      A float32 scalar; 0 if all weights are 0.

    Raises:
      UnsupportedError: shapes that do not fit, or an unknown ``over``.

    Example:
      >>> hidden, kernel, labels = jnp.ones((4, 8, 16)), jnp.zeros((16, 32)), jnp.zeros((4, 8), int)
      >>> loss = mp.layers.cross_entropy((hidden, kernel), labels, mask=labels >= 0)
      >>> bool(jnp.isclose(loss, jnp.log(32)))
      True
    """
    hidden, kernel = logits if isinstance(logits, tuple) else (logits, None)
    tokens = tuple(hidden.shape[:-1])
    _check(hidden, kernel, labels, mask, over)
    if labels.dtype.itemsize < 4:  # cannot count a larger vocabulary
        labels = labels.astype(jnp.int32)
    weights = jnp.ones(tokens, jnp.float32) if mask is None else mask.astype(jnp.float32)
    if ignore is not None:
        weights = jnp.where(labels == ignore, 0.0, weights)
    weights = jax.lax.stop_gradient(weights)
    total = weights.sum()
    weights = weights / jnp.where(total == 0, 1.0, total)
    terms = _Terms(z_loss, 1 - label_smoothing)
    if kernel is None:
        loss: Any = _of_logits(terms, hidden, labels, weights)
    elif over == "tokens":
        n = -(-kernel.shape[1] // MAX_CHUNK_WORDS) if chunks is None else max(1, chunks)
        loss = _over_tokens(terms, math.gcd(n, labels.shape[-1]), hidden, kernel, labels, weights)
    else:
        pair: Any = _over_vocab(_divisor(chunks, kernel.shape[1]), hidden, kernel, labels)
        log_z, chosen = pair
        loss = (weights * (log_z - terms.label * chosen + z_loss * log_z**2)).sum()
    if label_smoothing:  # the mean of a token's logits
        mean = hidden.mean(-1, jnp.float32) if kernel is None else hidden @ kernel.mean(-1, jnp.float32)
        loss -= label_smoothing * (weights * mean).sum()
    return loss


def _check(hidden: jax.Array, kernel: jax.Array | None, labels: jax.Array, mask: jax.Array | None, over: str) -> None:
    """Check the arguments of :func:`cross_entropy`; ``hidden`` are the logits if there is no ``kernel``.

    Raises:
      UnsupportedError: shapes that do not fit, or an unknown ``over``.
    """
    tokens = tuple(hidden.shape[:-1])
    fits = labels.shape == tokens and (mask is None or mask.shape == tokens) and labels.ndim > 0
    if not fits or (kernel is not None and (kernel.ndim != 2 or kernel.shape[0] != hidden.shape[-1])):
        shapes = ", ".join(str(x.shape) for x in (hidden, kernel, labels) if x is not None)
        text = f"these shapes do not fit: {shapes}, mask {None if mask is None else mask.shape}"
        fix = "logits [..., seq, vocab], or (hidden [..., seq, embed], kernel [embed, vocab]); labels and mask "
        fix += "[..., seq]"
    elif not jnp.issubdtype(labels.dtype, jnp.integer):
        text, fix = f"labels are integers, not {labels.dtype}", "labels.astype(jnp.int32)"
    elif over not in ("vocab", "tokens"):
        text, fix = f"chunks are over 'vocab' or 'tokens', not over {over!r}", 'over="vocab" or over="tokens"'
    else:
        return
    raise UnsupportedError(f"mp.layers.cross_entropy: {text}", fixes=[fix])


def _divisor(chunks: int | None, vocab: int) -> int:
    """Number of chunks of a vocabulary: the greatest common divisor with a given number, else the fewest chunks of equal size with
    at most :data:`MAX_CHUNK_WORDS` words; 1 if no small number divides."""
    if chunks is not None:
        return math.gcd(max(1, chunks), vocab)
    least = -(-vocab // MAX_CHUNK_WORDS)
    return next((n for n in range(least, 8 * least) if vocab % n == 0), 1)


class _Terms(NamedTuple):
    """The terms of the loss of a token: the weight of log² Z, and the weight of the logit of its label."""

    z: float
    label: float

    def loss(self, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        """(loss, log Z [..., seq], whether a word is the label [..., seq, vocab]) of float32 logits."""
        top = logits.max(-1, keepdims=True)
        z_log = (top + jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
        hit = labels[..., None] == jnp.arange(logits.shape[-1], dtype=labels.dtype)
        chosen = jnp.where(hit, logits, 0.0).sum(-1)
        return (weights * (z_log - self.label * chosen + self.z * z_log**2)).sum(), z_log, hit

    def slope(self, logits: jax.Array, z_log: jax.Array, hit: jax.Array, weights: jax.Array) -> jax.Array:
        """The derivative of the loss with respect to float32 logits, [..., seq, vocab]."""
        soft = jnp.exp(logits - z_log[..., None]) * (1 + 2 * self.z * z_log)[..., None]
        return weights[..., None] * (soft - jnp.where(hit, self.label, 0.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_logits(terms: _Terms, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted loss of logits [..., seq, vocab]; the backward pass saves log Z, not the softmax."""
    return terms.loss(logits.astype(jnp.float32), labels, weights)[0]


@default_promotion()
def _logits_forward(terms: _Terms, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
    loss, z_log, _ = terms.loss(logits.astype(jnp.float32), labels, weights)
    return loss, (logits, z_log, labels, weights)


@default_promotion()
def _logits_backward(terms: _Terms, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    logits, z_log, labels, weights = saved
    hit = labels[..., None] == jnp.arange(logits.shape[-1], dtype=labels.dtype)
    d = g * terms.slope(logits.astype(jnp.float32), z_log, hit, weights)
    return d.astype(logits.dtype), _no_derivative(labels), jnp.zeros_like(weights)


_of_logits.defvjp(_logits_forward, _logits_backward)


def _no_derivative(labels: jax.Array) -> Any:
    return np.zeros(labels.shape, jax.dtypes.float0)


def _split_chunks(n: int, x: jax.Array, axis: int) -> jax.Array:
    """Split a dim into ``n`` strided chunks: […, size, …] → [n, …, size / n, …]; chunk i has the elements i, i + n, …"""
    shape = (*x.shape[:axis], x.shape[axis] // n, n, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _merge_chunks(parts: jax.Array, axis: int) -> jax.Array:
    """The inverse of :func:`_split_chunks`."""
    x = jnp.moveaxis(parts, 0, axis + 1)
    return x.reshape((*x.shape[:axis], -1, *x.shape[axis + 2 :]))


def _dot(x: jax.Array, y: jax.Array, over: tuple[Any, Any]) -> jax.Array:
    return jax.lax.dot_general(x, y, (over, ((), ())), preferred_element_type=jnp.float32)


def _logits_of(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    return _dot(hidden, kernel, ((hidden.ndim - 1,), (0,)))


# -- chunks of the vocabulary: the exponentials are saved


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_vocab(n: int, hidden: jax.Array, kernel: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log Z, the label's logit), each float32 [..., seq], computed in ``n`` chunks of the vocabulary."""
    return _vocab_logsumexp(n, hidden, kernel, labels, save=False)[0]


def _words(n: int, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    return _split_chunks(n, jnp.arange(kernel.shape[1], dtype=labels.dtype), 0)


def _vocab_logsumexp(
    n: int, hidden: jax.Array, kernel: jax.Array, labels: jax.Array, save: bool
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """((log Z, the label's logit), residuals): with ``save``, for each chunk (exponentials relative to the running maximum, that
    maximum).

    With a running maximum and sum as in Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018).
    """

    def add(carry: tuple[jax.Array, ...], chunk: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, ...], Any]:
        """Scan body over chunks of the vocabulary.

        Args:
          carry: running maximum of the logits, sum of their exponentials relative to it, and the label's logit, each
              [..., seq].
          chunk: the chunk's columns of ``kernel`` [embed, chunk] and their vocabulary indices [chunk].

        Returns:
          The new carry, and with ``save`` the exponentials [..., seq, chunk] and the maximum that they are relative to,
          else None.
        """
        largest, total, chosen = carry
        part, word = chunk
        logits = _logits_of(hidden, part)
        top = jnp.maximum(largest, logits.max(-1))
        exps = jnp.exp(logits - top[..., None])
        chosen += jnp.where(word == labels[..., None], logits, 0.0).sum(-1)
        total = total * jnp.exp(largest - top) + exps.sum(-1)
        return (top, total, chosen), (exps.astype(hidden.dtype), top) if save else None

    zero = jnp.zeros(labels.shape, jnp.float32)
    chunks = _split_chunks(n, kernel, 1), _words(n, kernel, labels)
    (top, total, chosen), residuals = jax.lax.scan(add, (zero - jnp.inf, zero, zero), chunks)
    return (top + jnp.log(total), chosen), residuals


@default_promotion()
def _vocab_forward(n: int, hidden: jax.Array, kernel: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
    result, residuals = _vocab_logsumexp(n, hidden, kernel, labels, save=True)
    return result, (hidden, kernel, labels, result, residuals)


@default_promotion()
def _vocab_backward(n: int, saved: Any, g: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    """Backward pass of :func:`_over_vocab`: the cotangents of ``hidden``, ``kernel`` and ``labels`` (float0).

    Args:
      n: number of chunks of the vocabulary.
      saved: residuals of :func:`_vocab_forward`.
      g: cotangents of log Z and of the label's logit, each [..., seq].
    """
    hidden, kernel, labels, (log_z, chosen), (exps, tops) = saved
    g_z, g_chosen = g
    rows = tuple(range(labels.ndim))
    at_label = g_z * jnp.exp(chosen - log_z) + g_chosen

    def add(d_hidden: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """Scan body: (cotangent of ``hidden`` with the chunk's part added, cotangent of the chunk's columns of
        ``kernel``).

        Args:
          d_hidden: float32 [..., seq, embed].
          chunk: columns [embed, chunk], vocabulary indices [chunk], saved exponentials [..., seq, chunk], and their
              maximum.
        """
        part, word, exp, top = chunk
        soft = exp.astype(jnp.float32) * (g_z * jnp.exp(top - log_z))[..., None]
        d = jnp.where(word == labels[..., None], at_label[..., None], soft).astype(hidden.dtype)
        d_part = jax.lax.dot_general(hidden, d, ((rows, rows), ((), ())), preferred_element_type=kernel.dtype)
        return d_hidden + _dot(d, part, ((d.ndim - 1,), (1,))), d_part

    chunks = _split_chunks(n, kernel, 1), _words(n, kernel, labels), exps, tops
    d_hidden, d_parts = jax.lax.scan(add, jnp.zeros(hidden.shape, jnp.float32), chunks)
    return d_hidden.astype(hidden.dtype), _merge_chunks(d_parts, 1), _no_derivative(labels)


_over_vocab.defvjp(_vocab_forward, _vocab_backward)


# -- chunks of the tokens: the gradients are saved


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _over_tokens(terms: _Terms, n: int, hidden: Any, kernel: Any, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """The loss in ``n`` chunks of the tokens."""

    def add(loss: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x, label, weight = chunk
        return loss + terms.loss(_logits_of(x, kernel), label, weight)[0], None

    chunks = tuple(_split_chunks(n, x, labels.ndim - 1) for x in (hidden, labels, weights))
    return jax.lax.scan(add, jnp.zeros((), jnp.float32), chunks)[0]


@default_promotion()
def _tokens_forward(
    terms: _Terms, n: int, hidden: jax.Array, kernel: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, Any]:
    """Forward pass of :func:`_over_tokens`: the loss (float32 scalar), and its gradients as residuals.

    The residuals are the gradients by ``hidden`` and ``kernel`` for a cotangent of 1, then ``labels`` and ``weights``.
    """
    seq, rows = labels.ndim - 1, tuple(range(labels.ndim))

    def add(carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        """Scan body over chunks of the sequence: (loss, gradient by ``kernel``) so far, and the gradient by the chunk
        of ``hidden``."""
        (total, d_kernel), (x, label, weight) = carry, chunk
        logits = _logits_of(x, kernel)
        loss, z_log, hit = terms.loss(logits, label, weight)
        d = terms.slope(logits, z_log, hit, weight).astype(hidden.dtype)
        d_x = jax.lax.dot_general(d, kernel, (((d.ndim - 1,), (1,)), ((), ())))
        return (total + loss, d_kernel + _dot(x, d, (rows, rows))), d_x.astype(hidden.dtype)

    start = jnp.zeros((), jnp.float32), jnp.zeros(kernel.shape, jnp.float32)
    (loss, d_kernel), d_x = jax.lax.scan(add, start, tuple(_split_chunks(n, x, seq) for x in (hidden, labels, weights)))
    return loss, (_merge_chunks(d_x, seq), d_kernel.astype(kernel.dtype), labels, weights)


@default_promotion()
def _tokens_backward(terms: _Terms, n: int, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    d_x, d_kernel, labels, weights = saved
    scaled = ((g * d.astype(jnp.float32)).astype(d.dtype) for d in (d_x, d_kernel))
    return *scaled, _no_derivative(labels), jnp.zeros_like(weights)


_over_tokens.defvjp(_tokens_forward, _tokens_backward)
