"""Reports of plans: text for the terminal, pages, notebook cells, comparisons, the steps as a program."""

from .data import calibration_rates, plan_json
from .diff import PlanDiff
from .document import Document, shown_text
from .facts import arrivals_text
from .html import plan_cell, plan_page
from .shards import shards_renderable
from .text import plan_line, plan_renderable
from .timeline import trace_json
