"""Which of an op's factors may be split: only where every device has a block of every array."""

from meshpar.plan.claims import blocks_only
from meshpar.rules.rule import OpRule

SIZES = {"x": 2, "y": 2}


def reshape(ins, outs, *extents):
    return OpRule([ins], [outs], list(extents), ["pass_through"] * len(extents))


def test_a_minor_factor_is_split_where_all_before_it_are_cut_to_one():
    rule = reshape([(0, 1)], [(0,), (1,)], 2, 4)
    assert blocks_only(rule, [("x",), ("y",)], SIZES) == [("x",), ("y",)]
    assert blocks_only(rule, [(), ("y",)], SIZES) == [(), ()]


def test_what_one_array_drops_is_not_major_to_a_factor_of_another():
    # [4, 4, 4] → [8, 8]: the middle dim is split in two, one for each neighbour
    rule = reshape([(0,), (1, 2), (3,)], [(0, 1), (2, 3)], 4, 2, 2, 4)
    assert blocks_only(rule, [(), ("y",), ("x",), ()], SIZES) == [(), (), (), ()]
    assert blocks_only(rule, [("x", "y"), (), (), ()], SIZES) == [("x", "y"), (), (), ()]
    assert blocks_only(rule, [("x", "y"), ("z",), ("u",), ()], SIZES | {"z": 2, "u": 2})[2] == ("u",)
