"""Eight CPU devices for every test, and the meshes that tests share."""

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # before anything touches a device

import meshpar as mp  # noqa: E402


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    """The mesh of most tests: ``data=4, model=2``."""
    return mp.mesh("data=4, model=2")


@pytest.fixture(autouse=True)
def same_draws(request):
    """A test draws the same numbers whichever tests ran before it."""
    if hasattr(request.module, "RNG"):
        request.module.RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state
