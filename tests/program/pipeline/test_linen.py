"""A pipeline of ``nn.scan`` layers with metadata: a tied embedding, rematerialization, and dropout keys for every layer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshpar as mp

EMBED, MLP, VOCAB, LAYERS = 16, 32, 64, 4
init = nn.initializers


def named(make, *names):
    """The initializer ``make`` with logical names of its dims."""
    return nn.with_logical_partitioning(make, names)


class Block(nn.Module):
    """A residual block, as the body of ``nn.scan``."""

    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm(scale_init=named(init.ones, "embed"), bias_init=named(init.zeros, "embed"))(x)
        h = nn.gelu(nn.Dense(MLP, use_bias=False, kernel_init=named(init.lecun_normal(), "embed", "mlp"))(h))
        h = nn.Dropout(0.1, deterministic=False)(h)
        return x + nn.Dense(EMBED, use_bias=False, kernel_init=named(init.lecun_normal(), "mlp", "embed"))(h), None


class Model(nn.Module):
    """Logits of tokens [batch, seq], by a stack of blocks between a tied embedding and its transpose."""

    @nn.compact
    def __call__(self, tokens):
        embedding = nn.Embed(VOCAB, EMBED, embedding_init=named(init.normal(0.5), "vocab", "embed"))
        layers = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        return embedding.attend(layers()(embedding(tokens), None)[0])


MODEL, OPTIMIZER = Model(), optax.adamw(1e-2)


def create(key):
    """The initial state."""
    params = MODEL.init({"params": key, "dropout": key}, jnp.zeros((2, 8), jnp.int32))["params"]
    return {"params": params, "opt": OPTIMIZER.init(params)}


def loss_of(params, tokens, key):
    """The mean cross-entropy of the next token."""
    logits = MODEL.apply({"params": params}, tokens, rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def train_step(state, tokens, key):
    """One step of AdamW on the mean gradient of four microbatches."""
    gradient = jax.value_and_grad(lambda params, tokens: loss_of(params, tokens, key))
    loss, grads = mp.train.accumulate_gradients(gradient, 4)(state["params"], tokens)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def test_losses_of_a_scanned_linen_model_equal_those_of_one_device():
    tokens, key = np.random.default_rng(0).integers(0, VOCAB, (16, 8)).astype(np.int32), jax.random.key(3)

    def losses(state, step):
        for _ in range(3):
            state, loss = step(state, tokens, key)
            yield float(loss)

    want = list(losses(jax.jit(create)(jax.random.key(0)), jax.jit(train_step)))
    layout = "batch: data; mlp: model; vocab: stage+model; layers: stage"
    place = {"mesh": "stage=2, data=2, model=2", "layout": layout}
    step = mp.jit(train_step, **place, dims={"tokens": "batch seq"}, lowering="shard_map")
    state = mp.init(create, **place)(jax.random.key(0))
    pipeline = step.plan(state, tokens, key).pipeline
    assert (pipeline.stages, pipeline.microbatches) == (2, 4)
    np.testing.assert_allclose(list(losses(state, step)), want, rtol=2e-6)
