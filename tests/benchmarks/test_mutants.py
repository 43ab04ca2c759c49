"""The mutation script: what it edits, and that it tells a mutant that a test finds from one that none does."""

import ast
import difflib
import sys

import mutants
import pytest

CODE = '''
"""A module: 1 < 2."""
LIMIT = 3


def clipped(x: "int < 4", low=0, flag=True):
    """Not `x > 1`."""
    if x is None or (x < low and not flag):
        raise ValueError(f"{x} < {low}" if x == 1 else "no")
    return -max(x, low) if x in (LIMIT,) else min(x + 1, LIMIT)
'''
TESTS = """
from meshpar.small import clipped

def test_clipped():
    assert [clipped(x) for x in (1, 2, 3, 7)] == [2, 3, -3, 3]
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    for name, text in {"meshpar/small.py": CODE, "tests/test_small.py": TESTS, "pyproject.toml": ""}.items():
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "COPIED", ("meshpar", "tests", "pyproject.toml"))
    return tmp_path


def test_each_edit_changes_one_expression_and_no_text(root):
    found = list(mutants.edits(root / "meshpar/small.py"))
    assert len({(e.start, e.end, e.new) for e in found}) == len(found)
    plain = ast.dump(ast.parse(CODE))
    for edit in found:
        assert ast.dump(ast.parse(edit.applied())) != plain
        lines = [d for d in difflib.ndiff(CODE.splitlines(), edit.applied().splitlines()) if d[0] in "+-"]
        assert len(lines) == 2
        assert not any(word in lines[0] for word in ("Not `x", "A module", "raise"))
    edited = " ".join(str(e) for e in found)
    for change in (
        "((x) <= (low))",
        "((x) is not (None))",
        "-> min",
        "-> max",
        "-> False",
        "(3 + 1)",
        "((x) - (1))",
        "not in",
    ):
        assert change in edited, change
    assert "int" not in edited


def test_mutants_are_found_and_survive(root, monkeypatch, capsys):
    path = root / "meshpar/small.py"
    assert mutants.mirrored(path) == "tests/test_small.py"
    found, survived = "((x) - (1))", "((x) is not (None))"
    chosen = [e for e in mutants.edits(path) if e.new in (found, survived)]
    monkeypatch.setattr(mutants, "edits", lambda path: iter(chosen))
    monkeypatch.setattr(sys, "argv", ["mutants.py", str(path)])
    mutants.main()
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if found in line} == {"found"}
    assert lines[-1].split()[:2] == ["meshpar/small.py", f"{sum('found ' in x for x in lines[1:-3])}/{len(chosen)}"]
    assert path.read_text() == CODE


def test_tests_that_fail_without_a_mutant_are_refused(root, monkeypatch):
    (root / "tests/test_small.py").write_text("def test_nothing():\n    assert False\n")
    monkeypatch.setattr(sys, "argv", ["mutants.py", str(root / "meshpar/small.py")])
    with pytest.raises(SystemExit, match="without any mutant: found"):
        mutants.main()
