"""The role of a buffer in a train step: parameter, optimizer state, gradient, saved activation, or another."""

from __future__ import annotations

from collections.abc import Callable

from ..plan.plan import Plan
from ..program.ir import Program, Value
from .caching import cached_on_plan
from .device_computation import computation_of
from .fusion import Buffer, Kernel

KIND_NAMES = {"params": "parameters", "opt": "optimizer state"}
ROLES = ("parameters", "optimizer state", "gradients", "saved activations", "temporaries", "other inputs", "constants")


def pass_of_kernel(kernel: Kernel) -> str | None:
    """The pass of a kernel, ``"forward"`` or ``"backward"``; None: neither."""
    return None if kernel.op is None else kernel.op.derivative_pass


def _classes(program: Program, value: Value, drop: int = 0) -> tuple[int, ...]:
    """The classes of joined names of the dims of a value, without its first ``drop`` dims."""
    return tuple(program.unifier.find(n) if n >= 0 else n for n in value.nodes[drop:])


def _weights(program: Program) -> set[tuple[int, ...]]:
    """The dims of the program's weights, and of one layer of stacked weights."""
    params = [v for v in program.inputs if v.kind == "params" and v.shape]
    return {_classes(program, v, drop) for v in params for drop in range(1 + (len(v.shape) > 2))}


@cached_on_plan
def buffer_roles(plan: Plan) -> Callable[[Buffer], str]:
    """A function from a buffer to its role, one of :data:`ROLES`.

    Arguments and results have the role of their path. Other buffers are gradients if they have the dims of a weight, saved
    activations if the forward pass makes them and the backward pass reads them, else temporaries.
    """
    program = plan.program  # the function is cached on the plan, so it must not refer to it
    weights = program.cached(_weights)
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
        when = pass_of_kernel(made)
        if when != "forward" and _classes(program, value) in weights:
            return "gradients"
        if when != "backward" and any(pass_of_kernel(r) == "backward" for r in item.readers):
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
