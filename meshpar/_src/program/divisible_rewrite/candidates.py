"""The dims that decide whether a program has anything to rewrite: it has not if none of them is split."""

from __future__ import annotations

from ...rules.index import LOOKUPS, LookupDims
from ..ir import Op, Program, Value
from .lookup_dims import index_components

SLICING = ("slice", "split", "rev", "concatenate", "pad", "reshape", *LOOKUPS)
"""The primitives whose results may be represented by views."""


def candidate_dims(program: Program) -> list[tuple[Value, int]]:
    """The (value, dim) pairs of which at least one must be split for the program to be rewritten.

    These are the dims that are sliced, concatenated, padded, reversed or indexed by constants, and the minor ones of the dims that
    a reshape merges or splits.
    """
    depends_on_input = set(program.inputs)
    pairs: dict[tuple[Value, int], None] = {}
    for op in program.root.walk():
        if any(v in depends_on_input for v in op.ins):
            depends_on_input.update(op.outs)
        if op.name not in SLICING:
            continue
        if op.primitive.regroups:
            dims = _merged_or_split(op)
        elif op.primitive.family not in ("gather", "scatter"):
            dims = _resized(op)
        elif op.ins[1] is None or op.ins[1] not in depends_on_input or len(index_components(op.ins[1])) > 1:
            dims = _indexed(op)
        else:
            dims = []
        pairs.update(dict.fromkeys(dims))
    return list(pairs)


def _merged_or_split(op: Op) -> list[tuple[Value, int]]:
    """(value, dim) for the minor dims that a reshape merges into a dim or splits from one: b of ``[a, b] → [a·b]``."""
    operand, result = op.factor_rule.ins[0], op.factor_rule.outs[0]
    minor = {f for factors in (*operand, *result) for f in factors[1:]}
    return [
        (value, d)
        for value, dims in ((op.ins[0], operand), (op.outs[0], result))
        if value is not None
        for d, factors in enumerate(dims)
        if len(factors) == 1 and factors[0] in minor
    ]


def _resized(op: Op) -> list[tuple[Value, int]]:
    """(value, dim) for the dims that differ in size between operands and results of the same rank; for a reversal, for all dims."""
    arrays = [v for v in (op.ins[0], *op.outs) if v is not None]
    arrays += [v for v in op.ins[1:] if v is not None and len(v.shape) == len(op.outs[0].shape)]
    return [
        (v, d)
        for v in arrays
        for d in range(len(v.shape))
        if op.name == "rev" or any(w.shape[d] != v.shape[d] for w in arrays if len(w.shape) == len(v.shape))
    ]


def _indexed(op: Op) -> list[tuple[Value, int]]:
    """(value, dim) for the dims of an array that a gather or scatter indexes, and for the leading dims of the index vectors."""
    array, index = op.ins[0] if op.primitive.family == "gather" else op.outs[0], op.ins[1]
    dims = [(array, d) for d in LookupDims.of(op.eqn).indexed] if array is not None else []
    return dims + ([(index, d) for d in range(len(index.shape) - 1)] if index is not None else [])
