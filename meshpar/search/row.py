"""One candidate of a search, planned."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Layout


@dataclass(frozen=True)
class Row:
    """A candidate that was planned.

    Attributes:
      mesh, layout, lowering: as text, to be copied.
      seconds: of a step, by the plan.
      peak: bytes of a device at the peak.
      sent: bytes that a device sends in a step.
      fits: whether the peak is within the part of the memory that may be used.
      name: of the known scheme that it is, or ``"yours"``; "".
      front: no other is both shorter and smaller.
      variant: the program that it is of: ``"remat=full, overlap=xla"``; "" where there is one.
      compiled: what the compiler said of it: "" where it was not asked.
    """

    mesh: str
    layout: str
    seconds: float
    peak: float
    sent: float
    fits: bool
    name: str = ""
    front: bool = False
    compiled: str = ""
    variant: str = ""
    lowering: str = "shard_map"

    @property
    def rules(self) -> int:
        """How many rules the layout has."""
        return len(Layout(self.layout).rules)
