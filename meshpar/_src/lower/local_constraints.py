"""Sharding constraints on the local arrays of a ``shard_map``: they move no data, and nothing is moved through them.

Until a program is partitioned, XLA represents a sharding constraint by a copy, which its simplifier leaves alone
(:data:`compat.quirks.MOVED_VIEWS`). ``jax.lax.with_sharding_constraint`` does the same, but has no batching rule where all
axes of the mesh are manual.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ..compat.jax import plain_constraint

local_constraint_p = Primitive("local_constraint")
"""(array) → the same array; ``sharding``: replicated over the manual mesh."""

local_constraint_p.def_impl(lambda x, *, sharding: x)
local_constraint_p.def_abstract_eval(lambda x, *, sharding: x)
mlir.register_lowering(local_constraint_p, mlir.lower_fun(plain_constraint, multiple_results=False))
batching.defvectorized(local_constraint_p)


def constrain_local(x: Any) -> Any:
    """A local array behind a sharding constraint; arrays of random keys as they are."""
    if not isinstance(x, jax.Array) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    return local_constraint_p.bind(x, sharding=sharding)
