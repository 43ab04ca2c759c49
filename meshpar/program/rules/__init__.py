"""One factor rule per primitive, by family; read by inference, plan and lowering alike."""

from . import contract, index, reduce, shape
from .elementwise import ELEMENTWISE, LINEAR, SCALINGS
from .rule import RULES, OpRule, no_rule, rule

__all__ = ["ELEMENTWISE", "LINEAR", "RULES", "SCALINGS", "OpRule", "no_rule", "rule"]
del contract, index, reduce, shape
