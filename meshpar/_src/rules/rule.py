"""Factor rules: the loops (*factors*) of an op, and which factors each dim of its operands and results consists of.

As in Shardy. A matmul ``[m, k] @ [k, n] → [m, n]`` has the factors m and n (pass-through) and k (a sum); a reshape
``[batch·seq, embed] → [batch, seq, embed]`` has batch, seq and embed, and dim 0 of its operand consists of the first two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from ..compat.jax import aval_of
from .halo import ShardWindow
from .mesh_in_shard_map import Axes, Factors, Send, Shapes

Kind = Literal["pass_through", "sum", "max", "min", "prod", "and", "or", "indexed", "need_replication", "permutation"]
"""The consequence of splitting a factor (Shardy's factor types).

``pass_through``: the factor is in operands and results; each device computes its shard.
``sum`` and the other reductions: the factor is contracted, and results are partial.
``indexed``: a dim that is read or written at some indices; each device serves the indices in its own shard. A result without the
factor (a read) is partial: one device contributes each element, the others :func:`rules.one_owner.neutral`. A result with
the factor (a write) is complete.
``need_replication``: the factor cannot be split.
``permutation``: the op's local form communicates (halos, offsets of a running sum, candidates of a top-k, tokens to experts), and
its results are complete.
"""

REDUCTIONS: frozenset[Kind] = frozenset({"sum", "max", "min", "prod", "and", "or", "indexed"})
"""The kinds of factors for which a result without the factor is partial. The kind is also the reduction that completes it."""

ADDED: frozenset[Kind] = frozenset({"sum", "indexed"})
"""The kinds of partial values that an addition completes, and thus also a reduce-scatter."""

Sends = Callable[[Shapes, Axes, Mapping[str, int]], list[Send]]
"""(shapes of the operands' shards, axes of every factor, axis sizes) → the collectives that the local form makes."""


class NameLink(NamedTuple):
    """Two factors of different sizes that may share a name.

    Attributes:
      larger, smaller: the factors.
      elements: the range of the larger factor's elements that the smaller one covers; None if that is unknown, or if both are the
        same dim at two sizes (a cache and its update, an image and its pooled image).
    """

    larger: int
    smaller: int
    elements: range | None = None


@dataclass(slots=True, eq=False)
class OpRule:
    """The factor rule of one equation: which dims of its operands and results are the same factor.

    A matmul ``[m, k] × [k, n] → [m, n]`` has the factors m, n (kind ``pass_through``) and k (kind ``sum``).

    Attributes:
      ins, outs: for every operand and result, the factors of every dim.
      sizes, kinds: of every factor.
      strong: a dim of the result is the same dim of the operand (transpose, reshape, cumulative sums), so that dims with a common
        factor are one dim of the program.
      name_links: factors of different sizes that may share a name (a slice and the array that it is taken from).
      known: False: the op has no rule, and its operands are all-gathered.
      sharded_like: (leader, follower) pairs: the follower is split as the leader is (input and output rows of a convolution).
      sends: the collectives of the local form if permutation factors are split.
      forms: ``sends`` of the other forms of a kernel (:attr:`program.kernels.Kernel.forms`).
      windows: (operand, dim) → a function from the number of shards of the dim to the window that each device reads.
      given: the axes of every factor, if the op specifies them, as a ``shard_map`` does; None: the plan assigns them.
      permutation_partial: a result without a permutation factor is a partial sum over it (cotangents), not complete.
    """

    ins: list[tuple[Factors, ...]] = field(default_factory=list)
    outs: list[tuple[Factors, ...]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    strong: bool = False
    name_links: list[NameLink] = field(default_factory=list)
    known: bool = True
    sharded_like: list[tuple[int, int]] = field(default_factory=list)
    sends: Sends | None = None
    forms: tuple[Sends, ...] = ()
    windows: dict[tuple[int, int], Callable[[int], ShardWindow]] = field(default_factory=dict)
    given: list[tuple[str, ...]] | None = None
    permutation_partial: bool = False

    def factor(self, size: int, kind: Kind = "pass_through") -> int:
        """Add a factor, and return its index."""
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def factors(
        self, shape: Sequence[int], kind: Kind = "pass_through", dims: Collection[int] | None = None
    ) -> tuple[Factors, ...]:
        """Add one factor per dim of a shape, of a kind along ``dims`` (None: all) and pass-through along the others."""
        kinds: list[Kind] = [kind if dims is None or d in dims else "pass_through" for d in range(len(shape))]
        return tuple((self.factor(n, k),) for n, k in zip(shape, kinds, strict=True))

    def follower(self, leader: int, size: int, kind: Kind, elements: range | None = None) -> int:
        """Add a factor of the same dim as ``leader`` at another size, which is split as it if devices exchange elements."""
        follower = self.factor(size, kind)
        self.name_links.append(NameLink(leader, follower, elements))
        if kind == "permutation":
            self.sharded_like.append((leader, follower))
        return follower

    def maps(self, ins: list[tuple[Factors, ...]], outs: list[tuple[Factors, ...]]) -> OpRule:
        """Set the factors of every dim of operands and results, and return the rule."""
        self.ins, self.outs = ins, outs
        return self

    def windows_of(self, i: int) -> list[tuple[int, int, Callable[[int], ShardWindow]]]:
        """(factor, dim, number of shards → window) for the dims of operand i along which halos are exchanged."""
        return [(self.ins[k][d][0], d, window) for (k, d), window in self.windows.items() if k == i]

    def partial_factors(self, k: int) -> list[int]:
        """The factors over whose axes result k is partial: reductions, and pass-through factors that only this result lacks."""
        own = {f for dim in self.outs[k] for f in dim}
        kinds = {*REDUCTIONS, "pass_through", *(("permutation",) if self.permutation_partial else ())}
        return [f for f, kind in enumerate(self.kinds) if f not in own and kind in kinds]


RuleFn = Callable[[Any, list[tuple[int, ...]], list[tuple[int, ...]]], OpRule]
"""(equation, shapes of operands, shapes of results) → rule."""


def leading(
    in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]], rank: int, strong: bool = False
) -> OpRule:
    """A rule in which the first ``rank`` dims of the first operand, and of arrays that begin with the same sizes, pass through;
    other dims need replication."""
    r = OpRule(strong=strong)
    sizes = tuple(in_shapes[0][:rank]) if in_shapes else ()
    lead = r.factors(sizes)

    def dims(shape: Sequence[int]) -> tuple[Factors, ...]:
        own = lead if tuple(shape[:rank]) == sizes else ()
        return own + r.factors(shape[len(own) :], "need_replication")

    return r.maps([dims(s) for s in in_shapes], [dims(s) for s in out_shapes])


def one_shape(
    in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]], kind: Kind, dims: Collection[int]
) -> OpRule:
    """A rule of operands and results of one shape, whose dims are the same: ``dims`` are of this kind, the others pass through."""
    r = OpRule(strong=True)
    factors = r.factors(in_shapes[0], kind, dims)
    return r.maps([factors] * len(in_shapes), [factors] * len(out_shapes))


