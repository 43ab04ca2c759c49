"""Golden plans of real models on real slices: the same collectives and stored bytes as before, seconds and peaks within 0.5 %.

The tolerance is for constants of the cost model, whose change is not a change of plans.

``python benchmarks/agreement.py --golden`` writes them; the same command without ``--golden`` compares these plans with compilers.
"""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import pytest
from steps_text import parse_plan

from meshpar._src.plan.text import plan_steps


def load():
    path = Path(__file__).parents[2] / "benchmarks" / "agreement.py"
    spec = importlib.util.spec_from_file_location("benchmarks_agreement", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


agreement = load()
WRITTEN_BY_THIS_JAX = jax.__version__.startswith("0.10.")
"""Others trace other light ops in a router, which take a little time."""
BY_NAME = {t.name: t for t in agreement.TRIPLES if agreement.golden_path(t).exists()}
"""One for each model, layout and set of algorithms that a chip chooses."""
ROUND_TRIPS = {
    "llama3_8b fsdp+tensor+sequence v5e:16x16",
    "mixtral_8x7b fsdp+expert v6e:16x16",
    "resnet50 data+height v5p:2x2x4",
}
"""Plans whose steps are printed and parsed again: loops, exchanges, halos."""
assert set(BY_NAME) >= ROUND_TRIPS


@pytest.fixture(scope="module")
def plan_of():
    """The plan of a triple: of each model and size one is made by `mp.plan`, the others by `replan`, which does not trace again."""
    traced = {}

    def plan_of(triple):
        key = triple.model, *triple.changes.items()
        if key not in traced:
            traced[key] = triple.plan()
            return traced[key]
        return traced[key].replan(**triple.where)

    return plan_of


@pytest.mark.filterwarnings("ignore::meshpar.errors.IndivisibleWarning")  # the height of ResNet-50
@pytest.mark.filterwarnings("ignore::meshpar.errors.JoinWarning")
@pytest.mark.parametrize("name", BY_NAME)
def test_a_plan_is_as_it_was(name, plan_of):
    plan = plan_of(BY_NAME[name])
    golden = json.loads(agreement.golden_path(BY_NAME[name]).read_text())
    found = json.loads(json.dumps(agreement.summary(plan)))
    assert found.pop("collectives") == golden.pop("collectives")
    assert found.keys() == golden.keys()
    assert found["held"] == pytest.approx(golden["held"], rel=1e-6)
    assert found["memory"] == pytest.approx(golden["memory"], rel=0.005)
    assert found["seconds"] == pytest.approx(golden["seconds"], rel=0.005 if WRITTEN_BY_THIS_JAX else 0.05)
    if name in ROUND_TRIPS:
        steps = plan.steps_text()
        assert plan_steps(parse_plan(steps)) == steps


def test_every_golden_plan_is_of_a_triple():
    written = {path.name for path in agreement.GOLDEN.glob("*.json")}
    assert written == {agreement.golden_path(t).name for t in BY_NAME.values()}
    assert len(written) >= 20
