"""Training runs: days, cost, goodput and save interval by the plan, with failures of chips; the measured goodput of a run."""

from .goodput import Goodput
from .run_plan import RunOptions, RunPlan, RunRow, run_plan_of
