"""Efficiencies of matmuls, memory traffic and links, fitted to measured seconds.

Minimizes a Huber loss of log(planned seconds / measured seconds). All three efficiencies are first scaled by one
factor; a weak regularization keeps this ratio for efficiencies that the layouts do not determine, and a note names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

PARTS = ("matmuls", "memory traffic", "links")
MIN_STEP = 1e-4
"""Change of the log efficiencies, relative to their norm, below which the fit ends."""
DERIVATIVE_STEP = 0.02
"""Change of a log efficiency for numerical derivatives; planned seconds are not smooth where decisions of a plan change."""
MIN_SHARE = 0.3
"""Length of the part of an efficiency's axis in the directions that layouts do not determine, above which it is not determined."""
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
    predict: Callable[[Sequence[float]], Sequence[float]],
    start: Sequence[float],
    measured: Sequence[float],
    bounds: tuple[float, float],
    noise: float = 0.0,
) -> Fit:
    """Fit the three efficiencies.

    Args:
      predict: efficiencies → planned seconds of every layout.
      start: efficiencies to begin with.
      measured: seconds of every layout, above 0.
      bounds: the smallest and the largest efficiency.
      noise: relative uncertainty of measured seconds; the larger, the stronger the regularization toward one common factor.
    """
    from scipy.optimize import least_squares  # takes 0.2 s, which only this needs

    low, high = (math.log(b) for b in bounds)
    target = np.log(np.asarray(measured, float))
    regularization = min(0.1, max(0.01, noise))

    def log_seconds(x: np.ndarray) -> np.ndarray:
        """[layouts]: log planned seconds for log efficiencies x."""
        return np.log(np.asarray(predict([float(e) for e in np.exp(x)]), float))

    def sensitivities(x: np.ndarray) -> np.ndarray:
        """[layouts, 3]: increase of log seconds per increase of each log efficiency, at x."""
        y = log_seconds(x)
        return np.stack([(y - log_seconds(x - DERIVATIVE_STEP * unit)) / DERIVATIVE_STEP for unit in np.eye(3)], 1)

    first = np.log(np.asarray(start, float))
    scaled = np.clip(first + float(np.median(log_seconds(first) - target)), low, high)
    found = least_squares(
        lambda x: np.concatenate([log_seconds(x) - target, regularization * (x - scaled)]),
        scaled,
        lambda x: np.concatenate([sensitivities(x), regularization * np.eye(3)]),  # type: ignore[arg-type]
        bounds=(low, high),
        method="dogbox",  # its solutions may be at a bound
        loss="huber",
        f_scale=HUBER,
        xtol=MIN_STEP,
        max_nfev=25,
    )
    y = log_seconds(found.x)
    notes = _undetermined(sensitivities(found.x), 3 * regularization)
    for name, e, side in zip(PARTS, np.exp(found.x), found.active_mask, strict=True):
        if side:
            notes.append(f"the efficiency of {name} is at its {'upper' if side > 0 else 'lower'} bound, {e:.2g}")
    error = float(np.median(np.abs(np.expm1(y - target))))
    return Fit(tuple(np.exp(found.x).tolist()), tuple(np.exp(y).tolist()), error, tuple(notes))


def _undetermined(sensitivities: np.ndarray, threshold: float) -> list[str]:
    """Notes about the efficiencies that measured layouts do not determine.

    Args:
      sensitivities: [layouts, 3]: d log seconds / d log efficiency.
      threshold: norm of a column, or singular value, below which an efficiency is not determined.
    """
    _, sizes, directions = np.linalg.svd(sensitivities)
    # changes of all three that hardly change the seconds
    low = directions[np.pad(sizes, (0, 3 - len(sizes))) < threshold]
    flat = np.linalg.norm(sensitivities, axis=0) < threshold
    mixed = (np.linalg.norm(low, axis=0) > MIN_SHARE) & ~flat
    if mixed.sum() == 1:
        flat, mixed = flat | mixed, np.zeros(3, bool)
    names = np.array(PARTS)
    notes = [f"{name} hardly affect these layouts: their efficiency is scaled with the others" for name in names[flat]]
    if mixed.any():
        notes.append(
            f"these layouts do not distinguish {' and '.join(names[mixed])}: their efficiencies are scaled together; measure "
            "layouts that differ more"
        )
    return notes
