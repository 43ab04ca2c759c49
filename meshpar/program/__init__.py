"""Function → program: a jaxpr plus a name for every dim of every value."""

from .graph import Frame, Join, Op, Program, Value
from .infer import infer
from .kernels import kernel_rule
from .trace import trace

__all__ = ["Frame", "Join", "Op", "Program", "Value", "infer", "kernel_rule", "trace"]
