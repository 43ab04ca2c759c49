"""The MoE example, small: it learns, balances, and drops the reported tokens."""

import numpy as np
import pytest
import train_moe

TINY = "--layers=1 --experts=8 --steps=6 --batch=8 --seq=32 --eval-batches=1".split()


@pytest.mark.slow
def test_it_learns_and_drops_nothing():
    run = train_moe.main(TINY)
    assert run.losses[0] == pytest.approx(np.log(256), rel=0.05)
    assert run.losses[-1] < run.losses[0]
    assert run.dropped == [0] * 6
    assert run.load.shape == (1, 8)
    assert (run.load.sum(-1) == 8 * 32 * 2).all()


def test_the_picture_is_a_bar_an_expert():
    assert train_moe.picture(np.array([[8, 8, 8, 8], [16, 0, 1, 100]])) == "▄▄▄▄ │ ▃ ▁█"
