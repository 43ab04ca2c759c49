"""Input-independent values (iotas, masks, zeros): each device makes the part of them that it needs."""

from __future__ import annotations

from collections.abc import Mapping

from ..compat.jax import literal_array
from ..iterables import operands_first
from ..layout import Spec
from ..program.ir import Program, Value
from ..units import format_memory
from .body_builder import BodyBuilder
from .bytes_sent_by_op import Axes, needed_specs
from .decide import broadcast_spec
from .factor_specs import axes_of_array, spec_from_factors
from .plan_cache import PlanCache
from .resharding import reshard
from .shard_shapes import replicated_spec, value_bytes
from .steps import Constant, Reshard, Shard

LARGE_CONSTANT_BYTES = 1e6
"""Bytes of an array that a function closes over, above which the plan advises to pass it as an argument."""


class ConstantMaker:
    """Emits the steps that make parts of input-independent values."""

    def __init__(self, sizes: Mapping[str, int], interned: PlanCache):
        self.sizes, self.interned = sizes, interned

    def part(self, value: Value, spec: Spec, body: BodyBuilder) -> Shard:
        """The part of an input-independent value that a spec asks for, made once for each body."""
        copies = body.copies
        for part in operands_first((value, spec), lambda part: inputs_for(*part, self.sizes)[0], copies):
            needs, axes = inputs_for(*part, self.sizes)
            self._make(*part, [copies[need] for need in needs], axes, body)
        return copies[value, spec]

    def _make(self, value: Value, spec: Spec, sources: list[Shard], axes: Axes | None, body: BodyBuilder) -> None:
        """Emit the step that makes a part of a value from parts of its op's operands."""
        op = value.op
        assert op is not None
        if op.primitive.family in ("identity", "barrier"):
            if sources:
                body.copies[value, spec] = sources[0]
                return
            result = self._shard(value, spec, body)
            array = literal_array(op.eqn.invars[op.outs.index(value)])
            step = self.interned.get(("constant", result), lambda: Constant(op, result, array))
        elif op.rule is not None and axes is None:
            result = self._shard(value, spec, body)
            path = reshard(replicated_spec(len(spec)), spec, value.shape, self.sizes)
            step = self.interned.get(
                ("cut", sources[0], result, path), lambda: Reshard(op, sources[0], result, path, (), copy=True)
            )
        else:
            rest = iter(sources)
            operands = tuple(None if v is None else next(rest) for v in op.ins)
            specs = [spec] * len(op.outs)
            if axes is not None and op.rule is not None:
                specs = [spec_from_factors(dims, axes) for dims in op.rule.outs]
            results = tuple(self._shard(out, s, body) for out, s in zip(op.outs, specs, strict=True))
            step = self.interned.run(op, operands, results, None if axes is None else tuple(axes))
        for shard in step.makes:
            body.copies.setdefault((shard.value, shard.spec), shard)
        body.deferred.append(step)

    def _shard(self, value: Value, spec: Spec, body: BodyBuilder) -> Shard:
        return self.interned.shard(value, spec, is_constant=True, copy=body.frame)


def inputs_for(
    value: Value, spec: Spec, sizes: Mapping[str, int]
) -> tuple[tuple[tuple[Value, Spec], ...], Axes | None]:
    """(operands with specs, axes of its factors) with which the op of a value makes the part in a spec.

    The axes are None for elementwise ops and identities, and for an op that cannot make a part alone. That one needs the
    unsharded value, from which the part is cut.
    """
    op = value.op
    assert op is not None
    if op.primitive.family in ("identity", "barrier"):
        source = op.ins[op.outs.index(value)]
        return () if source is None else ((source, spec),), None
    if op.rule is None:
        axes = None
        needs = [None if v is None else broadcast_spec(spec, v.shape, value.shape) for v in op.ins]
    else:
        axes = axes_of_array(op.rule, op.rule.outs[op.outs.index(value)], spec, sizes)
        if axes is None:
            return ((value, replicated_spec(len(spec))),), None
        needs = needed_specs(op, axes)
    pairs = zip(op.ins, needs, strict=True)
    return tuple((v, need) for v, need in pairs if v is not None and need is not None), axes


def large_constant_note(program: Program, constant: Value, sizes: Mapping[str, int]) -> str | None:
    """A sentence that advises to pass a large array, which the function closes over, as an argument; None if it is
    small."""
    size = value_bytes(constant, replicated_spec(len(constant.shape)), sizes)
    if size <= LARGE_CONSTANT_BYTES:
        return None
    reader = next((op for op in program.root.walk() if constant in op.ins), None)
    where = f", read at {reader.source}," if reader is not None and reader.source else ""
    return (
        f"{constant.aval.dtype}{list(constant.shape)} ({format_memory(size)}){where} is closed over: it is compiled into the "
        "program, and every device holds all of it; pass it as an argument, which a rule can split"
    )
