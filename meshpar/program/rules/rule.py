"""What a factor rule is: the loops of an op, and which of them each dim of its operands and results is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["map", "sum", "max", "min", "prod", "and", "or", "whole"]
"""What happens to a factor.

``map``: it runs through operands and results; each device does its part.
``sum`` and the other reductions: it is contracted; splitting it leaves partial results.
``whole``: every device needs all of it.
"""

Factors = tuple[int, ...]
"""The factors a dim is made of, major to minor."""


@dataclass(slots=True, eq=False)
class OpRule:
    """The factor rule of one equation (Shardy's term for einsum-like notation with kinds).

    Attributes:
      ins, outs: for every operand and result, the factors of every dim.
      sizes, kinds: of every factor.
      strong: the op passes its data through, so joined dims are one class (transpose, reshape).
      kin: pairs of factors between which only the name passes (a slice and the whole).
      linear: operands in which the op is linear, so that partial sums may pass unsettled.
      known: False: there is no rule, and everything is gathered.
    """

    ins: list[tuple[Factors, ...]]
    outs: list[tuple[Factors, ...]]
    sizes: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    strong: bool = False
    kin: list[tuple[int, int]] = field(default_factory=list)
    linear: tuple[int, ...] = ()
    known: bool = True

    def factor(self, size: int, kind: Kind = "map") -> int:
        """A new factor."""
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def factors(self, shape: Sequence[int], kind: Kind = "map") -> tuple[Factors, ...]:
        """New factors, one a dim."""
        return tuple((self.factor(n, kind),) for n in shape)


RuleFn = Callable[[Any, list[tuple[int, ...]], list[tuple[int, ...]]], OpRule]
"""(equation, shapes of operands, shapes of results) -> rule."""

RULES: dict[str, RuleFn] = {}


def rule(*names: str) -> Callable[[RuleFn], RuleFn]:
    """Register the factor rule of these primitives."""

    def register(fn: RuleFn) -> RuleFn:
        for name in names:
            RULES[name] = fn
        return fn

    return register


def einsum(ins: Sequence[str], outs: Sequence[str], in_shapes, out_shapes, kind: Kind = "sum", **kw: Any) -> OpRule:
    """A rule from letters: ``einsum(["mk", "kn"], ["mn"], …)``; letters that no result has are contracted."""
    r = OpRule([], [], **kw)
    table: dict[str, int] = {}
    kept = set("".join(outs))

    def dims(letters: str, shape: Sequence[int]) -> tuple[Factors, ...]:
        for c, n in zip(letters, shape, strict=True):
            if c not in table:
                table[c] = r.factor(n, "map" if c in kept else kind)
        return tuple((table[c],) for c in letters)

    r.ins = [dims(a, s) for a, s in zip(ins, in_shapes, strict=True)]
    r.outs = [dims(a, s) for a, s in zip(outs, out_shapes, strict=True)]
    return r


def no_rule(in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]) -> OpRule:
    """Everything whole: what an op without a rule gets."""
    r = OpRule([], [], known=False)
    r.ins = [r.factors(s, "whole") for s in in_shapes]
    r.outs = [r.factors(s, "whole") for s in out_shapes]
    return r
