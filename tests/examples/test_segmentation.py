"""The segmentation network of the examples: its size, upsampling against NumPy, halos in its plan, equal runs under two layouts."""

import numpy as np
import pytest

import meshpar as mp
import segmentation


def test_upsampling_is_bilinear_interpolation_of_pixel_centres():
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 2)).astype(np.float32)
    got = np.asarray(segmentation.upsampled(x))
    assert got.shape == (2, 24, 40, 2)
    rows, columns = ((np.arange(8 * n) + 0.5) / 8 - 0.5 for n in (3, 5))
    inside = slice(4, -4)  # elsewhere an image ends
    for c in range(2):
        along = np.stack([np.interp(columns, np.arange(5), row) for row in x[0, :, :, c]])
        expected = np.stack([np.interp(rows, np.arange(3), column) for column in along.T]).T
        np.testing.assert_allclose(got[0, inside, inside, c], expected[inside, inside], atol=1e-5)


@pytest.mark.slow
def test_a_sharded_height_exchanges_halos_and_gathers_no_features():
    step, args, dims = segmentation.cityscapes()
    layout = segmentation.LAYOUTS["data+height"]
    plan = mp.plan(step, *args, dims=dims, mesh="data=4, model=4", topology="v5e:4x4", layout=layout)
    assert {c.op for c in plan.collectives if c.total_bytes > 1e5} == {"collective-permute", "all-reduce"}
    stem = next(c for c in plan.collectives if c.op == "collective-permute")
    assert stem.bytes <= 4 * 3 * 2048 * 3 * 2  # at most three rows of four images, bfloat16
