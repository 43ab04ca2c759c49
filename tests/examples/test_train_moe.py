"""The MoE example, small: it learns, balances, drops the reported tokens, and no layout changes a loss."""

import numpy as np
import pytest
import train_moe

TINY = "--layers=1 --experts=8 --steps=6 --batch=8 --seq=32 --eval-batches=1".split()


@pytest.fixture(scope="module")
def run():
    return train_moe.main(TINY)


@pytest.mark.slow
def test_it_learns_and_drops_nothing(run):
    assert run.losses[0] == pytest.approx(np.log(256), rel=0.05)
    assert run.losses[-1] < run.losses[0]
    assert run.dropped == [0] * 6
    assert run.load.shape == (1, 8)
    assert (run.load.sum(-1) == 8 * 32 * 2).all()


@pytest.mark.slow
def test_another_layout_and_lowering_have_the_same_losses_and_loads(run):
    other = train_moe.main([*TINY, "--layout", "model", "--lowering", "shard_map"])
    np.testing.assert_allclose(other.losses, run.losses, rtol=1e-4)
    np.testing.assert_array_equal(other.load, run.load)
    np.testing.assert_allclose(other.held_out_bits_per_byte, run.held_out_bits_per_byte, rtol=1e-4)


def test_the_picture_is_a_bar_an_expert():
    assert train_moe.picture(np.array([[8, 8, 8, 8], [16, 0, 1, 100]])) == "▄▄▄▄ │ ▃ ▁█"
