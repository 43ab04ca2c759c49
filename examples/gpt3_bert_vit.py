"""GPT-3 175B, BERT and ViT-22B in Flax Linen, at their real sizes, to be planned and compiled for pods that are not attached.

    meshpar plan examples/gpt3_bert_vit.py:gpt3_175b --topology v5p:8x8x16 --mesh "data=128, model=8" --layout sequence_parallel
    meshpar plan examples/gpt3_bert_vit.py:bert_large --topology v5e:4x4 --layout zero1
    meshpar plan examples/gpt3_bert_vit.py:vit_22b --topology v5p:8x8x16 --mesh "data=1024" --layout fsdp

One Transformer with biases, in the three orders of norms, attention and MLP that the papers have. Weights and AdamW moments
are float32, the compute dtype is bfloat16. Sources: Brown et al., "Language Models are Few-Shot Learners" (2020), with
dense attention in every layer; Devlin et al., "BERT" (2019), with both of its losses; Dehghani et al., "Scaling Vision
Transformers to 22 Billion Parameters" (2023). Without dropout.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import llama
from llama import named

LAYOUTS = {
    "data_parallel": "batch: data",
    "zero1": "batch: data; opt.embed: data",
    "fsdp": "batch: data; embed: data",
    "fsdp_tensor": "batch: data; heads, mlp: model; embed: data",
    "sequence_parallel": "batch: data; heads, mlp: model; embed: data; seq: model",
}
DIMS = {
    **dict.fromkeys(("tokens", "targets", "segments"), "batch seq"),
    **dict.fromkeys(("masked", "words"), "batch masked"),
    **dict.fromkeys(("labels", "next"), "batch"),
    "images": "batch height width _",
}
"""Leaf of a batch → its dims."""
Target = llama.Target


@dataclass(frozen=True)
class Config:
    """Sizes and options of a Transformer.

    Attributes:
      tokens: number of positions.
      vocab: of tokens; for images, the number of classes.
      block: order of a layer: ``"pre"``: norms before attention and before the MLP (GPT-3); ``"post"``: after them (BERT);
        ``"parallel"``: attention and MLP of one norm, norms of queries and keys, fewer biases (ViT-22B).
      patch: side of a patch in pixels.
      attention: implementation of causal attention, see :func:`llama.attention`.
      remat: residuals that a layer saves for the backward pass, see :data:`llama.REMAT`.
    """

    embed: int
    layers: int
    heads: int
    mlp: int
    tokens: int
    vocab: int
    block: str
    head_dim: int = 64
    patch: int = 14
    dtype: Any = jnp.bfloat16
    attention: str = "splash"
    remat: str = "full"


GPT3_175B = Config(12288, 96, 96, 49152, 2048, 50257, "pre", head_dim=128)
BERT_BASE = Config(768, 12, 12, 3072, 512, 30522, "post", remat="minimal_with_context")
BERT_LARGE = Config(1024, 24, 16, 4096, 512, 30522, "post", remat="minimal_with_context")
VIT_22B = Config(6144, 48, 48, 24576, 256, 29593, "parallel", head_dim=128)
TINY = {"embed": 32, "layers": 2, "heads": 4, "mlp": 64, "head_dim": 8, "dtype": jnp.float32, "attention": "xla"}


def gpt3_175b(batch: int = 1536, **changes: Any) -> Target:
    """GPT-3 175B: 174.6e9 weights; 3.1e6 tokens in a step."""
    c = dataclasses.replace(GPT3_175B, **changes)
    tokens = jax.ShapeDtypeStruct((batch, c.tokens), jnp.int32)
    return target(Gpt(c), {"tokens": tokens, "targets": tokens})


def bert_base(batch: int = 256, masked: int = 80, **changes: Any) -> Target:
    """BERT base with the weights of both losses: 110e6 weights; 80 words of 512 are predicted."""
    return _bert(dataclasses.replace(BERT_BASE, **changes), batch, masked)


def bert_large(batch: int = 256, masked: int = 80, **changes: Any) -> Target:
    """BERT large with the weights of both losses: 336e6 weights; 80 words of 512 are predicted."""
    return _bert(dataclasses.replace(BERT_LARGE, **changes), batch, masked)


def vit_22b(batch: int = 65536, **changes: Any) -> Target:
    """ViT-22B: 21.7e9 weights in its layers; images of 224x224 in patches of 14x14."""
    c = dataclasses.replace(VIT_22B, **changes)
    size = c.patch * round(c.tokens**0.5)
    images = jax.ShapeDtypeStruct((batch, size, size, 3), c.dtype)
    return target(Vit(c), {"images": images, "labels": jax.ShapeDtypeStruct((batch,), jnp.int32)})


def _bert(c: Config, batch: int, masked: int) -> Target:
    tokens, words = (jax.ShapeDtypeStruct((batch, n), jnp.int32) for n in (c.tokens, masked))
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return target(Bert(c), {"tokens": tokens, "segments": tokens, "masked": words, "words": words, "next": labels})


def target(model: Any, batch: dict[str, jax.ShapeDtypeStruct]) -> Target:
    """The train step of a model that returns its loss for a batch: (step, (state, batch), dims)."""
    state = jax.eval_shape(lambda: create_state(model, batch, jax.random.key(0)))
    return train_step(model), (state, batch), {f"batch/{name}": DIMS[name] for name in batch}


def create_state(model: Any, batch: dict[str, jax.ShapeDtypeStruct], key: jax.Array) -> dict[str, Any]:
    """Weights and AdamW moments, float32, boxed with the names of their dims."""
    plain = type(model)(
        dataclasses.replace(model.config, attention="xla")
    )  # the same weights; splash needs long sequences
    params = plain.init(key, {name: jnp.zeros((1, *x.shape[1:]), x.dtype) for name, x in batch.items()})["params"]
    return {"params": params, "opt": llama.optimizer().init(params)}


def train_step(model: Any) -> Any:
    def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
        """One update of AdamW; returns the new state and the mean loss in nats."""
        loss, gradients = jax.value_and_grad(lambda params: model.apply({"params": params}, batch))(state["params"])
        updates, opt = llama.optimizer().update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


class Gpt(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Mean loss of the next tokens, `targets` [batch, seq] for `tokens` [batch, seq]; the logits' weights are the embedding."""
        c = self.config
        words = table(c, c.vocab, "vocab", "words")
        x = words(batch["tokens"]) + position(self, c)
        x, _ = llama.scanned(Layer, c)(x, None)
        kernel = jnp.asarray(words.embedding.T, c.dtype)
        return llama.cross_entropy(norm(c, "norm")(x), kernel, batch["targets"]).mean()


