"""Evaluation of a jaxpr in a wider floating-point dtype, by which :func:`meshpar.check` distinguishes rounding from errors.

Two runs in bfloat16 that add in different orders differ by rounding, and neither is more correct. Evaluated in float32, the same
equations give a reference that shows the rounding of both: the sharded run is right if it is about as close to the reference as the
unsharded run is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..compat.jax import bind, equations, interpret, jaxprs_in, literal_array
from ..rules import Primitive, primitive
from ..rules.control_flow import run_bodies
from ..rules.index import applies_function
from .numbers import compiled, copies, host, wide

FACTOR, ULPS = 4.0, 2.0
"""The sharded run is right if its error is at most ``FACTOR`` times the error of the unsharded run, or ``ULPS`` units in the last
place of the largest value in the narrowest dtype (the unsharded run may happen to be exact)."""

_SCATTERS: dict[str, Callable[..., Any]] = {
    name: getattr(lax, name.replace("-", "_"))
    for name in ("scatter", *(f"scatter-{by}" for by in ("add", "sub", "mul", "min", "max")))
}
_OWN_DTYPES = {"bitcast_convert_type", "pure_callback", "io_callback"}
_DTYPES = ("new_dtype", "preferred_element_type", "dtype")


def narrowest(jaxpr: Jaxpr | ClosedJaxpr) -> np.dtype | None:
    """The least precise floating-point dtype of the results of its equations and their bodies; None if there are no floats."""
    dtypes = (_float_dtype(v.aval) for eqn in equations(jaxpr) for v in eqn.outvars)
    return max({d for d in dtypes if d is not None}, key=lambda d: float(jnp.finfo(d).eps), default=None)


def wider(dtype: Any) -> np.dtype | None:
    """The dtype for the reference of a computation in ``dtype``: float32 for at most 16 bits, float64 for float32, else None."""
    size = np.dtype(jnp.finfo(dtype).dtype).itemsize  # of the parts of a complex number
    return np.dtype(np.float32) if size < 4 else np.dtype(np.float64) if size == 4 else None


def in_wider(closed: ClosedJaxpr, wide: np.dtype) -> Callable[[Sequence[Any]], list[Any]]:
    """The jaxpr as a function from flat operands to flat results, with narrower floats replaced by ``wide``.

    Bodies of loops, branches and calls are widened too; ``reduce_precision`` is removed. An op without a factor rule, or whose
    result depends on bits, is applied in its own dtypes. Trace it with x64 enabled if ``wide`` is float64.
    """
    return lambda xs: _Evaluator(wide).run(closed.jaxpr, closed.consts, list(xs))


def _is_widened(entry: Primitive) -> bool:
    """Whether an op may be applied in a wider dtype: not if it depends on the bits of its dtype, or contains typed functions."""
    if entry.family in ("random", "kernel", "shard_map") or entry.name in _OWN_DTYPES:
        return False
    return entry.elementwise or entry.rule is not None


class Exact(NamedTuple):
    """The results of a program in a wider dtype than the narrowest one in which it computes."""

    results: list[np.ndarray]
    narrow: np.dtype

    def judge(self, k: int, sharded: Any, unsharded: np.ndarray) -> Verdict:
        """:func:`judge` for result ``k`` of the program."""
        return judge(copies(sharded), unsharded, self.results[k], self.narrow)


def exact(closed: ClosedJaxpr, xs: Sequence[Any]) -> Exact | None:
    """The program evaluated on one device in a wider dtype; None if it has no floats, or there is no wider dtype."""
    narrow = narrowest(closed)
    dtype = None if narrow is None else wider(narrow)
    if narrow is None or dtype is None:
        return None
    run = in_wider(closed, dtype)
    with jax.enable_x64(dtype.itemsize == 8):
        return Exact([host(x) for x in compiled(lambda *xs: run(xs), xs)(*xs)], narrow)


def _float_dtype(aval: Any) -> np.dtype | None:
    dtype = getattr(aval, "dtype", None)
    return np.dtype(dtype) if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The errors of two runs against the same equations in a wider dtype.

    Attributes:
      dtype: the wider dtype.
      sharded, unsharded: the largest error of each run.
      rounding: whether the error of the sharded run is rounding.
    """

    dtype: np.dtype
    sharded: float
    unsharded: float
    rounding: bool

    def __str__(self) -> str:
        errors = f"the sharded run is off by {self.sharded:.3g}, the unsharded one by {self.unsharded:.3g}"
        return f"in {self.dtype} {errors}"


