"""The role of a buffer in a train step: parameter, optimizer state, gradient, saved activation, or another."""

from __future__ import annotations

from collections.abc import Callable

from ..compat.jax import pass_of
from ..plan.plan import Plan
from ..program.ir import Op, Program, Value
from .caching import cached_on_plan
from .fusion import Buffer, Kernel
from .kernels import computation_of

KIND_NAMES = {"params": "parameters", "opt": "optimizer state"}
ROLES = ("parameters", "optimizer state", "gradients", "saved activations", "temporaries", "other inputs", "constants")


class _ProgramFacts:
    """The facts of a program from which roles follow.

    Attributes:
      passes: op → ``"forward"``, ``"backward"`` or None, cached.
    """

    def __init__(self, program: Program):
        """Record the dims of the program's weights, and of one layer of stacked weights."""
        self.find = program.unifier.find
        self.passes: dict[Op, str | None] = {}
        self._like_weights: dict[Value, bool] = {}
        params = [v for v in program.inputs if v.kind == "params"]
        self._weights = {self._classes(v) for v in params if v.shape}
        self._weights |= {self._classes(v, 1) for v in params if len(v.shape) > 2}

    def _classes(self, value: Value, drop: int = 0) -> tuple[int, ...]:
        return tuple(self.find(n) if n >= 0 else n for n in value.nodes[drop:])

    def is_like_a_weight(self, value: Value) -> bool:
        """Whether a value has the dims of a weight, or of one layer of a stack of them."""
        if value not in self._like_weights:
            self._like_weights[value] = self._classes(value) in self._weights
        return self._like_weights[value]

    def pass_of(self, node: Kernel) -> str | None:
        """``"forward"`` or ``"backward"``, by the name stack of the kernel's op or of the loops around it; None: neither."""
        if node.op is None:
            return None
        if node.op not in self.passes:
            op, name = node.op, None
            while op is not None and name != "backward":
                name = pass_of(op.eqn) or name
                op = op.frame.parent
            self.passes[node.op] = name
        return self.passes[node.op]


def pass_of_kernel(plan: Plan) -> Callable[[Kernel], str | None]:
    """A function from a kernel to its pass, ``"forward"`` or ``"backward"``; None: neither."""
    return plan.program.cached(_ProgramFacts).pass_of


@cached_on_plan
def buffer_roles(plan: Plan) -> Callable[[Buffer], str]:
    """A function from a buffer to its role, one of :data:`ROLES`.

    Arguments and results have the role of their path. Other buffers are gradients if they have the dims of a weight, saved
    activations if the forward pass makes them and the backward pass reads them, else temporaries.
    """
    facts = plan.program.cached(_ProgramFacts)
    constants = set(computation_of(plan).constants)

    def kind(item: Buffer) -> str:
        """The role of a buffer, one of :data:`ROLES`."""
        if item in constants:
            return "constants"
        value, made = item.value, item.made_by
        if value.path is not None and (made is None or value.op is not None):  # an argument or a result
            if value.kind in KIND_NAMES:
                return KIND_NAMES[value.kind]
            if made is None:
                return "other inputs"
        if made is None or _of_inputs(item):
            return "temporaries"
        when = facts.pass_of(made)
        if when != "forward" and facts.is_like_a_weight(value):
            return "gradients"
        if when != "backward" and any(facts.pass_of(r) == "backward" for r in item.readers):
            return "saved activations"
        return "temporaries"

    return kind


def _of_inputs(item: Buffer) -> bool:
    """Whether a buffer is a converted or resharded input of its computation."""
    for _ in range(100):
        if item.made_by is None:
            return True
        if not item.made_by.is_light or len(item.made_by.ins) != 1:
            return False
        item = item.made_by.ins[0]
    return False
