"""A figure of a plan is worked out once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, cast

from ..compat.jax import without_gc
from ..plan.plan import Plan

T = TypeVar("T")


def once_per_plan(fn: Callable[[Plan], T]) -> Callable[[Plan], T]:
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
