"""Where a plan and the program that was compiled from it disagree: collective by collective, and memory and time in figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshpar.cost.memory import memory_of
from meshpar.hardware.algorithms import ALGORITHMS
from meshpar.plan.collectives import Collective
from meshpar.plan.plan import Plan
from meshpar.verify.aot import Compiled
from meshpar.verify.hlo import HloCollective

Sent = tuple[str, tuple[str, ...], float, bool]
"""(kind, axes, bytes, in a loop of unknown length)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Collectives of one kind and size that one side has more of.

    Attributes:
      op, axes: their kind, and the mesh axes that they run over (of a permute: none).
      bytes: sent by each device, once.
      planned, compiled: how often they run in a step.
      further: they stand in a loop of unknown length, and the plan has the same before it: the further rounds of an exchange
        of tokens, which a load within its buffers does not take.
    """

    op: str
    axes: tuple[str, ...]
    bytes: float
    planned: int
    compiled: int
    further: bool = False

    @property
    def total_bytes(self) -> float:
        """Bytes that the compiled program sends more in a step."""
        return self.bytes * (self.compiled - self.planned)

    @property
    def merged(self) -> bool:
        """Whether the program has fewer, and some, of what the plan lists: XLA makes one collective of those that send the same,
        and leaves out those whose result is not needed after all."""
        return 0 < self.compiled < self.planned

    def __str__(self) -> str:
        over = f" over {'+'.join(self.axes)}" if self.axes else ""
        return f"{self.op}{over} of {self.bytes:.0f} bytes: {self.planned} planned, {self.compiled} compiled"


def differences(plan: Plan, found: Iterable[HloCollective]) -> list[Difference]:
    """How the collectives of a compiled program differ from those of its plan, the largest differences first; empty: equal.

    Before it partitions, XLA drops instructions that work out the same or are not needed: what is left of such collectives differs
    in number only (:attr:`Difference.merged`), as the gradients of two norms' biases after a residual sum, which are one sum, or
    the results that experts send back where a layer is run again for its gradient.

    Args:
      found: of a program, read right after partitioning (:attr:`meshpar.types.Compiled.collectives`); its loops are counted.
    """
    planned, compiled = planned_sends(plan), compiled_sends(found, plan.sizes)
    out = [
        Difference(
            op, axes, size, planned[op, axes, size, looped], compiled[op, axes, size, looped],
            looped and (op, axes, size, False) in planned and (op, axes, size, True) not in planned,
        )
        for op, axes, size, looped in planned | compiled
        if planned[op, axes, size, looped] != compiled[op, axes, size, looped]
    ]  # fmt: skip
    return sorted(out, key=lambda d: (-abs(d.total_bytes), str(d)))


def by_kind(found: Iterable[Difference]) -> dict[str, tuple[int, int, float]]:
    """kind → (how often planned, how often compiled, bytes that are sent more), of what differs."""
    out: dict[str, tuple[int, int, float]] = {}
    for d in found:
        planned, compiled, more = out.get(d.op, (0, 0, 0.0))
        out[d.op] = planned + d.planned, compiled + d.compiled, more + d.total_bytes
    return out


def planned_sends(plan: Plan) -> Counter[Sent]:
    """How often each collective of a plan runs, in the stages in which it is lowered."""
    out: Counter[Sent] = Counter()
    for c in plan.collectives:
        if not ALGORITHMS[c.algorithm].compiled:
            continue
        whole = c.op != "collective-permute" and c.algorithm in ("native", "whole") and not c.first
        axes = tuple(a for a in plan.sizes if a in c.axes) if whole else ()
        for size in stage_bytes(c, plan):
            out[c.op, axes, round(size, 1), c.count is None] += 1 if c.count is None else c.count
    return +out


def stage_bytes(c: Collective, plan: Plan) -> list[float]:
    """Bytes of the phases of a collective, as its algorithm has them: one for each torus dimension if it is staged."""
    stages = [s for a in c.axes for s in plan.torus[a] if s.size > 1][c.first :]
    if c.algorithm in ("native", "whole") or c.op == "collective-permute":
        return [c.bytes]
    group = math.prod(s.size for s in stages)
    return ALGORITHMS[c.algorithm].bytes(c.op, c.bytes * group / (group - 1), stages)


def compiled_sends(found: Iterable[HloCollective], sizes: Mapping[str, int]) -> Counter[Sent]:
    """The same of a compiled program; a collective over a part of its axes' devices counts as over these axes."""
    out: Counter[Sent] = Counter()
    for c in found:
        axes = () if c.op == "collective-permute" else c.axes(sizes)
        whole = c.group == math.prod(sizes[a] for a in axes)
        out[c.op, axes if whole else (), round(c.bytes, 1), c.count is None] += 1 if c.count is None else c.count
    return +out


@dataclass(frozen=True, slots=True)
class Figures:
    """Memory and time of a plan beside the compiler's.

    Attributes:
      planned_peak, compiled_peak: bytes.
      planned_seconds: of the plan's kernels, one after the other, without communication.
      cycles: the compiler's own estimate of the same (:attr:`meshpar.types.Compiled.cycles`); None: not a TPU program.
    """

    planned_peak: float
    compiled_peak: float
    planned_seconds: float | None
    cycles: float | None

    @property
    def memory_error(self) -> float:
        """By how much the plan's peak is off, as a share of the compiler's."""
        return self.planned_peak / self.compiled_peak - 1


def figures(compiled: Compiled) -> Figures:
    """The figures of a compiled program and of its plan.

    Raises:
      ValueError: the program has no plan.
    """
    plan = compiled.plan
    if plan is None:
        raise ValueError(f"{compiled.name} was compiled without a plan")
    return Figures(memory_of(plan).peak, compiled.memory.peak, kernel_seconds(plan), compiled.cycles)


def kernel_seconds(plan: Plan) -> float | None:
    """Seconds of the plan's kernels, one after the other; None where the chip is not known."""
    return None if plan.time is None else sum(o.seconds * o.count for o in plan.time.ops)


def rank_correlation(xs: Iterable[float], ys: Iterable[float]) -> float:
    """Spearman's: the correlation of the ranks; ties have their mean rank. NaN for fewer than two.

    Raises:
      ValueError: not as many of the one as of the other.
    """
    a, b = ranks(list(xs)), ranks(list(ys))
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values beside {len(b)}")
    if len(a) < 2:
        return math.nan
    mean = (len(a) - 1) / 2
    over = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    under = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return over / under if under else math.nan


def ranks(xs: list[Any]) -> list[float]:
    """The place of each value in increasing order, from 0; equal ones share their mean."""
    return [sum(y < x for y in xs) + (sum(y == x for y in xs) - 1) / 2 for x in xs]
