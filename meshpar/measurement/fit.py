"""Efficiencies of products, memory traffic and links, fitted to measured seconds.

Least squares over the logarithms of planned over measured seconds, robust against single layouts (Huber), by Gauss-Newton.
First all rates change alike; what the layouts cannot tell apart stays so, held by a weak pull, and is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

PARTS = ("products", "memory traffic", "links")
CLOSE, STEP = 1e-4, 0.02
"""Of the logarithms: where the fit ends, and what derivatives are taken over (plans jump a little where their decisions change)."""
HUBER = 0.1
"""A layout that is off by more than this part counts less and less."""


@dataclass(frozen=True)
class Fit:
    """What was fitted.

    Attributes:
      efficiencies: of products, memory traffic and links.
      planned: seconds of every layout with these.
      error: the median of |planned / measured - 1|.
      notes: what the layouts could not tell.
    """

    efficiencies: tuple[float, float, float]
    planned: tuple[float, ...]
    error: float
    notes: tuple[str, ...]


def fit(
    predict: Callable[[Sequence[float]], Sequence[float]], start: Sequence[float], measured: Sequence[float], *,
    bounds: tuple[float, float], noise: float = 0.0,
) -> Fit:  # fmt: skip
    """Fit the three efficiencies.

    Args:
      predict: efficiencies → planned seconds of every layout.
      start: efficiencies to begin with.
      measured: seconds of every layout, above 0.
      bounds: the smallest and the largest efficiency.
      noise: the part by which measured seconds are uncertain; the more, the more alike rates change.
    """
    low, high = (math.log(b) for b in bounds)
    goal = np.log(np.asarray(measured, float))
    pull = min(0.1, max(0.01, noise))

    def seconds(at: np.ndarray) -> np.ndarray:
        return np.log(np.asarray(predict([float(x) for x in np.exp(at)]), float))

    def slopes(at: np.ndarray, here: np.ndarray) -> np.ndarray:
        """[layouts, 3]: by how much the logarithm of seconds falls where that of an efficiency grows."""
        return np.stack([(here - seconds(at - STEP * unit)) / -STEP for unit in np.eye(3)], 1)

    first = np.log(np.asarray(start, float))
    common = float(np.median(seconds(first) - goal))
    alike = np.clip(first + common, low, high)
    at, here = alike, seconds(alike)

    def cost(at: np.ndarray, here: np.ndarray) -> float:
        return float(_huber(here - goal).sum() + (pull * (at - alike)) @ (pull * (at - alike)))

    for _ in range(25):
        grown = slopes(at, here)
        weight = np.sqrt(_weights(here - goal))
        matrix = np.concatenate([-weight[:, None] * grown, pull * np.eye(3)])
        right = np.concatenate([weight * (goal - here), pull * (alike - at)])
        step = _within(matrix, right, low - at, high - at)
        now, part = cost(at, here), 1.0
        while part > 0.05:
            new = np.clip(at + np.clip(part * step, -1, 1), low, high)
            there = seconds(new)
            if cost(new, there) < now:
                break
            part /= 2
        else:
            break
        done = float(np.abs(new - at).max()) < CLOSE
        at, here = new, there
        if done:
            break
    notes = _untold(slopes(at, here), 3 * pull)
    for name, x in zip(PARTS, at, strict=True):
        if x in (low, high):
            notes.append(f"{name} came out at the {'least' if x == low else 'most'} that is allowed, {math.exp(x):.2g}")
    off = float(np.median(np.abs(np.expm1(here - goal))))
    e = np.exp(at)
    return Fit((float(e[0]), float(e[1]), float(e[2])), tuple(map(float, np.exp(here))), off, tuple(notes))


def _within(matrix: np.ndarray, right: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The least-squares solution between bounds: what would leave them is held there, and the rest solved for anew."""
    out, free = np.zeros(len(low)), np.ones(len(low), bool)
    while free.any():
        out[free] = np.linalg.lstsq(matrix[:, free], right - matrix[:, ~free] @ out[~free], rcond=None)[0]
        outside = free & ((out < low) | (out > high))
        if not outside.any():
            break
        out[outside] = np.clip(out, low, high)[outside]
        free &= ~outside
    return out


def _weights(off: np.ndarray) -> np.ndarray:
    return np.minimum(1.0, HUBER / np.maximum(np.abs(off), 1e-12))


def _huber(off: np.ndarray) -> np.ndarray:
    size = np.abs(off)
    return np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)


def _untold(grown: np.ndarray, least: float) -> list[str]:
    """The rates that layouts whose seconds have these slopes do not tell: whose effect beside the others' is below ``least``."""
    flat = [k for k in range(3) if float(np.linalg.norm(grown[:, k])) < least]
    left = [k for k in range(3) if k not in flat]
    mixed: list[int] = []
    if left:
        _, sizes, directions = np.linalg.svd(grown[:, left], full_matrices=True)
        sizes = np.concatenate([sizes, np.zeros(len(left) - len(sizes))])
        mixed = [
            k
            for j, k in enumerate(left)
            if any(s < least and abs(d[j]) > 0.3 for s, d in zip(sizes, directions, strict=True))
        ]
    if len(mixed) == 1:
        flat, mixed = sorted([*flat, *mixed]), []
    notes = [f"{PARTS[k]} hardly matter to these layouts: their rate was changed as the others together" for k in flat]
    if mixed:
        names = " and ".join(PARTS[k] for k in mixed)
        notes.append(
            f"{names} cannot be told apart by these layouts: their rates were changed alike; measure layouts that differ more"
        )
    return notes
