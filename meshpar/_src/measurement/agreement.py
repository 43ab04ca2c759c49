"""Compares the results of layouts before they are measured: rounding must explain every difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import CheckError, CompilerError
from ..global_arrays import place
from ..layout import UNSHARDED
from ..units import mesh_text
from ..verify.check import Subject, check_subject
from ..verify.numbers import Difference, host, worst_of


@dataclass(frozen=True)
class Candidate:
    """A layout to measure.

    Attributes:
      layout: its text.
      subject: the step under the layout, with its arguments.
    """

    layout: str
    subject: Subject

    @property
    def name(self) -> str:
        """The layout and the mesh, for messages."""
        return f"`{self.layout or UNSHARDED}` on {mesh_text(self.subject.plan.sizes)}"


def placed_arguments(subject: Subject) -> list[Any]:
    """The arguments with the shardings of the program; donated ones are copied."""
    donated, out = subject.plan.donated, []
    for k, (x, sharding) in enumerate(zip(subject.arrays, subject.shardings, strict=True)):
        if isinstance(x, jax.Array | np.ndarray):
            x = place(x, sharding)
            x = jnp.copy(x) if k in donated else x
        out.append(x)
    return jax.block_until_ready(out)


def compare(candidates: Sequence[Candidate], tolerance: float, tell: Callable[[str], None]) -> None:
    """Compile and run every layout once, and compare its results with the first layout's; returns nothing if
    they agree.

    Args:
      candidates: the layouts to measure, each with its compiled step.
      tolerance: allowed difference of a result, relative to its largest absolute value.
      tell: receives a progress text before each compilation.

    Raises:
      CheckError: results differ by more than rounding.
      CompilerError: a layout does not compile, or does not fit into memory.
    """
    first: list[np.ndarray] = []
    for candidate in candidates:
        tell(f"compiling {candidate.name}")
        subject = candidate.subject
        try:
            outs = jax.block_until_ready(subject.sharded(placed_arguments(subject)))
        except jax.errors.JaxRuntimeError as e:
            fix = "a smaller batch, or a layout that splits more"
            raise CompilerError(f"{candidate.name} does not run: {str(e).splitlines()[0]}", fixes=[fix]) from e
        if not first:
            first = [host(x) for x in outs]
            continue
        differences = [worst_of(a, b, tolerance) for a, b in zip(outs, first, strict=True)]
        worst = max(range(len(outs)), key=lambda k: (not differences[k].ok, differences[k].relative), default=None)
        if worst is not None and not differences[worst].ok:
            path = subject.plan.outputs[worst].path
            _check_rounding(candidates[0], candidate, path, differences[worst], tolerance)


def _check_rounding(first: Candidate, other: Candidate, path: str, worst: Difference, tolerance: float) -> None:
    """Compare two layouts whose results differ with the unsharded run; returns nothing if rounding explains the differences.

    Args:
      path, worst: the result that differs most, and its difference.
      tolerance: allowed difference of a result, relative to its largest absolute value.

    Raises:
      CheckError: rounding does not explain a difference.
    """
    failure = CheckError(
        f"{path}: {other.name} gives other numbers than {first.name}: the largest difference is {worst.relative:.2g} of the "
        f"largest value, and {worst.allowed:.2g} is allowed",
        path=path,
        fixes=["mp.check(step, …, layout=…) says which op differs", "a step must give the same numbers in every run"],
    )
    for each in (first, other):
        try:
            row = check_subject(each.subject, tolerance)
        except jax.errors.JaxRuntimeError:  # the step does not fit on one device
            raise failure from None
        if row.error is not None:
            raise row.error from failure
