"""Efficiencies of matmuls, memory traffic and links, fitted to measured seconds.

Minimizes a Huber loss of log(planned seconds / measured seconds) by Gauss-Newton. All three efficiencies are first scaled by one
factor; a weak regularization keeps this ratio for efficiencies that the layouts do not determine, and a note names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

PARTS = ("matmuls", "memory traffic", "links")
MIN_STEP = 1e-4
"""Change of every log efficiency below which the fit ends."""
DERIVATIVE_STEP = 0.02
"""Change of a log efficiency for numerical derivatives; planned seconds are not smooth where decisions of a plan change."""
HUBER = 0.1
"""Log error from which a layout's loss grows linearly instead of quadratically."""


@dataclass(frozen=True)
class Fit:
    """Fitted efficiencies.

    Attributes:
      efficiencies: of matmuls, memory traffic and links.
      planned: seconds of every layout with these efficiencies.
      error: the median of |planned / measured - 1|.
      notes: efficiencies that the layouts do not determine, or that are at a bound.
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
      noise: relative uncertainty of measured seconds; the larger, the stronger the regularization toward one common factor.
    """
    low, high = (math.log(b) for b in bounds)
    target = np.log(np.asarray(measured, float))
    regularization = min(0.1, max(0.01, noise))

    def log_seconds(x: np.ndarray) -> np.ndarray:
        """[layouts]: log planned seconds for log efficiencies x."""
        return np.log(np.asarray(predict([float(e) for e in np.exp(x)]), float))

    def sensitivities(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """[layouts, 3]: decrease of log seconds per increase of each log efficiency, at x with log seconds y."""
        return np.stack([(y - log_seconds(x - DERIVATIVE_STEP * unit)) / -DERIVATIVE_STEP for unit in np.eye(3)], 1)

    first = np.log(np.asarray(start, float))
    scaled = np.clip(first + float(np.median(log_seconds(first) - target)), low, high)
    x, y = scaled, log_seconds(scaled)

    def loss(x: np.ndarray, y: np.ndarray) -> float:
        change = regularization * (x - scaled)
        return float(_huber(y - target).sum() + change @ change)

    for _ in range(25):
        weight = np.sqrt(_weights(y - target))
        matrix = np.concatenate([-weight[:, None] * sensitivities(x, y), regularization * np.eye(3)])
        right = np.concatenate([weight * (target - y), regularization * (scaled - x)])
        step = _bounded_least_squares(matrix, right, low - x, high - x)
        current, fraction = loss(x, y), 1.0
        while fraction > 0.05:
            new_x = np.clip(x + np.clip(fraction * step, -1, 1), low, high)
            new_y = log_seconds(new_x)
            if loss(new_x, new_y) < current:
                break
            fraction /= 2
        else:
            break
        converged = float(np.abs(new_x - x).max()) < MIN_STEP
        x, y = new_x, new_y
        if converged:
            break
    notes = _undetermined(sensitivities(x, y), 3 * regularization)
    bound = {low: "lower", high: "upper"}
    for name, each in zip(PARTS, map(float, x), strict=True):
        if each in bound:
            notes.append(f"the efficiency of {name} is at its {bound[each]} bound, {math.exp(each):.2g}")
    error = float(np.median(np.abs(np.expm1(y - target))))
    e = np.exp(x)
    return Fit((float(e[0]), float(e[1]), float(e[2])), tuple(map(float, np.exp(y))), error, tuple(notes))


def _bounded_least_squares(matrix: np.ndarray, right: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The least-squares solution of ``matrix @ x = right`` with ``low <= x <= high``, by fixing elements that leave the bounds."""
    out, free = np.zeros(len(low)), np.ones(len(low), bool)
    while free.any():
        out[free] = np.linalg.lstsq(matrix[:, free], right - matrix[:, ~free] @ out[~free], rcond=None)[0]
        outside = free & ((out < low) | (out > high))
        if not outside.any():
            break
        out[outside] = np.clip(out, low, high)[outside]
        free &= ~outside
    return out


def _weights(error: np.ndarray) -> np.ndarray:
    return np.minimum(1.0, HUBER / np.maximum(np.abs(error), 1e-12))


def _huber(error: np.ndarray) -> np.ndarray:
    size = np.abs(error)
    return np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)


def _undetermined(sensitivities: np.ndarray, threshold: float) -> list[str]:
    """Notes about the efficiencies that measured layouts do not determine.

    Args:
      sensitivities: [layouts, 3]: d log seconds / d log efficiency, negated.
      threshold: norm of a column, or singular value, below which an efficiency is not determined.
    """
    flat = [k for k in range(3) if float(np.linalg.norm(sensitivities[:, k])) < threshold]
    steep = [k for k in range(3) if k not in flat]
    mixed: list[int] = []
    if steep:
        _, sizes, directions = np.linalg.svd(sensitivities[:, steep], full_matrices=True)
        sizes = np.concatenate([sizes, np.zeros(len(steep) - len(sizes))])
        mixed = [
            k
            for j, k in enumerate(steep)
            if any(s < threshold and abs(d[j]) > 0.3 for s, d in zip(sizes, directions, strict=True))
        ]
    if len(mixed) == 1:
        flat, mixed = sorted([*flat, *mixed]), []
    notes = [f"{PARTS[k]} hardly affect these layouts: their efficiency is scaled with the others" for k in flat]
    if mixed:
        names = " and ".join(PARTS[k] for k in mixed)
        notes.append(
            f"these layouts do not distinguish {names}: their efficiencies are scaled together; measure layouts that differ more"
        )
    return notes
