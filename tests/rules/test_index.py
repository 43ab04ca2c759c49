"""Lookups along a dim that is split: an embedding, the logits of the targets."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshpar as mp

RNG = np.random.default_rng(1)
LOWERINGS = ["shard_map", "jit"]


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def loss(p, tokens):
    x = p["table"][tokens]
    logits = jnp.tanh(x) @ p["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean() - picked.mean()


def test_losses_and_lookups_over_a_split_vocabulary_stay_split():
    p = {"table": normal(32, 8), "head": normal(8, 32)}
    tokens = RNG.integers(0, 32, (4, 6)).astype(np.int32)
    dims = {"p/table": "vocab embed", "p/head": "embed vocab", "tokens": "batch seq"}
    step = jax.value_and_grad(loss)
    want = jax.jit(step)(p, tokens)
    for lowering in LOWERINGS:
        run = mp.jit(
            step, mesh=mp.mesh("data=4, model=2"), layout="batch: model; vocab: data", dims=dims, lowering=lowering
        )
        for a, b in zip(jax.tree.leaves(run(p, tokens)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    plan = run.plan(p, tokens)
    assert Counter(c.op for c in plan.collectives if c.axes == ("data",)).keys() == {"all-reduce"}
    assert not any("vocab" in c.dims and "data" in c.axes for c in plan.collectives)