class Bert(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Mean loss of the words at the positions `masked` [batch, masked], plus the loss of the next-sentence prediction."""
        c = self.config
        words = table(c, c.vocab, "vocab", "words")
        x = words(batch["tokens"]) + position(self, c) + table(c, 2, None, "segments")(batch["segments"])
        x, _ = llama.scanned(Layer, c)(norm(c, "embedding_norm")(x), None)

        y = jnp.take_along_axis(x, batch["masked"][..., None], axis=1)
        y = norm(c, "word_norm")(nn.gelu(dense(c, (c.embed,), (None, "embed"), name="word")(y), approximate=False))
        bias = self.param("word_bias", named(nn.initializers.zeros, "vocab"), (c.vocab,))
        logits = words.attend(y).astype(jnp.float32) + bias
        words_loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["words"]).mean()

        first = jnp.tanh(dense(c, (c.embed,), (None, "embed"), name="pooler")(x[:, 0]))
        logits = dense(c, (2,), ("embed", None), name="next")(first).astype(jnp.float32)
        return words_loss + optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()


class Vit(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Mean over `images` [batch, height, width, 3] of the sigmoid loss of all classes, with one correct class each."""
        c, images = self.config, batch["images"]
        init = named(nn.initializers.lecun_normal(), None, None, None, "embed")
        bias = named(nn.initializers.zeros, "embed")
        patches = nn.Conv(
            c.embed, (c.patch, c.patch), (c.patch, c.patch), dtype=c.dtype, kernel_init=init, bias_init=bias, name="patches"
        )  # fmt: skip
        x = patches(images).reshape(images.shape[0], c.tokens, c.embed) + position(self, c)
        x, _ = llama.scanned(Layer, c)(x, None)
        x = norm(c, "norm")(x)
        probe = self.param("probe", named(nn.initializers.normal(0.02), None, "embed"), (1, c.embed))
        pooled = jnp.broadcast_to(probe.astype(c.dtype), (x.shape[0], 1, c.embed))
        pooled = Attention(c, name="pool")(pooled, x)  # one query for the features of the image (Zhai et al., 2022)
        pooled = (pooled + Mlp(c, name="pool_mlp")(norm(c, "pool_norm")(pooled)))[:, 0]
        logits = dense(c, (c.vocab,), ("embed", "classes"), name="head")(pooled).astype(jnp.float32)
        labels = jax.nn.one_hot(batch["labels"], c.vocab)
        return optax.sigmoid_binary_cross_entropy(logits, labels).sum(-1).mean()


class Layer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        c = self.config
        attention, mlp = Attention(c, name="attention"), Mlp(c, name="mlp")
        if c.block == "parallel":
            y = norm(c, "norm")(x)
            return x + attention(y, y) + mlp(y), None
        if c.block == "post":
            x = norm(c, "attention_norm")(checkpoint_name(x + attention(x, x), "residual"))
            return norm(c, "mlp_norm")(x + mlp(x)), None
        y = norm(c, "attention_norm")(x)
        x = checkpoint_name(x + attention(y, y), "residual")
        return x + mlp(norm(c, "mlp_norm")(x)), None


class Attention(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Attention of `x` [batch, queries, embed] over `y` [batch, seq, embed], as `x`."""
        c, vit = self.config, self.config.block == "parallel"

        def heads(name: str, of: jax.Array) -> jax.Array:
            z = dense(c, (c.heads, c.head_dim), ("embed", "heads", "head_dim"), bias=not vit, name=name)(of)
            if vit and name != "value":
                z = norm(c, f"{name}_norm", "head_dim")(z)
            return checkpoint_name(z, f"{name}_proj")

        q, k, v = heads("query", x), heads("key", y), heads("value", y)
        z = llama.attention(q, k, v, c.attention) if c.block == "pre" else jax.nn.dot_product_attention(q, k, v)
        return dense(c, (c.embed,), ("heads", "head_dim", "embed"), axis=(-2, -1), name="out")(z)


class Mlp(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        up = checkpoint_name(dense(c, (c.mlp,), ("embed", "mlp"), name="up")(x), "up_proj")
        return dense(c, (c.embed,), ("mlp", "embed"), name="down")(nn.gelu(up, approximate=c.block == "pre"))


def dense(
    config: Config, out: tuple[int, ...], dims: tuple[str | None, ...], *, axis: Any = -1, bias: bool = True, name: str
) -> nn.DenseGeneral:
    init, zeros = named(nn.initializers.lecun_normal(), *dims), named(nn.initializers.zeros, *dims[-len(out) :])
    return nn.DenseGeneral(
        out, axis=axis, use_bias=bias, dtype=config.dtype, kernel_init=init, bias_init=zeros, name=name
    )


def norm(config: Config, name: str, dim: str = "embed") -> nn.LayerNorm:
    bias = config.block != "parallel"
    return nn.LayerNorm(
        use_bias=bias, dtype=config.dtype, name=name,
        scale_init=named(nn.initializers.ones, dim), bias_init=named(nn.initializers.zeros, dim),
    )  # fmt: skip


def table(config: Config, rows: int, dim: str | None, name: str) -> nn.Embed:
    init = named(nn.initializers.normal(0.02), dim, "embed")
    return nn.Embed(rows, config.embed, dtype=config.dtype, embedding_init=init, name=name)


def position(model: nn.Module, config: Config) -> jax.Array:
    """The learned embedding of the positions, [seq, embed]."""
    init = named(nn.initializers.normal(0.02), "seq", "embed")
    return model.param("positions", init, (config.tokens, config.embed)).astype(config.dtype)
