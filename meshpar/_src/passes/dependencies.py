"""Data dependencies between the ops of a body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from ..cost.schedule import sorted_by_dependencies
from ..plan.deferred_sums import readers_of
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

    def last_operand(self, op: Op) -> int:
        """The index of the last op that computes an operand of an op; -1: none does."""
        makers = (self.maker.get(v) for v in op.ins if v is not None)
        return max((self.position[m] for m in makers if m is not None), default=-1)

    def sum_of(self, value: Value) -> Value:
        """The sum that a value is a term of, and is used for nothing else; else the value itself."""
        while len(users := self.users.get(value, ())) == 1 and users[0].primitive.family == "add":
            value = users[0].outs[0]
        return value

    def followers(self, op: Op, waiting: Mapping[Value, Sequence[Op]]) -> set[Op]:
        """The ops that depend on an op or are ``waiting`` for the result of one of these, itself included."""
        out, todo = {op}, [op]
        while todo:
            for value in todo.pop().makes:
                for user in (*self.users.get(value, ()), *waiting.get(value, ())):
                    if user not in out:
                        out.add(user)
                        todo.append(user)
        return out

    def order(self, after: Mapping[Op, Sequence[Value]]) -> list[Op]:
        """The ops in program order, but those that wait, and ops that depend on them, ``after`` the values for which they wait."""
        ops, position = self.frame.ops, self.position
        waits = [(position[op], {self.maker[v] for v in values}) for op, values in after.items() if op in position]
        if all(position[maker] < k for k, makers in waits for maker in makers):
            return ops
        before = {op: set(makers) for op, makers in zip(ops, self.makers, strict=True)}
        for k, makers in waits:
            before[ops[k]] |= makers
        return sorted_by_dependencies(before, position)

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
