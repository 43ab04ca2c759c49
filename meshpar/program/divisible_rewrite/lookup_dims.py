"""Dimension numbers of gathers and scatters under common names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..ir import Op, Value

LOOKUPS = ("gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")


@dataclass(frozen=True, slots=True)
class LookupDims:
    """The dimension numbers of a gather or scatter.

    Attributes:
      collapsed: dims of the array of which an index selects one element.
      indexed: for every component of an index vector, the dim of the array that it indexes.
      batch: dims of the array that are batch dims of the lookup.
      index_batch: for each of these, the dim of the index vectors.
    """

    collapsed: tuple[int, ...]
    indexed: tuple[int, ...]
    batch: tuple[int, ...]
    index_batch: tuple[int, ...]

    @classmethod
    def of(cls, op: Op) -> LookupDims:
        dn = op.eqn.params["dimension_numbers"]
        return cls(*(getattr(dn, field) for field in _fields(op)))

    def dimension_numbers(self, op: Op) -> Any:
        """The dimension numbers of an op with these in place of its own."""
        values = (self.collapsed, self.indexed, self.batch, self.index_batch)
        return op.eqn.params["dimension_numbers"]._replace(**dict(zip(_fields(op), values, strict=True)))


def _fields(op: Op) -> tuple[str, str, str, str]:
    """The fields of the op's dimension numbers, in the order of :class:`LookupDims`."""
    if op.primitive.gather:
        return "collapsed_slice_dims", "start_index_map", "operand_batching_dims", "start_indices_batching_dims"
    return (
        "inserted_window_dims",
        "scatter_dims_to_operand_dims",
        "operand_batching_dims",
        "scatter_indices_batching_dims",
    )


class IndependentDim(NamedTuple):
    """A dim along which a gather or scatter does the same for every entry: a batch dim, or a window of full size.

    Attributes:
      array, indices: the dim of the array and of the index vectors; None: it has none.
      window: the dim of a gather's result, or of a scatter's updates.
    """

    array: int | None
    indices: int | None
    window: int


def independent_dims(op: Op) -> list[IndependentDim]:
    """The independent dims of a gather or scatter.

    A gather of rows ``array[5, 8], indices[3, 1] → result[3, 8]`` has ``(None, 0, 0)`` and ``(1, None, 1)``.
    """
    lookup, dn = LookupDims.of(op), op.eqn.params["dimension_numbers"]
    array, index = (v.aval.shape for v in op.eqn.invars[:2])
    if op.primitive.gather:
        offset_dims, window = dn.offset_dims, op.eqn.outvars[0].aval.shape
    else:
        offset_dims, window = dn.update_window_dims, op.eqn.invars[2].aval.shape
    batch = [d for d in range(len(window)) if d not in offset_dims]
    array_dim = dict(zip(lookup.index_batch, lookup.batch, strict=True))
    dims = [IndependentDim(array_dim.get(i), i, d) for i, d in zip(range(len(index)), batch, strict=False)]
    sliced = [d for d in range(len(array)) if d not in lookup.collapsed and d not in lookup.batch]
    pairs = zip(sliced, sorted(offset_dims), strict=True)
    return dims + [IndependentDim(d, None, w) for d, w in pairs if array[d] == window[w]]


def index_components(index: Value) -> Sequence[Value | None]:
    """The values that are concatenated to index vectors, one per component; None for each if they are made otherwise."""
    op, last = index.op, len(index.shape) - 1
    if (
        op is not None
        and op.primitive.concatenation
        and op.eqn.params["dimension"] == last
        and len(op.ins) == index.shape[last]
    ):
        return op.ins
    return [None] * index.shape[last]
