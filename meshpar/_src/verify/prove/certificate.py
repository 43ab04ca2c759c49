"""The certificate of a program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from .relation import Cause

MAX_CAUSES = 5
"""Causes that a printed proof shows."""

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


ASSUMPTIONS = (
    "JAX's ops have the semantics of their documentation, and XLA compiles them so",
    "sums in another order are equal, and so are multiples by numbers and casts to floats in another order: up to rounding",
)


@dataclass(frozen=True, slots=True)
class Proof:
    """A certificate that a per-device program computes the function as it was written, for these shapes on this mesh; print it.

    Attributes:
      results: one for each array that the function returns.
      ops: family of lemmas → number of equations of the per-device program that its lemmas prove.
      failed: cause → number of equations without a relation to a global value; 0 for a cause that is no equation's: all have one,
        and a result is still not that of the function.
      unreached: number of equations that read their results.
      kernels: name → number of calls of kernels, whose local form is assumed to compute their rule.
      seconds: CPU time.
      claims: number of claims of the plan (its collectives by kind and axes, the shardings of arguments and results) that were
        compared with the program; those that do not hold are in ``failed``, as the op ``plan``. None: there is no plan.
      planned: of a proof that fails, the proof against the program that the plan was made of, after the rewrites of meshpar
        (pipelines, gradients of kernels): what a layout may change is proven there, and the rewrites are not.
    """

    results: tuple[Result, ...]
    ops: Mapping[str, int]
    failed: Mapping[Cause, int]
    unreached: int
    kernels: Mapping[str, int]
    seconds: float
    claims: int | None = None
    planned: Proof | None = None

    @property
    def errors(self) -> tuple[Cause, ...]:
        """The causes that are exceptions in lemmas: defects of the checker, and no proof."""
        return tuple(c for c in self.failed if c.error)

    @property
    def proven(self) -> bool:
        """Whether all results are proven."""
        return all(r.status == "proven" for r in self.results)

    @property
    def status(self) -> Status:
        """``refused`` if a result is; else ``not verified`` if a result is not; else ``proven``."""
        found = {r.status for r in self.results}
        return "refused" if "refused" in found else "not verified" if "not verified" in found else "proven"

    @property
    def share(self) -> float:
        """The part of the equations of the per-device program that are proven."""
        done = sum(self.ops.values())
        return done / max(done + self.unreached + sum(self.failed.values()), 1)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of the proof."""
        kernels = ", ".join(f"{name} ({n})" for name, n in self.kernels.items())
        return (*ASSUMPTIONS, f"the local forms of kernels compute their rules: {kernels}") if kernels else ASSUMPTIONS

    def to_json(self) -> str:
        """The proof as JSON."""
        values = asdict(replace(self, failed={}, planned=None))
        values |= {"status": self.status, "share": self.share, "assumptions": self.assumptions}
        values["failed"] = [{**asdict(c), "count": n} for c, n in self.failed.items()]
        return json.dumps(values | {"planned": self.planned and json.loads(self.planned.to_json())})

    def __str__(self) -> str:
        count = sum(r.status == "proven" for r in self.results)
        mark = "✓" if self.proven else "✗"
        total, families = sum(self.ops.values()), ", ".join(f"{k} {n}" for k, n in sorted(self.ops.items()))
        lines = [f"{mark} {self.status}: {count} of {len(self.results)} results are those of the function as written"]
        lines.append(f"  {total} ops proven ({self.share:.0%}): {families}")
        if self.claims is not None:
            wrong = sum(c.op == "plan" for c in self.failed)
            text = f"{wrong} of {self.claims} claims of the plan do not hold"
            text = text if wrong else f"{self.claims} claims of the plan hold"
            lines.append(f"  {text}: collectives, shardings of arguments and results")
        lines += [f"  {c}" for c in self.errors]
        causes = [(c, n) for c, n in self.failed.items() if not c.error]
        lines += [f"  not proven: {c}" + f", {n} times" * (n > 1) for c, n in causes[:MAX_CAUSES]]
        if self.planned is not None:
            proven = sum(r.status == "proven" for r in self.planned.results)
            lines.append(f"  of the program after meshpar's rewrites: {proven} of {len(self.results)} results")
        lines += [f"  assumed: {text}" for text in self.assumptions]
        return "\n".join(lines)
