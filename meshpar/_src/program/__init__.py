"""Function → program: a jaxpr plus a name for every dim of every value."""

from .declare import kernel_rule
from .infer import infer
from .ir import Frame, Join, Op, Program, Value
from .trace import trace
