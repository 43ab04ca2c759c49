"""Calibrations: stored by device kind and version, and used in the costs of plans."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.hardware.calibration import JAXLIB, calibrated, calibrations, read_calibrations
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.hardware.topology import chip_of

CPU = mp.types.Calibration("cpu", JAXLIB, 0.1, 0.2, 0.3, layouts=3, error=0.05, hbm=1e9, notes=("links hardly matter",))
V5E = mp.types.Calibration("TPU v5 lite", JAXLIB, 0.5, 0.6, 0.7)


def f(x, w):
    return x @ w


SHAPES = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
WHERE = {"mesh": "data=4, model=2", "layout": "a: data; b: model", "dims": {"x": "a b", "w": "b c"}}


def planned(**options):
    return mp.plan(f, *SHAPES, **{**WHERE, **options})


def test_a_file_keeps_other_kinds_and_versions(tmp_path):
    path = tmp_path / "chips.json"
    old = replace(CPU, jaxlib="0.9.1")
    for c in (old, CPU, V5E, replace(CPU, matmul_efficiency=0.11)):
        c.save(path)
    assert set(read_calibrations(path)) == {old, V5E, replace(CPU, matmul_efficiency=0.11)}
    assert calibrations([CPU, V5E]) == (CPU, V5E)
    assert calibrations(None) == ()


def test_this_version_is_taken_else_the_newest():
    mesh = mp.mesh("data=8")
    older, newer = replace(CPU, jaxlib="0.9.10"), replace(CPU, jaxlib="0.9.9")
    assert calibrated(None, mesh, (older, CPU, newer)).calibration == CPU.name
    assert calibrated(None, mesh, (newer, older)).calibration == "cpu, jaxlib 0.9.10"


def test_a_plan_names_what_it_is_priced_with(tmp_path):
    CPU.save(tmp_path / "cpu.json")
    bare, plan = planned(), planned(calibration=tmp_path / "cpu.json")
    assert bare.seconds is None
    assert json.loads(bare.to_json())["calibration"] is None
    assert json.loads(plan.to_json())["calibration"] == {
        "measured_on": CPU.name,
        "matmul_efficiency": 0.1,
        "hbm_efficiency": 0.2,
        "link_efficiency": 0.3,
    }
    assert f"calibrated on {CPU.name}" in str(plan)
    assert f"calibrated on {CPU.name}" in plan._repr_html_()
    work = 2 * 64**3 / 8 / (0.5 * 1e11 * 0.1)  # products of f32 at half the rate
    assert plan.time.compute == pytest.approx(work)
    other = plan.replan(layout="a: data")
    assert other.chip == plan.chip
    slower = plan.replan(calibration=replace(CPU, matmul_efficiency=0.05))
    assert slower.time.compute == pytest.approx(2 * work)
    assert mp.jit(f, **WHERE, calibration=CPU).plan(*SHAPES).chip == plan.chip


def test_calibrations_under_both_names_of_a_chip():
    """Devices of one chip may report another ``device_kind`` under another runtime."""
    newer, older = replace(V5E, device_kind="TPU v5e"), replace(V5E, jaxlib="0.9.1")
    assert planned(topology="v5e:2x4", calibration=[older, newer]).chip.calibration == newer.name


def test_of_a_chip_in_the_table_only_efficiencies_change():
    plain = planned(topology="v5e:2x4")
    plan = planned(topology="v5e:2x4", calibration=[CPU, V5E])
    measured = {"matmul_efficiency": 0.5, "hbm_efficiency": 0.6, "link_efficiency": 0.7}
    want = replace(CHIPS["v5e"].compiler, **measured)
    assert plan.chip == replace(CHIPS["v5e"], compiler=want, calibration=V5E.name)
    assert plan.time.compute == pytest.approx(plain.time.compute / 0.5)
    assert planned(topology="v5e:2x4").time.communication == plain.time.communication  # nothing is kept of the other
    assert plan.replan().time.communication == pytest.approx(plan.time.communication)


def test_a_search_is_priced_with_it():
    how = {"topology": "v5e:2x4", "dims": WHERE["dims"], "mesh": "data=8", "max_plans": 4}
    large = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 2
    found = [mp.search(f, *large, **how, calibration=c) for c in (None, V5E)]
    assert found[1].best.seconds > found[0].best.seconds
    assert found[1].plan().chip.calibration == V5E.name
    assert f"calibrated on {V5E.name}" in " ".join(str(found[1]).split())
    assert f"calibrated on {V5E.name}" in found[1]._repr_html_()
    assert json.loads(found[1].to_json())["calibration"]["measured_on"] == V5E.name
    assert json.loads(found[0].to_json())["calibration"] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"topology": "v5e:2x4", "calibration": CPU}, "of cpu, and the plan is for a v5e"),
        ({"calibration": V5E}, "an abstract mesh without a topology"),
        ({"calibration": [CPU, replace(CPU, device_kind="NVIDIA L4")]}, "of several kinds"),
        ({"mesh": "devices", "calibration": V5E}, "of TPU v5 lite, and the plan is for devices of kind 'cpu'"),
    ],
)
def test_of_other_devices(mesh, options, says):
    if "mesh" in options:
        options = {**options, "mesh": mesh}
    with pytest.raises(mp.errors.MeshError, match=says):
        planned(**options)
    assert calibrated(chip_of("v5e:2x4"), mesh, ()) == CHIPS["v5e"]


def file(**efficiencies):
    return json.dumps({"format": 1, "devices": {"cpu": {"0.10.2": efficiencies}}})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not a calibration file"),
        ("[]", "is not a calibration file"),
        ('{"format": 2, "devices": {}}', "format is 2; this version reads 1"),
        ('{"format": 1, "devices": {}}', "no device"),
        (file(matmul_efficiency=1), "cpu / 0.10.2: 'hbm_efficiency' is"),
        (file(matmul_efficiency=0, hbm_efficiency=1, link_efficiency=1), "matmul_efficiency is 0"),
        (file(matmul_efficiency=1, hbm_efficiency=1, link_efficiency=1, x=1), "unknown fields: x"),
    ],
)
def test_files_that_are_none(tmp_path, content, says):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(mp.errors.UnsupportedError, match=says):
        planned(calibration=path)
    with pytest.raises(mp.errors.UnsupportedError, match="is not a calibration file"):
        CPU.save(path)  # nor is it overwritten
    assert path.read_text() == content


def test_no_file():
    with pytest.raises(mp.errors.UnsupportedError, match="there is no calibration file"):
        planned(calibration="/nowhere.json")
    with pytest.raises(mp.errors.UnsupportedError, match="is not a calibration"):
        planned(calibration=[3])
