"""Reshapes: which of their loops are split, so that bringing the operand there and the result to its place sends least.

A reshape sends nothing itself where every device reshapes a block to a block: where a dim is merged from several or split into
several, only the major part may be split, or the next one if every device has a single index of those before it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from ..layout import Spec
from ..rules.rule import Factors, Kind, OpRule
from .assignment import contiguous_only, spec_from_factors
from .resharding import reshard_bytes

MOST_TRIED = 300  # splits of the factors of one reshape

Axes = tuple[tuple[str, ...], ...]


def reshape_axes(
    rule: OpRule, claimed: Sequence[tuple[str, ...]], have: Spec, rest: Spec, sizes: Mapping[str, int]
) -> Axes:
    """The axes of every factor with which the fewest bytes are sent: the claimed ones, unless others are cheaper.

    Args:
      claimed: the axes that the layout gives the factors.
      have: the spec of the operand.
      rest: the spec in which the result is kept.
    """
    key = (tuple(rule.ins[0]), tuple(rule.outs[0]), tuple(rule.sizes), tuple(rule.kinds))
    return _cheapest(*key, tuple(claimed), have, rest, tuple(sizes.items()))


def axes_from(
    dims: Sequence[Factors], spec: Spec, rule_sizes: Sequence[int], kinds: Sequence[Kind], sizes: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """The axes of the factors of an array that lies in a spec, as far as they divide the factors one after the other."""
    axes: list[tuple[str, ...]] = [()] * len(rule_sizes)
    for entry, factors in zip(spec, dims, strict=True):
        left = list(entry)
        for f in factors:
            parts = 1
            while kinds[f] == "pass_through" and left and rule_sizes[f] % (parts * sizes[left[0]]) == 0:
                parts *= sizes[left[0]]
                axes[f] += (left.pop(0),)
            if parts != rule_sizes[f]:
                break
    return axes


@functools.lru_cache(maxsize=4096)
def _cheapest(
    operand: tuple[Factors, ...], result: tuple[Factors, ...], extents: tuple[int, ...], kinds: tuple[Kind, ...],
    claimed: Axes, have: Spec, rest: Spec, mesh: tuple[tuple[str, int], ...],
) -> Axes:  # fmt: skip
    sizes = dict(mesh)
    rule = OpRule([operand], [result], list(extents), list(kinds))
    shapes = [[math.prod(extents[f] for f in factors) for factors in dims] for dims in (operand, result)]

    def sent(axes: Axes) -> float:
        return reshard_bytes(have, spec_from_factors(operand, axes), shapes[0], 1, sizes) + reshard_bytes(
            spec_from_factors(result, axes), rest, shapes[1], 1, sizes
        )

    best, least = claimed, sent(claimed)
    ends = ((operand, have), (result, rest))
    tried: Iterator[list[tuple[str, ...]]] = (axes_from(d, spec, extents, kinds, sizes) for d, spec in ends)
    used = sorted({a for spec in (have, rest) for entry in spec for a in entry if sizes[a] > 1})
    for choice in itertools.chain(tried, itertools.islice(_splits(used, extents, kinds, sizes), MOST_TRIED)):
        if not least:
            break
        axes = tuple(contiguous_only(rule, choice, sizes))
        if axes == tuple(choice) and (bytes_ := sent(axes)) < least:
            best, least = axes, bytes_
    return best


def _splits(
    used: Sequence[str], extents: Sequence[int], kinds: Sequence[Kind], sizes: Mapping[str, int]
) -> Iterator[list[tuple[str, ...]]]:
    """Every way to give axes to factors that they divide, in every order."""
    where = [None, *(f for f, kind in enumerate(kinds) if kind == "pass_through" and extents[f] > 1)]
    for homes in itertools.product(where, repeat=len(used)):
        groups = [tuple(a for a, home in zip(used, homes, strict=True) if home == f) for f in range(len(extents))]
        if all(n % math.prod(sizes[a] for a in got) == 0 for n, got in zip(extents, groups, strict=True)):
            yield from map(list, itertools.product(*map(itertools.permutations, groups)))
