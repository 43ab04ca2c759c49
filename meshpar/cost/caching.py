"""A figure of a plan is worked out once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from ..compat.jax import without_gc
from ..plan.plan import Plan

T = TypeVar("T")


def cached_on_plan(fn: Callable[[Plan], T]) -> Callable[[Plan], T]:
    """Keep what a function of a plan gives with the plan: plans do not change."""
    name = f"{fn.__module__}.{fn.__qualname__}"

    @functools.wraps(fn)
    def once(plan: Plan) -> T:
        kept = vars(plan)  # where cached properties lie too; what refers to the plan does not outlive it there
        if name not in kept:
            with without_gc():
                kept[name] = fn(plan)
        return cast(T, kept[name])

    return once


def with_reasons(plan: Plan, **words: Any) -> Plan:
    """The plan with other words in it; all that was worked out of it holds for the new one."""
    new = replace(plan, **words)
    for name, figure in vars(plan).items():
        vars(new).setdefault(name, figure)
    return new


def free_caches(plan: Plan) -> None:
    """Take from a plan that nobody reads any more what was worked out of it, so that counts of references free that.

    Kernels and their arrays refer to each other; left to the garbage collector, those of the many plans of a search would have all
    that is kept of the program looked through, again and again.
    """
    kept = vars(plan)
    todo = [kept.get("meshpar.cost.kernels.computation_of")]
    while todo:
        region = todo.pop()
        if region is None:
            continue
        for node in region.nodes:
            todo += node.regions
            node.ins, node.outs, node.reads, node.writes, node.carries = [], [], (), (), ()
    kept.clear()
