"""Plans for people: in a terminal, as a page, in a notebook, side by side."""

from ..plan.plan import REPORTS
from .diff import PlanDiff
from .html import plan_cell, plan_page
from .text import plan_line, plan_renderable, plan_text

__all__ = ["PlanDiff", "plan_cell", "plan_line", "plan_page", "plan_renderable", "plan_text"]

REPORTS.update(line=plan_line, text=plan_text, rich=plan_renderable, html=plan_page, cell=plan_cell, diff=PlanDiff)
