"""Reductions over the axis of a ``vmap``: numbers of the unsharded run, and nothing on the wire but what is reduced."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowered import assert_sends_the_plan, same

import meshpar as mp

X = np.random.default_rng(0).normal(size=(16, 4, 8)).astype(np.float32)
LAYOUT = "replica: data; features: model"
DIMS = {"x": "replica rows features"}
BOTH = ("jit", "shard_map")


def centred(x):
    return x - lax.pmean(x, "i")


def several(x):
    a, b = lax.psum((x / 16, {"b": jnp.square(x).mean(0) / 16}), "i")
    return x * a, b["b"]


def extrema(x):
    return (x - lax.pmax(x, "i")) / (1 + lax.pmax(x, "i") - lax.pmin(x, "i"))


@pytest.mark.parametrize("fn", [centred, several, extrema])
def test_a_reduction_over_a_vmapped_axis_is_the_unsharded_one(fn):
    same(jax.vmap(fn, axis_name="i"), X, layout=LAYOUT, dims=DIMS, lowerings=BOTH)


@pytest.mark.parametrize("fn", [centred, several])
def test_its_gradient_is_the_unsharded_one(fn):
    def loss(x):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(jax.vmap(fn, axis_name="i")(x)))

    same(jax.grad(loss), X, layout=LAYOUT, dims=DIMS, lowerings=BOTH)
    inside = mp.jit(loss, mesh=mp.mesh("data=4, model=2"), layout=LAYOUT, dims=DIMS, lowering="shard_map")
    np.testing.assert_allclose(jax.grad(inside)(X), jax.grad(loss)(X), rtol=1e-5, atol=1e-6)


def test_a_mean_over_replicas_sends_the_mean():
    plan = assert_sends_the_plan(jax.vmap(centred, axis_name="i"), X, layout=LAYOUT, dims=DIMS)
    (sent,) = plan.collectives
    assert (sent.op, sent.bytes) == ("all-reduce", 2 * (4 * 8 // 2) * 4 * 3 / 4)


def test_an_axis_in_the_middle_is_reduced_too():
    fn = jax.vmap(lambda x: x - lax.pmean(x, "i"), in_axes=2, out_axes=1, axis_name="i")
    same(fn, X, layout=LAYOUT, dims=DIMS, lowerings=BOTH)


def test_batch_norm_across_replicas_sends_no_activations():
    """Flax's BatchNorm with ``axis_name``, under a vmap over replicas: two moments forth, and their cotangents back."""
    model = nn.BatchNorm(use_running_average=False, axis_name="i")
    variables = model.init(jax.random.key(0), X[0])

    def step(variables, x):
        def loss(params):
            def of(x):
                y, new = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
                return jnp.mean(jnp.square(y - 1)), new

            each, new = jax.vmap(of, axis_name="i", out_axes=(0, None))(x)
            return each.mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        return value, new, grads

    dims = {"x": "replica rows features", "*": "features"}
    same(step, variables, X, layout=LAYOUT, dims=dims, lowerings=BOTH)
    plan = mp.plan(step, variables, X, mesh=mp.mesh("data=4, model=2"), layout=LAYOUT, dims=dims)
    assert max(c.bytes for c in plan.collectives) <= 2 * (2 * 8 // 2) * 4 * 3 / 4
