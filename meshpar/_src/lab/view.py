"""A plan as JSON data for the page of a lab: metrics as numbers, and the sections of a plan's page as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..cost.memory import memory_of
from ..layout import Rule
from ..plan_api import Plan
from ..report import html
from ..report.colours import AxisColours
from ..report.diff import PlanDiff, diff_body, time_comparison
from ..report.facts import RuleEffect, rule_effects
from ..report.pipeline import pipelines_html
from ..report.sections import notes
from ..units import format_bytes, format_memory, format_seconds

MAX_COLLECTIVE_ROWS = 10
"""Rows of the table of collectives of a rule, largest first."""


def metrics(plan: Plan) -> dict[str, Any]:
    """Name → metric of a plan, in bytes, seconds or fractions; None where no time is estimated."""
    memory, time, chip = memory_of(plan), plan.time, plan.chip
    of_time = ("seconds", "compute", "memory", "communication", "mfu")
    return {
        "peak": memory.peak,
        "capacity": None if chip is None else chip.per_device().hbm,
        "kinds": memory.by_kind,
        **{name: None if time is None else getattr(time, name) for name in of_time},
        "sent": plan.bytes_sent,
        "rules": [[e.rule, e.sent, e.seconds] for e in rule_effects(plan)],
    }


def colours(plan: Plan) -> dict[str, str]:
    """Axis → CSS class of its colour."""
    return AxisColours(plan.sizes).of


def sections(plan: Plan) -> dict[str, str]:
    """Name → HTML of each section of a plan's page."""
    ink, effects = AxisColours(plan.sizes), rule_effects(plan)
    return {
        "cards": html.cards(plan),
        "facts": html.facts_list(plan, ink, layout=False),
        "parts": html.step_parts(plan, ink),
        "pipeline": pipelines_html(plan),
        "layer": html.layers(plan, ink),
        "memory": html.memory_curve(plan),
        "rules": html.rules_table(plan, effects, ink),
        "tensors": html.tensors(plan, ink),
        "collectives": html.collectives_by_rule(plan, effects, ink, most=MAX_COLLECTIVE_ROWS),
        "notes": notes(plan).html(),
    }


def comparison(pinned: Plan, plan: Plan) -> dict[str, Any]:
    """A pinned plan compared with the page's plan, as JSON data: both metrics as text, and HTML that says why one is slower."""
    d = PlanDiff(pinned, plan)
    longer = (plan.seconds or 0.0) - (pinned.seconds or 0.0)
    step = "–" if pinned.seconds is None else format_seconds(pinned.seconds)
    slower = "slower" if longer > 0 else "faster"
    return {
        "texts": [step, format_memory(pinned.memory.peak)],
        "why": time_comparison(d) if longer else "",
        "question": f"Why is this plan {slower} by {format_seconds(abs(longer))}?" if longer else "",
        "html": diff_body(d, folded=True),
    }


def row_effects(plan: Plan, rows: Sequence[Sequence[Rule]]) -> list[dict[str, Any]]:
    """For each row of the page the effect of its rules together, as JSON data: bytes and seconds in a step, and a text.

    Args:
      rows: the rules of each row; together, in order, they are the rules of ``plan.requested_layout``.
    """
    effects, first, out = rule_effects(plan), 0, []
    for rules in rows:
        own, first = effects[first : first + len(rules)], first + len(rules)
        out.append(_together(own, plan))
    return out


def _together(effects: Sequence[RuleEffect], plan: Plan) -> dict[str, Any]:
    """The summed effect of some rules as JSON data: bytes, seconds and a text."""

    def total(of: str) -> Any:
        return sum(getattr(e, of) for e in effects)

    every = RuleEffect("", (), *map(total, ("arguments", "global_bytes", "bytes", "values", "sent", "seconds")))
    names = " + ".join(dict.fromkeys(e.parallelism for e in effects if e.parallelism))
    texts = [names, every.size_text or (f"shards {every.values} values" if every.values else "")]
    if every.sent:
        seconds = f", {format_seconds(every.seconds)}" if plan.chip is not None else ""
        texts.append(f"sends {format_bytes(every.sent)}{seconds}")
    text = " · ".join(filter(None, texts)) or "no effect"
    return {"sent": every.sent, "seconds": every.seconds, "text": text}


def python(name: str, plan: Plan, mesh: str) -> str:
    """Python code that runs the function under this plan."""
    rules = "\n".join(f"    {text}" for text in str(plan.requested_layout).split("; ") if text)
    layout = f'mp.Layout("""\n{rules}\n""")' if rules else 'mp.Layout("")'
    where = f"  # {plan.topology}" if plan.topology else ""
    return (
        f'import meshpar as mp\n\nmesh = mp.mesh("{mesh}"){where}\nlayout = {layout}\n'
        f'step = mp.jit({name}, mesh=mesh, layout=layout, dims=dims, lowering="{plan.lowering}")\n'
    )
