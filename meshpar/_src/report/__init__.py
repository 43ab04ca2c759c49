"""Reports of plans: text for the terminal, pages, notebook cells, comparisons, the steps as a program."""

from .data import calibration_rates, plan_json
from .diff import PlanDiff
from .facts import arrivals_text
from .html import plan_cell, plan_page
from .save import save
from .text import plan_line, plan_renderable, plan_text
