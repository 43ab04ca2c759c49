"""Plans of steps that others have measured."""

import published
import pytest


@pytest.mark.parametrize(("topology", "sizes"), [("v6e:2x2", {"data": 4}), ("2x v6e:2x2", {"slice": 2, "data": 4})])
def test_a_plan_has_the_batch_and_the_residuals_of_the_measured_step(topology, sizes):
    step = published.Step("llama.py:tiny", topology, 2, 1.0, "offload_input", seq=16)
    plan = published.planned(step)
    assert plan.sizes == sizes
    (tokens,) = (s.value.shape for s in plan.body.inputs if s.value.path == "batch/inputs")
    assert tokens == (2 * 4 * sizes.get("slice", 1), 16)
    assert plan.memory.host > 0
