"""A plan as JSON data for the page of a lab: metrics as numbers, and the sections of a plan's page as HTML."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..layout import Rule
from ..plan_api import Plan
from ..report import plan_html_page as html
from ..report.diff import PlanDiff, diff_body, time_comparison
from ..report.facts import ArgumentGroup, CollectiveGroup, RuleEffect, rule_effects
from ..units import format_bytes, format_memory, format_seconds

MAX_COLLECTIVE_ROWS = 10
"""Rows of the table of collectives of a rule, largest first."""


def metrics(plan: Plan) -> dict[str, float | None]:
    """Name → metric of a plan, in bytes and seconds; None where no time is estimated."""
    return {"peak": plan.memory.peak, "seconds": plan.seconds, "sent": plan.bytes_sent}


def page(plan: Plan) -> dict[str, Any]:
    """The metrics and the head of a plan's page as HTML, and its sections as (title, HTML, explanation)."""
    return {
        "cards": html.cards(plan),
        "facts": html.facts_list(plan),
        "sections": html.page_sections(plan, MAX_COLLECTIVE_ROWS),
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
    """For each row of the page the effect of its rules together, as JSON data: bytes in a step, and a text.

    Args:
      rows: the rules of each row; together, in order, they are the rules of ``plan.requested_layout``.
    """
    effects = iter(rule_effects(plan))
    return [_together(list(itertools.islice(effects, len(rules))), plan) for rules in rows]


def _together(effects: Sequence[RuleEffect], plan: Plan) -> dict[str, Any]:
    """The effect of some rules as JSON data: bytes and a text."""
    arguments = ArgumentGroup(tuple(h for e in effects for h in e.arguments.members))
    causes = CollectiveGroup(tuple(c for e in effects for c in e.collectives.members))
    every = RuleEffect(None, "", arguments, sum(e.values for e in effects), causes)
    names = " + ".join(dict.fromkeys(e.parallelism for e in effects if e.parallelism))
    texts = [names, every.size_text or (f"shards {every.values} values" if every.values else "")]
    if causes.members:
        seconds = f", {format_seconds(causes.seconds)}" if plan.chip is not None else ""
        texts.append(f"sends {format_bytes(causes.bytes)}{seconds}")
    return {"sent": causes.bytes, "text": " · ".join(filter(None, texts)) or "no effect"}


def mapping(patterns: Mapping[str, str]) -> str:
    """Patterns → dims as Python code for ``dims=``; empty without any."""
    return f"dims = {json.dumps(patterns, indent=4, ensure_ascii=False)}\n" if patterns else ""


def python(name: str, plan: Plan, mesh: str, patterns: Mapping[str, str]) -> str:
    """Python code that runs the function under this plan. ``patterns``: of inferred names; it has them if some are renamed."""
    rules = "\n".join(f"    {text}" for text in str(plan.requested_layout).split("; ") if text)
    layout = f'mp.Layout("""\n{rules}\n""")' if rules else 'mp.Layout("")'
    where = f"  # {plan.topology}" if plan.topology else ""
    inferred = bool(plan.program.traced.inferred)
    dims = "" if inferred else "dims=dims, "
    return (
        f'import meshpar as mp\n\nmesh = mp.mesh("{mesh}"){where}\n{"" if inferred else mapping(patterns)}layout = {layout}\n'
        f'step = mp.jit({name}, mesh=mesh, layout=layout, {dims}lowering="{plan.lowering}")\n'
    )
