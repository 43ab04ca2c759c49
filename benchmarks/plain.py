"""Train steps of plainly written models, compiled ahead of time under both lowerings, by the TPU compiler's schedule.

    python benchmarks/plain.py                              # every case: seconds of a step under "jit" and "shard_map"
    python benchmarks/plain.py --case llama-fsdp-v5p --kernels

The models use no kernel, option or name of meshpar: attention by einsum with materialized scores, masks by ``tril``, softmax in
float32, bfloat16 weights, ``jax.checkpoint`` of every scanned layer, and a cross-entropy of optax. No pass was fitted to them.
A case of ``examples/llama.py`` represents programs that passes were fitted to. Seconds are compute plus exposed communication of
the final schedule (:mod:`verify.exposed`); ``planned`` is the step time of the plan for ``"shard_map"``.
"""

import argparse
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tables import Table

import meshpar as mp
from meshpar._src.cost.memory import memory_of
from meshpar._src.verify.hlo import estimate, walk
from meshpar._src.verify.hlo_text import parse

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import llama as fitted

Target = tuple[Callable[..., Any], tuple[Any, ...], dict[str, str]]
"""(train step, its arguments as ``jax.ShapeDtypeStruct``, dims of its arrays by path)."""

FSDP = "batch: data; embed: data"
ZERO1 = "batch: data; opt.embed: data"
TENSOR = "batch: data; heads, kv_heads, mlp, vocab: model"
SEQUENCE = f"{TENSOR}; embed: data; seq: model"
EXPERTS = "batch: data; embed: data; expert: model"


def train_step(loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any, optimizer: Any) -> tuple[Any, Any]:
    """(an update of the state by the gradient of a loss; its arguments)."""

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step, ({"params": params, "opt": jax.eval_shape(optimizer.init, params)}, batch)


def shapes(dtype: Any = jnp.bfloat16, **sizes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in sizes.items()}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale


