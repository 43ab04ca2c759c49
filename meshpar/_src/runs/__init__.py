"""A training run from its plan: days, cost, goodput and the save interval, under failures of chips."""

from .run_plan import RunOptions, RunPlan, RunRow, run_plan_of
