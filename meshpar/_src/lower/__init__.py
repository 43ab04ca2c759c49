"""Plan → a function that runs.

.. code-block:: text

    shard_map            one `shard_map` around the program, in which every device runs the steps of the plan
    jit                  the program with sharding constraints, which XLA partitions
    collectives          reshardings and reductions of local arrays
    rings                collective matmuls as rings or kernels
    reduction_dim_order  partial values that are reduced before or after a transpose of their dims
    local_constraints    sharding constraints of the user inside of a `shard_map`
"""

from collections.abc import Callable
from typing import Any

from .jit import lower_to_jit
from .shard_map import lower_to_shard_map

LOWERINGS: dict[str, Callable[..., tuple[Callable[..., list[Any]], list[Any], list[Any]]]] = {
    "jit": lower_to_jit,
    "shard_map": lower_to_shard_map,
}
"""By name: (plan, mesh) → (flat function, shardings of its inputs, shardings of its results)."""