def rotary(x: jax.Array, base: float = 500_000.0) -> jax.Array:
    """Rotary position embeddings of `x` [batch, seq, heads, head_dim]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / base ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def grouped_attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = True) -> jax.Array:
    """Attention of `q` [batch, seq, heads, head_dim] over `k`, `v` [batch, seq, kv_heads, head_dim], scores materialized."""
    b, s, heads, d = q.shape
    q = q.reshape(b, s, k.shape[2], heads // k.shape[2], d)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k).astype(jnp.float32) * d**-0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e30)
    p = jax.nn.softmax(scores, -1).astype(q.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(b, s, heads, d)


def llama(
    layers: int = 2, embed: int = 2048, heads: int = 16, kv_heads: int = 4, mlp: int = 5632, vocab: int = 32000,
    batch: int = 128, seq: int = 2048, head_dim: int = 128,
) -> Target:  # fmt: skip
    """A decoder as a tutorial has it: SwiGLU, grouped queries, RoPE."""
    params = {
        "embed": shapes(w=(vocab, embed))["w"],
        "layers": shapes(
            norm1=(layers, embed), wq=(layers, embed, heads, head_dim), wk=(layers, embed, kv_heads, head_dim),
            wv=(layers, embed, kv_heads, head_dim), wo=(layers, heads, head_dim, embed), norm2=(layers, embed),
            gate=(layers, embed, mlp), up=(layers, embed, mlp), down=(layers, mlp, embed),
        ),
        "norm": shapes(w=(embed,))["w"],
        "head": shapes(w=(embed, vocab))["w"],
    }  # fmt: skip

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        h = rms_norm(x, p["norm1"])
        q, k, v = (jnp.einsum("bsd,dhe->bshe", h, p[w]) for w in ("wq", "wk", "wv"))
        x = x + jnp.einsum("bshe,hed->bsd", grouped_attention(rotary(q), rotary(k), v), p["wo"])
        h = rms_norm(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(jax.checkpoint(layer), p["embed"][tokens], p["layers"])
        logits = (rms_norm(x, p["norm"]) @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    dims = {
        "*/embed": "vocab embed", "*/head": "embed vocab", "*/norm": "embed", "*/norm1": "layers embed", "*/norm2": "layers embed",
        "*/wq": "layers embed heads head_dim", "*/wk": "layers embed kv_heads head_dim",
        "*/wv": "layers embed kv_heads head_dim", "*/wo": "layers heads head_dim embed", "*/gate": "layers embed mlp",
        "*/up": "layers embed mlp", "*/down": "layers mlp embed", "batch": "batch seq",
    }  # fmt: skip
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return *train_step(loss, params, tokens, optax.adamw(3e-4)), dims


def llama3_8b(layers: int = 32, batch: int = 256) -> Target:
    """The plain Llama in the sizes of Llama 3 8B."""
    return llama(layers, 4096, 32, 8, 14336, 128256, batch)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale + bias


ENCODER_DIMS = {
    "*/norm1": "layers embed", "*/bias1": "layers embed", "*/norm2": "layers embed", "*/bias2": "layers embed",
    "*/wqkv": "layers embed _ heads head_dim", "*/wo": "layers heads head_dim embed", "*/up": "layers embed mlp",
    "*/up_bias": "layers mlp", "*/down": "layers mlp embed", "*/down_bias": "layers embed",
}  # fmt: skip


def encoder_params(layers: int, embed: int, heads: int, mlp: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Of the stacked layers of :func:`encoder_layer`."""
    return shapes(
        norm1=(layers, embed), bias1=(layers, embed), wqkv=(layers, embed, 3, heads, embed // heads),
        wo=(layers, heads, embed // heads, embed), norm2=(layers, embed), bias2=(layers, embed),
        up=(layers, embed, mlp), up_bias=(layers, mlp), down=(layers, mlp, embed), down_bias=(layers, embed),
    )  # fmt: skip


def encoder_layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
    """A layer of a bidirectional Transformer on `x` [batch, seq, embed], with layer norms before attention and MLP."""
    qkv = jnp.einsum("bsd,dchf->cbshf", layer_norm(x, p["norm1"], p["bias1"]), p["wqkv"])
    scores = jnp.einsum("bqhf,bkhf->bhqk", qkv[0], qkv[1]).astype(jnp.float32) * qkv.shape[-1] ** -0.5
    mixed = jnp.einsum("bhqk,bkhf->bqhf", jax.nn.softmax(scores, -1).astype(x.dtype), qkv[2])
    x = x + jnp.einsum("bqhf,hfd->bqd", mixed, p["wo"])
    h = jax.nn.gelu(layer_norm(x, p["norm2"], p["bias2"]) @ p["up"] + p["up_bias"])
    return x + h @ p["down"] + p["down_bias"], None


def vit(
    layers: int = 2, embed: int = 1024, heads: int = 16, mlp: int = 4096, batch: int = 2048, size: int = 224,
    patch: int = 16, classes: int = 1000,
) -> Target:  # fmt: skip
    """A vision transformer in the sizes of ViT-L/16, with a class token."""
    side = size // patch
    params = {
        "patches": shapes(w=(patch * patch * 3, embed))["w"],
        "token": shapes(w=(embed,))["w"],
        "positions": shapes(w=(side * side + 1, embed))["w"],
        "layers": encoder_params(layers, embed, heads, mlp),
        "norm": shapes(w=(embed,))["w"],
        "bias": shapes(w=(embed,))["w"],
        "head": shapes(w=(embed, classes))["w"],
    }  # fmt: skip

    def loss(p: Any, data: Any) -> jax.Array:
        images = data["images"].reshape(-1, side, patch, side, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        x = images.reshape(-1, side * side, patch * patch * 3) @ p["patches"]
        x = jnp.concatenate([jnp.broadcast_to(p["token"], (x.shape[0], 1, embed)), x], 1) + p["positions"]
        x, _ = jax.lax.scan(jax.checkpoint(encoder_layer), x, p["layers"])
        logits = (layer_norm(x[:, 0], p["norm"], p["bias"]) @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, data["labels"]).mean()

    dims = {
        "*/patches": "pixels embed", "*/token": "embed", "*/positions": "_ embed", "*/norm": "embed", "*/bias": "embed",
        "*/head": "embed classes", **ENCODER_DIMS,
        "*images": "batch height width channels", "*labels": "batch",
    }  # fmt: skip
    data = {
        "images": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.bfloat16),
        "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return *train_step(loss, params, data, optax.adamw(3e-4)), dims


def mixer(
    layers: int = 2, embed: int = 768, tokens_mlp: int = 384, mlp: int = 3072, batch: int = 2048, size: int = 224,
    patch: int = 16, classes: int = 1000,
) -> Target:  # fmt: skip
    """An MLP-Mixer in the sizes of B/16: layers that multiply along tokens, then along features."""
    side = size // patch
    params = {
        "patches": shapes(w=(patch * patch * 3, embed))["w"],
        "layers": shapes(
            norm1=(layers, embed), bias1=(layers, embed), up_tokens=(layers, side * side, tokens_mlp),
            down_tokens=(layers, tokens_mlp, side * side), norm2=(layers, embed), bias2=(layers, embed),
            up=(layers, embed, mlp), down=(layers, mlp, embed),
        ),
        "head": shapes(w=(embed, classes))["w"],
    }  # fmt: skip

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        h = layer_norm(x, p["norm1"], p["bias1"]).transpose(0, 2, 1)
        x = x + (jax.nn.gelu(h @ p["up_tokens"]) @ p["down_tokens"]).transpose(0, 2, 1)
        return x + jax.nn.gelu(layer_norm(x, p["norm2"], p["bias2"]) @ p["up"]) @ p["down"], None

    def loss(p: Any, data: Any) -> jax.Array:
        images = data["images"].reshape(-1, side, patch, side, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        x = images.reshape(-1, side * side, patch * patch * 3) @ p["patches"]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, p["layers"])
        logits = (x.mean(1) @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, data["labels"]).mean()

    dims = {
        "*/patches": "pixels embed", "*/norm1": "layers embed", "*/bias1": "layers embed", "*/norm2": "layers embed",
        "*/bias2": "layers embed", "*/up_tokens": "layers tokens mix", "*/down_tokens": "layers mix tokens",
        "*/up": "layers embed mlp", "*/down": "layers mlp embed", "*/head": "embed classes",
        "*images": "batch height width channels", "*labels": "batch",
    }  # fmt: skip
    data = {
        "images": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.bfloat16),
        "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return *train_step(loss, params, data, optax.adamw(3e-4)), dims


def resnet(blocks: Sequence[int] = (2, 2), batch: int = 1024, size: int = 224, width: int = 64) -> Target:
    """A ResNet of bottleneck blocks, statistics of the batch by ``mean`` and ``var``; ResNet-50 has ``blocks=(3, 4, 6, 3)``."""
    params: dict[str, Any] = {}

    def weight(name: str, kernel: int, n: int, m: int) -> None:
        params[name] = {
            "conv": shapes(w=(kernel, kernel, n, m))["w"],
            "scale": shapes(w=(m,))["w"],
            "shift": shapes(w=(m,))["w"],
        }

    weight("stem", 7, 3, width)
    features = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for block in range(count):
            name = f"stage{stage}_{block}"
            weight(f"{name}_1", 1, features, inner)
            weight(f"{name}_2", 3, inner, inner)
            weight(f"{name}_3", 1, inner, 4 * inner)
            if not block:
                weight(f"{name}_skip", 1, features, 4 * inner)
            features = 4 * inner
    params["head"] = shapes(w=(features, 1000))["w"]

    def conv(p: Any, x: jax.Array, stride: int = 1) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, p["conv"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = y.astype(jnp.float32)
        y = (y - y.mean((0, 1, 2))) * jax.lax.rsqrt(y.var((0, 1, 2)) + 1e-5)
        return y.astype(x.dtype) * p["scale"] + p["shift"]

    def loss(p: Any, data: Any) -> jax.Array:
        x = jax.nn.relu(conv(p["stem"], data["images"], 2))
        x = jax.lax.reduce_window(x, np.array(-np.inf, x.dtype), jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage, count in enumerate(blocks):
            for block in range(count):
                name, stride = f"stage{stage}_{block}", 2 if stage and not block else 1
                y = jax.nn.relu(conv(p[f"{name}_1"], x))
                y = jax.nn.relu(conv(p[f"{name}_2"], y, stride))
                skip = x if block else conv(p[f"{name}_skip"], x, stride)
                x = jax.nn.relu(conv(p[f"{name}_3"], y) + skip)
        logits = (x.mean((1, 2)) @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, data["labels"]).mean()

    dims = {
        "*/conv": "_ _ _ features", "*/scale": "features", "*/shift": "features", "*/head": "_ classes",
        "*images": "batch height width channels", "*labels": "batch",
    }  # fmt: skip
    data = {
        "images": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.bfloat16),
        "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return *train_step(loss, params, data, optax.sgd(0.1, 0.9)), dims


def mixture(
    layers: int = 2, embed: int = 2048, heads: int = 16, experts: int = 8, mlp: int = 4096,
    vocab: int = 32000, batch: int = 128, seq: int = 1024,
) -> Target:  # fmt: skip
    """A decoder with a mixture of experts: two experts a token, by einsums with one-hot arrays over a capacity of 1.25 (GShard)."""
    head_dim = embed // heads
    capacity = int(1.25 * 2 * seq / experts)
    params = {
        "embed": shapes(w=(vocab, embed))["w"],
        "layers": shapes(
            norm1=(layers, embed), wqkv=(layers, embed, 3, heads, head_dim), wo=(layers, heads, head_dim, embed),
            norm2=(layers, embed), router=(layers, embed, experts), up=(layers, experts, embed, mlp),
            down=(layers, experts, mlp, embed),
        ),
    }  # fmt: skip

    def experts_of(h: jax.Array, p: Any) -> jax.Array:
        weights, chosen = jax.lax.top_k(jax.nn.softmax((h @ p["router"]).astype(jnp.float32), -1), 2)
        mask = jax.nn.one_hot(chosen, experts, dtype=jnp.float32)  # [batch, seq, 2, experts]
        place = (jnp.cumsum(mask.reshape(-1, 2 * seq, experts), 1) - 1).reshape(mask.shape)
        slot = jax.nn.one_hot(jnp.where(mask > 0, place, -1).astype(jnp.int32), capacity, dtype=h.dtype)
        dispatch = slot.sum(2)  # [batch, seq, experts, capacity]
        combine = jnp.einsum("bskec,bsk->bsec", slot, weights.astype(h.dtype))
        y = jax.nn.gelu(jnp.einsum("becd,edf->becf", jnp.einsum("bsec,bsd->becd", dispatch, h), p["up"]))
        return jnp.einsum("bsec,becd->bsd", combine, jnp.einsum("becf,efd->becd", y, p["down"]))

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        qkv = jnp.einsum("bsd,dchf->cbshf", rms_norm(x, p["norm1"]), p["wqkv"])
        x = x + jnp.einsum("bshe,hed->bsd", grouped_attention(rotary(qkv[0]), rotary(qkv[1]), qkv[2]), p["wo"])
        return x + experts_of(rms_norm(x, p["norm2"]), p), None

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(jax.checkpoint(layer), p["embed"][tokens], p["layers"])
        logits = (x @ p["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    dims = {
        "*/embed": "vocab embed", "*/norm1": "layers embed", "*/norm2": "layers embed",
        "*/wqkv": "layers embed _ heads head_dim", "*/wo": "layers heads head_dim embed", "*/router": "layers embed _",
        "*/up": "layers expert embed mlp", "*/down": "layers expert mlp embed", "batch": "batch seq",
    }  # fmt: skip
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return *train_step(loss, params, tokens, optax.adamw(3e-4)), dims


def t5(
    layers: int = 2,
    embed: int = 1024,
    heads: int = 16,
    mlp: int = 2816,
    vocab: int = 32128,
    batch: int = 2048,
    seq: int = 512,
) -> Target:
    """An encoder and a decoder in the sizes of T5 1.1 large: relative position biases, gated GELU, cross-attention."""
    head_dim, buckets = embed // heads, 32
    heads_first = {f"{a}{w}": (layers, embed, heads, head_dim) for a in ("w", "x") for w in "qkv"}
    feed = {
        "norm": (layers, embed),
        "gate": (layers, embed, mlp),
        "up": (layers, embed, mlp),
        "down": (layers, mlp, embed),
    }
    own = {"norm1": (layers, embed), "wo": (layers, heads, head_dim, embed)} | feed
    cross = {"norm2": (layers, embed), "xo": (layers, heads, head_dim, embed)}
    params = {
        "embed": shapes(w=(vocab, embed))["w"],
        "head": shapes(w=(embed, vocab))["w"],
        "encoder": shapes(**own, **{k: v for k, v in heads_first.items() if k[0] == "w"}),
        "decoder": shapes(**own, **cross, **heads_first),
        **shapes(
            encoder_bias=(buckets, heads), decoder_bias=(buckets, heads), encoder_norm=(embed,), decoder_norm=(embed,)
        ),
    }

    def bias(table: jax.Array, causal: bool) -> jax.Array:
        """The bias of each head by the distance of key and query: exact to a quarter of the buckets, then by its logarithm."""
        distance = jnp.arange(seq)[None] - jnp.arange(seq)[:, None]
        size = jnp.abs(distance)
        far = 8 + (jnp.log(jnp.maximum(size, 1) / 8) / np.log(128 / 8) * 8).astype(jnp.int32)
        bucket = jnp.where(size < 8, size, jnp.minimum(far, 15)) + jnp.where(distance > 0, 16, 0)
        table = table[bucket].transpose(2, 0, 1).astype(jnp.float32)
        return jnp.where(distance > 0, -1e30, table) if causal else table

    def attention(p: Any, a: str, x: jax.Array, y: jax.Array, bias: jax.Array | float = 0.0) -> jax.Array:
        q = jnp.einsum("bsd,dhf->bshf", x, p[f"{a}q"])
        k, v = (jnp.einsum("bsd,dhf->bshf", y, p[f"{a}{w}"]) for w in "kv")
        scores = jnp.einsum("bqhf,bkhf->bhqk", q, k).astype(jnp.float32) + bias
        mixed = jnp.einsum("bhqk,bkhf->bqhf", jax.nn.softmax(scores, -1).astype(x.dtype), v)
        return jnp.einsum("bqhf,hfd->bqd", mixed, p[f"{a}o"])

    def loss(p: Any, data: Any) -> jax.Array:
        biases = bias(p["encoder_bias"], False), bias(p["decoder_bias"], True)

        def feed_forward(x: jax.Array, p: Any) -> jax.Array:
            h = rms_norm(x, p["norm"])
            return x + (jax.nn.gelu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

        def encoder(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            h = rms_norm(x, p["norm1"])
            return feed_forward(x + attention(p, "w", h, h, biases[0]), p), None

        def decoder(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            h = rms_norm(x, p["norm1"])
            x = x + attention(p, "w", h, h, biases[1])
            return feed_forward(x + attention(p, "x", rms_norm(x, p["norm2"]), memory), p), None

        memory, _ = jax.lax.scan(jax.checkpoint(encoder), p["embed"][data["inputs"]], p["encoder"])
        memory = rms_norm(memory, p["encoder_norm"])
        x, _ = jax.lax.scan(jax.checkpoint(decoder), p["embed"][data["targets"]], p["decoder"])
        logits = (rms_norm(x, p["decoder_norm"]) @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], data["targets"][:, 1:]).mean()

    dims = {
        "*/embed": "vocab embed",
        "*/head": "embed vocab",
        "*er_bias": "_ heads",
        "*er_norm": "embed",
        "*/norm*": "layers embed",
        "*/[wx][qkv]": "layers embed heads head_dim",
        "*/[wx]o": "layers heads head_dim embed",
        "*/gate": "layers embed mlp",
        "*/up": "layers embed mlp",
        "*/down": "layers mlp embed",
        "batch/*": "batch seq",
    }
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return *train_step(loss, params, {"inputs": tokens, "targets": tokens}, optax.adamw(3e-4)), dims


def two_towers(
    layers: int = 2,
    embed: int = 768,
    heads: int = 12,
    mlp: int = 3072,
    vocab: int = 49408,
    batch: int = 4096,
    seq: int = 77,
) -> Target:
    """Image and text encoders in the sizes of CLIP ViT-B/32, with a contrastive loss over all pairs of the batch."""
    side, patch = 7, 32
    params = {
        "patches": shapes(w=(patch * patch * 3, embed))["w"],
        "tokens": shapes(w=(vocab, embed))["w"],
        "image": encoder_params(layers, embed, heads, mlp),
        "text": encoder_params(layers, embed, heads, mlp),
        **shapes(image_head=(embed, 512), text_head=(embed, 512), scale=()),
    }

    def loss(p: Any, data: Any) -> jax.Array:
        images = data["images"].reshape(-1, side, patch, side, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        inputs = {
            "image": images.reshape(-1, side * side, patch * patch * 3) @ p["patches"],
            "text": p["tokens"][data["text"]],
        }
        z = {}
        for tower, x in inputs.items():
            x, _ = jax.lax.scan(jax.checkpoint(encoder_layer), x, p[tower])
            x = (x.mean(1) @ p[f"{tower}_head"]).astype(jnp.float32)
            z[tower] = x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)
        logits = z["image"] @ z["text"].T * jnp.exp(p["scale"].astype(jnp.float32))
        labels = jnp.arange(logits.shape[0])
        of_images, of_texts = (
            optax.softmax_cross_entropy_with_integer_labels(x, labels).mean() for x in (logits, logits.T)
        )
        return (of_images + of_texts) / 2

    dims = {
        "*/patches": "pixels embed",
        "*/tokens": "vocab embed",
        "*_head": "embed shared",
        "*/scale": "",
        **ENCODER_DIMS,
        "*images": "batch height width channels",
        "*/text": "batch seq",
    }
    data = {
        "images": jax.ShapeDtypeStruct((batch, side * patch, side * patch, 3), jnp.bfloat16),
        "text": jax.ShapeDtypeStruct((batch, seq), jnp.int32),
    }
    return *train_step(loss, params, data, optax.adamw(3e-4)), dims


def mamba(
    layers: int = 2,
    embed: int = 2048,
    state: int = 128,
    head_dim: int = 64,
    chunk: int = 256,
    vocab: int = 32000,
    batch: int = 128,
    seq: int = 2048,
) -> Target:
    """A decoder of Mamba-2 layers: the state-space dual form in chunks, and a loop over the states between chunks."""
    inner, kernel = 2 * embed, 4
    heads = inner // head_dim
    params = {
        "embed": shapes(w=(vocab, embed))["w"],
        "layers": shapes(
            norm=(layers, embed),
            gate=(layers, embed, inner),
            x=(layers, embed, inner),
            bc=(layers, embed, 2, state),
            dt=(layers, embed, heads),
            conv=(layers, kernel, inner),
            decay=(layers, heads),
            skip=(layers, heads),
            dt_bias=(layers, heads),
            norm_out=(layers, inner),
            out=(layers, inner, embed),
        ),
        "norm": shapes(w=(embed,))["w"],
    }

    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        u = rms_norm(h, p["norm"])
        x = jnp.pad(u @ p["x"], ((0, 0), (kernel - 1, 0), (0, 0)))
        x = jax.nn.silu(sum(p["conv"][k] * x[:, k : k + seq] for k in range(kernel)))
        x = x.reshape(-1, seq // chunk, chunk, heads, head_dim)
        b, c = (jnp.einsum("bsd,dn->bsn", u, p["bc"][:, k]).reshape(-1, seq // chunk, chunk, state) for k in (0, 1))
        dt = jax.nn.softplus((u @ p["dt"] + p["dt_bias"]).astype(jnp.float32)).reshape(-1, seq // chunk, chunk, heads)
        decay = jnp.cumsum(-jnp.exp(p["decay"].astype(jnp.float32)) * dt, 2)  # [batch, chunks, chunk, heads]
        x_dt = x * dt.astype(x.dtype)[..., None]
        between = decay[:, :, :, None] - decay[:, :, None]  # [batch, chunks, chunk, chunk, heads]
        mask = jnp.tril(jnp.ones((chunk, chunk), bool))[:, :, None]
        weights = (
            jnp.exp(jnp.where(mask, between, -1e30)).astype(x.dtype) * jnp.einsum("bzqn,bzkn->bzqk", c, b)[..., None]
        )
        y = jnp.einsum("bzqkh,bzkhp->bzqhp", weights, x_dt)
        last = jnp.exp(decay[:, :, -1:] - decay).astype(x.dtype)
        states = jnp.einsum("bzkn,bzkh,bzkhp->zbhpn", b, last, x_dt)

        def step(s: jax.Array, xs: Any) -> tuple[jax.Array, jax.Array]:
            new, total = xs
            return s * jnp.exp(total).astype(s.dtype)[..., None, None] + new, s

        _, before = jax.lax.scan(step, jnp.zeros_like(states[0]), (states, decay[:, :, -1].transpose(1, 0, 2)))
        y = y + jnp.einsum("bzqn,zbhpn,bzqh->bzqhp", c, before, jnp.exp(decay).astype(x.dtype)) + x * p["skip"][:, None]
        y = rms_norm(y.reshape(-1, seq, inner) * jax.nn.silu(u @ p["gate"]), p["norm_out"])
        return h + y @ p["out"], None

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(jax.checkpoint(layer), p["embed"][tokens], p["layers"])
        logits = (rms_norm(x, p["norm"]) @ p["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    dims = {
        "*params/norm": "embed",
        "*mu/norm": "embed",
        "*nu/norm": "embed",
        "*/embed": "vocab embed",
        "*layers/norm": "layers embed",
        "*/gate": "layers embed inner",
        "*/x": "layers embed inner",
        "*/bc": "layers embed _ state",
        "*/dt": "layers embed heads",
        "*/conv": "layers _ inner",
        "*/decay": "layers heads",
        "*/skip": "layers heads",
        "*/dt_bias": "layers heads",
        "*/norm_out": "layers inner",
        "*/out": "layers inner embed",
        "batch": "batch seq",
    }
    return *train_step(loss, params, jax.ShapeDtypeStruct((batch, seq), jnp.int32), optax.adamw(3e-4)), dims


def unet(width: int = 320, levels: int = 2, heads: int = 8, batch: int = 512, size: int = 64) -> Target:
    """A diffusion U-Net on latents of 4 channels: residual blocks, halved and doubled images, attention at the lowest level."""
    params: dict[str, Any] = {}

    def weight(name: str, n: int, m: int, kernel: int = 3) -> None:
        params[name] = {
            **shapes(conv=(kernel, kernel, n, m), scale=(n,), shift=(n,)),
            "time": shapes(w=(width, m))["w"],
        }

    weight("in", 4, width)
    for k in range(levels):
        weight(f"down{k}_1", width * 2 ** max(k - 1, 0), width * 2**k)
        weight(f"down{k}_2", width * 2**k, width * 2**k)
        weight(f"up{k}_1", width * 2**k * 2 if k == levels - 1 else width * 2**k * 3, width * 2**k)
        weight(f"up{k}_2", width * 2**k, width * 2**k)
    weight("out", width, 4)
    low = width * 2 ** (levels - 1)
    params["attention"] = shapes(qkv=(low, 3, heads, low // heads), o=(heads, low // heads, low))

    def block(p: Any, x: jax.Array, t: jax.Array, stride: int = 1) -> jax.Array:
        groups = min(32, x.shape[-1])
        y = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
        y = (y - y.mean((1, 2, 4), keepdims=True)) * jax.lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
        y = jax.nn.silu(y.reshape(x.shape).astype(x.dtype) * p["scale"] + p["shift"])
        y = jax.lax.conv_general_dilated(
            y, p["conv"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y + (t @ p["time"])[:, None, None]

    def loss(p: Any, data: Any) -> jax.Array:
        angles = data["time"][:, None] * jnp.exp(-jnp.arange(width // 2) * (np.log(1e4) / (width // 2)))
        t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(jnp.bfloat16)
        keep = jnp.cos(data["time"] * (np.pi / 2))[:, None, None, None].astype(jnp.bfloat16)
        x = block(p["in"], data["images"] * keep + data["noise"] * jnp.sqrt(1 - keep**2), t)
        saved = []
        for k in range(levels):
            x = block(p[f"down{k}_1"], x, t, 2 if k else 1)
            x = x + block(p[f"down{k}_2"], x, t)
            saved.append(x)
        flat = x.reshape(x.shape[0], -1, low)
        q, k_, v = jnp.einsum("bsd,dchf->cbshf", flat, p["attention"]["qkv"])
        scores = jnp.einsum("bqhf,bkhf->bhqk", q, k_).astype(jnp.float32) * (low // heads) ** -0.5
        mixed = jnp.einsum("bhqk,bkhf->bqhf", jax.nn.softmax(scores, -1).astype(x.dtype), v)
        x = x + jnp.einsum("bqhf,hfd->bqd", mixed, p["attention"]["o"]).reshape(x.shape)
        for k in reversed(range(levels)):
            if k < levels - 1:
                x = x.repeat(2, 1).repeat(2, 2)
            x = block(p[f"up{k}_1"], jnp.concatenate([x, saved[k]], -1), t)
            x = x + block(p[f"up{k}_2"], x, t)
        return jnp.square((block(p["out"], x, t) - data["noise"]).astype(jnp.float32)).mean()

    dims = {
        "*/conv": "_ _ _ features",
        "*/scale": "features",
        "*/shift": "features",
        "*state/*/time": "_ features",
        "*/qkv": "features _ heads head_dim",
        "*/o": "heads head_dim features",
        "batch/time": "batch",
        "*images": "batch height width channels",
        "*noise": "batch height width channels",
    }
    image = jax.ShapeDtypeStruct((batch, size, size, 4), jnp.bfloat16)
    data = {"images": image, "noise": image, "time": jax.ShapeDtypeStruct((batch,), jnp.float32)}
    return *train_step(loss, params, data, optax.adamw(3e-4)), dims


@dataclass(frozen=True)
class Case:
    """A model under a layout on a slice."""

    name: str
    make: Callable[[], Target]
    topology: str
    mesh: str
    layout: str


SLICES = {
    "v5p": ("v5p:4x4x4", 64, "data=16, model=4", 2),
    "v5e": ("v5e:16x16", 256, "data=64, model=4", 1),
    "v6e": ("v6e:8x8", 64, "data=16, model=4", 1),
}
"""Slice, devices, the mesh of layouts with two axes, and sequences of a device in the sizes of Llama 3 8B."""


def _cases() -> list[Case]:
    found = []
    for chip, (topology, n, two, sequences) in SLICES.items():

        def add(model: str, layout: str, make: Callable[[], Target], rules: str, mesh: str) -> None:
            found.append(Case(f"{model}-{layout}-{chip}", make, topology, mesh, rules))  # noqa: B023

        one = f"data={n}"
        plain = functools.partial(llama, batch=2 * n)
        for layout, rules, mesh in (
            ("fsdp", FSDP, one), ("zero1", ZERO1, one), ("tensor", TENSOR, two), ("sequence", SEQUENCE, two),
        ):  # fmt: skip
            add("llama", layout, plain, rules, mesh)
        add("llama3_8b", "fsdp", functools.partial(llama3_8b, 2, batch=sequences * n), FSDP, one)
        for layout in ("fsdp", "zero1", "tensor_parallel", "sequence_parallel"):
            make = functools.partial(fitted.llama3_8b, batch=2 * n, layers=2, attention="xla")
            add("fitted", layout, make, fitted.LAYOUTS[layout], one if layout in ("fsdp", "zero1") else two)
        add("vit", "fsdp", functools.partial(vit, batch=32 * n), FSDP, one)
        add("resnet", "data", functools.partial(resnet, batch=32 * n), "batch: data", one)
        add("resnet", "fsdp", functools.partial(resnet, batch=32 * n), "batch: data; features?: data", one)
        add("moe", "fsdp", functools.partial(mixture, batch=2 * n), FSDP, one)
        add("moe", "experts", functools.partial(mixture, batch=2 * n), EXPERTS, two)
        add("t5", "fsdp", functools.partial(t5, batch=16 * n), FSDP, one)
        add("towers", "fsdp", functools.partial(two_towers, batch=64 * n), FSDP, one)
        add("mamba", "fsdp", functools.partial(mamba, batch=n), FSDP, one)
        add("unet", "fsdp", functools.partial(unet, batch=8 * n), "batch: data; features?: data", one)
        if chip == "v5p":  # no rule of the cost model was fitted to these
            small = functools.partial(vit, embed=768, heads=12, mlp=3072, batch=64 * n)
            narrow = functools.partial(two_towers, embed=512, heads=8, mlp=2048, batch=64 * n)
            add("vit_b", "fsdp", small, FSDP, one)
            add("towers_512", "fsdp", narrow, FSDP, one)
            add("mixer", "fsdp", functools.partial(mixer, batch=32 * n), FSDP, one)
            add("unet_192", "fsdp", functools.partial(unet, 192, batch=8 * n), "batch: data; features?: data", one)
    deep = functools.partial(llama, 12, batch=128)
    found += [
        Case("llama3_8b-32-layers-fsdp-v5p", llama3_8b, "v5p:4x4x8", "data=128", FSDP),
        Case("llama-12-layers-fsdp-v6e", deep, "v6e:8x8", "data=64", FSDP),
    ]
    return found


CASES = _cases()


@dataclass
class Result:
    """A case compiled under one lowering: seconds of a step and exposed seconds by the final schedule; bytes sent and at the peak,
    also of its plan; cycles of kernels."""

    seconds: float
    exposed: float
    sent: float
    peak: float
    planned: float | None
    planned_bytes: float
    planned_peak: float
    kernels: Counter[str]


def result(case: Case, lowering: Any, effort: Any = "full") -> Result:
    """A case compiled under one lowering. The ``"fast"`` effort states up to ten times the cycles of a matmul."""
    step, args, dims = case.make()
    c = mp.compile(
        step,
        *args,
        topology=case.topology,
        mesh=case.mesh,
        layout=case.layout,
        dims=dims,
        donate_argnums=0,
        lowering=lowering,
        effort=effort,
    )
    e = c.exposed
    assert e is not None
    assert c.plan is not None
    planned = c.plan.seconds, c.plan.bytes_sent, memory_of(c.plan).peak
    return Result(e.schedule, e.seconds, c.bytes_sent, c.memory.peak, *planned, kernels(c.as_text()))


def kernels(text: str) -> Counter[str]:
    """Cycles of a step by kernel: the last part of its op name, forward or backward, and the shape of its result."""
    cycles_of: Counter[str] = Counter()
    for run in walk(parse(text), lambda runs: sum(estimate(r.instruction) for r in runs)):
        cycles = 0 if run.fused else estimate(run.instruction)
        if cycles:
            scopes = run.instruction.op_name.split("/")
            backward = "backward" if any("transpose(" in p for p in scopes) else "forward"
            shape = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", run.instruction.shape)
            cycles_of[f"{backward} {scopes[-1]} {shape[:60]}"] += cycles * (run.count or 1)
    return cycles_of


def differences(ours: Counter[str], theirs: Counter[str], most: int) -> list[tuple[str, float, float]]:
    """(name, cycles in the first, in the second) of the ``most`` kernels whose cycles differ most."""
    names = sorted({*ours, *theirs}, key=lambda n: -abs(ours[n] - theirs[n]))
    return [(n, ours[n], theirs[n]) for n in names[:most]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", action="append", help='only cases of this pattern, such as "llama-*-v5p"; may be repeated'
    )
    parser.add_argument("--kernels", action="store_true", help="the kernels whose cycles differ most")
    args = parser.parse_args()
    heads = (
        "case", "jit", "shard_map", "ratio", "planned", "error", "exposed, jit", "exposed", "peak, jit", "peak", "ratio", "planned",
        "error", "planned, jit", "error",
    )  # fmt: skip
    table = Table(*heads, title=f"ms and GB; default effort, jax {jax.__version__}")
    for case in CASES:
        if args.case and not any(fnmatch(case.name, p) for p in args.case):
            continue
        theirs, ours = (result(case, lowering) for lowering in ("jit", "shard_map"))
        planned = ours.planned or float("nan")
        cells = [
            case.name, f"{theirs.seconds * 1e3:.2f}", f"{ours.seconds * 1e3:.2f}", f"{ours.seconds / theirs.seconds:.3f}",
            f"{planned * 1e3:.2f}", f"{planned / ours.seconds - 1:+.1%}", f"{theirs.exposed * 1e3:.2f}",
            f"{ours.exposed * 1e3:.2f}", f"{theirs.peak / 1e9:.2f}", f"{ours.peak / 1e9:.2f}", f"{ours.peak / theirs.peak:.3f}",
            *(c for r in (ours, theirs) for c in (f"{r.planned_peak / 1e9:.2f}", f"{r.planned_peak / r.peak - 1:+.1%}")),
        ]  # fmt: skip
        table.add_row(*cells)
        if args.kernels:
            print(f"  Mcycles {ours.kernels.total() / 1e6:.2f} ({theirs.kernels.total() / 1e6:.2f})")
            for name, a, b in differences(ours.kernels, theirs.kernels, 20):
                print(f"  {(a - b) / 1e6:+8.3f} {a / 1e6:8.3f} {b / 1e6:8.3f}  {name}")


if __name__ == "__main__":
    main()
