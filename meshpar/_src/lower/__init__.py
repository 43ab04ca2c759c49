"""Plan → a function that runs."""

from collections.abc import Callable
from typing import Any

from .jit import lower_to_jit
from .shard_map import lower_to_shard_map

LOWERINGS: dict[str, Callable[..., tuple[Callable[..., list[Any]], list[Any], list[Any]]]] = {
    "jit": lower_to_jit,
    "shard_map": lower_to_shard_map,
}
"""By name: (plan, mesh) → (flat function, shardings of its inputs, shardings of its results)."""
