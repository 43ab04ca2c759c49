"""The lowering that a plan is for, where ``"auto"`` was asked for."""

from __future__ import annotations

from ..cost.caching import with_shared_results
from ..plan.plan import Plan
from ..plan.steps import Run
from ..rules import refusal
from ..units import format_seconds
from .best_plan_before_passes import cost, exceeds

AUTO = "auto"
MIN_GAIN = 0.005
"""The fraction of a step that ``"jit"`` must save: a smaller one does not show in three digits, and only ``"shard_map"`` has the
collectives of its plan."""


def resolve_lowering(plan: Plan, asked: str, overlap: str | None) -> tuple[str, str, str | None]:
    """The lowering that ``asked`` means for a plan: ``"auto"`` is ``"shard_map"``, or ``"jit"`` where an op has no local form.

    :func:`shorter_lowering` then compares the plans after passes.

    Returns (lowering, overlap mode under it, why ``"auto"`` means ``"jit"`` here: the op without a local form and the user's line;
    None otherwise).

    Args:
      plan: has the steps of the program, so that it is known which ops are split.
      asked: ``"auto"``, ``"jit"`` or ``"shard_map"``.
      overlap: the mode asked for; None: the default of the lowering, ``"auto"`` for ``"shard_map"``. Under ``"jit"``, where XLA
        decides what overlaps, it is ``"off"``.
    """
    reason = without_local_form(plan) if asked == AUTO else None
    lowering = asked if asked != AUTO else "shard_map" if reason is None else "jit"
    return lowering, "off" if lowering == "jit" else overlap or "auto", reason


def without_local_form(plan: Plan) -> str | None:
    """The first op that the ``"shard_map"`` lowering refuses: its name, its line, and why."""
    for step in plan.body.all_steps:
        if not isinstance(step, Run) or step.op.rule is None:
            continue
        found = refusal(step.op, step.axes or (), plan.sizes)
        if found is not None:
            at = f" at {step.op.source}" if step.op.source else ""
            return f"{step.op.name}{at} {found.why}"
    return None


def shorter_lowering(plan: Plan, jit: Plan, separated: Plan) -> Plan:
    """The plan for ``"auto"`` of a program that has plans under ``"shard_map"`` and ``"jit"``, both after all passes.

    It is the one under ``"jit"`` if its step is shorter by more than :data:`MIN_GAIN`, and it fits the memory of a device or the
    other one does not either; ``lowering_reason`` then has the seconds of both. Without a known chip it is the first one.

    Args:
      separated: the one under ``"jit"`` with the barriers of :func:`passes.barriers.separate_matmuls`. Without them XLA's kernels
        take no less (:data:`compat.quirks.FUSED_EPILOGUE`), which no estimate has, so that these seconds are compared.
    """
    ours, xla = cost(plan), cost(separated)
    if plan.chip is None or xla >= (1 - MIN_GAIN) * ours or (not exceeds(plan) and exceeds(jit)):
        return plan
    return with_shared_results(
        jit, lowering_reason=f"planned {format_seconds(cost(jit))}; shard_map {format_seconds(ours)}"
    )
