"""The ops that may be applied to partial values before these are reduced.

A value is partial over mesh axes if every device along them has a term a_i of it, and the value is ``R_i a_i`` for a reduction R:
the sum, maximum, minimum, product, logical or bitwise *and* or *or* of the terms. An op f may be applied to the terms if

    f(R_i a_i) = R_i f(a_i)

for every value of the terms, NaN and infinities included. Each :class:`Law` states one case in which this holds. A primitive lists
its laws in its registry entry (``partial=``), the planner's only source.

For integers, whose arithmetic is modular, laws are exact. For floating-point sums they hold up to a reassociation of the sum: it is
rounded in another order, and overflows if partial sums do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..compat.jax import aval_of
from .rule import REDUCTIONS, Kind

DtypeClass = Literal["bool", "integer", "narrow", "float", "complex", "extended"]
"""``narrow``: floating-point types with fewer exponent bits than float32 (float16, float8), which overflow and underflow readily;
``float``: the others (bfloat16, float32, float64); ``extended``: random keys."""

Other = Literal["any", "scale", "divisor", "zero", "none"]
"""The condition on an operand that is not partial.

``any``: any value; it is the same on every device that has a term.
``scale``: a constant scalar (or an array of one constant) c with ``SCALES[0] <= |c| <= SCALES[1]``.
``divisor``: the inverse of one.
``zero``: an array of zeros, or a zero, that is constant.
``none``: no such operand is allowed; all operands are partial.
"""

When = Literal["always", "smaller", "widening", "accumulated", "named"]
"""The condition under which the planner uses a law.

``always``: a reduction of the result sends no more bytes than one of the operand.
``smaller``: if the reduction of the result sends fewer bytes.
``widening``: the result has twice the bytes, so only if it is added to a carry of a loop, which is reduced once, after the loop.
``accumulated``: as ``widening``, for a result of another shape.
``named``: if the user has named the dtype of the reduction (:class:`meshpar.train.Precision`).
"""

SCALES = (2.0**-32, 2.0**16)
"""Magnitudes of the constants by which a floating-point partial sum may be scaled. 0, infinities and NaN are excluded because
``0 * inf`` is NaN. A term times 2**16 overflows only within that factor of the largest number, which the sum of as many terms
does too. A term times 2**-32 (the mean of 4e9 elements) loses digits below 2**-94 only."""

NUMBERS: frozenset[DtypeClass] = frozenset({"integer", "narrow", "float", "complex"})
ANY_DTYPE: frozenset[DtypeClass] = frozenset({*NUMBERS, "bool", "extended"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A case in which an op commutes with a reduction over devices, so that it may be applied to partial operands.

    For example, ``transpose(Σ a_i) = Σ transpose(a_i)``.

    Attributes:
      kinds: the reductions.
      dtypes: classes of dtypes of the partial operands.
      operands: start and stop of the positions of operands that may be partial (stop None: all further ones). If several are, they
        are partial over the same axes, in the same spec, by the same reduction.
      most: how many operands may be partial at once; None: any number.
      others: by position, the condition on operands that are not partial; the last entry is for all further positions.
      holds: a condition on the equation; None: the law holds for all equations.
      when: the planner uses the law.
    """

    kinds: frozenset[Kind]
    dtypes: frozenset[DtypeClass] = NUMBERS
    operands: tuple[int, int | None] = (0, 1)
    most: int | None = 1
    others: tuple[Other, ...] = ("any",)
    holds: Callable[[Any], bool] | None = None
    when: When = "always"

    def admits(self, eqn: JaxprEqn, kind: Kind, partial: Sequence[int]) -> bool:
        """Whether the operands at positions ``partial`` may be partial by the reduction ``kind``; other operands are
        not checked."""
        allowed = range(len(eqn.invars))[slice(*self.operands)]
        return (
            kind in self.kinds
            and all(i in allowed for i in partial)
            and (self.most is None or len(partial) <= self.most)
            and all(dtype_class(aval_of(eqn.invars[i]).dtype) in self.dtypes for i in partial)
            and (self.holds is None or self.holds(eqn))
        )

    def other(self, position: int) -> Other:
        """The condition on the operand at a position if it is not partial."""
        return self.others[min(position, len(self.others) - 1)]


