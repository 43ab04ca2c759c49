"""What a factor rule is: the loops of an op, and which of them each dim of its operands and results is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .reach import Reach

Kind = Literal["map", "sum", "max", "min", "prod", "and", "or", "whole", "own"]
"""What happens to a factor.

``map``: it runs through operands and results; each device does its part.
``sum`` and the other reductions: it is contracted; splitting it leaves partial results.
``whole``: every device needs all of it.
``own``: it may be split, and the op's local form sends what it needs itself (halos, offsets of a running sum,
candidates of a top-k, tokens to experts); its results are complete.
"""

REDUCTIONS: frozenset[Kind] = frozenset({"sum", "max", "min", "prod", "and", "or"})

Factors = tuple[int, ...]
"""The factors a dim is made of, major to minor."""


@dataclass(frozen=True, slots=True)
class Send:
    """A collective that the local form of an op makes itself.

    Attributes:
      op: ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``all-to-all`` or ``collective-permute``.
      factors: the factors over whose axes it runs.
      shape, dtype: of the array that a device passes in.
      why: what it is for, in a few words.
      times: how often the op makes it.
    """

    op: str
    factors: Factors
    shape: tuple[int, ...]
    dtype: Any
    why: str
    times: int = 1


Sends = Callable[[Sequence[tuple[int, ...]], Sequence[int]], list[Send]]
"""(shapes of the local operands, number of parts of every factor) → what the local form sends."""

SendsOver = Callable[
    [Sequence[tuple[int, ...]], Sequence[tuple[str, ...]], Mapping[str, int]], list[tuple[Send, tuple[str, ...]]]
]
"""(shapes of the local operands, axes of every factor, axis sizes) → what the local form sends, and over which axes."""


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
      links: (leader, follower): the follower is split as the leader is (input and output rows of a convolution).
      sends: what the local form sends where ``own`` factors are split.
      sends_over: in place of ``sends``, where that depends on which axes the factors share.
      reaches: (operand, dim) → (parts → what each device reads of that dim, and how it comes by it).
      own_partial: a result that lacks an own factor is a partial sum over it (cotangents), not complete.
    """

    ins: list[tuple[Factors, ...]]
    outs: list[tuple[Factors, ...]]
    sizes: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    strong: bool = False
    kin: list[tuple[int, int]] = field(default_factory=list)
    linear: tuple[int, ...] = ()
    known: bool = True
    links: list[tuple[int, int]] = field(default_factory=list)
    sends: Sends | None = None
    sends_over: SendsOver | None = None
    reaches: dict[tuple[int, int], Callable[[int], Reach]] = field(default_factory=dict)
    own_partial: bool = False

    def factor(self, size: int, kind: Kind = "map") -> int:
        """A new factor."""
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def factors(self, shape: Sequence[int], kind: Kind = "map") -> tuple[Factors, ...]:
        """New factors, one a dim."""
        return tuple((self.factor(n, kind),) for n in shape)

    def reaches_of(self, i: int) -> list[tuple[int, int, Callable[[int], Reach]]]:
        """(factor, dim, reach) of the dims of operand i that are exchanged."""
        return [(self.ins[k][d][0], d, at) for (k, d), at in self.reaches.items() if k == i]

    def partial_factors(self, k: int) -> list[int]:
        """The factors that, when split, leave result k partial: contracted ones, and those that it alone lacks."""
        mine = {f for dim in self.outs[k] for f in dim}
        kinds = {*REDUCTIONS, "map", *(("own",) if self.own_partial else ())}
        return [f for f, kind in enumerate(self.kinds) if f not in mine and kind in kinds]


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
