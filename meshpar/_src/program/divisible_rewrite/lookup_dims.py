"""The independent dims of gathers and scatters, and the components of their indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...rules.index import LookupDims
from ..ir import Op, Value


class IndependentDim(NamedTuple):
    """A dim along which a gather or scatter treats all entries alike: a batch dim, or a dim that every window covers
    fully.

    :func:`independent_dims` makes them.

    Attributes:
      array, indices: the dim of the array and of the index vectors; None: it has none.
      window: the dim of a gather's result, or of a scatter's updates.
    """

    array: int | None
    indices: int | None
    window: int


def independent_dims(op: Op) -> list[IndependentDim]:
    """The independent dims of a gather or scatter: batch dims first, then dims that every window covers fully.

    A gather of rows ``array[5, 8], indices[3, 1] → result[3, 8]`` has ``(None, 0, 0)`` and ``(1, None, 1)``.
    """
    lookup = LookupDims.of(op.eqn)
    array, index = (v.aval.shape for v in op.eqn.invars[:2])
    window = (op.eqn.outvars[0] if op.primitive.family == "gather" else op.eqn.invars[2]).aval.shape
    array_dim = dict(zip(lookup.index_batch, lookup.batch, strict=True))
    pairs = zip(range(len(index)), lookup.batch_dims(len(window)), strict=False)
    dims = [IndependentDim(array_dim.get(i), i, w) for i, w in pairs]
    return dims + [
        IndependentDim(d, None, w) for d, w in lookup.window_dims(len(array)).items() if array[d] == window[w]
    ]


def index_components(index: Value) -> Sequence[Value | None]:
    """The values that are concatenated to index vectors, one per component; None for each if they are made otherwise."""
    op, last = index.op, len(index.shape) - 1
    if (
        op is not None
        and op.primitive.family == "concatenate"
        and op.eqn.params["dimension"] == last
        and len(op.ins) == index.shape[last]
    ):
        return op.ins
    return [None] * index.shape[last]
