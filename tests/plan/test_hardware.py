"""Chips, the time of collectives and the torus: formulas against hand arithmetic, and the rules of thumb that follow from them."""

import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from planned_transformer import DIMS, F32, PARAMS, STATE, TOKENS, train_step

import meshpar as mp
from meshpar.errors import MeshError
from meshpar.mesh import parse_topology
from meshpar.plan.hardware import (
    CHIPS,
    chip_of,
    device_count,
    merged,
    planned_mesh,
    seconds_of,
    volume_of,
)
from meshpar.plan.time import time_of
from meshpar.plan.torus import Stage, torus_of, torus_of_slices

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


def test_a_line_takes_twice_as_long():
    assert seconds_of("all-gather", BIG, [line(8)], V5P) == 2 * seconds_of("all-gather", BIG, [ring(8)], V5P)


def test_axes_together_add_their_links():
    stages = [ring(8, "x"), ring(8, "y"), ring(16, "z")]
    assert seconds_of("all-gather", BIG, stages, V5P) == pytest.approx(BIG * 1023 / 1024 / (3 * V5P_AXIS))


def test_an_all_reduce_is_two_reduce_scatters():
    stages = [ring(4, "x"), ring(16, "y")]
    for form in ("native", "staged"):
        scatter = seconds_of("reduce-scatter", BIG, stages, V5P, form)
        assert seconds_of("all-reduce", BIG, stages, V5P, form) == 2 * scatter


def test_an_all_to_all_is_a_quarter_of_an_all_gather_on_a_ring_and_half_of_one_on_a_line():
    whole = BIG / V5P_AXIS  # an all-gather on a long ring
    assert seconds_of("all-to-all", BIG, [ring(16)], V5P) == pytest.approx(whole / 4)
    assert seconds_of("all-to-all", BIG, [line(16)], V5P) == pytest.approx(whole / 2)


def test_an_all_to_all_over_two_dimensions_is_held_up_by_the_longer_one():
    # V·max(A, B) / (4·A·B·W): each half of the slice sends a quarter of V through A rings
    got = seconds_of("all-to-all", BIG, [ring(4, "x"), ring(16, "y")], V5P)
    assert got == pytest.approx(BIG * 16 / (4 * 64 * V5P_AXIS))


def test_staged_takes_the_dimensions_in_turn_and_the_major_one_has_all_of_it():
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
    apart = [Stage(2, "x", False, 8), Stage(4, "x", False, 1)]
    assert merged(apart) == apart


# -- rules of thumb


def plan_of(fn, *shapes, **kwargs):
    return mp.plan(fn, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes), **kwargs)


def parts(plan):
    """(seconds of products, seconds of collectives) at peak rates."""
    chip = plan.chip.ideal()
    sent = sum(
        seconds_of(c.op, volume_of(c, plan.sizes), [s for a in c.axes for s in plan.torus[a]], chip, c.form) * c.count
        for c in plan.collectives
    )
    return time_of(plan, chip, plan.kernels).compute, sent


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


# -- where axes lie

# as mesh_utils.create_device_mesh(allow_split_physical_axes=True) lays them on the slices that libtpu describes
LAID = {
    ("v5e:16x16", "data=256"): {"data": [(16, "x", True, 1), (16, "y", True, 1)]},
    ("v5e:16x16", "data=16, model=16"): {"data": [(16, "y", True, 1)], "model": [(16, "x", True, 1)]},
    ("v5e:16x16", "data=64, model=4"): {"data": [(4, "x", True, 4), (16, "y", True, 1)], "model": [(4, "x", False, 1)]},
    ("v5p:4x4x8", "data=16, model=8"): {"data": [(4, "x", True, 1), (4, "y", True, 1)], "model": [(8, "z", True, 1)]},
    ("v5p:8x8x8", "data=64, model=8"): {"data": [(8, "y", True, 1), (8, "z", True, 1)], "model": [(8, "x", True, 1)]},
    ("v5p:8x8x8", "data=16, seq=4, model=8"): {
        "data": [(2, "y", True, 4), (8, "z", True, 1)], "seq": [(4, "y", False, 1)], "model": [(8, "x", True, 1)],
    },
    ("tpu7x:4x4x4", "data=64, model=2"): {
        "data": [(4, "x", True, 1), (4, "y", True, 1), (4, "z", True, 1)], "model": [(2, "core", False, 1)],
    },
    ("v5e:4x4", "data=4, model=4"): {"data": [(4, "y", False, 1)], "model": [(4, "x", False, 1)]},
    ("2x v5e:4x4", "data=8, model=4"): {"data": [(2, "slice", False, 1), (4, "y", False, 1)], "model": [(4, "x", False, 1)]},
}  # fmt: skip


def laid(topology, text):
    slices, kind, chips = parse_topology(topology)
    sizes = dict(planned_mesh(text, topology).shape)
    return torus_of_slices(sizes, slices, kind, chips, CHIPS[kind].devices)


