"""Pipeline schedules as arithmetic: which microbatch a stage processes at each tick, the bubble, and the microbatches in flight.

All stages run in lockstep. In a *tick* each stage runs at most one *slot* of each layer loop: its own layers, for one microbatch.
The slots of a stage in one tick may be of different microbatches, and a slot of no microbatch is idle: it computes values that are
discarded. With K stages, M microbatches and one forward and one backward loop, the first microbatch enters stage 0 at tick 0.

With v *rounds*, each stage has v groups of layers, and a microbatch passes all stages v times (the interleaved, or circular,
schedule). Microbatches enter in groups of K: while a group is in its later rounds, none enters. A group takes a *period* of v·K
ticks. The bubble is (K − 1) slots of a v-th of a stage's layers.

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

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

ScheduleName = Literal["1f1b", "1f1b-overlap", "gpipe", "zb"]
"""``1f1b``: the backward slot of a microbatch runs as soon as its gradient is there; ``1f1b-overlap``: a tick later, so that the
slots of a tick are independent; ``gpipe``: after all forward slots; ``zb``: as ``1f1b``, with the gradients of weights in slots of
their own."""

SCHEDULES: tuple[str, ...] = get_args(ScheduleName)

GatherName = Literal["microbatch", "step", "auto"]
"""When sharded weights (FSDP) are all-gathered in a loop over microbatches: where they are used, or once a step, before the first
microbatch; ``auto``: whichever takes less time, of those that fit into the memory of the chip."""

GATHERS: tuple[str, ...] = get_args(GatherName)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A lockstep schedule of layer loops that run one after the other.

    Attributes:
      name: one of :data:`SCHEDULES`.
      stages: number of stages, K.
      microbatches: their number, M.
      rounds: groups of layers of a stage, v; each microbatch passes all stages once per round. More than one: M is a multiple of K.
      order: the loops of a microbatch: ``F`` forward, ``B`` backward, ``R`` forward, but recomputed for the backward pass.
        ``"FB"``: a stack of layers and its gradient; ``"FFBB"``: an encoder and a decoder; ``"FRB"``: a rematerialized loop.
        ``W``: the weight gradients of the ``B`` before it, which has the input gradients: ``"FBW"``.
      reverse: for each loop, whether it runs from the last layer to the first; None: backward loops do.
    """

    name: str
    stages: int
    microbatches: int
    rounds: int = 1
    order: str = "FB"
    reverse: tuple[bool, ...] | None = None

    def is_reverse(self, loop: int) -> bool:
        """Whether a loop runs from the last layer, and from the last stage, to the first."""
        return self.order[loop] in "BW" if self.reverse is None else self.reverse[loop]

    @property
    def joint(self) -> bool:
        """Whether the slots of a tick are independent, and run layer by layer in one loop."""
        return self.name == "1f1b-overlap"

    @property
    def loops(self) -> int:
        """Number of layer loops of a microbatch."""
        return len(self.order)

    @property
    def period(self) -> int:
        """Ticks from a group of K microbatches to the next one: v·K."""
        return self.rounds * self.stages

    def entry(self, microbatch: int) -> int:
        """The tick at which a microbatch enters its first loop."""
        group, within = divmod(microbatch, self.stages)
        return group * self.period + within

    def passage(self, loop: int) -> int:
        """Ticks from the first to the last slot of a microbatch in a loop: v·K − 1, and (v − 1)·K for weight gradients."""
        return self.rounds * self.stages - (self.stages if self.order[loop] == "W" else 1)

    def slots(self, loop: int) -> int:
        """Slots of a loop on a stage from its first to its last tick, idle ones included: v·M + K − 1; v·M for weight gradients.

        The slots of weight gradients of all stages are for the same microbatch, so that none is idle.
        """
        return self.rounds * self.microbatches + (0 if self.order[loop] == "W" else self.stages - 1)

    @property
    def starts(self) -> tuple[int, ...]:
        """The tick of the first slot of each loop.

        Each loop starts when the first microbatch has left the one before; under ``gpipe``, the first one of the backward pass
        when all microbatches have; weight gradients when the first stage has run its first backward slot; if the slots of a tick
        are independent, a tick later.
        """
        starts = [0]
        for i in range(1, self.loops):
            flush = self.name == "gpipe" and self.order[i] != "F" and self.order[i - 1] == "F"
            after = self.slots(i - 1) - 1 if flush else self.passage(i - 1)
            starts.append(starts[-1] + (self.stages - 1 if self.order[i] == "W" else after) + self.joint)
        return tuple(starts)

    @property
    def ticks(self) -> int:
        """Number of ticks: v·M + (v + 1)·K − 2 for 1F1B, 2·v·M + 2·K − 3 for GPipe, with a forward and a backward loop; one more if
        the slots of a tick are independent."""
        return self.starts[-1] + self.slots(self.loops - 1)

    @property
    def all_slots(self) -> int:
        """Slots of a stage in all loops, idle ones included."""
        return sum(map(self.slots, range(self.loops)))

    @property
    def bubble(self) -> Fraction:
        """Fraction of the slots of a stage that are idle: (K − 1) / (v·M + K − 1).

        With loops for the forward pass, input gradients and weight gradients: 2·(K − 1) / (3·v·M + 2·(K − 1)).
        """
        return Fraction(self.all_slots - self.loops * self.rounds * self.microbatches, self.all_slots)

    @property
    def in_flight(self) -> Fraction:
        """Most microbatches whose activations a stage stores at once, in units of all layers of a stage.

        ((v + 1)·K − 1) / v for 1F1B, but at most M; M for GPipe; 1 without a backward loop. Of several stacks, the one whose
        activations are stored for the longest time: the first one. If the slots of a tick are independent, they are stored for a
        tick more: 2·K with one round.
        """
        if "B" not in self.order:
            return Fraction(1)
        makes = self.order.index("R") if "R" in self.order else 0  # of remat: the recomputed activations
        reads, stage = self.order.rindex("B"), self.stages - 1 if self.is_reverse(makes) else 0
        stored = most = 0
        for tick in range(self.ticks):
            stored += self.slot(makes, stage, tick) is not None
            most = max(most, stored)
            stored -= self.slot(reads, stage, tick) is not None
        return Fraction(most, self.rounds)

    def slot(self, loop: int, stage: int, tick: int) -> tuple[int, int] | None:
        """(microbatch, round) that a stage processes for a loop at a tick; None: it is idle."""
        stages, rounds, reverse = self.stages, self.rounds, self.is_reverse(loop)
        passed = 0 if self.order[loop] == "W" else stages - 1 - stage if reverse else stage
        step = tick - self.starts[loop] - passed
        if not 0 <= step < rounds * self.microbatches:
            return None
        group, within = divmod(step, self.period)
        r, first = divmod(within, stages)
        return group * stages + first, rounds - 1 - r if reverse else r


def interval_rows(lives: Sequence[int]) -> list[int]:
    """The row of each of some values, the n-th of which is made at time n and read last at time ``n + lives[n]``.

    The fewest rows such that no row has two values at once: given ``[2, 0, 2, 0]``, returns ``[0, 1, 1, 0]``.
    """
    free: list[int] = []
    used: list[tuple[int, int]] = []  # (time after which the row is free, row)
    rows = []
    for n, life in enumerate(lives):
        while used and used[0][0] < n:
            heapq.heappush(free, heapq.heappop(used)[1])
        row = heapq.heappop(free) if free else len(used)
        heapq.heappush(used, (n + life, row))
        rows.append(row)
    return rows
