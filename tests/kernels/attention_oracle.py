"""Attention by its definition, in NumPy and float64: one query, one key at a time where it matters."""

import numpy as np


def zigzag_order(total, devices):
    """The index of the token at each position, block by block."""
    blocks = np.arange(total).reshape(2 * devices, -1)
    return np.concatenate([block for i in range(devices) for block in (blocks[i], blocks[2 * devices - 1 - i])])


def visible(q_len, k_len, causal=False, window=None, q_seg=None, k_seg=None):
    """bool [B or 1, Q, K]."""
    q, k = np.arange(q_len)[:, None], np.arange(k_len)[None, :]
    seen = np.ones((1, q_len, k_len), bool)
    if causal:
        seen &= k <= q
    if window is not None:
        seen &= abs(q - k) < window
    if q_seg is not None:
        seen = seen & (q_seg[:, :, None] == k_seg[:, None, :])
    return seen


def attention(q, k, v, read, *, scale=None, softcap=None, **mask):
    """(result, gradients of Σ read·result by q, k and v); [B, S, H, D], heads of k and v repeated as needed."""
    q, k, v, read = (np.asarray(x, np.float64) for x in (q, k, v, read))
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    raw = np.einsum("bqhd,bkhd->bhqk", q, wide_k) * scale
    slope = np.ones_like(raw)
    if softcap is not None:
        slope = 1 / np.cosh(raw / softcap) ** 2
        raw = softcap * np.tanh(raw / softcap)
    seen = np.broadcast_to(visible(q.shape[1], k.shape[1], **mask)[:, None], raw.shape)
    some = seen.any(-1, keepdims=True)
    top = np.where(seen, raw, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    e = np.where(seen, np.exp(np.where(seen, raw - np.where(some, top, 0), 0)), 0)
    p = e / np.where(some, e.sum(-1, keepdims=True), 1)
    out = np.einsum("bhqk,bkhd->bqhd", p, wide_v)
    d_p = np.einsum("bqhd,bkhd->bhqk", read, wide_v)
    d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * slope * scale

    def grouped(x):
        return x.reshape(*x.shape[:2], k.shape[2], group, -1).sum(3)

    d_q = np.einsum("bhqk,bkhd->bqhd", d_s, wide_k)
    d_k = grouped(np.einsum("bhqk,bqhd->bkhd", d_s, q))
    d_v = grouped(np.einsum("bhqk,bqhd->bkhd", p, read))
    return out, (d_q, d_k, d_v)
