"""The Transformer of model.py with mixtures of experts, as DeepSeek-V3 has them, in place of its MLPs.

Still an ordinary Flax model: no mesh, no layout, no exchange of tokens. The layout line alone decides where experts live.
"""

from dataclasses import dataclass

import jax
from flax import nnx

from lm.model import LAYERS, Attention, Config, named, norm
from meshpar.layers import MoEAux
from meshpar.layers.nnx import MoE


@dataclass(frozen=True)
class MoEConfig(Config):
    layers: int = 2
    embed: int = 64
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 64  # of one expert
    dropout: float = 0.0
    experts: int = 16
    k: int = 2
    shared: int = 1  # experts that every token goes to
    expert_groups: int = 4
    top_groups: int = 2
    router: str = "deepseek_v3"
    capacity: float | None = None


class MoELayer(nnx.Module):
    def __init__(self, config: MoEConfig, rngs: nnx.Rngs):
        limited = {"expert_groups": config.expert_groups, "top_groups": config.top_groups}
        self.attention_norm = norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.moe_norm = norm(config, rngs)
        self.moe = MoE(
            config.embed,
            config.mlp,
            config.experts,
            config.k,
            router=config.router,
            shared=config.shared,
            capacity=config.capacity,
            router_options=limited if config.router == "deepseek_v3" else None,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoEAux]:
        x += self.attention(self.attention_norm(x))
        y, aux = self.moe(self.moe_norm(x))
        return x + y, aux


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=LAYERS)
def run_layers(layer: MoELayer, x: jax.Array) -> tuple[jax.Array, MoEAux]:
    return layer(x)


class MoETransformer(nnx.Module):
    def __init__(self, config: MoEConfig, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=LAYERS)
        def stack(rngs: nnx.Rngs) -> MoELayer:
            return MoELayer(config, rngs)

        self.embedding = nnx.Embed(
            config.vocab,
            config.embed,
            embedding_init=named("vocab", "embed", init=nnx.initializers.normal(1.0)),
            rngs=rngs,
        )
        self.layers = stack(rngs)
        self.norm = norm(config, rngs)
        self.head = nnx.Linear(
            config.embed,
            config.vocab,
            use_bias=False,
            kernel_init=named("embed", "vocab", init=nnx.initializers.normal(0.02)),
            rngs=rngs,
        )

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, MoEAux]:
        """Logits [batch, seq, vocab] of the token after each of `tokens` [batch, seq]; losses, load and drops by layer."""
        x, aux = run_layers(self.layers, self.embedding(tokens))
        return self.head(self.norm(x)), aux
