"""The mutation test: its edits, and that it distinguishes mutants that a test finds from others."""

import ast
import difflib
import importlib
import json
import sys
from pathlib import Path

import mutants
import proof_programs
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

def test_inner():
    assert clipped(1) == 2

def test_clipped():
    assert [clipped(x) for x in (1, 2, 3, 7)] == [2, 3, -3, 3]
"""
OTHERS = """
import subprocess
import sys
from pathlib import Path

import pytest

def test_refused():
    from meshpar.small import clipped
    with pytest.raises(ValueError):
        clipped(None)

def test_process():
    subprocess.run([sys.executable, "-c", "from meshpar.small import clipped; assert clipped(2) == 3"], check=True)
"""


PYPROJECT = '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\nmarkers = ["slow"]\n'


@pytest.fixture
def root(tmp_path, monkeypatch):
    files = {
        "meshpar/__init__.py": "",
        "meshpar/small.py": CODE,
        "tests/test_small.py": TESTS,
        "tests/other/test_more.py": OTHERS,
        "pyproject.toml": PYPROJECT,
    }
    for name, text in files.items():
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "COPIED", ("meshpar", "tests", "pyproject.toml"))
    monkeypatch.setattr(mutants, "EQUIVALENT", tmp_path / "equivalent.json")
    monkeypatch.setattr(mutants, "PRELOADED", ("pytest", "coverage"))
    (tmp_path / "equivalent.json").write_text("[]")
    return tmp_path


def run(monkeypatch, *arguments):
    """Run the script on ``meshpar/small.py``."""
    shared = ["--recorded", str(mutants.ROOT / "recorded")]
    path = [] if "--record" in arguments else [str(mutants.ROOT / "meshpar/small.py")]
    monkeypatch.setattr(sys, "argv", ["mutants.py", *path, *shared, *map(str, arguments)])
    mutants.main()


def test_each_edit_changes_one_expression_and_no_text(root):
    edits = list(mutants.edits(root / "meshpar/small.py"))
    assert len({(e.start, e.end, e.new) for e in edits}) == len(edits)
    plain = ast.dump(ast.parse(CODE))
    for edit in edits:
        assert ast.dump(ast.parse(edit.applied())) != plain
        lines = [d for d in difflib.ndiff(CODE.splitlines(), edit.applied().splitlines()) if d[0] in "+-"]
        assert len(lines) == 2
        assert not any(word in lines[0] for word in ("Not `x", "A module", "raise"))
    edited = " ".join(str(e) for e in edits)
    some = ("((x) <= (low))", "((x) is not (None))", "-> min", "-> max", "-> False", "(3 + 1)", "((x) - (1))", "not in")
    assert [change for change in some if change not in edited] == []
    assert "int" not in edited


FOUND, NOT_FOUND = "((x) - (1))", "False"


@pytest.fixture
def two_mutants(root, monkeypatch):
    """Two mutants, one of which the tests find; the lines of the tests are recorded."""
    run(monkeypatch, "--record")
    chosen = [e for e in mutants.edits(root / "meshpar/small.py") if e.new in (FOUND, NOT_FOUND)]
    monkeypatch.setattr(mutants, "edits", lambda path: iter(chosen))
    return chosen


def test_mutants_that_tests_find_and_others(two_mutants, root, monkeypatch, capsys):
    assert mutants.mirrored(root / "meshpar/small.py") == [["tests/test_small.py"]]
    log = root / "log.jsonl"
    run(monkeypatch, "--log", log)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if FOUND in line] == ["found"]
    assert [line.split()[:2] for line in lines if NOT_FOUND in line] == [["not", "found"]]
    assert f"| meshpar/small.py | {len(two_mutants)} | 1 | 0 | 0 | 1 |" in lines
    assert lines[-1] == "1 of 2 mutants found (50%), seed 0"
    assert (root / "meshpar/small.py").read_text() == CODE
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    failed = {line["key"][2]: line["failed"] for line in logged}
    assert failed.pop("True -> False") is None
    assert failed.popitem()[1] in ("tests/test_small.py::test_inner", "tests/test_small.py::test_clipped")
    listed = [dict(zip(("file", "line", "change"), e.key, strict=True)) for e in two_mutants if e.new == NOT_FOUND]
    mutants.EQUIVALENT.write_text(json.dumps(listed))
    run(monkeypatch, "--log", log)
    assert len(log.read_text().splitlines()) == 2  # none ran once more
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 mutants found (100%), seed 0"


def test_listed_mutants_exist_and_have_a_reason():
    for entry in json.loads(mutants.EQUIVALENT.read_text()):
        key = entry["file"], entry["line"], entry["change"]
        assert key in {e.key for e in mutants.edits(mutants.ROOT / entry["file"])}, entry
        assert len(entry["reason"]) > 10, entry


def test_mirrored_tests_exist():
    for name in mutants.PACKAGES:
        path = mutants.SOURCE / name
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            stages = mutants.mirrored(file)
            assert stages, file
            assert all((mutants.ROOT / test).exists() for tests in stages for test in tests)


def test_functions_have_the_code_of_another_text(tmp_path, monkeypatch):
    """Also a method, and a function that another one has made."""
    text = """
class Shape:
    def sides(self):
        return 3

def adds(n):
    return lambda x: x + n * 1

one = adds(1)
"""
    (tmp_path / "shapes_of_a_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("shapes_of_a_test")
    shape, adds = module.Shape(), module.adds
    assert (shape.sides(), module.one(5), adds(2)(5)) == (3, 6, 7)
    proof_programs.replace_code(Path(module.__file__), text.replace("return 3", "return 4").replace("n * 1", "n * 2"))
    assert (shape.sides(), module.one(5), adds(2)(5)) == (4, 7, 9)


def test_the_outcome_of_a_mutant_is_the_worst_of_its_programs():
    same, error, proven = ("same programs", ""), ("error", ""), ("proven, same results", "")
    refused, unknown, missed = ("refused", ""), ("not verified", ""), ("proven, other results", "")
    assert mutants.proof_outcome({"a": same, "b": same}) == "same programs"
    assert mutants.proof_outcome({"a": error, "b": error}) == "error"
    assert mutants.proof_outcome({"a": same, "b": proven, "c": error}) == "proven, same results"
    assert mutants.proof_outcome({"a": unknown, "b": proven}) == "not verified"
    assert mutants.proof_outcome({"a": refused, "b": unknown, "c": same}) == "refused"
    assert mutants.proof_outcome({"a": refused, "b": missed, "c": unknown}) == "proven, other results"