def judge(sharded: Iterable[np.ndarray], unsharded: np.ndarray, exact: np.ndarray, narrow: Any) -> Verdict:
    """Whether a result of the sharded run differs from the unsharded one only by rounding.

    Args:
      sharded: the result, one array for every replica that differs.
      exact: the result in a wider dtype.
      narrow: the narrowest floating-point dtype in which the equations compute.
    """
    a, e = wide(unsharded), wide(exact)
    known = np.isfinite(a) & np.isfinite(e)
    off = _largest(np.abs(a[known] - e[known]))
    scale = _largest(np.abs(e[known]))
    ours = max(_distance(wide(x), a, e, known) for x in sharded)
    ulps = ULPS * float(jnp.finfo(narrow).eps) * scale if jnp.issubdtype(unsharded.dtype, jnp.inexact) else 0.0
    return Verdict(exact.dtype, ours, off, ours <= max(FACTOR * off, ulps))


def _distance(x: np.ndarray, a: np.ndarray, exact: np.ndarray, known: np.ndarray) -> float:
    """The largest |x − exact| where ``a`` is finite; infinite if x differs from ``a`` elsewhere, but for overflows in ``a``."""
    odd = ~known & ~np.isfinite(exact) & (x != a) & ~(np.isnan(x) & np.isnan(a))
    if odd.any() or not np.isfinite(x[known]).all():
        return math.inf
    return _largest(np.abs(x[known] - exact[known]))


def _largest(x: np.ndarray) -> float:
    return float(x.max()) if x.size else 0.0


class _Evaluator:
    """An interpreter of jaxprs in which values of narrower floating-point dtypes have the wide dtype."""

    def __init__(self, wide: np.dtype):
        self.wide = wide
        self.wide_complex = np.dtype(np.complex64 if wide.itemsize == 4 else np.complex128)

    def widened(self, x: Any) -> Any:
        """The array, converted to the wide dtype if its own is narrower."""
        dtype = self.dtype(x.dtype) if hasattr(x, "dtype") else None
        return x if dtype is None or dtype == x.dtype else lax.convert_element_type(x, dtype)

    def dtype(self, dtype: Any) -> Any:
        """The wider dtype in which values of this dtype are computed; the dtype itself if it is not replaced."""
        if not jnp.issubdtype(dtype, jnp.inexact):
            return dtype
        wide = self.wide_complex if jnp.issubdtype(dtype, jnp.complexfloating) else self.wide
        return wide if np.dtype(dtype).itemsize < wide.itemsize else dtype

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr on flat operands, in the wide dtype."""
        consts, xs = (list(map(self.widened, part)) for part in (consts, xs))
        return interpret(jaxpr, consts, xs, self.step, lambda x: self.widened(jnp.asarray(literal_array(x))))

    def step(self, eqn: JaxprEqn, ins: list[Any]) -> list[Any]:
        """The results of an equation on wide operands, in the wide dtype."""
        entry = primitive(eqn.primitive.name)
        if entry.call or entry.control_flow:
            outs = run_bodies(eqn, ins, self.run)
        elif entry.family in ("identity", "rounding"):
            outs = ins
        elif (outs := self.applied(eqn, ins)) is None:
            dtypes = [_float_dtype(v.aval) for v in eqn.invars]
            narrow = [x if d is None else lax.convert_element_type(x, d) for d, x in zip(dtypes, ins, strict=True)]
            outs = bind(eqn, narrow, eqn.params)
        return list(map(self.widened, outs))

    def applied(self, eqn: JaxprEqn, ins: list[Any]) -> list[Any] | None:
        """The results of an op on wide operands; None if it must be applied in its own dtypes."""
        name, p = eqn.primitive.name, eqn.params
        if name in _SCATTERS and not applies_function(eqn):
            same = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            return [_SCATTERS[name](*ins, **{k: p[k] for k in same})]
        if not _is_widened(primitive(name)) or jaxprs_in(eqn):
            return None
        params = {k: self.dtype(v) if k in _DTYPES and v is not None else v for k, v in p.items()}
        try:
            return bind(eqn, ins, params)
        except (TypeError, ValueError, NotImplementedError):  # the op does not support the wide dtype
            return None
