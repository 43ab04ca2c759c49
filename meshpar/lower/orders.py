"""The order of dims in which a partial sum is settled, for XLA's CPU compiler.

The gradient of a weight is a product, whose dims come out in the order of its operands, and a transpose. A compiler is free to
fold one into the other, and XLA's does so where nothing stands between: into a form of the product for which, on CPUs, it has
no fast kernel. And its reduce-scatter wants the scattered dim first, else all of the sum is copied. So here the product is made
with its operands exchanged, which gives the transposed result as it is; or, where the order before the transpose has the
scattered dim first, that is settled, and the shard transposed.

Compilers for TPUs and GPUs lay arrays out as they like, and are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from .._compat import bind
from ..layout import Spec
from ..plan.collectives import Form, settlement
from ..program.graph import Op
from .exchange import Sizes, settle
from .local import plain_params


class _Turned(NamedTuple):
    """A transposed partial sum; ``exchanged``: the same, by the product with its operands exchanged."""

    array: Any
    before: Any
    permutation: tuple[int, ...]
    exchanged: Any | None


class Orders:
    """Partial sums that can be had in several orders of their dims. Kept by ``id(array)``, with the array, so that it lives."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self._products: dict[int, tuple[Any, Op, Sequence[Any]]] = {}
        self._turned: dict[int, _Turned] = {}

    def product(self, op: Op, xs: Sequence[Any], out: Any) -> None:
        """A product (``dot_general``) of shards ``xs`` left a partial sum ``out``."""
        self._products[id(out)] = out, op, xs

    def passed(self, op: Op, x: Any, out: Any) -> None:
        """A partial sum ``x`` passed through an op, and is ``out``."""
        if op.name != "transpose":
            return
        permutation = tuple(op.eqn.params["permutation"])
        exchanged = None
        if id(x) in self._products:
            _, product, xs = self._products[id(x)]
            if permutation == _exchange(product, xs):
                exchanged = _exchanged(product, xs)
        self._turned[id(out)] = _Turned(out, x, permutation, exchanged)

    def settle(
        self, x: Any, have: Spec, rest: Spec, axes: Sequence[str], kind: str, forms: Mapping[int, Form] | None = None
    ) -> tuple[Any, Spec]:
        """:func:`meshpar.lower.exchange.settle`, in the best order that there is."""
        turned = self._turned.get(id(x))
        if turned is None:
            return settle(x, have, rest, axes, kind, self.sizes, forms)
        permutation = turned.permutation
        scatter, _ = settlement(have, rest, axes, kind)
        first = next(iter(scatter), 0)
        if turned.exchanged is not None and (first == 0 or permutation[first] != 0):
            return settle(turned.exchanged, have, rest, axes, kind, self.sizes, forms)
        back = np.argsort(permutation)
        had, wanted = (tuple(spec[i] for i in back) for spec in (have, rest))
        forms = {permutation[i]: form for i, form in (forms or {}).items()}
        y, spec = settle(turned.before, had, wanted, axes, kind, self.sizes, forms)
        return lax.transpose(y, permutation), tuple(spec[i] for i in permutation)


def _exchange(op: Op, xs: Sequence[Any]) -> tuple[int, ...]:
    """The permutation of a product's result that exchanging its operands makes."""
    (left, _), (batch, _) = op.eqn.params["dimension_numbers"]
    n, mine = len(batch), xs[0].ndim - len(left) - len(batch)
    dims = range(op.eqn.outvars[0].aval.ndim)
    return (*dims[:n], *dims[n + mine :], *dims[n : n + mine])


def _exchanged(op: Op, xs: Sequence[Any]) -> Any:
    params = plain_params(op.eqn.params)
    contract, batch = params["dimension_numbers"]
    precision = params["precision"]
    params["dimension_numbers"] = tuple(contract[::-1]), tuple(batch[::-1])
    params["precision"] = precision[::-1] if isinstance(precision, tuple) else precision
    (out,) = bind(op.eqn, xs[::-1], params)
    return out