def dtype_class(dtype: Any) -> DtypeClass:
    """The class of a dtype, for :class:`Law`."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return "extended"
    if dtype == np.bool_:
        return "bool"
    if jnp.issubdtype(dtype, jnp.integer):
        return "integer"
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    return "float" if jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp else "narrow"


def is_scale(c: Any, inverse: bool = False) -> bool:
    """Whether a floating-point partial sum may be multiplied (``inverse``: divided) by a constant."""
    size = abs(complex(c)) if np.iscomplexobj(c) else abs(float(c))
    low, high = (1 / SCALES[1], 1 / SCALES[0]) if inverse else SCALES
    return low <= size <= high  # False for NaN


def _same_dtype(eqn: JaxprEqn) -> bool:
    return aval_of(eqn.invars[0]).dtype == aval_of(eqn.outvars[0]).dtype


def _floats(eqn: JaxprEqn) -> bool:
    return all(dtype_class(aval_of(v).dtype) in ("narrow", "float") for v in (eqn.invars[0], eqn.outvars[0]))


def _widens(eqn: JaxprEqn) -> bool:
    """Whether the cast is to a float dtype with all values of the operand's (``jnp.promote_types`` rejects 8-bit floats)."""
    narrow, wide = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
    if narrow == wide or not _floats(eqn):
        return False
    a, b = jnp.finfo(narrow), jnp.finfo(wide)
    return a.nmant <= b.nmant and a.maxexp <= b.maxexp and b.minexp <= a.minexp


def _integers_stay(eqn: JaxprEqn) -> bool:
    """Whether a matmul of integers has their dtype: a sum in a narrower dtype wraps around, and the wider result does not."""
    dtypes = {aval_of(v).dtype for v in (*eqn.invars, *eqn.outvars)}
    return len(dtypes) == 1 or not any(dtype_class(d) == "integer" for d in dtypes)


_SUM: frozenset[Kind] = frozenset({"sum"})

MOVES = Law(kinds=REDUCTIONS, dtypes=ANY_DTYPE)
"""The op moves or copies elements and changes none (transpose, reshape): it commutes with every reduction."""

SAME_DTYPE = Law(kinds=REDUCTIONS, dtypes=ANY_DTYPE, holds=_same_dtype)
"""A conversion to the operand's own dtype (of a weak type to a strong one), as :data:`MOVES`."""

_WIDE: frozenset[DtypeClass] = frozenset({"integer", "float", "complex"})

LINEAR = Law(kinds=_SUM, dtypes=_WIDE, operands=(0, None), most=None, others=("none",))
"""``f(Σ a_i, Σ b_i) = Σ f(a_i, b_i)``: the op is linear in all operands jointly (add, sub). All of them are partial:
``Σ a_i + b`` is not ``Σ (a_i + b)``. Narrow floating-point types are excluded: ``a_i + b_i`` overflows where the sums do not."""

NEGATES = Law(kinds=_SUM)
"""``-Σ a_i = Σ -a_i``, in every type: a negation neither rounds nor overflows."""

LINEAR_ALONG = Law(kinds=_SUM, dtypes=_WIDE)
"""The op sums elements of one operand (reduce_sum, cumsum): sums over devices and over elements may be exchanged. Narrow
floating-point types are excluded as for :data:`LINEAR`."""

SCALES_FLOATS = Law(kinds=_SUM, dtypes=frozenset({"float", "complex"}), operands=(0, None), others=("scale",))
"""``(Σ a_i) c = Σ (a_i c)`` for a constant c of moderate magnitude (:data:`SCALES`). A value known at run time only (a loss scale,
the inverse of a norm) may be 0 or infinite, and ``0 * inf`` on a device whose term is 0 would make the sum NaN. Narrow
floating-point types are excluded: their terms overflow or vanish where their sum does not."""

SCALES_BY_POWERS = Law(kinds=_SUM, dtypes=frozenset({"float"}))
"""``(Σ a_i) 2**k = Σ (a_i 2**k)``, also for a k known at run time only: the scale is finite, and no term is rounded."""

SCALES_INTEGERS = Law(kinds=_SUM, dtypes=frozenset({"integer"}), operands=(0, None))
"""``(Σ a_i) b = Σ (a_i b)`` modulo 2**bits, for any integers b."""

