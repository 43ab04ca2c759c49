"""Decisions about ops: how each op is split, in which specs it needs its operands, and how its results are sharded.

Everything here is a pure function of an op, the shardings of its operands, and the facts of a plan (program, layout, mesh sizes).
:mod:`plan.emit` turns decisions into steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..layout import Spec
from ..program.ir import Op, Value
from ..records import record
from ..rules.one_owner import adds_nothing
from ..rules.partial import LINEAR, Law
from ..rules.rule import ADDED, Kind
from .assignment import AxisAssignment
from .bytes_sent_by_op import (
    Axes,
    SendOver,
    local_form_sends,
    needed_specs,
    op_bytes,
    partial_axes,
    reduction_bytes,
    value_reshard_bytes,
)
from .checks import check_manual_axes
from .deferred_sums import applicable_law, narrowed, narrows, reduce_in_values
from .factor_specs import axes_of_array, contiguous_only, spec_from_factors
from .reshape import reshape_axes
from .shard_shapes import replicated_spec, shard_count

MAX_GATHERED_RATIO = 2
"""An array that is read at some indices is gathered only if it has at most so many times the elements that are read."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of an op, as it is sharded before the op.

    Attributes:
      value: the value of the program.
      spec: its spec.
      partial: the axes over which it is partial.
      kind: the reduction of a partial value.
      is_constant: it is input-independent, so each device makes the part that the op needs, and nothing is sent.
      iterations: iterations of the scans that only read it, before which it may be resharded once; None: there is no such scan.
    """

    value: Value
    spec: Spec
    partial: tuple[str, ...] = ()
    kind: Kind = "sum"
    is_constant: bool = False
    iterations: int | None = None


@dataclass(frozen=True, slots=True)
class ShardType:
    """The sharding of a result: its spec, the axes over which it is partial, and the reduction."""

    spec: Spec
    partial: tuple[str, ...] = ()
    kind: Kind = "sum"


@record
class OpDecision:
    """The decision about one op: the specs of its operands and results, and the reductions and collectives around it.

    Attributes:
      operands: the spec in which each operand is needed; None: a literal.
      results: how the op leaves each result.
      stored: the spec to which each result is then resharded; None: the result stays as the op leaves it.
      reduce: positions of the partial operands that are reduced first, in order.
      axes: the axes that split each factor; None: an elementwise op, an identity or a barrier.
      inherits: for each result the position of the operand whose pending reduction it inherits; None: a partial result has
        a pending reduction of its own.
      is_constant: the op is input-independent: no step runs it where it is, and ``results`` has the stored specs.
      sends: the collectives of the op's local form.
    """

    operands: tuple[Spec | None, ...]
    results: tuple[ShardType, ...]
    stored: tuple[Spec | None, ...]
    reduce: tuple[int, ...] = ()
    axes: tuple[tuple[str, ...], ...] | None = None
    inherits: tuple[int | None, ...] = ()
    is_constant: bool = False
    sends: tuple[SendOver, ...] = ()


@record
class Facts:
    """Inputs of the decisions of one plan, besides the ops and the shardings of their operands.

    Attributes:
      assignment: the axis assignment of the layout.
      readers: the ops that read each value; None: a result.
      accumulated: values that are added to the carry of a loop by linear ops → whether an inner loop stacks them on the way.
      deferred: partial values that are not reduced, because reducing what their readers make sends less
        (:func:`is_reduced_after`).
    """

    assignment: AxisAssignment
    readers: Mapping[Value, Sequence[Op | None]]
    accumulated: dict[Value, bool]
    deferred: set[Value]


@record
class _Site:
    """An op together with the facts that decisions about it depend on; :func:`decide` makes it, and it is never
    changed.

    Attributes:
      op: the op.
      operands: its operands as they are sharded when the op runs; None for literals.
      facts: the facts of the plan.
    """

    op: Op
    operands: Sequence[Operand | None]
    facts: Facts

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.facts.assignment.sizes

    @property
    def partial(self) -> list[int]:
        """The positions of partial operands."""
        return [i for i, x in enumerate(self.operands) if x is not None and x.partial]

    def operand(self, i: int) -> Operand:
        x = self.operands[i]
        assert x is not None
        return x

    def stored(self, value: Value) -> Spec:
        """The spec in which a value is stored."""
        return self.facts.assignment.value_spec(value)

    def resharded(self, value: Value) -> Spec | None:
        """The spec to which a result is resharded; None: it stays as the op leaves it."""
        return None if value in self.facts.assignment.program.cached(narrowed) else self.stored(value)

    def reducing(self, positions: Sequence[int]) -> _Site:
        """The same op after some operands are reduced, each to its stored spec."""
        if not positions:
            return self
        reduced = {self.operand(i).value for i in positions}
        return replace(
            self,
            operands=[
                replace(x, spec=self.stored(x.value), partial=(), kind="sum") if x and x.value in reduced else x
                for x in self.operands
            ],
        )

    def bytes_sent(self, axes: Axes) -> float:
        """Bytes that a device sends if ``axes`` split the factors."""
        specs = [None if x is None else x.spec for x in self.operands]
        return op_bytes(self.op, axes, specs, [self.stored(v) for v in self.op.outs], self.sizes)


def decide(op: Op, operands: Sequence[Operand | None], facts: Facts) -> OpDecision:
    """The decision about an op without bodies.

    A partial operand that several ops read is reduced before the first of them, so that no result is reduced for each reader,
    unless it is deferred. The others are reduced unless the op may be applied to them before (:mod:`rules.partial`).

    Args:
      operands: None for literals.

    Raises:
      UnknownAxisError, MeshError: a ``shard_map`` of the program does not fit the mesh.
    """
    first = _Site(op, operands, facts)
    partial = [(i, first.operand(i).value) for i in first.partial]
    shared = tuple(i for i, v in partial if len(facts.readers.get(v, ())) > 1 and v not in facts.deferred)
    if op.primitive.family in ("identity", "barrier"):
        return _identity(first.reducing(shared), shared)
    if op.rule is None:
        return _elementwise(first.reducing(shared), shared)
    if op.rule.given is not None:
        check_manual_axes(op, facts.assignment.sizes)
    return _by_rule(first.reducing(shared), shared)


def add_to_carry(op: Op, addend: Operand) -> OpDecision | None:
    """The decision about ``carry + addend`` in a loop that only adds to the carry or to a row of it, if the addend is partial.

    The carry is then partial in the same way, from its first value on, and is reduced once, after the loop. None: it is not.
    """
    if not addend.partial or addend.kind not in ADDED:
        return None
    kind, position = kind_after(LINEAR, addend.kind), op.ins.index(addend.value)
    if op.rule is None:
        result = ShardType(addend.spec, addend.partial, kind)
        return OpDecision(tuple(addend.spec for _ in op.ins), (result,), (None,), inherits=(position,))
    spec: Spec = ((), *addend.spec)  # to a row
    axes: Axes = [()] * len(op.rule.sizes)
    for entry, factors in zip(spec, op.rule.ins[0], strict=True):
        axes[factors[0]] = entry
    result = ShardType(spec, addend.partial, kind)
    return OpDecision(tuple(needed_specs(op, axes)), (result,), (None,), axes=tuple(axes), inherits=(position,))


def is_input_independent(op: Op, operands: Sequence[Operand | None]) -> bool:
    """Whether all operands of an op are input-independent, so that each device makes the parts of the results that it needs."""
    is_constant = all(x is None or x.is_constant for x in operands) and bool(op.outs)
    specs_given = op.rule is not None and op.rule.given is not None
    return is_constant and op.name != "random_bits" and not op.eqn.effects and not specs_given


def kind_after(law: Law | None, kind: Kind) -> Kind:
    """The reduction of the result of an op that is applied to a partial operand by a law (None: an identity).

    An ``indexed`` operand of a law for sums is a sum: ``kind_after(LINEAR, "indexed") == "sum"``.
    """
    return kind if law is None or kind in law.kinds else "sum"


def broadcast_spec(spec: Spec, shape: Sequence[int], out: Sequence[int]) -> Spec:
    """The spec of an operand of an elementwise op that broadcasts it to its result: dims of size 1 are unsharded."""
    if shape == out:
        return spec
    if len(shape) != len(out):
        return replicated_spec(len(shape))
    return tuple(axes if n == m else () for axes, n, m in zip(spec, shape, out, strict=True))


# -- families of ops


def _identity(site: _Site, reduce: tuple[int, ...]) -> OpDecision:
    """An identity or an optimization barrier: each result is sharded as its operand is, a partial one too. A result of an identity
    that is not partial is then stored where its own names put it."""
    op = site.op
    if is_input_independent(op, site.operands):
        return _constant(site, [site.stored(v) for v in op.outs], reduce)
    results = [
        ShardType(replicated_spec(len(v.shape))) if x is None else ShardType(x.spec, x.partial, x.kind)
        for x, v in zip(site.operands, op.outs, strict=True)
    ]
    left = op.primitive.family == "barrier"
    return OpDecision(
        operands=tuple(None if x is None else x.spec for x in site.operands),
        results=tuple(results),
        stored=tuple(None if left or r.partial else site.resharded(v) for r, v in zip(results, op.outs, strict=True)),
        reduce=reduce,
        inherits=tuple(i if r.partial else None for i, r in enumerate(results)),
    )


def _elementwise(site: _Site, reduce: tuple[int, ...]) -> OpDecision:
    """An elementwise op works in the spec that the layout assigns to its dims."""
    carried = _elementwise_on_partial(site)
    if carried is not None:
        return replace(carried, reduce=reduce)
    reduce += tuple(site.partial)
    op, site = site.op, site.reducing(site.partial)
    out = op.outs[0]
    if is_input_independent(op, site.operands):
        return _constant(site, [site.stored(v) for v in op.outs], reduce)
    spec = site.facts.assignment.elementwise_spec(op)
    if narrows(op) and any(set(a) - set(b) for a, b in zip(site.operand(0).spec, spec, strict=True)):
        spec = site.operand(0).spec  # the result has fewer bytes to send
    needs = tuple(None if v is None else broadcast_spec(spec, v.shape, out.shape) for v in op.ins)
    stored = tuple(site.resharded(v) for v in op.outs)
    return OpDecision(needs, (ShardType(spec),) * len(stored), stored, reduce, inherits=(None,) * len(stored))


def _elementwise_on_partial(site: _Site) -> OpDecision | None:
    """Apply an elementwise op to partial operands, if a law of its primitive allows that and no other operand is resharded."""
    op, positions = site.op, site.partial
    out = op.outs[0]
    if not positions or len(op.outs) > 1 or any(op.eqn.invars[i].aval.shape != out.shape for i in positions):
        return None
    law = law_for(site, positions)
    if law is None:
        return None
    first = site.operand(positions[0])
    needs = tuple(None if v is None else broadcast_spec(first.spec, v.shape, out.shape) for v in op.ins)
    others = [i for i, x in enumerate(site.operands) if x is not None and i not in positions and not x.is_constant]
    if any(site.operand(i).spec != needs[i] for i in others):
        return None
    result = ShardType(first.spec, first.partial, kind_after(law, first.kind))
    return OpDecision(needs, (result,), (None,), inherits=(positions[0],))


def _constant(site: _Site, specs: Sequence[Spec], reduce: tuple[int, ...]) -> OpDecision:
    """The decision about an input-independent op: its results, in these specs, are made where they are read."""
    none = (None,) * len(site.operands)
    return OpDecision(none, tuple(map(ShardType, specs)), (None,) * len(specs), reduce, is_constant=True)


def _by_rule(site: _Site, reduce: tuple[int, ...]) -> OpDecision:
    """An op with a factor rule: the layout's axes for its factors, changed where the op could not run or sends less."""
    op, rule = site.op, site.op.factor_rule
    positions, passed, law = site.partial, None, None
    if positions and len(op.outs) == 1:
        law = law_for(site, positions)
    if law is not None:
        if law.when == "smaller":
            passed = positions[0] if _reduces_less_after(site, positions[0]) else None
        elif (carried := _rule_on_partial(site, positions[0], law)) is not None:
            return replace(carried, reduce=reduce)
    source = None if passed is None else site.operand(passed)
    # partial operands that the op is not applied to are reduced first
    first = tuple(i for i in positions if source is None or site.operand(i).value is not source.value)
    reduce, site = reduce + first, site.reducing(first)
    axes = _factor_axes(site)
    partial, kind = partial_axes(op, axes, site.sizes)
    if source is not None:
        partial, kind = [_union(site, partial[0], source.partial)], kind_after(law, source.kind)
    if is_input_independent(op, site.operands) and not any(partial):
        return _constant(site, [site.stored(v) for v in op.outs], reduce)
    needs = needed_specs(op, axes)
    sends: list[SendOver] = []
    if rule.given is not None or any(x is not None and not x.is_constant for x in site.operands):
        sends = local_form_sends(op, needs, axes, site.sizes)
    return OpDecision(
        operands=tuple(needs),
        results=tuple(
            ShardType(spec_from_factors(dims, axes), over, kind if over else "sum")
            for dims, over in zip(rule.outs, partial, strict=True)
        ),
        stored=tuple(None if over else site.resharded(v) for v, over in zip(op.outs, partial, strict=True)),
        reduce=reduce,
        axes=tuple(axes),
        inherits=(passed,) * len(op.outs),
        sends=tuple(sends),
    )


