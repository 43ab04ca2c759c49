"""Which sums that end split are sent whole, and what a plan says of them."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import pytest
from arrays import bf16

import meshpar as mp
from meshpar._src.plan.steps import Reduce
from meshpar._src.verify.hlo import collectives

DIMS = {"w": "embed mlp", "x": "batch embed"}


def gradient(w, x):
    return jax.grad(lambda w: jnp.tanh(x @ w).astype(jnp.float32).sum())(w)


V5P = {"mesh": "data=128", "topology": "v5p:4x4x8", "layout": "batch: data; embed: data"}


def plan_of(embed=4096, batch=2**19, make=mp.plan, **how):
    how = {**V5P, "overlap": "auto", "lowering": "shard_map", **how}
    return make(gradient, bf16(embed, 4096), bf16(batch, embed), dims=DIMS, **how)


def sums(plan):
    return [(c.op, c.algorithm) for c in plan.collectives if c.op in ("reduce-scatter", "all-reduce")]


def test_over_three_dimensions_a_gradient_is_sent_whole_and_the_plan_says_what_that_costs_and_saves():
    plan, least = plan_of(), plan_of(overlap="xla")
    assert sums(plan) == [("all-reduce", "all_reduce")]
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
    shown = " ".join(str(plan).split())
    assert f"; all-reduce and local slice, {c.why}" in shown
    assert "local slice" not in str(least)
    assert c.cause == old.cause
    (step,) = [s for s in plan.body.all_steps if isinstance(s, Reduce)]
    assert [s.algorithm for s in step.scatters] == ["all_reduce"]
    assert step.result.spec == (("data",), ())


SLICES = {"topology": "2x v5p:4x4x8", "mesh": "slice=2, data=128", "layout": "batch, embed: slice+data"}


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"topology": "v5e:16x16", "mesh": "data=256"}, "two dimensions, and programs wait for sums: the same time"),
        ({"mesh": "data=8, model=16"}, "one dimension"),
        ({"embed": 128, "options": "off"}, "latency, twice"),
        ({"mesh": "data=8", "topology": None}, "no chip is known"),
        (SLICES, "what crosses slices would be all of it"),
        *(({"overlap": mode}, "cost does not decide in this mode") for mode in ("off", "xla", "ring")),
    ],
)
def test_sums_that_stay_staged(where, why):
    assert ("all-reduce", "all_reduce") not in sums(plan_of(**where)), why


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler, which is in libtpu")
@pytest.mark.parametrize("how", [{}, {"lowering": "jit", "overlap": None}])
def test_the_compiler_sends_what_the_plan_lists(how):
    made = plan_of(topology="v5p:2x2x2", mesh="data=8", batch=2**13, make=mp.compile, **how)
    assert sums(made.plan) == [("all-reduce", "all_reduce")]
    assert sorted(c.op for c in made.final_collectives) == ["all-gather", "all-reduce"]
    assert made.bytes_sent == pytest.approx(made.plan.bytes_sent)


SPLIT = "batch: data; embed: data; mlp: model"
BOTH = "batch: data+model; embed: data; mlp: model"
MIXED = "batch: data+model; embed: data"


@pytest.mark.parametrize(
    ("mesh", "layout", "found"),
    [
        ("data=256", "batch: data; embed: data", [("all-reduce", "all_reduce")]),
        ("data=16, model=16", BOTH, [("all-reduce", "all_reduce")] * 2),
        ("data=16, model=16", SPLIT, [("reduce-scatter", "native")]),
        ("data=32, model=8", SPLIT, [("reduce-scatter", "staged")]),
        ("data=16, model=16", MIXED, [("reduce-scatter", "native"), ("all-reduce", "native")]),
    ],
)
def test_under_jit_a_sum_of_which_every_device_has_a_part_is_sent_whole(mesh, layout, found):
    """As libtpu 0.0.42 compiles each of these."""
    where = {"topology": "v5e:16x16", "mesh": mesh, "layout": layout}
    plan, least = plan_of(**where, lowering="jit", overlap=None), plan_of(**where, overlap="xla")
    assert sums(plan) == found
    scattered = [c.bytes for c in least.collectives if c.op == "reduce-scatter"]
    more = math.fsum(scattered) if found[0][1] == "all_reduce" else 0.0
    assert plan.bytes_sent - least.bytes_sent == pytest.approx(more)
    assert all("the shards of all devices differ" in c.why for c in plan.collectives if c.algorithm == "all_reduce")
    assert sums(plan.replan(overlap="xla")) == sums(least)
    assert sums(plan.replan(layout=layout)) == found


@pytest.mark.parametrize(
    ("mesh", "layout"), [("data=512", "batch, embed: data"), ("slice=2, data=256", "batch, embed: slice+data")]
)
def test_under_jit_a_sum_over_several_slices_is_scattered(mesh, layout):
    """Whether the slices are an axis of their own or not: an all-reduce would send the whole sum over DCN."""
    plan = plan_of(topology="2x v5e:16x16", mesh=mesh, layout=layout, lowering="jit", overlap=None)
    assert {op for op, _ in sums(plan)} == {"reduce-scatter"}


@pytest.mark.parametrize("layout", [SPLIT, "batch: data; embed: data", "batch: data; mlp: model"])
def test_under_jit_on_cpus_the_plan_has_the_all_reduces_that_xla_makes_of_reduce_scatters(layout):
    def fn(w, x):
        return jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)

    step = mp.jit(fn, mesh="data=4, model=2", layout=layout, dims=DIMS, lowering="jit")
    args = jnp.ones((16, 64)), jnp.ones((32, 16))
    plan = step.plan(*args)
    compiled = collectives(step.lower(*args).compile().as_text())
    assert sorted((c.op, c.bytes) for c in plan.collectives) == sorted((c.op, c.bytes) for c in compiled)
    ours = plan.replan(lowering="shard_map")
    assert ours.bytes_sent <= plan.bytes_sent
    for c in plan.collectives:
        assert ("makes no reduce-scatters" in c.why) == (c.algorithm == "all_reduce")
