"""Which form a collective over several torus dimensions takes: fewest bytes, then least time; and what the plan says of it."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

import meshpar as mp
from meshpar.cost.algorithm import form_for
from meshpar.hardware.chips import CHIPS
from meshpar.hardware.collective_time import seconds_of
from meshpar.hardware.topology import Stage
from meshpar_kernels.collectives import Axis, choose

X, Y, Z = Stage(16, "x", True), Stage(16, "y", True), Stage(8, "z", True)
BIG = 2.0**27


def test_a_scatter_over_several_torus_dimensions_is_staged_and_the_plan_says_why():
    form, why = form_for("reduce-scatter", BIG, [X, Y], CHIPS["v5e"])
    assert form == "staged"
    assert why.startswith("reduce_scatter of 128 MiB over 16×16: staged ")
    assert "; coloured " in why
    assert why.endswith("native is compiled to an all-reduce, of twice the bytes")


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("volume", [1e3, 1e6, 1e9])
def test_no_scatter_sends_more_than_it_must(chip, volume):
    """As an all-reduce, native would send twice as much: also where it has the links of all dimensions, and few bytes."""
    stages = [X, Y, Z, Stage(4, "x"), Stage(8, "y", False, 2), *[Stage(2, "core")] * (chip == "tpu7x")]
    for pair in itertools.combinations(stages, 2):
        assert form_for("reduce-scatter", volume, pair, CHIPS[chip])[0] == "staged"


def test_where_there_is_nothing_to_choose():
    for op in ("all-gather", "all-reduce", "all-to-all"):
        assert form_for(op, BIG, [X, Y], CHIPS["v5e"]) == ("native", "")
    assert form_for("reduce-scatter", BIG, [X], CHIPS["v5e"]) == ("native", "")
    assert form_for("reduce-scatter", BIG, [X, Stage(1)], CHIPS["v5e"]) == ("native", "")
    assert form_for("reduce-scatter", 0.0, [X, Y], CHIPS["v5e"]) == ("native", "")
    assert form_for("reduce-scatter", BIG, [Stage(2), Stage(4)], None)[0] == "staged"  # CPUs, two axes


def test_colours_are_modelled_and_not_taken():
    """Where the first dimension has half the links, half of V over it would do; no compiled program has shown that."""
    stages = [Stage(8, "x", False), Stage(8, "y", True)]
    form, why = form_for("reduce-scatter", 2.0**30, stages, CHIPS["v5p"])
    axes = [Axis(8, wraps, 72.0, 1e-6) for wraps in (False, True)]
    seconds = choose("reduce_scatter", 2.0**30, axes, hbm=2770.0, candidates=["staged", "coloured"]).seconds
    assert form == "staged"
    assert seconds["coloured"] < seconds["staged"]
    assert f"; coloured {seconds['coloured'] * 1e6:.0f}, but XLA runs its colours one after the other" in why


def test_the_time_of_colours_is_that_of_their_stages_one_after_the_other():
    line, ring = Axis(4, False, 10.0, 1e-6), Axis(8, True, 10.0, 1e-6)
    found = choose("reduce_scatter", 1e9, [line, ring], hbm=100.0, candidates=["staged", "coloured"]).seconds
    of_line, of_ring = (0.5e9 * 3 / 4 / 10e9, 3e-6), (0.5e9 * 7 / 8 / 20e9, 4e-6)
    first = of_line[0] + of_line[1] + of_ring[0] / 4 + of_ring[1]
    second = of_ring[0] + of_ring[1] + of_line[0] / 8 + of_line[1]
    assert found["coloured"] == pytest.approx(first + second + 4e9 / 100e9)
    assert found["staged"] == pytest.approx(2 * (of_line[0] + of_ring[0] / 4) + of_line[1] + of_ring[1])


def plan_of(mesh, topology, layout):
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    args = ShapeDtypeStruct((1024, 4096), "bfloat16"), ShapeDtypeStruct((4096, 1024), "bfloat16")
    return mp.plan(jax.grad(loss), *args, mesh=mesh, topology=topology, layout=layout,
                   dims={"w": "embed mlp", "x": "batch embed"})  # fmt: skip


def test_between_slices_what_is_sent_is_the_smallest():
    plan = plan_of("slice=2, data=4, model=4", "2x v5e:4x4", "batch: slice+data; embed: slice+data")
    (c,) = [c for c in plan.collectives if c.op == "reduce-scatter"]
    assert c.form == "hierarchical"
    assert "; staged " in c.why
    stages = [s for a in c.axes for s in plan.torus[a]]
    assert [s.dim for s in stages] == ["slice", "y"]
    inside = seconds_of("reduce-scatter", 2.0**23, stages[1:], plan.chip)
    across = 2.0**23 / 4 / 2 / (plan.chip.dcn * plan.chip.link_efficiency)
    assert c.seconds == pytest.approx(inside + across)
    assert c.to_dict()["why"] == c.why


def test_the_default_of_fsdp_is_staged():
    plan = plan_of("data=128", "v5p:4x4x8", "batch: data; embed: data")
    assert [(c.op, c.form) for c in plan.collectives if len(c.shape) == 2] == [
        ("all-gather", "native"),
        ("reduce-scatter", "staged"),
    ]