# -- the axes of an op's factors


def _factor_axes(site: _Site) -> Axes:
    """The axes that split the factors of an op with a factor rule."""
    op, rule = site.op, site.op.factor_rule
    if rule.given is not None:
        return list(rule.given)
    axes, x = assigned_axes(site), site.operands[0] if site.operands else None
    if op.primitive.family == "reshape" and x is not None and not x.is_constant and x.iterations is None:
        axes = list(reshape_axes(rule, tuple(axes), x.spec, site.stored(op.outs[0]), tuple(site.sizes.items())))
    return spread(site, exchanged_or_unsharded(site, indexed(site, axes)))


def assigned_axes(site: _Site) -> Axes:
    """The axes that the layout assigns to the factors of an op."""
    assignment, op = site.facts.assignment, site.op
    cost = site.bytes_sent if assignment.layout.resolve == "cost" else None
    return assignment.factor_axes(op, cost)


def exchanged_or_unsharded(site: _Site, axes: Axes) -> Axes:
    """The axes of the factors, with moved dims unsharded where exchanging their blocks would send more; else ``axes``.

    Moved are dims along which an op cuts or joins arrays (``sharded_like`` of its rule), if these arrays are sharded
    differently.
    """
    rule = site.op.factor_rule
    moved = {f for pair in rule.sharded_like for f in pair if axes[f]}
    if not moved:
        return axes
    arrays = [(x.spec, dims) for x, dims in zip(site.operands, rule.ins, strict=True) if x is not None and dims]
    arrays += [(site.stored(v), dims) for v, dims in zip(site.op.outs, rule.outs, strict=True)]
    if all(e == axes[f] for spec, dims in arrays for e, fs in zip(spec, dims, strict=True) for f in fs if f in moved):
        return axes
    unsharded = [() if f in moved else got for f, got in enumerate(axes)]
    return unsharded if site.bytes_sent(unsharded) <= site.bytes_sent(axes) else axes


