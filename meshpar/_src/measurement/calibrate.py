"""Measures layouts in interleaved rounds, so that disturbances of the machine affect all of them, and fits efficiencies.

Before that their results are compared: rounding must explain every difference.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import CheckError, CompilerError, MeshError, UnsupportedError
from ..cost.time import time_of
from ..global_arrays import place
from ..hardware.calibration import EFFICIENCIES, JAXLIB, Calibration
from ..hardware.chips import chip_of_kind
from ..layout import UNSHARDED
from ..passes import replan
from ..plan.plan import Plan
from ..plan.request import PlanRequest
from ..units import format_seconds, mesh_text
from ..verify.check import Subject, check_subject
from ..verify.numbers import Difference, host, worst_of
from .fit import fit
from .result import CalibrationResult, CalibrationRow

LISTED_BOUNDS, NOMINAL_BOUNDS = (0.02, 1.0), (1e-4, 1e4)
"""(Smallest, largest) fitted efficiency, of chips in the chip table, and of others, which have nominal peak rates."""


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


def calibrate(
    candidates: Sequence[Candidate],
    *,
    rounds: int,
    tolerance: float,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> CalibrationResult:
    """The result of :func:`meshpar.hardware.calibrate` for planned layouts.

    Args:
      rounds: measured steps of each layout.
      tolerance: allowed relative difference between the results of two layouts.
      tell: progress callback, called with a text.
      clock: returns seconds.
    """
    if not candidates:
        fix = 'layout=["batch: data", "batch, embed: data"]'
        raise UnsupportedError("mp.hardware.calibrate was given no layouts", fixes=[fix])
    if rounds < 1:
        raise UnsupportedError(f"rounds={rounds!r}: at least 1", fixes=["rounds=9"])
    devices = {d for c in candidates for d in c.subject.plan.mesh.devices.flat}  # type: ignore[union-attr]
    if len(devices) == 1:
        text = "mp.hardware.calibrate was given one device, on which all layouts are the same program"
        fix = "mp.virtual_devices(8) before the first use of a device, for CPU stand-ins"
        raise MeshError(text, fixes=[fix, "or a mesh of more devices"])
    kinds = {d.device_kind for d in devices}
    if len(kinds) > 1:
        text = f"the devices are of several kinds, {', '.join(sorted(kinds))}"
        raise UnsupportedError(text, fixes=["a mesh of one kind"])
    compare(candidates, tolerance, tell)
    times: list[list[float]] = [[] for _ in candidates]
    run = 0
    for r in range(rounds):
        for k in range(len(candidates)):
            k = (k + r) % len(candidates)  # the preceding layout varies
            times[k].append(_once(candidates[k].subject, clock))
            run += 1
            best = min(min(t) for t in times if t)
            tell(f"{rounds * len(candidates)} runs, the shortest {format_seconds(best)}; run {run}")
    return _result(candidates, times, rounds, tell)


def _once(subject: Subject, clock: Callable[[], float]) -> float:
    """Seconds of one step with placed arguments: of the second of two steps, as caches may be cold in the first."""
    seconds = 0.0
    placed = placed_arguments(subject)
    for repeated in (False, True):
        if repeated and subject.plan.donated:
            del placed
            placed = placed_arguments(subject)
        start = clock()
        out = jax.block_until_ready(subject.sharded(placed))
        seconds = clock() - start
        del out
    return seconds


def _result(
    candidates: Sequence[Candidate], times: Sequence[Sequence[float]], rounds: int, tell: Callable[[str], None]
) -> CalibrationResult:
    """The rows, and the calibration fitted to the measured seconds, as a :class:`CalibrationResult`.

    Args:
      times: for each candidate, the seconds of each round.
      tell: receives a progress text.
    """
    kind = candidates[0].subject.plan.mesh.devices.flat[0].device_kind  # type: ignore[union-attr]
    seconds = [statistics.median(t) for t in times]
    spreads = [float(np.subtract(*np.percentile(t, (75, 25)))) / 2 for t in times]
    chip = chip_of_kind(kind)
    hbm = None if chip is not None else _memory()
    start = [1.0 if chip is None else getattr(chip.compiler, k) for k in EFFICIENCIES]

    def with_efficiencies(efficiencies: Sequence[float]) -> Calibration:
        matmuls, memory, links = efficiencies
        return Calibration(kind, JAXLIB, matmuls, memory, links, hbm=hbm)

    def predict(efficiencies: Sequence[float]) -> list[float]:
        measured = (with_efficiencies(efficiencies),)
        plans = [c.subject.plan for c in candidates]
        times = [time_of(replan(plan, replace(request_as_measured(plan), calibrations=measured))) for plan in plans]
        return [0.0 if time is None else time.seconds for time in times]

    tell("fitting the efficiencies of the chip")
    planned = predict(start)
    noise = statistics.median(s / t for s, t in zip(spreads, seconds, strict=True))
    fitted = fit(predict, start, seconds, bounds=NOMINAL_BOUNDS if chip is None else LISTED_BOUNDS, noise=noise)
    found = with_efficiencies(fitted.efficiencies)
    calibration = replace(found, layouts=len(candidates), error=fitted.error, notes=fitted.notes)
    rows = [
        CalibrationRow(mesh_text(c.subject.plan.sizes), c.layout, s, spread, p, f, c.subject.plan.lowering)
        for c, s, spread, p, f in zip(candidates, seconds, spreads, planned, fitted.planned, strict=True)
    ]
    count = len({d for c in candidates for d in c.subject.plan.mesh.devices.flat})  # type: ignore[union-attr]
    ranked = sorted(rows, key=lambda r: (r.seconds, r.layout))
    return CalibrationResult(kind, count, rounds, tuple(ranked), calibration, listed=chip is not None)


def request_as_measured(plan: Plan) -> PlanRequest:
    """The request of a plan with the lowering and the implementation of its collectives in place of ``"auto"``. Where they are
    implemented in several ways, cost decides again."""
    made = {o.choice for o in plan.overlaps} | {"auto" for c in plan.collectives if c.entry.slices_locally}
    (overlap,) = (made or {"xla"}) if len(made) < 2 else {plan.overlap}
    return replace(plan.request, lowering=plan.lowering, overlap=overlap)


def _memory() -> float:
    """Bytes of a device that is not in the chip table: as it reports them, else its share of the machine's memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float(stats.get("bytes_limit") or machine / jax.local_device_count())
