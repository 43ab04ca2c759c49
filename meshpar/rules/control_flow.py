"""Primitives without a factor rule: calls, loops, branches, identities that state names or specs, and opaque code.

The equations in the bodies of calls, loops and branches have their own rules.
"""

from __future__ import annotations

from .flops import pallas_flops
from .partial import MOVES
from .registry import Refusal, SplitOp, register


def _partitions_itself(op: SplitOp) -> Refusal:
    return Refusal("has no factor rule, and cannot be nested in the shard_map that the lowering makes")


register("scan", family="scan")
register("while", family="while")
register("cond", family="cond")
register("jit", "closed_call", "call", "composite", family="call")
register("remat2", family="checkpoint")
register("custom_jvp_call", "custom_vjp_call", "custom_linear_solve", family="custom_derivative")
register("name_dims", "rename_dims", "place", "sharding_constraint", family="identity", view=True, partial=(MOVES,))
register("pallas_call", family="opaque", nested_flops=pallas_flops)
register("ffi_call", "tpu_custom_call", family="opaque")
register("custom_partitioning", refuses=_partitions_itself)
