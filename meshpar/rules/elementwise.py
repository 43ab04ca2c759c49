"""Elementwise primitives: every full-shaped operand has the dims of the result; scalars are everywhere."""

from __future__ import annotations

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz conj
    complex convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
    igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul
    mulhi name ne neg nextafter not or polygamma population_count pow random_gamma_grad real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
    pvary optimization_barrier reshard log2 one_minus_square polynomial random_fold_in random_gamma random_clone widen
    """.split()
)

# Ops in which a partial sum may stay one: linear in every operand that has the full shape.
LINEAR = frozenset(
    {"add", "add_any", "sub", "neg", "copy", "copy_p", "name", "optimization_barrier", "reshard", "widen"}
)
# Linear in the first operand, when the others are scalars.
SCALINGS = frozenset({"mul", "div"})
