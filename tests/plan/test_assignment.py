"""Axis assignment: what layouts share, refused dims, and elementwise ops."""

import pytest
from arrays import f32

import meshpar as mp
from meshpar._src.plan.assignment import AxisAssignment


@pytest.mark.parametrize(
    ("layout", "unused"),
    [
        ("a?: x", [("a", 0)]),  # 4 devices do not divide 6
        ("b?: x", []),
        ("a?: y", []),
        ("a?: x; a: y", []),  # the second rule shards the dim
        ("a?: x; b: x", []),  # the axis shards the other dim
        ("a?: x; b: y", [("a", 0)]),
        ("c?: x; a?: x+y", [("a", 0)]),
    ],
)
def test_optional_rules_that_shard_nothing(layout, unused):
    program = mp.plan(lambda v: v * 2, f32(6, 8), dims={"v": "a b"}, layout="", mesh="x=4, y=2").program
    assignment = AxisAssignment(program, mp.Layout(layout), {"x": 4, "y": 2})
    (value,) = program.inputs
    assert [(rule.dim, i) for rule, i in assignment.unused_optional_rules(value)] == unused
