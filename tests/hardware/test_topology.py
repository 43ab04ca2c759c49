"""Slices: texts and cloud names, shapes that exist, and where the axes of a mesh lie on their torus."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from jax.sharding import Mesh

import meshpar as mp
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.hardware.topology import (
    Places,
    Stage,
    Topology,
    described_mesh,
    device_count,
    larger_topologies,
    parse_topology,
    ring_order,
    topology_devices,
    torus_of,
    torus_of_slices,
)
from meshpar._src.mesh import planned_mesh
from meshpar.errors import MeshError, TorusWarning


@pytest.mark.parametrize("text", ["v5p:4x4x8", "2x v5e:16x16", "4x tpu7x:4x4x4", "h200:8", "2x b200:8", "h100:16"])
def test_a_text_and_back(text):
    found = parse_topology(text)
    *slices, kind, chips = text.replace("x ", ":").split(":")
    assert found == (int(*slices or "1"), kind, tuple(map(int, chips.split("x"))))
    assert str(found) == text
    assert found.chip is CHIPS[kind]


@pytest.mark.parametrize(
    ("name", "slice_", "devices"),
    [
        ("v5litepod-1", "v5e:1x1", 1),
        ("v5litepod-8", "v5e:2x4", 8),
        ("v5e-256", "v5e:16x16", 256),
        ("v4-8", "v4:2x2x1", 4),  # TensorCores: two a chip, which is one device
        ("v5p-768", "v5p:4x8x12", 384),
        ("tpu7x-128", "tpu7x:4x4x4", 128),  # two devices a chip
        ("2x v5p-256", "2x v5p:4x4x8", 256),
        ("2xv6e-64", "2x v6e:8x8", 128),
        ("4xh100:8", "4x h100:8", 32),
    ],
)
def test_what_clouds_call_slices(name, slice_, devices):
    assert str(parse_topology(name)) == slice_
    assert device_count(name) == device_count(slice_) == devices


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("v5e:3x5", "v5e:4x4, v5e:2x4"),
        ("v5e:16", "v5e:4x4"),
        ("v5e:4x4x4", "v5e:8x8"),
        ("2x v5e:3x3", "2x v5e:2x4"),
        ("0x v5e:4x4", "v5e:4x4"),
        ("v5p:4x4x5", "v5p:4x4x4"),
        ("v5p:0x4x4", "v5p:2x2x1"),
        ("v4:16x16x32", "v4:16x16x16"),
        ("v5litepod-12", "v5litepod-8, v5litepod-16"),
        ("v5p-129", "v5p-128"),
        ("h200:12", "h200:8, h200:16"),
        ("h200:0", "h200:8"),
        ("h200:2x4", "h200:8"),
    ],
)
def test_slices_that_do_not_exist_are_refused_with_the_nearest_that_do(text, near):
    with pytest.raises(MeshError, match="does not exist") as error:
        parse_topology(text)
    nearest = error.value.fixes[0].removeprefix("the nearest: ").split(", ")
    assert set(near.split(", ")) <= set(nearest)
    for other in nearest:
        parse_topology(other)


@pytest.mark.parametrize(
    "text",
    ["v9:4x4", "v3-8", "a6000:8", "v5e", "", "v5e:4 x4", "v5e:-4x4", "v5p:" + "9" * 140, "9" * 5000 + "x v5e:4x4"],
)
def test_chips_that_are_not_known_are_refused_with_those_that_are(text):
    with pytest.raises(MeshError, match="is not known") as error:
        parse_topology(text)
    assert all(any(name in fix for fix in error.value.fixes) for name in CHIPS)
    assert any("16x16" in fix for fix in error.value.fixes)
    assert any("v5litepod-" in fix for fix in error.value.fixes)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("h100x8", "h100:8"),
        ("8xH100", "h100:8"),
        ("v5e-16x16", "v5e:16x16"),
        ("4 h100:8", "4x h100:8"),
        ("2xh1000:8", "2x h100:8"),
        ("4x v5e", "v5e:2x2"),
    ],
)
def test_the_topology_that_another_notation_means_is_named(text, meant):
    with pytest.raises(MeshError, match="is not known") as error:
        parse_topology(text)
    assert error.value.fixes[0] == f'did you mean "{meant}"?'


def test_a_number_of_gpus_without_a_size_may_be_one_of_hosts():
    with pytest.raises(MeshError) as error:
        parse_topology("4x h100")
    assert error.value.fixes[:2] == ('did you mean "h100:4"?', '4 hosts are "4x h100:8"')


def test_every_shape_of_a_chip_exists_and_its_text_is_read_back():
    for chip in CHIPS.values():
        for shape in chip.shapes():
            assert parse_topology(str(Topology(1, chip.name, shape))).chips == shape
    assert len(CHIPS["v5p"].shapes()) > len(CHIPS["v5e"].shapes()) == 8


@pytest.mark.parametrize(
    ("text", "larger"),
    [
        ("v5e:4x4", ["v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16", "2x v5e:16x16", "4x v5e:16x16"]),
        ("2x v5e:8x16", ["2x v5e:16x16", "4x v5e:16x16"]),
        ("v5p:4x4x4", ["v5p:4x4x8", "v5p:4x8x8", "v5p:8x8x8"]),
        ("h100:8", ["h100:16", "h100:32"]),
        ("v5e:1x1", ["v5e:2x2", "v5e:2x4"]),
    ],
)
def test_larger_topologies(text, larger):
    found = larger_topologies(text)
    assert [str(where) for where in found[: len(larger)]] == larger
    assert all(parse_topology(str(where)) == where for where in found)
    assert all(b.devices == 2 * a.devices for a, b in itertools.pairwise(found))


def test_a_chip_without_a_compiler_is_for_plans_alone(monkeypatch):
    monkeypatch.setitem(CHIPS, "a100", dataclasses.replace(CHIPS["a100"], target=""))
    with pytest.raises(MeshError, match="topology a100:8: no compiler for a100 chips") as error:
        topology_devices("a100:8")
    assert "h100" in error.value.fixes[1]
    assert mp.plan(lambda x: x * 2, np.zeros((16, 4), "f"), mesh="data=-1", topology="a100:8", layout="batch: data",
                   dims={"x": "batch embed"}).seconds > 0  # fmt: skip


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
    return torus_of_slices(dict(planned_mesh(text, topology).shape), topology)


@pytest.mark.parametrize(("topology", "text"), LAID)
def test_axes_of_a_named_slice(topology, text):
    assert laid(topology, text) == {a: tuple(Stage(*s) for s in stages) for a, stages in LAID[topology, text].items()}


def test_gpus_fill_a_node_with_the_minor_axes():
    assert laid("4x h100:8", "data=8, model=4") == {
        "data": (Stage(4, "slice"), Stage(2, "switch")),
        "model": (Stage(4, "switch"),),
    }
    assert laid("2x h200:4", "data=2, model=4") == {"data": (Stage(2, "slice"),), "model": (Stage(4, "switch"),)}
    assert laid("h100:32", "data=32") == {"data": (Stage(4, "slice"), Stage(8, "switch"))}
    assert laid("h100:8", "data=8") == {"data": (Stage(8, "switch"),)}


SQUARE = [(0, 0), (0, 1), (1, 0), (1, 1)]


def devices_of(kind, places):
    """Devices of some kind at these coordinates, as JAX describes them."""
    device = functools.partial(SimpleNamespace, device_kind=kind, platform="tpu", core_on_chip=0, slice_index=0)
    return np.array([device(coords=(*place, 0)) for place in places])


class FakeMesh(Mesh):
    """A mesh of devices that are only described."""

    def __new__(cls, devices, names):
        self = object.__new__(cls)
        return self

    def __init__(self, devices, names):
        self.__dict__.update(devices=devices, axis_names=names)


def test_a_kind_of_device_that_is_not_known_is_said_before_its_rings_become_lines():
    unknown, known = (devices_of(kind, SQUARE).reshape(2, 2) for kind in ("TPU v9", "TPU v6e"))
    with pytest.warns(TorusWarning, match="kind 'TPU v9' are not in the chip table"):
        torus_of(FakeMesh(unknown, ("a", "b")))
    with pytest.raises(MeshError, match="'TPU v9' have no coordinates on a torus"):
        Places.of(unknown)
    known = torus_of(FakeMesh(known, ("a", "b")))
    assert known == {"a": (Stage(2, "x", False, 1),), "b": (Stage(2, "y", False, 1),)}


@pytest.mark.parametrize(
    ("topology", "text", "size", "dim", "box"),
    [
        ("v5e:4x4", "data=16", 16, "", [(4, "x"), (4, "y")]),  # as JAX lays it: like a snake
        ("v5e:2x4", "data=8", 8, "", [(2, "x"), (4, "y")]),
        ("2x v5e:4x4", "data=32", 32, "slice", [(4, "x"), (4, "y"), (2, "slice")]),
        ("tpu7x:2x2x2", "data=16", 16, "", [(2, "x"), (2, "y"), (2, "z"), (2, "core")]),
    ],
)
def test_devices_that_jump_about_may_fill_a_box(topology, text, size, dim, box):
    """The box may be of several slices, between which the axis then is."""
    (found,) = laid(topology, text)["data"]
    assert found == Stage(size, dim, fills=tuple(Stage(*s) for s in box), cells=found.cells)
    assert sorted(found.cells) == list(range(size))


SMALL = [Topology(1, chip.name, shape) for chip in CHIPS.values() if not chip.switch for shape in chip.shapes()]
SMALL = [where for where in SMALL if 1 < where.devices <= 64]


@pytest.mark.parametrize("where", SMALL, ids=str)
def test_a_ring_visits_neighbours_wherever_a_grid_has_a_cycle(where):
    """In every group of a mesh of one or two axes: consecutive devices are on one chip, or neighbours in the grid of the group."""
    half, rings = where.devices // 2, (*where.chip.rings(where.chips), False, False)
    for shape in {(where.devices,), (2, half), (half, 2)}:
        sizes = dict(zip("ab", shape, strict=False))
        places = np.vectorize(lambda d: d.coords, otypes=[object])(described_mesh(sizes, where).devices)
        for k, stages in enumerate(torus_of_slices(sizes, where).values()):
            groups = np.array(np.moveaxis(places, k, 0).reshape(shape[k], -1).T.tolist())
            chips = [{tuple(at) for at in group} for group in groups]
            sides = [len(set(at)) for at in groups[0].T if len(set(at)) > 1]
            is_box = all(len(c) == np.prod(sides) for c in chips) and shape[k] > 1 and stages[0] != Stage(shape[k])
            is_cycle = (len(sides) > 1 and len(chips[0]) % 2 == 0) or sides in ([], [2]) or any(s.wraps for s in stages)
            order = ring_order(stages)
            assert bool(order) == (is_box and is_cycle), (sizes, k)
            if order:
                assert sorted(order) == list(range(shape[k]))
                for group in groups:
                    steps = np.zeros(shape[k], int)
                    for ring, at in zip(rings, group.T, strict=False):
                        found, index = np.unique(at, return_inverse=True)
                        n = np.abs(index[[*order]] - np.roll(index[[*order]], 1))
                        steps += np.minimum(n, len(found) - n) if ring else n
                    assert steps.max() <= 1, (sizes, k)


def test_rings_of_the_mesh_keep_their_order_and_others_have_none():
    assert ring_order((Stage(4, "x", True),)) == (0, 1, 2, 3)
    assert ring_order((Stage(2, "y"), Stage(2, "x"))) == (0, 1, 3, 2)
    assert ring_order((Stage(3, "x"), Stage(4, "y"))) == (0, 4, 8, 9, 5, 6, 10, 11, 7, 3, 2, 1)
    no_cycle = [Stage(4, "x")], [Stage(3, "x"), Stage(3, "y")]
    unknown = [Stage(8)], [Stage(8, "switch")], [Stage(2, "slice"), Stage(4, "x", True)], [Stage(1, "x")]
    assert [ring_order(tuple(stages)) for stages in (*no_cycle, *unknown)] == [()] * 6


def test_devices_that_jump_about_and_fill_no_box():
    devices = devices_of("TPU v6e", [(0, 0), (0, 1), (1, 0), (2, 0)])
    assert torus_of(FakeMesh(devices, ("a",))) == {"a": (Stage(4),)}
