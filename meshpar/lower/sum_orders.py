"""The order of dims in which an unreduced sum is reduced, where XLA's own choice is slow.

The gradient of a weight is a product, whose dims come out in the order of its operands, and a transpose. A compiler is free to
fold one into the other, and so is the lowering: it may reduce a sum before it is transposed, and make the product with its operands
exchanged.

On CPUs XLA folds where nothing stands between: into a form of the product for which it has no fast kernel. And its
reduce-scatter wants the scattered dim first, else all of the sum is copied. So what is reduced there is what leaves nothing to
transpose, or has the scattered dim first.

On TPUs XLA lays arrays out as it likes, and a transpose may be a view. But libtpu 0.0.42 was seen to make products whose sums it
reads through a view before all of these sums, which then have nothing beside them (Llama 3 70B under FSDP on v5p: 0.65 s of a step
exposed, for 0.21). So a product whose sum is sent whole is made with its operands exchanged if that leaves nothing to
transpose. All else is left alone, and so are GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from ..compat.jax import at_line_of, bind
from ..plan.steps import Reduce, Run, Scatter
from ..program.ir import Op
from ..rules.local import plain_params
from ..rules.spmd import Grid
from .collectives import combined, reduced


class _Turned(NamedTuple):
    """A transposed partial sum, and it as it was before, with the permutation that makes the one of the other: in each order
    in which that can be had."""

    array: Any
    before: list[tuple[Callable[[], Any], tuple[int, ...]]]


class SumOrders:
    """Unreduced sums, and the orders of dims in which they can be had.

    Args:
      grid: what is lowered for. If not for CPUs, a sum that is not sent whole is reduced in the order that it has.
    """

    def __init__(self, grid: Grid):
        self.grid = grid
        # by `id(array)`, with the array, so that no other one gets its id
        self._products: dict[int, tuple[Any, Op, Sequence[Any]]] = {}
        self._turned: dict[int, _Turned] = {}

    def copy(self) -> SumOrders:
        """The same sums; what is added to the copy is not added to this."""
        other = SumOrders(self.grid)
        other._products, other._turned = dict(self._products), dict(self._turned)
        return other

    def ran(self, step: Run, xs: Sequence[Any], results: Sequence[Any]) -> None:
        """A step made results of shards ``xs``."""
        primitive = step.op.primitive
        if not (primitive.dot or primitive.transpose) or not step.results[0].partial:
            return
        out = results[0]
        if primitive.dot:
            self._products[id(out)] = out, step.op, xs
        else:
            permutation = tuple(step.op.eqn.params["permutation"])
            before: list[tuple[Callable[[], Any], tuple[int, ...]]] = [(lambda: xs[0], permutation)]
            if id(xs[0]) in self._products:
                _, product, operands = self._products[id(xs[0])]
                place = _exchange(product)
                before.append((partial(_exchanged, product, operands), tuple(place.index(i) for i in permutation)))
            self._turned[id(out)] = _Turned(out, before)

    def reduced(self, x: Any, step: Reduce) -> Any:
        """:func:`meshpar.lower.collectives.reduced`, in the best order that there is."""
        ways = self._turned[id(x)].before if id(x) in self._turned else []
        if not self.grid.cpu:
            whole = any(s.entry.slices_locally for s in step.scatters)
            ways = [way for way in ways if whole and way[1] == tuple(sorted(way[1]))]
        if not ways:
            return reduced(x, step, self.grid)
        first = step.scatters[0].dim if step.scatters else 0

        def cost(way: tuple[Callable[[], Any], tuple[int, ...]]) -> tuple[bool, bool]:
            return bool(step.scatters) and way[1][first] != 0, way[1] != tuple(sorted(way[1]))

        make, permutation = min(ways, key=cost)
        back = np.argsort(permutation)
        have = tuple(step.source.spec[i] for i in back)
        scatters = [Scatter(permutation[s.dim], s.axes, s.algorithm) for s in step.scatters]
        y = combined(make(), have, scatters, step.over, step.source.kind, self.grid, cpu=self.grid.cpu)
        return lax.transpose(y, permutation)


def _exchange(op: Op) -> tuple[int, ...]:
    """What exchanging its operands does to the dims of a product's result."""
    (contracted, _), (batch, _) = op.eqn.params["dimension_numbers"]
    dims = range(op.eqn.outvars[0].aval.ndim)
    end = op.eqn.invars[0].aval.ndim - len(contracted)  # of the dims that the left operand brings
    return (*dims[: len(batch)], *dims[end:], *dims[len(batch) : end])


def _exchanged(op: Op, xs: Sequence[Any]) -> Any:
    params = plain_params(op.eqn.params)
    contract, batch = params["dimension_numbers"]
    precision = params["precision"]
    params["dimension_numbers"] = tuple(contract[::-1]), tuple(batch[::-1])
    params["precision"] = precision[::-1] if isinstance(precision, tuple) else precision
    with at_line_of(op.eqn, op.where):
        (out,) = bind(op.eqn, xs[::-1], params)
    return out
