"""Collective algorithms: how a collective over several stages of a slice is made of collectives over fewer.

One object for each. From the phases in which it goes over the stages of a group follow the bytes of each phase
(:meth:`Algorithm.bytes`), its seconds (:func:`meshpar.hardware.collective_time.seconds_of`) and what is emitted
(:meth:`Algorithm.reduce_scatter`).
To add an algorithm is to add one entry to ``_TABLE``; for :func:`choose_algorithm` to weigh it,
:func:`meshpar_kernels.collectives.choose` must know its cost too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax import lax

from meshpar_kernels.collectives import Axis, choose, in_order

from .chips import Chip
from .collective_ops import CollectiveOp, wire_bytes
from .topology import Stage, joined

AlgorithmName = Literal["native", "staged", "hierarchical", "whole", "ring", "pallas"]

Phases = list[list[int]]
"""Numbers of the stages of a group (major to minor) that each phase covers, in the order in which a reduce-scatter takes them: the
first phase has the whole array. A gather takes them backwards."""

Scatter = Callable[[Any, str | tuple[str, ...], int], Any]
"""(local array, mesh axes, dim) → its sum over the axes, of which each device keeps its block along the dim."""


def _psum_scatter(x: Any, axes: str | tuple[str, ...], dim: int) -> Any:
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How a collective uses the stages of its group.

    Attributes:
      name: what plans call it.
      phases: for each stage, major to minor, whether it goes between slices → the phases.
      chosen_for: the collectives for which :func:`choose_algorithm` weighs it.
      between_slices: it is of use only where some stages go between slices, and others do not.
      cut: every device gets all of a sum, and cuts its block out afterwards: an all-reduce where a reduce-scatter would do.
      compiled: whether the compiler sees what it sends; not so inside a Pallas kernel.
    """

    name: AlgorithmName
    phases: Callable[[Sequence[bool]], Phases]
    chosen_for: frozenset[CollectiveOp] = frozenset()
    between_slices: bool = False
    cut: bool = False
    compiled: bool = True

    def bytes(self, op: CollectiveOp, volume: float, stages: Sequence[Stage]) -> list[float]:
        """Bytes that each device sends in each phase of a collective.

        Args:
          op: its kind.
          volume: bytes as in :func:`wire_bytes`, of the whole group.
          stages: of the group, major to minor.
        """
        out, stages = [], [s for s, _ in joined(stages)]
        for phase in self.phases([s.dim == "slice" for s in stages]):
            size = math.prod(stages[k].size for k in phase)
            out.append(wire_bytes(op, volume, size))
            volume /= size
        return out

    def reduce_scatter(
        self, x: Any, axes: Sequence[str], dim: int, between: Collection[str] = (), one: Scatter = _psum_scatter
    ) -> Any:
        """Sum over mesh axes, and keep this device's block of a dim; inside ``shard_map``.

        Args:
          x: the local array.
          axes: one for each stage, major to minor; blocks are numbered in this order, whatever the phases.
          dim: the dim of x that is scattered.
          between: those of the axes that go between slices.
          one: how a phase is emitted, where phases take the axes in order.
        """
        if self.cut:
            n = x.shape[dim] // lax.axis_size(tuple(axes))
            return lax.dynamic_slice_in_dim(lax.psum(x, tuple(axes)), lax.axis_index(tuple(axes)) * n, n, dim)
        phases = self.phases([a in between for a in axes])
        order = [k for phase in phases for k in phase]
        if order != sorted(order):
            return in_order("reduce_scatter", x, axes, dim, order)
        for phase in phases:
            names = tuple(axes[k] for k in phase)
            x = one(x, names[0] if len(names) == 1 else names, dim)
        return x


def _all_at_once(between: Sequence[bool]) -> Phases:
    return [list(range(len(between)))] if between else []


def _one_by_one(between: Sequence[bool]) -> Phases:
    return [[k] for k in range(len(between))]


def _slices_last(between: Sequence[bool]) -> Phases:
    """What crosses slices is the smallest."""
    return [[k] for k in sorted(range(len(between)), key=lambda k: between[k])]


