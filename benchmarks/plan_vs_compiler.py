"""Compares a plan with the program compiled from it: collective by collective, and in memory and time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshpar._src.cost.memory import memory_of
from meshpar._src.hardware.collective_algorithms import ALGORITHMS
from meshpar._src.hardware.collective_ops import wire_bytes
from meshpar._src.hardware.topology import joined
from meshpar._src.plan.collectives import Collective
from meshpar._src.plan.plan import Plan
from meshpar._src.verify.aot import Compiled
from meshpar._src.verify.hlo import HloCollective

Sent = tuple[str, tuple[str, ...], float, bool]
"""(kind, axes, bytes, in a loop of unknown length)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Collectives of one kind and size whose number differs between plan and program.

    Attributes:
      op, axes: their kind and mesh axes (no axes for a permute).
      bytes: sent by each device in one run.
      planned, compiled: number of runs in a step.
      further: they are in a loop of unknown trip count and the plan has equal ones before the loop: the further rounds of a token
        exchange, which a load that fits the buffers skips.
    """

    op: str
    axes: tuple[str, ...]
    bytes: float
    planned: int
    compiled: int
    further: bool = False

    @property
    def total_bytes(self) -> float:
        """Bytes in a step of the compiled program minus bytes in a step of the plan."""
        return self.bytes * (self.compiled - self.planned)

    @property
    def merged(self) -> bool:
        """Whether the program has fewer than the plan, but not none: XLA merges equal collectives and removes those whose result is
        unused."""
        return 0 < self.compiled < self.planned

    def __str__(self) -> str:
        over = f" over {'+'.join(self.axes)}" if self.axes else ""
        return f"{self.op}{over} of {self.bytes:.0f} bytes: {self.planned} planned, {self.compiled} compiled"


def differences(plan: Plan, collectives: Iterable[HloCollective]) -> list[Difference]:
    """Differences between the collectives of a compiled program and of its plan, largest first; empty if they are equal.

    Before partitioning, XLA removes equal and unused instructions. Collectives affected by that differ in number only
    (:attr:`Difference.merged`): the gradients of two norms' biases after a residual sum are one reduction; so are the results that
    experts return where a layer is recomputed for its gradient.

    Args:
      collectives: of a program right after partitioning (:attr:`meshpar.types.Compiled.collectives`), with trip counts.
    """
    planned, compiled = planned_sends(plan), compiled_sends(collectives, plan.sizes)
    out = [
        Difference(
            op, axes, size, planned[op, axes, size, looped], compiled[op, axes, size, looped],
            looped and (op, axes, size, False) in planned and (op, axes, size, True) not in planned,
        )
        for op, axes, size, looped in planned | compiled
        if planned[op, axes, size, looped] != compiled[op, axes, size, looped]
    ]  # fmt: skip
    return sorted(out, key=lambda d: (-abs(d.total_bytes), str(d)))


def by_kind(differences: Iterable[Difference]) -> dict[str, tuple[int, int, float]]:
    """Kind → (planned runs, compiled runs, bytes sent in addition) of all differences."""
    out: dict[str, tuple[int, int, float]] = {}
    for d in differences:
        planned, compiled, more = out.get(d.op, (0, 0, 0.0))
        out[d.op] = planned + d.planned, compiled + d.compiled, more + d.total_bytes
    return out


def planned_sends(plan: Plan) -> Counter[Sent]:
    """Number of runs of each collective of a plan in a step; a staged one counts once for each stage."""
    out: Counter[Sent] = Counter()
    for c in plan.collectives:
        if c.algorithm == "pallas":  # sent by a kernel
            continue
        all_axes = c.op != "collective-permute" and c.algorithm in ("native", "all_reduce") and not c.first
        axes = tuple(a for a in plan.sizes if a in c.axes) if all_axes else ()
        for size in stage_bytes(c, plan):
            out[c.op, axes, round(size, 1), c.count is None] += 1 if c.count is None else c.count
    return +out


def stage_bytes(c: Collective, plan: Plan) -> list[float]:
    """Bytes that a device sends in each stage of a collective: one stage for each torus dimension if it is staged, else one."""
    stages = [s for a in c.axes for s in plan.torus[a] if s.size > 1][c.first :]
    if c.algorithm in ("native", "all_reduce") or c.op == "collective-permute":
        return [c.bytes]
    group = math.prod(s.size for s in stages)
    volume, sent = c.bytes * group / (group - 1), []
    stages = [s for s, _ in joined(stages)]
    for indices in ALGORITHMS[c.algorithm].phases([s.between for s in stages]):
        size = math.prod(stages[k].size for k in indices)
        sent.append(wire_bytes(c.op, volume, size))
        volume /= size
    return sent


def compiled_sends(collectives: Iterable[HloCollective], sizes: Mapping[str, int]) -> Counter[Sent]:
    """Number of runs of each collective of a compiled program; a collective over some of an axis' devices has no axes."""
    out: Counter[Sent] = Counter()
    for c in collectives:
        axes = () if c.op == "collective-permute" else c.axes(sizes)
        all_devices = c.group == math.prod(sizes[a] for a in axes)
        out[c.op, axes if all_devices else (), round(c.bytes, 1), c.count is None] += 1 if c.count is None else c.count
    return +out


@dataclass(frozen=True, slots=True)
class Comparison:
    """Memory and time of a plan and of the program compiled from it.

    Attributes:
      planned_peak, compiled_peak: bytes.
      planned_seconds: total of the plan's kernels, without communication.
      cycles: the compiler's estimate of that total (:attr:`meshpar.types.Compiled.cycles`); None if it is not a TPU program.
    """

    planned_peak: float
    compiled_peak: float
    planned_seconds: float | None
    cycles: float | None

    @property
    def memory_error(self) -> float:
        """Relative error of the planned peak."""
        return self.planned_peak / self.compiled_peak - 1


def comparison(compiled: Compiled) -> Comparison:
    """Memory and time of a compiled program and of its plan.

    Raises:
      ValueError: the program has no plan.
    """
    plan = compiled.plan
    if plan is None:
        raise ValueError(f"{compiled.name} was compiled without a plan")
    return Comparison(memory_of(plan).peak, compiled.memory.peak, kernel_seconds(plan), compiled.cycles)


def kernel_seconds(plan: Plan) -> float | None:
    """Total seconds of the plan's kernels; None if the chip is unknown."""
    return None if plan.time is None else sum(o.seconds * o.count for o in plan.time.ops)


def rank_correlation(xs: Iterable[float], ys: Iterable[float]) -> float:
    """Spearman's rank correlation; ties have their mean rank. NaN for fewer than two values.

    Raises:
      ValueError: the lengths differ.
    """
    a, b = ranks(list(xs)), ranks(list(ys))
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values")
    if len(a) < 2:
        return math.nan
    mean = (len(a) - 1) / 2
    over = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    under = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return over / under if under else math.nan


def ranks(xs: list[Any]) -> list[float]:
    """The rank of each value in increasing order, from 0; equal values have their mean rank."""
    return [sum(y < x for y in xs) + (sum(y == x for y in xs) - 1) / 2 for x in xs]
