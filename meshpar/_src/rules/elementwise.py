"""Elementwise primitives: operands have the shape of the result, or stretch to it along dims of size 1, or are scalars."""

from __future__ import annotations

from typing import Any

from . import partial
from .local_forms import same
from .registry import register


def _elementwise(names: str, **traits: Any) -> None:
    register(*names.split(), elementwise=True, fusible=True, **traits)


_elementwise(
    """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to mulhi ne nextafter not
    one_minus_square polygamma polynomial population_count pow random_fold_in
    random_clone regularized_incomplete_beta rem round rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh threefry2x32 xor zeta
    """
)
_elementwise("add add_any", partial=(partial.LINEAR,), family="add")
_elementwise("sub conj real imag complex", partial=(partial.LINEAR,))
_elementwise("neg", partial=(partial.NEGATES,))
_elementwise("mul", partial=(partial.SCALES_FLOATS, partial.SCALES_INTEGERS))
_elementwise("times_power_of_two", partial=(partial.SCALES_BY_POWERS,))
_elementwise("div", partial=(partial.DIVIDES_FLOATS,), family="div")
_elementwise("max", partial=(partial.idempotent("max"),))
_elementwise("min", partial=(partial.idempotent("min"),))
_elementwise("and", partial=(partial.idempotent("and"),))
_elementwise("or", partial=(partial.idempotent("or"),))
_elementwise("select_n", partial=(partial.SELECTS_OR_ZERO, partial.SELECTS))
_elementwise("convert_element_type", partial=(partial.SAME_DTYPE, partial.WIDENS, partial.REDUCED_IN), family="cast")
_elementwise("reduce_in", partial=(partial.REDUCE_IN,))
_elementwise("reduce_precision", family="rounding")
_elementwise("optimization_barrier", partial=(partial.MOVES,), family="barrier")
_elementwise("copy name", partial=(partial.MOVES,), view=True)
_elementwise("in_blocks", partial=(partial.MOVES,), view=True, family="blocks")
_elementwise("reshard", partial=(partial.MOVES,), view=True, local=same)
_elementwise("pvary", view=True, local=same)
_elementwise("stop_gradient", view=True)
