"""Measures layouts in interleaved rounds, so that disturbances of the machine affect all of them, and fits efficiencies."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from ...errors import MeshError, UnsupportedError
from ..cost.time import time_of
from ..hardware.calibration import EFFICIENCIES, JAXLIB, Calibration
from ..hardware.chips import chip_of_kind
from ..passes import replan
from ..plan.plan import Plan
from ..plan.request import PlanRequest
from ..units import format_seconds, mesh_text
from ..verify.check import Subject
from .agreement import Candidate, compare, placed_arguments
from .fit import fit
from .result import CalibrationResult, CalibrationRow

LISTED_BOUNDS, NOMINAL_BOUNDS = (0.02, 1.0), (1e-4, 1e4)
"""(Smallest, largest) fitted efficiency, of chips in the chip table, and of others, which have nominal peak rates."""


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
