"""One entry per primitive: factor rule, local form and traits, in a module per family of primitives."""

from . import (
    control_flow,
    cumulative,
    elementwise,
    host,
    index,
    kernel,
    linalg,
    mapped,
    matmul_conv,
    random,
    rearrange,
    reduce,
    shape,
    sort,
    window,
)
from .local import check_local, refusal, run_elementwise, run_local
from .registry import PRIMITIVES, Primitive, bodies, having, primitive, separated
from .rule import OpRule, no_rule

ELEMENTWISE = having(lambda p: p.elementwise)
