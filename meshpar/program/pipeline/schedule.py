"""Pipeline schedules as arithmetic: which microbatch a stage processes at each tick, the bubble, and the microbatches in flight.

All stages run in lockstep. In a *tick* each stage runs at most one *slot* of each layer loop: its own layers, for one microbatch.
The slots of a stage in one tick may be of different microbatches, and a slot of no microbatch is idle: it computes values that are
discarded. With K stages, M microbatches and one forward and one backward loop, the first microbatch enters stage 0 at tick 0.

Example: 1F1B, K = 3, M = 4. ``F2``: the forward slot of microbatch 2, ``B0``: the backward slot of microbatch 0.

=====  ====  ====  =====  =====  =====  =====  ====  ====
tick   0     1     2      3      4      5      6     7
=====  ====  ====  =====  =====  =====  =====  ====  ====
0      F0    F1    F2     F3     B0     B1     B2    B3
1            F0    F1     F2 B0  F3 B1  B2     B3
2                  F0 B0  F1 B1  F2 B2  F3 B3
=====  ====  ====  =====  =====  =====  =====  ====  ====
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

ScheduleName = Literal["1f1b", "gpipe"]
"""``1f1b``: the backward slot of a microbatch runs as soon as its gradient is there; ``gpipe``: after all forward slots."""

SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A lockstep schedule of layer loops that run one after the other: one forward, or one forward and one backward loop.

    Attributes:
      name: ``"1f1b"`` or ``"gpipe"``.
      stages: number of stages, K.
      microbatches: their number, M.
      rounds: groups of layers of a stage, v; each microbatch passes all stages once per round. More than one: M is a multiple of K.
      loops: 1 (forward) or 2 (forward and backward).
    """

    name: str
    stages: int
    microbatches: int
    rounds: int = 1
    loops: int = 2

    @property
    def slots(self) -> int:
        """Slots of one loop on a stage from its first to its last tick, idle ones included: v·M + K − 1."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def starts(self) -> tuple[int, ...]:
        """The tick of the first slot of each loop."""
        last = self.rounds * self.stages - 1 if self.name == "1f1b" else self.slots - 1
        return (0, last)[: self.loops]

    @property
    def ticks(self) -> int:
        """Number of ticks: v·M + (v + 1)·K − 2 for 1F1B, 2·v·M + 2·K − 3 for GPipe."""
        return self.starts[-1] + self.slots

    @property
    def bubble(self) -> Fraction:
        """Fraction of the slots of a stage that are idle: (K − 1) / (v·M + K − 1)."""
        return Fraction(self.stages - 1, self.slots)

    @property
    def in_flight(self) -> Fraction:
        """Most microbatches whose activations a stage stores at once, in units of all layers of a stage.

        ((v + 1)·K − 1) / v for 1F1B, but at most M; M for GPipe; 1 without a backward loop.
        """
        if self.loops == 1:
            return Fraction(1)
        bound = Fraction((self.rounds + 1) * self.stages - 1, self.rounds)
        most = Fraction(self.microbatches)
        return min(bound, most) if self.name == "1f1b" else most

    def slot(self, loop: int, stage: int, tick: int) -> tuple[int, int] | None:
        """(microbatch, round) that a stage processes for a loop at a tick; None: it is idle."""
        stages, rounds = self.stages, self.rounds
        position = stage if loop == 0 else stages - 1 - stage
        step = tick - self.starts[loop] - position
        if not 0 <= step < rounds * self.microbatches:
            return None
        if rounds == 1:
            return step, 0
        group, within = divmod(step, stages * rounds)
        r, first = divmod(within, stages)
        return group * stages + first, r if loop == 0 else rounds - 1 - r
