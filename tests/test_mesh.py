"""Meshes: the notation, filling, and the meshes that plans are made on."""

import importlib.util
import os
import random

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import meshpar as mp
from meshpar.errors import LayoutSyntaxError, MeshError
from meshpar.hardware.topology import topology_devices
from meshpar.mesh import parse_mesh, planned_mesh


def test_parse():
    assert parse_mesh("data=4, model=2") == {"data": 4, "model": 2}
    assert parse_mesh("data=-1,model=2") == {"data": -1, "model": 2}
    assert parse_mesh(" a = 1 ") == {"a": 1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data", "'data' is not `axis=size`"),
        ("", "'' is not `axis=size`"),
        ("data=0", "'data=0' is not `axis=size`"),
        ("data=-2", "'data=-2' is not `axis=size`"),
        ("data=x", "'data=x' is not `axis=size`"),
        ("data=2, data=4", "'data=4' stands twice"),
        ("data=-1, model=-1", "only one axis may be -1"),
    ],
)
def test_text_that_is_no_mesh(text, says):
    with pytest.raises(LayoutSyntaxError) as error:
        mp.mesh(text)
    assert says in str(error.value)


def test_it_is_a_plain_mesh_with_auto_axes():
    mesh = mp.mesh("data=4, model=2")
    assert isinstance(mesh, Mesh)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.devices.ravel().tolist() == jax.devices()


def test_minus_one_fills():
    assert dict(mp.mesh("data=-1, model=2").shape) == {"data": 4, "model": 2}
    assert dict(mp.mesh("data=-1").shape) == {"data": 8}
    assert dict(mp.mesh("data=8, model=-1").shape) == {"data": 8, "model": 1}
    with pytest.raises(MeshError, match="8 devices do not divide by 3"):
        mp.mesh("data=-1, model=3")


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
    with pytest.raises(MeshError, match="beside a mesh of devices, which know where they are"):
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
