"""No plan is below the bounds of its candidate; what was worked out of a plan is freed without the garbage collector."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar.cost.kernels import kernels_of
from meshpar.cost.memo import released
from meshpar.passes import walked_again
from meshpar.plan.claims import Claims
from meshpar.plan.planner import TooLong
from meshpar.search.bounds import Pieces, least_of

LAYOUTS = (
    "batch: data", "batch, embed: data", "batch: data; mlp: model", "batch, embed: data; mlp: model",
    "mlp: model; batch: model+data", "embed: model; batch: data", "batch: data; mlp: model; opt.embed: data",
    "params.embed: data; batch: data", "seq: model; batch: data",
)  # fmt: skip


def step(state, x):
    def loss(params, x):
        def layer(x, w):
            return x + jax.nn.silu(x @ w["up"]) @ w["down"], None

        return jnp.square(jax.lax.scan(layer, x, params)[0].astype(jnp.float32)).mean()

    grads = jax.grad(loss)(state["params"], x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt_state"], grads)
    return {"params": jax.tree.map(lambda w, m: w - m, state["params"], momentum), "opt_state": momentum}


def base():
    weights = {
        "up": jax.ShapeDtypeStruct((4, 1024, 4096), jnp.bfloat16),
        "down": jax.ShapeDtypeStruct((4, 4096, 1024), jnp.bfloat16),
    }
    x = jax.ShapeDtypeStruct((32, 128, 1024), jnp.bfloat16)
    dims = {"state/*/up": "layers embed mlp", "state/*/down": "layers mlp embed", "x": "batch seq embed"}
    return mp.plan(
        step, {"params": weights, "opt_state": weights}, x, dims=dims, layout="", mesh="data=4, model=4", topology="v5e:4x4",
        lowering="shard_map", overlap="xla",
    )  # fmt: skip


def test_no_plan_is_below_what_its_claims_alone_say():
    plan = base()
    assert plan.chip is not None
    for layout in LAYOUTS:
        found = plan.replan(layout=layout)
        seconds, peak = least_of(Claims(found.program, mp.Layout(layout), found.sizes), plan.chip)
        assert 0 < seconds <= found.time.compute * (1 + 1e-6) <= found.seconds * (1 + 1e-6)
        assert 0 < peak <= found.memory.peak
    whole = least_of(Claims(plan.program, mp.Layout(""), plan.sizes), plan.chip)
    split = least_of(Claims(plan.program, mp.Layout("batch: data+model"), plan.sizes), plan.chip)
    assert split[0] == pytest.approx(whole[0] / 16)
    assert split[1] < whole[1]


def test_no_plan_is_below_what_another_has_that_follows_from_the_same_answers():
    plan = base()
    plans = {layout: plan.replan(layout=layout) for layout in LAYOUTS}
    for layout, found in plans.items():
        pieces = Pieces(found)
        assert pieces.least(Claims(found.program, mp.Layout(layout), found.sizes)) == (found.seconds, found.memory.peak)
        for other, beside in plans.items():
            seconds, peak = pieces.least(Claims(beside.program, mp.Layout(other), beside.sizes))
            assert seconds <= beside.seconds * (1 + 1e-6)
            assert peak <= beside.memory.peak * (1 + 1e-6)
    pieces = Pieces(plans["batch: data"])
    little, much = (
        pieces.least(Claims(plan.program, mp.Layout(layout), plan.sizes))
        for layout in ("batch: data; mlp: model; opt.embed: data", "batch: model; mlp: data")
    )
    assert little[0] > much[0] >= 0


def test_a_walk_ends_where_its_collectives_take_longer_than_they_may():
    plan = base()
    for layout in LAYOUTS[1:]:
        sent = sum((c.seconds or 0) * (c.count or 1) for c in walked_again(plan, layout=mp.Layout(layout)).collectives)
        assert walked_again(plan, layout=mp.Layout(layout), most=sent * 1.001).collectives
        with pytest.raises(TooLong):
            walked_again(plan, layout=mp.Layout(layout), most=sent * 0.999)


def test_what_was_worked_out_of_a_plan_is_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        plan = base().replan(layout="batch, embed: data; mlp: model")
        assert plan.seconds
        assert plan.memory.peak
        kernels = weakref.ref(kernels_of(plan))
        before = sum(type(x).__name__ in ("Node", "Item") for x in gc.get_objects())
        released(plan)
        del plan
        assert kernels() is None
        assert sum(type(x).__name__ in ("Node", "Item") for x in gc.get_objects()) < 0.1 * before
    finally:
        gc.enable()
