"""Estimated seconds of a collective on the links of a slice, and between slices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .chips import Chip
from .collective_algorithms import ALGORITHMS, AlgorithmName
from .collective_ops import CollectiveOp
from .topology import Stage


def seconds_of(
    kind: CollectiveOp, volume: float, stages: Sequence[Stage], chip: Chip, algorithm: AlgorithmName = "native"
) -> float:
    """Seconds of one collective; 0 for a group of one device.

    α-β model: a level takes max(``latency · hops``, seconds of its traffic). For A devices, W bytes/s in both directions of one
    torus dimension that is a ring (a line has half), and n dimensions together:

    - all-gather, reduce-scatter: ``V·(A-1)/A / (W·n)``; all-reduce: both.
    - all-to-all: ``V·max(Aᵢ) / (4·A·W)``, the traffic through the middle (a quarter of an all-gather on one ring).
    - a permute: V over one link.
    - NVSwitch: ``V·(A-1)/A`` over the GPU's NVLinks in one direction; DCN likewise over a chip's share.
    - several levels (slices, torus, cores of a chip): sequentially, the outer ones on the result of the inner ones. An
      all-reduce over slices is a reduce-scatter within each slice, an all-reduce of ``V/inner`` between slices, and an
      all-gather within each slice.

    The algorithm says which torus dimensions are used at once: all of them (``native``), or one after the other, the major one
    for all of V (``staged``). Groups that are interleaved along a dimension share its links.

    Args:
      kind: the kind of collective.
      volume: V, bytes of the full-size array of one group: gathered (all-gather), before scattering (reduce-scatter), the operand
        (all-reduce), the operands of all its devices together (all-to-all), one device's operand (permute).
      stages: the stages of the mesh axes, major to minor (:func:`hardware.topology.torus_of`).
      chip: of the table, per chip, with its efficiencies.
      algorithm: how it uses the torus.
    """
    entry = ALGORITHMS["ring" if kind == "collective-permute" else algorithm]
    levels = entry.levels(stages)
    if kind == "collective-permute":  # to a neighbour, in one direction, over the slowest link
        rates = [chip.rate(s.dim, s.stride) for level in levels for s in level]
        return max((max(chip.latency, volume / rate) for rate in rates), default=0.0)
    seconds, remaining = 0.0, volume
    own = volume / math.prod(s.size for level in levels for s in level)
    for level in levels:
        size, links = math.prod(s.size for s in level), [_links(s, chip) for s in level]
        traffic = remaining * (size - 1) / size / sum(rate for rate, _, _ in links)
        if kind == "all-to-all":
            traffic = own * max(middle for _, _, middle in links) / 4
        seconds += max(chip.latency * sum(hops for _, hops, _ in links), traffic)
        remaining /= size
    return 2 * seconds if kind == "all-reduce" else seconds


def _links(stage: Stage, chip: Chip) -> tuple[float, int, float]:
    """(bytes/s of one device in both directions together, links that a message passes, ``size / rate`` for an all-to-all)."""
    n, rate = stage.size, chip.rate(stage.dim, stage.stride)
    if not stage.on_torus:  # a switch takes from all sources at once: there is no middle with less bandwidth
        return rate, 1, 4 * (n - 1) / n / rate
    rate *= 2 if stage.wraps else 1
    return rate, (-(-n // 2) if stage.wraps else n - 1) * stage.stride, n / rate


def hop_seconds(size: float, stage: Stage, chip: Chip) -> float:
    """Seconds of a ring step that sends ``size`` bytes to each of both neighbours at once.

    On a line, the return path from its end shares the links of one direction (two devices have no return path). On a switch, both
    messages share the device's links.
    """
    rate = chip.rate(stage.dim, stage.stride)
    if stage.dim in ("slice", "switch") or stage.line:
        rate /= 2
    return max(chip.latency, size / rate)
