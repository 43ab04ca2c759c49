"""The page of the coverage: each test that it names exists, and so does each page and section that it links to."""

import re

import blocks
import pytest

ROWS = [
    row.strip("| ").split(" | ")
    for row in (blocks.ROOT / "docs" / "coverage.md").read_text().splitlines()
    if row.startswith("| ") and not row.startswith("| method")
]


def anchor(heading):
    """The anchor that MyST gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_evidence_of_a_row_exists(row):
    method, about, evidence = row
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", evidence)
    pages = re.findall(r"\]\(([\w-]+\.md)(?:#([\w-]+))?\)", evidence)
    for path, name in tests:
        text = (blocks.ROOT / path).read_text()
        assert not name or re.search(rf"^\s*def {name}\(", text, re.MULTILINE), f"{path} has no {name}"
    for page, section in pages:
        headings = re.findall(r"^#+ (.*)$", (blocks.ROOT / "docs" / page).read_text(), re.MULTILINE)
        assert not section or section in map(anchor, headings), f"{page} has no section {section}"
    assert about.endswith(".")
    assert tests or pages or (evidence == "none" and "Not there." in about), f"{method} has no evidence"


def test_no_row_is_twice():
    assert len(ROWS) > 60
    assert len({row[0] for row in ROWS}) == len(ROWS)
