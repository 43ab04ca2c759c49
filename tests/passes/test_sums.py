"""Which sums that end split are sent whole, and what a plan says of them."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from arrays import bf16

import meshpar as mp
from meshpar.plan.steps import Reduce
from meshpar.report.steps import plan_steps

DIMS = {"w": "embed mlp", "x": "batch embed"}


def gradient(w, x):
    return jax.grad(lambda w: jnp.tanh(x @ w).astype(jnp.float32).sum())(w)


def plan_of(
    mesh="data=128",
    topology="v5p:4x4x8",
    embed=4096,
    batch=2**19,
    layout="batch: data; embed: data",
    make=mp.plan,
    **how,
):
    how = {"overlap": "auto", "lowering": "shard_map", **how}
    args = bf16(embed, 4096), bf16(batch, embed)
    return make(gradient, *args, mesh=mesh, topology=topology, layout=layout, dims=DIMS, **how)


def sums(plan):
    return [(c.op, c.algorithm) for c in plan.collectives if c.op in ("reduce-scatter", "all-reduce")]


def test_over_three_dimensions_a_gradient_is_sent_whole_and_the_plan_says_what_that_costs_and_saves():
    plan, least = plan_of(), plan_of(overlap="xla")
    assert sums(plan) == [("all-reduce", "whole")]
    assert sums(least) == [("reduce-scatter", "staged")]
    (c,), (old,) = ([x for x in p.collectives if x.op != "all-gather"] for p in (plan, least))
    volume = 4096 * 4096 * 2
    assert old.bytes == pytest.approx(volume * 127 / 128)
    assert c.bytes == pytest.approx(2 * old.bytes)
    rate = 2 * 9e10 * 0.8  # of a ring of v5p's torus
    assert c.seconds == pytest.approx(2 * volume * 127 / 128 / (3 * rate))
    assert old.seconds == pytest.approx(volume * (3 / 4 + 3 / 4 / 4 + 7 / 8 / 16) / rate)
    assert plan.bytes_sent - least.bytes_sent == pytest.approx(old.bytes)
    assert plan.seconds < least.seconds
    assert "66.6 MB instead of 33.3 MB" in c.why
    assert c.cause == old.cause
    (step,) = [s for s in plan.body.every if isinstance(s, Reduce)]
    assert [s.algorithm for s in step.scatters] == ["whole"]
    assert step.result.spec == (("data",), ())


@pytest.mark.parametrize("mode", ["off", "xla", "ring"])
def test_modes_that_do_not_decide_by_cost_send_least(mode):
    assert ("all-reduce", "whole") not in sums(plan_of(overlap=mode))


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"topology": "v5e:16x16", "mesh": "data=256"}, "two dimensions, and programs wait for sums: the same time"),
        ({"topology": "v5p:4x4x8", "mesh": "data=8, model=16"}, "one dimension"),
        ({"embed": 128, "options": "off"}, "latency, twice"),
        ({"mesh": None, "topology": None}, "no chip is known"),
        (
            {"topology": "2x v5p:4x4x8", "mesh": "slice=2, data=128", "layout": "batch: slice+data; embed: slice+data"},
            "what crosses slices would be all of it",
        ),
    ],
)
def test_sums_that_stay_staged(where, why, mesh):
    where = {k: mesh if k == "mesh" and v is None else v for k, v in where.items()}
    assert ("all-reduce", "whole") not in sums(plan_of(**where)), why


def test_where_sums_are_asynchronous_two_dimensions_are_enough():
    """Beside a whole sum the next product runs; of a staged one the later stages are waited for."""
    where = {"topology": "v6e:16x16", "mesh": "data=256"}
    assert sums(plan_of(**where, batch=2**21)) == [("all-reduce", "whole")]
    assert sums(plan_of(**where, batch=2**21, options="off")) == [("reduce-scatter", "staged")]
    assert sums(plan_of(**where)) == [("reduce-scatter", "staged")]  # the next product is shorter than the first stage


def test_the_steps_of_a_plan_name_it():
    assert "all-reduce and cut over data" in plan_steps(plan_of())


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler, which is in libtpu")
def test_the_compiler_sends_what_the_plan_lists():
    made = plan_of(topology="v5p:2x2x2", mesh="data=8", batch=2**13, make=mp.compile)
    assert sums(made.plan) == [("all-reduce", "whole")]
    assert sorted(c.op for c in made.final_collectives) == ["all-gather", "all-reduce"]
    assert made.bytes_sent == pytest.approx(made.plan.bytes_sent)


@pytest.mark.parametrize(("topology", "held"), [("v5p:4x4x8", 4096 * 4096 * 2), ("tpu7x:4x4x4", 0)])
def test_a_loop_holds_the_whole_sum_of_a_gradient_to_its_end_where_cores_of_their_own_make_it(topology, held):
    def loss(ws, x):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]))
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0].astype(jnp.float32).sum()

    dims = {"ws/a": "layers embed mlp", "ws/b": "layers mlp embed", "x": "batch embed"}

    def made(overlap):
        return mp.plan(
            jax.grad(loss), {"a": bf16(4, 4096, 4096), "b": bf16(4, 4096, 4096)}, bf16(2**17, 4096), mesh="data=128",
            topology=topology, layout="batch, embed: data", dims=dims, lowering="shard_map", overlap=overlap,
        )  # fmt: skip

    plan, least = made("auto"), made("xla")
    assert sums(plan) == [("all-reduce", "whole")] * 2
    assert plan.memory.peak - least.memory.peak == pytest.approx(held)
