"""A mixture of experts as a Linen module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .layer import MoEAux, MoEExecution, moe_of_weights, weights_of_module
from .routers import update_bias

_NAMES = {"router": "router_kernel", "noise": "router_noise"}
"""Names of parameters that differ from the names of :func:`weights_of_module`."""


class MoE(nn.Module):
    """A mixture of SwiGLU experts; its weights have the names of their dims as logical metadata, as in ``meshpar.layers.nnx.MoE``.

    The balancing bias of "deepseek_v3" is ``bias`` in the collection ``moe``; where that is mutable, a call moves it by
    ``bias_rate``.

    Attributes:
      mlp: hidden width of one expert.
      experts: E.
      k: experts a token goes to.
      router: "deepseek_v3", "top_k", "switch", "switch_max", "ntlb", "gshard", "noisy_top_k",
        "expert_choice".
      shared: number of experts that every token goes to.
      capacity, groups, execution: as in :func:`meshpar.layers.moe`.
      router_options: further arguments of the router.
      bias_rate: by how much the bias moves in a step.
      param_dtype: of the weights; the router's are float32.
    """

    mlp: int
    experts: int
    k: int
    router: str = "deepseek_v3"
    shared: int = 0
    capacity: float | None = None
    groups: int = 1
    execution: MoEExecution | None = None
    router_options: Mapping[str, Any] | None = None
    bias_rate: float = 1e-3
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, key: jax.Array | None = None
    ) -> tuple[jax.Array, MoEAux]:
        """([*tokens, embed], losses, load and drops), of x [*tokens, embed]; see ``meshpar.layers.nnx.MoE``."""
        weights: dict[str, Any] = {}
        bias: Any = None
        for name, w in weights_of_module(x.shape[-1], self.mlp, self.experts, self.router, self.shared).items():
            init = nn.with_logical_partitioning(w.init, w.dims)
            dtype = jnp.float32 if w.is_float32 else self.param_dtype
            if name != "bias":
                weights[name] = self.param(_NAMES.get(name, name), init, w.shape, dtype)
                continue
            bias = self.variable("moe", "bias", init, None, w.shape, dtype)
            weights["bias"] = bias.value
        how = {"capacity": self.capacity, "groups": self.groups, "execution": self.execution}
        options = {**how, **(self.router_options or {})}
        y, aux = moe_of_weights(x, weights, router=self.router, k=self.k, key=key, mask=mask, **options)
        if bias is not None and self.is_mutable_collection("moe") and not self.is_initializing():
            bias.value = update_bias(bias.value, aux.load, self.bias_rate)
        return y, aux