def replicated(eqn: JaxprEqn | None, in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]) -> OpRule:
    """The rule of an op without a better one: every dim of operands and results needs replication."""
    return leading(in_shapes, out_shapes, 0)


def no_rule(in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]) -> OpRule:
    """The rule of an op whose primitive has none: every dim needs replication, and ``known`` is False."""
    r = replicated(None, in_shapes, out_shapes)
    r.known = False
    return r


def independent_of_data(
    eqn: JaxprEqn, in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]
) -> OpRule:
    """The rule of an op whose results depend on indices alone: dims of results pass through, and each device makes its
    shard from indices. Operands (sizes, a random key) need replication."""
    r = OpRule()
    return r.maps([r.factors(s, "need_replication") for s in in_shapes], [r.factors(s) for s in out_shapes])


_EXCHANGED = ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")
"""Parameters of collectives: dims whose elements come from other devices, or go to them."""


def same_dims(eqn: JaxprEqn, in_shapes: Sequence[tuple[int, ...]], out_shapes: Sequence[tuple[int, ...]]) -> OpRule:
    """The rule of a user's collective, over axes of a ``shard_map`` or an outer ``vmap``: result k has the dims of operand k.

    Dims along which it exchanges elements need replication, also if their size stays. If it is not tiled, the operand or the result
    lacks such a dim.
    """
    r = OpRule()
    exchanged = sorted({eqn.params[name] for name in _EXCHANGED if name in eqn.params})
    untiled = len(out_shapes[0]) > len(in_shapes[0])
    r.ins = [r.factors(a, "need_replication", () if untiled else exchanged) for a in in_shapes]
    for dims, b in zip(r.ins, out_shapes, strict=False):
        kept: list[Factors | None] = [*dims]
        for d in exchanged:
            if len(kept) > len(b):
                del kept[d]
            elif len(kept) < len(b):
                kept.insert(d, None)
        same = (f if f is not None and r.sizes[f[0]] == n else None for f, n in zip(kept, b, strict=True))
        r.outs.append(tuple(f or (r.factor(n, "need_replication"),) for f, n in zip(same, b, strict=True)))
    return r


def exchange_kind(eqn: JaxprEqn) -> Kind:
    """``permutation``; ``need_replication`` if shards cannot be exchanged: for random keys, and for arrays without elements."""
    avals = [aval_of(v) for v in (*eqn.invars, *eqn.outvars)]
    plain = not any(jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) for a in avals)
    return "permutation" if plain and all(math.prod(a.shape) for a in avals) else "need_replication"


def indexed_kind(eqn: JaxprEqn) -> Kind:
    """``indexed``; ``need_replication`` if an array has no elements."""
    return "indexed" if all(math.prod(aval_of(v).shape) for v in (*eqn.invars, *eqn.outvars)) else "need_replication"


def with_halo_sends(r: OpRule, eqn: JaxprEqn, why: str, alike: bool = False) -> OpRule:
    """The rule, with the collectives of its halo exchanges as ``sends``.

    Dims are exchanged one after the other: the second exchange includes the halo of the first, and thus the corners.

    Args:
      r: a rule whose ``windows`` are set.
      why: the purpose of the collectives, for the plan.
      alike: all ops with this argument have zeros outside the array, and dilate windows themselves if these begin alike, so that
        exchanges of further dims are equal if the exchanges of all dims before are.
    """

    def sends(shapes: Shapes, axes: Axes, sizes: Mapping[str, int]) -> list[Send]:
        """The collectives of the exchanges of all operands."""
        collectives = []
        for i, local_shape in enumerate(shapes):
            shape, done = list(local_shape), ()
            for factor, dim, window in r.windows_of(i):
                if (shards := math.prod(sizes[a] for a in axes[factor])) > 1:
                    read = window(shards)
                    sends = read.exchange.sends(shape, dim, factor, np.dtype(aval_of(eqn.invars[i]).dtype), why)
                    if done is not None:
                        sends = [
                            replace(s, content=(i, (done, dim, part)))
                            for s, part in zip(sends, read.exchange.sent, strict=True)
                        ]
                    collectives += sends
                    same = alike and len(set(read.before)) == 1
                    done = (*done, dim, read.starts, read.length) if same and done is not None else None
                    shape[dim] = read.length
        return collectives

    r.sends = sends if r.windows else None
    return r
