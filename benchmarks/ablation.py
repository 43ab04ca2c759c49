"""Which ingredients of the cost model earn their place: the standard rows of agreement.py, recomputed without each one.

    python benchmarks/ablation.py                        # every ingredient, about a minute on one core
    python benchmarks/ablation.py --only "vector units"  # ingredients whose name contains the text

Plans are made once and stay fixed: only their step time and peak memory are recomputed, and compared with the compiler's,
which compiled_steps.json has from one run of agreement.py. Nothing is compiled. An ingredient is switched off by
replacing the functions that :func:`ingredients` lists.

An ingredient earns its place if removing it changes a median error by at least 0.2 points, a largest error by at least 1 point (of
the step or of the memory peak), or the order of a pair of layouts. The stored numbers are rounded, to 0.2 % of a step or a peak at
most. A row tests an ingredient only if its plan uses it: few plans here have rings, and none a lookup table at its peak.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from agreement import TRIPLES, Row, Triple, in_order
from tables import Table

import meshpar as mp
from meshpar._src.cost import collective_matmul, kernel_time, memory, schedule
from meshpar._src.cost import time as step_time
from meshpar._src.cost.kernel_time import kernel_times
from meshpar._src.cost.tiles import Tiles

COMPILED = Path(__file__).parent / "compiled_steps.json"
MIN_MEDIAN_CHANGE = 0.002
"""Change of a median relative error from which an ingredient earns its place."""
MIN_WORST_CHANGE = 0.01
"""The same of a largest relative error."""

Replacement = tuple[Any, str, Any]
"""(module or class, name of its function, the function instead)."""


def ingredients() -> dict[str, list[Replacement]]:
    """Name of each ingredient of the cost model → what replaces its functions where it is left out."""
    no_overlap = lambda plan: {c: {} for c in schedule.async_collectives(plan)}  # noqa: E731
    vmem = [(kernel_time, "buffers_in_vmem", lambda *args: {})]
    padding = [(Tiles, "padding", lambda *args: 1.0)]
    hypot = [(kernel_time, "kernel_seconds", _longer_of_matmul_and_traffic)]
    return {
        "vector units": [(collective_matmul, "vector_seconds", lambda *args: 0.0)],
        "hypot of matmul and traffic (else max)": hypot,
        "operands reread for each matmul tile": [(kernel_time, "reread_bytes", lambda *args: 0.0)],
        "images that stay in VMEM": vmem,
        "images padded to tiles": padding,
        "images in VMEM, and padded": [*vmem, *padding],
        "matmuls concurrent with collectives": [(schedule, "concurrent_matmuls", no_overlap)],
        "schedule of kernels and collectives (else max)": [(step_time, "_estimate", _longer_of_kernels_and_links)],
        "results gathered, then copied": [
            (memory, "gathered_then_copied", lambda *args: False), (kernel_time, "gathered_then_copied", lambda *args: False)
        ],
        "copy of a gathered lookup table": [(memory._Live, "table", lambda *args: None)],
        "ring buffers": [(memory._Live, "blocks", lambda *args: 0.0)],
    }  # fmt: skip


def _longer_of_matmul_and_traffic(
    chip: Any, matmuls: float, traffic: float, elements: float, convolves: bool = False
) -> float:
    """Seconds of a kernel whose matmuls hide its traffic entirely, or the reverse."""
    vector = collective_matmul.vector_seconds(chip, elements)
    if chip.switch:
        return max(matmuls, traffic)
    return max(matmuls, vector) + traffic if convolves else max(matmuls, traffic + vector)


def _longer_of_kernels_and_links(plan: Any) -> float:
    """Seconds of a step that hides every asynchronous collective if its kernels take as long in sum."""
    asynchronous = {t.collective for s in schedule.schedules(plan).values() for t in s.transfers if t.is_async}
    kernels = math.fsum(k.seconds * k.count for k in kernel_times(plan).values())
    links = math.fsum((c.seconds or 0.0) * (c.count or 1) for c in asynchronous)
    blocking = math.fsum((c.seconds or 0.0) * (c.count or 1) for c in plan.collectives if c not in asynchronous)
    return max(kernels, links) + blocking


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of the rows.

    Attributes:
      step, peak: (median, largest, signed; the name of its row) of the step's seconds and of the memory peak.
      ordered, pairs: pairs of layouts that the plans order as the schedules do, and all pairs.
    """

    step: tuple[float, float, str]
    peak: tuple[float, float, str]
    ordered: int
    pairs: int

    def differs(self, base: Errors) -> bool:
        """Whether the errors differ from others by so much that an ingredient earns its place."""
        for (median, worst, _), (base_median, base_worst, _) in ((self.step, base.step), (self.peak, base.peak)):
            if abs(median - base_median) >= MIN_MEDIAN_CHANGE or abs(abs(worst) - abs(base_worst)) >= MIN_WORST_CHANGE:
                return True
        return self.ordered != base.ordered


def errors_of(plans: Sequence[tuple[Triple, mp.Plan]]) -> Errors:
    """The errors of plans, recomputed with the functions in their present state."""
    compiled = json.loads(COMPILED.read_text())["rows"]
    rows = []
    for t, plan in plans:
        plan.program._results.clear()  # the cache depends on functions that may be replaced
        fresh = dataclasses.replace(plan)  # without the costs cached on the plan
        row = Row(t.name, t.chip, "shard_map", "full", planned_step=fresh.seconds or math.nan)
        row.planned_peak = fresh.memory.peak
        row.compiled_step, row.compiled_peak = compiled[t.name]["step_seconds"], compiled[t.name]["peak_bytes"]
        rows.append(row)
    ordered, pairs, _ = in_order(rows, [t for t, _ in plans])
    step, peak = (_median_and_worst(rows, error) for error in (lambda r: r.step_error, lambda r: r.memory_error))
    return Errors(step, peak, ordered, pairs)


def _median_and_worst(rows: Sequence[Row], error: Callable[[Row], float]) -> tuple[float, float, str]:
    worst = max(rows, key=lambda r: abs(error(r)))
    return statistics.median(abs(error(r)) for r in rows), error(worst), worst.name


@contextlib.contextmanager
def without(replacements: Sequence[Replacement]) -> Iterator[None]:
    """The cost model with functions replaced.

    Raises:
      AttributeError: a module has no function of that name.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, function in replacements:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def cells(name: str, errors: Errors, base: Errors) -> list[str]:
    """A row of the table."""
    (median, worst, row), (peak_median, peak_worst, peak_row) = errors.step, errors.peak
    verdict = "" if errors is base else "earns its place" if errors.differs(base) else "changes too little"
    return [name, f"{100 * median:.1f} %", f"{100 * worst:+.1f} % ({row})", f"{100 * peak_median:.1f} %",
            f"{100 * peak_worst:+.1f} % ({peak_row})", f"{errors.ordered}/{errors.pairs}", verdict]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="ingredients whose name contains this text; may be repeated")
    args = parser.parse_args()
    begin = time.perf_counter()
    compiled = json.loads(COMPILED.read_text())["rows"]
    plans = [(t, t.plan()) for t in TRIPLES if t.standard and t.name in compiled]
    base = errors_of(plans)
    table = Table("without", "step: median", "largest", "peak: median", "largest", "pairs in order", "")
    table.add_row(*cells("(complete model)", base, base))
    for name, replacements in ingredients().items():
        if not args.only or any(text in name for text in args.only):
            with without(replacements):
                table.add_row(*cells(name, errors_of(plans), base))
    print(f"\n{len(plans)} rows, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
