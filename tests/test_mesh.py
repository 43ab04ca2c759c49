"""Meshes: the notation, filling, and the meshes that plans are made on."""

import importlib.util
import os
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import meshpar as mp
from meshpar._src.compat.coordination import ELASTIC
from meshpar._src.hardware.topology import topology_devices
from meshpar._src.mesh import planned_mesh
from meshpar.errors import LayoutSyntaxError, MeshError

BAD_TEXTS = [
    ("data", "'data' is not `axis=size`"),
    ("", "'' is not `axis=size`"),
    ("data=0", "'data=0' is not `axis=size`"),
    ("data=-2", "'data=-2' is not `axis=size`"),
    ("data=x", "'data=x' is not `axis=size`"),
    ("data=" + "9" * 5000, "99' is not `axis=size`"),
    ("a" + " " * 100_000 + "b=2", "b=2' is not `axis=size`"),  # no backtracking
    ("data=2, data=4", "'data=4' is given twice"),
    ("data=-1, model=-1", "only one axis may be -1"),
]


def test_minus_one_fills():
    assert dict(mp.mesh("data=-1, model=2").shape) == {"data": 4, "model": 2}
    assert dict(mp.mesh("data=-1").shape) == {"data": 8}
    assert dict(mp.mesh("data=8, model=-1").shape) == {"data": 8, "model": 1}
    with pytest.raises(MeshError, match="8 devices do not divide by 3"):
        mp.mesh("data=-1, model=3")


def test_the_axis_over_slices_has_the_size_of_those_that_are_left(monkeypatch):
    monkeypatch.setenv(ELASTIC, "slice=1")
    assert dict(mp.mesh("slice=2, data=4").shape) == {"slice": 1, "data": 4}
    assert dict(mp.mesh("slice=2, data=-1").shape) == {"slice": 1, "data": 8}
    assert dict(mp.mesh("data=4, model=2").shape) == {"data": 4, "model": 2}
    assert mp.mesh("slice=2, data=4", devices=jax.devices()).shape["slice"] == 2


def test_a_smaller_mesh_takes_the_first_devices():
    mesh = mp.mesh("data=2")
    assert mesh.devices.tolist() == jax.devices()[:2]
    assert mp.mesh("data=2", devices=jax.devices()[4:]).devices.tolist() == jax.devices()[4:6]


def test_virtual_devices_that_are_there_already_are_no_error():
    mp.virtual_devices(8)
    mp.virtual_devices(2)
    assert len(jax.devices()) == 8


def test_the_mesh_to_plan_on():
    assert dict(planned_mesh("data=-1, model=2", "v5e:4x4").shape) == {"data": 8, "model": 2}
    with pytest.raises(MeshError, match=r"mesh \(data=3\) has 3 devices, but v5e:4x4 has 16"):
        planned_mesh("data=3", "v5e:4x4")
    with pytest.raises(MeshError, match=r"cannot be filled: 16 devices do not divide by 3"):
        planned_mesh("data=-1, model=3", "v5e:4x4")
    with pytest.raises(MeshError, match="-1 needs a topology"):
        planned_mesh("data=-1", None)
    with pytest.raises(MeshError, match="has 2 torus dimensions, not 4x4x4"):
        planned_mesh("data=-1", "v5e:4x4x4")
    with pytest.raises(MeshError, match="with a mesh of devices, which have a topology"):
        planned_mesh(Mesh(np.array(jax.devices()[:2]), ("data",)), "v5e:4x4")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="describes TPU slices by their compiler")
@pytest.mark.parametrize(
    ("topology", "text"),
    [
        ("v5e:4x4", "data=4, model=4"),
        ("v6e:8x8", "data=64"),
        ("v4:2x2x4", "data=8, model=2"),
        ("v5p:4x4x8", "data=16, model=8"),
        ("v5p:16x16x16", "data=512, model=8"),
        ("tpu7x:2x2x2", "data=4, model=4"),
        ("2x v5e:4x4", "slice=2, data=8, model=2"),
        ("2x v5e:4x4", "data=-1, model=2"),
        ("2x tpu7x:2x2x2", "data=16, model=2"),
    ],
)
def test_a_live_mesh_is_the_planned_mesh(topology, text):
    devices = list(topology_devices(topology))
    random.Random(0).shuffle(devices)
    planned, live = mp.mesh(text, topology=topology), mp.mesh(text, devices=devices)
    assert (planned.devices == live.devices).all()


def test_describing_a_slice_leaves_the_cluster_to_be_found(monkeypatch):
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(MeshError, match="needs the TPU compiler"):
            mp.mesh("data=4", topology="v5e:2x2")
    else:
        assert mp.mesh("data=8", topology="v6e:2x4").size == 8
    assert "TPU_SKIP_MDS_QUERY" not in os.environ


@pytest.mark.parametrize(
    "spec",
    [("data=4, model=2",), (" data:4;model:2 ",), ({"data": 4, "model": 2},), ((4, 2), ("data", "model")), ([-1, 2], "data model"),
     ({"data": 4, "model": -1},)],
)  # fmt: skip
def test_a_mesh_is_text_or_a_mapping_or_sizes_with_names(spec):
    made, want = mp.mesh(*spec), jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    assert made == want
    assert dict(made.shape) == {"data": 4, "model": 2}


