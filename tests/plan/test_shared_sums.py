"""A gradient that several read is summed over the devices once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp

DIMS = {"params/up": "embed mlp", "params/down": "mlp embed", "x": "batch embed"}


def params():
    r = np.random.default_rng(0)
    return {
        k: jnp.asarray(r.normal(size=s).astype(np.float32)) / 8 for k, s in {"up": (16, 32), "down": (32, 16)}.items()
    }


def loss(params, x):
    return ((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2).mean()


def with_lion(params, x):
    optimizer = optax.lion(1e-2)
    updates, _ = optimizer.update(jax.grad(loss)(params, x), optimizer.init(params), params)
    return optax.apply_updates(params, updates)


def with_a_norm_after_the_update(params, x):
    grads = jax.grad(loss)(params, x)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return new, optax.tree.norm(grads)


def clipped_by_microbatches(params, x):
    """Every microbatch's gradient is clipped, so that it must be there inside the loop."""

    def one(total, x):
        grads = jax.grad(loss)(params, x)
        scale = 1 / jnp.maximum(1, optax.tree.norm(grads))
        return jax.tree.map(lambda t, g: t + scale * g, total, grads), None

    return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), x.reshape(2, -1, x.shape[-1]))[0]


@pytest.mark.parametrize(
    ("step", "times", "lowering"),
    [(with_lion, 1, "jit"), (with_a_norm_after_the_update, 1, "shard_map"), (clipped_by_microbatches, 2, "shard_map")],
)
def test_a_gradient_is_summed_once(step, times, lowering):
    """Bytes of the weights' all-reduces: each once a gradient, 2·V·7/8."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(32, 16)).astype(np.float32))
    sharded = mp.jit(step, mesh=mp.mesh("data=8"), layout="batch: data", dims=DIMS, lowering=lowering)
    sent = [c for c in sharded.plan(params(), x).collectives if c.op == "all-reduce" and len(c.shape) == 2]
    assert sum(c.total_bytes for c in sent) == times * 2 * (2 * 16 * 32 * 4 * 7 / 8)
    for a, b in zip(jax.tree.leaves(sharded(params(), x)), jax.tree.leaves(jax.jit(step)(params(), x)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
