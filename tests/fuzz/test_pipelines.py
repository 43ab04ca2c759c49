"""Random pipelines equal the unsharded run, under both lowerings and all schedules; ``benchmarks/fuzz.py`` draws more."""

import random

import pipelines
import pytest
import run

from meshpar._src.plan.verify import verify
from meshpar._src.program.pipeline import SCHEDULES

CASES = 12


@pytest.mark.parametrize("seed", range(CASES))
def test_sharded_is_unsharded(seed):
    case = pipelines.make_staged_case(random.Random(seed))
    found = run.differences(case, ("shard_map", "jit")[seed % 2], run.unsharded(case))
    assert not found, f"\n{case}\n" + "\n".join(map(str, found))


def test_every_layout_makes_a_pipeline_and_a_well_formed_plan():
    cases = [pipelines.make_staged_case(random.Random(seed)) for seed in range(8)]
    for case in cases:
        plan = run.planned(case)
        assert plan.pipeline is not None, case
        assert plan.pipeline.schedule.name == case.schedule
        verify(plan)
    assert {case.schedule for case in cases} == set(SCHEDULES), "all schedules are drawn"
