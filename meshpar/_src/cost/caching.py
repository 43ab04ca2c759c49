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
    """A function of a plan that computes its result once per plan. The result is freed with the plan, also if it refers to it."""
    name = key_on_plan(fn)

    @functools.wraps(fn)
    def once(plan: Plan) -> T:
        """The result of ``fn(plan)``, computed by the first call for this plan."""
        cache = vars(plan)  # where cached properties are as well
        if name not in cache:
            with without_gc():
                cache[name] = fn(plan)
        return cast(T, cache[name])

    return once


def key_on_plan(fn: Callable[[Plan], Any]) -> str:
    """The key of the cached result of a function in ``vars(plan)``; ``fn`` itself, or what :func:`cached_on_plan` makes of it."""
    return f"{fn.__module__}.{fn.__qualname__}"


def with_shared_results(plan: P, *others: Callable[[Plan], Any], **fields: Any) -> P:
    """A copy of a plan with other values of some fields, which shares the cached results.

    Args:
      others: the functions on plans whose results depend on these fields: the copy computes its own.
    """
    new = replace(plan, **fields)
    own = {*map(key_on_plan, others)}
    for name, result in vars(plan).items():
        if name not in own:
            vars(new).setdefault(name, result)
    return new
