"""The order of plans of one step: memory, then seconds; the bytes sent where the chip is not known."""

import jax
import pytest
from arrays import bf16

import meshpar as mp
from meshpar._src.passes.best_plan_before_passes import RANK
from meshpar._src.plan.planner import Rank


@pytest.mark.parametrize(("width", "exceeds"), [(1 << 12, False), (1 << 18, True)])
def test_plans_are_ordered_by_memory_and_seconds(width, exceeds):
    how = {"layout": "mlp: model", "dims": {"x": "_ mlp", "w": "mlp _"}}
    args = bf16(1024, width), bf16(width, width)
    on_v5e = mp.plan(lambda x, w: x @ w, *args, mesh="model=4", topology="v5e:2x2", **how)
    assert (RANK.exceeds(on_v5e), RANK.cost(on_v5e)) == (exceeds, on_v5e.seconds)
    anywhere = mp.plan(lambda x, w: x @ w, *args, mesh=jax.sharding.AbstractMesh((4,), ("model",)), **how)
    assert (RANK.exceeds(anywhere), RANK.cost(anywhere)) == (False, anywhere.bytes_sent)
    assert on_v5e.bytes_sent == anywhere.bytes_sent > 0


def test_the_cost_of_a_plan_is_asked_only_where_memory_does_not_decide():
    """Plans are numbers here: those from 10 on exceed the memory."""
    asked = []
    order = Rank(lambda plan: plan >= 10, lambda plan: asked.append(plan) or -plan)
    assert order.first([11, 3]) == 3
    assert order.first([7]) == 7
    assert not asked
    assert order.first([11, 3, 5]) == 5
    assert order.first([11, 12]) == 12
    assert asked == [3, 5, 11, 12]
