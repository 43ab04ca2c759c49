"""A mixture of experts like DeepSeek-V3 in Flax Linen, at its real sizes: latent attention, sigmoid router, shared expert.

    meshpar plan examples/deepseek.py:deepseek_16b --topology v5p:4x4x8 --mesh "data=16, model=8" --layout fsdp+expert

The experts are :func:`mp.layers.moe`: no token is dropped. The bias that balances the load is held among the weights, gets no
gradient, and is left as it is: moving it is another line of a training loop (``examples/train_moe.py`` has it).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import llama
from llama import Head, SwiGLU, attention, dense, named, norm, rotate, scanned
from meshpar.layers import MoEExecution, moe

FSDP = llama.FSDP
EXPERT = "expert: model; batch: data+model"
FSDP_EXPERT = f"{EXPERT}; embed: data"
LAYOUTS = {"fsdp": FSDP, "expert": EXPERT, "fsdp+expert": FSDP_EXPERT}


@dataclass(frozen=True)
class Config(llama.Config):
    """Sizes of a DeepSeek; ``mlp`` is the width of the MLPs of the first ``dense`` layers, ``head_dim`` the size of a value head.

    Attributes:
      dense: number of layers without experts, of ``layers``.
      rotated: features of a query and key with rotary position embeddings, in addition to ``head_dim`` without.
      q_rank, kv_rank: sizes of the latent queries (0: none), and of the latent keys and values.
      experts, chosen, expert_mlp, shared: number of experts, experts per token, their width, number of shared experts.
      groups, top_groups: number of expert groups, and the number of groups that a token may use.
      exchange, overlap: how tokens are sent, as in :class:`mp.layers.MoEExecution`.
    """

    dense: int = 1
    rotated: int = 64
    q_rank: int = 0
    kv_rank: int = 512
    experts: int = 64
    chosen: int = 6
    expert_mlp: int = 1408
    shared: int = 2
    groups: int = 1
    top_groups: int = 1
    exchange: str | None = None
    overlap: int = 1


DEEPSEEK_16B = Config(embed=2048, layers=27, heads=16, kv_heads=16, mlp=10944, vocab=102400, rope_base=10_000.0)
DEEPSEEK_671B = Config(
    embed=7168, layers=61, heads=128, kv_heads=128, mlp=18432, vocab=129280, rope_base=10_000.0, dense=3, q_rank=1536,
    experts=256, chosen=8, expert_mlp=2048, shared=1, groups=8, top_groups=4,
)  # fmt: skip
TINY = Config(
    embed=32, layers=3, heads=4, kv_heads=4, head_dim=8, mlp=64, vocab=48, rotated=4, q_rank=24, kv_rank=16, experts=8,
    chosen=2, expert_mlp=32, shared=1, groups=4, top_groups=2, dtype=jnp.float32, attention="xla",
)  # fmt: skip


def deepseek_16b(batch: int = 128, seq: int = 2048, **changes: Any) -> llama.Target:
    """The sizes of DeepSeek-V2-Lite, with the router of V3: 15.7e9 weights, of which a token uses 2.7e9."""
    return llama.target(DEEPSEEK_16B, batch, seq, DeepSeek, **changes)


def deepseek_671b(batch: int = 512, seq: int = 4096, **changes: Any) -> llama.Target:
    """The sizes of DeepSeek-V3, without its layer for a second token: 671e9 weights, of which a token uses 37e9."""
    return llama.target(DEEPSEEK_671B, batch, seq, DeepSeek, **changes)


def tiny(batch: int = 8, seq: int = 16, **changes: Any) -> llama.Target:
    """Three layers, two of them of eight experts, in float32, for a laptop and for `meshpar check`."""
    return llama.target(TINY, batch, seq, DeepSeek, **changes)


def create_state(config: Config, key: jax.Array) -> dict[str, Any]:
    """Weights and AdamW moments, float32, boxed with the names of their dims."""
    return llama.state_of(DeepSeek, config, key)


def train_step(config: Config) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    return llama.step_of(DeepSeek(config))


class DeepSeek(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross-entropy of `targets` [batch, seq] given `inputs` [batch, seq], int32 tokens."""
        c = self.config
        embedding = named(nn.initializers.normal(1.0), "vocab", "embed")
        x = nn.Embed(c.vocab, c.embed, dtype=c.dtype, embedding_init=embedding, name="embedding")(inputs)
        x, _ = scanned(DenseLayer, c, c.dense, "dense_layers")(x, None)
        x, _ = scanned(ExpertLayer, c, c.layers - c.dense, "layers")(x, None)
        return Head(c, name="head")(norm(c, "norm")(x), targets)


