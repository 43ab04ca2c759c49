"""Names that turn out to be one dim, in programs small enough to see that they are."""

import warnings

import jax.numpy as jnp
import pytest
from arrays import f32
from jax.sharding import PartitionSpec

import meshpar as mp
from meshpar.errors import JoinError, JoinWarning


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: mp.named(x, "c b"),
        lambda x: mp.named(jnp.tanh(x), "c b"),
        lambda x: mp.named(x.T, "b c"),
        lambda x: mp.named(x.sum(1), "c"),
        lambda x: mp.named(x @ jnp.ones((4, 4)), "c d"),
        lambda x: mp.named(mp.named(x, "a b") + 1, "c b"),
    ],
    ids=["the argument", "elementwise", "transpose", "sum", "matmul", "twice"],
)
def test_two_names_of_one_dim_are_reported(fn):
    with pytest.warns(JoinWarning, match="a = c"):
        program = mp.plan(fn, f32(4, 4), dims={"x": "a b"}, layout="", mesh="x=2").program
    assert [(j.first, j.second) for j in program.joins] == [("a", "c")]


def test_a_replan_refuses_joined_names_only_if_it_is_strict():
    with pytest.warns(JoinWarning):
        plan = mp.plan(lambda x: mp.named(x, "c b"), f32(4, 4), dims={"x": "a b"}, layout="", mesh="x=2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert plan.replan(layout="a: x").inputs[0].spec == PartitionSpec("x")
        with pytest.raises(JoinError, match="a"):
            plan.replan(layout="a: x", strict=True)
