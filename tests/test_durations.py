"""The mark ``slow`` comes from recorded durations."""

import ast
import json

import durations
import pytest

RECORDED = {"a.py::test_one": 7.0, "a.py::test_two": {"x": 9.0, "y[1]": 6.0}}


@pytest.mark.parametrize(
    ("nodeid", "slow"),
    [
        ("a.py::test_one", True),
        ("a.py::test_one[x]", True),  # as all cases are
        ("a.py::test_two[x]", True),
        ("a.py::test_two[y[1]]", True),
        ("a.py::test_two[z]", False),
        ("a.py::test_three", False),
    ],
)
def test_a_recorded_case_is_slow(nodeid, slow):
    assert durations.is_slow(nodeid, RECORDED) is slow
    assert not durations.is_slow(nodeid, RECORDED, 9.5)


def test_a_run_replaces_the_cases_that_it_ran(tmp_path, monkeypatch):
    file = tmp_path / "durations.json"
    file.write_text(json.dumps(RECORDED))
    monkeypatch.setattr(durations, "FILE", file)
    recorder = durations.Recorder()
    recorder.measured |= {"a.py::test_one": 0.4, "a.py::test_two[x]": 0.9, "a.py::test_two[z]": 1.0, "b.py::test": 8.25}
    recorder.pytest_sessionfinish()
    assert durations.load() == {"a.py::test_two": {"y[1]": 6.0, "z": 1.0}, "b.py::test": 8.2}


def test_one_case_of_each_test_is_left():
    cases = {f"a.py::test_{name}[{case}]" for name in "abcdefgh" for case in range(2)}
    left = cases - durations.all_but_one_case(sorted(cases), {})
    assert [x.partition("[")[0] for x in sorted(left)] == [f"a.py::test_{name}" for name in "abcdefgh"]
    assert {x[-2] for x in left} == {"0", "1"}
    assert durations.all_but_one_case(["a.py::test"], {}) == set()
    seconds = {"a.py::test_one": {"0": 3.0}, "a.py::test_two": {"0": 4.0, "1": 2.0, "2": 3.0}}
    some = [f"a.py::test_one[{k}]" for k in range(2)] + [f"a.py::test_two[{k}]" for k in range(3)]
    assert set(some) - durations.all_but_one_case(some, seconds) == {"a.py::test_one[1]", "a.py::test_two[1]"}


def test_the_recorded_tests_exist():
    root = durations.FILE.parents[1]
    for test in durations.load():
        file, *_, name = test.split("::")
        defined = {x.name for x in ast.walk(ast.parse((root / file).read_text())) if isinstance(x, ast.FunctionDef)}
        assert name in defined, test
