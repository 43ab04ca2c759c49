"""Gradient accumulation as people write it: a reshape into microbatches, and a loop over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from same_results import assert_close

import meshpar as mp
from meshpar._src.plan.steps import Loop

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


@pytest.mark.parametrize(
    ("count", "layout", "lowering"),
    [
        (8, "batch: data; embed: data", "jit"),
        (8, "batch: data; embed: data", "shard_map"),
        (2, "batch: data", "shard_map"),
    ],
)
def test_every_device_does_its_share_of_every_microbatch(count, layout, lowering):
    r = np.random.default_rng(0)
    p = {"up": normal(r, 64, 256) / 8, "down": normal(r, 256, 64) / 16}
    x = normal(r, 64, 64)
    step = accumulating(count)
    sharded = mp.jit(step, mesh="data=8", layout=layout, dims=DIMS, lowering=lowering)
    matmul_flops = (3 * 2 - 1) * 2 * (64 // count) * 64 * 256 / 8  # of one microbatch on a device
    (loop,) = [s for s in sharded.plan(p, x).body.steps if isinstance(s, Loop)]
    assert loop.body.trip_count == count
    compiled = sharded.lower(p, x).compile().cost_analysis()["flops"]  # a loop's body counts once
    assert matmul_flops <= compiled < 1.5 * matmul_flops + 3e5
    assert_close(sharded(p, x), jax.jit(step)(p, x), 1e-7, 1e-6)
