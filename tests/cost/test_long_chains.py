"""Programs whose chains of ops are longer than Python's stack."""

import jax
import jax.numpy as jnp
import optax
import pytest

import meshpar as mp

COUNT = 520
"""Layers; each has several ops, and Python allows 1,000 nested calls."""
X = jax.ShapeDtypeStruct((64, 256), jnp.float32)


def test_elementwise_layers():
    weights = {f"w{i}": jax.ShapeDtypeStruct((256,), jnp.float32) for i in range(COUNT)}

    def step(weights, x):
        for w in weights.values():
            x = jnp.tanh(x) * w
        return x

    plan = mp.plan(
        step, weights, X, mesh="data=16", topology="v5e:4x4", layout="batch: data", dims={"weights/*": "embed", "x": "batch embed"}
    )  # fmt: skip
    assert plan.seconds > 0


def test_a_norm_of_many_weights():
    """The gradients' global norm is a chain of additions of scalars, before an exchange that waits for it."""
    params = {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(COUNT)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-3, momentum=0.9))

    def step(params, opt, x):
        grads = jax.grad(lambda p: (sum(x @ w for w in p.values()) ** 2).mean())(params)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    plan = mp.plan(
        step, params, jax.eval_shape(optimizer.init, params), X, mesh="data=16", topology="v5e:4x4",
        layout="batch: data; opt.embed: data", dims={"params/*": "embed mlp", "x": "batch embed"},
    )  # fmt: skip
    assert plan.seconds > 0


@pytest.mark.parametrize("overlap", ["auto", "ring"])
def test_a_sum_of_many_matmuls(overlap):
    """The sum of the partial results is reduced once, in a ring or after it; a ring adds all of its terms."""

    def step(x, w):
        return sum(x @ w for _ in range(2 * COUNT))

    w = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    plan = mp.plan(
        step, X, w, mesh="data=16, model=16", topology="v5e:16x16", layout="embed, batch?: data",
        dims={"x": "batch embed", "w": "embed _"}, overlap=overlap,
    )  # fmt: skip
    assert plan.bytes_sent > 0


def test_constant_indices():
    def step(x):
        i = jnp.arange(64)
        for _ in range(2 * COUNT):
            i = i + 1
        return x[i % 64]

    plan = mp.plan(step, X, mesh="data=8", topology="v5e:2x4", layout="batch: data", dims={"x": "batch embed"})
    assert plan.seconds > 0
