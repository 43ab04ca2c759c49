"""Finds the loops over stacked layers that are pipelines: a dim of stacked weights is split, and a scan runs over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...compat.jax import scan_counts
from ..ir import Op, Program, Value


@dataclass(frozen=True, slots=True)
class LayerLoop:
    """A scan over stacked weights.

    Attributes:
      op: the scan.
      weight: a stacked operand, whose dim 0 is the stacked dim.
      dim: the name of the stacked dim.
    """

    op: Op
    weight: Value
    dim: str

    @property
    def carries(self) -> list[Value]:
        """The carried values, as inputs of the body."""
        consts, carries = scan_counts(self.op.eqn.params)
        return self.op.frames[0].ins()[consts : consts + carries]


def layer_loops(program: Program) -> list[LayerLoop]:
    """The scans over a named dim that is dim 0 of a parameter, in program order; scans inside of another one are left out.

    Flax metadata or tree paths tell which inputs are parameters. Names decide, not lengths: a loop over eight chunks of the
    vocabulary is not a loop over eight layers. Nor is a loop over time steps, although a layout may split them.
    """
    find = program.unifier.find
    inputs = [v for v in program.inputs if v.kind == "params" and len(v.shape) > 1]
    stacked = {find(v.nodes[0]) for v in inputs if v.shape[0] > 1}
    loops: list[LayerLoop] = []

    pending = list(reversed(program.root.ops))
    while pending:  # no recursive function, which would be a reference cycle that keeps the program's arrays
        op = pending.pop()
        weight = _stacked_operand(op, stacked, find) if op.primitive.scan else None
        name = None if weight is None else program.dim_name(weight, 0)
        if weight is not None and name is not None:
            loops.append(LayerLoop(op, weight, name))
        else:
            for frame in reversed(op.frames):
                pending += reversed(frame.ops)
    return loops


def _stacked_operand(op: Op, stacked: set[int], find: Callable[[int], int]) -> Value | None:
    """The first operand that a scan slices along one of these dims; None: it has none."""
    operands: Sequence[Value | None] = op.ins[sum(scan_counts(op.eqn.params)) :]
    return next((v for v in operands if v is not None and v.shape[0] > 1 and find(v.nodes[0]) in stacked), None)


def microbatch_loop(op: Op) -> Op | None:
    """The innermost loop around an op, if it is a scan of several iterations; else None."""
    loop = op.frame.home.parent
    return loop if loop is not None and loop.primitive.scan and loop.eqn.params["length"] > 1 else None
