"""The time of collectives: formulas against hand arithmetic, and the rules of thumb that follow from them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.cost.time import time_of
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.hardware.collective_ops import collective_volume
from meshpar._src.hardware.collective_time import merged, seconds_of
from meshpar._src.hardware.topology import Stage, chip_of, device_count

V5P, V5E = CHIPS["v5p"].ideal(), CHIPS["v5e"].ideal()
V5P_AXIS = 2 * 9e10  # bytes/s both ways over one torus dimension
BIG = 1e12  # bytes: far from the latency


def ring(n, dim="x"):
    return Stage(n, dim, True)


def line(n, dim="x"):
    return Stage(n, dim, False)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_a_ring_sends_both_ways(kind):
    assert seconds_of(kind, BIG, [ring(8)], V5P) == pytest.approx(BIG * 7 / 8 / V5P_AXIS)


def test_stages_go_one_after_the_other_the_major_one_on_all_of_it():
    tpu7x = CHIPS["tpu7x"].ideal()
    torus, core = ring(4), Stage(2, "core", False)
    full, link = BIG * 3 / 4 / 9.5e10, tpu7x.core_link
    staged = seconds_of("reduce-scatter", BIG, [torus, core], tpu7x, "staged")
    assert staged == pytest.approx(full + BIG / 4 / 2 / link)
    # in one stage, the torus carries what remains after the cores of a chip
    assert seconds_of("reduce-scatter", BIG, [torus, core], tpu7x) == pytest.approx(BIG / 2 / link + full / 2)


def test_a_line_takes_twice_as_long():
    assert seconds_of("all-gather", BIG, [line(8)], V5P) == 2 * seconds_of("all-gather", BIG, [ring(8)], V5P)


def test_axes_together_add_their_links():
    stages = [ring(8, "x"), ring(8, "y"), ring(16, "z")]
    assert seconds_of("all-gather", BIG, stages, V5P) == pytest.approx(BIG * 1023 / 1024 / (3 * V5P_AXIS))


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "all-to-all"])
def test_devices_that_fill_a_box_send_over_all_its_links_in_whatever_order_they_stand(kind):
    box = (line(4, "x"), line(4, "y"))
    jumps = Stage(16, fills=box)
    for volume in (1.0, BIG):  # latency, and traffic
        assert seconds_of(kind, volume, [jumps], V5E) == seconds_of(kind, volume, box, V5E)
    for algorithm in ("ring", "native"):  # blocks go from one to the next
        hop = seconds_of("collective-permute", BIG, [jumps], V5E, algorithm)
        assert hop == seconds_of("collective-permute", BIG, [Stage(16)], V5E)


def test_an_all_reduce_is_two_reduce_scatters():
    stages = [ring(4, "x"), ring(16, "y")]
    for algorithm in ("native", "staged"):
        scatter = seconds_of("reduce-scatter", BIG, stages, V5P, algorithm)
        assert seconds_of("all-reduce", BIG, stages, V5P, algorithm) == 2 * scatter


def test_an_all_to_all_is_a_quarter_of_an_all_gather_on_a_ring_and_half_of_one_on_a_line():
    full = BIG / V5P_AXIS  # an all-gather on a long ring
    assert seconds_of("all-to-all", BIG, [ring(16)], V5P) == pytest.approx(full / 4)
    assert seconds_of("all-to-all", BIG, [line(16)], V5P) == pytest.approx(full / 2)


def test_an_all_to_all_over_two_dimensions_is_held_up_by_the_longer_one():
    # V·max(A, B) / (4·A·B·W): each half of the slice sends a quarter of V through A rings
    got = seconds_of("all-to-all", BIG, [ring(4, "x"), ring(16, "y")], V5P)
    assert got == pytest.approx(BIG * 16 / (4 * 64 * V5P_AXIS))


def test_staged_reduces_over_one_dimension_after_the_other_from_the_major_one():
    stages = [ring(4, "x"), ring(16, "y")]
    want = BIG * 3 / 4 / V5P_AXIS + BIG / 4 * 15 / 16 / V5P_AXIS
    assert seconds_of("reduce-scatter", BIG, stages, V5P, "staged") == pytest.approx(want)
    assert want == pytest.approx(BIG * 63 / 64 / V5P_AXIS)  # the bytes of one ring of 64
    assert seconds_of("reduce-scatter", BIG, stages, V5P) == pytest.approx(want / 2)


def test_interleaved_groups_share_links():
    alone = seconds_of("all-gather", BIG, [ring(4)], V5P)
    assert seconds_of("all-gather", BIG, [Stage(4, "x", True, stride=4)], V5P) == pytest.approx(4 * alone)


def test_a_small_message_takes_its_hops():
    assert seconds_of("all-gather", 1.0, [ring(16)], V5P) == pytest.approx(8e-6)
    assert seconds_of("all-gather", 1.0, [line(16)], V5P) == pytest.approx(15e-6)
    assert seconds_of("all-gather", 1.0, [ring(16, "x"), ring(8, "y")], V5P) == pytest.approx(12e-6)


def test_between_slices_only_what_the_slice_has_reduced_is_sent():
    stages = [Stage(4, "slice"), ring(16, "x"), ring(16, "y")]
    inside = BIG * 255 / 256 / (2 * 2 * 4.5e10)
    across = BIG / 256 * 3 / 4 / 3.1e9
    assert seconds_of("all-reduce", BIG, stages, V5E) == pytest.approx(2 * inside + 2 * across)


def test_gpus_of_a_switch_and_of_several():
    h100 = CHIPS["h100"].ideal()
    assert seconds_of("all-gather", BIG, [Stage(8, "switch")], h100) == pytest.approx(BIG * 7 / 8 / 4.5e11)
    assert seconds_of("all-to-all", BIG, [Stage(8, "switch")], h100) == pytest.approx(BIG / 8 * 7 / 8 / 4.5e11)
    two = [Stage(4, "slice"), Stage(8, "switch")]
    want = BIG * 7 / 8 / 4.5e11 + BIG / 8 * 3 / 4 / 5e10
    assert seconds_of("reduce-scatter", BIG, two, h100) == pytest.approx(want)


def test_the_two_devices_of_a_tpu7x_share_its_links():
    chip = CHIPS["tpu7x"].ideal()
    assert chip.per_device().flops == 2.31e15 / 2
    assert seconds_of("all-gather", BIG, [ring(4)], chip) == pytest.approx(BIG * 3 / 4 / 9.5e10)
    cores = seconds_of("all-gather", BIG, [Stage(2, "core")], chip)
    assert cores == pytest.approx(BIG / 2 / (6 * 9.5e10))


def test_a_permute_uses_one_link_one_way():
    assert seconds_of("collective-permute", BIG, [ring(8)], V5P) == pytest.approx(BIG / 9e10)
    assert seconds_of("collective-permute", BIG, [line(8)], V5P) == pytest.approx(BIG / 9e10)


def test_links_reach_a_part_of_their_rate():
    assert seconds_of("all-gather", BIG, [ring(8)], CHIPS["v5p"]) == pytest.approx(BIG * 7 / 8 / V5P_AXIS / 0.8)


def test_a_group_of_one_sends_nothing():
    assert seconds_of("all-reduce", BIG, [Stage(1)], V5P) == 0.0


def test_stages_of_one_dimension_are_one_ring_where_they_nest():
    nested = [Stage(4, "x", True, 4), Stage(16, "y", True), Stage(4, "x", False, 1)]
    assert merged(nested) == [Stage(16, "x", True, 1), Stage(16, "y", True)]
    two_stages = [Stage(2, "x", False, 8), Stage(4, "x", False, 1)]
    assert merged(two_stages) == two_stages


def plan_of(fn, *shapes, **kwargs):
    return mp.plan(fn, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes), **kwargs)


def volume(plan, c):
    return collective_volume(c.op, c.bytes, math.prod(plan.sizes[a] for a in c.axes))


def parts(plan):
    """(seconds of matmuls, seconds of collectives) at peak rates."""
    chip = plan.chip.ideal()
    sent = sum(
        seconds_of(c.op, volume(plan, c), [s for a in c.axes for s in plan.torus[a]], chip, c.algorithm) * c.count
        for c in plan.collectives
    )
    return time_of(dataclasses.replace(plan, chip=chip)).compute, sent


def mlp(x, up, down):
    return jnp.maximum(x @ up, 0) @ down


@pytest.mark.parametrize(("topology", "n"), [("v5p:4x4x4", 3), ("v5p:8x8x8", 3), ("v5e:16x16", 2)])
def test_fsdp_is_compute_bound_above_a_number_of_tokens_a_chip(topology, n):
    chip = chip_of(topology)
    threshold = chip.flops / (2 * chip.link * n)  # C / (W·n)
    if topology.startswith("v5p"):
        assert threshold == pytest.approx(2550 / n, rel=1e-3)
    devices = device_count(topology)

    def at(tokens):
        plan = plan_of(
            mlp, (tokens * devices, 4096), (4096, 16384), (16384, 4096), mesh="data=-1", topology=topology,
            layout="tokens: data; embed: data", dims={"x": "tokens embed", "up": "embed mlp", "down": "mlp embed"},
        )  # fmt: skip
        assert {c.op for c in plan.collectives} == {"all-gather"}
        return parts(plan)

    below = int(0.9 * threshold) // 16 * 16
    above = int(1.1 * threshold) // 16 * 16
    compute, sent = at(below)
    assert sent > compute
    compute, sent = at(above)
    assert compute > sent


@pytest.mark.parametrize(("topology", "ways"), [("v5p:4x4x4", 4), ("v5p:4x4x8", 8), ("v5p:8x8x16", 16)])
@pytest.mark.parametrize("hidden", [8192, 16384, 32768])
def test_megatron_is_communication_bound_when_its_axis_is_longer_than_the_hidden_size_allows(topology, ways, hidden):
    limit = hidden / 2550  # n = 1
    if ways - 2 < limit < ways + 2:
        pytest.skip("too near the limit for (A-1)/A")
    plan = plan_of(
        mlp, (2**17, 4096), (4096, hidden), (hidden, 4096), mesh=f"data=-1, model={ways}", topology=topology,
        layout="tokens: data; mlp: model", dims={"x": "tokens embed", "up": "embed mlp", "down": "mlp embed"},
    )  # fmt: skip
    assert [s.dim for s in plan.torus["model"]] == [s.dim for s in plan.torus["model"] if s.wraps]
    assert len(plan.torus["model"]) == 1
    compute, sent = parts(plan)
    assert (sent > compute) == (ways > limit)
