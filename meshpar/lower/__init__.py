"""Plan → a function that runs."""

from collections.abc import Callable
from typing import Any

from .constraints import lower_to_jit

LOWERINGS: dict[str, Callable[..., tuple[Callable[..., list[Any]], list[Any], list[Any]]]] = {"jit": lower_to_jit}
"""By name: (plan, mesh) → (flat function, shardings of its inputs, shardings of its results)."""

__all__ = ["LOWERINGS", "lower_to_jit"]
