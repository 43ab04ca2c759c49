"""Facts of a program that decide where partial values are reduced: laws that hold, and the addends of a sum.

They depend on the program alone, not on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..compat.loop_operands import loop_parts
from ..iterables import grouped
from ..program.ir import Op, Program, Value
from ..program.primitives import reduce_in_p
from ..program.scalars import constant_of
from ..rules.partial import Law, Other, is_scale
from .shard_shapes import itemsize


def satisfies(other: Other, program: Program, op: Op, i: int) -> bool:
    """Whether operand ``i``, which is not partial, satisfies the requirement of a law."""
    if other in ("any", "none"):
        return other == "any"
    constant = constant_of(program, op, i)
    if constant is None:
        return False
    return not constant if other == "zero" else is_scale(constant, inverse=other == "divisor")


def applicable_law(
    program: Program, op: Op, kind: Any, positions: Sequence[int], used: Callable[[Law], bool]
) -> Law | None:
    """The first law accepted by ``used`` that lets an op be applied to partial operands at ``positions``, or None.

    ``kind`` is the reduction over which these operands are partial.
    """
    for law in op.primitive.partial:
        if law.admits(op.eqn, kind, positions) and used(law):
            others = (i for i in range(len(op.ins)) if i not in positions)
            if all(satisfies(law.other(i), program, op, i) for i in others):
                return law
    return None


def readers_of(program: Program) -> dict[Value, list[Op | None]]:
    """value → the ops that read it, as often as they do; None: a result of the program or of a body. Calls do not count, the ops of
    their bodies do."""
    ops = [op for op in program.root.walk() if not op.frames or op.primitive.control_flow]
    frames = [program.root, *(frame for op in ops for frame in op.frames)]
    reads = [*((v, op) for op in ops for v in op.ins), *((v, None) for frame in frames for v in frame.outs())]
    return grouped((v, op) for v, op in reads if v is not None)


def deferrable(program: Program) -> frozenset[Value]:
    """The values of which every reader is an op with one result and a law for smaller results, or a conversion to a wider type."""

    def may_shrink(op: Op | None) -> bool:
        laws = () if op is None or len(op.outs) != 1 else op.primitive.partial
        return any(law.when in ("smaller", "widening") for law in laws)

    return frozenset(v for v, ops in program.cached(readers_of).items() if all(map(may_shrink, ops)))


def narrows(op: Op | None) -> bool:
    """Whether an op converts an array to a dtype of fewer bytes."""
    return (
        op is not None and op.primitive.family == "cast" and itemsize(op.outs[0].aval) < itemsize(op.eqn.invars[0].aval)
    )


def narrowed(program: Program) -> frozenset[Value]:
    """The values that are read only by conversions to dtypes of fewer bytes, whose results are resharded instead."""
    return frozenset(v for v, ops in program.cached(readers_of).items() if all(map(narrows, ops)))


def addends(program: Program, end: Value) -> Iterator[tuple[Value, bool]]:
    """Yields a value, and the values that it is computed from by ops that may be applied to partial sums, if each is
    read once.

    If one of these values is partial, reducing it can be deferred until ``end``.

    Yields:
      (value, whether a loop of several iterations stacks it before ``end``); ``end`` first.
    """
    readers = program.cached(readers_of)
    todo = [(end, False)]
    while todo:
        value, stacked = todo.pop()
        op = value.op
        if len(readers.get(value, ())) != 1 or op is None:
            continue
        yield value, stacked
        if op.primitive.family == "scan":
            k = op.outs.index(value)
            inner = op.frames[0].outs()[k]
            if k >= len(loop_parts(op.eqn).carries) and inner is not None:
                todo.append((inner, stacked or op.eqn.params["length"] > 1))
            continue
        arrays = [i for i, v in enumerate(op.ins) if v is not None and (op.rule is not None or v.shape == value.shape)]
        for positions in (arrays, *([i] for i in arrays)) if arrays and len(op.outs) == 1 else ():
            if applicable_law(program, op, "sum", positions, lambda law: law.when != "smaller") is not None:
                todo += [(v, stacked) for i in positions if (v := op.ins[i]) is not None]
                break


def reduce_in_values(program: Program) -> frozenset[Value]:
    """The :func:`addends` of all ``reduce_in`` operands that already have its dtype."""
    values: set[Value] = set()
    for op in program.root.walk():
        if op.eqn.primitive is reduce_in_p and op.ins[0] is not None:
            dtype = op.outs[0].aval.dtype
            values |= {v for v, _ in addends(program, op.ins[0]) if v.aval.dtype == dtype}
    return frozenset(values)
