"""Programs whose chains of ops are longer than Python's stack."""

import jax
import jax.numpy as jnp
import optax

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
