"""The table of environment variables in docs/cli.md: those that the packages name, each with its value."""

import re

import blocks

NAME = re.compile(r"MESHPAR_[A-Z_]+")


def test_every_variable_of_the_packages_is_in_the_table():
    sources = [path for package in ("meshpar", "meshpar_kernels") for path in (blocks.ROOT / package).rglob("*.py")]
    page = (blocks.ROOT / "docs" / "cli.md").read_text()
    rows = [row.split("|")[1:3] for row in page.splitlines() if row.startswith("| `MESHPAR_")]
    listed = [name for names, _ in rows for name in NAME.findall(names)]
    assert sorted(listed) == sorted({name for path in sources for name in NAME.findall(path.read_text("utf8"))})
    assert all(value.strip() for _, value in rows)