def spread(site: _Site, axes: Axes) -> Axes:
    """The axes of the factors after moving axes to another dim, where this sends fewer bytes; else ``axes``.

    Axes are moved away from dims that the op needs replicated, or along which its local form communicates, to a dim
    that every result has. A sort along a dim of V bytes in n shards all-gathers V·(n-1)/n bytes. If it splits another
    dim instead, an all-to-all of the operand and one of the result send 2·V/n·(n-1)/n. Primitives whose rule fixes the
    factors that may be split are left as they are.

    Args:
      axes: for each factor of the op's rule, the axes that split it.
    """
    rule, sizes = site.op.factor_rule, site.sizes
    if site.op.primitive.family == "kernel":
        return axes
    exchanged = [f for f, kind in enumerate(rule.kinds) if kind == "permutation"]
    used = {a for f, got in enumerate(axes) if f not in exchanged for a in got}
    lost: dict[tuple[str, ...], None] = {}
    for x, dims in zip(site.operands, rule.ins, strict=True):
        if x is None or not dims or x.is_constant or x.iterations is not None:
            continue
        for entry, factors in zip(x.spec, dims, strict=True):
            if any(rule.kinds[f] in ("need_replication", "permutation") for f in factors):
                lost[tuple(a for a in entry if a not in used and sizes[a] > 1)] = None
    lost.pop((), None)
    results = [{f for factors in dims for f in factors[:1]} for dims in rule.outs]
    in_every_result = set.intersection(*results) if results else set()  # a callback has no results
    others = [f for f in sorted(in_every_result) if rule.kinds[f] == "pass_through" and rule.sizes[f]]
    if not lost or not others:
        return axes
    least = site.bytes_sent(axes)
    for more in lost:
        if any(a in got for f, got in enumerate(axes) if f not in exchanged for a in more):
            continue  # an earlier choice uses them
        without = [tuple(a for a in got if a not in more) for got in axes]
        for f in others:
            choice = [(*got, *more) if g == f else got for g, got in enumerate(without)]
            if rule.sizes[f] % shard_count(choice[f], sizes) or contiguous_only(rule, choice, sizes) != choice:
                continue
            if least and (sent := site.bytes_sent(choice)) < least:
                least, axes = sent, choice
    return axes


