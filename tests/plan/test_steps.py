"""The steps of plans: in SSA form and in order, for every model, layout and way to overlap."""

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import small_transformer
from arrays import f32
from jax import lax

import meshpar as mp
from meshpar._src.plan.steps import (
    Barrier,
    Constant,
    Run,
    Shard,
    topological_order,
    without_unread,
)
from meshpar._src.plan.verify import verify

MESH = "data=4, model=2"


def test_plans_with_dropout_and_rematerialised_layers_are_well_formed():
    """After every pass, as are the plans of all tests of this folder."""
    step, args = small_transformer.step_of(rename=False), small_transformer.create()
    plan = mp.plan(step, *args, mesh="data=4, model=2", layout="batch: data", dims=small_transformer.DIMS)
    for scheme in ("megatron", "fsdp", "+ sequence parallel", "zero 1"):
        verify(plan.replan(layout=small_transformer.LAYOUTS[scheme], overlap="ring"))


def test_an_error_names_the_step_and_what_is_wrong_with_it():
    plan = nested()
    late = replace(plan, body=replace(plan.body, steps=plan.body.steps[::-1]))
    with pytest.raises(
        AssertionError, match=r"Run of mul at .*test_steps.py.*: reads shards that no step before makes"
    ):
        verify(late)
    with pytest.raises(AssertionError, match="a result of the program has no shard"):
        verify(replace(plan, body=replace(plan.body, outputs=(None,))))


# -- order


def shard(name):
    return Shard(SimpleNamespace(name=name), ())  # type: ignore[arg-type]


A, B, C, D = map(shard, "abcd")


def step(reads, makes, op=None):
    return Barrier(op, tuple(reads), tuple(makes))


def constant(made):
    return Constant(None, made, 0)


def test_a_step_follows_the_steps_whose_results_it_reads():
    first, second, third = step([A], [B]), step([B], [C]), step([C], [D])
    assert topological_order([third, second, first]) == (first, second, third)


def test_deferred_steps_are_placed_before_their_first_reader_or_left_out():
    floats, unread = constant(B), constant(C)
    first, second, third = step([A], [shard("x")]), step([B], [D]), step([B], [shard("y")])
    assert topological_order([floats, unread, first, second, third]) == (first, floats, second, third)
    assert topological_order([floats, first]) == (first,)
    assert topological_order([floats, first], [None, B]) == (first, floats)


def test_ten_thousand_steps_in_a_row():
    """No recursion: programs are as long as they like."""
    shards = [shard(k) for k in range(10_000)]
    steps = [step([a], [b]) for a, b in itertools.pairwise(shards)]
    assert topological_order(steps[::-1]) == tuple(steps)


@functools.cache
def nested():
    """A call in a loop in a call."""

    def layer(x, w):
        return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x), None

    def fn(x, w):
        return jax.jit(lambda x: lax.scan(layer, x, w)[0])(x) * 2

    return mp.plan(
        fn, f32(8, 4), f32(3, 4, 4), mesh=MESH, layout="batch: data; in: model", overlap="off",
        dims={"x": "batch in", "w": "layers in _"},
    )  # fmt: skip


def test_steps_whose_results_nobody_reads_are_left_out():
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    where = {"mesh": "data=8", "layout": "batch: data", "dims": {"x": "batch embed"}, "lowering": "shard_map"}
    body = mp.plan(jax.jit(lambda x: (jnp.tanh(x), jnp.exp(x).sum())), x, **where).body
    tanh, total = body.outputs
    assert without_unread(body.steps, {tanh, total}) == body.steps
    assert body.sends
    first = without_unread(body.steps, {tanh})
    assert [s.op.name for s in replace(body, steps=first).all_steps if isinstance(s, Run)] == ["tanh"]
    assert not replace(body, steps=first).sends
