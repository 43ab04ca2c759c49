"""The reports as a terminal shows them, at 80, 100 and 160 columns.

``python tests/helpers/screens.py`` writes the stored screens.
"""

import re

import jax
import pytest
import screens

import meshpar as mp


@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="others trace and compile other programs")
@pytest.mark.filterwarnings("ignore::meshpar.errors.ReplicatedWarning")
@pytest.mark.parametrize("name", [*screens.DOCUMENTS, *screens.HELPS])
def test_a_screen_is_as_stored(name):
    mp.virtual_devices(8)
    found = screens.screens(name)
    assert {w: screens.path_of(name, w).read_text(encoding="utf8") for w in screens.WIDTHS} == found


@pytest.mark.parametrize("path", sorted(screens.FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_no_line_is_wider_than_the_screen_and_no_word_is_cut(path):
    text, width = path.read_text(encoding="utf8"), int(path.stem.rpartition("-")[2])
    for line in text.splitlines():
        assert len(line) <= width
        assert line == line.rstrip()
        assert line.strip() != "·"
    assert not re.search(r"^(?:er|ce|catter)$", text, re.MULTILINE)
