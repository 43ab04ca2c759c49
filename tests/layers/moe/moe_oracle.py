"""Routers and experts in float64 NumPy, token by token: written from the papers, sharing nothing with the package."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Expected:
    weight: np.ndarray  # float64 [T, E]; 0 where a choice was dropped or not made
    kept: np.ndarray  # bool [T, E]
    load: np.ndarray  # int [E], before drops
    dropped: int
    losses: dict[str, float] = field(default_factory=dict)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def routable(row):
    return not np.isnan(row).any() and not (row == np.inf).any() and (row > -np.inf).any()


def best(row, k):
    """The k largest above -inf; ties to the lowest."""
    order = sorted(range(len(row)), key=lambda e: (-row[e], e))
    return [e for e in order[:k] if row[e] > -np.inf]


def limit(tokens, groups, experts, k, factor):
    size = tokens // groups
    return max(1, min(size, math.ceil(size * k * factor / experts)))


def assign(choices, weights, experts, *, real, k, capacity, groups, choice_major=False):
    """choices, weights: lists a token, best first. First come, first served in each group of tokens."""
    tokens = len(choices)
    weight, kept = np.zeros((tokens, experts)), np.zeros((tokens, experts), bool)
    load = np.zeros(experts, int)
    size = tokens // groups
    most = np.inf if capacity is None else limit(tokens, groups, experts, k, capacity)
    for g in range(groups):
        seats = np.zeros(experts, int)
        queue = [(t, j) for t in range(g * size, (g + 1) * size) for j in range(len(choices[t]))]
        if choice_major:
            queue.sort(key=lambda q: (q[1], q[0]))
        for t, j in queue:
            e = choices[t][j]
            load[e] += 1
            if seats[e] < most:
                seats[e] += 1
                kept[t, e], weight[t, e] = True, weights[t][j]
    return Expected(weight, kept, load, int(real.sum()) * k - int(kept.sum()))


def balance(probability, choices, which, k, rows=None):
    """E·Σ f·P over the tokens that count; with rows, the mean over the rows of `rows` tokens."""
    tokens, experts = probability.shape
    if rows is not None:
        each = [
            balance(probability[i : i + rows], choices[i : i + rows], which[i : i + rows], k)
            for i in range(0, tokens, rows)
            if which[i : i + rows].any()
        ]
        return sum(each) / max(len(each), 1)
    n = max(which.sum(), 1)
    f, p = np.zeros(experts), np.zeros(experts)
    for t in np.flatnonzero(which):
        p += probability[t] / n
        for e in choices[t]:
            f[e] += 1 / (k * n)
    return experts * float((f * p).sum())


def z(logits, which):
    rows = logits[which]
    return float((np.log(np.exp(rows).sum(-1)) ** 2).mean()) if len(rows) else 0.0


def cv2(values):
    return float(values.var() / values.mean() ** 2) if values.mean() else 0.0


def top_k(logits, real, *, k, capacity=None, groups=1, renormalize=True, first_only=False, choice_major=False):
    which = real & np.array([routable(row) for row in logits])
    logits = np.where(which[:, None], logits, 0.0)
    p = softmax(logits)
    choices = [best(logits[t], k) if which[t] else [] for t in range(len(logits))]
    weights = []
    for t, chosen in enumerate(choices):
        w = p[t, chosen]
        weights.append(w / w.sum() if renormalize and len(w) else w)
    out = assign(
        choices, weights, p.shape[1], real=real, k=k, capacity=capacity, groups=groups, choice_major=choice_major
    )
    counted, kb = ([c[:1] for c in choices], 1) if first_only else (choices, k)
    out.losses = {"balance": balance(p, counted, which, kb), "z": z(logits, which)}
    return out


def switch(logits, real, **kw):
    return top_k(logits, real, k=1, renormalize=False, **kw)


def switch_max(logits, real, *, capacity=None, groups=1):
    """Each expert takes the tokens with the largest probabilities that chose it, up to its capacity in a group."""
    out = switch(logits, real, groups=groups)
    if capacity is None:
        return out
    tokens, experts = out.kept.shape
    size, most = tokens // groups, limit(tokens, groups, experts, 1, capacity)
    for g in range(groups):
        for e in range(experts):
            took = [t for t in range(g * size, (g + 1) * size) if out.kept[t, e]]
            for t in sorted(took, key=lambda t: (-out.weight[t, e], t))[most:]:
                out.kept[t, e], out.weight[t, e] = False, 0.0
                out.dropped += 1
    return out


def ntlb(logits, real, *, capacity=None, groups=1, stages=2):
    """Stage by stage, the tokens that have no expert yet ask their next best one."""
    out = switch(logits, real, groups=groups)
    out.weight[:], out.kept[:] = 0.0, False
    tokens, experts = out.kept.shape
    which = real & np.array([routable(row) for row in logits])
    p = softmax(np.where(which[:, None], logits, 0.0))
    size = tokens // groups
    most = size if capacity is None else limit(tokens, groups, experts, 1, capacity)
    for g in range(groups):
        full = np.zeros(experts, int)
        for stage in range(stages):
            for t in range(g * size, (g + 1) * size):
                ranked = best(logits[t], stages) if which[t] and not out.kept[t].any() else []
                if stage < len(ranked) and full[ranked[stage]] < most:
                    e = ranked[stage]
                    full[e] += 1
                    out.kept[t, e], out.weight[t, e] = True, p[t, e]
    out.dropped = int(real.sum()) - int(out.kept.sum())
    return out


def gshard(logits, real, **kw):
    return top_k(logits, real, k=2, first_only=True, choice_major=True, **kw)


def noisy_top_k(logits, real, *, k, noise, capacity=None, groups=1):
    """Without random numbers; the load loss still knows the width of the noise."""
    which = real & np.array([routable(row) for row in logits])
    experts = logits.shape[1]
    clean = np.where(which[:, None], logits, 0.0)
    width = np.log1p(np.exp(noise)) + 1e-2
    choices = [best(clean[t], k) if which[t] else [] for t in range(len(clean))]
    weights = [softmax(clean[t, c]) if c else [] for t, c in enumerate(choices)]
    importance, load = np.zeros(experts), np.zeros(experts)
    for t in np.flatnonzero(which):
        for e, w in zip(choices[t], weights[t], strict=True):
            importance[e] += w
        for e in range(experts):
            others = np.sort(np.delete(clean[t], e))[::-1]
            load[e] += 0.5 * (1 + math.erf((clean[t, e] - others[k - 1]) / width[t, e] / math.sqrt(2)))
    out = assign(choices, weights, experts, real=real, k=k, capacity=capacity, groups=groups)
    out.losses = {"importance": cv2(importance), "load": cv2(load), "z": z(clean, which)}
    return out


def deepseek_v3(logits, real, *, k, bias, expert_groups, top_groups, scale, row, capacity=None, groups=1):
    which = real & np.array([routable(r) for r in logits])
    experts = logits.shape[1]
    logits = np.where(which[:, None], logits, 0.0)
    score = 1 / (1 + np.exp(-logits))
    each = experts // expert_groups
    choices, weights = [], []
    for t in range(len(logits)):
        value = score[t] + bias
        total = [np.sort(value[g * each : (g + 1) * each])[::-1][:2].sum() for g in range(expert_groups)]
        allowed = best(np.array(total), top_groups)
        value = np.array([value[e] if e // each in allowed else -np.inf for e in range(experts)])
        chosen = best(value, k) if which[t] else []
        choices.append(chosen)
        w = score[t, chosen]
        weights.append(scale * w / w.sum() if len(w) else w)
    out = assign(choices, weights, experts, real=real, k=k, capacity=capacity, groups=groups)
    share = score / score.sum(-1, keepdims=True)
    out.losses = {"balance": balance(share, choices, which, k, rows=row), "z": z(logits, which)}
    return out


def expert_choice(logits, real, *, capacity, groups=1):
    which = real & np.array([routable(r) for r in logits])
    tokens, experts = logits.shape
    logits = np.where(which[:, None], logits, 0.0)
    p = softmax(logits)
    kept = np.zeros((tokens, experts), bool)
    size, most = tokens // groups, limit(tokens, groups, experts, 1, capacity)
    for g in range(groups):
        mine = [t for t in range(g * size, (g + 1) * size) if which[t]]
        for e in range(experts):
            for t in sorted(mine, key=lambda t: (-np.float32(p[t, e]), t))[:most]:
                kept[t, e] = True
    return Expected(
        np.where(kept, p, 0.0), kept, kept.sum(0), int((real & ~kept.any(-1)).sum()), {"z": z(logits, which)}
    )


def two_level(outer, inner, real, *, k, outer_k, capacity=None, groups=1):
    tokens, many, each = inner.shape
    usable = (outer > -np.inf) & (inner > -np.inf).any(-1)
    fine = [routable(np.concatenate([outer[t], inner[t].ravel()])) and usable[t].any() for t in range(tokens)]
    which = real & np.array(fine)
    wide = which[:, None] & usable
    outer = np.where(wide, outer, np.where(which[:, None], -np.inf, 0.0))
    inner = np.where(wide[..., None], inner, 0.0)
    po, pi = softmax(outer), softmax(inner)
    choices, weights = [], []
    for t in range(tokens):
        chosen, w = [], []
        groups_of = best(outer[t], outer_k) if which[t] else []
        for o in groups_of:
            mine = best(inner[t, o], k // outer_k)
            chosen += [o * each + i for i in mine]
            w += list(po[t, o] / po[t, groups_of].sum() * pi[t, o, mine] / pi[t, o, mine].sum())
        choices.append(chosen)
        weights.append(w)
    out = assign(choices, weights, many * each, real=real, k=k, capacity=capacity, groups=groups)
    p = (po[..., None] * pi).reshape(tokens, -1)
    out.losses = {
        "balance": balance(p, choices, which, k),
        "z": z(outer, which) + z(inner.reshape(-1, each), wide.ravel()),
    }
    return out


def experts(x, weight, gate, up, down):
    """Σ_e weight[t, e]·(silu(x·gate_e) ⊙ x·up_e)·down_e."""
    y = np.zeros_like(x)
    for t, e in zip(*np.nonzero(weight), strict=True):
        a = x[t] @ gate[e]
        y[t] += weight[t, e] * ((a / (1 + np.exp(-a)) * (x[t] @ up[e])) @ down[e])
    return y