_SCATTER: frozenset[CollectiveOp] = frozenset({"reduce-scatter"})
_TABLE = (
    # one XLA collective over all axes, which has the links of all torus dims at once
    Algorithm("native", _all_at_once),
    # one XLA collective for each torus dim, major first: BlueConnect (Cho et al. 2019)
    Algorithm("staged", _one_by_one, _SCATTER),
    # the same, inside slices before it crosses them
    Algorithm("hierarchical", _slices_last, _SCATTER, between_slices=True),
    # the links of all torus dims at once, at twice the bytes (meshpar.passes.all_reduce_choice)
    Algorithm("whole", _all_at_once, cut=True),
    # hops around the major torus dim beside matmuls (meshpar.passes.collective_matmul): each hop is a collective-permute of its own
    Algorithm("ring", _one_by_one),
    # the same hops, sent by a fused Pallas kernel
    Algorithm("pallas", _one_by_one, compiled=False),
)
ALGORITHMS: dict[AlgorithmName, Algorithm] = {a.name: a for a in _TABLE}
"""Every collective algorithm, by name."""


def choose_algorithm(
    op: CollectiveOp, volume: float, stages: Sequence[Stage], chip: Chip | None
) -> tuple[AlgorithmName, str]:
    """The algorithm for a collective: the fewest bytes first, then the least time; and why (empty where there is no choice).

    - A reduce-scatter over several torus dims is ``staged``, across slices ``staged`` or ``hierarchical``, by the α-β model that
      planner and kernels share (:func:`meshpar_kernels.collectives.choose`). XLA makes an all-reduce of the native one, which sends
      twice the bytes and holds the whole array: it is left out, also where it would be as fast. Where that is shorter beside
      what else a program does, :mod:`meshpar.passes.all_reduce_choice` has it later.
    - Every other collective is ``native``: none sends less, and it alone has the links of all torus dims at once.

    A stand-alone ring of ``ppermute``s is not weighed: in compiled schedules its sums and copies cost more than its links save,
    for every reduce-scatter that was compiled. Beside products rings are decided on by :mod:`meshpar.passes.collective_matmul`.

    Args:
      op: its kind.
      volume: bytes of the whole array of one group, as in :func:`meshpar.hardware.collective_time.seconds_of`.
      stages: of the mesh axes that it runs over, major to minor.
      chip: None: all links are taken to be alike, but between slices a tenth of that.
    """
    return _chosen(op, volume, tuple(s for s, _ in joined(stages)), chip)


@functools.lru_cache(maxsize=4096)
def _chosen(op: CollectiveOp, volume: float, stages: tuple[Stage, ...], chip: Chip | None) -> tuple[AlgorithmName, str]:
    between = sum(s.dim == "slice" for s in stages)
    names: list[AlgorithmName] = [a.name for a in _TABLE if op in a.chosen_for and (between or not a.between_slices)]
    if not names or len(stages) < 2 or not volume or between == len(stages):
        return "native", ""
    hbm = None if chip is None else _gb(chip.per_device().hbm_bandwidth * chip.compiler.hbm_efficiency)
    found = choose(op.replace("-", "_"), volume, [_axis(s, chip) for s in stages], hbm=hbm, candidates=names)
    name: AlgorithmName = next(n for n in names if n == found.algorithm)
    return name, found.reason + ("" if between else "; native is compiled to an all-reduce, of twice the bytes")


def _axis(stage: Stage, chip: Chip | None) -> Axis:
    """A stage as :mod:`meshpar_kernels.collectives` takes it."""
    between = stage.dim == "slice"
    if chip is None:
        return Axis(stage.size, stage.wraps, 0.1 if between else 1.0, 0.0, between)
    return Axis(stage.size, stage.wraps, _gb(chip.rate(stage.dim, stage.stride)), chip.latency, between)


def _gb(bytes_per_second: float) -> float:
    """GB/s (1e9 bytes/s), in which :mod:`meshpar_kernels.collectives` has its rates; the chip table has bytes/s."""
    return bytes_per_second / 1e9
