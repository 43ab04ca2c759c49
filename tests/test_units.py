"""Durations and counts as text."""

import pytest

from meshpar._src.units import format_count, format_duration, parse_duration


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
