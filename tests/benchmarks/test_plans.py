"""The comparison of the plans of two versions."""

import copy
import json

import plans
import pytest

import meshpar as mp

PLAN = {
    "seconds": 0.5,
    "peak": 1000,
    "bytes": 8.0,
    "lowering": "shard_map",
    "steps": {"Run": 3, "Reshard": 1},
    "collectives": {"all-gather over data, native": 8.0},
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"seconds": 0.5 * (1 + 1e-12)}, []),
        ({"seconds": 0.51}, [("seconds", "0.5", "0.51", "+2.000%")]),
        ({"seconds": None}, [("seconds", "0.5", "", "")]),
        ({"peak": 999}, [("peak", "1000", "999", "-0.100%")]),
        ({"lowering": "jit"}, [("lowering", "shard_map", "jit", "")]),
        ({"steps": {"Run": 3, "Reduce": 2}}, [("steps: Reshard", "1", "", ""), ("steps: Reduce", "", "2", "")]),
        (
            {"collectives": {"all-reduce over data, native": 8.0}},
            [
                ("collectives: all-gather over data, native", "8", "", ""),
                ("collectives: all-reduce over data, native", "", "8", ""),
            ],
        ),
    ],
)
def test_every_figure_that_differs_is_a_difference(change, expected):
    old = {"a": PLAN, "b": PLAN}
    found = plans.differences(old, {"a": PLAN, "b": {**PLAN, **change}})
    assert [d.cells() for d in found] == [("b", *cells) for cells in expected]


def test_a_plan_that_fails_in_one_version_differs_in_all_figures():
    found = plans.differences({"a": PLAN}, {"a": {"error": "no room"}})
    assert {(d.figure, d.new) for d in found} == {(f, None) for f in plans.flat(PLAN)} | {("error", "no room")}


def test_a_program_of_one_version_is_a_difference():
    assert plans.differences({"a": PLAN, "b": PLAN}, {"b": PLAN, "c": PLAN}) == [
        ("a", "program", "planned", None),
        ("c", "program", None, "planned"),
    ]


def test_the_command_plans_real_programs_and_compares_two_files(tmp_path, capsys):
    path, other = tmp_path / "old.json", tmp_path / "new.json"
    assert plans.main(["--out", str(path), "--only", "resnet50 data v5e"]) == 0
    (old,) = json.loads(path.read_text()).items()
    assert old[0] == "agreement: resnet50 data v5e:4x4"
    assert old[1]["bytes"] == pytest.approx(sum(old[1]["collectives"].values()))
    assert plans.main(["--compare", str(path), str(path)]) == 0
    assert "0 of 1 plans differ" in capsys.readouterr().out
    new = copy.deepcopy(old[1])
    new["peak"] *= 2
    other.write_text(json.dumps({old[0]: new}))
    assert plans.main(["--compare", str(path), str(other)]) == 1
    assert "+100.000%" in capsys.readouterr().out
    assert plans.main(["--compare", str(path), str(other), "--only", "llama"]) == 0


def test_a_program_that_cannot_be_planned_has_its_error():
    def refused():
        raise mp.errors.UnsupportedError("no rule\nmore")

    assert plans.summary(refused) == {"error": "no rule"}


def test_programs_have_names_of_their_own():
    names = [name for name, _ in plans.programs()]
    assert len(names) == len(set(names)) > 100


@pytest.mark.parametrize("arguments", [[], ["--compare", "one"], ["--out", "a", "--compare", "a", "b"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        plans.main(arguments)
    assert "usage" in capsys.readouterr().err
