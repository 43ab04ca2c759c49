"""Reshapes: the axes of their factors with which resharding the operand before and the result afterwards sends the fewest bytes.

A reshape itself sends nothing if every device reshapes one contiguous block to another. So of the factors of a merged dim only the
major one may be sharded, or the next one if the axes of all major ones shard them to size 1.

Given a reshape of ``[4, 8]`` to ``[32]`` (factors a of 4 and b of 8), ``x`` of size 2 and ``y`` of size 4:

- the operand has the spec ``(("x",), ())`` and the result is stored as ``(("x",),)``: returns ``(("x",), ())``, nothing is sent;
- the operand has ``((), ("y",))`` and the result is stored as ``(("y",),)``: returns ``(("y",), ())``, since b cannot be sharded;
  the operand is resharded with an all-to-all.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from ..layout import Spec
from ..rules.rule import OpRule
from .factor_specs import contiguous_only, spec_from_factors
from .resharding import reshard_bytes

MAX_CANDIDATES = 2000
"""Assignments of axes to the factors of one reshape that are compared."""

Axes = tuple[tuple[str, ...], ...]


@functools.lru_cache(maxsize=4096)
def reshape_axes(rule: OpRule, claimed: Axes, have: Spec, stored: Spec, mesh: tuple[tuple[str, int], ...]) -> Axes:
    """The axes of every factor with which the fewest bytes are sent; on a tie, those that the layout assigns.

    Args:
      claimed: the axes that the layout assigns to the factors.
      have: the spec of the operand.
      stored: the stored spec of the result.
      mesh: (axis, size) of the mesh.
    """
    sizes, operand, result = dict(mesh), rule.ins[0], rule.outs[0]
    shapes = [[math.prod(rule.sizes[f] for f in factors) for factors in dims] for dims in (operand, result)]

    def sent(axes: Axes) -> float:
        return reshard_bytes(have, spec_from_factors(operand, axes), shapes[0], 1, sizes) + reshard_bytes(
            spec_from_factors(result, axes), stored, shapes[1], 1, sizes
        )

    best, least = claimed, sent(claimed)
    used = sorted({a for spec in (have, stored) for entry in spec for a in entry if sizes[a] > 1})
    for axes in itertools.islice(_splits(used, rule, sizes), MAX_CANDIDATES):
        if not least:
            break
        if contiguous_only(rule, axes, sizes) == axes and (bytes_ := sent(tuple(axes))) < least:
            best, least = tuple(axes), bytes_
    return best


def _splits(used: Sequence[str], rule: OpRule, sizes: Mapping[str, int]) -> Iterator[list[tuple[str, ...]]]:
    """Yields every assignment of ``used`` axes to factors whose sizes they divide: for each factor, the axes that split
    it, in order.

    Each axis splits one ``pass_through`` factor or none. An assignment occurs once for every order of the axes of a factor.
    """
    where = [None, *(f for f, kind in enumerate(rule.kinds) if kind == "pass_through" and rule.sizes[f] > 1)]
    for homes in itertools.product(where, repeat=len(used)):
        groups = [tuple(a for a, home in zip(used, homes, strict=True) if home == f) for f in range(len(rule.sizes))]
        if all(n % math.prod(sizes[a] for a in group) == 0 for n, group in zip(rule.sizes, groups, strict=True)):
            yield from map(list, itertools.product(*map(itertools.permutations, groups)))
