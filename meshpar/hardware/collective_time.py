"""How long a collective takes on the links of a slice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .algorithms import ALGORITHMS, AlgorithmName
from .chips import Chip
from .collective_ops import CollectiveOp
from .topology import Stage


@dataclass(frozen=True, slots=True)
class _Level:
    """A part of a group that sends over links of one kind: devices, bytes/s of one device both ways together, hops."""

    size: int
    rate: float
    hops: int
    longest: float  # of the all-to-all: the largest size/rate of its dimensions
    ring: bool = False


_INWARD = ("slice", "torus", "switch", "core")


def seconds_of(
    kind: CollectiveOp, volume: float, stages: Sequence[Stage], chip: Chip, algorithm: AlgorithmName = "native"
) -> float:
    """How long one collective takes.

    α-β: a level takes the longer of its latency, ``latency · hops``, and its traffic. With A devices, W bytes/s both ways over
    one torus dimension that is a ring (a line has half), n dimensions together:

    - all-gather, reduce-scatter: ``V·(A-1)/A / (W·n)``; all-reduce: both;
    - all-to-all: ``V·max(Aᵢ) / (4·A·W)``, the traffic through the middle (a quarter of an all-gather on one ring);
    - a permute: V over one link;
    - NVSwitch: ``V·(A-1)/A`` over the GPU's NVLinks one way; DCN likewise over a chip's share;
    - several levels (slices, torus, cores of a chip): each in turn, the outer ones on what the inner ones have cut:
      an all-reduce over slices is a reduce-scatter inside, an all-reduce of ``V/inner`` across, an all-gather inside. Staged,
      a torus dimension is a level of its own, and the major one has all of V.

    An algorithm says which torus dimensions work together: ``native`` has all of them at once, ``staged`` one after the other, the
    major one on all of V. Groups that are interleaved along a dimension share its links.

    Args:
      kind: the collective.
      volume: V, bytes of the whole array of one group: gathered (all-gather), before scattering (reduce-scatter), the operand
        (all-reduce), the operands of all its devices together (all-to-all), one device's operand (permute).
      stages: the stages of the axes it runs over, major to minor (:func:`meshpar.hardware.topology.torus_of`).
      chip: of the table, per chip; efficiencies as it has them.
      algorithm: how it uses the torus.

    Returns:
      Seconds. 0 for a group of one.
    """
    if kind != "collective-permute" and algorithm not in ("ring", "pallas"):
        stages = [f for s in stages for f in s.fills or (s,)]
    levels = _levels(stages, chip, algorithm if kind != "collective-permute" else "ring")
    if not levels:
        return 0.0
    if kind == "collective-permute":  # to a neighbour, one way, over the slowest links there are
        return max(max(chip.latency, volume / level.rate * (2 if level.ring else 1)) for level in levels)
    if kind == "all-to-all":
        own = volume / math.prod(level.size for level in levels)
        return sum(max(chip.latency * level.hops, own * level.longest / 4) for level in levels)
    seconds, rest = 0.0, volume
    for level in reversed(levels):  # the innermost has all of it
        seconds += max(chip.latency * level.hops, rest * (level.size - 1) / level.size / level.rate)
        rest /= level.size
    return 2 * seconds if kind == "all-reduce" else seconds


def hop_seconds(size: float, stage: Stage, chip: Chip) -> float:
    """Seconds of a hop to both neighbours at once, ``size`` bytes to each.

    Over a line the way back from its end shares the links of one direction (two devices have no way back); over a switch both
    hops share the device's.
    """
    rate = chip.rate(stage.dim, stage.stride)
    if stage.dim in ("slice", "switch") or stage.line:
        rate /= 2
    return max(chip.latency, size / rate)


def _levels(stages: Sequence[Stage], chip: Chip, algorithm: AlgorithmName) -> list[_Level]:
    """The levels of a group, outermost first."""
    if algorithm == "staged":  # one stage after the other, the major one on all of it, whatever its links are
        return [level for stage in reversed(merged(stages)) for level in _levels([stage], chip, "native")]
    found: dict[str, list[_Level]] = {name: [] for name in _INWARD}
    for stage in merged(stages):
        n, rate = stage.size, chip.rate(stage.dim, stage.stride)
        if stage.dim in ("slice", "switch", "core"):
            # a switch takes from all sources at once: no middle to squeeze through
            found[stage.dim].append(_Level(n, rate, 1, 4 * (n - 1) / n / rate))
        else:
            rate *= 2 if stage.wraps else 1
            hops = -(-n // 2) if stage.wraps else n - 1
            found["torus"].append(_Level(n, rate, hops * stage.stride, n / rate, stage.wraps))
    torus = found["torus"]
    found["torus"] = [
        _together([torus[k] for k in phase]) for phase in ALGORITHMS[algorithm].phases([False] * len(torus))
    ]
    # the major dimension comes last when gathering, so it stands innermost: it has all of V
    return [level for name in _INWARD for level in reversed(found[name])]


def _together(levels: Sequence[_Level]) -> _Level:
    """Torus dimensions of which the links are used at once."""
    if len(levels) == 1:
        return levels[0]
    size, rate = math.prod(x.size for x in levels), sum(x.rate for x in levels)
    return _Level(size, rate, sum(x.hops for x in levels), max(x.longest for x in levels))


def merged(stages: Sequence[Stage]) -> list[Stage]:
    """Stages of one torus dimension as one, where they are nested in it; those of size 1 go."""
    out: list[Stage] = []
    for stage in stages:
        if stage.size == 1:
            continue
        same = next((i for i, s in enumerate(out) if s.dim == stage.dim != ""), None)
        if same is None:
            out.append(stage)
            continue
        minor, major = sorted((out[same], stage), key=lambda s: s.stride)
        if major.dim in ("slice", "switch", "core") or major.stride == minor.stride * minor.size:
            out[same] = Stage(minor.size * major.size, major.dim, major.wraps, minor.stride)
        else:
            out.append(stage)
    return out
