"""Trip counts of HLO loops: XLA's annotation, else the result of evaluating the loop's counter and condition on integers."""

from __future__ import annotations

import bisect
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .hlo_text import Computation, Instruction, Module, elements

Thunk = Callable[[], Any]
MAX_LINEAR_TRIPS, MAX_TRIPS = 1 << 12, 1 << 40
"""Trip counts up to which every trip is evaluated, and up to which the end is bisected."""

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {"minimum": min, "maximum": max}
_ARITHMETIC |= {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
_ARITHMETIC |= {"and": operator.and_, "or": operator.or_}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    name: getattr(operator, name.lower()) for name in ("LT", "LE", "GT", "GE", "EQ", "NE")
}
_SAME = frozenset({"copy", "convert", "bitcast", "reshape", "broadcast", "optimization-barrier", "copy-done"})


class Scope:
    """The integers and tuples of a computation, evaluated from the known values of its parameters.

    A value is an int, a function from index to value (a tuple), or None if it is not known.
    """

    def __init__(self, module: Module, computation: Computation, arguments: Sequence[Thunk]):
        self.module, self.computation, self.arguments = module, computation, arguments
        self._values: dict[str, Any] = {}

    def value(self, name: str) -> Any:
        """The value of an instruction, evaluated once."""
        if name not in self._values:
            self._values[name] = None  # a value that depends on itself is not known
            i = self.computation.get(name)
            self._values[name] = None if i is None else self._evaluate(i)
        return self._values[name]

    def result(self) -> Any:
        return self.value(self.computation.root)

    def _evaluate(self, i: Instruction) -> Any:
        """The value of an instruction from the values of its operands."""
        op = i.opcode
        if op == "constant":
            text = i.literal.strip("{} ")
            return {"true": 1, "false": 0}.get(text, int(text) if re.fullmatch(r"-?\d+", text) else None)
        if op == "parameter":
            number = int(i.literal)
            return self.arguments[number]() if number < len(self.arguments) else None
        if op in _SAME:
            return self.value(i.operands[0])
        if op == "get-tuple-element":
            index = i.attribute("index")
            operand = self.value(i.operands[0])
            return operand(int(index)) if callable(operand) and index is not None else None
        if op == "tuple":
            return lambda k: self.value(i.operands[k]) if k < len(i.operands) else None
        if op in _ARITHMETIC or op == "compare":
            a, b = (self.value(x) for x in i.operands[:2])
            if not isinstance(a, int) or not isinstance(b, int):
                return None
            return int(_COMPARE[i.attribute("direction") or ""](a, b)) if op == "compare" else _ARITHMETIC[op](a, b)
        if op == "select":
            which = self.value(i.operands[0])
            return self.value(i.operands[1 if which else 2]) if isinstance(which, int) else None
        if op in ("fusion", "call"):
            inner = self.inner(i.called, [functools.partial(self.value, x) for x in i.operands])
            return inner.result() if inner else None
        return None

    def inner(self, name: str | None, arguments: Sequence[Thunk]) -> Scope | None:
        """The scope of a called computation."""
        computation = self.module.computations.get(name or "")
        return Scope(self.module, computation, arguments) if computation else None


State = dict[int, Any]


def trip_count(scope: Scope, loop: Instruction) -> tuple[int | None, State]:
    """(trip count of a ``while``, or None if it is not known; the loop-invariant integers of its state).

    XLA's annotation is used if the text has one. Otherwise the body is applied twice to the integers of the initial state; those
    that change by a constant step are extrapolated to find the first trip for which the condition fails: trip by trip, then by
    bisection (so the count of a very long loop that ends on equality is not known).
    """
    initial = scope.value(loop.operands[0])
    scalars = [k for k, e in enumerate(elements(loop.shape)) if re.match(r"(pred|[su]\d+)\[\]", e)]
    first = {k: initial(k) if callable(initial) else None for k in scalars}
    second = _step(scope, loop, first)
    third = _step(scope, loop, second)
    steps = {
        k: second[k] - v
        for k, v in first.items()
        if v is not None and second.get(k) is not None and third.get(k) == 2 * second[k] - v
    }
    fixed = {k: first[k] for k, step in steps.items() if step == 0}
    annotated = re.search(r'known_trip_count"?[:=]\s*\{"?n"?[:=]"?(\d+)', loop.attributes)
    if annotated:
        return int(annotated[1]), fixed

    def runs(n: int) -> Any:
        state = {k: first[k] + n * step for k, step in steps.items()}
        cond = scope.inner(loop.attribute("condition"), [lambda: state.get])
        return cond.result() if cond else None

    if not isinstance(runs(0), int):
        return None, fixed
    for n in range(MAX_LINEAR_TRIPS):
        if not runs(n):
            return n, fixed
    high = MAX_LINEAR_TRIPS
    while runs(high):
        high *= 2
        if high > MAX_TRIPS:
            return None, fixed
    low = high // 2
    return low + bisect.bisect_left(range(low, high), True, key=lambda n: not runs(n)), fixed


def _step(scope: Scope, loop: Instruction, state: Mapping[int, Any]) -> State:
    body = scope.inner(loop.attribute("body"), [lambda: state.get])
    after = body.result() if body else None
    return {k: after(k) if callable(after) else None for k in state}
