"""Factors of an op's rule and the specs of its arrays: which axes of the factors give every device one contiguous block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from ..layout import Spec
from ..rules import OpRule


def permutation_groups(rule: OpRule) -> list[set[int]]:
    """The permutation factors of a rule in groups: factors that occur in one array, or are sharded alike, share a group.

    Given a rule for ``[tokens, d] -> [experts, slots, d]`` with permutation factors tokens, experts and slots, returns
    ``[{tokens}, {experts, slots}]``.
    """
    groups: list[set[int]] = []
    arrays = [{f for dim in dims for f in dim} for dims in (*rule.ins, *rule.outs)]
    for together in (*arrays, *map(set, rule.sharded_like)):
        own = {f for f in together if rule.kinds[f] == "permutation"}
        if own:
            touched = [g for g in groups if g & own]
            groups = [g for g in groups if not g & own] + [own.union(*touched)]
    return groups


def nested_factors(rule: OpRule) -> tuple[tuple[int, int], ...]:
    """(major, minor) of all adjacent factors of one dim."""
    return tuple(pair for dims in (*rule.ins, *rule.outs) for factors in dims for pair in itertools.pairwise(factors))


def contiguous_only(rule: OpRule, axes: list[tuple[str, ...]], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The axes without those that would give a device strided parts of a dim instead of one contiguous block.

    A minor factor of a dim may be sharded only if the axes of the next major one shard it fully (to size 1). A factor that loses
    its axes may be major in another array, so this is repeated until nothing changes.

    Given a dim made of the factors (heads 4, head_dim 8) and axes ``[("x",), ("y",)]`` with x=2, returns ``[("x",), ()]``; with
    x=4, returns both.
    """
    return contiguous_of_pairs(nested_factors(rule), rule.sizes, axes, sizes)


def contiguous_of_pairs(
    pairs: Sequence[tuple[int, int]], factor_sizes: Sequence[int], axes: list[tuple[str, ...]], sizes: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """As :func:`contiguous_only`, given the (major, minor) pairs of factors and the sizes of all factors."""
    axes = list(axes)

    def is_strided(major: int, minor: int) -> bool:
        return bool(axes[minor]) and math.prod(sizes[a] for a in axes[major]) != factor_sizes[major]

    while dropped := [minor for major, minor in pairs if is_strided(major, minor)]:
        for minor in dropped:
            axes[minor] = ()
    return axes


def spec_from_factors(dims: Sequence[Sequence[int]], axes: Sequence[tuple[str, ...]]) -> Spec:
    """The spec of an array whose dims are made of these factors: a dim has the axes of its factors, major to minor."""
    return tuple(tuple(a for f in factors for a in axes[f]) for factors in dims)


def axes_of_array(
    rule: OpRule, dims: Sequence[Sequence[int]], spec: Spec, sizes: Mapping[str, int]
) -> list[tuple[str, ...]] | None:
    """The axes of the factors of a rule with which an array, whose dims are made of these factors, has a spec.

    Only the major factor of each dim has axes. None: the axes do not divide it, or it is not passed through, or a device would have
    strided parts of a dim.
    """
    axes: list[tuple[str, ...]] = [()] * len(rule.sizes)
    for factors, entry in zip(dims, spec, strict=True):
        if entry:
            f = factors[0] if factors else None
            if f is None or rule.kinds[f] != "pass_through" or rule.sizes[f] % math.prod(sizes[a] for a in entry):
                return None
            axes[f] = entry
    return axes if contiguous_only(rule, axes, sizes) == axes and spec_from_factors(dims, axes) == spec else None
