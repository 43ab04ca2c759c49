"""Collective algorithms: how a collective over several stages of a slice is made of collectives over fewer stages.

One entry per algorithm. Callers ask the entry for its bytes over each stage (:meth:`Algorithm.stage_bytes`), how it uses the
links (:func:`hardware.collective_time.seconds_of`), and its phases (:func:`lower.collectives.reduce_scatter` emits them).
To add an algorithm, add an entry to ``_TABLE``; :func:`choose_algorithm` considers it if :func:`meshpar_kernels.collectives.choose`
knows its cost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from meshpar_kernels.collectives import Axis, choose

from .chips import Chip
from .collective_ops import CollectiveOp, collective_volume, wire_bytes
from .topology import Stage, joined, merged

AlgorithmName = Literal["native", "staged", "hierarchical", "all_reduce", "ring", "pallas"]

Phases = list[list[int]]
"""For each phase, the indices of the stages (major to minor) that it covers, in the order of a reduce-scatter: the first phase has
the full-size array. An all-gather runs the phases in reverse order."""

_OUTWARD = (("core",), ("switch",), ("x", "y", "z", ""), ("slice",))
"""Dims of stages whose links a phase uses at once, innermost first."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How a collective uses the stages of its group.

    Attributes:
      name: in plans.
      phases: function from, for each stage, major to minor, whether it connects slices, to the phases.
      chosen_for: the kinds of collectives for which :func:`choose_algorithm` considers it.
      needs_slices: it is considered only if some stages connect slices and others do not.
      stage_by_stage: one collective per stage, in the order of the mesh: the first one has the full-size array, whatever its links.
      slices_locally: an all-reduce, of whose result each device slices its block, instead of a reduce-scatter.
      ring_step: one step of a ring around the major stage, overlapped with matmuls: a collective-permute.
    """

    name: AlgorithmName
    phases: Callable[[Sequence[bool]], Phases]
    chosen_for: frozenset[CollectiveOp] = frozenset()
    needs_slices: bool = False
    stage_by_stage: bool = False
    slices_locally: bool = False
    ring_step: bool = False

    def stage_bytes(self, op: CollectiveOp, sent: float, stages: Sequence[Stage]) -> list[tuple[Stage, float]]:
        """(stage, bytes that a device sends over its links) in one collective; their sum is ``sent``.

        A phase over links of several kinds runs within a chip, a node or a slice first: of its volume V, V/(devices within a
        slice) crosses. An all-to-all sends over each link the bytes for devices behind it. Torus dimensions that are used at once
        have shares in proportion to their rates. A permute has one stage: the one between slices, if there is one, as for
        the devices at the edge of a slice, else the major one.

        Args:
          sent: bytes that the device sends in all.
          stages: of the group, major to minor; adjacent ones of one dimension are merged.
        """
        stages = [s for s, _ in joined(stages)][:1] if self.ring_step else self._merged(stages)
        if op == "collective-permute":
            return [(next((s for s in stages if s.between), stages[0]), sent)] if stages else []
        levels, group = self.levels(stages), math.prod(s.size for s in stages)
        volume = collective_volume(op, sent, group)
        if op == "all-to-all":
            volume, levels = volume / group, levels[::-1]
        out = []
        for level in levels:
            rates = [(2 if s.wraps else 1) / s.stride for s in level]
            size = math.prod(s.size for s in level)
            out += [(s, wire_bytes(op, volume, size) * r / sum(rates)) for s, r in zip(level, rates, strict=True)]
            volume /= size
        return out

    def levels(self, stages: Sequence[Stage]) -> list[list[Stage]]:
        """The stages, in the order of a reduce-scatter, as lists whose links are used at once: the first one has all bytes."""
        stages = self._merged(stages)
        phases = self.phases([s.between for s in stages])
        levels = [[stages[k] for k in indices if stages[k].dim in kinds] for indices in phases for kinds in _OUTWARD]
        return [level for level in levels if level]

    def _merged(self, stages: Sequence[Stage]) -> list[Stage]:
        """The stages with boxes as their parts, except for a ring, and nested stages of one dimension as one."""
        return merged(stages if self.ring_step else [part for s in stages for part in s.parts])


def _all_at_once(between: Sequence[bool]) -> Phases:
    return [list(range(len(between)))] if between else []


def _one_by_one(between: Sequence[bool]) -> Phases:
    return [[k] for k in range(len(between))]


def _slices_last(between: Sequence[bool]) -> Phases:
    """Stages that connect slices last, when the array is smallest."""
    return [[k] for k in sorted(range(len(between)), key=lambda k: between[k])]


_SCATTER: frozenset[CollectiveOp] = frozenset({"reduce-scatter"})
_TABLE = (
    # one XLA collective over all axes: uses the links of all torus dimensions at once
    Algorithm("native", _all_at_once),
    # one XLA collective for each torus dimension, major first: BlueConnect (Cho et al. 2019)
    Algorithm("staged", _one_by_one, _SCATTER, stage_by_stage=True),
    # the same, with the stages that connect slices last
    Algorithm("hierarchical", _slices_last, _SCATTER, needs_slices=True),
    # an all-reduce: the links of all torus dimensions at once, twice the bytes (meshpar._src.passes.all_reduce_choice)
    Algorithm("all_reduce", _all_at_once, slices_locally=True),
    # a ring around the major torus dimension, overlapped with matmuls; each step is one collective-permute
    # (meshpar._src.passes.collective_matmul)
    Algorithm("ring", _one_by_one, ring_step=True),
    # the same steps, sent by a fused Pallas kernel
    Algorithm("pallas", _one_by_one, ring_step=True),
)
ALGORITHMS: dict[AlgorithmName, Algorithm] = {a.name: a for a in _TABLE}
"""Every collective algorithm, by name."""


def choose_algorithm(
    op: CollectiveOp, volume: float, stages: Sequence[Stage], chip: Chip | None
) -> tuple[AlgorithmName, str]:
    """(algorithm, reason) for a collective: the fewest bytes first, then the least time.

    The reason is empty if only one algorithm is possible.

    - A reduce-scatter over several torus dimensions is ``staged``, across slices ``staged`` or ``hierarchical``, by the α-β model
      that planner and kernels share (:func:`meshpar_kernels.collectives.choose`). XLA compiles the native one to an all-reduce,
      which sends twice the bytes and allocates the full-size array, so it is not considered here.
      :mod:`passes.all_reduce_choice` replaces a staged one by an all-reduce if that leaves less time exposed.
    - A reduce-scatter over one torus dimension, or over slices alone, is ``native``: there is one kind of link, and one way to use
      it.
    - Every other collective is ``native``: no algorithm sends fewer bytes, and only this one uses the links of all torus
      dimensions at once.

    A ring of ``ppermute``s without matmuls is not considered: in compiled schedules its additions and copies cost more than its
    links save, for every reduce-scatter that was compiled. :mod:`passes.collective_matmul` decides on rings with matmuls.

    Args:
      op: the kind of collective.
      volume: bytes of the full-size array of one group, as in :func:`hardware.collective_time.seconds_of`.
      stages: of the mesh axes that it runs over, major to minor.
      chip: None: all links within slices have one rate, and those between slices a tenth of it.
    """
    return _chosen(op, volume, tuple(s for s, _ in joined(stages)), chip)


@functools.lru_cache(maxsize=4096)
def _chosen(op: CollectiveOp, volume: float, stages: tuple[Stage, ...], chip: Chip | None) -> tuple[AlgorithmName, str]:
    """:func:`choose_algorithm` for merged stages; cached."""
    between = any(s.between for s in stages)
    names: list[AlgorithmName] = [a.name for a in _TABLE if op in a.chosen_for and (between or not a.needs_slices)]
    if not names or len(stages) < 2 or not volume or all(s.between for s in stages):
        return "native", ""
    hbm = None if chip is None else _gb(chip.per_device().hbm_bandwidth * chip.compiler.hbm_efficiency)
    choice = choose(op.replace("-", "_"), volume, [_axis(s, chip) for s in stages], hbm=hbm, candidates=names)
    name: AlgorithmName = next(n for n in names if n == choice.algorithm)
    return name, choice.reason + ("" if between else "; native is compiled to an all-reduce, of twice the bytes")


def _axis(stage: Stage, chip: Chip | None) -> Axis:
    """The axis of :mod:`meshpar_kernels.collectives` for a stage."""
    if chip is None:
        return Axis(stage.size, stage.wraps, 0.1 if stage.between else 1.0, 0.0, stage.between)
    return Axis(stage.size, stage.wraps, _gb(chip.rate(stage.dim, stage.stride)), chip.latency, stage.between)


def _gb(bytes_per_second: float) -> float:
    """GB/s (1e9 bytes/s), the unit of :mod:`meshpar_kernels.collectives`, from bytes/s, the unit of the chip table."""
    return bytes_per_second / 1e9
