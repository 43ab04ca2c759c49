"""Code lines per package stay within the budgets of pyproject.toml: growth is a change of that table."""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["meshpar"]["budget"]


def code_lines(text: str) -> int:
    """Lines with code: no docstrings, comments or blank lines."""
    docstrings, strings = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.JoinedStr | ast.Constant) and node.end_lineno != node.lineno:
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    return len((lines | strings) - docstrings)


def packages() -> dict[str, list[Path]]:
    """Package, from the root of the repository → its files. The files of a folder with packages are a package of their own."""
    found: dict[str, list[Path]] = {}
    for folder in (ROOT / "meshpar", ROOT / "meshpar" / "_src", ROOT / "meshpar_kernels"):
        found[str(folder.relative_to(ROOT))] = sorted(folder.glob("*.py"))
        for package in sorted(p.parent for p in folder.glob("*/__init__.py") if p.parent.name != "_src"):
            found[str(package.relative_to(ROOT))] = sorted(package.rglob("*.py"))
    return found


def test_lines_of_code():
    code = ["# comment", "x = 1  # one", "", "", "def f():", '    """Two', '    lines."""', '    return """a', 'b"""']
    assert code_lines("\n".join(['"""Docstring."""', *code])) == 4


def test_every_package_is_within_its_budget():
    lines = {package: sum(code_lines(path.read_text()) for path in paths) for package, paths in packages().items()}
    assert set(BUDGET) == set(lines)
    over = {package: (n, BUDGET[package]) for package, n in lines.items() if n > BUDGET[package]}
    assert not over, f"package → (its code lines, its budget): {over}"
