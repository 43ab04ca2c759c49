"""Program + layout + mesh → plan: who holds what, what is sent, and why."""

from .collectives import Collective
from .plan import Held, OpPlan, Plan
from .planner import make_plan

__all__ = ["Collective", "Held", "OpPlan", "Plan", "make_plan"]
