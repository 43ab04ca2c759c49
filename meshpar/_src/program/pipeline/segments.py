"""Divides the body of a microbatch loop into segments around its layer loops.

With n layer loops the body has n + 1 segments: segment j has the ops that need results of loop j − 1, but not of loop j. The body
of a training step has two loops: segment 0 embeds the tokens, loop 0 is the forward pass of the layers, segment 1 has the logits,
the loss and their gradients, loop 1 is the backward pass of the layers, and segment 2 has the gradient of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from ....errors import UnsupportedError
from ...compat.jax import Atom, aval_of, body_consts, body_operands
from ...compat.loop_operands import loop_parts
from ...iterables import grouped
from ...rules import primitive
from ..ir import Frame, Op
from ..jaxprs import readers, renamed
from .find import LayerLoop


class Place(NamedTuple):
    """What computes a value of the body of a microbatch loop.

    Attributes:
      segment: the segment in which the value is complete; negative for ``INVARIANT`` and ``CONSTANT``.
      stacked: each stage has a part of it: a layer loop stacks it, or elementwise ops make it of such values.
    """

    segment: int
    stacked: bool = False

    @property
    def loop(self) -> int:
        """The layer loop whose slots compute a stacked value."""
        return self.segment - 1

    @property
    def runs(self) -> Place:
        """The segment, or the slots, in which the value is available first: segment 0 for an invariant value."""
        return Place(max(self.segment, 0), self.stacked)


CONSTANT, INVARIANT = Place(-2), Place(-1)
"""Places of values that depend on literals alone, and of those that are equal in all microbatches."""


def stack_of(loop: int) -> Place:
    """The place of the values that a layer loop stacks."""
    return Place(loop + 1, stacked=True)


@dataclass(eq=False, slots=True)
class Body:
    """The body of a microbatch loop, with inlined calls, divided into segments.

    Attributes:
      consts, carries, xs: variables of the body's arguments.
      outs: its results (variables or literals): the new carries, then the stacked results.
      eqns: the equations outside of the layer loops, in order.
      loops: the equations of the layer loops, in order.
      places: the place of each variable.
      accumulators: position of a carry to which the body only adds → the added variable.
      gathered: stacked weights that are all-gathered before the loop, with (old name, new name) of their dims that are; gradients
        are then reduced after the loop.
    """

    consts: Sequence[Any]
    carries: Sequence[Any]
    xs: Sequence[Any]
    outs: Sequence[Any]
    eqns: list[JaxprEqn]
    loops: list[Any]
    places: dict[Any, Place] = field(default_factory=dict)
    accumulators: dict[int, Any] = field(default_factory=dict)
    gathered: dict[Any, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def place(self, atom: Atom) -> Place:
        """The place of a variable or literal."""
        return CONSTANT if isinstance(atom, Literal) else self.places[atom]

    def segment(self, atom: Atom) -> int:
        """The segment in which a value is complete: of a stack, the one after its loop."""
        return self.place(atom).runs.segment

    def adding_loop(self, carry: int) -> int | None:
        """The layer loop whose slots add to a carry, given by its position; None: a segment makes the new carry, or none does."""
        place = self.place(self.accumulators[carry]) if carry in self.accumulators else INVARIANT
        return place.loop if place.stacked else None


def divide(op: Op, loops: Sequence[LayerLoop]) -> Body:
    """The body of a microbatch loop, divided at its layer loops.

    Raises:
      UnsupportedError: an op with side effects, or a microbatch whose layers read results of the layers of the one before.
    """
    (frame,), (values,) = op.frames, body_consts(op.eqn)
    names: dict[Any, Any] = {v: Literal(c, v.aval) for v, c in zip(frame.jaxpr.constvars, values, strict=True)}
    layer_ops = {loop.op for loop in loops}
    flat = list(_inlined(frame, names, layer_ops))
    for inner, eqn in flat:
        if eqn.effects:
            raise UnsupportedError(
                f"{inner.label} has side effects in a loop over microbatches whose layers are a pipeline: they would be repeated",
                source=inner.source,
                fixes=["remove it from the loss and its layers", "or do not shard the stacked dim of the layers"],
            )
    body = Body(
        *loop_parts(op.eqn).split(frame.jaxpr.invars),
        outs=renamed(frame.jaxpr.outvars, names),
        eqns=[eqn for inner, eqn in flat if inner not in layer_ops and eqn.outvars],
        loops=[eqn for inner, eqn in flat if inner in layer_ops],
    )
    _place(body, [eqn for _, eqn in flat if eqn.outvars], op, loops)
    return body


def order_of(body: Body, loops: Sequence[LayerLoop]) -> str:
    """A letter for each layer loop: ``F`` forward, ``B`` backward, ``R`` forward, but recomputed for a backward loop.

    The direction of a scan does not tell: a model may run its layers from the last to the first. A loop of the backward pass is a
    backward loop, unless a later one reads its stacked results. If no loop is differentiated by JAX, a backward loop is one that
    reads the stacked results of a loop of the other direction.
    """
    reads = [{place.loop for v in eqn.invars if (place := body.place(v)).stacked} for eqn in body.loops]
    reverse = [eqn.params["reverse"] for eqn in body.loops]
    back = [
        any(reverse[j] != reverse[i] for j in reads[i])
        if loop.op.derivative_pass is None
        else loop.op.derivative_pass == "backward"
        for i, loop in enumerate(loops)
    ]
    later = [any(i in reads[j] and back[j] for j in range(i + 1, len(reads))) for i in range(len(reads))]
    return "".join("F" if not b else "R" if r else "B" for b, r in zip(back, later, strict=True))


def replaced(body: Body, loops: Sequence[Sequence[Any]], op: Op, sources: Sequence[LayerLoop]) -> None:
    """Replace each layer loop of a body by one or more loops, and divide the body at these.

    Args:
      body: it is changed.
      loops: for each layer loop, the equations that compute its results.
      op: the loop over microbatches.
      sources: for each of these equations, the layer loop that it is from.
    """
    at = grouped((body.place(eqn.outvars[0]), eqn) for eqn in body.eqns)
    eqns = [*at.get(CONSTANT, ()), *at.get(INVARIANT, ())]
    for j in range(len(body.loops) + 1):
        eqns += [*at.get(Place(j), ()), *(loops[j] if j < len(loops) else ()), *at.get(stack_of(j), ())]
    body.loops = [eqn for part in loops for eqn in part]
    _place(body, eqns, op, sources)


def _inlined(frame: Frame, names: dict[Any, Any], targets: set[Op]) -> Iterable[tuple[Op, Any]]:
    """The ops of a frame with their equations, in terms of ``names``; calls with a target op in their bodies are inlined."""
    for op in frame.ops:
        invars = renamed(op.eqn.invars, names)
        if op.frames and not op.primitive.control_flow and any(inner in targets for inner in op.frames[0].walk()):
            (body,), (consts,) = op.frames, body_consts(op.eqn)
            inner: dict[Any, Any] = {v: Literal(c, v.aval) for v, c in zip(body.jaxpr.constvars, consts, strict=True)}
            inner.update(zip(body.jaxpr.invars, body_operands(op.eqn, invars), strict=True))
            yield from _inlined(body, inner, targets)
            names.update(zip(op.eqn.outvars, renamed(body.jaxpr.outvars, inner), strict=True))
        else:
            outvars = [Var(v.aval) for v in op.eqn.outvars]
            names.update(zip(op.eqn.outvars, outvars, strict=True))
            yield op, op.eqn.replace(invars=invars, outvars=outvars)


def _place(body: Body, eqns: Sequence[JaxprEqn], op: Op, loops: Sequence[LayerLoop]) -> None:
    """Set the places of all variables, and the accumulators.

    A carry is in the segment that makes its new value. This is found by repetition: places only move to later segments.
    """
    of_carry = [0] * len(body.carries)
    while True:
        _place_all(body, eqns, of_carry, op, loops)
        body.accumulators = _accumulators(body, eqns)
        new = list(of_carry)
        for k, (carry, out) in enumerate(zip(body.carries, body.outs, strict=False)):
            if k not in body.accumulators and out is not carry:
                new[k] = max(of_carry[k], body.segment(out))
        if new == of_carry:
            return
        of_carry = new


def _place_all(
    body: Body, eqns: Sequence[JaxprEqn], of_carry: Sequence[int], op: Op, loops: Sequence[LayerLoop]
) -> None:
    """Set the places of all variables, given the segments of the carries.

    Raises:
      UnsupportedError: a layer loop reads a later segment.
    """
    places = body.places
    places.clear()
    places.update(dict.fromkeys(body.consts, INVARIANT))
    places.update(dict.fromkeys(body.xs, Place(0)))
    for carry, out, segment in zip(body.carries, body.outs, of_carry, strict=False):
        places[carry] = INVARIANT if out is carry else Place(segment)
    index = {id(eqn): i for i, eqn in enumerate(body.loops)}
    for eqn in eqns:
        i = index.get(id(eqn))
        if i is not None:
            if any(body.segment(v) > i for v in eqn.invars):
                raise _dependence(op, loops[i])
            carried, stacked = loop_parts(eqn).split_results(eqn.outvars)
            places.update(dict.fromkeys(carried, Place(i + 1)))
            places.update(dict.fromkeys(stacked, stack_of(i)))
            continue
        read = list(map(body.place, eqn.invars))
        stacks = {place for place in read if place.stacked}
        if len(stacks) == 1 and _is_elementwise(body, eqn):
            place = stacks.pop()
        else:
            place = Place(max((place.segment for place in read), default=CONSTANT.segment))
        places.update(dict.fromkeys(eqn.outvars, place))


def _is_elementwise(body: Body, eqn: JaxprEqn) -> bool:
    """Whether an op may be applied to the parts of stacks: it is elementwise, with scalars that do not change."""
    if not primitive(eqn.primitive.name).elementwise or len(eqn.outvars) != 1:
        return False
    shape = aval_of(eqn.outvars[0]).shape
    return all(
        aval_of(v).shape == shape if body.place(v).stacked else isinstance(v, Literal) and np.ndim(v.val) == 0
        for v in eqn.invars
    )


def _accumulators(body: Body, eqns: Sequence[Any]) -> dict[int, Any]:
    """The carries to which the body only adds, by position, and the added variables."""
    made = {v: eqn for eqn in eqns for v in eqn.outvars}
    uses: dict[Any, list[int]] = readers(eqns, body.outs)
    found = {}
    for k, (carry, out) in enumerate(zip(body.carries, body.outs, strict=False)):
        eqn = None if isinstance(out, Literal) else made.get(out)
        if eqn is None or primitive(eqn.primitive.name).family != "add":
            continue
        if len(uses[out]) > 1 or len(uses.get(carry, ())) != 1:
            continue
        a, b = eqn.invars
        addend = b if a is carry else a if b is carry else None
        if addend is not None and addend.aval.shape == carry.aval.shape:
            found[k] = addend
    return found


def _dependence(op: Op, loop: LayerLoop) -> UnsupportedError:
    """The error for layers of a microbatch that depend on the layers of the microbatch before."""
    return loop.unsupported(
        f"the loop at {op.source or 'an unknown line'} runs layers whose stacked dim `{loop.dim}` is sharded, and each of its "
        "iterations needs results of the layers of the iteration before: its microbatches cannot be in different stages",
        "let an iteration only add its results to the carry, as mp.train.accumulate_gradients does",
    )
