"""The chip table: names and memory of its entries; one entry is enough to add a chip."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.hardware import chips
from meshpar._src.hardware.chips import CHIPS, GIB, Chip, chip_of_kind
from meshpar._src.hardware.topology import chip_of
from meshpar._src.verify.out_of_memory_error import capacity_of

TPUS = "TPU v4: v4, TPU v5 lite: v5e, TPU v5e: v5e, TPU v5: v5p, TPU v5p: v5p, TPU v6 lite: v6e, TPU v6e: v6e, TPU7x: tpu7x"
GPUS = "NVIDIA A100-SXM4-80GB: a100, NVIDIA H100 80GB HBM3: h100, NVIDIA H200: h200, NVIDIA B200: b200"


@pytest.mark.parametrize("pair", f"{TPUS}, {GPUS}".split(", "))
def test_devices_say_what_they_are(pair):
    kind, name = pair.split(": ")
    assert chip_of_kind(kind) is CHIPS[name]
    assert chip_of([SimpleNamespace(device_kind=kind)]) is CHIPS[name]


@pytest.mark.parametrize("kind", ["cpu", "TPU v4 lite", "TPU v9", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe", ""])
def test_devices_that_are_like_a_chip_but_are_not_it(kind):
    """A GH200 is no H200; an H100 on PCIe has neither the rate nor the switch of one on SXM."""
    assert chip_of_kind(kind) is None


def test_no_kind_of_device_is_two_chips():
    kinds = [kind.lower() for chip in CHIPS.values() for kind in chip.kinds]
    accelerators = [name for chip in CHIPS.values() for name in chip.accelerators]
    assert len(set(kinds)) == len(kinds)
    assert len(set(accelerators)) == len(accelerators)


@pytest.mark.parametrize(
    ("topology", "usable"),
    [("v4:2x2x1", 30.75), ("v5e:2x2", 15.75), ("v5p:2x2x1", 95.74), ("v6e:2x2", 31.25), ("tpu7x:2x2x1", 94.75)],
)
def test_a_device_has_the_memory_that_the_compiler_gives_it(topology, usable):
    """As libtpu 0.0.42 says, of a program that needs more: "exceeds available HBM (15.75G)"."""
    assert capacity_of(topology) == chip_of(topology).per_device().hbm == pytest.approx(usable * GIB)


def test_memory_of_gpus_equals_the_compilers():
    folder = Path(chips.__file__).parent / "targets"
    described = {chip.target for chip in CHIPS.values() if chip.switch and chip.target}
    assert described == {path.stem for path in folder.glob("*.txtpb")}
    for name in described:
        (chip,) = (c for c in CHIPS.values() if c.target == name)
        text = (folder / f"{name}.txtpb").read_text()
        assert float(re.search(r"device_memory_size: (\d+)", text)[1]) == chip.hbm
        assert chip_of_kind(re.search(r'device_description_str: "(.*)"', text)[1]) is chip


def test_rings_of_a_slice():
    assert CHIPS["v5e"].rings((16, 16)) == (True, True)
    assert CHIPS["v6e"].rings((8, 16)) == (False, True)
    assert CHIPS["v5e"].rings((4, 4)) == (False, False)
    assert CHIPS["v5p"].rings((4, 4, 8)) == (True, True, True)
    assert CHIPS["v4"].rings((2, 2, 4)) == (False, False, False)


def test_a_rate_is_that_of_one_device_over_a_kind_of_link():
    tpu7x = CHIPS["tpu7x"]
    assert tpu7x.rate("x") == pytest.approx(9.5e10 / 2 * 0.8)  # two devices share the links of a chip
    assert tpu7x.rate("x", stride=4) == pytest.approx(9.5e10 / 2 * 0.8 / 4)
    assert tpu7x.rate("core") == pytest.approx(6 * 9.5e10 * 0.8)
    assert CHIPS["v5p"].rate("slice") == pytest.approx(6.2e9 * 0.8)
    assert CHIPS["h200"].rate("switch") == pytest.approx(4.5e11 * 0.83)


MADE_UP = Chip(
    "v99", ("TPU v99",), 1e15, None, 40 * GIB, 2e12, 1e11, 4, (8, 8), 1e10, None, slices=((2, 2), (4, 8), (8, 8)),
    accelerators=("v99pod",), counted=2,
)  # fmt: skip


def test_one_entry_makes_a_chip(monkeypatch):
    """Names, torus axes, memory and step time follow from the entry."""
    monkeypatch.setitem(CHIPS, "v99", MADE_UP)
    assert chip_of_kind("TPU v99") is MADE_UP
    assert capacity_of("v99:8x8") == 40 * GIB
    plan = mp.plan(
        lambda x, w: x @ w, jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),
        mesh="data=-1, model=8", topology="2x v99pod-128", layout="batch: data; embed: data",
        dims={"x": "batch embed", "w": "embed out"},
    )  # fmt: skip
    assert plan.chip is MADE_UP
    assert plan.sizes == {"data": 16, "model": 8}
    assert [(s.size, s.dim, s.wraps) for s in plan.torus["data"]] == [(2, "slice", False), (8, "y", True)]
    assert [(s.size, s.dim, s.wraps) for s in plan.torus["model"]] == [(8, "x", True)]
    (gather,) = plan.collectives
    volume = 4096 * 4096 * 2
    inside, between = volume * 7 / 8 / (2 * 1e11 * 0.8), volume / 8 / 2 / (1e10 * 0.8)
    assert gather.seconds == pytest.approx(inside + between)
    assert "v99" in str(plan)


def test_figures_are_positive_and_have_a_source():
    for chip in CHIPS.values():
        assert chip.source
        assert min(chip.flops, chip.hbm, chip.hbm_bandwidth, chip.link, chip.dcn) > 0
        assert 1e10 <= chip.host_link < chip.hbm_bandwidth / 10
        assert bool(chip.torus) != bool(chip.switch)
        assert bool(chip.slices) == bool(chip.torus)
        assert all(len(s) == len(chip.torus) for s in chip.slices)
        assert dataclasses.replace(chip).per_device().devices == 1
