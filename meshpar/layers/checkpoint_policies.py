"""What a rematerialised layer keeps: policies for ``jax.checkpoint``, beside those of ``jax.checkpoint_policies``."""

from __future__ import annotations

from typing import Any

from ..compat.jax import equations
from ..program.kernels import kernel_p
from ..program.primitives import name_dims_p, place_p, rename_dims_p

__all__ = ["collectives_saveable", "kernels_saveable"]

_SAID = frozenset({name_dims_p.name, rename_dims_p.name, place_p.name, "sharding_constraint"})
_KERNELS = frozenset({kernel_p.name, "pallas_call"})


def collectives_saveable(prim: Any, *_: Any, **__: Any) -> bool:
    """Recompute computation but not communication: what a collective gave is kept from the forward pass for the backward pass.

    ``jax.checkpoint(layer, policy=mp.checkpoint_policies.collectives_saveable)``. Kept are the values whose layout the model
    itself says: results of ``mp.named``, ``mp.rename`` and ``with_sharding_constraint``. Each rests as its names are laid
    out, so what brought it there (the sum after a row-parallel product, the gather before a column-parallel one) is not sent for
    again. Say it where blocks begin and end::

        y = mp.rename(norm(x), seq="block_seq")               # under `seq: model` gathered here, and kept whole
        y = mp.rename(attention(y), block_seq="seq")          # summed and scattered here, and kept so
        x = x + y

    A value that is named elsewhere in the layer is kept as well. Weights that are gathered are gathered again.

    Args:
      prim: the primitive that JAX asks about.

    Returns:
      Whether its result is kept.
    """
    return prim.name in _SAID


def kernels_saveable(prim: Any, *_: Any, **params: Any) -> bool:
    """Run no kernel a second time: what it gave is kept from the forward pass for the backward pass.

    ``jax.checkpoint(layer, policy=mp.checkpoint_policies.kernels_saveable)``. Kept are the results of functions under
    :func:`meshpar.kernel_rule` and of Pallas calls, and what they made beside them for their backward pass (of attention: its
    output and the log-sum-exp of its scores). What a kernel takes is computed again unless the policy keeps it too::

        names = jax.checkpoint_policies.save_only_these_names("query_proj", "key_proj", "value_proj")
        jax.checkpoint_policies.save_from_both_policies(mp.checkpoint_policies.kernels_saveable, names)

    Args:
      prim: the primitive that JAX asks about.
      **params: its parameters.

    Returns:
      Whether its results are kept.
    """
    if prim.name == "custom_vjp_call":  # JAX asks about the whole call, not about the kernel in it
        return any(e.primitive.name in _KERNELS for e in equations(params["call_jaxpr"].jaxpr))
    return prim.name in _KERNELS
