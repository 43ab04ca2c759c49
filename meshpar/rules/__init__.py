"""One factor rule per primitive, by family; read by inference, plan and lowering alike."""

from . import contract, host, index, reduce, shape
from .elementwise import ELEMENTWISE, LINEAR, SCALINGS
from .rule import RULES, OpRule, no_rule, rule

__all__ = ["ELEMENTWISE", "LINEAR", "RULES", "SCALINGS", "OpRule", "no_rule", "rule"]
del contract, host, index, reduce, shape
