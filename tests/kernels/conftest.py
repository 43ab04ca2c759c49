"""Let the tests of this folder import its helpers."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def same_shared_draws():
    """Reset the random numbers that the modules of this folder share before every test."""
    import kernel_cases

    kernel_cases.RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state
