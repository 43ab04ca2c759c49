"""Callbacks into Python: a function of the host sees whole arrays."""

from __future__ import annotations

from typing import Any

from jax import lax

from .local import LocalOp, on_shards
from .registry import Refusal, SplitOp, register
from .rule import OpRule
from .spmd import axis_index, fine_names


def callback(eqn, ins, outs) -> OpRule:
    """Operands and results need replication; the plan names the callback as the cause."""
    r = OpRule([], [])
    r.ins = [r.factors(s, "need_replication") for s in ins]
    r.outs = [r.factors(s, "need_replication") for s in outs]
    return r


def _once(at: LocalOp, *xs: Any) -> list[Any]:
    """A callback with an effect and without results: one device calls it."""
    first = axis_index(fine_names(list(at.sizes), at.sizes)) == 0
    lax.cond(first, lambda: at.run(*xs), lambda: [])
    return []


def _has_results(op: SplitOp) -> Refusal | None:
    """Results of the one call would have to be broadcast from the device that made it, which no plan lists."""
    if not op.eqn.outvars:
        return None
    return Refusal(
        "with results has no local form: every device would call it",
        ("or jax.pure_callback, which may be called by every device",),
    )


register("pure_callback", rule=callback, local=on_shards)
register("io_callback", "debug_callback", "debug_print", rule=callback, local=_once, refuses=_has_results)
