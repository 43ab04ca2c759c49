"""Program + layout + mesh → plan: who holds what, what is sent, what it costs, and why."""

from ..cost.memory import Memory
from ..cost.time import OpTime, Time
from ..hardware.chips import CHIPS, Chip
from ..hardware.topology import chip_of
from .collectives import Collective
from .plan import Held, OpPlan, Plan
from .planner import make_plan

__all__ = ["CHIPS", "Chip", "Collective", "Held", "Memory", "OpPlan", "OpTime", "Plan", "Time", "chip_of", "make_plan"]
