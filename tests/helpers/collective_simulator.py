"""A simulator of schedules, in NumPy: checks that a table yields the right data, and counts the traffic of the
links."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from meshpar_kernels.collectives.table import Table

Link = tuple[int, int, int]
"""A directed link of the torus: source rank, dim, and direction +1 or -1."""


class ScheduleError(ValueError):
    """A wrong table: it reads an empty slot, overwrites an unread one, or ends with
    wrong data."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """Link traffic of a schedule.

    Attributes:
      loads: for each step, slots over each link that is used.
      hops: for each step, links on the longest way.
    """

    loads: tuple[dict[Link, int], ...]
    hops: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.loads)

    def per_link(self) -> dict[Link, int]:
        """Slots over each link in all."""
        total: dict[Link, int] = {}
        for load in self.loads:
            for link, slots in load.items():
                total[link] = total.get(link, 0) + slots
        return total

    def seconds(self, slot_bytes: float, axes: Sequence[tuple[int, bool, float, float]]) -> float:
        """α-β: each step takes its longest way's latency and its busiest link's traffic.

        Args:
          slot_bytes: bytes of a slot.
          axes: (size, ring, bytes/s of a link one way, seconds of a hop) of each dimension.
        """
        total = 0.0
        for load, hops in zip(self.loads, self.hops, strict=True):
            traffic = max((slots * slot_bytes / axes[dim][2] for (_, dim, _), slots in load.items()), default=0.0)
            latency = max((axes[dim][3] for _, dim, _ in load), default=0.0)
            total += latency * hops + traffic
        return total


def simulate(table: Table, torus: Sequence[int] | None = None, rings: Sequence[bool] | None = None) -> Trace:
    """Execute a table, check it, and count the slots sent over each link.

    All reads of a step precede its writes. But a slot that is written in the step that reads it is an error, since a
    backend may execute these in either order.

    Args:
      table: the schedule.
      torus: sizes of the torus of the ranks (row-major); None: the table's.
      rings: whether each of its dims wraps around; None: all do.

    Raises:
      ScheduleError: with the row that is wrong.
    """
    ranks, slots = table.ranks, table.slots
    owner = np.arange(slots) // table.chunks
    # who[r, s, q]: how often rank q's contribution is in slot s of rank r
    who = np.zeros((ranks, slots, ranks), np.int32)
    if table.kind == "all_gather":
        who[owner, np.arange(slots), owner] = 1
        fresh = np.zeros((ranks, slots), bool)
    else:
        who[np.arange(ranks), :, np.arange(ranks)] = 1
        fresh = np.ones((ranks, slots), bool)  # whether a slot has content that was neither sent nor added
    torus = table.sizes if torus is None else tuple(torus)
    rings = [True] * len(torus) if rings is None else list(rings)
    loads, longest = [], []
    for number, transfers in enumerate(table.steps):
        before = who.copy()
        read: set[tuple[int, int]] = set()
        written: set[tuple[int, int]] = set()
        channels: set[int] = set()
        load: dict[Link, int] = {}
        far = 0
        for t in transfers:
            if t.channel in channels:
                raise ScheduleError(f"step {number}: channel {t.channel} is used twice")
            channels.add(t.channel)
            if len({d for _, d in t.pairs}) != len(t.pairs):
                raise ScheduleError(f"step {number}, channel {t.channel}: two ranks send to one")
            for source, target in t.pairs:
                route = list(_route(source, target, torus, rings))
                far = max(far, len(route))
                for link in route:
                    load[link] = load.get(link, 0) + t.slots.shape[1]
                for slot in t.slots[source].tolist():
                    where = f"step {number}: slot {slot} from rank {source} to rank {target}"
                    if not before[source, slot].any():
                        raise ScheduleError(f"{where}: there is nothing in it yet")
                    read.add((source, slot))
                    fresh[source, slot] = False
                    if (target, slot) in written and not t.add:  # additions of several channels are ordered
                        raise ScheduleError(f"{where}: it is written twice in this step")
                    written.add((target, slot))
                    if t.add:
                        who[target, slot] += before[source, slot]
                    elif fresh[target, slot]:
                        raise ScheduleError(f"{where}: it is overwritten before it was read")
                    else:
                        who[target, slot] = before[source, slot]
        if both := read & written:
            rank, slot = min(both)
            raise ScheduleError(f"step {number}: slot {slot} of rank {rank} is read and written in one step")
        for rank, slot in written:
            fresh[rank, slot] = True
        loads.append(load)
        longest.append(far)
    _check_end(table, who, owner)
    return Trace(tuple(loads), tuple(longest))


def _check_end(table: Table, who: np.ndarray, owner: np.ndarray) -> None:
    """Check that at the end every slot that the collective defines has the contributions of the right ranks.

    Args:
      who: int32 [ranks, slots, ranks]: how often rank q's contribution is in slot s of rank r, at [r, s, q].
      owner: int [slots]: the rank that a slot belongs to.

    Raises:
      ScheduleError: a slot has other contributions.
    """
    ranks = table.ranks
    for rank, slot in itertools.product(range(ranks), range(table.slots)):
        if table.kind == "all_gather":
            want = np.arange(ranks) == owner[slot]
        elif table.kind == "all_reduce" or owner[slot] == rank:
            want = np.ones(ranks, bool)
        else:
            continue
        if not np.array_equal(who[rank, slot], want):
            raise ScheduleError(
                f"at the end slot {slot} of rank {rank} holds contributions {who[rank, slot].tolist()} of the "
                f"ranks, not {want.astype(int).tolist()}"
            )


def _route(source: int, target: int, torus: Sequence[int], rings: Sequence[bool]) -> Iterator[Link]:
    """The links from one rank to another: along one dimension after the other, the shorter way."""
    position = list(np.unravel_index(source, torus))
    target_position = np.unravel_index(target, torus)
    for dim, n in enumerate(torus):
        ahead = (int(target_position[dim]) - int(position[dim])) % n
        forward = ahead <= n - ahead if rings[dim] else target_position[dim] >= position[dim]
        while position[dim] != target_position[dim]:
            yield int(np.ravel_multi_index(tuple(position), torus)), dim, 1 if forward else -1
            position[dim] = (position[dim] + (1 if forward else -1)) % n
