"""Which factors of an op may be sharded: only those of which every device has one contiguous block of every array."""

from meshpar._src.plan.factor_specs import contiguous_only
from meshpar._src.rules.rule import OpRule

SIZES = {"x": 2, "y": 2}


def reshape(ins, outs, *extents):
    return OpRule([ins], [outs], list(extents), ["pass_through"] * len(extents))


def test_a_minor_factor_is_sharded_only_if_all_major_ones_are_sharded_to_size_one():
    rule = reshape([(0, 1)], [(0,), (1,)], 2, 4)
    assert contiguous_only(rule, [("x",), ("y",)], SIZES) == [("x",), ("y",)]
    assert contiguous_only(rule, [(), ("y",)], SIZES) == [(), ()]


def test_a_factor_that_loses_its_axes_in_one_array_is_unsharded_in_the_others():
    # [4, 4, 4] → [8, 8]: the middle dim is split in two, one for each neighbour
    rule = reshape([(0,), (1, 2), (3,)], [(0, 1), (2, 3)], 4, 2, 2, 4)
    assert contiguous_only(rule, [(), ("y",), ("x",), ()], SIZES) == [(), (), (), ()]
    assert contiguous_only(rule, [("x", "y"), (), (), ()], SIZES) == [("x", "y"), (), (), ()]
    assert contiguous_only(rule, [("x", "y"), ("z",), ("u",), ()], SIZES | {"z": 2, "u": 2})[2] == ("u",)
