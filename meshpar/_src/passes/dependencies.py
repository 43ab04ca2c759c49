"""Data dependencies between the ops of a body."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from ..plan.partial import readers_of
from ..plan.plan import Plan
from ..program.ir import Frame, Op, Program, Value


def leading_to_matmuls(program: Program) -> set[Op]:
    """The ops on which a matmul or convolution of the same body, with its calls inlined, depends."""
    out: set[Op] = set()
    for op in reversed(list(program.root.walk())):  # readers come after the op that they read
        if op.primitive.matmul or op in out:
            makers = (v.op for v in op.ins if v is not None)
            out.update(m for m in makers if m is not None and m is not op and m.frame.home is op.frame.home)
    return out


def stored_values(program: Program) -> set[Value]:
    """The results of elementwise ops on several large arrays that several ops read: they are in memory, and not computed by each
    reader (:func:`cost.fusion.fuse`)."""
    readers = program.cached(readers_of)
    arrays: dict[Value, frozenset[Value]] = {}  # the large arrays that a value is computed from
    out: set[Value] = set()
    for op in program.root.walk():
        if not (op.primitive.fusible or op.primitive.view):
            continue
        for value in op.outs:
            large = [v for v in op.ins if v is not None and v.elements * 8 > value.elements]
            arrays[value] = frozenset().union(*(arrays.get(v, {v}) for v in large))
            if op.primitive.fusible and len(arrays[value]) > 1 and len(readers.get(value, ())) > 1:
                out.add(value)
                arrays[value] = frozenset((value,))
    return out


def added_matmuls(plan: Plan, value: Value) -> Iterator[Op]:
    """Yields the matmuls and convolutions that are added in a partial value, in program order."""
    pending = [value.op]
    while pending:  # not recursive: a sum may have more terms than Python's stack
        op = pending.pop()
        run = None if op is None else plan.runs.get(op)
        if run is None:
            continue
        if run.op.primitive.matmul:
            yield run.op
        elif any(s.partial for s in run.reads):
            pending += [v.op for v in reversed(run.op.ins) if v is not None]


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
      leads_to_heavy: op → whether a matmul, an opaque kernel or a loop depends on it.
    """

    def __init__(self, frame: Frame):
        """Compute the dependencies between the ops of ``frame``; operands from outside the frame do not count."""
        self.frame = frame
        self.position = {op: k for k, op in enumerate(frame.ops)}
        self.matmuls = [op for op in frame.ops if op.primitive.matmul]
        self.maker = {v: op for op in frame.ops for v in op.makes}
        self.users: dict[Value, list[Op]] = {}
        for op in frame.ops:
            for v in _values_read(op):
                self.users.setdefault(v, []).append(op)
        self.leads_to_heavy: dict[Op, bool] = {}
        for op in reversed(frame.ops):
            users = [u for v in op.makes for u in self.users.get(v, ()) if u is not op]
            self.leads_to_heavy[op] = any(
                self.leads_to_heavy[u] or u.primitive.matmul or u.primitive.family in ("opaque", "kernel") or u.frames
                for u in users
            )

    @cached_property
    def makers(self) -> list[set[Op]]:
        """By index, the ops whose results an op reads."""
        maker, ops = self.maker, self.frame.ops
        return [{found for v in _values_read(op) if (found := maker.get(v, op)) is not op} for op in ops]


def _values_read(op: Op) -> list[Value]:
    """The values that an op reads, with those that its bodies read from outside."""
    read = op.ins
    for frame in op.frames:
        read = [*read, *(v for inner in frame.walk() for v in inner.ins), *frame.outs()]
    return list(dict.fromkeys(v for v in read if v is not None))
