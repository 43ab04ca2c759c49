"""A decoder-only Transformer in Flax NNX: RoPE, grouped-query attention, SwiGLU, RMSNorm.

An ordinary Flax model without a mesh or a layout. The Flax metadata of each weight names its dimensions. A layout, one line of
text elsewhere, says which mesh axis each name is sharded over.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """[batch, seq, heads, head_dim]; key and value may have fewer heads."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


@dataclass(frozen=True)
class Config:
    vocab: int = 256
    layers: int = 4
    embed: int = 128
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    mlp: int = 384
    dropout: float = 0.05
    rope_base: float = 10_000.0
    attend: Callable[..., jax.Array] = causal_attention


def named(*dims: str, init=nnx.initializers.lecun_normal()):  # noqa: B008
    """An initializer that gives the weight's dims their names."""
    return nnx.with_partitioning(init, dims)


def norm(config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    ones = nnx.initializers.ones
    return nnx.RMSNorm(config.embed, scale_init=named("embed", init=ones), rngs=rngs)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary position embedding: turn each pair of features by an angle that grows with position.

    x: [batch, seq, heads, head_dim]
    """
    seq, half = x.shape[1], x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half) / half)
    angle = jnp.arange(seq)[:, None, None] * frequency  # [seq, 1, half]
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        def project(name: str, count: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                config.embed,
                (count, config.head_dim),
                use_bias=False,
                kernel_init=named("embed", name, "head_dim"),
                rngs=rngs,
            )

        self.query = project("heads", config.heads)
        self.key = project("kv_heads", config.kv_heads)
        self.value = project("kv_heads", config.kv_heads)
        self.out = nnx.LinearGeneral(
            (config.heads, config.head_dim),
            config.embed,
            axis=(-2, -1),
            use_bias=False,
            kernel_init=named("heads", "head_dim", "embed"),
            rngs=rngs,
        )
        self.rope_base = config.rope_base
        self.attend = config.attend

    def __call__(self, x: jax.Array) -> jax.Array:
        query = rotate(self.query(x), self.rope_base)
        key = rotate(self.key(x), self.rope_base)
        value = self.value(x)
        return self.out(self.attend(query, key, value))


class SwiGLU(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        def linear(into: str, size_in: int, out: str, size_out: int) -> nnx.Linear:
            init = named(into, out)
            return nnx.Linear(size_in, size_out, use_bias=False, kernel_init=init, rngs=rngs)

        self.gate = linear("embed", config.embed, "mlp", config.mlp)
        self.up = linear("embed", config.embed, "mlp", config.mlp)
        self.down = linear("mlp", config.mlp, "embed", config.embed)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = norm(config, rngs)
        self.mlp = SwiGLU(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        keys = (None, None) if key is None else jax.random.split(key)
        x += self.drop(self.attention(self.attention_norm(x)), keys[0])
        x += self.drop(self.mlp(self.mlp_norm(x)), keys[1])
        return x

    def drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return self.dropout(x, deterministic=key is None, rngs=key)


LAYERS = {nnx.PARTITION_NAME: "layers"}  # the name of the dim that stacks the layers' weights


@nnx.scan(in_axes=(0, nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=LAYERS)
@nnx.remat(prevent_cse=False)  # a loop already keeps XLA from merging the two forward passes
def run_layers(layer: Layer, x: jax.Array, key: jax.Array | None) -> jax.Array:
    return layer(x, key)


class Transformer(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=LAYERS)
        def stack(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs)

        embedding = nnx.initializers.normal(1.0)
        head = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(
            config.vocab,
            config.embed,
            embedding_init=named("vocab", "embed", init=embedding),
            rngs=rngs,
        )
        self.layers = stack(rngs)
        self.norm = norm(config, rngs)
        self.head = nnx.Linear(
            config.embed,
            config.vocab,
            use_bias=False,
            kernel_init=named("embed", "vocab", init=head),
            rngs=rngs,
        )
        self.depth = config.layers

    def __call__(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits [batch, seq, vocab] of the token after each of `tokens` [batch, seq].

        `key` is the randomness of dropout; without one there is no dropout.
        """
        keys = None if key is None else jax.random.split(key, self.depth)
        x = run_layers(self.layers, self.embedding(tokens), keys)
        return self.head(self.norm(x))
