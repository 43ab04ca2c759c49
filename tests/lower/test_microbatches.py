"""Gradient accumulation as people write it: a reshape into microbatches, and a loop over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.plan.steps import Loop

DIMS = {"p/up": "embed mlp", "p/down": "mlp embed", "x": "batch embed"}


def loss(p, x):
    return ((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2).mean()


def accumulating(count):
    def step(p, x):
        def one(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(p, x)), None

        micro = x.reshape(count, -1, *x.shape[1:])
        total, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, p), micro)
        return jax.tree.map(lambda p, g: p - 0.1 * g / count, p, total)

    return step


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("layout", ["batch: data", "batch: data; embed: data"])
@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_every_device_does_its_share_of_every_microbatch(count, layout, lowering):
    r = np.random.default_rng(0)
    p = {
        "up": r.normal(size=(64, 256)).astype(np.float32) / 8,
        "down": r.normal(size=(256, 64)).astype(np.float32) / 16,
    }
    x = r.normal(size=(64, 64)).astype(np.float32)
    step = accumulating(count)
    sharded = mp.jit(step, mesh=mp.mesh("data=8"), layout=layout, dims=DIMS, lowering=lowering)
    products = (
        3 * 2 * 2 * (64 // count) * 64 * 256 / 8 - 2 * (64 // count) * 64 * 256 / 8
    )  # of one microbatch on a device
    (loop,) = [s for s in sharded.plan(p, x).body.steps if isinstance(s, Loop)]
    assert loop.body.trips == count
    compiled = sharded.lower(p, x).compile().cost_analysis()["flops"]  # a loop's body counts once
    assert products <= compiled < 1.5 * products + 3e5
    for a, b in zip(jax.tree.leaves(sharded(p, x)), jax.tree.leaves(jax.jit(step)(p, x)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
