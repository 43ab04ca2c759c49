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
    Call,
    Constant,
    Loop,
    Reshard,
    Run,
    Shard,
    rewrite_bodies,
    topological_order,
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


def test_sorted_steps_are_not_reordered():
    steps = (step([A], [B]), step([A], [C]), step([B, C], [D]))
    assert topological_order(steps) == steps


def test_a_step_follows_the_steps_whose_results_it_reads():
    first, second, third = step([A], [B]), step([B], [C]), step([C], [D])
    assert topological_order([third, second, first]) == (first, second, third)


def test_deferred_steps_are_placed_before_their_first_reader_or_left_out():
    floats, unread = constant(B), constant(C)
    first, second, third = step([A], [shard("x")]), step([B], [D]), step([B], [shard("y")])
    assert topological_order([floats, unread, first, second, third]) == (first, floats, second, third)
    assert topological_order([floats, first]) == (first,)
    assert topological_order([floats, first], [None, B]) == (first, floats)


def test_copies_are_deferred_and_other_reshards_are_not():
    copy, rest = (Reshard(None, A, made, (), (), copy) for made, copy in ((B, True), (C, False)))
    reader = step([B, C], [D])
    assert topological_order([copy, rest, step([A], [shard("x")]), reader])[0] is rest
    assert topological_order([copy, rest]) == (rest,)


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


def test_all_steps_has_the_steps_of_bodies_after_their_loop():
    plan = nested()
    steps = list(plan.body.all_steps)
    assert len(steps) == len(set(steps))
    place = {s: k for k, s in enumerate(steps)}
    for outer in steps:
        for body in outer.bodies:
            assert all(place[inner] > place[outer] for inner in body.steps)
    (loop,) = [s for s in steps if isinstance(s, Loop)]
    assert loop.body.trip_count == 3
    assert {s.op.name for s in loop.body.all_steps if isinstance(s, Run)} >= {"dot_general", "tanh"}


def test_with_calls_has_the_steps_of_calls_in_their_place_and_no_loops_steps():
    plan = nested()
    flat = plan.body.with_calls
    assert any(isinstance(s, Call) for s in plan.body.steps)
    assert not any(isinstance(s, Call) for s in flat)
    (loop,) = [s for s in flat if isinstance(s, Loop)]
    assert not any(isinstance(s, Run) and s.op.name == "tanh" for s in flat)
    assert any(isinstance(s, Run) and s.op.name == "tanh" for s in loop.body.with_calls)


def test_free_shards_of_a_loop_are_its_operands():
    plan = mp.plan(
        lambda x, w, n: lax.scan(lambda c, y: (jnp.tanh(c @ w) + n, c @ y), x, jnp.ones((3, 4, 2)))[0],
        f32(8, 4), f32(4, 4), f32(), mesh=MESH, layout="batch: data; in: data", dims={"x": "batch _", "w": "in _"},
    )  # fmt: skip
    (loop,) = [s for s in plan.body.all_steps if isinstance(s, Loop)]
    free = {s.value.path or s.value.op.name for s in loop.body.free}
    assert free == {"w", "n"}
    assert set(loop.body.free) <= {*loop.consts, *loop.hoisted}


def test_rewriting_without_changes_returns_the_same_body():
    plan = nested()
    seen = []
    assert rewrite_bodies(plan.body, lambda body: seen.append(body) or body) is plan.body
    assert seen[-1] is plan.body
    assert len(seen) == 1 + sum(len(s.bodies) for s in plan.body.all_steps)


def test_reads_makes_and_sends_of_steps():
    plan = nested()
    sends = [c for s in plan.body.all_steps for c in s.sends]
    assert sends == list(plan.collectives)
    assert all(s.makes or s.sends or isinstance(s, Run) for s in plan.body.all_steps)
