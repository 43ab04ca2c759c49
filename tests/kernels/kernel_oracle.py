"""The definitions of the kernels in NumPy and float64: loops, no code of the package."""

import math

import numpy as np


def route(logits, k, *, score="softmax", bias=None, groups=1, top_groups=None, group_top=2, renormalize=True, scale=1.0,
          capacity=None):  # fmt: skip
    """`expert, weight, counts, rank, offsets, dropped`, one token after the other."""
    logits = np.asarray(logits, np.float64)
    tokens, experts = logits.shape
    top_groups = groups if top_groups is None else top_groups
    expert = np.full((tokens, k), experts, np.int32)
    weight = np.zeros((tokens, k))
    rank = np.full((tokens, k), -1, np.int32)
    counts = np.zeros(experts, np.int32)
    for t, row in enumerate(logits):
        if any(math.isnan(v) or v == math.inf for v in row) or all(v == -math.inf for v in row):
            continue
        if score == "softmax":
            top = max(row)
            power = [math.exp(v - top) for v in row]
            value = [p / sum(power) for p in power]
        else:
            value = [1 / (1 + math.exp(-v)) if v > -math.inf else 0.0 for v in row]
        pick = [v + (0.0 if bias is None else float(bias[e])) for e, v in enumerate(value)]
        open_ = [row[e] > -math.inf and not math.isnan(pick[e]) for e in range(experts)]
        size = experts // groups
        group_value = []
        for g in range(groups):
            inside = [pick[e] for e in range(g * size, (g + 1) * size) if open_[e]]
            best = sorted(inside, reverse=True)[:group_top]
            group_value.append(sum(best) if best else -math.inf)
        best_groups = sorted(range(groups), key=lambda g: (-group_value[g], g))[:top_groups]
        key = list(row) if bias is None else pick
        legal = [e for e in range(experts) if open_[e] and e // size in best_groups and key[e] > -math.inf]
        chosen = sorted(legal, key=lambda e: (-key[e], e))[:k]
        total = sum(value[e] for e in chosen)
        for j, e in enumerate(chosen):
            expert[t, j] = e
            share = value[e] / total if renormalize and total > 0 else value[e]
            weight[t, j] = share * scale
            rank[t, j] = counts[e]
            counts[e] += 1
    kept = counts if capacity is None else np.minimum(counts, capacity)
    offsets = np.concatenate([[0], np.cumsum(kept)])
    return expert, weight, counts, rank, offsets, tokens * k - offsets[-1]


def buffer_rows(expert, rank, offsets):
    """Row of each choice, -1 where it has none: [T, k]."""
    rows = np.full(expert.shape, -1)
    for t, j in np.ndindex(expert.shape):
        e = expert[t, j]
        if e < len(offsets) - 1 and rank[t, j] < offsets[e + 1] - offsets[e]:
            rows[t, j] = offsets[e] + rank[t, j]
    return rows


def permute(x, rows, size, weight=None):
    out = np.zeros((size, x.shape[1]))
    for t, j in np.ndindex(rows.shape):
        if rows[t, j] >= 0:
            factor = 1.0 if weight is None else float(weight[t, j])
            out[rows[t, j]] = factor * np.asarray(x[t], np.float64)
    return out


def combine(y, rows, weight=None):
    out = np.zeros((rows.shape[0], y.shape[1]))
    for t, j in np.ndindex(rows.shape):
        if rows[t, j] >= 0:
            factor = 1.0 if weight is None else float(weight[t, j])
            out[t] += factor * np.asarray(y[rows[t, j]], np.float64)
    return out


def group_of_row(sizes, rows):
    """Group of each row, -1 for none; negative sizes count as 0, rows past the end do not exist."""
    group = [g for g, size in enumerate(sizes) for _ in range(min(max(int(size), 0), rows))]
    group = group[:rows]
    return np.array(group + [-1] * (rows - len(group)))


ACTIVATIONS = {
    None: lambda x: x,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
}


def grouped_matmul(lhs, rhs, sizes, *, transpose_rhs=False, group_offset=0, activation=None, lhs_indices=None,
                   row_scale=None, rhs_scale=None):  # fmt: skip
    lhs = np.asarray(lhs, np.float64)
    rhs = [np.asarray(r, np.float64) for r in (rhs if isinstance(rhs, tuple) else (rhs,))]
    if lhs_indices is not None:
        zero = np.zeros(lhs.shape[1])
        lhs = np.array([lhs[i] if 0 <= i < len(lhs) else zero for i in np.asarray(lhs_indices)])
    rhs = [r.swapaxes(1, 2) if transpose_rhs else r for r in rhs]
    if rhs_scale is not None:
        scales = rhs_scale if isinstance(rhs_scale, tuple) else (rhs_scale,)
        rhs = [dequantized(r, s) for r, s in zip(rhs, scales, strict=True)]
    out = np.zeros((len(lhs), rhs[0].shape[2]))
    for i, g in enumerate(group_of_row(sizes, len(lhs)) - group_offset):
        if 0 <= g < len(rhs[0]):
            value = ACTIVATIONS[activation](lhs[i] @ rhs[0][g])
            if len(rhs) == 2:
                value = value * (lhs[i] @ rhs[1][g])
            out[i] = value * (1.0 if row_scale is None else float(row_scale[i]))
    return out


def dequantized(rhs, scale):
    """[G, K, N] by [G, N] or [G, B, N]."""
    out = np.zeros(rhs.shape)
    scale = np.asarray(scale, np.float64).reshape(len(rhs), -1, rhs.shape[2])
    block = rhs.shape[1] // scale.shape[1]
    for k in range(rhs.shape[1]):
        out[:, k] = rhs[:, k] * scale[:, k // block]
    return out


def grouped_matmul_transpose(lhs, rhs, sizes, *, groups=None, group_offset=0, row_scale=None):
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    out = np.zeros((len(sizes) if groups is None else groups, lhs.shape[1], rhs.shape[1]))
    for i, g in enumerate(group_of_row(sizes, len(lhs)) - group_offset):
        if 0 <= g < len(out):
            factor = 1.0 if row_scale is None else float(row_scale[i])
            out[g] += factor * np.outer(lhs[i], rhs[i])
    return out
