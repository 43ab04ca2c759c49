"""Which ops of a body lead to which: what can run while a value is made or sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..cost.fusion import MATMULS
from ..program.ir import Frame, Op, Program


def reaches(program: Program) -> dict[Frame, Reachability]:
    """What the ops of every body reach."""
    ops: dict[Frame, list[Op]] = {}
    for op in program.root.walk():
        ops.setdefault(op.frame.home, []).append(op)
    return {frame: Reachability(mine) for frame, mine in ops.items()}


class Reachability:
    """Which ops of a body come before which, as bits of integers.

    Args:
      ops: of the body, in order.
    """

    def __init__(self, ops: Sequence[Op]):
        self.ops = ops
        self.place = {op: k for k, op in enumerate(ops)}
        self.products = [op for op in ops if op.name in MATMULS]
        makers = [
            {self.place[v.op] for v in op.ins if v is not None and v.op in self.place} - {k} for k, op in enumerate(ops)
        ]
        self.before = [0] * len(ops)
        for k, mine in enumerate(makers):
            for i in mine:
                self.before[k] |= self.before[i] | (1 << i)
        self.after = [0] * len(ops)
        for k in reversed(range(len(ops))):
            for i in makers[k]:
                self.after[i] |= self.after[k] | (1 << k)

        self.multiply = self.bits(self.products)

    def bits(self, ops: Iterable[Op]) -> int:
        """A set of ops of the body."""
        return sum(1 << self.place[op] for op in ops)

    def neither(self, wanted: int, made_by: Op | None, users: Sequence[Op]) -> Iterator[Op]:
        """Of a set of ops those that neither lead to an op nor follow from some others."""
        gone = 0
        if made_by in self.place:
            k = self.place[made_by]
            gone |= self.before[k] | (1 << k)
        for op in users:
            if op in self.place:
                gone |= self.after[self.place[op]] | (1 << self.place[op])
        left = wanted & ~gone
        while left:
            low = left & -left
            yield self.ops[low.bit_length() - 1]
            left ^= low

    def is_followed(self, op: Op | None) -> bool:
        """Whether products follow from an op."""
        return op in self.place and bool(self.after[self.place[op]] & self.multiply)
