"""The host: callbacks into Python get unsharded arrays."""

from __future__ import annotations

from typing import Any

from jax import lax

from .local_forms import LocalOp, on_shards
from .mesh_in_shard_map import axis_index, fine_names
from .registry import Refusal, SplitOp, register
from .rule import replicated


def _once(op: LocalOp, *xs: Any) -> list[Any]:
    """Calls a callback without results on one device of the mesh."""
    is_first = axis_index(fine_names(list(op.sizes), op.sizes)) == 0
    lax.cond(is_first, lambda: op.run(*xs), lambda: [])
    return []


def _has_results(op: SplitOp) -> Refusal | None:
    """The :class:`Refusal` of a callback with results, since no plan has a broadcast from the one device that calls it;
    else None."""
    if not op.eqn.outvars:
        return None
    return Refusal(
        "with results has no local form: every device would call it",
        ("or jax.pure_callback, which may be called by every device",),
    )


register("pure_callback", rule=replicated, local=on_shards)
register("io_callback", "debug_callback", "debug_print", rule=replicated, local=_once, refuses=_has_results)
