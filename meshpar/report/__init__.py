"""Plans for people: in a terminal, as a page, in a notebook, side by side."""

from ..plan.plan import REPORTS
from .diff import PlanDiff
from .html import plan_cell, plan_page
from .text import plan_renderable, plan_text

__all__ = ["PlanDiff", "plan_cell", "plan_page", "plan_renderable", "plan_text"]

REPORTS.update(text=plan_text, rich=plan_renderable, html=plan_page, cell=plan_cell, diff=PlanDiff)
