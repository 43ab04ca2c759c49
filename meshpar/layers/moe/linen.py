"""A mixture of experts as a Linen module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .layer import MoEAux, moe
from .routers import update_bias

__all__ = ["MoE"]


class MoE(nn.Module):
    """A mixture of SwiGLU experts; its weights have the names of their dims as logical metadata, as in ``layers.moe.nnx.MoE``.

    The balancing bias of "deepseek_v3" is ``bias`` in the collection ``moe``; where that is mutable, a call moves it by
    ``bias_rate``.

    Attributes:
      mlp: hidden width of one expert.
      experts: E.
      k: experts a token goes to.
      router: "deepseek_v3", "top_k", "switch", "switch_max", "ntlb", "gshard", "noisy_top_k",
        "expert_choice".
      shared: number of experts that every token goes to.
      capacity, groups, strategy, slack, exchange: as in :func:`meshpar.layers.moe.moe`.
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
    strategy: str | None = None
    slack: float = 1.25
    exchange: str | None = None
    router_options: Mapping[str, Any] | None = None
    bias_rate: float = 1e-3
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, key: jax.Array | None = None
    ) -> tuple[jax.Array, MoEAux]:
        """([*tokens, embed], losses, load and drops), of x [*tokens, embed]; see ``layers.moe.nnx.MoE``."""
        embed, each = x.shape[-1], nn.initializers.lecun_normal(batch_axis=(0,))
        plain = nn.initializers.lecun_normal()

        def weight(name: str, init: Any, dims: tuple[str, ...], *shape: int, dtype: Any = self.param_dtype) -> Any:
            return self.param(name, nn.with_logical_partitioning(init, dims), shape, dtype)

        into, out, routing = ("expert", "embed", "mlp"), ("expert", "mlp", "embed"), ("embed", "router")
        experts = {
            "gate": weight("gate", each, into, self.experts, embed, self.mlp),
            "up": weight("up", each, into, self.experts, embed, self.mlp),
            "down": weight("down", each, out, self.experts, self.mlp, embed),
        }
        weights: Any = weight("router_kernel", plain, routing, embed, self.experts, dtype=jnp.float32)
        options = dict(self.router_options or {})
        bias: Any = None
        if self.router == "deepseek_v3":
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("router",))
            bias = self.variable("moe", "bias", lambda: zeros(None, (self.experts,), jnp.float32))
            options["bias"] = bias.value
        elif self.router == "noisy_top_k":
            noise = weight("router_noise", nn.initializers.zeros, routing, embed, self.experts, dtype=jnp.float32)
            weights = {"kernel": weights, "noise": noise}
        if key is not None and self.router in ("noisy_top_k", "gshard"):
            options["key"] = key
        shared, wide = None, self.shared * self.mlp
        if self.shared:
            shared = {
                "gate": weight("shared_gate", plain, into[1:], embed, wide),
                "up": weight("shared_up", plain, into[1:], embed, wide),
                "down": weight("shared_down", plain, out[1:], wide, embed),
            }
        k = None if self.router == "expert_choice" else self.k
        y, aux = moe(
            x, weights, experts, router=self.router, k=k, capacity=self.capacity, groups=self.groups, mask=mask,
            shared=shared, strategy=self.strategy, slack=self.slack, exchange=self.exchange, **options,
        )  # fmt: skip
        if bias is not None and self.is_mutable_collection("moe") and not self.is_initializing():
            bias.value = update_bias(bias.value, aux.load, self.bias_rate)
        return y, aux
