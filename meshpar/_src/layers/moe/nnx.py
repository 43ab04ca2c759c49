"""A mixture of experts as an NNX module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .layer import MoEAux, MoEExecution, moe_of_weights, weights_of_module
from .routers import update_bias


class RouterBias(nnx.Variable):
    """The bias that balances DeepSeek-V3's router: state without a gradient, moved by :meth:`MoE.rebalance`."""


class MoE(nnx.Module):
    """A mixture of SwiGLU experts; the dims of its weights carry the names below as Flax metadata.

    ``gate``, ``up``: ``expert embed mlp``; ``down``: ``expert mlp embed``; ``router``: ``embed router``; ``shared_gate``,
    ``shared_up``, ``shared_down``: ``embed mlp``, ``mlp embed``; ``bias``: ``router``. So a layout may say ``expert: data``,
    ``mlp: model``, ``embed: data``, in any mixture, and the results stay the same.

    Args:
      embed: width of a token.
      mlp: hidden width of one expert.
      experts: E.
      k: experts a token goes to.
      router: "deepseek_v3" (with a balancing bias), "top_k", "switch", "switch_max", "ntlb", "gshard", "noisy_top_k",
        "expert_choice".
      shared: number of experts that every token goes to (one MLP of so many times the width).
      capacity, groups, execution: as in :func:`meshpar.layers.moe`.
      router_options: further arguments of the router, e.g. ``{"expert_groups": 8, "top_groups": 4, "scale": 2.5}``.
      param_dtype: of the weights; the router's are float32.
      rngs: ``params`` is used.
    """

    bias: RouterBias

    def __init__(
        self,
        embed: int,
        mlp: int,
        experts: int,
        k: int,
        *,
        router: str = "deepseek_v3",
        shared: int = 0,
        capacity: float | None = None,
        groups: int = 1,
        execution: MoEExecution | None = None,
        router_options: dict[str, Any] | None = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Create and initialize the weights; the arguments are described in the docstring of the class."""
        weights = weights_of_module(embed, mlp, experts, router, shared)
        self.names = tuple(weights)
        for name, w in weights.items():
            dtype = jnp.float32 if w.is_float32 else param_dtype
            value = nnx.with_partitioning(w.init, w.dims)(rngs.params(), w.shape, dtype)
            setattr(self, name, (RouterBias if name == "bias" else nnx.Param)(value))
        self.kind = router
        how = {"k": k, "capacity": capacity, "groups": groups, "execution": execution}
        self.options = {**how, **(router_options or {})}

    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, key: jax.Array | None = None
    ) -> tuple[jax.Array, MoEAux]:
        """(the layer's output, [*tokens, embed]; losses, load and drops, as :class:`MoEAux`).

        Args:
          x: [*tokens, embed].
          mask: bool [*tokens], False for padding.
          key: randomness for "noisy_top_k" and "gshard"; None: none (evaluation).
        """
        weights = {name: getattr(self, name)[...] for name in self.names}
        return moe_of_weights(x, weights, router=self.kind, mask=mask, key=key, **self.options)

    def rebalance(self, load: jax.Array, rate: float = 1e-3) -> None:
        """Move the balancing bias after a step.

        Args:
          load: int [E], or [layers, E] for stacked layers, from :class:`MoEAux`.
          rate: by how much (1e-3 in DeepSeek-V3).
        """
        self.bias[...] = update_bias(self.bias[...], load, rate)
