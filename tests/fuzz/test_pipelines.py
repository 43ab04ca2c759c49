"""Random pipelines equal the unsharded run, under both lowerings and all schedules; ``benchmarks/fuzz.py`` draws more."""

import random

import pipelines
import pytest
import run

from meshpar._src.plan.verify import verify
from meshpar._src.program.pipeline import SCHEDULES

SEEDS = (2, 3, 7, 10)
"""A program of every schedule, each of which is compiled within seconds."""


@pytest.mark.parametrize("seed", SEEDS)
def test_sharded_is_unsharded(seed):
    case = pipelines.make_staged_case(random.Random(seed))
    found = run.differences(case, ("shard_map", "jit")[seed % 2], run.unsharded(case))
    assert not found, f"\n{case}\n" + "\n".join(map(str, found))


def test_every_schedule_makes_a_pipeline_and_a_well_formed_plan():
    """The shortest program of forty that are drawn, for each."""
    drawn = sorted((pipelines.make_staged_case(random.Random(seed)) for seed in range(40)), key=lambda c: len(str(c)))
    for schedule in SCHEDULES:
        case = next(c for c in drawn if c.schedule == schedule)
        plan = run.planned(case)
        assert plan.pipeline is not None, case
        assert plan.pipeline.schedule.name == schedule
        verify(plan)
