"""Code lines per package stay within the budgets of pyproject.toml: growth is a change of that table."""

import ast
import functools
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGET: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["meshpar"]["budget"]


def code_lines(text: str) -> int:
    """Lines with code: no docstrings, comments or blank lines."""
    tree = ast.parse(text)
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    return len((lines | strings) - docstrings)


@functools.cache
def packages() -> dict[str, list[Path]]:
    """Package, from the root of the repository → its files. The files of a folder with packages are a package of their own."""
    found: dict[str, list[Path]] = {}
    for folder in (ROOT / "meshpar", ROOT / "meshpar" / "_src", ROOT / "meshpar_kernels"):
        found[str(folder.relative_to(ROOT))] = sorted(folder.glob("*.py"))
        for package in sorted(p.parent for p in folder.glob("*/__init__.py") if p.parent.name != "_src"):
            found[str(package.relative_to(ROOT))] = sorted(package.rglob("*.py"))
    return found


def test_lines_of_code():
    text = (
        '"""Docstring."""\n\n# comment\nx = 1  # one\n\n\ndef f():\n    """Two\n    lines."""\n    return """a\nb"""\n'
    )
    assert code_lines(text) == 4


def test_every_package_has_a_budget():
    assert set(BUDGET) == set(packages())


@pytest.mark.parametrize("package", packages())
def test_a_package_is_within_its_budget(package: str):
    lines = sum(code_lines(path.read_text()) for path in packages()[package])
    assert lines <= BUDGET[package], f"{package} has {lines} code lines, and its budget is {BUDGET[package]}"
