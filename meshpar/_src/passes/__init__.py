"""From a program to its plan: the best plan of its variants (:mod:`plan.planner`), and passes over its steps.

An implementation of each collective next to matmuls comes first (:mod:`passes.collective_matmul`); then :data:`PASSES`, in
that order. Where cost decides about rings, plans with and without them are compared after all passes.

.. code-block:: text

    best_plan_before_passes  the best plan before any pass
    lowering                 the lowering for lowering="auto"
    collective_matmul        rings and fused kernels in place of collectives next to matmuls
    merge_halo_exchanges     equal halo exchanges are merged
    matmul_order             the order of matmuls that the program leaves open
    all_reduce_choice        an all-reduce in place of a staged reduce-scatter
    barriers                 barriers against reordering by XLA
    dependencies             data dependencies between ops
    indivisible_dims         the cost of dims that a mesh does not divide
    advice                   notes and warnings
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..compat.jax import without_gc
from ..cost.caching import with_shared_results
from ..cost.collective_matmul import warn_about_lines
from ..cost.device_computation import free_caches
from ..cost.time import time_of
from ..dims import check_choice
from ..hardware.compiler_options import choose_options
from ..hardware.topology import refused_options
from ..plan.plan import Choice, Plan
from ..plan.planner import planned
from ..plan.request import PlanRequest
from ..plan.shard_shapes import format_axes
from ..plan.steps import Body
from ..plan.text import plan_steps
from ..plan.verify import verify
from ..program.ir import Program
from ..units import format_seconds
from .advice import warn, with_notes
from .all_reduce_choice import choose_all_reduce
from .barriers import (
    compute_results_early,
    pad_rows,
    separate_matmuls,
    separate_slices,
    serialize_loops,
    serialize_results,
)
from .best_plan_before_passes import RANK, plan_without_passes
from .collective_matmul import MODES, activation_axes, find_pairs, with_overlaps
from .lowering import AUTO, resolve_lowering, shorter_lowering
from .matmul_order import schedule
from .merge_halo_exchanges import merge_equal_sends


class Pass(NamedTuple):
    """A function from a plan to its steps with a change, and the plans that it is for.

    Attributes:
      run: the function.
      lowerings: the ones that emit its additions to a plan: barriers exist in ``"shard_map"`` alone. For the
        others it does not run, so that no estimate contains a step that the program does not have.
      quirk: the entry of :mod:`compat.quirks` that it works around; it does not run for chips and compiler versions without
        it (:class:`hardware.compiler_constants.CompilerModel`). None: it is for all of them.
    """

    run: Callable[[Plan], Body]
    lowerings: tuple[str, ...] = ("shard_map",)
    quirk: str | None = None

    def applies_to(self, plan: Plan) -> bool:
        """Whether it is for the lowering of a plan and the compiler of its chip."""
        return plan.lowering in self.lowerings and (self.quirk is None or self.quirk in plan.compiler.quirks)


PASSES: tuple[Pass, ...] = (
    Pass(choose_all_reduce, ("shard_map", "jit")),
    Pass(schedule, quirk="LATE_GRADIENTS"),
    Pass(separate_matmuls, quirk="FUSED_EPILOGUE"),
    Pass(serialize_loops, quirk="LOOPS_BEFORE_REDUCTIONS"),
    Pass(compute_results_early, quirk="LATE_RESULTS"),
    Pass(serialize_results, quirk="GATHER_NOT_IN_PLACE"),
    Pass(separate_slices, quirk="STACK_CAST_BEFORE_LOOP"),
    Pass(pad_rows, quirk="SINGLE_ROW"),
    Pass(merge_equal_sends),
)


@without_gc()
def make_plan(program: Program, request: PlanRequest) -> Plan:
    """The plan of a program, after all passes, with warnings.

    Raises:
      UnsupportedError: an ``overlap`` that does not exist; layers that cannot be a pipeline.
      UnknownAxisError, UnknownDimError, DivisibilityError, JoinError.
    """
    plan = with_notes(with_passes(planned(program, request, RANK)))
    warn(plan)
    return plan


@without_gc()
def replan(plan: Plan, request: PlanRequest) -> Plan:
    """A plan of the program of another plan, after all passes; warnings of the first plan are not repeated.

    Raises:
      UnknownAxisError, UnknownDimError, DivisibilityError, JoinError: as for any plan.
    """
    return with_notes(with_passes(plan_without_passes(plan, request)))


def with_passes(plan: Plan) -> Plan:
    """A plan of :func:`plan_without_passes` after all passes.

    It resolves the lowering, overlap and compiler options of the plan's request. Where ``"auto"`` leaves the lowering open, it
    returns the plan with the shorter step of two (:func:`passes.lowering.shorter_lowering`); a requested ring or fused kernel does
    not leave it open, because only ``"shard_map"`` has them.

    Raises:
      UnsupportedError: an ``overlap`` that does not exist.
    """
    request = plan.request
    lowering, overlap, reason = resolve_lowering(plan, request.lowering, request.overlap)
    check_choice("overlap", overlap, MODES, "modes")
    options = choose_options(
        plan.chip,
        {c.op for c in plan.collectives},
        request.options,
        request.compiler_options,
        lambda values: refused_options(plan.mesh, values),
    )
    plan = replace(plan, lowering=lowering, overlap=overlap, lowering_reason=reason, options=options)
    best = _run_passes(plan) if overlap == "off" else _with_overlaps(plan)
    if plan.chip is None or request.lowering != AUTO or lowering == "jit" or overlap in ("ring", "pallas"):
        return best
    jit = separated = _run_passes(replace(plan, lowering="jit", overlap="off"))
    if "FUSED_EPILOGUE" in plan.compiler.quirks and (body := separate_matmuls(jit)) is not jit.body:
        separated = replace(jit, body=body)
    chosen = shorter_lowering(best, jit, separated)
    free_caches(jit if chosen is best else best)
    if separated is not jit:
        free_caches(separated)
    return chosen


def _with_overlaps(plan: Plan) -> Plan:
    """The plan after all passes, with rings over those axes of activations where the step then is shorter."""
    pairs = find_pairs(plan)
    joint: dict[tuple[str, ...], Choice] = dict.fromkeys(activation_axes(plan, pairs), "xla")
    best = _run_passes(with_overlaps(plan, pairs, joint))
    reasons: dict[tuple[str, ...], str] = {}
    for axes in joint:
        if not any(o.together and o.axes == axes for o in best.overlaps):
            continue
        with_rings = _run_passes(with_overlaps(plan, pairs, {**joint, axes: "ring"}))
        xla, ring = _seconds(best), _seconds(with_rings)
        reasons[axes] = (
            f"the step takes {format_seconds(ring)} with rings over {format_axes(axes)}, {format_seconds(xla)} without"
        )
        if xla - ring >= max(plan.compiler.min_gain_seconds, plan.compiler.min_joint_gain * xla):
            best, with_rings, joint[axes] = with_rings, best, "ring"
        free_caches(with_rings)
    if reasons:
        explained = [replace(o, reason=f"{o.reason}; {reasons[o.axes]}") if o.together else o for o in best.overlaps]
        best = with_shared_results(best, overlaps=tuple(explained))
    warn_about_lines(best)
    return best


def _seconds(plan: Plan) -> float:
    """The estimated seconds of a step of a plan with a known chip."""
    time = time_of(plan)
    assert time is not None
    return time.seconds


def _run_passes(plan: Plan) -> Plan:
    """The plan after all of :data:`PASSES` that apply to it; :func:`_inspect` gets it before the first and after each."""
    _inspect(plan, "planned")
    for each in PASSES:
        if each.applies_to(plan):
            body = each.run(plan)
            plan = plan if body is plan.body else replace(plan, body=body)
            _inspect(plan, each.run.__name__)
    return plan


def _inspect(plan: Plan, name: str) -> None:
    """Verify the steps if ``MESHPAR_VERIFY`` is set; write them to ``NNN_name.txt`` in the folder ``MESHPAR_DUMP``, if set."""
    if os.environ.get("MESHPAR_VERIFY"):
        verify(plan)
    if folder := os.environ.get("MESHPAR_DUMP"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        number = len(list(Path(folder).glob("*.txt")))
        (Path(folder) / f"{number:03}_{name}.txt").write_text(plan_steps(plan), encoding="utf8")
