"""A simulator of schedules, in NumPy: checks that a table yields the right data, and counts the traffic of the links."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from meshpar_kernels.collectives.schedule_table import Table

Link = tuple[int, int, int]
"""A directed link of the torus: source rank, dim, and direction +1 or -1."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """Link traffic of a schedule.

    Attributes:
      loads: for each step, slots over each link that is used.
      hops: for each step, links on the longest way.
    """

    loads: tuple[Counter[Link], ...]
    hops: tuple[int, ...]

    def per_link(self) -> Counter[Link]:
        """Slots over each link in all."""
        return sum(self.loads, Counter())

    def seconds(self, slot_bytes: float, axes: Sequence[tuple[int, bool, float, float]]) -> float:
        """α-β: each step takes its longest way's latency and its busiest link's traffic.

        Args:
          slot_bytes: bytes of a slot.
          axes: (size, ring, bytes/s of a link one way, seconds of a hop) of each dimension.
        """
        total = 0.0
        for load, hops in zip(self.loads, self.hops, strict=True):
            traffic = max((slots * slot_bytes / axes[dim][2] for (_, dim, _), slots in load.items()), default=0.0)
            total += max((axes[dim][3] for _, dim, _ in load), default=0.0) * hops + traffic
        return total


def simulate(table: Table, torus: Sequence[int] | None = None, rings: Sequence[bool] | None = None) -> Trace:
    """Execute a table, assert that its data is right, and count the slots sent over each link.

    All reads of a step precede its writes. But no slot may be written in a step that reads it, since a backend may execute these in
    either order.

    Args:
      table: the schedule.
      torus: sizes of the torus of the ranks (row-major); None: the table's.
      rings: whether each of its dims wraps around; None: all do.
    """
    ranks, slots = table.ranks, table.slots
    owner = np.arange(slots) // table.chunks
    who = np.zeros((ranks, slots, ranks), int)  # how often rank q's contribution is in slot s of rank r, at [r, s, q]
    if table.kind == "all_gather":
        who[owner, np.arange(slots), owner] = 1
    else:
        who[np.arange(ranks), :, np.arange(ranks)] = 1
    torus = table.sizes if torus is None else tuple(torus)
    rings = [True] * len(torus) if rings is None else list(rings)
    loads, longest = [], []
    for transfers in table.steps:
        before, load, far = who.copy(), Counter(), 0
        read: set[tuple[int, int]] = set()
        written: set[tuple[int, int]] = set()
        assert len({t.channel for t in transfers}) == len(transfers)
        for t in transfers:
            assert len({target for _, target in t.pairs}) == len(t.pairs)
            for source, target in t.pairs:
                route = list(_route(source, target, torus, rings))
                far = max(far, len(route))
                load.update(dict.fromkeys(route, t.slots.shape[1]))
                for slot in t.slots[source].tolist():
                    where = f"step {len(loads)}: slot {slot} from rank {source} to rank {target}"
                    assert before[source, slot].any(), f"{where}: there is nothing in it yet"
                    assert t.add or (target, slot) not in written, f"{where}: it is written twice"
                    who[target, slot] = before[source, slot] + (who[target, slot] if t.add else 0)
                    read.add((source, slot))
                    written.add((target, slot))
        assert not read & written, f"step {len(loads)} reads and writes {read & written}"
        loads.append(load)
        longest.append(far)
    if table.kind == "all_gather":
        assert (who == (np.arange(ranks) == owner[:, None])).all()
    else:
        own = np.arange(ranks)[:, None] == owner
        assert (who[own] == 1).all()
        assert table.kind == "reduce_scatter" or (who == 1).all()
    return Trace(tuple(loads), tuple(longest))


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
