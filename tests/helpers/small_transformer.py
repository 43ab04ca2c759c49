"""A small transformer's train step, with everything that makes it hard: grouped queries, dropout, rematerialised layers in a
scan, clipping; and its layouts, by scheme."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshpar as mp

LAYERS, BATCH, SEQ, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 2, 8, 16, 32, 8, 4, 4, 64, 64
MEGATRON = "batch: data; heads, kv_heads?, mlp, vocab: model"
LAYOUTS = {
    "data parallel": "batch: data",
    "megatron": MEGATRON,
    "fsdp": "batch: data; embed: data",
    "fsdp + megatron": f"{MEGATRON}; embed: data",
    "+ sequence parallel": f"{MEGATRON}; embed: data; seq: model",
    "zero 1": "batch: data; opt.embed: data",
    "context parallel": "seq: model; batch: data",
}
DIMS = {
    "state/*/q": "layers embed heads head_dim", "state/*/k": "layers embed kv_heads head_dim",
    "state/*/v": "layers embed kv_heads head_dim", "state/*/o": "layers heads head_dim embed",
    "state/*/up": "layers embed mlp", "state/*/down": "layers mlp embed", "state/*/scale": "layers embed",
    "state/*/embedding": "vocab embed", "state/*/head": "embed vocab", "batch": "batch seq",
}  # fmt: skip
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def create():
    rng = np.random.default_rng(0)

    def weight(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    params = {
        "embedding": weight(VOCAB, EMBED), "head": weight(EMBED, VOCAB), "scale": np.ones((LAYERS, EMBED), np.float32),
        "q": weight(LAYERS, EMBED, HEADS, HEAD_DIM), "k": weight(LAYERS, EMBED, KV_HEADS, HEAD_DIM),
        "v": weight(LAYERS, EMBED, KV_HEADS, HEAD_DIM), "o": weight(LAYERS, HEADS, HEAD_DIM, EMBED),
        "up": weight(LAYERS, EMBED, MLP), "down": weight(LAYERS, MLP, EMBED),
    }  # fmt: skip
    batch = rng.integers(0, VOCAB, (BATCH, SEQ))
    return {"params": params, "opt_state": OPTIMIZER.init(params)}, batch, jax.random.key(1)


def step_of(rename):
    def layer(x, inputs):
        p, key = inputs
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"]
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, p[n]) for n in "qkv")
        if rename:
            k, v = mp.rename(k, seq="kv_seq"), mp.rename(v, seq="kv_seq")
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jnp.einsum("bshd,hde->bse", h, p["o"])
        h = jax.nn.silu(x @ p["up"]) @ p["down"]
        keep = jax.random.bernoulli(key, 0.8, h.shape)
        return x + jnp.where(keep, h / 0.8, 0), None

    def loss_of(params, batch, key):
        layers = {n: params[n] for n in ("q", "k", "v", "o", "up", "down", "scale")}
        xs = layers, jax.random.split(key, LAYERS)
        x, _ = jax.lax.scan(jax.checkpoint(layer), params["embedding"][batch], xs)
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch).mean()

    def train_step(state, batch, key):
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch, key)
        updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss, gradients

    return train_step
