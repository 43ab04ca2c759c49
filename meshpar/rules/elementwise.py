"""Elementwise primitives: every full-shaped operand has the dims of the result; scalars are everywhere."""

from __future__ import annotations

from typing import Any

from .local import same
from .registry import register


def _elementwise(names: str, **traits: Any) -> None:
    register(*names.split(), elementwise=True, fusible=True, **traits)


_elementwise(
    """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz conj complex
    convert_element_type cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mulhi ne nextafter not
    one_minus_square or polygamma polynomial population_count pow random_fold_in
    random_clone real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh threefry2x32 xor zeta
    """
)
_elementwise("add add_any", linear=True, addition=True)
_elementwise("sub neg optimization_barrier widen", linear=True)
_elementwise("copy name", linear=True, view=True)
_elementwise("reshard", linear=True, view=True, local=same)
_elementwise("pvary", view=True, local=same)
_elementwise("stop_gradient", view=True)
_elementwise("mul div", scaling=True)
