"""Which lowering `"auto"` means, what a plan says of it, and that every entry has the same default."""

import dataclasses
import json
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import bf16, f32
from jax import lax
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning

import meshpar as mp
from meshpar._src.lower import LOWERINGS
from meshpar._src.passes import PASSES
from meshpar._src.passes.lowering import MIN_GAIN, shorter_lowering
from meshpar._src.plan.steps import Run
from meshpar._src.rules import registry
from meshpar._src.units import format_seconds

X = np.arange(32.0, dtype=np.float32).reshape(8, 4)
HOW = {"mesh": "data=4, model=2", "layout": "batch: data", "dims": {"x": "batch embed"}}


def counted(x):
    """An effect on the host whose result is used: only one device may call it."""
    return io_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1


def summed(x):
    return lax.cumsum(x, axis=1)


@pytest.fixture(autouse=True)
def cumsum_without_local_form(monkeypatch):
    """An op with a factor rule and no local form; all that have a rule today have one."""
    monkeypatch.setitem(registry._entries, "cumsum", dataclasses.replace(registry.primitive("cumsum"), local=None))


@custom_partitioning
def twice(x):
    return x * 2


twice.def_partition(
    lambda mesh, ins, out: (mesh, lambda x: x * 2, out.sharding, (ins[0].sharding,)), sharding_rule="i j -> i j"
)


def nested(x):
    """A ``shard_map`` in the body of another."""

    def over(axis, fn, spec, **mesh):
        return jax.shard_map(fn, in_specs=spec, out_specs=spec, axis_names={axis}, check_vma=False, **mesh)

    inner = over("model", lambda b: b * 2, jax.P(None, "model"))
    return over("data", inner, jax.P("data"), mesh=mp.mesh("data=4, model=2"))(x)


WITHOUT_LOCAL_FORM = {
    "io_callback": (counted, "with results has no local form"),
    "cumsum": (summed, "has a factor rule but no local form, and `data` split it"),
    "custom_partitioning": (lambda x: twice(x), "cannot be nested in the shard_map"),
    "shard_map": (nested, "has shard_map in its body"),
}
EXPECTED = {"io_callback": X * 2 + 1, "cumsum": X.cumsum(1), "custom_partitioning": X * 2, "shard_map": X * 2}


@pytest.mark.parametrize("op", WITHOUT_LOCAL_FORM)
def test_auto_is_jit_where_an_op_has_no_local_form(op):
    step, why = WITHOUT_LOCAL_FORM[op]
    run = mp.jit(step, **HOW)
    with pytest.warns(mp.errors.LoweringWarning, match=f'"auto" is "jit".*{op} at .*test_lowering.py') as said:
        plan = run.plan(X)
    assert len(said) == 1
    assert (plan.lowering, plan.overlap) == ("jit", "off")
    assert plan.lowering_reason.startswith(f"{op} at ")
    assert why in plan.lowering_reason
    assert "test_lowering.py" in plan.lowering_reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        np.testing.assert_array_equal(run(X), EXPECTED[op])
    with pytest.raises(mp.errors.UnsupportedError) as refused:
        mp.jit(step, **HOW, lowering="shard_map")(X)
    assert refused.value.headline == f"{op} {why}" or why in refused.value.headline
    assert refused.value.fixes[0] == 'use lowering="jit"'


def test_auto_depends_on_the_layout_and_replans_resolve_it_again():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = mp.plan(summed, X, **{**HOW, "layout": ""})  # replicated: every device does all of it
    assert (plan.lowering, plan.overlap, plan.lowering_reason) == ("shard_map", "auto", None)
    split = plan.replan(layout="batch: data")
    assert (split.lowering, split.overlap) == ("jit", "off")
    assert "cumsum at " in split.lowering_reason
    again = split.replan(layout="")
    assert (again.lowering, again.overlap, again.lowering_reason) == ("shard_map", "auto", None)
    assert split.replan(layout="", lowering="jit").lowering == "jit"


@pytest.mark.parametrize(
    ("asked", "lowering", "overlap"),
    [
        ({}, "shard_map", "auto"),
        ({"lowering": "auto"}, "shard_map", "auto"),
        ({"lowering": "shard_map"}, "shard_map", "auto"),
        ({"lowering": "jit"}, "jit", "off"),
        ({"overlap": "ring"}, "shard_map", "ring"),
        ({"overlap": "off"}, "shard_map", "off"),
        ({"lowering": "shard_map", "overlap": "xla"}, "shard_map", "xla"),
        ({"lowering": "jit", "overlap": "xla"}, "jit", "off"),
    ],
)
def test_the_overlap_mode_follows_the_lowering(asked, lowering, overlap):
    state = mp.init(lambda: {"w": X}, mesh="data=8", layout="embed: data", dims={"w": "embed mlp"}, **asked)
    step = mp.jit(lambda x: x * 2, **HOW, **asked)
    for plan in (state.plan(), step.plan(X), mp.plan(lambda x: x * 2, X, **HOW, **asked)):
        assert (plan.lowering, plan.overlap, plan.lowering_reason) == (lowering, overlap, None)


