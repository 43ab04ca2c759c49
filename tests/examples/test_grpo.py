"""GRPO with a trainer and a sampler on other meshes: the rewards and losses of one device."""

import grpo
import jax
import numpy as np
import pytest

import meshpar as mp

SMALL = {"steps": 3, "prompts": 4, "group": 4}


@pytest.fixture(scope="module")
def one_device():
    return grpo.run(grpo.Place("data=1", grpo.FSDP), grpo.Place("model=1", grpo.TENSOR), **SMALL)


@pytest.mark.slow
def test_the_rewards_and_losses_are_those_of_one_device(one_device):
    trainer, sampler = mp.mesh("data=4", devices=jax.devices()[:4]), mp.mesh("model=4", devices=jax.devices()[4:])
    found = grpo.run(grpo.Place(trainer, grpo.FSDP), grpo.Place(sampler, grpo.TENSOR), **SMALL)
    assert found["rewards"] == one_device["rewards"]
    np.testing.assert_allclose(found["losses"], one_device["losses"], rtol=1e-3, atol=1e-6)
    assert min(map(abs, found["losses"])) > 1e-4
    assert found["move"].bytes_received > 0


@pytest.mark.slow
def test_the_rewards_rise(capsys):
    found = grpo.main(["--steps", "40", "--split"])
    assert np.mean(found["rewards"][-5:]) > 3 * found["rewards"][0]
    assert "each device sends" in capsys.readouterr().out
