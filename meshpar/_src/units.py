"""Text of quantities: bytes sent in decimal units, memory in binary units, durations.

Memory is counted as compilers and chip tables count it (GiB), and traffic as link rates are given (GB).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping


def format_bytes(n: float) -> str:
    """Bytes of traffic in decimal units: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError


def format_memory(n: float) -> str:
    """Bytes of memory in binary units: ``15.75 GiB``, ``4.00 MiB``, ``2.5 KiB``, ``96 B``; from a tenth of a GiB on in GiB."""
    for unit, size, digits in (("TiB", 2**40, 2), ("GiB", 2**30, 2), ("MiB", 2**20, 2), ("KiB", 2**10, 1)):
        if n >= (0.1 * size if unit == "GiB" else size):
            return f"{n / size:.{digits}f} {unit}"
    return f"{n:.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration: ``1.23 s``, ``45.6 ms``, ``7.89 µs``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        n = seconds * scale
        if abs(n) >= 1 or unit == "µs":
            return f"{n:.3g} {unit}" if abs(n) < 100 else f"{n:.0f} {unit}"
    raise AssertionError


_DURATIONS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "": 1.0}
"""Suffix of a duration → its seconds."""


def format_duration(seconds: float) -> str:
    """The duration of a run or of its parts: ``21.3 d``, ``3.2 h``, ``12 min``; below two minutes as :func:`format_seconds`."""
    for unit, digits in (("d", 1), ("h", 1), ("min", 0)):
        if seconds >= 2 * _DURATIONS[unit]:
            return f"{seconds / _DURATIONS[unit]:,.{digits}f} {unit}"
    return format_seconds(seconds)


def parse_duration(value: float | str) -> float:
    """Seconds of ``"40000h"``, ``"2d"``, ``"10m"``, ``"90s"``, or of a number of seconds.

    Raises:
      ValueError: the text is no duration, or the duration is negative or infinite.
    """
    found = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*", str(value))
    seconds = float(found[1]) * _DURATIONS.get(found[2], math.nan) if found else math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{value!r} is no duration: a number with d, h, m or s")
    return seconds


def format_count(n: float) -> str:
    """A number of tokens, steps or examples: ``15 T``, ``1.05 M``, ``512``."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:,.0f}"


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Axes and sizes as :func:`meshpar.mesh` reads them: ``{"data": 4, "model": 2}`` → ``"data=4, model=2"``."""
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def with_article(chip: str) -> str:
    """``"a v5p"``, ``"an a100"``, ``"an h100"``."""
    return f"an {chip}" if chip[:1] in "ah" else f"a {chip}"
