"""Local forms: how one device computes its shards of an op's results from its shards of the operands, inside a ``shard_map``.

Also which ops may not run on shards: :func:`check_local` and :func:`refusal` ask before anything is lowered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ...errors import UnsupportedError
from ..compat.jax import bind, on_host, source_line
from .halo import ShardWindow, dilate, fetch_window
from .mesh_in_shard_map import Axes, Factors, Sizes, axis_index, fine_names
from .registry import Refusal, SplitOp, primitive
from .rule import OpRule


class AnyOp(Protocol):
    """An equation with a factor rule: :class:`program.ir.Op`, or an object with the same attributes.

    Attributes:
      eqn: the jaxpr equation.
      rule: its factor rule; None for elementwise ops.
      name: of its primitive.
      ins, outs: its operands (None for literals) and results.
    """

    eqn: Any
    rule: OpRule | None
    name: str
    ins: list[Any]
    outs: list[Any]


def run_local(op: AnyOp, axes: Axes, xs: Sequence[Any], sizes: Sizes, form: int = 0) -> list[Any]:
    """One device's shards of an op's results, inside a ``shard_map``.

    Args:
      op: an elementwise op, whose operands are split alike, or one with a factor rule that :func:`refusal` admits.
      axes: the axes over which every factor of the rule is split.
      xs: the shards of the operands.
      sizes: axis sizes; a :class:`~rules.mesh_in_shard_map.Grid` for a factored mesh.
      form: of a kernel with several forms: 0, or one more than an index of its other forms.

    Returns:
      The shards of the results, partial over the axes of factors that the rule reduces (:meth:`OpRule.partial_factors`).

    """
    local = primitive(op.name).local
    if local is None:
        return bind(op.eqn, xs, plain_params(op.eqn.params))
    return local(op if op.rule is None else LocalOp(op, axes, sizes, form), *xs)


def check_local(op: AnyOp, axes: Axes, sizes: Mapping[str, int]) -> None:
    """Raise an UnsupportedError for an op that cannot run on shards inside a ``shard_map`` around the program (:func:`refusal`)."""
    refused = refusal(op, axes, sizes)
    if refused is not None:
        raise unsupported(op, refused)


def unsupported(op: AnyOp, refused: Refusal) -> UnsupportedError:
    """The error for an op that cannot run on shards."""
    return UnsupportedError(
        f"{op.name} {refused.why}",
        shape=op.outs[0].shape if op.outs else None,
        source=source_line(op.eqn if refused.eqn is None else refused.eqn),
        fixes=['use lowering="jit"', *refused.fixes],
    )


def refusal(op: AnyOp, axes: Axes, sizes: Mapping[str, int]) -> Refusal | None:
    """The reason why an op cannot run on shards under some split of its factors; None if it can.

    Args:
      op: an op with a factor rule, known or not.
      axes: the axes over which every factor of the rule is split.
      sizes: axis sizes.
    """
    assert op.rule is not None
    entry = primitive(op.name)
    if entry.refuses is not None:
        return entry.refuses(SplitOp(op.eqn, op.rule, axes, False))
    over = [a for factor_axes in axes for a in factor_axes if sizes[a] > 1]
    if not over or not op.rule.known:
        return None
    if entry.local is not None:
        return None if entry.local is on_shards else _selects_on_host(op, axes, sizes)
    return Refusal(
        f"has a factor rule but no local form, and {'+'.join(f'`{a}`' for a in over)} split it",
        ("or keep its dims replicated: `dim: none` before the other rules",),
    )


def _selects_on_host(op: AnyOp, axes: Axes, sizes: Mapping[str, int]) -> Refusal | None:
    """The :class:`Refusal` of an op that selects or moves elements along a split dim of an array in host memory; else None.

    The local forms have masks, zeros and collectives, which are in device memory.
    """
    assert op.rule is not None
    shaped = zip((*op.eqn.invars, *op.eqn.outvars), (*op.rule.ins, *op.rule.outs), strict=True)
    for v, d, f in ((v, d, f) for v, dims in shaped if on_host(v) for d, factors in enumerate(dims) for f in factors):
        over = [a for a in axes[f] if sizes[a] > 1]
        if op.rule.kinds[f] in ("indexed", "permutation") and over:
            return Refusal(
                f"selects or moves elements along dim {d} of an array {list(v.aval.shape)} in host memory, which is sharded over "
                f"{'+'.join(f'`{a}`' for a in over)}; its local form needs masks or collectives in device memory",
                ("or copy the array to the device before: jax.device_put(x, jax.memory.Space.Device)",),
            )
    return None


def on_shards(op: LocalOp, *xs: Any) -> list[Any]:
    """The local form of a primitive without parameters that are sizes of split dims: the primitive on the shards."""
    return op.run(*xs)


def same(op: Any, *xs: Any) -> list[Any]:
    """The local form of an identity."""
    return list(xs)


def plain_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of an equation, with None for shardings, which do not apply to shards."""
    return {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}


