"""The certificate of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .relation import Cause

Status = Literal["proven", "not verified", "refused"]


@dataclass(frozen=True, slots=True)
class Result:
    """One result of the program.

    Attributes:
      path: its name.
      status: ``proven``: it is the result of the function as written, sharded by its spec. ``not verified``: no lemma, or another
        expression. ``refused``: relations that contradict each other.
      cause: why it is not proven.
    """

    path: str
    status: Status
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class Proof:
    """A certificate that a per-device program computes the function as it was written, for these shapes on this mesh.

    Attributes:
      results: one for each result.
      ops: family of lemmas → number of equations of the per-device program that its lemmas prove.
      failed: cause → number of equations without a relation.
      unreached: equations that read their results.
      seconds: CPU time.
    """

    results: tuple[Result, ...]
    ops: Mapping[str, int]
    failed: Mapping[Cause, int]
    unreached: int
    seconds: float

    @property
    def proven(self) -> bool:
        """Whether all results are proven."""
        return all(r.status == "proven" for r in self.results)

    @property
    def status(self) -> Status:
        """The worst status of a result."""
        found = {r.status for r in self.results}
        return "refused" if "refused" in found else "not verified" if "not verified" in found else "proven"
