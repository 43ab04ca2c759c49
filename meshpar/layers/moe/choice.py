"""The choice of experts as one op: what a kernel of ``meshpar_kernels.route`` does for the tokens of a device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from meshpar_kernels import route

from ...program.declare import kernel_rule

__all__ = ["KERNELS", "choose"]

KERNELS = ("pallas", "pallas_tpu", "pallas_gpu")
"""Implementations that are kernels, of every op of a mixture of experts that has one."""


def choose(logits: jax.Array, bias: jax.Array | None = None, **options: Any) -> tuple[jax.Array, jax.Array]:
    """(int32 experts [*tokens, k], float32 weights [*tokens, k]) by ``meshpar_kernels.route``.

    Args:
      logits: float32 [*tokens, E]; -inf throughout for a token that goes nowhere.
      bias: [E], for the choice only.
      options: k, score, groups, top_groups, group_top, renormalize, scale, implementation, as there.

    Raises:
      NotImplementedError: the kernel cannot take these arguments; with every reason.
    """
    return _op(logits.ndim - 1, bias is not None)(logits, *([] if bias is None else [bias]), **options)


@functools.cache
def _op(token_dims: int, biased: bool) -> Callable[..., tuple[jax.Array, jax.Array]]:
    tokens = " ".join(f"t{i}" for i in range(token_dims))

    def moe_route(logits: jax.Array, bias: jax.Array | None = None, **options: Any) -> tuple[jax.Array, jax.Array]:
        plan = route(logits.reshape(-1, logits.shape[-1]), bias=bias, **options)
        shape = (*logits.shape[:-1], options["k"])
        return plan.expert.reshape(shape), plan.weight.reshape(shape)

    operands = f"{tokens} experts!, experts!" if biased else f"{tokens} experts!"
    return kernel_rule(f"{operands} -> {tokens} k!, {tokens} k!")(moe_route)
