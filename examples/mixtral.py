"""Mixtral 8x7B in Flax Linen, at its real size: Llama's attention, and eight experts of which every token takes two.

    meshpar plan examples/mixtral.py:mixtral_8x7b --topology v5p:4x4x8 --mesh "data=16, model=8" --layout fsdp+expert

Experts take a fixed number of tokens of every sequence, so that shapes are static; what does not fit passes by. Which tokens
compete depends on the sequence alone, never on the mesh: a layout changes no result. `choice` are the experts as a token sees
them, `expert` as they lie on the mesh: between the two names tokens travel (an all-to-all, where `expert` is split).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import llama
import meshpar as mp
from llama import Attention, Head, named, norm, scanned

FSDP = llama.FSDP
FSDP_TENSOR = llama.FSDP_TENSOR
EXPERT = "expert: model; batch: data+model"
FSDP_EXPERT = f"{EXPERT}; embed: data"
FSDP_ALL_EXPERT = f"{EXPERT}; embed: data+model"  # weights without experts are split over all devices as well
LAYOUTS = {
    "fsdp": FSDP,
    "fsdp_tensor": FSDP_TENSOR,
    "expert": EXPERT,
    "fsdp+expert": FSDP_EXPERT,
    "fsdp-all+expert": FSDP_ALL_EXPERT,
}


@dataclass(frozen=True)
class Config(llama.Config):
    """Sizes of a Mixtral; ``mlp`` is the width of one expert.

    Attributes:
      experts, chosen: number of experts, and experts per token.
      capacity: slots of an expert, as a multiple of its even share of a sequence's choices.
      balance: weight of the load-balancing loss.
    """

    experts: int = 8
    chosen: int = 2
    capacity: float = 1.25
    balance: float = 0.02

    def places(self, seq: int) -> int:
        """How many tokens of a sequence an expert takes at most."""
        return min(seq, math.ceil(self.capacity * self.chosen * seq / self.experts))


MIXTRAL_8X7B = Config(embed=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocab=32000, rope_base=1e6)
TINY = Config(
    embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=32, vocab=48, experts=4, dtype=jnp.float32, attention="xla"
)  # fmt: skip


def mixtral_8x7b(batch: int = 128, seq: int = 2048, **changes: Any) -> llama.Target:
    """Mixtral 8x7B: 46.7e9 weights, of which a token uses 12.9e9."""
    return llama.target(MIXTRAL_8X7B, batch, seq, Mixtral, **changes)


def tiny(batch: int = 8, seq: int = 16, **changes: Any) -> llama.Target:
    """Two layers of four experts, in float32, for a laptop and for `meshpar check`."""
    return llama.target(TINY, batch, seq, Mixtral, **changes)


def create_state(config: Config, key: jax.Array) -> dict[str, Any]:
    """Weights and AdamW moments, float32, boxed with the names of their dims."""
    return llama.state_of(Mixtral, config, key)


def train_step(config: Config) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    return llama.step_of(Mixtral(config))


class Mixtral(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross-entropy of `targets` [batch, seq] given `inputs` [batch, seq], plus the loss of balance."""
        c = self.config
        embedding = named(nn.initializers.normal(1.0), "vocab", "embed")
        x = nn.Embed(c.vocab, c.embed, dtype=c.dtype, embedding_init=embedding, name="embedding")(inputs)
        x, imbalance = scanned(Layer, c)(x, None)
        loss: jax.Array = Head(c, name="head")(norm(c, "norm")(x), targets)
        return loss + c.balance * imbalance.mean()


class Layer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        c, x = self.config, checkpoint_name(x, "input")
        x = checkpoint_name(x + Attention(c, name="attention")(norm(c, "attention_norm")(x)), "residual")
        y, imbalance = Experts(c, name="experts")(norm(c, "experts_norm")(x))
        return x + y, imbalance


class Experts(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(weighted sum of the chosen experts' outputs for `x` [batch, seq, embed], load-balancing loss: 1 for an even load)."""
        c = self.config
        init = named(nn.initializers.lecun_normal(), "embed", "choice")
        router = self.param("router", init, (c.embed, c.experts), jnp.float32)
        chances = nn.softmax(x.astype(jnp.float32) @ router)  # [batch, seq, choice]
        weight = route(chances, c.chosen, c.places(x.shape[1]))
        sent = (weight > 0).astype(c.dtype)

        gate, up = self.weight("gate", "embed", "mlp"), self.weight("up", "embed", "mlp")
        down = self.weight("down", "mlp", "embed")
        rows = mp.rename(jnp.einsum("bsxc,bse->xbce", sent, x), choice="expert")
        gate = checkpoint_name(jnp.einsum("xbce,xem->xbcm", rows, gate), "gate_proj")
        up = checkpoint_name(jnp.einsum("xbce,xem->xbcm", rows, up), "up_proj")
        rows = mp.rename(jnp.einsum("xbcm,xme->xbce", nn.silu(gate) * up, down), expert="choice")
        y = jnp.einsum("bsxc,xbce->bse", weight.astype(c.dtype), rows)

        first = jax.nn.one_hot(chances.argmax(-1), c.experts)
        return y, c.experts * jnp.sum(first.mean((0, 1)) * chances.mean((0, 1)))

    def weight(self, name: str, into: str, out: str) -> jax.Array:
        c = self.config
        sizes = {"embed": c.embed, "mlp": c.mlp}
        init = named(nn.initializers.lecun_normal(batch_axis=0), "expert", into, out)
        return self.param(name, init, (c.experts, sizes[into], sizes[out]), jnp.float32).astype(c.dtype)


def route(chances: jax.Array, chosen: int, places: int) -> jax.Array:
    """The weight of every token at every place of every expert, [batch, seq, choice, place], float32; 0: not there.

    A token goes to the experts of its ``chosen`` largest ``chances`` [batch, seq, choice], weighted by them. Places are given
    out in the order of the sequence, to all first choices, then to all second ones; who finds none is left out there.
    """
    best, which = jax.lax.top_k(chances, chosen)
    best = mp.named(best / best.sum(-1, keepdims=True), "batch seq rank")
    which = mp.named(which, "batch seq rank")
    taken = jnp.zeros_like(chances[:, :1])
    weight = mp.named(jnp.zeros((*chances.shape, places)), "batch seq choice place")
    for k in range(chosen):
        mine = mp.named(jax.nn.one_hot(which[..., k], chances.shape[-1]), "batch seq choice")
        place = taken + jnp.cumsum(mine, axis=1) - mine
        taken += mine.sum(1, keepdims=True)
        at = jax.nn.one_hot(place.astype(jnp.int32), places)  # zero beyond the last place
        weight += (best[..., k, None] * mine)[..., None] * at
    return weight
