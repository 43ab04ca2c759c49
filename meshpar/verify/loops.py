"""How often an HLO loop runs: from what XLA wrote down, else by running its counter and its condition on integers."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .hlo_text import Computation, Instruction, Module, elements

Thunk = Callable[[], Any]
ONE_BY_ONE, MOST = 1 << 12, 1 << 40

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": min, "maximum": max,
    "and": operator.and_, "or": operator.or_,
}  # fmt: skip
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
_SAME = frozenset({"copy", "convert", "bitcast", "reshape", "broadcast", "optimization-barrier", "copy-done"})


class Scope:
    """The integers and tuples that a computation works out, given what is known of its parameters.

    A value is an int, a function from index to value (a tuple), or None where it is not known.
    """

    def __init__(self, module: Module, computation: Computation, arguments: Sequence[Thunk]):
        self.module, self.computation, self.arguments = module, computation, arguments
        self._known: dict[str, Any] = {}

    def value(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = None  # a name that leads back to itself stays unknown
            i = self.computation.get(name)
            self._known[name] = None if i is None else self._work_out(i)
        return self._known[name]

    def result(self) -> Any:
        return self.value(self.computation.root)

    def _work_out(self, i: Instruction) -> Any:
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
            whole = self.value(i.operands[0])
            return whole(int(index)) if callable(whole) and index is not None else None
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
        if op == "while":
            return functools.partial(self._after_loop, i)
        return None

    def inner(self, name: str | None, arguments: Sequence[Thunk]) -> Scope | None:
        """The scope of a computation that is called."""
        found = self.module.computations.get(name or "")
        return Scope(self.module, found, arguments) if found else None

    def _after_loop(self, loop: Instruction, index: int) -> Any:
        """An element of a loop's result: what went in, where the body passes it on."""
        body = self.module.computations.get(loop.attribute("body") or "")
        root = body.get(body.root) if body else None
        if body is None or root is None or root.opcode != "tuple":
            return None
        i = body.get(root.operands[index])
        while i is not None and i.opcode in _SAME:
            i = body.get(i.operands[0])
        if i is None or i.opcode != "get-tuple-element" or i.attribute("index") != str(index):
            return None
        source = body.get(i.operands[0])
        if source is None or source.opcode != "parameter":
            return None
        before = self.value(loop.operands[0])
        return before(index) if callable(before) else None


State = dict[int, Any]


def trip_count(scope: Scope, loop: Instruction) -> tuple[int | None, State]:
    """(trips of a ``while``, or None where they cannot be told; the integers of its state that never change).

    XLA's own count is taken where the text has it. Otherwise the body is applied twice to the integers of the initial state; those
    that grow by the same step are extrapolated, and the first trip for which the condition fails is looked for: one by one, then
    by bisection (so of a very long loop that ends on equality alone the trips are not known).
    """
    first = _initial(scope, loop)
    second = _step(scope, loop, first)
    third = _step(scope, loop, second)
    steps = {
        k: second[k] - v
        for k, v in first.items()
        if v is not None and second.get(k) is not None and third.get(k) == 2 * second[k] - v
    }
    fixed = {k: first[k] for k, step in steps.items() if step == 0}
    known = re.search(r'known_trip_count"?[:=]\s*\{"?n"?[:=]"?(\d+)', loop.attributes)
    if known:
        return int(known[1]), fixed

    def runs(n: int) -> Any:
        state = {k: first[k] + n * step for k, step in steps.items()}
        cond = scope.inner(loop.attribute("condition"), [lambda: state.get])
        return cond.result() if cond else None

    if not isinstance(runs(0), int):
        return None, fixed
    for n in range(ONE_BY_ONE):
        if not runs(n):
            return n, fixed
    high = ONE_BY_ONE
    while runs(high):
        high *= 2
        if high > MOST:
            return None, fixed
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return high, fixed


def _initial(scope: Scope, loop: Instruction) -> State:
    whole = scope.value(loop.operands[0])
    scalars = [k for k, e in enumerate(elements(loop.shape)) if re.match(r"(pred|[su]\d+)\[\]", e)]
    return {k: whole(k) if callable(whole) else None for k in scalars}


def _step(scope: Scope, loop: Instruction, state: Mapping[int, Any]) -> State:
    body = scope.inner(loop.attribute("body"), [lambda: state.get])
    after = body.result() if body else None
    return {k: after(k) if callable(after) else None for k in state}
