"""Bytes that a device sends for one op: to reshard its operands and results, to reduce them, and inside its local form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

from ..hardware.collective_ops import CollectiveOp, wire_bytes
from ..layout import Spec
from ..program.ir import Op, Value
from ..rules.mesh_in_shard_map import Send
from ..rules.rule import Kind
from .collectives import split_reduction
from .factor_specs import contiguous_only, spec_from_factors
from .resharding import reshard_bytes
from .shard_shapes import itemsize, local_shape, replicated_spec, shard_count, value_bytes

Axes = list[tuple[str, ...]]
"""The mesh axes that split each factor of an op."""

SendOver = tuple[Send, tuple[str, ...]]
"""A collective of a local form, and the axes of size > 1 that it runs over."""


def needed_specs(op: Op, axes: Sequence[tuple[str, ...]]) -> list[Spec | None]:
    """The spec in which an op needs each operand if ``axes`` split its factors; None for a literal."""
    rule = op.factor_rule
    return [
        None if v is None else spec_from_factors(dims, axes) if dims else replicated_spec(len(v.shape))
        for v, dims in zip(op.ins, rule.ins, strict=True)
    ]


def partial_axes(op: Op, axes: Axes, sizes: Mapping[str, int]) -> tuple[list[tuple[str, ...]], Kind]:
    """(the axes over which each result is partial, the reduction) if ``axes`` split the factors of an op.

    A matmul whose contracted factor is split over ``model`` has the result ``([("model",)], "sum")``.
    """
    rule = op.factor_rule
    order = list(sizes)
    kind: Kind = "sum"
    partial = []
    for k in range(len(op.outs)):
        factors = [f for f in rule.partial_factors(k) if axes[f]]
        for f in factors:
            if rule.kinds[f] not in ("pass_through", "permutation"):
                kind = rule.kinds[f]
        in_result = {a for dim in rule.outs[k] for f in dim for a in axes[f]}
        partial.append(tuple(sorted({a for f in factors for a in axes[f]} - in_result, key=order.index)))
    return partial, kind


def value_reshard_bytes(value: Value, have: Spec, need: Spec, sizes: Mapping[str, int]) -> float:
    """Bytes that a device sends to reshard a value."""
    return reshard_bytes(have, need, value.shape, itemsize(value.aval), sizes)


def reduction_bytes(
    value: Value, spec: Spec, stored: Spec, axes: tuple[str, ...], kind: Kind, sizes: Mapping[str, int]
) -> float:
    """Bytes that a device sends to reduce a value that is partial over ``axes`` (perhaps none), and to reshard it from ``spec`` to
    its stored spec.

    ``kind`` is the reduction.
    """
    scatter, reduced = split_reduction(spec, stored, axes, kind)
    volume, sent = value_bytes(value, spec, sizes), 0.0
    for over in scatter.values():
        sent += wire_bytes("reduce-scatter", volume, shard_count(over, sizes))
        volume /= shard_count(over, sizes)
    sent += wire_bytes("all-reduce", volume, shard_count(reduced, sizes))
    scattered = tuple((*entry, *scatter.get(i, ())) for i, entry in enumerate(spec))
    return sent + value_reshard_bytes(value, scattered, stored, sizes)


def local_form_sends(
    op: Op, needs: Sequence[Spec | None], axes: Axes, sizes: Mapping[str, int], form: int = 0
) -> list[SendOver]:
    """The collectives that the local form of an op makes, for operands in the specs ``needs``; ``axes`` split each
    factor of its rule. ``form``: 0, or one more than an index of :attr:`OpRule.forms`."""
    rule = op.factor_rule
    exchanges = any(got and kind == "permutation" for got, kind in zip(axes, rule.kinds, strict=True))
    if rule.sends is None or (rule.given is None and not exchanges):
        return []
    avals = [v.aval for v in op.eqn.invars]
    shapes = [local_shape(a.shape, need, sizes) for a, need in zip(avals, needs, strict=True)]
    out = []
    for send in (rule.sends, *rule.forms)[form](shapes, axes, sizes):
        over = [a for f in send.factors for a in axes[f]] if send.axes is None else send.axes
        out.append((send, tuple(a for a in over if sizes[a] > 1)))
    return [(send, over) for send, over in out if over]


def send_bytes(send: Send, axes: Sequence[str], sizes: Mapping[str, int]) -> float:
    """Bytes that a device sends in one collective of a local form."""
    group = shard_count(axes, sizes)
    volume = math.prod(send.shape) * itemsize(send) * (group if send.op == "all-gather" else 1)
    return wire_bytes(cast(CollectiveOp, send.op), volume, group)


def op_bytes(
    op: Op, axes: Axes, specs: Sequence[Spec | None], stored: Sequence[Spec], sizes: Mapping[str, int]
) -> float:
    """Bytes that a device sends if ``axes`` split the factors of an op: for operands, its local form, and results.

    Args:
      specs: of the operands before the op; None: a literal.
      stored: the specs in which the results are stored.
    """
    rule = op.factor_rule
    axes = contiguous_only(rule, axes, sizes)
    needs = [None if v is None or not d else spec_from_factors(d, axes) for v, d in zip(op.ins, rule.ins, strict=True)]
    total = sum(
        send_bytes(send, over, sizes) * (send.times or 1) for send, over in local_form_sends(op, needs, axes, sizes)
    )
    for value, have, need in zip(op.ins, specs, needs, strict=True):
        if value is not None and have is not None and need is not None:
            total += value_reshard_bytes(value, have, need, sizes)
    partials, kind = partial_axes(op, axes, sizes)
    for value, dims, partial, rest in zip(op.outs, rule.outs, partials, stored, strict=True):
        total += reduction_bytes(value, spec_from_factors(dims, axes), rest, partial, kind, sizes)
    return total