class DenseLayer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        x += LatentAttention(self.config, name="attention")(norm(self.config, "attention_norm")(x))
        x += SwiGLU(self.config, name="mlp")(norm(self.config, "mlp_norm")(x))
        return x, None


class ExpertLayer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        x += LatentAttention(self.config, name="attention")(norm(self.config, "attention_norm")(x))
        x += Experts(self.config, name="experts")(norm(self.config, "experts_norm")(x))
        return x, None


class LatentAttention(nn.Module):
    """Attention whose keys and values come from one small latent vector a token (DeepSeek-V2, 2024)."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """As `x` [batch, seq, embed]."""
        c = self.config
        queries = (c.heads, c.head_dim + c.rotated)
        if c.q_rank:
            q = rank_norm(c, "query_norm", "q_rank")(dense(c, (c.q_rank,), ("embed", "q_rank"), name="query_down")(x))
            q = dense(c, queries, ("q_rank", "heads", None), name="query")(q)
        else:
            q = dense(c, queries, ("embed", "heads", None), name="query")(x)
        latent = dense(c, (c.kv_rank,), ("embed", "kv_rank"), name="kv_down")(x)
        latent = rank_norm(c, "kv_norm", "kv_rank")(latent)
        k = dense(c, (c.heads, c.head_dim), ("kv_rank", "heads", None), name="key")(latent)
        v = dense(c, (c.heads, c.head_dim), ("kv_rank", "heads", "head_dim"), name="value")(latent)
        turned = dense(c, (1, c.rotated), ("embed", None, None), name="key_rotated")(x)

        turned = jnp.broadcast_to(rotate(turned, c.rope_base), (*k.shape[:3], c.rotated))
        k = jnp.concatenate([k, turned], axis=-1)
        q = jnp.concatenate([q[..., : c.head_dim], rotate(q[..., c.head_dim :], c.rope_base)], axis=-1)
        wide = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, c.rotated)))  # the kernel takes values as wide as keys
        y = attention(q, k, wide, c.attention)[..., : c.head_dim]
        return dense(c, (c.embed,), ("heads", "head_dim", "embed"), axis=(-2, -1), name="out")(y)


def rank_norm(config: Config, name: str, dim: str) -> nn.RMSNorm:
    scale = named(nn.initializers.ones, dim)
    return nn.RMSNorm(epsilon=1e-6, dtype=config.dtype, scale_init=scale, name=name)


class Experts(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The sum of the outputs of the chosen and the shared experts for `x` [batch, seq, embed]; the same shape."""
        c, wide = self.config, self.config.shared * self.config.expert_mlp
        plain = nn.initializers.lecun_normal()
        each = nn.initializers.lecun_normal(batch_axis=0)
        into, out = ("expert", "embed", "expert_mlp"), ("expert", "expert_mlp", "embed")

        def weight(name: str, init: Any, dims: tuple[str, ...], *shape: int) -> Any:
            return self.param(name, named(init, *dims), shape, jnp.float32)

        experts = {
            "gate": weight("gate", each, into, c.experts, c.embed, c.expert_mlp),
            "up": weight("up", each, into, c.experts, c.embed, c.expert_mlp),
            "down": weight("down", each, out, c.experts, c.expert_mlp, c.embed),
        }
        shared = {
            "gate": weight("shared_gate", plain, into[1:], c.embed, wide),
            "up": weight("shared_up", plain, into[1:], c.embed, wide),
            "down": weight("shared_down", plain, out[1:], wide, c.embed),
        }
        router = weight("router", plain, ("embed", "router"), c.embed, c.experts)
        bias = weight("bias", nn.initializers.zeros, ("router",), c.experts)
        y, _ = moe(
            x, router, experts, router="deepseek_v3", k=c.chosen, shared=shared, bias=bias, scale=2.5,
            expert_groups=c.groups, top_groups=c.top_groups, execution=MoEExecution(exchange=c.exchange, overlap=c.overlap),
        )  # fmt: skip
        return y
