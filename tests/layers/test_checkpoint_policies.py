"""Policies for ``jax.checkpoint``: recomputed values, and saved results of collectives."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import meshpar as mp

LAYERS, BATCH, SEQ, EMBED, MLP = 3, 8, 16, 32, 64
LAYOUT = "batch: data; mlp: model; seq: model"
DIMS = {"params/up": "layers embed mlp", "params/down": "layers mlp embed", "x": "batch seq embed"}
RNG = np.random.default_rng(0)


def loss(params, x, policy):
    def layer(x, p):
        y = mp.rename(jnp.tanh(x), seq="block_seq")
        y = mp.rename(jax.nn.gelu(y @ p["up"]) @ p["down"], block_seq="seq")
        return x + jnp.tanh(y), None

    return (jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params)[0] ** 2).mean()


def arguments():
    params = {"up": RNG.normal(size=(LAYERS, EMBED, MLP)) / 8, "down": RNG.normal(size=(LAYERS, MLP, EMBED)) / 8}
    return jax.tree.map(jnp.float32, params), jnp.float32(RNG.normal(size=(BATCH, SEQ, EMBED)))


def gradient(policy):
    return lambda params, x: jax.grad(loss)(params, x, policy)


def sent(plan):
    found = Counter()
    for c in plan.collectives:
        if c.axes == ("model",):
            found[c.op] += c.count
    return found


def test_what_a_collective_gave_is_not_sent_for_again(mesh):
    """What is kept is held instead."""
    policies = None, mp.train.checkpoint_policies.collectives_saveable
    plans = [mp.plan(gradient(p), *arguments(), mesh=mesh, layout=LAYOUT, dims=DIMS) for p in policies]
    again, kept = map(sent, plans)
    # forward and backward: one gather into the block and one sum out of it, each
    assert kept == {"all-gather": 2 * LAYERS, "reduce-scatter": 2 * LAYERS}
    # run again, the block gathers its input once more, and sums its output, which the tanh after it needs
    assert again == {"all-gather": 3 * LAYERS, "reduce-scatter": 3 * LAYERS}
    gathered = 4 * BATCH // 4 * SEQ * EMBED  # bytes of a layer; half of it is the scattered output
    saved = [plan.memory.by_kind["saved activations"] for plan in plans]
    assert saved[1] - saved[0] == LAYERS * (gathered + gathered // 2)


@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_the_gradients_are_those_of_the_unsharded_run(mesh, lowering):
    params, x = arguments()
    policy = mp.train.checkpoint_policies.collectives_saveable
    step = mp.jit(gradient(policy), mesh=mesh, layout=LAYOUT, dims=DIMS, lowering=lowering)
    with jax.enable_x64(True):
        expected = jax.jit(gradient(None))(*jax.tree.map(np.float64, (params, x)))
    for name, found in step(params, x).items():
        np.testing.assert_allclose(found, expected[name], rtol=2e-5, atol=1e-7)


@mp.kernel_rule("batch seq! d, batch seq! d -> batch seq! d")
def squared(x, y):
    return (x * y) ** 2


@jax.custom_vjp
def doubled(x):
    return pl.pallas_call(lambda x, y: y.__setitem__(..., 2 * x[...]), out_shape=x, interpret=True)(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, ct: (2 * ct,))


def calls(jaxpr, name):
    found = 0
    for e in jaxpr.eqns:
        forward = getattr(e.params.get("kernel"), "forward", None)  # of the kernel that is a backward pass
        found += e.primitive.name == name and forward is None
        for p in e.params.values():
            inner = getattr(p, "jaxpr", p)
            found += calls(inner, name) if hasattr(inner, "eqns") else 0
    return found


def kernel_loss(x, w, policy):
    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x):
        y = squared(jnp.sin(x * w), x)
        return jnp.tanh(doubled(jnp.cos(y))).sum()

    return layer(x)


@pytest.mark.parametrize(("policy", "runs"), [(None, 2), (mp.train.checkpoint_policies.kernels_saveable, 1)])
def test_a_kernel_runs_once(policy, runs):
    x, w = jnp.ones((8, 16, 4)), jnp.float32(0.5)
    jaxpr = jax.make_jaxpr(jax.grad(kernel_loss), static_argnums=2)(x, w, policy).jaxpr
    assert calls(jaxpr, "kernel") == runs
    assert calls(jaxpr, "pallas_call") == runs