def indexed(site: _Site, axes: Axes) -> Axes:
    """The axes of an op that reads or writes an array at some indices, where axes shard the indexed dims.

    The array stays as it is sharded, and these axes are taken from the op's other factors (of the indices and updates),
    unless the axes that the layout assigns send fewer bytes. The array is gathered for a read only if it has at most
    ``MAX_GATHERED_RATIO`` times the elements that are read, that sends fewer bytes, and the op is a ``dynamic_slice`` or in a
    loop that only reads the array. A ``dynamic_slice`` in such a loop is treated as a read of one window per iteration, of an
    array that may be gathered before the loop.
    """
    op, rule, sizes = site.op, site.op.factor_rule, site.sizes
    x = site.operands[0] if site.operands else None
    if x is None or "indexed" not in rule.kinds or x.is_constant:
        return axes
    split = {f: entry for (f,), entry in zip(rule.ins[0], x.spec, strict=True) if rule.kinds[f] == "indexed"}
    taken = {a for entry in split.values() for a in entry}
    if not taken:
        return axes
    in_place = [split.get(f, tuple(a for a in got if a not in taken)) for f, got in enumerate(axes)]
    in_place = contiguous_only(rule, in_place, sizes)
    choices = [in_place, axes] if in_place != axes else [axes]
    iterations = 1 if x.iterations is None else x.iterations
    sent = [site.bytes_sent(c) * iterations for c in choices]
    windows = iterations if op.primitive.contiguous_slice else 1
    read = [f for f in split if (f,) not in rule.outs[0]]
    may_gather = op.primitive.contiguous_slice or x.iterations is not None
    small = math.prod(x.value.shape) <= MAX_GATHERED_RATIO * math.prod(op.outs[0].shape) * windows
    if may_gather and small and any(axes[f] for f in read):
        gathered = [() if f in read else got for f, got in enumerate(axes)]
        # the array is gathered before the loop, so its bytes count once, and the bytes of the op once per iteration
        once = value_reshard_bytes(x.value, x.spec, spec_from_factors(rule.ins[0], gathered), sizes)
        choices.append(gathered)
        sent.append((site.bytes_sent(gathered) - once) * iterations + once)
    return choices[sent.index(min(sent))]


