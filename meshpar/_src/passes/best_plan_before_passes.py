"""The best plan of a program before any pass, by its memory and its estimated seconds."""

from __future__ import annotations

import math
import warnings

from ...errors import JoinWarning
from ..cost.memory import memory_of
from ..cost.time import time_of
from ..plan.plan import Plan
from ..plan.planner import Rank, planned
from ..plan.request import PlanRequest


def exceeds(plan: Plan) -> bool:
    """Whether a plan needs more than the memory of its chip; False if the chip is unknown."""
    return plan.chip is not None and memory_of(plan).peak > plan.chip.per_device().hbm


def cost(plan: Plan) -> float:
    """Seconds of a step of a plan; bytes sent if the chip is unknown."""
    time = time_of(plan)
    return plan.bytes_sent if time is None else time.seconds


RANK = Rank(exceeds, cost)
"""The order of the plans of one step."""


def plan_without_passes(plan: Plan, request: PlanRequest, max_seconds: float = math.inf) -> Plan:
    """A plan of the program of another plan, before any pass; warnings of the first plan are not repeated.

    Args:
      max_seconds: the largest sum of the seconds of a step's collectives.

    Raises:
      UnknownAxisError, UnknownDimError, DivisibilityError, JoinError: as for any plan.
      TooLong: the sum is larger.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JoinWarning)
        return planned(plan.program, request, RANK, max_seconds)
