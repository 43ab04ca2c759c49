"""Cross-entropy of a product with a large vocabulary: its logits are made once, and are never whole in float32."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..compat.jax import default_promotion
from ..errors import UnsupportedError

WORDS = 16384
"""Columns of the vocabulary whose logits are held at a time, unless the number of chunks is given."""


@default_promotion()
def cross_entropy(
    logits: jax.Array | tuple[jax.Array, jax.Array], labels: jax.Array, *, mask: jax.Array | None = None,
    ignore: int | None = None, z_loss: float = 0.0, label_smoothing: float = 0.0, over: Literal["vocab", "tokens"] = "vocab",
    chunks: int | None = None,
) -> jax.Array:  # fmt: skip
    """The mean cross-entropy in nats of labels, over the tokens that count.

    Of a pair (hidden, kernel), logits are made chunk by chunk, and once: not again on the way back, as with ``jax.checkpoint``.
    What is kept for the way back, on top of hidden and kernel:

    - ``over="vocab"``: the exponentials of all logits in hidden's dtype, [..., seq, vocab]. The kernel and its gradient are
      there a chunk at a time: under FSDP, chunks are gathered and their gradients scattered one after the other.
    - ``over="tokens"``: the gradients, made with the loss; that of the kernel in float32, [embed, vocab] as the layout splits it
      (whole along a dim that only the weights are split over, as ``embed`` under FSDP). Logits are never all there.

    The first is smaller while a device has fewer tokens than some 3 × embed. Both send the same (but ``over="tokens"`` under
    ``lowering="jit"``: there the kernel's gradient is summed over devices in every chunk), and a vocabulary that is split over
    devices stays split: the label's logit is picked by comparing, not by indexing. Logits and sums are float32.

    Args:
      logits: [..., seq, vocab], or (hidden [..., seq, embed], kernel [embed, vocab]), whose product the logits are; of an embedding
        [vocab, embed] that serves as both, ``(hidden, embedding.T)``.
      labels: integers, [..., seq].
      mask: what each token counts, [..., seq]: booleans or floats; None: 1. It has no derivative.
      ignore: a label whose tokens do not count (-100 is usual).
      z_loss: this part of ``(log Z)**2`` is added to the loss of each token, Z the sum of the exponentials (PaLM: 1e-4).
      label_smoothing: the share of a label that goes to all of the vocabulary alike, 0 to 1.
      over, chunks: of a pair. Word v is in chunk ``v % chunks``, token t of a sequence in chunk ``t % chunks`` (so that what is
        split stays split). Of a number that does not divide, their greatest common divisor is taken. None: as many as leave 16,384
        words at a time, or as large a part of the logits.

    Returns:
      A float32 scalar; 0 where no token counts.

    Raises:
      UnsupportedError: shapes, or an ``over``, that do not fit.
    """
    hidden, kernel = logits if isinstance(logits, tuple) else (logits, None)
    tokens = tuple(hidden.shape[:-1])
    fits = labels.shape == tokens and (mask is None or mask.shape == tokens) and labels.ndim > 0
    if not fits or (kernel is not None and (kernel.ndim != 2 or kernel.shape[0] != hidden.shape[-1])):
        shapes = [x.shape for x in (hidden, kernel, labels) if x is not None]
        raise UnsupportedError(
            f"cross_entropy: these shapes do not fit: {', '.join(map(str, shapes))}, mask {None if mask is None else mask.shape}",
            fixes=[
                "logits [..., seq, vocab], or (hidden [..., seq, embed], kernel [embed, vocab]); labels and mask [..., seq]"
            ],
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise UnsupportedError(
            f"cross_entropy: labels are integers, not {labels.dtype}", fixes=["labels.astype(jnp.int32)"]
        )
    if over not in ("vocab", "tokens"):
        raise UnsupportedError(
            f"cross_entropy: chunks are over 'vocab' or 'tokens', not over {over!r}",
            fixes=['over="vocab" or over="tokens"'],
        )
    weights = jnp.ones(tokens, jnp.float32) if mask is None else mask.astype(jnp.float32)
    if ignore is not None:
        weights = jnp.where(labels == ignore, 0.0, weights)
    weights = jax.lax.stop_gradient(weights)
    total = weights.sum()
    weights = weights / jnp.where(total == 0, 1.0, total)
    label = 1 - label_smoothing
    if kernel is None:
        loss: Any = _of_logits(z_loss, label, hidden, labels, weights)
    elif over == "tokens":
        n = -(-kernel.shape[1] // WORDS) if chunks is None else max(1, chunks)
        loss = _over_tokens(z_loss, label, math.gcd(n, labels.shape[-1]), hidden, kernel, labels, weights)
    else:
        sums: Any = _over_vocab(_divisor(chunks, kernel.shape[1]), hidden, kernel, labels)
        log_z, chosen = sums
        loss = (weights * (log_z - label * chosen + z_loss * log_z**2)).sum()
    if label_smoothing:  # the mean of a token's logits
        mean = hidden.mean(-1, jnp.float32) if kernel is None else hidden @ kernel.mean(-1, jnp.float32)
        loss -= label_smoothing * (weights * mean).sum()
    return loss


def _divisor(chunks: int | None, vocab: int) -> int:
    """How many chunks of a vocabulary: what divides it of a number that is given, else the fewest of few enough words."""
    if chunks is not None:
        return math.gcd(max(1, chunks), vocab)
    least = -(-vocab // WORDS)
    return next((n for n in range(least, 8 * least) if vocab % n == 0), 1)


def _parts(
    z: float, label: float, logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(loss, log Z, where the label is) of float32 logits; ``label``: what the label's logit counts."""
    top = logits.max(-1, keepdims=True)
    z_log = (top + jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
    hit = labels[..., None] == jnp.arange(logits.shape[-1], dtype=labels.dtype)
    chosen = jnp.where(hit, logits, 0.0).sum(-1)
    return (weights * (z_log - label * chosen + z * z_log**2)).sum(), z_log, hit


def _slope(
    z: float, label: float, logits: jax.Array, z_log: jax.Array, hit: jax.Array, weights: jax.Array
) -> jax.Array:
    """The derivative of the loss by float32 logits."""
    soft = jnp.exp(logits - z_log[..., None]) * (1 + 2 * z * z_log)[..., None]
    return weights[..., None] * (soft - jnp.where(hit, label, 0.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_logits(z: float, label: float, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    return _parts(z, label, logits.astype(jnp.float32), labels, weights)[0]


@default_promotion()
def _logits_forward(
    z: float, label: float, logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, Any]:
    loss, z_log, _ = _parts(z, label, logits.astype(jnp.float32), labels, weights)
    return loss, (logits, z_log, labels, weights)


@default_promotion()
def _logits_backward(z: float, label: float, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    logits, z_log, labels, weights = saved
    hit = labels[..., None] == jnp.arange(logits.shape[-1], dtype=labels.dtype)
    d = g * _slope(z, label, logits.astype(jnp.float32), z_log, hit, weights)
    return d.astype(logits.dtype), _no_derivative(labels), jnp.zeros_like(weights)


_of_logits.defvjp(_logits_forward, _logits_backward)


def _no_derivative(labels: jax.Array) -> Any:
    return np.zeros(labels.shape, jax.dtypes.float0)


def _in_chunks(n: int, x: jax.Array, axis: int) -> jax.Array:
    """[…, size, …] → [n, …, size / n, …], every n-th together."""
    shape = (*x.shape[:axis], x.shape[axis] // n, n, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _whole(parts: jax.Array, axis: int) -> jax.Array:
    """:func:`_in_chunks`, undone."""
    x = jnp.moveaxis(parts, 0, axis + 1)
    return x.reshape((*x.shape[:axis], -1, *x.shape[axis + 2 :]))


def _dot(x: jax.Array, y: jax.Array, over: tuple[Any, Any]) -> jax.Array:
    return jax.lax.dot_general(x, y, (over, ((), ())), preferred_element_type=jnp.float32)


def _logits_of(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    return _dot(hidden, kernel, ((hidden.ndim - 1,), (0,)))


# -- chunks of the vocabulary: what is kept is the exponentials


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_vocab(n: int, hidden: jax.Array, kernel: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log Z, the label's logit), float32 [..., seq], in ``n`` chunks of the vocabulary."""
    return _vocab_sums(n, hidden, kernel, labels, keep=False)[0]


def _words(n: int, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    return _in_chunks(n, jnp.arange(kernel.shape[1], dtype=labels.dtype), 0)


def _vocab_sums(
    n: int, hidden: jax.Array, kernel: jax.Array, labels: jax.Array, keep: bool
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """(log Z, the label's logit), and if they are to be kept (exponentials, the maximum below which they are) of each chunk.

    With a running maximum and sum as in Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018).
    """

    def add(carry: tuple[jax.Array, ...], chunk: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, ...], Any]:
        largest, total, chosen = carry
        part, word = chunk
        logits = _logits_of(hidden, part)
        top = jnp.maximum(largest, logits.max(-1))
        exps = jnp.exp(logits - top[..., None])
        chosen += jnp.where(word == labels[..., None], logits, 0.0).sum(-1)
        total = total * jnp.exp(largest - top) + exps.sum(-1)
        return (top, total, chosen), (exps.astype(hidden.dtype), top) if keep else None

    zero = jnp.zeros(labels.shape, jnp.float32)
    chunks = _in_chunks(n, kernel, 1), _words(n, kernel, labels)
    (top, total, chosen), kept = jax.lax.scan(add, (zero - jnp.inf, zero, zero), chunks)
    return (top + jnp.log(total), chosen), kept


@default_promotion()
def _vocab_forward(n: int, hidden: jax.Array, kernel: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
    sums, kept = _vocab_sums(n, hidden, kernel, labels, keep=True)
    return sums, (hidden, kernel, labels, sums, kept)


@default_promotion()
def _vocab_backward(n: int, saved: Any, g: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    hidden, kernel, labels, (log_z, chosen), (exps, tops) = saved
    g_z, g_chosen = g
    rows = tuple(range(labels.ndim))
    at_label = g_z * jnp.exp(chosen - log_z) + g_chosen

    def add(d_hidden: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        part, word, exp, top = chunk
        soft = exp.astype(jnp.float32) * (g_z * jnp.exp(top - log_z))[..., None]
        d = jnp.where(word == labels[..., None], at_label[..., None], soft).astype(hidden.dtype)
        d_part = jax.lax.dot_general(hidden, d, ((rows, rows), ((), ())), preferred_element_type=kernel.dtype)
        return d_hidden + _dot(d, part, ((d.ndim - 1,), (1,))), d_part

    chunks = _in_chunks(n, kernel, 1), _words(n, kernel, labels), exps, tops
    d_hidden, d_parts = jax.lax.scan(add, jnp.zeros(hidden.shape, jnp.float32), chunks)
    return d_hidden.astype(hidden.dtype), _whole(d_parts, 1), _no_derivative(labels)


_over_vocab.defvjp(_vocab_forward, _vocab_backward)


# -- chunks of the tokens: what is kept is the gradients


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _over_tokens(
    z: float, smooth: float, n: int, hidden: jax.Array, kernel: jax.Array, labels: jax.Array, weights: jax.Array
) -> jax.Array:
    def add(loss: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x, label, weight = chunk
        return loss + _parts(z, smooth, _logits_of(x, kernel), label, weight)[0], None

    seq = labels.ndim - 1
    return jax.lax.scan(
        add, jnp.zeros((), jnp.float32), tuple(_in_chunks(n, x, seq) for x in (hidden, labels, weights))
    )[0]


@default_promotion()
def _tokens_forward(
    z: float, smooth: float, n: int, hidden: jax.Array, kernel: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, Any]:
    seq, rows = labels.ndim - 1, tuple(range(labels.ndim))

    def add(carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        (total, d_kernel), (x, label, weight) = carry, chunk
        logits = _logits_of(x, kernel)
        loss, z_log, hit = _parts(z, smooth, logits, label, weight)
        d = _slope(z, smooth, logits, z_log, hit, weight).astype(hidden.dtype)
        d_x = jax.lax.dot_general(d, kernel, (((d.ndim - 1,), (1,)), ((), ())))
        return (total + loss, d_kernel + _dot(x, d, (rows, rows))), d_x.astype(hidden.dtype)

    start = jnp.zeros((), jnp.float32), jnp.zeros(kernel.shape, jnp.float32)
    (loss, d_kernel), d_x = jax.lax.scan(add, start, tuple(_in_chunks(n, x, seq) for x in (hidden, labels, weights)))
    return loss, (_whole(d_x, seq), d_kernel.astype(kernel.dtype), labels, weights)


@default_promotion()
def _tokens_backward(z: float, smooth: float, n: int, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    d_x, d_kernel, labels, weights = saved
    scaled = ((g * d.astype(jnp.float32)).astype(d.dtype) for d in (d_x, d_kernel))
    return *scaled, _no_derivative(labels), jnp.zeros_like(weights)


_over_tokens.defvjp(_tokens_forward, _tokens_backward)
