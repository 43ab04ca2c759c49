"""Program + layout + mesh → plan: who holds what, what is sent, what it costs, and why."""

from .collectives import Collective
from .hardware import CHIPS, Chip, chip_of
from .memory import Memory
from .plan import Held, OpPlan, Plan
from .planner import make_plan
from .time import OpTime, Time

__all__ = ["CHIPS", "Chip", "Collective", "Held", "Memory", "OpPlan", "OpTime", "Plan", "Time", "chip_of", "make_plan"]
