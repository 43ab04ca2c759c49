"""The long-context example, small: three strategies with the numbers of one device, and plans that say how they differ."""

import long_context
import numpy as np
import pytest


@pytest.mark.slow
def test_three_strategies_learn_as_one_device_does(capsys):
    argv = "--layers=1 --steps=3 --batch=2 --seq=64 --lengths 32768".split()
    result = long_context.main(argv)
    alone = result.losses["one device"]
    assert alone[0] == pytest.approx(np.log(256), rel=0.05)
    assert alone[-1] < alone[0]
    for strategy in long_context.STRATEGIES:
        np.testing.assert_allclose(result.losses[strategy], alone, rtol=1e-3)
    assert result.difference < 1e-5
    assert [row.strategy for row in result.rows] == list(long_context.STRATEGIES)
    assert "equal: logits differ by at most" in capsys.readouterr().out


def test_the_plan_of_a_million_tokens():
    """Bytes of attention by hand: 32 layers, one sequence of S tokens on 32 devices, bfloat16; forward twice (remat), back once."""
    seq, devices, layers = 1 << 20, 32, 32
    rows = {s: long_context.plan_row(seq, s) for s in long_context.STRATEGIES}
    keys = seq // devices * 8 * 128 * 2  # elements of K and V on a device
    sent = layers * (devices - 1) * keys * (2 * 3 + 4)  # three times in bfloat16, gradients in float32
    assert rows["gathered"].attention_sent == pytest.approx(sent, rel=1e-6)
    # a ring swaps half of the queries and results, and of gradients of results, queries; log-sum-exps and sums in float32
    half = seq // devices // 2 * 32
    swapped = layers * half * ((2 * 2 + 3) * 128 * 2 + (2 * 1 + 2) * 4)
    assert rows["ring"].attention_sent == pytest.approx(sent + swapped, rel=1e-6)
    assert rows["ulysses"].attention_sent < sent / 4
    whole = seq * 8 * 128 * 2 * (2 + 4)
    assert rows["gathered"].attention_memory > whole
    assert rows["gathered"].peak - rows["ring"].peak > whole / 2
    exchanged = 2 * half * 128 * 2  # half of the queries of the mirrored device, and their results
    assert rows["ring"].attention_memory <= whole / 3 + exchanged