@pytest.mark.parametrize(("topology", "text"), LAID)
def test_axes_of_a_named_slice(topology, text):
    assert laid(topology, text) == {a: tuple(Stage(*s) for s in stages) for a, stages in LAID[topology, text].items()}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler's description of slices")
@pytest.mark.parametrize(("topology", "text"), [*LAID, ("v5p:8x8x8", "data=128, model=4"), ("v5e:4x4", "data=16")])
def test_axes_lie_as_on_the_slice_that_the_compiler_describes(topology, text):
    assert laid(topology, text) == torus_of(mp.mesh(text, topology=topology))


def test_gpus_fill_a_node_with_the_minor_axes():
    assert laid("4x h100:8", "data=8, model=4") == {
        "data": (Stage(4, "slice"), Stage(2, "switch")), "model": (Stage(4, "switch"),),
    }  # fmt: skip
    assert laid("h100:32", "data=32") == {"data": (Stage(4, "slice"), Stage(8, "switch"))}
    assert laid("h100:8", "data=8") == {"data": (Stage(8, "switch"),)}


# -- which chip


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v5p", "v5p"), ("TPU v6 lite", "v6e"),
     ("TPU7x", "tpu7x"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200")],
)  # fmt: skip
def test_devices_say_what_they_are(kind, name):
    found = chip_of([SimpleNamespace(device_kind=kind)])
    assert found is CHIPS[name]


def test_cpus_have_no_times(mesh):
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    plan = mp.plan(lambda x: x.sum(), x, mesh=mesh, layout="batch: data", dims={"x": "batch embed"})
    assert plan.chip is None
    assert plan.time is None
    assert plan.seconds is None
    assert [c.seconds for c in plan.collectives] == [None]
    assert plan.memory.peak > 0


def test_a_mesh_as_text_needs_no_device():
    x = jax.ShapeDtypeStruct((64, 4), jnp.float32)
    plan = mp.plan(
        lambda x: x * 2, x, mesh="data=-1", topology="v5e:4x4", layout="batch: data", dims={"x": "batch embed"}
    )
    assert plan.sizes == {"data": 16}
    assert isinstance(plan.mesh, AbstractMesh)
    assert plan.inputs[0].bytes == 64 / 16 * 4 * 4


def test_errors_say_what_to_write():
    with pytest.raises(MeshError, match=r"topology 'v9:4' is not known[\s\S]*h100, h200, b200"):
        chip_of("v9:4")
    with pytest.raises(MeshError, match=r"mesh \(data=3\) has 3 devices, but v5e:4x4 has 16"):
        planned_mesh("data=3", "v5e:4x4")
    with pytest.raises(MeshError, match=r"cannot be filled: 16 devices do not divide by 3"):
        planned_mesh("data=-1, model=3", "v5e:4x4")
    with pytest.raises(MeshError, match="-1 needs a topology"):
        planned_mesh("data=-1", None)
    with pytest.raises(MeshError, match="has 2 torus dimensions, not 3"):
        planned_mesh("data=-1", "v5e:4x4x4")
    devices = np.array(jax.devices()[:2])
    with pytest.raises(MeshError, match="beside a mesh of devices, which know where they are"):
        planned_mesh(jax.sharding.Mesh(devices, ("data",)), "v5e:4x4")


def sliced_plan(layout: str) -> mp.Plan:
    return mp.plan(train_step, STATE, TOKENS, mesh="slice=2, data=4", topology="2x v5e:2x2", layout=layout, dims=DIMS)


def test_what_crosses_slices():
    params = sum(x.size * F32 for x in jax.tree.leaves(PARAMS))
    split = sum(x.size * F32 for name, x in PARAMS.items())  # every weight has `embed`
    hsdp = sliced_plan("batch: slice+data; embed: data")
    # each device's quarter of the gradients, all-reduced over two slices; and the loss
    assert hsdp.dcn_bytes == pytest.approx(split / 4 * 2 * 1 / 2, rel=0.01)
    assert not any("other slices" in note for note in hsdp.notes)
    fsdp = sliced_plan("batch: slice+data; embed: slice+data")
    assert fsdp.dcn_bytes > 1.2 * hsdp.dcn_bytes
    (note,) = (n for n in fsdp.notes if "other slices" in n)
    assert "all-gather over slice+data" in note
    within = sliced_plan("batch: data; embed: data")
    assert within.dcn_bytes == 0
    tensor = sliced_plan("batch: data; mlp: slice")
    (note,) = (n for n in tensor.notes if "other slices" in n)
    assert "all-reduce over slice of `batch seq embed`" in note
    assert tensor.dcn_bytes == pytest.approx(sum(c.total_bytes for c in tensor.collectives if c.axes == ("slice",)))
    assert params == split
    everywhere = mp.plan(
        train_step, STATE, TOKENS, mesh="data=8", topology="v5e:2x4", layout="batch, embed: data", dims=DIMS
    )
    assert everywhere.dcn_bytes == 0