# -- partial operands


def law_for(site: _Site, positions: Sequence[int]) -> Law | None:
    """The law by which an op may be applied to its partial operands, at these positions; None: they are reduced first."""
    operands = [site.operand(i) for i in positions]
    first = operands[0]
    kinds = {x.kind for x in operands}
    if any((x.partial, x.spec) != (first.partial, first.spec) for x in operands) or (len(kinds) > 1 and kinds - ADDED):
        return None

    def of(kind: Kind) -> Law | None:
        return applicable_law(
            site.facts.assignment.program, site.op, kind, positions, lambda law: _is_used(site, law, first)
        )

    law = None if len(kinds) > 1 else of(first.kind)
    if law is None and "indexed" in kinds and all(adds_nothing(x.value.aval.dtype) for x in operands):
        law = of("sum")  # where one device has an element, the contributions also add up to it
        larger = math.prod(site.op.outs[0].shape) >= math.prod(first.value.shape)
        if law is not None and len(positions) == 1 and law.when == "always" and larger:
            return None  # no less is sent later, and a device without an element, which has -0.0, may make +0.0 of it
    return law


def _is_used(site: _Site, law: Law, x: Operand) -> bool:
    """Whether a law that holds for a partial operand is used (:data:`rules.partial.When`).

    ``smaller`` is decided where the axes of the op are known.
    """
    (out,) = site.op.outs
    if law.when in ("widening", "accumulated"):
        stacked = site.facts.accumulated.get(out)
        if stacked is None:
            return x.value in site.facts.deferred
        scattered = any(a in x.partial for entry in site.stored(out) for a in entry)
        return not (stacked and scattered)  # else it is reduced in every iteration
    return law.when != "named" or out in site.facts.assignment.program.cached(reduce_in_values)


