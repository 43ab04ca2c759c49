"""The page of the coverage: each test that it names exists. Of all pages: so do the pages and sections that they link to."""

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


@pytest.mark.parametrize("page", [blocks.README, *blocks.PAGES], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_lead_to_files_and_sections(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, section = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if section and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert section in map(anchor, headings), link
