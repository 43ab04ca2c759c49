"""The published algorithms in NumPy and float64, one replica after the other."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def eight_bits(x, dtype, block=None, root=False):
    """Rounded as in MX formats: blocks of the last dim share a power of two."""
    x = np.sqrt(np.float32(x)) if root else np.float32(x)
    size = block if block and x.shape[-1] % block == 0 else x.shape[-1]
    blocks = x.reshape(*x.shape[:-1], -1, size)
    largest = np.abs(blocks).max(-1, keepdims=True)
    _, e = np.frexp(largest)  # largest = m 2^e with 0.5 <= m < 1
    headroom = 7 if root or dtype != "int8" else 6
    scale = np.where(largest > 0, np.ldexp(1.0, e - 1 - headroom), 1.0)
    y = blocks / scale
    if root:
        y = np.clip(np.rint(y), np.where(blocks > 0, 1, 0), 255)
    elif dtype == "int8":
        y = np.clip(np.rint(y), -127, 127)
    else:
        y = np.float32(y).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    y = (y * scale).reshape(x.shape)
    return y * y if root else y


def sign(x):
    """Per replica; per layer for arrays of three dims."""
    dims = tuple(range(1 if x.ndim > 2 else 0, x.ndim))
    return np.where(x >= 0, 1.0, -1.0) * np.abs(x).mean(dims, keepdims=True)


def threshold(x, size):
    """Strom 2015, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, algorithm 1: ``±size`` is sent for an
    element of the residual that has at least this size, and subtracted from it."""
    return np.where(x >= size, size, np.where(x <= -size, -size, 0.0))


def top_k(x, fraction):
    """Rows of the last dim."""
    k = max(1, round(fraction * x.shape[-1]))
    kept = np.argsort(-np.abs(x), axis=-1, kind="stable")[..., :k]
    out = np.zeros_like(x)
    np.put_along_axis(out, kept, np.take_along_axis(x, kept, -1), -1)
    return out


CODES = {
    "int8": lambda x: eight_bits(x, "int8"),
    "float8_e4m3fn": lambda x: eight_bits(x, "float8_e4m3fn"),
    "sign": sign,
    "topk:0.1": lambda x: top_k(x, 0.1),
    "threshold:0.5": lambda x: threshold(x, 0.5),
}


def coded_mean(gradients, errors, code, weights, feedback=True):
    """One array of each replica → (the mean, the next errors)."""
    total, next_errors = 0.0, []
    for g, e, w in zip(gradients, errors, weights, strict=True):
        if w == 0:
            next_errors.append(e)
            continue
        a = g + e if feedback else g
        sent = CODES[code](a)
        total = total + w * sent
        next_errors.append(a - sent)
    return total / sum(weights), next_errors


def powersgd(gradients, errors, q):
    """Vogels et al. 2019, algorithms 1 and 2, for matrices [rows, columns]."""
    matrices = [np.float64(g) + e for g, e in zip(gradients, errors, strict=True)]
    p = np.mean([m @ q for m in matrices], 0)
    p = np.linalg.qr(p)[0]
    q = np.mean([m.T @ p for m in matrices], 0)
    return p @ q.T, [m - p @ q.T for m in matrices], q


def adasum(gradients):
    """Maleki et al. 2021: pairs of neighbours, then pairs of pairs."""
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    a, b = adasum(gradients[:half]), adasum(gradients[half:])
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


def gaia(params, updates, waiting, threshold):
    """Hsieh et al. 2017, Gaia, section 4: a data center accumulates its updates of an element, and sends the sum when it is above
    a share of the weight. Of one array: lists over data centers → (the next parameters, what is still accumulated)."""
    sent, rest = [], []
    for p, u, w in zip(params, updates, waiting, strict=True):
        total = w + u
        significant = np.abs(total / p) > threshold
        sent.append(np.where(significant, total, 0.0))
        rest.append(np.where(significant, 0.0, total))
    others = [[x for s, x in enumerate(sent) if s != r] for r in range(len(params))]
    return [p + u + sum(x) for p, u, x in zip(params, updates, others, strict=True)], rest
