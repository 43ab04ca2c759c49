"""Results of functions of a plan, cached on the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from ..compat.jax import without_gc
from ..plan.plan import Plan

T = TypeVar("T")
P = TypeVar("P", bound=Plan)


def cached_on_plan(fn: Callable[[Plan], T]) -> Callable[[Plan], T]:
    """A function of a plan that computes its result once per plan; plans are immutable, and free their results with them."""
    name = f"{fn.__module__}.{fn.__qualname__}"

    @functools.wraps(fn)
    def once(plan: Plan) -> T:
        """The result of ``fn(plan)``, computed by the first call for this plan."""
        cache = vars(plan)  # where cached properties are as well; a result that refers to the plan does not outlive it
        if name not in cache:
            with without_gc():
                cache[name] = fn(plan)
        return cast(T, cache[name])

    return once


def with_reasons(plan: P, **reasons: Any) -> P:
    """A copy of a plan with other values of fields that are prose (reasons of decisions); it shares all cached results."""
    new = replace(plan, **reasons)
    for name, result in vars(plan).items():
        vars(new).setdefault(name, result)
    return new


def free_caches(plan: Plan) -> None:
    """Clear the cached results of a plan that is no longer used, so that reference counting frees them.

    Kernels and buffers refer to each other. Left to the garbage collector, the ones of the many plans of a search would make it
    traverse all objects of the program repeatedly.
    """
    cache = vars(plan)
    todo = [cache.get("meshpar._src.cost.kernels.computation_of")]
    while todo:
        region = todo.pop()
        if region is None:
            continue
        for node in region.nodes:
            todo += node.bodies
            node.ins, node.outs, node.reads, node.writes, node.carries = [], [], (), (), ()
    cache.clear()
