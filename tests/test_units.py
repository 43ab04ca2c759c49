"""Ticks of axes of memory: one unit, equal steps, within the axis."""

import itertools

import pytest

from meshpar._src.units import memory_ticks


@pytest.mark.parametrize(
    ("top", "texts"),
    [
        (2.2 * 2**30, ["0", "0.5 GiB", "1 GiB", "1.5 GiB", "2 GiB"]),
        (0.95 * 2**30, ["0", "0.2 GiB", "0.4 GiB", "0.6 GiB", "0.8 GiB"]),
        (16.9 * 2**30, ["0", "5 GiB", "10 GiB", "15 GiB"]),
        (5000.0, ["0", "1 KiB", "2 KiB", "3 KiB", "4 KiB"]),
    ],
)
def test_ticks_of_an_axis_have_one_unit(top, texts):
    assert [text for _, text in memory_ticks(top)] == texts


@pytest.mark.parametrize("top", [10 ** (k / 7) for k in range(7, 90)])
def test_ticks_are_equal_steps_within_the_axis(top):
    sizes = [size for size, _ in memory_ticks(top)]
    assert 3 <= len(sizes) <= 7
    assert sizes[0] == 0
    assert sizes[-1] <= top < sizes[-1] + sizes[1] * (1 + 1e-9)
    assert all(b - a == pytest.approx(sizes[1]) for a, b in itertools.pairwise(sizes))
