"""Lower bounds of a candidate hold for its plan; the cached analyses of a plan are freed without the garbage collector."""

import gc
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.cost.device_computation import computation_of, free_caches
from meshpar._src.passes import plan_without_passes
from meshpar._src.plan.assignment import AxisAssignment
from meshpar._src.plan.collective_records import TooLong
from meshpar._src.search.bounds import Breakdown, lower_bounds

LAYOUTS = (
    "batch: data",
    "batch, embed: data",
    "batch: data; mlp: model",
    "batch, embed: data; mlp: model",
    "mlp: model; batch: model+data",
    "embed: model; batch: data",
    "batch: data; mlp: model; opt.embed: data",
    "params.embed: data; batch: data",
    "seq: model; batch: data",
)


def step(state, x):
    def loss(params, x):
        def layer(x, w):
            return x + jax.nn.silu(x @ w["up"]) @ w["down"], None

        return jnp.square(jax.lax.scan(layer, x, params)[0].astype(jnp.float32)).mean()

    grads = jax.grad(loss)(state["params"], x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt_state"], grads)
    return {"params": jax.tree.map(lambda w, m: w - m, state["params"], momentum), "opt_state": momentum}


def base():
    shapes = {"up": (4, 1024, 4096), "down": (4, 4096, 1024)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    state, x = {"params": weights, "opt_state": weights}, jax.ShapeDtypeStruct((32, 128, 1024), jnp.bfloat16)
    dims = {"state/*/up": "layers embed mlp", "state/*/down": "layers mlp embed", "x": "batch seq embed"}
    options = {"topology": "v5e:4x4", "lowering": "shard_map", "overlap": "xla"}
    return mp.plan(step, state, x, dims=dims, layout="", mesh="data=4, model=4", **options)


@pytest.fixture(scope="module")
def plan():
    return base()


def test_the_bound_of_an_assignment_holds(plan):
    assert plan.chip is not None
    for layout in LAYOUTS:
        found = plan.replan(layout=layout)
        seconds, peak = lower_bounds(AxisAssignment(found.program, mp.Layout(layout), found.sizes), plan.chip)
        assert 0 < seconds <= found.time.compute * (1 + 1e-6) <= found.seconds * (1 + 1e-6)
        assert 0 < peak <= found.memory.peak
    whole = lower_bounds(AxisAssignment(plan.program, mp.Layout(""), plan.sizes), plan.chip)
    split = lower_bounds(AxisAssignment(plan.program, mp.Layout("batch: data+model"), plan.sizes), plan.chip)
    assert split[0] == pytest.approx(whole[0] / 16)
    assert split[1] < whole[1]


def sent(plan):
    return sum((c.seconds or 0) * (c.count or 1) for c in plan.collectives)


def breakdown_of(plan):
    return Breakdown(plan, sent(plan_without_passes(plan, plan.request)))


def test_the_bound_from_another_plan_holds(plan):
    plans = {layout: plan.replan(layout=layout) for layout in LAYOUTS}
    elsewhere = [plan.replan(layout=layout, mesh="data=2, model=8", topology="v5e:4x4") for layout in LAYOUTS[:5]]
    for layout, found in plans.items():
        breakdown = breakdown_of(found)
        same = breakdown.lower_bound(AxisAssignment(found.program, mp.Layout(layout), found.sizes))
        assert (same.seconds, same.peak) == (found.seconds, found.memory.peak)
        for beside in (*plans.values(), *elsewhere):
            least = breakdown.lower_bound(AxisAssignment(beside.program, beside.requested_layout, beside.sizes))
            assert 0 < least.kernels <= least.seconds <= beside.seconds * (1 + 1e-6)
            assert least.peak <= beside.memory.peak * (1 + 1e-6)
    whole = breakdown_of(plans["batch: data"])
    less = whole.lower_bound(AxisAssignment(plan.program, mp.Layout("batch: data; mlp: model"), plan.sizes))
    # the products are split four times further, others are not
    assert 0.25 * whole.kernels <= less.kernels < whole.kernels


def test_no_plan_sends_more_than_its_seconds_allow(plan):
    found = plan.replan(layout="batch, embed: data; mlp: model")
    breakdown = breakdown_of(found)
    for layout in LAYOUTS:
        other = plan.replan(layout=layout)
        kernels = breakdown.lower_bound(AxisAssignment(other.program, mp.Layout(layout), other.sizes)).kernels
        walked = plan_without_passes(plan, replace(plan.request, layout=mp.Layout(layout)))
        assert sent(walked) <= breakdown.max_comm_seconds(kernels, 1.01 * other.seconds)


def test_a_walk_ends_where_its_collectives_take_longer_than_they_may(plan):
    for layout in LAYOUTS[1:]:
        request = replace(plan.request, layout=mp.Layout(layout))
        most = sent(plan_without_passes(plan, request))
        assert plan_without_passes(plan, request, most * 1.001).collectives
        with pytest.raises(TooLong):
            plan_without_passes(plan, request, most * 0.999)


def live_nodes():
    """The ids of the kernels and buffers of all plans that are alive."""
    return {id(x) for x in gc.get_objects() if type(x).__name__ in ("Kernel", "Buffer")}


def test_cached_analyses_of_a_plan_are_freed_without_the_garbage_collector(few_objects):
    gc.collect()
    gc.disable()
    try:
        others = live_nodes()  # of plans that fixtures of other tests hold
        plan = base().replan(layout="batch, embed: data; mlp: model")
        assert plan.seconds
        assert plan.memory.peak
        kernels = weakref.ref(computation_of(plan))
        own = live_nodes() - others
        assert len(own) > 50
        free_caches(plan)
        del plan
        assert kernels() is None
        assert not own & live_nodes()
    finally:
        gc.enable()
