"""Estimated seconds of a collective on the links of a slice, and between slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .algorithms import ALGORITHMS, Algorithm, AlgorithmName
from .chips import Chip
from .collective_ops import CollectiveOp
from .topology import Stage


@dataclass(frozen=True, slots=True)
class _Level:
    """The devices of a group that are connected by links of one kind, or by torus dimensions whose links are used at once.

    Attributes:
      size: number of devices.
      rate: bytes/s of one device, both directions together.
      hops: links that a message passes.
      longest: the largest ``size / rate`` of its dimensions, for an all-to-all.
      ring: it is a ring of the torus.
    """

    size: int
    rate: float
    hops: int
    longest: float
    ring: bool = False


_INWARD = ("slice", "torus", "switch", "core")


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
    if not entry.ring_step:
        stages = [part for stage in stages for part in stage.parts]
    levels = _levels(stages, chip, entry)
    if not levels:
        return 0.0
    if kind == "collective-permute":  # to a neighbour, in one direction, over the slowest link
        return max(max(chip.latency, volume / level.rate * (2 if level.ring else 1)) for level in levels)
    if kind == "all-to-all":
        own = volume / math.prod(level.size for level in levels)
        return sum(max(chip.latency * level.hops, own * level.longest / 4) for level in levels)
    seconds, remaining = 0.0, volume
    for level in reversed(levels):  # the innermost level has the full volume
        seconds += max(chip.latency * level.hops, remaining * (level.size - 1) / level.size / level.rate)
        remaining /= level.size
    return 2 * seconds if kind == "all-reduce" else seconds


def hop_seconds(size: float, stage: Stage, chip: Chip) -> float:
    """Seconds of a ring step that sends ``size`` bytes to each of both neighbours at once.

    On a line, the return path from its end shares the links of one direction (two devices have no return path). On a switch, both
    messages share the device's links.
    """
    rate = chip.rate(stage.dim, stage.stride)
    if stage.dim in ("slice", "switch") or stage.line:
        rate /= 2
    return max(chip.latency, size / rate)


def _levels(stages: Sequence[Stage], chip: Chip, algorithm: Algorithm) -> list[_Level]:
    """The levels of a group, outermost first."""
    if algorithm.stage_by_stage:  # the major stage has the full volume, whatever its links are
        return [level for stage in reversed(merged(stages)) for level in _levels([stage], chip, ALGORITHMS["native"])]
    by_link: dict[str, list[_Level]] = {name: [] for name in _INWARD}
    for stage in merged(stages):
        n, rate = stage.size, chip.rate(stage.dim, stage.stride)
        if not stage.on_torus:
            # a switch takes from all sources at once: there is no middle with less bandwidth
            by_link[stage.dim].append(_Level(n, rate, 1, 4 * (n - 1) / n / rate))
        else:
            rate *= 2 if stage.wraps else 1
            hops = -(-n // 2) if stage.wraps else n - 1
            by_link["torus"].append(_Level(n, rate, hops * stage.stride, n / rate, stage.wraps))
    torus = by_link["torus"]
    by_link["torus"] = [_together([torus[k] for k in phase]) for phase in algorithm.phases([False] * len(torus))]
    # an all-gather ends with the major dimension, so it is the innermost level: it has the full volume
    return [level for name in _INWARD for level in reversed(by_link[name])]


def _together(levels: Sequence[_Level]) -> _Level:
    """One level for torus dimensions whose links are used at once."""
    if len(levels) == 1:
        return levels[0]
    size, rate = math.prod(x.size for x in levels), sum(x.rate for x in levels)
    return _Level(size, rate, sum(x.hops for x in levels), max(x.longest for x in levels))


def merged(stages: Sequence[Stage]) -> list[Stage]:
    """The stages, with nested stages of one torus dimension merged into one, and stages of size 1 removed."""
    out: list[Stage] = []
    for stage in stages:
        if stage.size == 1:
            continue
        same = next((i for i, s in enumerate(out) if s.dim == stage.dim != ""), None)
        if same is None:
            out.append(stage)
            continue
        minor, major = sorted((out[same], stage), key=lambda s: s.stride)
        if not major.on_torus or major.stride == minor.stride * minor.size:
            out[same] = Stage(minor.size * major.size, major.dim, major.wraps, minor.stride)
        else:
            out.append(stage)
    return out
