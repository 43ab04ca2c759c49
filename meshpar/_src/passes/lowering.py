"""The lowering that a plan is for, where ``"auto"`` was asked for."""

from __future__ import annotations

from ..plan.plan import Plan
from ..plan.steps import Run
from ..rules import refusal

AUTO = "auto"


def resolve_lowering(plan: Plan, asked: str, overlap: str | None) -> tuple[str, str, str | None]:
    """The lowering that ``asked`` means for a plan: ``"auto"`` is ``"shard_map"``, or ``"jit"`` where an op has no local form.

    Returns (lowering, overlap mode under it, why ``"auto"`` means ``"jit"`` here: the op without a local form and the user's line;
    None otherwise).

    Args:
      plan: has the steps of the program, so that it is known which ops are split.
      asked: ``"auto"``, ``"jit"`` or ``"shard_map"``.
      overlap: the mode asked for; None: the default of the lowering, ``"auto"`` for ``"shard_map"``. Under ``"jit"``, where XLA
        decides what overlaps, it is ``"off"``.
    """
    reason = _without_local_form(plan) if asked == AUTO else None
    lowering = asked if asked != AUTO else "shard_map" if reason is None else "jit"
    return lowering, "off" if lowering == "jit" else overlap or "auto", reason


def _without_local_form(plan: Plan) -> str | None:
    """The first op that the ``"shard_map"`` lowering refuses: its name, its line, and why."""
    for step in plan.body.all_steps:
        if not isinstance(step, Run) or step.op.rule is None:
            continue
        found = refusal(step.op, step.axes or (), plan.sizes)
        if found is not None:
            at = f" at {step.op.source}" if step.op.source else ""
            return f"{step.op.name}{at} {found.why}"
    return None
