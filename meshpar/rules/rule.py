"""What a factor rule is: the loops of an op, and which of them each dim of its operands and results is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from .halo import ShardWindow
from .spmd import Factors, Send

Kind = Literal["pass_through", "sum", "max", "min", "prod", "and", "or", "indexed", "need_replication", "permutation"]
"""What splitting a factor means (Shardy's factor types).

``pass_through``: the factor runs through operands and results; each device does its part.
``sum`` and the other reductions: it is contracted; splitting it leaves partial results.
``indexed``: a dim that is read or written at some indices. Each device serves its own block. A result without the factor (a read)
is partial: each element comes from one device, the others contribute :func:`meshpar.rules.owned.neutral`. A result with the factor
(a write) is complete.
``need_replication``: every device needs all of it.
``permutation``: it may be split; the op's local form communicates (halos, offsets of a running sum, candidates of a top-k,
tokens to experts), and its results are complete.
"""

REDUCTIONS: frozenset[Kind] = frozenset({"sum", "max", "min", "prod", "and", "or", "indexed"})
"""The kinds of factors that leave results without the factor partial; also how the contributions to a partial value combine."""

ADDED: frozenset[Kind] = frozenset({"sum", "indexed"})
"""The kinds of partial values whose contributions are added, so that they may be reduce-scattered."""

Sends = Callable[[Sequence[tuple[int, ...]], Sequence[int]], list[Send]]
"""(shapes of the local operands, number of parts of every factor) → the collectives that the local form makes."""

SendsOver = Callable[
    [Sequence[tuple[int, ...]], Sequence[tuple[str, ...]], Mapping[str, int]], list[tuple[Send, tuple[str, ...]]]
]
"""(shapes of the local operands, axes of every factor, axis sizes) → (collective, the axes it runs over)."""


class NameLink(NamedTuple):
    """Two factors of different sizes that may share a name.

    ``lies``: the elements of the whole from the part's first to its last; None where that is not known, or the two are one
    dim at other sizes (a cache and what is written to it, an image and its pooled one).
    """

    whole: int
    part: int
    lies: range | None = None


@dataclass(slots=True, eq=False)
class OpRule:
    """The factor rule of one equation (as in Shardy: einsum-like notation, with a kind for every factor).

    Attributes:
      ins, outs: for every operand and result, the factors of every dim.
      sizes, kinds: of every factor.
      strong: the op passes its data through, so joined dims are one class (transpose, reshape).
      name_links: factors of different sizes that may share a name (a slice and the array it is cut from).
      known: False: there is no rule, and everything is gathered.
      sharded_like: (leader, follower): the follower is split as the leader is (input and output rows of a convolution).
      sends: the collectives of the local form where permutation factors are split.
      sends_over: in place of ``sends``, where they depend on which axes the factors share.
      windows: (operand, dim) → (number of parts → what each device reads of that dim, and how it comes by it).
      given: the axes of every factor, where the op says them itself: the specs of a ``shard_map``; None: they are claimed.
      pairwise: result k is computed from operand k alone, which shares no factor with the others.
      permutation_partial: a result that lacks a permutation factor is a partial sum over it (cotangents), not complete.
    """

    ins: list[tuple[Factors, ...]]
    outs: list[tuple[Factors, ...]]
    sizes: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    strong: bool = False
    name_links: list[NameLink] = field(default_factory=list)
    known: bool = True
    sharded_like: list[tuple[int, int]] = field(default_factory=list)
    sends: Sends | None = None
    sends_over: SendsOver | None = None
    windows: dict[tuple[int, int], Callable[[int], ShardWindow]] = field(default_factory=dict)
    given: list[tuple[str, ...]] | None = None
    permutation_partial: bool = False
    pairwise: bool = False

    def factor(self, size: int, kind: Kind = "pass_through") -> int:
        """A new factor."""
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def factors(self, shape: Sequence[int], kind: Kind = "pass_through") -> tuple[Factors, ...]:
        """New factors, one a dim."""
        return tuple((self.factor(n, kind),) for n in shape)

    def windows_of(self, i: int) -> list[tuple[int, int, Callable[[int], ShardWindow]]]:
        """(factor, dim, number of parts → window) of the dims of operand i whose halos are exchanged."""
        return [(self.ins[k][d][0], d, window) for (k, d), window in self.windows.items() if k == i]

    def partial_factors(self, k: int) -> list[int]:
        """The factors that, when split, leave result k partial: contracted ones, and those that it alone lacks."""
        mine = {f for dim in self.outs[k] for f in dim}
        read = sorted({f for dim in self.ins[k] for f in dim}) if self.pairwise else range(len(self.kinds))
        kinds = {*REDUCTIONS, "pass_through", *(("permutation",) if self.permutation_partial else ())}
        return [f for f in read if f not in mine and self.kinds[f] in kinds]


RuleFn = Callable[[Any, list[tuple[int, ...]], list[tuple[int, ...]]], OpRule]
"""(equation, shapes of operands, shapes of results) -> rule."""


def einsum(ins: Sequence[str], outs: Sequence[str], in_shapes, out_shapes, kind: Kind = "sum", **kw: Any) -> OpRule:
    """A rule from letters: ``einsum(["mk", "kn"], ["mn"], …)``; letters that no result has are contracted."""
    r = OpRule([], [], **kw)
    table: dict[str, int] = {}
    kept = set("".join(outs))

    def dims(letters: str, shape: Sequence[int]) -> tuple[Factors, ...]:
        for c, n in zip(letters, shape, strict=True):
            if c not in table:
                table[c] = r.factor(n, "pass_through" if c in kept else kind)
        return tuple((table[c],) for c in letters)

    r.ins = [dims(a, s) for a, s in zip(ins, in_shapes, strict=True)]
    r.outs = [dims(a, s) for a, s in zip(outs, out_shapes, strict=True)]
    return r


def no_rule(in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]) -> OpRule:
    """Every dim needs replication: what an op without a rule gets."""
    r = OpRule([], [], known=False)
    r.ins = [r.factors(s, "need_replication") for s in in_shapes]
    r.outs = [r.factors(s, "need_replication") for s in out_shapes]
    return r


def same_dims(eqn: Any, in_shapes: Sequence[tuple[int, ...]], out_shapes: Sequence[tuple[int, ...]]) -> OpRule:
    """Each result has the dims of its operand, but for those whose size changes."""
    r = OpRule([], [], pairwise=True)
    r.ins = [r.factors(s) for s in in_shapes]
    for dims, a, b in zip(r.ins, in_shapes, out_shapes, strict=False):
        r.outs.append(tuple(f if n == m else (r.factor(m),) for f, n, m in zip(dims, a, b, strict=True))
                      if len(a) == len(b) else r.factors(b))  # fmt: skip
    return r


def exchange_kind(eqn: Any) -> Kind:
    """``permutation``; ``need_replication`` where blocks cannot be exchanged: random keys, and arrays without elements."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    plain = not any(jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) for a in avals)
    return "permutation" if plain and all(math.prod(a.shape) for a in avals) else "need_replication"


def indexed_kind(eqn: Any) -> Kind:
    """``indexed``; ``need_replication`` where an array has no elements."""
    return "indexed" if all(math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)) else "need_replication"


def with_halo_sends(r: OpRule, eqn: Any, why: str) -> OpRule:
    """The rule, with the collectives of its halo exchanges as ``sends``.

    Dims are exchanged one after the other, so that the second sends the halo of the first (corners).
    """

    def sends(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> list[Send]:
        found = []
        for i, local in enumerate(shapes):
            shape = list(local)
            for factor, dim, window in r.windows_of(i):
                if parts[factor] > 1:
                    by = window(parts[factor]).exchange
                    found += by.sends(shape, dim, factor, np.dtype(eqn.invars[i].aval.dtype), why)
                    shape[dim] = by.length
        return found

    r.sends = sends if r.windows else None
    return r
