"""Collective algorithms: the chosen one (fewest bytes, then least time), bytes of its stages, emitted collectives."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

import meshpar as mp
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.hardware.collective_algorithms import ALGORITHMS, choose_algorithm
from meshpar._src.hardware.collective_time import seconds_of
from meshpar._src.hardware.topology import Stage

X, Y, Z = Stage(16, "x", True), Stage(16, "y", True), Stage(8, "z", True)
BIG = 2.0**27


def test_a_scatter_over_several_torus_dimensions_is_staged_and_the_plan_says_why():
    name, why = choose_algorithm("reduce-scatter", BIG, [X, Y], CHIPS["v5e"])
    assert name == "staged"
    assert why.startswith("reduce_scatter of 128 MiB over 16×16: staged ")
    assert why.endswith("native is compiled to an all-reduce, of twice the bytes")


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_no_scatter_sends_more_than_it_must(chip):
    """As an all-reduce, native would send twice as much: also where it has the links of all dimensions, and few bytes."""
    stages = [X, Y, Z, Stage(4, "x"), Stage(8, "y", False, 2), *[Stage(2, "core")] * (chip == "tpu7x")]
    for pair, volume in itertools.product(itertools.combinations(stages, 2), (1e3, 1e6, 1e9)):
        assert choose_algorithm("reduce-scatter", volume, pair, CHIPS[chip])[0] == "staged"


def test_where_there_is_nothing_to_choose():
    for op in ("all-gather", "all-reduce", "all-to-all"):
        assert choose_algorithm(op, BIG, [X, Y], CHIPS["v5e"]) == ("native", "")
    for volume, stages in ((BIG, [X]), (BIG, [X, Stage(1)]), (0.0, [X, Y])):
        assert choose_algorithm("reduce-scatter", volume, stages, CHIPS["v5e"]) == ("native", "")
    assert choose_algorithm("reduce-scatter", BIG, [Stage(2), Stage(4)], None)[0] == "staged"  # CPUs, two axes


def plan_of(mesh, topology, layout):
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    args = ShapeDtypeStruct((1024, 4096), "bfloat16"), ShapeDtypeStruct((4096, 1024), "bfloat16")
    return mp.plan(jax.grad(loss), *args, mesh=mesh, topology=topology, layout=layout, overlap="xla",
                   dims={"w": "embed mlp", "x": "batch embed"})  # fmt: skip


def test_between_slices_what_is_sent_is_the_smallest():
    plan = plan_of("slice=2, data=4, model=4", "2x v5e:4x4", "batch: slice+data; embed: slice+data")
    (c,) = [c for c in plan.collectives if c.op == "reduce-scatter"]
    assert c.algorithm == "hierarchical"
    assert "; staged " in c.why
    stages = [s for a in c.axes for s in plan.torus[a]]
    assert [s.dim for s in stages] == ["slice", "y"]
    inside = seconds_of("reduce-scatter", 2.0**23, stages[1:], plan.chip)
    across = 2.0**23 / 4 / 2 / (plan.chip.dcn * plan.chip.compiler.link_efficiency)
    assert c.seconds == pytest.approx(inside + across)
    assert c.to_dict()["why"] == c.why


def test_rates_reach_the_kernels_in_gigabytes_a_second():
    """Over two slices the model that kernels share has the same seconds as hand arithmetic in bytes/s."""
    name, why = choose_algorithm("reduce-scatter", 2.0**30, [Stage(2, "slice"), Stage(16, "x", True)], CHIPS["v5e"])
    inside = 2.0**30 * 15 / 16 / (2 * 4.5e10 * 0.8) + 8e-6
    between = 2.0**30 / 16 / 2 / (3.1e9 * 0.8) + 1e-6
    assert name == "hierarchical"
    assert f"hierarchical {(inside + between) * 1e6:.0f} µs" in why


@pytest.mark.parametrize(
    ("name", "sent", "crossing"),
    [("hierarchical", 255.0, 1.0), ("native", 255.0, 1.0), ("staged", 255.0, 128.0), ("ring", 128.0, 128.0)],
)
def test_bytes_between_slices_follow_the_order_of_the_phases(name, sent, crossing):
    """A staged reduce-scatter has all 256 bytes at the major stage; the others reduce within the slices first."""
    op = "collective-permute" if name == "ring" else "reduce-scatter"
    parts = ALGORITHMS[name].stage_bytes(op, sent, [Stage(2, "slice"), X, Z])
    assert sum(n for s, n in parts if s.between) == pytest.approx(crossing)
    assert not any(s.between for s, _ in ALGORITHMS[name].stage_bytes(op, sent, [X, Z]))


def test_an_axis_that_fills_several_slices_sends_between_them():
    """Of 256 bytes a reduce-scatter over 2 × 16 devices has 16 left when it leaves the slice, and sends half of them."""
    axis = Stage(32, "slice", fills=(Stage(4, "x"), Stage(4, "y"), Stage(2, "slice")))
    parts = ALGORITHMS["native"].stage_bytes("reduce-scatter", 248.0, [axis])
    assert [sent for s, sent in parts if s.between] == [pytest.approx(8.0)]
    assert ALGORITHMS["ring"].stage_bytes("collective-permute", 8.0, [axis]) == [(axis, 8.0)]  # at the edge of a slice


SNAKE = Stage(16, fills=(Stage(4, "x"), Stage(4, "y")))  # an axis that JAX maps to a 4x4 slice like a snake


SLICE_AXES, NODES = [Stage(4, "slice"), X, Stage(2, "y")], [Stage(2, "slice"), Stage(4, "switch")]
OPS = ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]


@pytest.mark.parametrize("stages", [[X, Z], SLICE_AXES, NODES, [Z, Stage(2, "core")], [SNAKE], [Stage(1)]])
def test_all_bytes_pass_the_links_of_some_stage(stages):
    for op, name in itertools.product(OPS, ["native", "staged", "hierarchical", "ring"]):
        parts = ALGORITHMS[name].stage_bytes(op, 960.0, stages)
        assert sum(sent for _, sent in parts) == pytest.approx(960.0 if math.prod(s.size for s in stages) > 1 else 0.0)
        assert all(sent >= 0 and s.size > 1 for s, sent in parts)


def test_torus_dimensions_that_are_used_at_once_end_at_once():
    """The slowest one would have the bytes of the others' links to spare; seconds of the cost model, without latency."""
    stages, chip = [X, Stage(2, "y", False), Stage(4, "z", True, 4)], CHIPS["v5e"]
    seconds = {
        sent / chip.rate(s.dim, s.stride) / (2 if s.wraps else 1)
        for s, sent in ALGORITHMS["native"].stage_bytes("all-gather", BIG * 127 / 128, stages)
    }
    assert max(seconds) == pytest.approx(min(seconds))
    assert max(seconds) == pytest.approx(seconds_of("all-gather", BIG, stages, chip))
