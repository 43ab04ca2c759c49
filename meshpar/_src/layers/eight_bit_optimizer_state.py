"""Optimizer state in 8 bits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from ..compat.jax import user_stacklevel
from .block_codes import BlockCode, Coded

Sign = Literal["signed", "nonnegative"]

_FIELDS: Mapping[Sign, str] = {
    "signed": """EmaState.ema ScaleByAdamState.mu ScaleByAdanState.m ScaleByAdanState.v ScaleByAmsgradState.mu
        ScaleByBeliefState.mu ScaleByLionState.mu ScaleByNovogradState.mu ScaleBySM3State.nu TraceState.trace
        DAdaptAdamWState.exp_avg MomoAdamState.exp_avg MomoState.exp_avg MuonState.mu ProdigyState.exp_avg
        ScaleByAdemamixState.m1 ScaleByAdemamixState.m2 ScaleBySimplifiedAdEMAMixState.m SophiaState.mu""",
    "nonnegative": """FactoredState.v ScaleByAdaDeltaState.e_g ScaleByAdaDeltaState.e_x ScaleByAdamState.nu
        ScaleByAdanState.n ScaleByAmsgradState.nu ScaleByAmsgradState.nu_max ScaleByBeliefState.nu ScaleByRmsState.nu
        ScaleByRssState.sum_of_squares DAdaptAdamWState.exp_avg_sq MomoAdamState.exp_avg_sq ProdigyState.exp_avg_sq
        ScaleByAdemamixState.nu ScaleBySimplifiedAdEMAMixState.n""",
}
"""Sign → the fields of states of optax that are such moments."""

MOMENTS: Mapping[tuple[type, str], Sign] = {
    (state, field): sign
    for sign, fields in _FIELDS.items()
    for name, _, field in (each.partition(".") for each in fields.split())
    if (state := getattr(optax, name, None) or getattr(optax.contrib, name, None))  # newer versions of optax have more
}
"""(Type of an optax state, field) → the sign of its elements: moments, whose rounding changes an update by about as much."""


class LowBitsState(NamedTuple):
    """State of :func:`low_bits`: two trees with the structure of the inner transformation's state.

    Attributes:
      codes: the inner state, with codes in place of the arrays that are stored in 8 bits.
      exponents: the exponents of their blocks; None for other leaves.
    """

    codes: Any
    exponents: Any


def low_bits(
    tx: optax.GradientTransformation, dtype: str = "int8", *, block: int = 32, min_size: int = 4096,
    moments: Mapping[tuple[type, str], Sign] = MOMENTS,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Store the moments of an optax transformation in 8 bits per element.

    A moment is decoded to float32 before each update and encoded after it: blocks of ``block`` elements of its last dim have a
    common power of two (Rouhani et al., *Microscaling Data Formats*, 2023). Second moments are stored as square roots in uint8, and
    are not rounded to zero. Codes have the shape of the weight, exponents its shape with the last dim divided by ``block``, so the
    rules of a layout shard both. Adam then takes 6.1 bytes per float32 weight instead of 12, the weight included (Dettmers et al.,
    *8-bit Optimizers via Block-wise Quantization*, 2022, use another code).

    Moments are identified by the type of their state and its field, never by the names of parameters. Other arrays are stored as
    they are: states of unknown types, copies of weights (``schedule_free``), accumulated gradients, and differences that cancel
    (the variance of ``scale_by_stddev``).

    Args:
      tx: any transformation.
      dtype: ``"int8"``, or ``"float8_e4m3fn"``, which has a wider range and a larger rounding error; not of second moments.
      block: elements with a common exponent. A last dim that it does not divide has one exponent.
      min_size: arrays with fewer elements are stored as they are.
      moments: (type of a state, field) → ``"signed"``, or ``"nonnegative"``, which is stored as square roots. The default has
        the moments of optax; add your own: ``{**mp.train.MOMENTS, (MyState, "momentum"): "signed"}``.

    Raises:
      UnsupportedError: no 8-bit code has this dtype, or ``block`` is below 1.

    Example:
      >>> import optax
      >>> tx = mp.train.low_bits(optax.adam(1e-3), "int8")
      >>> state = tx.init({"up": jnp.zeros((64, 256))})
      >>> state.codes[0].mu["up"].dtype, state.exponents[0].mu["up"].shape
      (dtype('int8'), (64, 8))
    """
    codes: dict[Sign, BlockCode] = {
        "signed": BlockCode(dtype, block),
        "nonnegative": BlockCode(dtype, block, nonnegative=True),
    }
    tx = optax.with_extra_args_support(tx)

    def signs(node: Any) -> list[Sign | None]:
        """For each leaf of a state, the sign of the moment that it belongs to; None: of none."""
        out: list[Sign | None] = []
        for path, child in jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node):
            sign = moments.get((type(node), jax.tree_util.keystr(path, simple=True)))
            if path and sign is None:
                out += signs(child)
            else:
                out.extend(sign for _ in jax.tree.leaves(child))
        return out

    def encode(state: Any) -> LowBitsState:
        """The 8-bit form of an inner state."""
        leaves, structure = jax.tree.flatten(state)
        pairs = [
            codes[sign].encode(x) if sign and _is_large(x, min_size) else Coded(x, None)
            for sign, x in zip(signs(state), leaves, strict=True)
        ]
        return LowBitsState(*(jax.tree.unflatten(structure, [p[k] for p in pairs]) for k in range(2)))

    def decode(state: LowBitsState) -> Any:
        """The inner state in float32."""
        leaves, structure = jax.tree.flatten(state.codes)
        triples = zip(signs(state.codes), leaves, structure.flatten_up_to(state.exponents), strict=True)
        arrays = [x if e is None or not sign else codes[sign].decode(Coded(x, e)) for sign, x, e in triples]
        return structure.unflatten(arrays)

    def init(params: Any) -> LowBitsState:
        inner = tx.init(params)
        state = encode(inner)
        large = [path for path, x in jax.tree_util.tree_leaves_with_path(inner) if _is_large(x, min_size)]
        if large and not jax.tree.leaves(state.exponents):
            warnings.warn(
                f"mp.train.low_bits stores no array of this state in 8 bits, since moments= has none of its fields "
                f"(state{jax.tree_util.keystr(large[0])}, …)\n"
                '  fix: moments={**mp.train.MOMENTS, (MyState, "my_field"): "signed"}, or leave out mp.train.low_bits',
                stacklevel=user_stacklevel(),
            )
        return state

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, LowBitsState]:
        updates, inner = tx.update(updates, decode(state), params, **extra)
        return updates, encode(inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_large(x: Any, min_size: int) -> bool:
    """Whether a leaf is a floating-point array of at least ``min_size`` elements."""
    return bool(jnp.ndim(x)) and x.size >= min_size and jnp.issubdtype(x.dtype, jnp.floating)
