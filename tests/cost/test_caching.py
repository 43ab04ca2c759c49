"""Results that are cached on a plan, and copies of a plan that share them."""

from dataclasses import replace

import jax.numpy as jnp

import meshpar as mp
from meshpar._src.cost.caching import cached_on_plan, with_shared_results


def test_a_copy_shares_all_results_but_those_of_the_functions_named():
    @cached_on_plan
    def shared(plan):
        return [plan.request.name]

    @cached_on_plan
    def of_name(plan):
        return [plan.request.name]

    plan = mp.plan(lambda x: x * 2, jnp.ones(8), mesh="data=8", layout="")
    assert shared(plan) is shared(plan)
    assert of_name(plan) == [""]
    copy = with_shared_results(plan, of_name, request=replace(plan.request, name="other"))
    assert shared(copy) is shared(plan)
    assert of_name(copy) == ["other"]
    assert of_name(plan) == [""]
