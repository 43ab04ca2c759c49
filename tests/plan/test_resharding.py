"""Reshardings: what single moves send, by hand; on devices (``lower/test_collectives.py``), every shard arrives."""

import itertools
import math

import pytest
from all_specs import specs_of

from meshpar._src.lower.collectives import permutation
from meshpar._src.plan.resharding import reshard, reshard_bytes

SIZES = {"a": 2, "b": 2, "c": 2}


def test_no_part_between_the_moves_is_larger_than_those_at_both_ends():
    for have, need in list(itertools.product(specs_of(2, "abc"), repeat=2))[::3]:
        split = [math.prod(SIZES[a] for entry in spec for a in entry) for spec in (have, need)]
        for move in reshard(have, need, (8, 16), SIZES):
            assert math.prod(SIZES[a] for entry in move.after for a in entry) >= min(split), (have, need)


def test_a_dim_between_the_moves_that_would_not_divide_is_gathered():
    """A dim of 4 cannot be split over both axes, not even between two moves."""
    sizes = {"a": 4, "b": 2}
    moves = reshard((("a",), ("b",)), (("b",), ()), (4, 4), sizes)
    assert moves[-1].after == (("b",), ())
    assert all(math.prod(sizes[a] for a in e) <= 4 for m in moves for e in m.after)


S = 8 * 16  # elements of the arrays below


@pytest.mark.parametrize(
    ("have", "need", "moves", "sent"),
    [
        ("a -", "- a", ["all-to-all"], S / 2 / 2),  # an axis goes to another dim
        ("a -", "b -", ["collective-permute"], S / 2),  # one axis for another: an all-gather sends as much
        ("a b", "b a", ["collective-permute"], S / 4),  # two dims swap their axes
        ("ab -", "ba -", ["collective-permute"], S / 4),  # the same axes, the other way round
        ("a b", "ab -", ["all-to-all"], S / 4 / 2),  # two dims' axes merge on one
        ("ab -", "- ab", ["all-to-all"], S / 4 * 3 / 4),  # two axes at once: one by one would send S/4
        ("- -", "a b", ["slice", "slice"], 0),
        ("a -", "a b", ["slice"], 0),
        ("ab -", "a -", ["all-gather"], S / 4),
        ("ab -", "- -", ["all-gather"], S / 4 * 3),
        ("a -", "- b", ["slice", "all-gather"], S / 4),  # cut first: the gathered pieces are half as large
        ("a b", "a b", [], 0),
    ],
)
def test_single_reshardings(have, need, moves, sent):
    sizes = {"a": 2, "b": 2}
    have, need = (tuple(tuple(e.strip("-")) for e in spec.split()) for spec in (have, need))
    found = reshard(have, need, (8, 16), sizes)
    assert [m.op for m in found] == moves
    assert reshard_bytes(have, need, (8, 16), 4, sizes) == 4 * sent


def test_a_permute_is_a_bijection_in_which_shards_at_home_stay():
    seen = 0
    for have, need in list(itertools.product(specs_of(2, "abc"), repeat=2))[::5]:
        for move in reshard(have, need, (8, 16), SIZES):
            if move.op == "collective-permute":
                sources, targets = zip(*permutation(move, SIZES), strict=True)
                assert sorted(sources) == sorted(targets) == list(range(move.group))
                assert any(s != t for s, t in zip(sources, targets, strict=True))
                seen += 1
    assert seen
    (swap,) = reshard((("a",), ("b",)), (("b",), ("a",)), (8, 16), {"a": 2, "b": 2})
    assert permutation(swap, {"a": 2, "b": 2}) == [(0, 0), (1, 2), (2, 1), (3, 3)]


def test_several_axes_go_in_one_all_to_all():
    (move,) = reshard((("a", "b", "c"), ()), (("a",), ("b", "c")), (8, 16), SIZES)
    assert (move.op, move.axes, move.group, move.dims) == ("all-to-all", ("b", "c"), 4, (0, 1))


def test_a_dim_that_does_not_divide_counts_as_padded():
    # four shards of 2 rows
    assert reshard_bytes((("a",),), (("b",),), (5,), 4, {"a": 4, "b": 4}) == 2 * 4


def test_axes_of_size_1_say_nothing():
    sizes = {"a": 2, "one": 1}
    assert reshard((("one", "a"), ()), (("a",), ("one",)), (8, 16), sizes) == ()
    assert [m.op for m in reshard((("one", "a"), ()), ((), ("a", "one")), (8, 16), sizes)] == ["all-to-all"]
