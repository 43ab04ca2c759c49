"""The model of examples/train_lm.py trains under stages, data and tensor parallelism with the losses of one device."""

import jax
import numpy as np
import optax
from flax import nnx

import meshpar as mp
from lm.model import Config, Transformer

MESH = "stage=2, data=2, model=2"


def training(microbatches=4):
    """(step, state): four layers with dropout, AdamW after clipping; the batch is accumulated in microbatches."""
    config = Config(vocab=64, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=64)
    graphs = []
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def create():
        graph, params, others = nnx.split(Transformer(config, nnx.Rngs(0)), nnx.Param, ...)
        assert not jax.tree.leaves(others)
        graphs.append(graph)
        return {"params": params, "opt_state": optimizer.init(params)}

    def loss(params, inputs, targets, key):
        logits = nnx.merge(graphs[0], params)(inputs, key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(state, inputs, targets, key):
        gradients_of = mp.train.accumulate_gradients(
            jax.value_and_grad(loss), microbatches, argnums=(1, 2), key_argnums=3
        )
        value, gradients = gradients_of(state["params"], inputs, targets, key)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    return step, jax.tree.map(np.asarray, mp.init(create, mesh=MESH, layout="")())


def test_it_has_the_losses_of_one_device():
    step, state = training()
    tokens = np.random.default_rng(0).integers(0, 64, (3, 16, 9))
    layout = "batch: data; heads, kv_heads, mlp: model; vocab: stage+model; layers: stage"
    sharded = mp.jit(
        step, mesh=MESH, layout=layout, dims={"inputs": "batch seq", "targets": "batch seq"}, schedule="gpipe"
    )
    plain, losses = jax.jit(step), []
    one, many = state, state
    for i, batch in enumerate(tokens):
        args = batch[:, :-1], batch[:, 1:], jax.random.key(i)
        one, expected = plain(one, *args)
        many, loss = sharded(many, *args)
        losses.append((float(loss), float(expected)))
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=2e-5)
    plan = sharded.plan(state, *args)
    assert (plan.pipeline.stages, plan.pipeline.microbatches) == (2, 4)
    assert all(h.spec[0] == "stage" for h in plan.inputs if h.dims and h.dims[0] == "layers")
