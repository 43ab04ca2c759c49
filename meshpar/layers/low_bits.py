"""Optimizer state in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .block_codes import BlockCode, Coded

SECOND_MOMENTS = ("nu", "nu_max", "v", "sum_of_squares")
"""Fields of optax states with nonnegative numbers: of ``adam``, ``amsgrad``, ``rmsprop``, ``adagrad`` and their relatives."""


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
    nonnegative: Sequence[str] = SECOND_MOMENTS,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Store the state of an optax transformation in 8 bits per element.

    A state array is decoded to float32 before each update and encoded after it: blocks of ``block`` elements of its last dim have a
    common power of two (Rouhani et al., *Microscaling Data Formats*, 2023). Second moments are stored as square roots in uint8, and
    are not rounded to zero. Codes have the shape of the weight, exponents its shape with the last dim divided by ``block``, so the
    rules of a layout shard both. Adam then takes 6.1 bytes per float32 weight instead of 12, the weight included (Dettmers et al.,
    *8-bit Optimizers via Block-wise Quantization*, 2022, use another code).

    Args:
      tx: any transformation; the state may contain other arrays, which are stored as they are.
      dtype: ``"int8"``, or ``"float8_e4m3fn"``, which has a wider range and a larger rounding error; not of second moments.
      block: elements with a common exponent. A last dim that it does not divide has one exponent.
      min_size: arrays with fewer elements are stored as they are.
      nonnegative: names of state fields that are stored as square roots.

    Raises:
      UnsupportedError: no 8-bit code has this dtype, or ``block`` is below 1.

    Example:
      >>> import optax
      >>> tx = mp.low_bits(optax.adam(1e-3), "int8")
      >>> state = tx.init({"up": jnp.zeros((64, 256))})
      >>> state.codes[0].mu["up"].dtype, state.exponents[0].mu["up"].shape
      (dtype('int8'), (64, 8))
    """
    plain, root = BlockCode(dtype, block), BlockCode(dtype, block, nonnegative=True)
    tx = optax.with_extra_args_support(tx)

    def is_root(keys: Any) -> bool:
        return any(jax.tree_util.keystr((k,), simple=True) in nonnegative for k in keys)

    def code_for(keys: Any, x: Any) -> BlockCode | None:
        """The code of a leaf of the inner state; None: it is stored as it is."""
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating) or not jnp.ndim(x) or x.size < min_size:
            return None
        return root if is_root(keys) else plain

    def encode(state: Any) -> LowBitsState:
        """The 8-bit form of an inner state."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        pairs = []
        for keys, x in leaves:
            code = code_for(keys, x)
            pairs.append(Coded(x, None) if code is None else code.encode(x))
        return LowBitsState(*(jax.tree.unflatten(structure, [p[k] for p in pairs]) for k in range(2)))

    def init(params: Any) -> LowBitsState:
        return encode(tx.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, LowBitsState]:
        inner = decode(state)
        updates, inner = tx.update(updates, inner, params, **extra)
        return updates, encode(inner)

    def decode(state: LowBitsState) -> Any:
        """The inner state in float32."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(state.codes)
        exponents = structure.flatten_up_to(state.exponents)

        def one(keys: Any, codes: Any, exponents: Any) -> Any:
            if exponents is None:
                return codes
            code = root if is_root(keys) else plain
            return code.decode(Coded(codes, exponents))

        return jax.tree.unflatten(structure, [one(keys, x, e) for (keys, x), e in zip(leaves, exponents, strict=True)])

    return optax.GradientTransformationExtraArgs(init, update)