def _rule_on_partial(site: _Site, i: int, law: Law) -> OpDecision | None:
    """Apply an op with a factor rule to partial operand i as it is sharded, if the op splits no factor otherwise."""
    rule, x = site.op.factor_rule, site.operand(i)
    axes = axes_of_array(rule, rule.ins[i], x.spec, site.sizes)
    if axes is None:
        return None
    result = ShardType(spec_from_factors(rule.outs[0], axes), x.partial, kind_after(law, x.kind))
    needs = zip(site.operands, needed_specs(site.op, axes), strict=True)
    specs = tuple(y.spec if y is not None and y.partial else need for y, need in needs)
    return OpDecision(specs, (result,), (None,), axes=tuple(axes), inherits=(i,))


def _reduces_less_after(site: _Site, i: int) -> bool:
    """Whether fewer bytes are sent if the result of an op is reduced instead of its partial operand i."""
    x, sent = site.operand(i), _bytes_after(site, i)
    if sent is None:
        return False
    return sent[1] < sent[0] + reduction_bytes(x.value, x.spec, site.stored(x.value), x.partial, x.kind, site.sizes)


def _bytes_after(site: _Site, i: int) -> tuple[float, float] | None:
    """(bytes sent for an op besides the reduction of its partial operand i, bytes if its result is reduced instead); None: the op
    cannot run on the partial operand."""
    x, (out,), rule, sizes = site.operand(i), site.op.outs, site.op.factor_rule, site.sizes
    axes = assigned_axes(site)
    need, made = spec_from_factors(rule.ins[i], axes), spec_from_factors(rule.outs[0], axes)
    if need != x.spec or any(a in x.partial for got in axes for a in got):
        return None
    (own,), kind = partial_axes(site.op, axes, sizes)
    if own and kind != kind_after(LINEAR, x.kind):
        return None
    result = site.stored(out)
    before = value_reshard_bytes(x.value, site.stored(x.value), need, sizes)
    before += reduction_bytes(out, made, result, own, kind, sizes)
    return before, reduction_bytes(out, made, result, _union(site, own, x.partial), kind, sizes)


def is_reduced_after(x: Operand, facts: Facts) -> bool:
    """Whether fewer bytes are sent if what all readers of a partial value make is reduced instead of the value.

    The gradient of merged low-rank weights, ``g`` in ``g @ b`` and ``a @ g``, is larger than both results. The readers' other
    operands are assumed to have their stored specs.
    """
    before = reduction_bytes(
        x.value, x.spec, facts.assignment.value_spec(x.value), x.partial, x.kind, facts.assignment.sizes
    )
    after = _bytes_of_readers(x, facts)
    return after is not None and after < before


def _bytes_of_readers(x: Operand, facts: Facts) -> float | None:
    """The bytes that the readers of a partial value send in addition if their results are reduced; None: one of them cannot run on
    it."""
    more = 0.0
    for op in facts.readers.get(x.value, ()):
        if op is None or op.ins.count(x.value) != 1:
            return None
        i = op.ins.index(x.value)
        operands = [None if v is None else Operand(v, facts.assignment.value_spec(v)) for v in op.ins]
        site = _Site(op, [*operands[:i], x, *operands[i + 1 :]], facts)
        law = applicable_law(facts.assignment.program, op, x.kind, [i], lambda law: law.when in ("smaller", "widening"))
        if law is None:
            return None
        if law.when == "widening":
            sent = _bytes_of_readers(replace(x, value=op.outs[0]), facts)
            if sent is None:
                return None
            more += sent
            continue
        sent = _bytes_after(site, i)
        if sent is None:
            return None
        more += sent[1] - sent[0]
    return more


def _union(site: _Site, a: Sequence[str], b: Sequence[str]) -> tuple[str, ...]:
    """The axes of both, in the order of the mesh."""
    return tuple(x for x in site.sizes if x in a or x in b)
