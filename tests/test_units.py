"""Ticks of axes of memory: one unit, equal steps, within the axis; durations and counts as text."""

import itertools

import pytest

from meshpar._src.units import format_count, format_duration, memory_ticks, parse_duration


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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("40000h", 1.44e8),
        ("2 d", 172800),
        ("10m", 600),
        ("10min", 600),
        ("1.5s", 1.5),
        ("1e3s", 1000),
        (90, 90),
        (0.5, 0.5),
    ],
)
def test_a_duration_is_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "3 weeks", "-1s", "1h30m", "inf", float("nan"), -2])
def test_text_that_is_no_duration(text):
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration(text)


def test_durations_and_counts_as_text():
    durations = [format_duration(s) for s in (0.02, 119.0, 600, 7200, 90000, 172800, 1e8)]
    assert durations == ["20 ms", "119 s", "10 min", "2.0 h", "25.0 h", "2.0 d", "1,157.4 d"]
    assert [format_count(n) for n in (512, 524288, 1.05e6, 15e12)] == ["512", "524,288", "1.05 M", "15 T"]
