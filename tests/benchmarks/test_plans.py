"""The comparison of the plans of two versions."""

import copy
import json

import jax
import jax.numpy as jnp
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


def matmul_plan():
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    return mp.plan(jnp.matmul, x, x, mesh="data=4", topology="v5e:2x2", layout="k: data", dims={"a": "m k", "b": "k n"})


def test_the_command_plans_programs_and_compares_two_files(tmp_path, capsys, monkeypatch):
    programs = [
        ("plain: matmul", matmul_plan),
        ("plain: unplanned", lambda: mp.plan(lambda: 1, layout="a: b", mesh="data=4")),
    ]
    monkeypatch.setattr(plans, "programs", lambda: iter(programs))
    path, other = tmp_path / "old.json", tmp_path / "new.json"
    assert plans.main(["--out", str(path), "--only", "plain"]) == 0
    old = json.loads(path.read_text())
    plan = old["plain: matmul"]
    assert plan["steps"]["Run"] == 1
    assert plan["bytes"] == sum(plan["collectives"].values()) > 0
    assert "axis" in old["plain: unplanned"]["error"]
    assert plans.main(["--compare", str(path), str(path)]) == 0
    assert "0 of 2 plans differ" in capsys.readouterr().out
    new = copy.deepcopy(old)
    new["plain: matmul"]["peak"] *= 2
    other.write_text(json.dumps(new))
    assert plans.main(["--compare", str(path), str(other)]) == 1
    assert "+100.000%" in capsys.readouterr().out
    assert plans.main(["--compare", str(path), str(other), "--only", "unplanned"]) == 0
