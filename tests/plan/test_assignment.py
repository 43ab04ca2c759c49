"""Axis assignment: what layouts share, refused dims, and elementwise ops."""

import jax.numpy as jnp
import pytest
from arrays import f32

import meshpar as mp
from meshpar._src.plan.assignment import AxisAssignment
from meshpar.errors import DivisibilityError, JoinWarning

SIZES = {"x": 2, "y": 2}


def test_layouts_with_the_same_rules_for_some_names_share_their_assignment():
    def step(x, w, v):
        return jnp.tanh(x @ w) @ v

    shapes = f32(8, 16), f32(16, 32), f32(32, 16)
    dims = {"x": "batch embed", "w": "embed mlp", "v": "mlp embed"}
    texts = ["batch: x", "batch: x; mlp: y", "mlp: y; batch: x", "mlp: y", "batch: x; embed: y", "mlp: x+y"]

    def assignment(text, program):
        return AxisAssignment(program, mp.Layout(text), SIZES)

    def traced():
        return mp.plan(step, *shapes, dims=dims, layout="", mesh="x=2, y=2").program

    program = traced()
    answered = {text: assignment(text, program).groups for text in texts}
    groups = assignment(texts[0], program).queries.groups
    assert len(groups) > 3
    for k, group in enumerate(groups):
        if "mlp" not in group.names:
            assert answered["batch: x"][k] is answered["batch: x; mlp: y"][k]
        if group.names == {"mlp"}:
            assert answered["batch: x; mlp: y"][k] is answered["mlp: y"][k]
    for text in texts:
        fresh = assignment(text, traced())
        assert [a.axes for a in answered[text]] == [a.axes for a in fresh.groups]
        for value in fresh.program.inputs:
            assert fresh.axes[fresh.queries.of_value[value]] == fresh.value_spec(value)


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


def test_an_elementwise_op_is_sharded_by_its_annotated_operands():
    """The names that its result has from elsewhere shard the result, not the op."""

    def fn(v):
        return mp.named(jnp.tanh(v), "c d")

    with pytest.warns(JoinWarning):
        program = mp.plan(fn, f32(4, 4), dims={"v": "a b"}, layout="", mesh="x=2").program
    (op,) = (o for o in program.root.walk() if o.name == "tanh")
    for layout, axes in {"a: x": ("x",), "c: y; a: x": ("x",), "c: y": (), "": ()}.items():
        assignment = AxisAssignment(program, mp.Layout(layout), SIZES)
        result, work = (assignment.axes[i] for i in assignment.queries.of_op[op])
        assert work == (axes, ())
        assert result == assignment.value_spec(op.outs[0])


def test_every_dim_that_a_rule_does_not_divide_is_kept():
    """Of the first, whose name is inferred, there is a note; the second, which the user named, is an error."""

    def fn(x):
        return mp.named(x, "batch _") * 2

    def plan(dims):
        return mp.plan(fn, f32(6, 6), dims=dims, layout="batch: data; mlp: model", mesh="data=4, model=4")

    with pytest.raises(DivisibilityError, match="x: dim `mlp` of size 6"):
        plan({"x": "_ mlp"})
    program = mp.plan(fn, f32(6, 6), dims={"x": "_ mlp"}, layout="", mesh="data=4").program
    assignment = AxisAssignment(program, mp.Layout("batch: data; mlp: model"), {"data": 4, "model": 4})
    (value,) = program.inputs
    assert assignment.value_spec(value) == ((), ())
    batch, mlp = assignment.layout.rules
    assert assignment.indivisible(value) == {0: batch, 1: mlp}
    assert {(i, rule) for _, i, rule in assignment.all_indivisible()} == {(0, batch), (1, mlp)}
