"""The order of dims in which a partial sum is settled, for XLA's CPU compiler.

The gradient of a weight is a product, whose dims come out in the order of its operands, and a transpose. A compiler is free to
fold one into the other, and XLA's does so where nothing stands between: into a form of the product for which, on CPUs, it has
no fast kernel. And its reduce-scatter wants the scattered dim first, else all of the sum is copied. So here a sum is settled
before it is transposed, and a product made with its operands exchanged if that leaves nothing to transpose, or puts the
scattered dim first.

Compilers for TPUs and GPUs lay arrays out as they like, and are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from ..compat.jax import bind
from ..hardware.algorithms import AlgorithmName
from ..layout import Spec
from ..plan.collectives import settlement
from ..program.ir import Op
from .exchange import Grid, settle
from .local import plain_params


class _Turned(NamedTuple):
    """A transposed partial sum, and it as it was before, with the permutation that makes the one of the other: in each order
    in which that can be had."""

    array: Any
    before: list[tuple[Any, tuple[int, ...]]]


class Orders:
    """Partial sums, and the orders of dims in which they can be had.

    Args:
      grid: what is lowered for. If not for CPUs, every sum is settled in the order that it has.
    """

    def __init__(self, grid: Grid):
        self.sizes, self.several = grid, grid.cpu
        # by `id(array)`, with the array, so that no other one gets its id
        self._products: dict[int, tuple[Any, Op, Sequence[Any]]] = {}
        self._turned: dict[int, _Turned] = {}

    def product(self, op: Op, xs: Sequence[Any], out: Any) -> None:
        """An op on shards ``xs`` left a partial sum ``out``."""
        if self.several and op.name == "dot_general" and xs:  # a ring has made it of blocks
            self._products[id(out)] = out, op, xs

    def passed(self, op: Op, x: Any, out: Any) -> None:
        """A partial sum ``x`` passed through an op, and is ``out``."""
        if not self.several or op.name != "transpose":
            return
        permutation = tuple(op.eqn.params["permutation"])
        before = [(x, permutation)]
        if id(x) in self._products:
            _, product, xs = self._products[id(x)]
            place = _exchange(product)
            before.append((_exchanged(product, xs), tuple(place.index(i) for i in permutation)))
        self._turned[id(out)] = _Turned(out, before)

    def settle(
        self, x: Any, have: Spec, rest: Spec, axes: Sequence[str], kind: str, algorithms: Mapping[int, AlgorithmName] | None = None,
        begun: bool = False,
    ) -> tuple[Any, Spec]:  # fmt: skip
        """:func:`meshpar.lower.exchange.settle`, in the best order that there is."""
        turned = self._turned.get(id(x))
        if turned is None:
            return settle(x, have, rest, axes, kind, self.sizes, algorithms, begun)
        scatter, _ = settlement(have, rest, axes, kind)
        first = next(iter(scatter), 0)

        def cost(way: tuple[Any, tuple[int, ...]]) -> tuple[bool, bool]:
            return bool(scatter) and way[1][first] != 0, way[1] != tuple(sorted(way[1]))

        x, permutation = min(turned.before, key=cost)
        back = np.argsort(permutation)
        had, wanted = (tuple(spec[i] for i in back) for spec in (have, rest))
        algorithms = {permutation[i]: algorithm for i, algorithm in (algorithms or {}).items()}
        y, spec = settle(x, had, wanted, axes, kind, self.sizes, algorithms)
        return lax.transpose(y, permutation), tuple(spec[i] for i in permutation)


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
    (out,) = bind(op.eqn, xs[::-1], params)
    return out
