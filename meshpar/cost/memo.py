"""A figure of a plan is worked out once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TypeVar

from ..compat.jax import without_gc
from ..plan.plan import Plan

T = TypeVar("T")


def once_per_plan(fn: Callable[[Plan], T]) -> Callable[[Plan], T]:
    """Keep what a function of a plan gives for as long as the plan is there: plans do not change."""
    found: weakref.WeakKeyDictionary[Plan, T] = weakref.WeakKeyDictionary()

    @functools.wraps(fn)
    def once(plan: Plan) -> T:
        if plan not in found:
            with without_gc():
                found[plan] = fn(plan)
        return found[plan]

    return once
