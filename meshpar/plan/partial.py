"""What the planner needs to know of a program to decide where partial values are reduced: constants, and where sums end.

All of it follows from the program alone, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from ..compat.jax import body_consts, is_tracer, literal_array, scan_counts
from ..program.ir import Op, Program, Value
from ..program.primitives import reduce_in_p
from ..rules import having
from ..rules.partial import Law, Other, is_scale


def _unchanged(params: Any, x: Any) -> Any:
    return x


_FILLED: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "transpose", "copy"), _unchanged),
    **dict.fromkeys(having(lambda p: p.identity), _unchanged),
    "convert_element_type": lambda params, x: np.asarray(x).astype(params["new_dtype"])[()],
    "neg": lambda params, x: -x,
    "mul": lambda params, x, y: x * y,
    "div": lambda params, x, y: x / y if np.issubdtype(np.result_type(y), np.inexact) else None,
}
"""The constant that fills the result of an op whose operands are each filled with one constant."""


def constant_of(program: Program, op: Op, i: int) -> Any:
    """The constant that every element of an operand is; None: not known."""
    var, value = op.eqn.invars[i], op.ins[i]
    return _scalar(literal_array(var)) if value is None else _constant(value, program.cached(_scalars))


def _constant(value: Value, found: dict[Value, Any]) -> Any:
    if value not in found:
        op, result = value.op, None
        if op is not None and op.name in _FILLED:
            operands = [
                _scalar(literal_array(var)) if v is None else _constant(v, found)
                for var, v in zip(op.eqn.invars, op.ins, strict=True)
            ]
            if all(x is not None for x in operands):
                with np.errstate(all="ignore"):
                    result = _FILLED[op.name](op.eqn.params, *operands)
        found[value] = result
    return found[value]


def _scalar(x: Any) -> Any:
    """The element of a constant that has one; None: it has several, or is a random key or traced."""
    if is_tracer(x) or np.size(x) != 1:
        return None
    if jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended):
        return None
    return np.asarray(x).reshape(-1)[0]


def _scalars(program: Program) -> dict[Value, Any]:
    """The values that no op computes and that are constants of one element: closed over, or literals passed to calls."""
    found = dict(zip(program.constants, map(_scalar, program.closed.consts), strict=True))
    for op in program.root.walk():
        for frame, consts in zip(op.frames, body_consts(op.eqn) if op.frames else (), strict=True):
            found.update(
                (frame.env[var], _scalar(const)) for var, const in zip(frame.jaxpr.constvars, consts, strict=False)
            )
            if not op.primitive.control_flow:
                invars = op.eqn.invars[len(op.eqn.invars) - len(frame.jaxpr.invars) :]
                literals = [(v, x) for v, x in zip(frame.ins(), invars, strict=True) if isinstance(x, Literal)]
                found.update((v, _scalar(literal_array(x))) for v, x in literals)
    return {value: x for value, x in found.items() if x is not None}


def satisfies(other: Other, program: Program, op: Op, i: int) -> bool:
    """Whether an operand that is not partial is what a law requires."""
    if other in ("any", "none"):
        return other == "any"
    constant = constant_of(program, op, i)
    if constant is None:
        return False
    return not constant if other == "zero" else is_scale(constant, inverse=other == "divisor")


def applicable_law(
    program: Program, op: Op, kind: Any, positions: Sequence[int], used: Callable[[Law], bool]
) -> Law | None:
    """The first law that is used by which an op may be applied to operands at some positions that are partial by a reduction."""
    for law in op.primitive.partial:
        others = (i for i in range(len(op.ins)) if i not in positions)
        if (
            law.admits(op.eqn, kind, positions)
            and used(law)
            and all(satisfies(law.other(i), program, op, i) for i in others)
        ):
            return law
    return None


def read_counts(program: Program) -> dict[Value, int]:
    """How often each value is read; calls read nothing, the ops of their bodies do."""
    found: dict[Value, int] = {}
    frames = [program.root]
    for op in program.root.walk():
        if op.frames and not op.primitive.control_flow:
            continue
        frames += op.frames
        for v in op.ins:
            if v is not None:
                found[v] = found.get(v, 0) + 1
    for frame in frames:
        for var in frame.jaxpr.outvars:
            if not isinstance(var, Literal):
                value = frame.env[var]
                found[value] = found.get(value, 0) + 1
    return found


def addends(program: Program, end: Value) -> Iterator[tuple[Value, bool]]:
    """The values from which a value is computed by ops that partial sums may pass, each read once; that value first.

    Yields:
      (value, whether a loop stacks it on the way).
    """
    times = program.cached(read_counts)
    todo = [(end, False)]
    while todo:
        value, stacked = todo.pop()
        op = value.op
        if times.get(value, 0) != 1 or op is None:
            continue
        yield value, stacked
        if op.primitive.scan:
            k, (_, carries) = op.outs.index(value), scan_counts(op.eqn.params)
            var = op.frames[0].jaxpr.outvars[k]
            if k >= carries and not isinstance(var, Literal):
                todo.append((op.frames[0].env[var], True))
            continue
        arrays = [i for i, v in enumerate(op.ins) if v is not None and (op.rule is not None or v.shape == value.shape)]
        for positions in (arrays, *([i] for i in arrays)) if len(op.outs) == 1 else ():
            if (
                positions
                and applicable_law(program, op, "sum", positions, lambda law: law.when != "smaller") is not None
            ):
                todo += [(v, stacked) for i in positions if (v := op.ins[i]) is not None]
                break


def reduce_in_values(program: Program) -> frozenset[Value]:
    """The values in the dtype of a ``reduce_in`` from which it is computed by ops that partial sums may pass, each read once."""
    found: set[Value] = set()
    for op in program.root.walk():
        if op.eqn.primitive is reduce_in_p and op.ins[0] is not None:
            dtype = op.outs[0].aval.dtype
            found |= {v for v, _ in addends(program, op.ins[0]) if v.aval.dtype == dtype}
    return frozenset(found)
