"""Choice of the fastest algorithm of a collective, by an α-β model of the torus: latency of the steps, bytes over the
busiest link, and memory traffic of the copies around a `ppermute`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from meshpar_kernels.collectives.schedule_table import Line, chunks_of, hops_along

SMALL_BYTES = 4 << 20
"""Largest array of the one-shot all-reduce: larger ones are limited by link bandwidth, not by latency."""

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclasses.dataclass(frozen=True)
class Axis:
    """One mesh axis of the group.

    Attributes:
      size: number of devices.
      ring: whether it wraps around.
      link: GB/s (1e9 bytes/s) of a device's link to a neighbour, in one direction.
      latency: seconds of one hop.
      outer: the axis is between slices, over a network that is no torus; `link` is then a device's share of that
        network.
    """

    size: int
    ring: bool
    link: float
    latency: float
    outer: bool = False

    @property
    def rate(self) -> float:
        """Bytes/s that a device receives over this axis: from two neighbours on a ring, from one on a line, whose ends
        have only one neighbour."""
        return (2 if self.ring and self.size > 2 and not self.outer else 1) * self.link * 1e9

    @property
    def hops(self) -> int:
        """Number of links between the two most distant devices."""
        if self.outer:
            return 1
        return self.size // 2 if self.ring else self.size - 1


@dataclasses.dataclass(frozen=True)
class Choice:
    """The result of `choose`.

    Attributes:
      algorithm: the fastest, or a simpler one within a twentieth of it. Simpler means earlier in `seconds`, except that
        a reduce-scatter that XLA compiles to an all-reduce comes last.
      seconds: algorithm → modelled seconds, for every algorithm that can run; the simplest first.
      reason: a sentence with the numbers.
      refused: algorithm → the reason why it cannot run.
    """

    algorithm: str
    seconds: Mapping[str, float]
    reason: str
    refused: Mapping[str, str]


def choose(
    kind: str,
    nbytes: float,
    axes: Sequence[Axis | tuple[int, bool, float, float]],
    *,
    hbm: float | None = None,
    candidates: Sequence[str] | None = None,
) -> Choice:
    """Choose the fastest algorithm of a collective, from the modelled seconds of all.

    With V bytes, A devices and W_d bytes/s into a device over axis d:

    - "native": V·(A-1)/A over the sum of the W_d, and the latency of all hops once; an all-reduce takes twice that. XLA
    compiles a reduce-scatter over several torus axes to an all-reduce, which is modelled.
    - "staged": one axis after another, each with the shards that the axes before it have scattered or gathered.
    - "hierarchical": as "staged", with the outer axes where the array is smallest; only if there are outer axes.
    - "ring", "pallas": the steps of rings over all axes at once (`ring_profile`), each with the traffic of its busiest link and
    the latency of a hop. "ring" also moves every byte through memory to and from the buffers of each `ppermute`;
    "pallas" does so only for the partial sums of a reduce-scatter.
    - "small": `all_reduce_small`, one step in which every device sends its full array to all; for an all-reduce of at
    most 4 MiB.

    Args:
      kind: "all_gather", "reduce_scatter" or "all_reduce".
      nbytes: V, bytes of the full array: the result of a gather, the operand of a scatter or an all-reduce.
      axes: of the group, major first: `Axis`, or (size, ring, GB/s of a link in one direction, seconds of a hop).
      hbm: GB/s of a device's memory, read and write together; None: memory traffic costs nothing.
      candidates: the algorithms to choose from; None: all.

    Returns:
      `Choice`.

    Raises:
      ValueError: unknown kind or algorithm, negative bytes, an axis with a size below 1, or no candidate that can run.
    """
    if kind not in KINDS:
        raise ValueError(f"choose: no collective {kind!r}; there are {', '.join(KINDS)}")
    group = [a if isinstance(a, Axis) else Axis(*a) for a in axes]
    if nbytes < 0 or any(a.size < 1 or a.link <= 0 or a.latency < 0 for a in group):
        raise ValueError(f"choose: bytes and latencies cannot be negative, nor sizes or rates 0: {nbytes}, {group}")
    names = tuple(_FORMS) if candidates is None else tuple(candidates)
    if unknown := [n for n in names if n not in _FORMS]:
        raise ValueError(f"choose: no algorithm {unknown[0]!r}; there are {', '.join(_FORMS)}")
    group = [a for a in group if a.size > 1]
    if not group or nbytes == 0:
        return Choice(names[0], dict.fromkeys(names, 0.0), "nothing is sent", {})
    memory = math.inf if hbm is None else hbm * 1e9
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in names:
        outer = sum(a.outer for a in group)
        if name == "hierarchical" and not outer:
            refused[name] = "no axis is an outer one"
        elif name in ("ring", "pallas", "small") and outer:
            refused[name] = "it would cross the outer axes with more than it must"
        elif name == "small" and (kind != "all_reduce" or nbytes > SMALL_BYTES):
            refused[name] = f"it is for an all-reduce of at most {SMALL_BYTES >> 20} MiB"
        else:
            seconds[name] = _FORMS[name](kind, float(nbytes), group, memory)
    if not seconds:
        raise ValueError(f"choose: none of {', '.join(names)} can run: {refused}")
    least = min(seconds.values())
    simple = list(seconds)
    if kind == "reduce_scatter" and sum(not a.outer for a in group) > 1:  # "native" has all of V in memory
        simple.sort(key=lambda name: name == "native")
    best = next(name for name in simple if seconds[name] <= 1.05 * least)
    others = ", ".join(f"{n} {s * 1e6:.0f}" for n, s in sorted(seconds.items(), key=lambda p: p[1]) if n != best)
    sizes = "×".join(str(a.size) for a in group)
    reason = f"{kind} of {nbytes / 2**20:.3g} MiB over {sizes}: {best} {seconds[best] * 1e6:.0f} µs"
    return Choice(best, seconds, reason + (f"; {others}" if others else ""), refused)


def ring_profile(sizes: Sequence[int], rings: Sequence[bool]) -> list[dict[int, int]]:
    """For each step of rings over all axes at once, each with its share of the array: {index of an axis: slots over its
    busiest link}. Equal to the simulator's counts on the table."""
    steps: list[dict[int, int]] = []
    for order in chunks_of(len(sizes), True):
        at, width = 0, 1
        for dim in order:
            form: Line = "ring" if rings[dim] or sizes[dim] <= 2 else "line"
            hops = hops_along(sizes[dim], form)
            for t in range(len(hops)):
                while len(steps) <= at + t:
                    steps.append({})
                steps[at + t][dim] = steps[at + t].get(dim, 0) + width
            at += len(hops)
            width *= sizes[dim]
    return steps