def test_a_plan_says_its_lowering():
    args = X, np.ones((4, 4), np.float32)
    how = {**HOW, "dims": {"x": "batch embed", "w": "embed mlp"}}
    ours, xla = (mp.plan(lambda x, w: x @ w, *args, **how, lowering=k) for k in ("auto", "jit"))
    with pytest.warns(mp.errors.LoweringWarning):
        forced = mp.plan(counted, X, **HOW)
    estimate = "lowering  jit (estimate: XLA partitions this program"
    assert "\nlowering  shard_map\n" in str(ours)
    assert f"\n{estimate})\n" in str(xla)
    assert f"{estimate}; io_callback at " in str(forced)
    said = [json.loads(p.to_json())["lowering"] for p in (ours, xla, forced)]
    assert said == [
        {"lowering": "shard_map", "asked": "auto", "reason": None, "estimate": False},
        {"lowering": "jit", "asked": "jit", "reason": None, "estimate": True},
        {"lowering": "jit", "asked": "auto", "reason": forced.lowering_reason, "estimate": True},
    ]


def layers(w, x):
    """Gated layers in a scan, of sizes from which on the passes for TPUs hold the order of matmuls and loops."""

    def loss(w):
        def layer(h, w):
            u = h @ w["up"]
            return h + (jax.nn.silu(h @ w["gate"]) * lax.optimization_barrier(u)) @ w["down"], None

        return lax.scan(layer, x, w)[0].astype(jnp.float32).sum()

    return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))


def test_a_plan_under_jit_has_nothing_that_its_program_does_not_emit():
    """Barriers of the passes are in the shard_map lowering alone; what is not emitted is not costed."""
    w = {"up": bf16(2, 4096, 8192), "gate": bf16(2, 4096, 8192), "down": bf16(2, 8192, 4096)}
    dims = {"w/up": "layers embed mlp", "w/gate": "layers embed mlp", "w/down": "layers mlp embed", "x": "batch embed"}
    how = {"mesh": "data=8", "layout": "batch: data; embed: data", "topology": "v5e:2x4", "dims": dims}
    made, emitted = {}, {}
    for lowering in ("shard_map", "jit"):
        plan = mp.plan(layers, w, bf16(16384, 4096), **how, donate_argnames="w", lowering=lowering)
        steps = [s for s in plan.body.all_steps if not isinstance(s, Run) or s.op.name == "optimization_barrier"]
        made[lowering] = Counter("ring" if getattr(s, "ring", None) else type(s).__name__ for s in steps)
        run, _, _ = LOWERINGS[lowering](plan, mp.mesh("data=8"))
        jaxpr = jax.make_jaxpr(run)(*[v.aval for v in plan.program.inputs])
        emitted[lowering] = str(jaxpr).count("optimization_barrier")
    assert made["shard_map"]["Barrier"] > 5
    assert emitted["shard_map"] > emitted["jit"]
    assert emitted["jit"] == made["jit"]["Run"]
    assert not made["jit"].keys() & {"Barrier", "ring"}
    assert all(set(each.lowerings) <= LOWERINGS.keys() for each in PASSES)


def rounded(w, x):
    """Layers in a loop that rounds slices of float32 stacks: under ``"shard_map"`` the slices are behind a barrier."""

    def loss(w):
        def layer(h, w):
            return jnp.tanh(h @ w["up"].astype(h.dtype)) @ w["down"].astype(h.dtype), None

        return lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32).sum()

    return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))


def plan_of_rounded(**changes):
    w = {"up": f32(4, 4096, 16384), "down": f32(4, 16384, 4096)}
    dims = {"w/up": "layers embed mlp", "w/down": "layers mlp embed", "x": "batch embed"}
    how = {"mesh": "data=8", "layout": "batch: data", "topology": "v5p:2x2x2", "donate_argnames": "w", "dims": dims}
    return mp.plan(rounded, w, bf16(16384, 4096), **{**how, **changes})


def test_auto_is_the_lowering_with_the_shorter_plan():
    """Warnings are errors: there is none of this choice."""
    ours, xla, plan = (plan_of_rounded(lowering=k) for k in ("shard_map", "jit", "auto"))
    assert xla.seconds < (1 - MIN_GAIN) * ours.seconds
    assert (plan.lowering, plan.overlap, plan.seconds, plan.memory.peak) == ("jit", "off", xla.seconds, xla.memory.peak)
    assert plan.lowering_reason == f"planned {format_seconds(xla.seconds)}; shard_map {format_seconds(ours.seconds)}"
    assert f"lowering  jit (estimate: XLA partitions this program; {plan.lowering_reason})" in str(plan)
    assert ours.replan(lowering="auto").lowering_reason == plan.lowering_reason
    assert plan.replan(topology="").lowering == "shard_map"  # without a chip there are no seconds
    assert plan_of_rounded(overlap="xla").lowering == "jit"
    assert plan_of_rounded(overlap="ring").lowering == "shard_map"  # "jit" has no rings


def test_a_shorter_plan_must_fit_and_save_more_than_digits_show():
    short = plan_of_rounded(lowering="jit")
    long = plan_of_rounded(lowering="shard_map", layout="batch: data; embed: data", topology="v5e:2x4")
    assert short.seconds < long.seconds
    assert short.memory.peak > long.memory.peak
    assert shorter_lowering(long, short, short).lowering == "jit"
    assert shorter_lowering(short, long, long) is short
    assert shorter_lowering(long, short, long) is long  # XLA's kernels take longer than its plan says
    between = (short.memory.peak + long.memory.peak) / 2
    long, short = (dataclasses.replace(p, chip=dataclasses.replace(p.chip, hbm=between)) for p in (long, short))
    assert shorter_lowering(long, short, short) is long
