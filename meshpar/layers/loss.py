"""Cross-entropy that holds the logits of a few tokens at a time, and makes them once."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UnsupportedError


def cross_entropy(
    logits: jax.Array | tuple[jax.Array, jax.Array], labels: jax.Array, *, mask: jax.Array | None = None,
    ignore: int | None = None, z_loss: float = 0.0, chunks: int = 1,
) -> jax.Array:  # fmt: skip
    """The mean cross-entropy in nats of labels, over the tokens that count.

    Of a pair, the gradients are made with the loss, chunk by chunk of the tokens: logits are neither made again on the way back,
    as with ``jax.checkpoint``, nor held for more tokens than a chunk has. The gradient of the kernel is added up in float32,
    [embed, vocab] as the layout splits it (whole along a dim that only the weights are split over, as ``embed`` under FSDP):
    where that is more memory than the step has, chunks of the vocabulary that are made again are the better choice.

    Sums over logits are float32. The label's logit is picked by comparing, not by indexing, so that a vocabulary that is split
    over devices stays split.

    Args:
      logits: [..., seq, vocab], or (hidden [..., seq, embed], kernel [embed, vocab]), whose product the logits are.
      labels: integers, [..., seq].
      mask: what each token counts, [..., seq]: booleans or floats; None: 1. It has no derivative.
      ignore: a label whose tokens do not count (-100 is usual).
      z_loss: this part of ``(log Z)**2`` is added to the loss of each token, Z the sum of the exponentials (PaLM: 1e-4).
      chunks: of the tokens, of a pair; token t of a sequence is in chunk ``t % chunks`` (so that a split sequence stays split). Of
        a number that does not divide the sequence their greatest common divisor is taken.

    Returns:
      A float32 scalar; 0 where no token counts.

    Raises:
      UnsupportedError: shapes that do not fit.
    """
    hidden = logits[0] if isinstance(logits, tuple) else logits
    tokens = tuple(hidden.shape[:-1])
    fits = labels.shape == tokens and (mask is None or mask.shape == tokens) and labels.ndim > 0
    if not fits or (isinstance(logits, tuple) and (logits[1].ndim != 2 or logits[1].shape[0] != hidden.shape[-1])):
        shapes = [x.shape for x in (*(logits if isinstance(logits, tuple) else (logits,)), labels)]
        raise UnsupportedError(
            f"cross_entropy: these shapes do not fit: {', '.join(map(str, shapes))}, mask {None if mask is None else mask.shape}",
            fixes=[
                "logits [..., seq, vocab], or (hidden [..., seq, embed], kernel [embed, vocab]); labels and mask [..., seq]"
            ],
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise UnsupportedError(f"cross_entropy: labels are integers, not {labels.dtype}")
    weights = jnp.ones(tokens, jnp.float32) if mask is None else mask.astype(jnp.float32)
    if ignore is not None:
        weights = jnp.where(labels == ignore, 0.0, weights)
    weights = jax.lax.stop_gradient(weights)
    total = weights.sum()
    weights = weights / jnp.where(total == 0, 1.0, total)
    if isinstance(logits, tuple):
        return _of_product(z_loss, math.gcd(max(1, chunks), labels.shape[-1]), *logits, labels, weights)
    return _of_logits(z_loss, logits, labels, weights)


def _parts(
    z: float, logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(loss, log Z, where the label is) of float32 logits."""
    top = logits.max(-1, keepdims=True)
    z_log = (top + jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
    hit = labels[..., None] == jnp.arange(logits.shape[-1], dtype=labels.dtype)
    chosen = jnp.where(hit, logits, 0.0).sum(-1)
    return (weights * (z_log - chosen + z * z_log**2)).sum(), z_log, hit


def _slope(z: float, logits: jax.Array, z_log: jax.Array, hit: jax.Array, weights: jax.Array) -> jax.Array:
    """The derivative of the loss by float32 logits."""
    soft = jnp.exp(logits - z_log[..., None]) * (1 + 2 * z * z_log)[..., None]
    return weights[..., None] * (soft - jnp.where(hit, 1.0, 0.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_logits(z: float, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    return _parts(z, logits.astype(jnp.float32), labels, weights)[0]


def _logits_forward(z: float, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
    loss, z_log, _ = _parts(z, logits.astype(jnp.float32), labels, weights)
    return loss, (logits, z_log, labels, weights)


def _logits_backward(z: float, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    logits, z_log, labels, weights = saved
    hit = labels[..., None] == jnp.arange(logits.shape[-1], dtype=labels.dtype)
    d = g * _slope(z, logits.astype(jnp.float32), z_log, hit, weights)
    return d.astype(logits.dtype), np.zeros(labels.shape, jax.dtypes.float0), jnp.zeros_like(weights)


_of_logits.defvjp(_logits_forward, _logits_backward)


def _in_chunks(n: int, x: jax.Array, axis: int) -> jax.Array:
    """[…, seq, …] → [n, …, seq / n, …], every n-th token together."""
    shape = (*x.shape[:axis], x.shape[axis] // n, n, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _logits_of(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        hidden, kernel, (((hidden.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_product(
    z: float, n: int, hidden: jax.Array, kernel: jax.Array, labels: jax.Array, weights: jax.Array
) -> jax.Array:
    def add(loss: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x, label, weight = chunk
        return loss + _parts(z, _logits_of(x, kernel), label, weight)[0], None

    seq = labels.ndim - 1
    return jax.lax.scan(add, jnp.zeros(()), tuple(_in_chunks(n, x, seq) for x in (hidden, labels, weights)))[0]


def _product_forward(
    z: float, n: int, hidden: jax.Array, kernel: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, Any]:
    seq, rows = labels.ndim - 1, tuple(range(labels.ndim))

    def add(carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        (total, d_kernel), (x, label, weight) = carry, chunk
        logits = _logits_of(x, kernel)
        loss, z_log, hit = _parts(z, logits, label, weight)
        d = _slope(z, logits, z_log, hit, weight).astype(hidden.dtype)
        d_x = jax.lax.dot_general(d, kernel, (((d.ndim - 1,), (1,)), ((), ())))
        mine = jax.lax.dot_general(x, d, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
        return (total + loss, d_kernel + mine), d_x.astype(hidden.dtype)

    start = jnp.zeros(()), jnp.zeros(kernel.shape, jnp.float32)
    (loss, d_kernel), d_x = jax.lax.scan(add, start, tuple(_in_chunks(n, x, seq) for x in (hidden, labels, weights)))
    d_x = jnp.moveaxis(d_x, 0, seq + 1).reshape(hidden.shape)
    return loss, (d_x, d_kernel.astype(kernel.dtype), labels, weights)


def _product_backward(z: float, n: int, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    d_x, d_kernel, labels, weights = saved
    scaled = ((g * d.astype(jnp.float32)).astype(d.dtype) for d in (d_x, d_kernel))
    return *scaled, np.zeros(labels.shape, jax.dtypes.float0), jnp.zeros_like(weights)


_of_product.defvjp(_product_forward, _product_backward)
