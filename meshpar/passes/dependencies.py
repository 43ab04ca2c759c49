"""Data dependencies between the ops of a body: which ops a value depends on, and which can run while it is computed or sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..cost.fusion import MATMULS
from ..program.ir import Frame, Op, Program


def dependencies(program: Program) -> dict[Frame, Dependencies]:
    """Body (with its calls inlined) → the dependencies between its ops."""
    ops: dict[Frame, list[Op]] = {}
    for op in program.root.walk():
        ops.setdefault(op.frame.home, []).append(op)
    return {frame: Dependencies(in_frame) for frame, in_frame in ops.items()}


class Dependencies:
    """The transitive dependencies between ops. Sets of ops are integers, with one bit for each op.

    Args:
      ops: of a body, in program order.

    Attributes:
      index: op → its index, and its bit.
      matmuls: the set of matmuls and convolutions.
      ancestors: by index, the set of ops that an op depends on.
      descendants: by index, the set of ops that depend on an op.
    """

    def __init__(self, ops: Sequence[Op]):
        self.ops = ops
        self.index = {op: k for k, op in enumerate(ops)}
        operands = [
            {self.index[v.op] for v in op.ins if v is not None and v.op in self.index} - {k} for k, op in enumerate(ops)
        ]
        self.ancestors = [0] * len(ops)
        for k, makers in enumerate(operands):
            for i in makers:
                self.ancestors[k] |= self.ancestors[i] | (1 << i)
        self.descendants = [0] * len(ops)
        for k in reversed(range(len(ops))):
            for i in operands[k]:
                self.descendants[i] |= self.descendants[k] | (1 << k)
        self.matmuls = self.set_of(op for op in ops if op.name in MATMULS)

    def set_of(self, ops: Iterable[Op]) -> int:
        """The set of some ops of the body."""
        return sum(1 << self.index[op] for op in ops)

    def independent(self, candidates: int, maker: Op | None, users: Sequence[Op]) -> Iterator[Op]:
        """The ops of a set that are neither ancestors of ``maker`` nor descendants of ``users``: they can run between these.

        Args:
          maker: the op that computes a value; None, or an op of another body: the value exists before the body.
        """
        excluded = 0
        if maker in self.index:
            k = self.index[maker]
            excluded |= self.ancestors[k] | (1 << k)
        for op in users:
            if op in self.index:
                excluded |= self.descendants[self.index[op]] | (1 << self.index[op])
        left = candidates & ~excluded
        while left:
            lowest = left & -left
            yield self.ops[lowest.bit_length() - 1]
            left ^= lowest

    def leads_to_matmul(self, op: Op | None) -> bool:
        """Whether a matmul of the body depends on an op."""
        return op in self.index and bool(self.descendants[self.index[op]] & self.matmuls)
