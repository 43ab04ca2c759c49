"""The colours of pages can be read: text on its ground, and ground on the colours of axes, at 4.5 to 1 (WCAG 2, AA)."""

import re
from importlib import resources

import pytest

from meshpar._src.report.colours import PALETTE, ROLE_PALETTE

CSS = resources.files("meshpar._src.report").joinpath("page.css").read_text("utf8")
BLOCKS = re.findall(r"\.mp \{ (--ink.*?)\}", CSS, re.DOTALL)[:2]
LIGHT, DARK = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in BLOCKS)


def luminance(colour):
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_roles_of_memory_have_one_palette_in_pages_and_in_the_terminal():
    assert [LIGHT[f"m{k}"] for k in range(len(ROLE_PALETTE))] == list(ROLE_PALETTE)
    assert len({*ROLE_PALETTE, *PALETTE}) == len(ROLE_PALETTE) + len(PALETTE)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_passes_have_readable_labels(colours):
    """The first pass in the ink of the page, the others in its ground."""
    pairs = [("p0", "ink"), ("p1", "page"), ("p2", "page")]
    assert min(contrast(colours[a], colours[b]) for a, b in pairs) >= 4.5