BAD = [
    (((4, 2),), "not text, a mapping, or sizes"),
    (((4, 2), ("data",)), "2 sizes, but 1 axes"),
    (((4, 2), ("data", "data")), "is given twice"),
    (("data=4", ("data",)), "not text"),
    *(((spec,), "not text") for spec in (4, None)),
    *(((spec,), "is not `axis=size`") for spec in ({"data": 0}, {"data": "4"}, {"data": True}, {4: 2}, {"da ta": 4})),
    (({"data": -1, "model": -1},), "only one axis may be -1"),
]


@pytest.mark.parametrize(
    ("spec", "says"), [*(((text,), says) for text, says in BAD_TEXTS), *BAD], ids=range(len(BAD_TEXTS + BAD))
)
def test_what_is_no_mesh_says_so(spec, says):
    with pytest.raises(LayoutSyntaxError) as error:
        mp.mesh(*spec)
    assert says in str(error.value)


X = np.arange(32, dtype=np.float32).reshape(8, 4)
DIMS_OF_X = {"x": "batch embed"}


def doubled(x):
    return 2 * x


def test_the_options_that_take_a_mesh_take_a_mapping():
    step = mp.jit(doubled, mesh={"data": 4, "model": 2}, layout="batch: data", dims=DIMS_OF_X)
    assert step(X).sharding.spec == jax.P("data")
    assert step.on({"data": 8}).mesh.shape == {"data": 8}
    plan = mp.plan(doubled, X, mesh={"data": -1}, topology="v5e:2x2", layout="batch: data", dims=DIMS_OF_X)
    assert plan.sizes == {"data": 4}
    assert plan.replan(mesh={"data": 2, "model": 2}).sizes == {"data": 2, "model": 2}
    assert mp.check(doubled, X, layout="batch: data", mesh={"data": 8}, dims=DIMS_OF_X).ok


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_without_a_mesh_it_is_that_of_set_mesh(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    options = {"layout": "batch: data; embed: model", "dims": DIMS_OF_X}
    with jax.set_mesh(mesh):
        step = mp.jit(doubled, **options)
        made = mp.init(doubled, **options)
        plan = mp.plan(doubled, X, **options)
        shardings = mp.shardings({"x": X}, options["layout"], dims={"x": "batch embed"})
    for out in (step(X), made(X)):
        assert dict(out.sharding.mesh.shape) == {"data": 4, "model": 2}
        assert out.sharding.spec == jax.P("data", "model")
        np.testing.assert_array_equal(out, 2 * X)
    assert plan.sizes == {"data": 4, "model": 2}
    assert shardings["x"] == step(X).sharding


def test_without_a_mesh_an_abstract_one_of_the_context_is_planned_on():
    abstract = jax.sharding.AbstractMesh((16,), ("data",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(abstract):
        assert mp.plan(doubled, jnp.ones((16, 4)), layout="batch: data", dims=DIMS_OF_X).sizes == {"data": 16}
        step = mp.jit(doubled, layout="batch: data", dims=DIMS_OF_X)
    with pytest.raises(mp.errors.MeshError, match="abstract"):
        step(jnp.ones((16, 4)))


@pytest.mark.parametrize("call", [
    lambda **o: mp.jit(doubled, **o), lambda **o: mp.init(doubled, **o), lambda **o: mp.plan(doubled, X, **o),
    lambda **o: mp.compile(doubled, X, **o), lambda layout, dims: mp.shardings({"x": X}, layout, dims=dims),
])  # fmt: skip
def test_without_any_mesh_is_an_error(call):
    with pytest.raises(mp.errors.MeshError, match="no mesh is given, and none is set"):
        call(layout="batch: data", dims=DIMS_OF_X)


def test_a_mesh_that_leaves_accelerators_idle_warns(monkeypatch):
    """Not one with devices=, nor one of virtual CPU devices of a single process."""
    mp.mesh("data=4")

    class Gpu:
        process_index, platform = 0, "gpu"

    gpus, made = [Gpu() for _ in range(8)], []
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    monkeypatch.setattr(sys.modules["meshpar._src.mesh"], "Mesh", lambda array, *_, **__: made.append(array.shape))
    idle = r"\(data=3, model=2\) has 6 of 8 .*devices=jax.devices\(\)\[:6\]"
    with pytest.warns(mp.errors.IdleDevicesWarning, match=idle):
        mp.mesh("data=3, model=2")
    mp.mesh("data=4, model=2")
    mp.mesh("data=4", devices=gpus)
    assert made == [(3, 2), (4, 2), (4,)]


def test_replan_on_another_mesh_keeps_the_topology():
    x = jax.ShapeDtypeStruct((64, 64), np.float32)
    plan = mp.plan(lambda a, b: a @ b, x, x, mesh="data=16", topology="v5e:4x4", layout="m: data", dims={"a": "m k"})
    other = plan.replan(mesh="data=4, model=4")
    assert (other.topology, other.chip, dict(other.sizes)) == ("v5e:4x4", plan.chip, {"data": 4, "model": 4})
    assert other.seconds > 0
    with pytest.raises(MeshError, match="has 8 devices, but v5e:4x4 has 16"):
        plan.replan(mesh="data=8")
    assert plan.replan(mesh="data=8", topology="v5e:2x4").seconds > 0
