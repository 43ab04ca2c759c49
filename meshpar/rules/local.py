"""One device's part of an op: local forms, and what they are given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..compat.jax import bind, source_line
from ..errors import UnsupportedError
from .halo import ShardWindow, dilate, fetch_window
from .registry import Refusal, SplitOp, primitive
from .rule import OpRule
from .spmd import Factors, Sizes, axis_index, fine_names

Axes = Sequence[tuple[str, ...]]
"""The mesh axes that split every factor of a rule."""


class AnyOp(Protocol):
    """An equation with a factor rule: an op of a program, or what has the same attributes.

    Attributes:
      eqn: the jaxpr equation.
      rule: its factor rule; None for elementwise ops.
      name: of the primitive.
      ins, outs: its operands (None for literals) and results.
    """

    @property
    def eqn(self) -> Any: ...
    @property
    def rule(self) -> OpRule | None: ...
    @property
    def name(self) -> str: ...
    @property
    def ins(self) -> Sequence[Any]: ...
    @property
    def outs(self) -> Sequence[Any]: ...


def run_elementwise(op: AnyOp, xs: Sequence[Any]) -> list[Any]:
    """An elementwise op on shards that are split alike."""
    entry = primitive(op.name)
    if entry.local is not None:
        return entry.local(op, *xs)
    return bind(op.eqn, xs, plain_params(op.eqn.params))


def run_local(op: AnyOp, axes: Axes, xs: Sequence[Any], sizes: Sizes) -> list[Any]:
    """One device's part of an op, inside a ``shard_map``.

    Args:
      op: an op that has a factor rule.
      axes: the axes that split every factor of the rule.
      xs: the operands, as shards.
      sizes: of the axes; a :class:`~meshpar.rules.spmd.Grid` where the mesh is a factored one.

    Returns:
      The results, as shards; partial where the rule says so.

    Raises:
      UnsupportedError: the primitive has no local form, and some factor of it is split.
    """
    refused = refusal(op, axes, sizes)
    if refused is not None:
        raise UnsupportedError(
            f"{op.name} {refused.why}",
            shape=op.outs[0].shape if op.outs else None,
            source=source_line(op.eqn if refused.eqn is None else refused.eqn),
            fixes=['use lowering="jit"', *refused.fixes],
        )
    form = primitive(op.name).local
    if form is not None:
        return form(LocalOp(op, axes, sizes), *xs)
    return bind(op.eqn, xs, plain_params(op.eqn.params))


def refusal(op: AnyOp, axes: Axes, sizes: Mapping[str, int]) -> Refusal | None:
    """Why an op has no local form under a split; None: it has one.

    Args:
      op: an op with a factor rule, known or not.
      axes: the axes that split every factor of the rule.
      sizes: of the axes.
    """
    assert op.rule is not None
    entry = primitive(op.name)
    if entry.refuses is not None:
        return entry.refuses(SplitOp(op.eqn, op.rule, axes, False))
    over = [a for got in axes for a in got if sizes[a] > 1]
    if entry.local is not None or not over or not op.rule.known:
        return None
    return Refusal(
        f"has a factor rule but no local form, and {'+'.join(f'`{a}`' for a in over)} split it",
        ("or keep its dims replicated: `dim: none` before the other rules",),
    )


def on_shards(at: LocalOp, *xs: Any) -> list[Any]:
    """The primitive itself as local form: none of its parameters is a size of a dim that may be split."""
    return at.run(*xs)


def same(at: Any, *xs: Any) -> list[Any]:
    """The local form of an identity."""
    return list(xs)


def plain_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of an equation without shardings, which mean nothing for local arrays."""
    return {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}


class LocalOp:
    """An op on one device, and how its factors are split.

    Attributes:
      op, eqn, rule: the op, its equation and its factor rule.
      axes: the axes that split every factor.
      sizes: of the axes.
      params: of the equation, without shardings.
    """

    def __init__(self, op: AnyOp, axes: Axes, sizes: Sizes):
        assert op.rule is not None
        self.op, self.eqn, self.rule, self.axes, self.sizes = op, op.eqn, op.rule, axes, sizes
        self.params = plain_params(op.eqn.params)

    def parts(self, factors: Factors) -> int:
        """Into how many parts a dim made of these factors is split."""
        return math.prod(self.sizes[a] for f in factors for a in self.axes[f])

    def shape(self, shape: Sequence[int], dims: Sequence[Factors]) -> tuple[int, ...]:
        """The shape of a shard of an array of this shape."""
        return tuple(n // self.parts(f) for n, f in zip(shape, dims, strict=True)) if dims else tuple(shape)

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of a shard of the first result."""
        return self.shape(self.eqn.outvars[0].aval.shape, self.rule.outs[0])

    def of(self, factors: Factors) -> tuple[str, ...]:
        """The axes (of the factored mesh) that split a dim made of these factors, larger than 1."""
        return fine_names([a for f in factors for a in self.axes[f] if self.sizes[a] > 1], self.sizes)

    def offset(self, factors: Factors, size: int) -> Any:
        """Where this device's shard of a dim begins; ``size`` is the shard's."""
        axes = self.of(factors)
        return axis_index(axes) * size if axes else np.int32(0)

    def run(self, *xs: Any, **changed: Any) -> list[Any]:
        """The primitive on local arrays, with some parameters changed."""
        return bind(self.eqn, xs, {**self.params, **changed})

    def windows(self, operand: int) -> list[tuple[int, tuple[str, ...], ShardWindow]]:
        """(dim, the axes that split it, what each device reads of it) of an operand whose halos are exchanged."""
        out = []
        for factor, dim, window in self.rule.windows_of(operand):
            if axes := self.of((factor,)):
                out.append((dim, axes, window(self.parts((factor,)))))
        return out

    def with_halo(self, operand: int, x: Any, fill: Any = 0) -> Any:
        """All that this device reads of an operand along the dims that are split: halos, and what the op pads and dilates."""
        for dim, axes, by in self.windows(operand):
            x = dilate(fetch_window(x, dim, axes, by.exchange, fill), dim, axes, by, fill)
        return x
