"""Primitives without a factor rule: calls, loops, branches, identities that state names or specs, and opaque code.

The equations in the bodies of calls, loops and branches have their own rules.
"""

from __future__ import annotations

from .flops import pallas_flops
from .partial import MOVES
from .registry import Refusal, SplitOp, register


def _partitions_itself(op: SplitOp) -> Refusal:
    return Refusal("has no factor rule, and cannot be nested in the shard_map that the lowering makes")


register("scan", loop=True, scan=True)
register("while", loop=True)
register("cond", branch=True)
register("jit", "closed_call", "call", "composite", call=True)
register("remat2", call=True, recomputation=True)
register("custom_jvp_call", "custom_vjp_call", "custom_linear_solve", call=True, own_derivative=True)
register("name_dims", "rename_dims", "place", "sharding_constraint", identity=True, view=True, partial=(MOVES,))
register("pallas_call", opaque=True, nested_flops=pallas_flops)
register("ffi_call", "tpu_custom_call", opaque=True)
register("custom_partitioning", refuses=_partitions_itself)
