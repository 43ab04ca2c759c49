"""The whole steps of `benchmarks/device.py` at sizes for a CPU: variants agree, and peaks are planned."""

import functools

import device_steps
import numpy as np
import pytest

import resnet


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A block for each of two stages of the ResNet; steps are not timed over many runs."""
    monkeypatch.setattr(resnet, "STAGES", (1, 1))
    monkeypatch.setattr(device_steps, "STEPS_TIMED", 1)


@functools.cache
def plain_values(name):
    return device_steps.run(name, device_steps.PLAIN, tiny=True)["values"]


@pytest.mark.parametrize("name", ["decode, int8", "llama, 8-bit moments", "resnet"])
def test_variants_agree(name):
    """Variants give the values of plain `jax.jit`, but decoding by random codes of weights."""
    variants = [variant for other, variant in device_steps.names() if other == name]
    for variant in variants:
        if variant in (device_steps.PLAIN, "all kernels"):
            continue  # there are no kernels for a CPU
        got = device_steps.run(name, variant, tiny=True)
        if "int8" not in name:
            np.testing.assert_allclose(got["values"], plain_values(name.partition(",")[0]), rtol=1e-4)
        assert got.get("planned_peak", 1) > 0
        assert len(set(got["values"])) > 1  # the state changes
