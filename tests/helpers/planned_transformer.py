"""A transformer's train step, of shapes alone, and the layouts that are the known schemes: what plans of them must list."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

import meshpar as mp

LAYERS, BATCH, SEQ, EMBED, HEADS, HEAD_DIM, MLP, VOCAB = 3, 8, 16, 32, 4, 8, 64, 128
MESH = AbstractMesh((4, 2), ("data", "model"))
MEGATRON = "batch: data; heads, mlp, vocab: model"
LAYOUTS = [
    "batch: data",
    MEGATRON,
    "batch: data; embed: data",
    f"{MEGATRON}; embed: data",
    f"{MEGATRON}; embed: data; seq: model",
    "batch: data; opt.embed: data",
    "seq: data",
]
"""One for each of the known schemes; the last is for a step with `rename`."""

DIMS = {
    "state/*/q": "layers embed heads head_dim", "state/*/k": "layers embed heads head_dim",
    "state/*/v": "layers embed heads head_dim", "state/*/o": "layers heads head_dim embed",
    "state/*/up": "layers embed mlp", "state/*/down": "layers mlp embed", "state/*/embedding": "vocab embed",
    "state/*/head": "embed vocab", "batch": "batch seq",
}  # fmt: skip
F32 = 4


def weight(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {
    "embedding": weight(VOCAB, EMBED), "head": weight(EMBED, VOCAB),
    "q": weight(LAYERS, EMBED, HEADS, HEAD_DIM), "k": weight(LAYERS, EMBED, HEADS, HEAD_DIM),
    "v": weight(LAYERS, EMBED, HEADS, HEAD_DIM), "o": weight(LAYERS, HEADS, HEAD_DIM, EMBED),
    "up": weight(LAYERS, EMBED, MLP), "down": weight(LAYERS, MLP, EMBED),
}  # fmt: skip
OPTIMIZER = optax.adam(1e-3)
STATE = {"params": PARAMS, "opt_state": jax.eval_shape(OPTIMIZER.init, PARAMS)}
TOKENS = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(p, x, rename):
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, p[n]) for n in "qkv")
    if rename:
        k, v = mp.rename(k, seq="kv_seq"), mp.rename(v, seq="kv_seq")
    scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    return jnp.einsum("bhst,bthd,hde->bse", scores, v, p["o"])


def loss_of(params, tokens, rename=False):
    layers = {n: params[n] for n in ("q", "k", "v", "o", "up", "down")}

    def layer(x, p):
        x = x + attention(p, norm(x), rename)
        return x + jax.nn.relu(norm(x) @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens], layers)
    logits = norm(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def train_step(state, batch, rename=False):
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch, rename)
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


@functools.cache
def traced(rename=False):
    """A plan of the step, for replans: they do not trace it again."""
    step = functools.partial(train_step, rename=rename)
    return mp.plan(step, STATE, TOKENS, mesh=MESH, layout="batch: data", dims=DIMS)


def plan_of(layout, rename=False, **how):
    return traced(rename).replan(layout=layout, **how)