def _rounds(kind: str) -> int:
    return 2 if kind == "all_reduce" else 1


def _one_after_the_other(volume: float, axes: Sequence[Axis]) -> float:
    """Seconds of an all-gather of V bytes over one axis after another, or of a reduce-scatter in reverse order. The
    last axis carries all of V."""
    total, rest = 0.0, volume
    for axis in reversed(axes):
        total += axis.hops * axis.latency + rest * (axis.size - 1) / axis.size / axis.rate
        rest /= axis.size
    return total


def _native(kind: str, volume: float, axes: Sequence[Axis], memory: float) -> float:
    """Seconds of XLA's own collective: all inner axes at once, then the outer axes one after another."""
    inner, outer = [a for a in axes if not a.outer], [a for a in axes if a.outer]
    size = math.prod(a.size for a in inner)
    inside = sum(a.hops * a.latency for a in inner)
    inside += volume * (size - 1) / size / sum(a.rate for a in inner) if inner else 0.0
    once = inside + _one_after_the_other(volume / size, outer)
    full_reduce = kind == "reduce_scatter" and len(inner) > 1
    return once * (2 if full_reduce else _rounds(kind))


def _staged(kind: str, volume: float, axes: Sequence[Axis], memory: float) -> float:
    # gathers begin with the minor axis and scatters with the major one, which has all of V
    return _rounds(kind) * _one_after_the_other(volume, list(reversed(axes)))


def _hierarchical(kind: str, volume: float, axes: Sequence[Axis], memory: float) -> float:
    inner, outer = [a for a in axes if not a.outer], [a for a in axes if a.outer]
    return _rounds(kind) * _one_after_the_other(volume, [*outer, *reversed(inner)])


def _rings(per_byte: Mapping[str, int], kind: str, volume: float, axes: Sequence[Axis], memory: float) -> float:
    """Seconds of rings over all axes at once, each with its share of the volume.

    Args:
      per_byte: kind → memory traffic, as a multiple of the volume.
    """
    slot = volume / math.prod(a.size for a in axes) / len(axes)
    total = 0.0
    for load in ring_profile([a.size for a in axes], [a.ring for a in axes]):
        total += max(slots * slot / (axes[d].link * 1e9) for d, slots in load.items())
        total += max(axes[d].latency for d in load)
    return _rounds(kind) * total + per_byte[kind] * volume / memory


def _small(kind: str, volume: float, axes: Sequence[Axis], memory: float) -> float:
    """Seconds in which every device sends its array to every other device: latency of the farthest route, and traffic of
    the busiest link."""
    group = math.prod(a.size for a in axes)
    busiest = 0.0
    for axis in axes:
        n, half = axis.size, axis.size // 2
        # over a link, along one line of the axis
        directions = half * (half + 1) / 2 if axis.ring else half * (n - half)
        busiest = max(busiest, directions * group / n * volume / (axis.link * 1e9))
    return sum(a.hops * a.latency for a in axes) + busiest


_FORMS = {
    "native": _native,
    "staged": _staged,
    "hierarchical": _hierarchical,
    # from compiled schedules of 128 MiB on 16×16 tori (`benchmarks/collectives.py`); blocks that are no multiple of the
    # number of colours cost more
    "ring": functools.partial(_rings, {"all_gather": 4, "reduce_scatter": 12, "all_reduce": 16}),
    "pallas": functools.partial(_rings, {"all_gather": 0, "reduce_scatter": 3, "all_reduce": 3}),
    "small": _small,
}
