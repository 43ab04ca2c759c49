"""The plan of every example target fits a terminal of 100 columns, and nothing of it is cut off."""

import sys

import pytest

import meshpar as mp
from meshpar._src.entry.cli_target import load_target
from meshpar._src.report.document import plain

PLANS = [
    ("llama.py:llama3_8b", "v5p:4x4x8", "data=32, model=4", "sequence_parallel"),
    ("llama.py:tiny", None, "data=4, model=2", "fsdp_tensor"),
    ("deepseek.py:tiny", None, "data=4, model=2", "fsdp+expert"),
]


@pytest.mark.parametrize(("target", "topology", "mesh", "layout"), PLANS, ids=[p[0] for p in PLANS])
def test_a_plan_fits(target, topology, mesh, layout, monkeypatch, pytestconfig):
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = load_target(str(pytestconfig.rootpath / "examples" / target))
    how = {"mesh": mesh, "topology": topology, "layout": found.layouts[layout], "dims": found.dims}
    plan = mp.plan(found.step, *found.args, **how)
    narrow, wide = plain(plan, 100), plain(plan, 10_000)
    assert max(map(len, narrow.splitlines())) <= 100
    assert sorted("".join(narrow.split())) == sorted("".join(wide.split()))
