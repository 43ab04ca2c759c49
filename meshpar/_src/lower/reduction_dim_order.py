"""The order of dims in which a partial value is reduced, where XLA's own choice is slow.

The gradient of a weight is a matmul, whose dims have the order of its operands, followed by a transpose. XLA may fold the transpose
into the matmul. The lowering may do so as well: it may reduce the value before its transpose, and exchange the operands of the
matmul.

On CPUs, XLA folds the transpose into a form of the matmul without a fast kernel, unless another op is between them. Its
reduce-scatter copies the full value unless the scattered dim comes first. So the value is reduced in an order that needs no
transpose, or that has the scattered dim first.

On TPUs, a transpose may be free, since XLA chooses the memory layout. But libtpu 0.0.42 was observed to run the matmuls whose
reductions read such a view before all of these reductions, which then overlap with nothing (Llama 3 70B, FSDP on v5p: 0.65 s of
a step exposed instead of 0.21 s). So a matmul whose result is all-reduced and then sliced exchanges its operands if no
transpose remains. Other values, and GPUs, are not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from ..compat.jax import at_line_of, bind
from ..plan.steps import Reduce, Run, Scatter
from ..program.ir import Op
from ..rules.local_forms import plain_params
from ..rules.mesh_in_shard_map import Grid
from .collectives import combined


class DimOrder(NamedTuple):
    """An order of dims in which a partial value can be computed.

    Attributes:
      permutation: from this order to the value.
      arrays: the value in this order, or the operands of ``matmul``.
      matmul: computes the value from ``arrays`` with its operands exchanged; None: nothing is computed.
    """

    permutation: tuple[int, ...]
    arrays: Sequence[Any]
    matmul: Op | None = None


class TransposedSums:
    """The partial values of a body, with the orders of dims in which they can be computed.

    Args:
      grid: the mesh. Unless it is one of CPUs, only values that are all-reduced and then sliced are computed in another order.
    """

    def __init__(self, grid: Grid):
        self.grid = grid
        # keys are ids of arrays; the values refer to these arrays, so that the ids stay unique
        self._matmuls: dict[int, tuple[Any, Op, Sequence[Any]]] = {}
        self._transposed: dict[int, tuple[Any, list[DimOrder]]] = {}

    def copy(self) -> TransposedSums:
        """A copy with the same values."""
        other = TransposedSums(self.grid)
        other._matmuls, other._transposed = dict(self._matmuls), dict(self._transposed)
        return other

    def ran(self, step: Run, xs: Sequence[Any], results: Sequence[Any]) -> None:
        """Record a step with its operands and results, if it is a matmul or a transpose with a partial result."""
        primitive = step.op.primitive
        if primitive.family not in ("dot", "transpose") or not step.results[0].partial:
            return
        out = results[0]
        if primitive.family == "dot":
            self._matmuls[id(out)] = out, step.op, xs
        else:
            permutation = tuple(step.op.eqn.params["permutation"])
            orders = [DimOrder(permutation, xs)]
            if id(xs[0]) in self._matmuls:
                _, matmul, operands = self._matmuls[id(xs[0])]
                order = _exchanged_dims(matmul)
                orders.append(DimOrder(tuple(order.index(i) for i in permutation), operands, matmul))
            self._transposed[id(out)] = out, orders

    def best(self, x: Any, step: Reduce) -> DimOrder:
        """The order of dims in which a step reduces an array: one with the scattered dim first, or that needs no transpose."""
        orders = self._transposed[id(x)][1] if id(x) in self._transposed else []
        if not self.grid.cpu:
            sliced = any(s.entry.slices_locally for s in step.scatters)
            orders = [order for order in orders if sliced and _is_sorted(order)]
        dims = [scatter.dim for scatter in step.scatters[:1]]

        def cost(order: DimOrder) -> tuple[bool, bool]:
            return any(order.permutation[dim] != 0 for dim in dims), not _is_sorted(order)

        return min(orders, key=cost, default=DimOrder(tuple(range(x.ndim)), [x]))

    def reduced(self, x: Any, step: Reduce) -> Any:
        """:func:`lower.collectives.reduced`, in the best order of dims."""
        order = self.best(x, step)
        permutation = order.permutation
        back = np.argsort(permutation)
        have = tuple(step.source.spec[i] for i in back)
        scatters = [Scatter(permutation[s.dim], s.axes, s.algorithm) for s in step.scatters]
        x = order.arrays[0] if order.matmul is None else _exchanged(order.matmul, order.arrays)
        y = combined(x, have, scatters, step.over, step.source.kind, self.grid)
        return lax.transpose(y, permutation)


def _is_sorted(order: DimOrder) -> bool:
    return order.permutation == tuple(sorted(order.permutation))


def _exchanged_dims(op: Op) -> tuple[int, ...]:
    """The permutation of the dims of a matmul's result that results from exchanging its operands."""
    (contracted, _), (batch, _) = op.eqn.params["dimension_numbers"]
    dims = range(op.eqn.outvars[0].aval.ndim)
    end = op.eqn.invars[0].aval.ndim - len(contracted)  # of the dims from the left operand
    return (*dims[: len(batch)], *dims[end:], *dims[len(batch) : end])


def _exchanged(op: Op, xs: Sequence[Any]) -> Any:
    """The result of a matmul with its operands exchanged."""
    params = plain_params(op.eqn.params)
    contract, batch = params["dimension_numbers"]
    precision = params["precision"]
    params["dimension_numbers"] = tuple(contract[::-1]), tuple(batch[::-1])
    params["precision"] = precision[::-1] if isinstance(precision, tuple) else precision
    with at_line_of(op.eqn, op.where):
        (out,) = bind(op.eqn, xs[::-1], params)
    return out
