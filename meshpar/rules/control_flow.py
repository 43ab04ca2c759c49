"""Primitives without a factor rule: calls, loops, branches, identities that say names or specs, and code that nobody sees into.

What is in their bodies has rules of its own.
"""

from __future__ import annotations

from .registry import register

register("scan", "while", "cond")
register(
    "jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_lin", "composite", call=True
)
register("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", call=True, own_derivative=True)
register("name_dims", "rename_dims", "place", "sharding_constraint", identity=True, view=True)
register("pallas_call", "ffi_call", "custom_call", "tpu_custom_call", "mosaic_gpu_call", opaque=True)
register("shard_map", "custom_partitioning", "xla_pmap", own_mesh=True)
