"""A plan as the page of the lab shows it: figures as numbers, and the parts of a plan's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..cost.memory import memory_of
from ..layout import Rule
from ..plan_api import Plan
from ..report import html
from ..report.diff import PlanDiff, diff_body
from ..report.facts import RuleEffect, rule_effects
from ..units import format_bytes, format_seconds

COLLECTIVES = 10
"""Of the largest kinds of collectives, how many the page lists."""


def figures(plan: Plan) -> dict[str, Any]:
    """The figures of a plan: bytes, seconds, shares; None where no time is estimated."""
    memory, time, chip = memory_of(plan), plan.time, plan.chip
    return {
        "peak": memory.peak,
        "capacity": None if chip is None else chip.per_device().hbm,
        "kinds": memory.by_kind,
        "seconds": None if time is None else time.seconds,
        "compute": None if time is None else time.compute,
        "memory": None if time is None else time.memory,
        "communication": None if time is None else time.communication,
        "mfu": None if time is None else time.mfu,
        "sent": plan.bytes_sent,
        "rules": [[e.rule, e.sent, e.seconds] for e in rule_effects(plan)],
    }


def colours(plan: Plan) -> dict[str, str]:
    """The class of every axis's colour."""
    return html.AxisColours(plan).of


def parts(plan: Plan, pinned: Plan | None) -> dict[str, str]:
    """The parts of a plan's page, as HTML."""
    ink = html.AxisColours(plan)
    return {
        "cards": html.cards(plan) + html.lowering(plan),
        "diff": "" if pinned is None else diff_body(PlanDiff(pinned, plan), folded=True),
        "parts": html.step_parts(plan, ink),
        "layer": html.layers(plan, ink),
        "memory": html.memory_curve(plan),
        "rules": html.rules_table(plan, rule_effects(plan), ink),
        "collectives": html.collectives_table(plan, ink, most=COLLECTIVES),
        "notes": html.notes_list(plan),
    }


def rule_figures(plan: Plan, rows: Sequence[Sequence[Rule]]) -> list[dict[str, Any]]:
    """What the rules of each row do together: bytes and seconds in a step, arguments split, from how much to how much.

    Args:
      rows: the rules of each row of the page, which in order are those of ``plan.requested_layout``.
    """
    did = rule_effects(plan)
    first = len(plan.layout.rules) - len(plan.requested_layout.rules)  # rules for dims called after axes stand before
    out = []
    for rules in rows:
        mine, first = did[first : first + len(rules)], first + len(rules)
        out.append(_together(mine, plan))
    return out


def _together(did: Sequence[RuleEffect], plan: Plan) -> dict[str, Any]:
    sent, seconds = sum(e.sent for e in did), sum(e.seconds for e in did)
    total = RuleEffect(
        "", (), sum(e.arguments for e in did), sum(e.global_bytes for e in did), sum(e.bytes for e in did)
    )
    says = [total.size_text] if total.size_text else []
    if says:
        pass
    elif any(e.values for e in did):
        says.append(f"splits {sum(e.values for e in did)} values")
    if sent:
        says.append(f"sends {format_bytes(sent)}" + (f", {format_seconds(seconds)}" if plan.chip is not None else ""))
    return {"sent": sent, "seconds": seconds, "says": " · ".join(says) or "does nothing"}


def python(name: str, plan: Plan, mesh: str) -> str:
    """Lines of Python that run the function so."""
    rules = "\n".join(f"    {text}" for text in str(plan.requested_layout).split("; ") if text)
    layout = f'mp.Layout("""\n{rules}\n""")' if rules else 'mp.Layout("")'
    where = f"  # {plan.topology}" if plan.topology else ""
    return (
        f'import meshpar as mp\n\nmesh = mp.mesh("{mesh}"){where}\nlayout = {layout}\n'
        f'step = mp.jit({name}, mesh=mesh, layout=layout, dims=dims, lowering="{plan.lowering}")\n'
    )


def mesh_text(plan: Plan) -> str:
    """The mesh of a plan as text."""
    return ", ".join(f"{a}={n}" for a, n in plan.sizes.items())
