"""Integer and boolean values of a program that depend on constants alone, as the indices of lookups often do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...compat.jax import Atom, bind, literal_array
from ...iterables import operands_first
from ...rules import ELEMENTWISE
from ...rules.local_forms import plain_params
from ..ir import Op, Value

MAX_USES = 4
"""Lookups that use one element more often are not represented by a table."""

MAX_ELEMENTS = 1 << 24
"""Larger values are not evaluated."""

_MOVES = ("broadcast_in_dim", "reshape", "squeeze", "iota", "concatenate", "slice", "rev", "transpose", "name_dims")
_EVALUATED = ELEMENTWISE | set(_MOVES)


def _evaluated_op(value: Value) -> Op | None:
    """The op that computes a value, if the value is evaluated where its operands are known."""
    is_integer = value.aval.dtype == np.bool_ or jnp.issubdtype(value.aval.dtype, np.integer)
    is_known = value.op is not None and value.op.name in _EVALUATED
    return value.op if is_known and is_integer and value.aval.size <= MAX_ELEMENTS else None


def _counted(value: Value) -> Value | None:
    """The value ``i`` of which an op makes a broadcast, a cast, or jnp's ``where(i < 0, i + n, i)``, without an evaluation: it may
    have few elements, and the result too many, as the indices of ``jnp.put_along_axis`` have."""
    op = value.op
    if op is not None and op.name in ("broadcast_in_dim", "convert_element_type", "name_dims"):
        return op.ins[0]
    test = op.ins[0].op if op is not None and op.name == "select_n" and op.ins[0] is not None else None
    if op is None or test is None or test.name != "lt" or test.ins != [op.ins[1], None]:
        return None
    return op.ins[1] if literal_array(test.eqn.invars[1]) == 0 else None


class Constants:
    """Evaluates values that depend on constants alone.

    Attributes:
      known: the constants of closed jaxprs, and the results of evaluations; None: depends on an input, or is not evaluated.
      outer: for a value that a loop or branch only reads, the value outside that is passed in.
    """

    def __init__(self) -> None:
        self.known: dict[Value, Any] = {}
        self.outer: dict[Value, Value] = {}

    def evaluate(self, value: Value) -> np.ndarray | None:
        """The elements of an integer or boolean value; None if it depends on an input, or is too large."""
        for item in operands_first(value, self._operands, self.known):
            self.known[item] = self.known[self.outer[item]] if item in self.outer else self._computed(item)
        known = self.known[value]
        return known if known is None or isinstance(known, np.ndarray) else np.asarray(known)

    def _operands(self, value: Value) -> list[Value]:
        """The values of which one is the value, or from which its op computes it; none if the op is not evaluated."""
        if value in self.outer:
            return [self.outer[value]]
        op = _evaluated_op(value)
        return [] if op is None else [v for v in op.ins if v is not None]

    def _computed(self, value: Value) -> np.ndarray | None:
        """The elements of a value whose operands are in ``known``; None as in :meth:`evaluate`."""
        op = _evaluated_op(value)
        if op is None:
            return None
        xs = [literal_array(var) if v is None else self.known[v] for var, v in zip(op.eqn.invars, op.ins, strict=True)]
        if any(x is None for x in xs):
            return None
        with jax.ensure_compile_time_eval():
            return np.asarray(bind(op.eqn, xs, plain_params(op.eqn.params))[op.outs.index(value)])

    def lookup_table(self, value: Value | None, atom: Atom, size: int, mode: Any) -> np.ndarray | None:
        """The indices of a gather or scatter along one dim.

        Args:
          value: the index vectors ``[n, 1]``; None for a literal, which ``atom`` then is.
          size: of the dim that is indexed.
          mode: of the gather or scatter.

        Returns:
          int64 ``[n]``; None if they are not constant, not all in bounds, or use an element more than :data:`MAX_USES` times.
        """
        vectors = literal_array(atom) if value is None else self.evaluate(value)
        if vectors is None or not 0 < vectors.size <= MAX_ELEMENTS or vectors.ndim != 2:
            return None
        index = vectors[:, 0].astype(np.int64)
        if mode in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS):
            index = np.clip(index, 0, size - 1)
        if index.min() < 0 or index.max() >= size or np.bincount(index).max() > MAX_USES:
            return None
        return index

    def iota_dim(self, value: Value) -> int | None:
        """The dim along which an integer value counts 0, 1, 2, …, as ``jnp.arange`` does, or None."""
        value = self.outer.get(value, value)
        op, dtype, source = value.op, value.aval.dtype, _counted(value)
        if op is not None and jnp.issubdtype(dtype, jnp.integer):
            d = op.eqn.params["dimension"] if op.name == "iota" else None if source is None else self.iota_dim(source)
            if d is not None and source is not None:
                to = op.eqn.params.get("broadcast_dimensions", range(len(source.shape)))[d]
                d = to if value.shape[to] == source.shape[d] else None
            if d is not None and value.shape[d] <= jnp.iinfo(dtype).max:
                return d
        elements = self.evaluate(value)
        if elements is None:
            return None
        for d, n in enumerate(value.shape):
            count = np.arange(n).reshape([n if k == d else 1 for k in range(len(value.shape))])
            if n > 1 and np.array_equal(elements, np.broadcast_to(count, value.shape)):
                return d
        return None
