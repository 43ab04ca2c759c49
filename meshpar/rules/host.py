"""Callbacks into Python: a function of the host sees whole arrays."""

from __future__ import annotations

from typing import Any

from jax import lax

from ..compat.jax import source_line
from ..errors import UnsupportedError
from .local import LocalOp, on_shards
from .registry import register
from .rule import OpRule
from .spmd import axis_index, fine_names


def callback(eqn, ins, outs) -> OpRule:
    """Operands and results need replication; the plan names the callback as the cause."""
    r = OpRule([], [])
    r.ins = [r.factors(s, "need_replication") for s in ins]
    r.outs = [r.factors(s, "need_replication") for s in outs]
    return r


def _once(at: LocalOp, *xs: Any) -> list[Any]:
    """A callback with an effect: one device calls it. Its results would have to be sent, which no plan lists."""
    if at.eqn.outvars:
        raise UnsupportedError(
            f"{at.op.name} with results has no local form: every device would call it",
            source=source_line(at.eqn),
            fixes=['use lowering="jit"', "or jax.pure_callback, which may be called by every device"],
        )
    first = axis_index(fine_names(list(at.sizes), at.sizes)) == 0
    lax.cond(first, lambda: at.run(*xs), lambda: [])
    return []


register("pure_callback", rule=callback, local=on_shards)
register("io_callback", "debug_callback", "debug_print", rule=callback, local=_once)
