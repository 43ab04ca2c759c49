"""Casts and all-gathers stacked weights once, before a loop over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from ...compat.jax import closed_parts
from ...compat.loop_operands import loop_parts
from ..ir import Op, Value
from .find import LayerLoop
from .segments import INVARIANT, Body

DimsOf = Callable[[Value], Sequence[str | None]]
"""Value → the names of its dims."""

ValueAxes = Callable[[Value], Sequence[Sequence[str]]]
"""Value → the axes that the layout assigns to each of its dims."""

Gathered = tuple[tuple[int, tuple[str, ...]], ...]
"""(position of a stacked operand of a layer loop, the names of its dims that are all-gathered first), for some operands."""


def gathered_dims(loop: LayerLoop, dims: DimsOf, axes: ValueAxes) -> Gathered:
    """The dims of stacked operands that each layer would all-gather (FSDP).

    Such a dim is split over an axis that splits another dim of the activations. The activations have the dim as well, where it is
    not split over that axis.

    Args:
      dims: value → the names of its dims.
      axes: value → the axes of its dims.
    """
    found = []
    activations = [dict(zip(dims(v), axes(v), strict=True)) for v in loop.carries]
    for p in loop_parts(loop.op.eqn).stacks:
        v = loop.op.ins[p]
        if v is None:
            continue
        names = [
            name
            for name, over in zip(dims(v)[1:], axes(v)[1:], strict=True)
            if name is not None
            and any(
                name in x and axis not in x[name] and any(axis in split for split in x.values())
                for axis in over
                for x in activations
            )
        ]
        if names:
            found.append((p, tuple(names)))
    return tuple(found)


def gather_stacks(body: Body, gathered: Sequence[Gathered]) -> None:
    """Let the layer loops of a microbatch read stacked weights some of whose dims have other names, once these are divided into
    stages.

    No rule of the layout shards these names, so that the parts of a stage are all-gathered before the loop over microbatches. The
    gradients of the layers stay partial until after this loop.

    Args:
      gathered: the dims, for each layer loop.
    """
    for eqn, operands in zip(body.loops, gathered, strict=True):
        for p, names in operands:
            if body.place(eqn.invars[p]) == INVARIANT:
                body.gathered[eqn.invars[p]] = tuple(sorted((name, f"gathered_{name}") for name in names))


def cast_stacks(body: Body, loops: Sequence[LayerLoop]) -> None:
    """Let the layer loops of a microbatch read narrower copies of their stacked weights; this changes no number.

    A layer casts its slice of a stack to the dtype in which it computes. If it reads the slice for nothing else, the stack is cast
    before the loop over microbatches. In the layer, the slice is cast to the stack's dtype, and by the layer's own cast back.
    """
    copies: dict[tuple[Any, Any], Any] = {}
    for i, (eqn, loop) in enumerate(zip(body.loops, loops, strict=True)):
        invars, casts = list(eqn.invars), dict[int, JaxprEqn]()
        for p in loop_parts(eqn).stacks:
            v, cast = invars[p], _only_cast(loop.op, p)
            if cast is None or body.place(v) != INVARIANT:
                continue
            dtype = cast.params["new_dtype"]
            if (v, dtype) not in copies:
                copies[v, dtype] = copy = Var(v.aval.update(dtype=dtype, weak_type=False))
                body.eqns.append(cast.replace(invars=[v], outvars=[copy]))
                body.places[copy] = INVARIANT
            invars[p], casts[p] = copies[v, dtype], cast
        if casts:
            body.loops[i] = eqn.replace(invars=invars, params={**eqn.params, "jaxpr": _widening(eqn, casts)})


def _only_cast(loop: Op, position: int) -> JaxprEqn | None:
    """The equation by which a layer casts its slice of an operand to a narrower float dtype; None: the layer reads it otherwise."""
    (frame,) = loop.frames
    value, casts = frame.ins()[position], dict[Any, JaxprEqn | None]()  # by dtype
    for op in frame.walk():
        is_call = op.frames and not op.primitive.control_flow  # its body reads its operands
        if value in op.ins and not is_call:
            is_cast = op.primitive.family == "cast"
            casts[op.outs[0].aval.dtype if is_cast else None] = op.eqn if is_cast else None
    if len(casts) != 1 or None in casts or value in frame.outs():
        return None
    ((dtype, cast),) = casts.items()
    floats = np.issubdtype(value.aval.dtype, np.floating) and jax.dtypes.issubdtype(dtype, np.floating)
    return cast if floats and dtype.itemsize < value.aval.dtype.itemsize else None


def _widening(eqn: JaxprEqn, casts: Mapping[int, JaxprEqn]) -> ClosedJaxpr:
    """The body of a scan that takes narrower slices at some positions, and casts them to the dtypes of its own.

    Args:
      casts: position → the equation that casts a slice to the narrower dtype.
    """
    jaxpr, values = closed_parts(eqn.params["jaxpr"])
    invars, eqns = list(jaxpr.invars), []
    for p, cast in casts.items():
        wide = invars[p]
        invars[p] = Var(wide.aval.update(dtype=cast.params["new_dtype"], weak_type=False))
        params = {**cast.params, "new_dtype": wide.aval.dtype}
        eqns.append(cast.replace(invars=[invars[p]], outvars=[wide], params=params))
    return ClosedJaxpr(jaxpr.replace(invars=invars, eqns=[*eqns, *jaxpr.eqns]), values)
