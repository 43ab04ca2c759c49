"""The Linen example: it learns, and no layout changes the result."""

import numpy as np
import pytest
import train_classifier


@pytest.fixture(scope="module")
def run():
    return train_classifier.main(["--epochs", "3", "--seed", "1"])


@pytest.mark.slow
def test_it_learns_the_digits(run):
    assert len(run.losses) == 3 * 22
    assert run.losses[-1] < 0.1 * run.losses[0]
    assert run.accuracy > 0.95


@pytest.mark.slow
def test_another_layout_gives_the_same_losses(run):
    other = train_classifier.main(["--epochs", "1", "--seed", "1", "--layout", "batch: data", "--mesh", "data=8"])
    # Adam makes the differences of rounding grow, so not too many steps are compared.
    np.testing.assert_allclose(other.losses[:12], run.losses[:12], rtol=1e-4)
