"""Callbacks into Python: a function of the host sees whole arrays."""

from __future__ import annotations

from .rule import OpRule, rule

CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})


@rule(*sorted(CALLBACKS))
def callback(eqn, ins, outs) -> OpRule:
    """Operands are gathered, results are whole; the plan names the callback as the cause."""
    r = OpRule([], [])
    r.ins = [r.factors(s, "whole") for s in ins]
    r.outs = [r.factors(s, "whole") for s in outs]
    return r
