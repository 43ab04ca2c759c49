"""Constant scalars of a program: literals, also those passed to calls, and their casts, broadcasts and multiples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from ..compat.jax import body_consts, body_operands, is_tracer, literal_array
from .ir import Op, Program, Value


def _unchanged(params: Any, x: Any) -> Any:
    return x


_ON_SCALARS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "transpose", "copy"), _unchanged),
    **dict.fromkeys(("name_dims", "rename_dims", "place", "sharding_constraint"), _unchanged),
    "convert_element_type": lambda params, x: np.asarray(x).astype(params["new_dtype"])[()],
    "neg": lambda params, x: -x,
    "mul": lambda params, x, y: x * y,
    "div": lambda params, x, y: x / y if np.issubdtype(np.result_type(y), np.inexact) else None,
}
"""Primitive → (params, *scalars) → scalar: the constant that all elements of its result have, given its operands'."""


def constant_of(program: Program, op: Op, i: int) -> Any:
    """The scalar that all elements of operand ``i`` are equal to; None: not known."""
    var, value = op.eqn.invars[i], op.ins[i]
    return _scalar(literal_array(var)) if value is None else _constant(value, program.cached(_scalars))


def _constant(value: Value, found: dict[Value, Any]) -> Any:
    """As :func:`constant_of`, of a value; results are cached in ``found``."""
    if value not in found:
        op, result = value.op, None
        if op is not None and op.name in _ON_SCALARS:
            operands = [
                _scalar(literal_array(var)) if v is None else _constant(v, found)
                for var, v in zip(op.eqn.invars, op.ins, strict=True)
            ]
            if all(x is not None for x in operands):
                with np.errstate(all="ignore"):
                    result = _ON_SCALARS[op.name](op.eqn.params, *operands)
        found[value] = result
    return found[value]


def _scalar(x: Any) -> Any:
    """The only element of an array; None: it has several, or is a random key or traced."""
    if is_tracer(x) or np.size(x) != 1:
        return None
    if jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended):
        return None
    return np.asarray(x).reshape(-1)[0]


def _scalars(program: Program) -> dict[Value, Any]:
    """value → scalar, for constants of one element: arrays that the function closes over, and literals passed to calls."""
    found = dict(zip(program.constants, map(_scalar, program.closed.consts), strict=True))
    for op in program.root.walk():
        for frame, consts in zip(op.frames, body_consts(op.eqn) if op.frames else (), strict=True):
            found.update(
                (frame.env[var], _scalar(const)) for var, const in zip(frame.jaxpr.constvars, consts, strict=False)
            )
            if not op.primitive.control_flow:
                invars = body_operands(op.eqn, op.eqn.invars)
                literals = [(v, x) for v, x in zip(frame.ins(), invars, strict=True) if isinstance(x, Literal)]
                found.update((v, _scalar(literal_array(x))) for v, x in literals)
    return {value: x for value, x in found.items() if x is not None}
