"""Values made from no data (iotas, zeros, what follows from them): every device makes the part that it needs, where it is used."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..compat.jax import at_line_of
from ..layout import Spec
from ..plan.claims import blocks_only, spec_of
from ..plan.planner import IDENTITIES, stretched
from ..program.ir import Op, Value
from ..rules import run_elementwise, run_local
from ..rules.spmd import cut
from .bodies import whole

if TYPE_CHECKING:
    from .shard_map import Walk


def generate(walk: Walk, value: Value, spec: Spec) -> Any:
    """The shard of a value in a spec, made once for each body."""
    made, key = walk.here.made, (id(value), spec)
    if key not in made:
        assert value.op is not None
        with at_line_of(value.op.eqn, value.op.where):
            made[key] = _made(walk, value, value.op, spec)
    return made[key]


def _made(walk: Walk, value: Value, op: Op, spec: Spec) -> Any:
    k = op.outs.index(value)
    if op.name in IDENTITIES or op.name == "optimization_barrier":
        source = op.ins[k]
        if source is None:
            return cut(walk.literal(op, k), whole(value), spec, walk.sizes)
        return generate(walk, source, spec)
    if op.rule is None:
        needs = [None if v is None else stretched(spec, v.shape, value.shape) for v in op.ins]
        return run_elementwise(op, walk.operands(op, needs))[0]
    axes = _axes_for(walk, op, k, spec)
    if axes is None:
        return cut(generate(walk, value, whole(value)), whole(value), spec, walk.sizes)
    needs = [None if v is None else spec_of(d, axes) if d else whole(v)
             for v, d in zip(op.ins, op.rule.ins, strict=True)]  # fmt: skip
    xs = walk.operands(op, needs)
    results = run_local(op, axes, xs, walk.sizes) if op.rule.known else walk.foreign(op, xs)
    for out, dims, x in zip(op.outs, op.rule.outs, results, strict=True):
        walk.here.made.setdefault((id(out), spec_of(dims, axes)), x)
    return results[k]


def _axes_for(walk: Walk, op: Op, k: int, spec: Spec) -> list[tuple[str, ...]] | None:
    """The axes of the factors with which a result comes out in a spec; None where only the whole can be made."""
    rule, sizes = op.rule, walk.sizes
    assert rule is not None
    axes: list[tuple[str, ...]] = [()] * len(rule.sizes)
    for factors, entry in zip(rule.outs[k], spec, strict=True):
        if not entry:
            continue
        f = factors[0] if factors else None
        if f is None or rule.kinds[f] != "pass_through" or rule.sizes[f] % math.prod(sizes[a] for a in entry):
            return None
        axes[f] = entry
    return axes if blocks_only(rule, axes, sizes) == axes and spec_of(rule.outs[k], axes) == spec else None