class LocalOp:
    """An op, with the axes that split its factors: the first argument of local forms.

    A *local form* is a function that computes an op on the shards of one device, inside a ``shard_map``:
    ``(LocalOp, *operand shards) → result shards``.

    Attributes:
      eqn, name, rule: the equation, the name of its primitive, and its factor rule.
      operands: the operands as values of the program (None for literals).
      axes: the axes over which every factor is split.
      sizes: axis sizes.
      params: of the equation, without shardings.
      form: as of :func:`run_local`.
    """

    def __init__(self, op: AnyOp, axes: Axes, sizes: Sizes, form: int = 0):
        assert op.rule is not None
        self.eqn, self.name, self.rule, self.operands = op.eqn, op.name, op.rule, op.ins
        self.axes, self.sizes, self.form = axes, sizes, form
        self.params = plain_params(op.eqn.params)

    def shard_count(self, factors: Factors) -> int:
        """The number of shards of a dim that consists of these factors."""
        return math.prod(self.sizes[a] for f in factors for a in self.axes[f])

    def shard_shape(self, shape: Sequence[int], dims: Sequence[Factors]) -> tuple[int, ...]:
        """The shape of a shard of an array, from its shape and the factors of its dims (empty: the array is not split)."""
        return tuple(n // self.shard_count(f) for n, f in zip(shape, dims, strict=True)) if dims else tuple(shape)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of a shard of the first result."""
        return self.shard_shape(self.eqn.outvars[0].aval.shape, self.rule.outs[0])

    def axes_of(self, factors: Factors) -> tuple[str, ...]:
        """The axes (of the factored mesh, larger than 1) over which a dim of these factors is split, major to minor."""
        return fine_names([a for f in factors for a in self.axes[f] if self.sizes[a] > 1], self.sizes)

    def offset(self, factors: Factors, size: int) -> Any:
        """The index in the array at which this device's shard of a dim begins: an int32 scalar. ``size``: of the shard."""
        axes = self.axes_of(factors)
        return axis_index(axes) * size if axes else np.int32(0)

    def run(self, *xs: Any, **changed: Any) -> list[Any]:
        """The results of the primitive on local arrays, with some parameters changed."""
        return bind(self.eqn, xs, {**self.params, **changed})

    def windows(self, operand: int) -> list[tuple[int, tuple[str, ...], ShardWindow]]:
        """(dim, its axes, the windows that devices read) for the split dims of an operand along which halos are exchanged."""
        out = []
        for factor, dim, window in self.rule.windows_of(operand):
            if axes := self.axes_of((factor,)):
                out.append((dim, axes, window(self.shard_count((factor,)))))
        return out

    def with_halo(self, operand: int, x: Any, fill: Any = 0) -> Any:
        """The window of an operand that this device reads, from its shard: halos are exchanged, and the dims padded and dilated."""
        for dim, axes, window in self.windows(operand):
            x = dilate(fetch_window(x, dim, axes, window, fill), dim, axes, window, fill)
        return x
