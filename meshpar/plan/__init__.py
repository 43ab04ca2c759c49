"""Program + layout + mesh → plan: who holds what, what is sent, and why."""

from .collectives import Collective
from .plan import Plan, make_plan

__all__ = ["Collective", "Plan", "make_plan"]
