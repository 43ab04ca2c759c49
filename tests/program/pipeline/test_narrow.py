"""Stacked weights that layers cast to a narrower dtype are cast once, before the loop over microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import meshpar as mp
from meshpar.program import pipeline

LAYERS, EMBED, MICRO = 4, 16, 4
DIMS = {"params/*": "layers embed _", "x": "batch embed"}


def step(params, x):
    """One step of layers in bfloat16; the norms' weights are also read in float32."""

    def layer(h, w):
        scale = w["scale"] * jnp.mean(w["scale"].astype(h.dtype).astype(jnp.float32))
        y = jnp.tanh(h @ w["kernel"].astype(h.dtype)).astype(jnp.float32) * scale[0]
        return h + y.astype(h.dtype), None

    def loss(params, x):
        h, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), params)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    value, gradients = mp.accumulate_gradients(jax.value_and_grad(loss), MICRO)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


def arguments():
    r = np.random.default_rng(0)
    params = {"kernel": r.normal(size=(LAYERS, EMBED, EMBED)) / 4, "scale": 1 + r.normal(size=(LAYERS, EMBED, 1)) / 4}
    return jax.tree.map(np.float32, (params, r.normal(size=(16, EMBED))))


def program():
    return mp.plan(step, *arguments(), mesh="stage=2, data=2", layout="batch: data; layers: stage", dims=DIMS).program


def test_weights_that_layers_only_cast_are_cast_once():
    ops = list(program().root.walk_counted())
    casts = [n for op, n in ops if op.primitive.cast and op.outs[0].shape == (LAYERS, EMBED, EMBED)]
    assert casts == [1]


def test_no_number_changes(monkeypatch):
    args = jax.tree.leaves(arguments())
    cast = jax.jit(jaxpr_as_fun(program().closed))(*args)
    monkeypatch.setattr(pipeline, "cast_stacks", lambda *_: None)
    jax.tree.map(np.testing.assert_array_equal, cast, jax.jit(jaxpr_as_fun(program().closed))(*args))


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["shard_map", "jit"])
def test_on_devices(lowering):
    args = arguments()
    mesh = mp.mesh("stage=2, data=2, idle=2")
    sharded = mp.jit(step, mesh=mesh, layout="batch: data; layers: stage", dims=DIMS, lowering=lowering)
    for a, b in zip(jax.tree.leaves(sharded(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2)