DIVIDES_FLOATS = Law(kinds=_SUM, dtypes=frozenset({"float", "complex"}), others=("divisor",))
"""``(Σ a_i) / c = Σ (a_i / c)``, as :data:`SCALES_FLOATS`. Not for integers, whose division rounds, and not for a divisor that
is partial."""

SELECTS_OR_ZERO = Law(kinds=_SUM, dtypes=ANY_DTYPE, operands=(1, None), most=None, others=("any", "zero"))
"""``select(p, Σ a_i, 0) = Σ select(p, a_i, 0)``: the predicate is not partial, and every other case is zero."""

_LATTICE: frozenset[Kind] = frozenset({"max", "min", "and", "or"})

SELECTS = Law(kinds=_LATTICE, dtypes=ANY_DTYPE, operands=(1, None), most=None)
"""``select(p, R_i a_i, b) = R_i select(p, a_i, b)`` for an idempotent reduction, since ``R_i b = b``."""


def idempotent(kind: Kind) -> Law:
    """The op is the reduction itself on two operands (max for a maximum): ``R(R_i a_i, b) = R_i R(a_i, b)`` since ``R_i b = b``,
    and ``R(R_i a_i, R_i b_i) = R_i R(a_i, b_i)``. NaN passes through both sides."""
    return Law(kinds=frozenset({kind}), dtypes=ANY_DTYPE, operands=(0, None), most=None)


def along(kind: Kind, when: When = "always") -> Law:
    """The op reduces elements as R reduces devices: both orders combine the same elements (reduce_max, cummax for a maximum).

    For a sum, :data:`LINEAR_ALONG`; for a product the same types, for the same reason.
    """
    return Law(kinds=frozenset({kind}), dtypes=_WIDE if kind in ("sum", "prod") else ANY_DTYPE, when=when)


CONTRACTS = Law(kinds=_SUM, dtypes=_WIDE, operands=(0, 2), holds=_integers_stay, when="smaller")
"""``(Σ a_i) @ b = Σ (a_i @ b)``. A matmul adds many terms anyway, so only the order of the sum changes if b is finite. If b has an
infinity or NaN where a term is 0, a device adds NaN where the unsharded matmul adds an infinity; as b multiplies a full row or
column, that result is not finite without a layout either. Elementwise multiplications by arrays have no such law: one infinity that
meets a 0 would change a finite result elsewhere into NaN."""

WIDENS = Law(kinds=_SUM, dtypes=frozenset({"narrow", "float"}), holds=_widens, when="widening")
"""A conversion to a wider floating-point type: ``wide(Σ a_i) = Σ wide(a_i)``, rounded to the narrower type once per device instead
of once more after the sum. Not for integers: a narrow sum wraps around, a wide one does not."""

PADS_WITH_ZEROS = Law(kinds=_SUM, others=("zero",), when="accumulated")
"""``pad(Σ a_i, 0) = Σ pad(a_i, 0)``: the gradient of a slice, of which each layer of an unrolled stack adds one to the stack's."""

WRITES_INTO_ZEROS = replace(PADS_WITH_ZEROS, operands=(1, 2), others=("zero", "any"))
"""As :data:`PADS_WITH_ZEROS`, for a slice at run-time indices: ``dynamic_update_slice(0, Σ a_i, *indices)``."""

CONCATENATES = Law(kinds=_SUM, operands=(0, None), most=None, others=("zero",), when="accumulated")
"""``concatenate(Σ a_i, Σ b_i, 0) = Σ concatenate(a_i, b_i, 0)``, and so for ``stack``: the gradients of ``split`` and
``unstack``, with zeros for the parts that are not used."""

REDUCED_IN = Law(kinds=_SUM, dtypes=frozenset({"narrow", "float"}), holds=_floats, when="named")
"""A conversion between floating-point types before a sum, if the user has asked for the reduction in the second type."""

REDUCE_IN = Law(kinds=_SUM, dtypes=frozenset({"narrow", "float"}), holds=_floats)
"""The primitive ``reduce_in``, by which a user asks for that (:func:`program.primitives.reduce_in`)."""
