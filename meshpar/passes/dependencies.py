"""Data dependencies between the ops of a body: which ops a value depends on, and which can run while it is computed or sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..program.ir import Frame, Op, Program, Value


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
        """Compute the ancestors and descendants of every op; operands of other bodies do not count."""
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
        self.matmuls = self.set_of(op for op in ops if op.primitive.matmul)

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


def frame_dependencies(program: Program) -> dict[Frame, FrameDependencies]:
    """Frame with matmuls → the direct dependencies between its ops."""
    frames = dict.fromkeys(op.frame for op in program.root.walk() if op.primitive.matmul)
    return {frame: FrameDependencies(frame) for frame in frames}


class FrameDependencies:
    """The direct dependencies between the ops of a frame, calls as single ops.

    Attributes:
      position: op → its index in program order.
      matmuls: the matmuls and convolutions, in program order.
      maker: value → the op that computes it.
      users: value → the ops that read it.
      makers: by index, the ops whose results an op reads.
      leads_to_heavy: op → whether a matmul, an opaque kernel or a loop depends on it.
    """

    def __init__(self, frame: Frame):
        """Compute the dependencies between the ops of ``frame``; operands from outside the frame do not count."""
        self.frame = frame
        self.position = {op: k for k, op in enumerate(frame.ops)}
        self.matmuls = [op for op in frame.ops if op.primitive.matmul]
        self.maker = {v: op for op in frame.ops for v in op.makes}
        reads = {op: _values_read(op) for op in frame.ops}
        self.makers = [{maker for v in reads[op] if (maker := self.maker.get(v, op)) is not op} for op in frame.ops]
        self.users: dict[Value, list[Op]] = {}
        for op, values in reads.items():
            for v in values:
                self.users.setdefault(v, []).append(op)
        self.leads_to_heavy: dict[Op, bool] = {}
        for op in reversed(frame.ops):
            users = [u for v in op.makes for u in self.users.get(v, ()) if u is not op]
            self.leads_to_heavy[op] = any(
                u.primitive.matmul or u.primitive.family in ("opaque", "kernel") or u.frames or self.leads_to_heavy[u]
                for u in users
            )


def _values_read(op: Op) -> list[Value]:
    """The values that an op reads, with those that its bodies read from outside."""
    out = {v: None for v in op.ins if v is not None}
    for frame in op.frames:
        for inner in frame.walk():
            out.update((v, None) for v in inner.ins if v is not None)
        for var in frame.jaxpr.outvars:
            if not hasattr(var, "val"):
                out[frame.env[var]] = None
    return list(out)
