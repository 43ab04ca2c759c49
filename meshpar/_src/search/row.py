"""One planned candidate of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..layout import Layout
from ..mesh import parse_mesh

Objective = Literal["time", "memory"]


@dataclass(frozen=True)
class Row:
    """A candidate of a search that has been planned, with the numbers of its plan.

    Attributes:
      mesh, layout, lowering: text for :func:`meshpar.jit`.
      seconds: estimated step time.
      peak: peak memory of a device, in bytes.
      sent: bytes that a device sends in a step.
      fits: whether the peak fits the usable memory.
      name: name of the known scheme, or ``"yours"`` for a layout of the user's; "" for other candidates.
      front: whether it is on the Pareto front of step time and peak.
      variant: name of the program, ``"remat=full, overlap=xla"``; "" if there is only one program.
      schedule, gather: of its pipelines, text for :func:`meshpar.jit`; "" for a candidate without stages.
      compiled: summary of the compiled program; "" if it was not compiled.
      mfu: its model FLOP utilisation.
      undivided: the first dim of an argument that an optional rule does not divide, ``"batch of 32 is not divisible by 256"``; "".
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
    schedule: str = ""
    gather: str = ""
    mfu: float = 0.0
    undivided: str = ""

    @property
    def cost(self) -> tuple[float, float]:
        """Step time and peak: they identify candidates whose axes differ only in name."""
        return self.seconds, self.peak

    @property
    def stages(self) -> dict[str, str]:
        """The options of its pipelines; empty without stages."""
        return {"schedule": self.schedule, "gather": self.gather} if self.schedule else {}

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Number of rules of the layout, of axes in them, each counted once in each rule, and of axes of the mesh."""
        rules = Layout(self.layout).rules
        return len(rules), sum(len(r.axes) for r in rules), len(parse_mesh(self.mesh))

    def rank(self, objective: Objective) -> tuple[int, float, float]:
        """Sort key, best first: candidates that fit, by the objective; then the others, by their peak."""
        if not self.fits:
            return (1, self.peak, self.seconds)
        return (0, self.seconds, self.peak) if objective == "time" else (0, self.peak, self.seconds)
