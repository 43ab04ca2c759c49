"""The order of packed documents: a permutation in which no device has much more than the mean, counted in the mask."""

import numpy as np
import pytest

import meshpar as mp

RNG = np.random.default_rng(0)


def packed(rows, seq, mean):
    """int [rows, seq]: documents of log-normal lengths, the last one cut."""
    out = np.empty((rows, seq), int)
    for row in out:
        lengths = np.clip(RNG.lognormal(np.log(mean), 1.2, 4 * seq // 16), 16, seq).astype(int)
        row[:] = np.repeat(np.arange(lengths.size), lengths)[:seq]
    return out


def loads(ids, order, devices, window=None):
    """Visible pairs of each device, by the definition of the mask."""
    at = np.arange(ids.shape[1])
    seen = (ids[:, :, None] == ids[:, None, :]) & (at[None, :] <= at[:, None])
    seen &= at[:, None] - at[None, :] < (window or ids.shape[1])
    return seen.sum((0, 2))[order].reshape(devices, -1).sum(1)


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("mean", [24, 200, 4096])
def test_no_device_has_much_more_than_the_mean(devices, mean):
    before = []
    for window in (None, 100):
        ids = packed(2, 768, mean)
        order = mp.data.balance(ids, devices, window=window)
        assert order.dtype == np.int32
        np.testing.assert_array_equal(np.sort(order), np.arange(768))
        cost = loads(ids, order, devices, window)
        assert cost.max() <= 1.1 * cost.mean()
        before.append(loads(ids, np.arange(768), devices, window))
    if mean == 4096:  # one document: the last device has nearly twice the mean
        assert before[0].max() > 1.4 * before[0].mean()


def test_ids_that_return_are_one_document():
    ids = np.array([[3, 3, 0, 0, 3, 3, 0, 0]])
    assert mp.data.balance(ids, 2, blocks=2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize(
    ("shape", "devices", "blocks"), [((2, 30), 2, 16), ((32,), 2, 16), ((2, 32), 0, 16), ((2, 32), 2, 0)]
)
def test_bad_input(shape, devices, blocks):
    with pytest.raises(mp.errors.MeshparError, match="do not divide into"):
        mp.data.balance(np.zeros(shape, int), devices, blocks=blocks)
