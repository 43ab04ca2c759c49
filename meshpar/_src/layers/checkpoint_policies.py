"""Policies for ``jax.checkpoint``, in addition to ``jax.checkpoint_policies``."""

from __future__ import annotations

from typing import Any

from ..compat.jax import equations
from ..program.kernels import kernel_p
from ..program.primitives import name_dims_p, place_p, rename_dims_p

__all__ = ["collectives_saveable", "kernels_saveable"]

NAMED = frozenset({name_dims_p.name, rename_dims_p.name, place_p.name, "sharding_constraint"})
"""Names of the primitives whose results :func:`collectives_saveable` saves."""
_KERNELS = frozenset({kernel_p.name, "pallas_call"})


def collectives_saveable(prim: Any, *_: Any, **__: Any) -> bool:
    """Saves the results of collectives, so that the backward pass recomputes ops but repeats no communication.

    ``jax.checkpoint(layer, policy=mp.train.checkpoint_policies.collectives_saveable)``. Saved are the values that the model names
    or constrains: results of ``mp.named``, ``mp.rename`` and ``with_sharding_constraint``. Each is saved in the sharding of its
    names, after the collective that leads to it (the reduction after a row-parallel matmul, the all-gather before a
    column-parallel one).
    Name the values at the beginning and the end of blocks::

        y = mp.rename(norm(x), seq="block_seq")               # under `seq: model` all-gathered, and saved unsharded
        y = mp.rename(attention(y), block_seq="seq")          # reduce-scattered, and saved sharded
        x = x + y

    Other named values of the layer are saved as well. All-gathers of weights are repeated.

    Args:
      prim: a primitive, from JAX.

    Returns:
      Whether its results are saved.

    Example:
      >>> def layer(params, x):
      ...     return x + mp.named(jax.nn.relu(x @ params["up"]) @ params["down"], "batch embed")
      >>> layer = jax.checkpoint(layer, policy=mp.train.checkpoint_policies.collectives_saveable)
      >>> jax.grad(lambda p: layer(p, x).sum())(params)["up"].shape
      (64, 256)
    """
    return prim.name in NAMED


def kernels_saveable(prim: Any, *_: Any, **params: Any) -> bool:
    """Saves the results of kernels, so that the backward pass runs no kernel of the forward pass again.

    ``jax.checkpoint(layer, policy=mp.train.checkpoint_policies.kernels_saveable)``. Saved are the results of functions under
    :func:`meshpar.kernel_rule` and of Pallas calls, with their residuals (of attention: the output and the log-sum-exp of the
    scores). The operands of a kernel are recomputed unless the policy saves them too::

        names = jax.checkpoint_policies.save_only_these_names("query_proj", "key_proj", "value_proj")
        jax.checkpoint_policies.save_from_both_policies(mp.train.checkpoint_policies.kernels_saveable, names)

    Args:
      prim: a primitive, from JAX.
      **params: its parameters.

    Returns:
      Whether its results are saved.

    Example:
      >>> layer = jax.checkpoint(lambda q: mp.layers.attention(q, q, q), policy=mp.train.checkpoint_policies.kernels_saveable)
      >>> jax.grad(lambda q: layer(q).sum())(jnp.ones((1, 8, 2, 16))).shape
      (1, 8, 2, 16)
    """
    if prim.name == "custom_vjp_call":  # JAX asks about the call, not about the kernel in it
        return any(e.primitive.name in _KERNELS for e in equations(params["call_jaxpr"].jaxpr))
    return prim.name in _KERNELS
