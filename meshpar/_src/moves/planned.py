"""The plan of a move: its traffic, seconds and memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ..hardware.chips import Chip
from ..plan.collectives import Collective
from .plan import Memory, MovedArray, memory_of, sum_by_key


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """Source or target of a move, in words.

    Attributes:
      mesh: axis → size; layout: as text; "": not given as rules.
      devices: their number.
    """

    mesh: Mapping[str, int]
    layout: str
    devices: int


@dataclasses.dataclass(frozen=True, eq=False)
class MovePlan:
    """What each device sends and needs in a move; :class:`moves.move.Move` describes the attributes."""

    rounds: tuple[tuple[MovedArray, ...], ...]
    source: Side
    target: Side
    donate: bool

    @cached_property
    def arrays(self) -> tuple[MovedArray, ...]:
        """The arrays of all rounds."""
        return tuple(a for of in self.rounds for a in of)

    @property
    def chip(self) -> Chip | None:
        """The chip of the devices; None: not known, and there are no seconds."""
        return self.arrays[0].chip

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of the move, with dims, axes, bytes, count, cause."""
        return tuple(c for a in self.arrays for c in a.collectives)

    @cached_property
    def _traffic(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that each device sends, and receives."""
        totals: tuple[dict[Any, float], dict[Any, float]] = ({}, {})
        for a in self.arrays:
            if a.route is not None:
                for total, of in zip(totals, (a.route.sent, a.route.received), strict=True):
                    for d, n in zip(a.route.devices, of.tolist(), strict=True):
                        total[d] = total.get(d, 0.0) + n * a.wire
        sent, received = (np.array([*total.values(), 0.0]) for total in totals)
        return sent, received

    @property
    def bytes_sent(self) -> int:
        """Bytes that a device sends, at most."""
        return int(self._traffic[0].max())

    @property
    def bytes_received(self) -> int:
        """Bytes that a device receives, at most: the elements that it needs and does not have."""
        return int(self._traffic[1].max())

    @property
    def links(self) -> dict[str, float]:
        """Kind of link (``ICI``, ``NVLink``, ``DCN``, ``host``; ``links``: not known) → bytes that a device sends over it."""
        return sum_by_key(a.links for a in self.arrays)

    @property
    def seconds(self) -> float | None:
        """Estimated seconds, one collective after the other; None: the chip is not known."""
        if self.chip is None:
            return None
        copies = self.links.get("host", 0.0) / self.chip.per_device().host_link
        return sum(c.total_seconds for c in self.collectives) + copies

    @cached_property
    def memory(self) -> Memory:
        """Bytes of a device before and after the move, and at its peak."""
        return memory_of(self.rounds, self.donate)

    @property
    def rounds_text(self) -> str:
        """``3 programs, 12 collectives``."""
        calls, n = sum(c.runs for c in self.collectives), len(self.rounds)
        return f"{n} program{'s' * (n != 1)}, {calls} collective{'s' * (calls != 1)}"

    def to_json(self) -> str:
        """The move as JSON: source, target, bytes, links, seconds, memory, and every array."""
        arrays = [
            {"path": a.path, "sources": a.sources, "dims": a.dims, "shape": a.shape, "dtype": str(a.dtype),
             "before": [str(o.sharding.spec) for o in a.operands], "after": str(a.sharding.spec), "links": a.links,
             "collectives": [c.to_dict() for c in a.collectives]} for a in self.arrays
        ]  # fmt: skip
        sides = {k: dataclasses.asdict(side) for k, side in (("source", self.source), ("target", self.target))}
        numbers = {k: getattr(self, k) for k in ("bytes_sent", "bytes_received", "links", "seconds", "donate")}
        memory = dataclasses.asdict(self.memory)
        return json.dumps({**sides, **numbers, "memory": memory, "rounds": len(self.rounds), "arrays": arrays})
