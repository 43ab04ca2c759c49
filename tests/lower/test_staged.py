"""Elementwise equations that are added to the traced program without evaluating their types: the program is the one JAX traces."""

import jax
import jax.numpy as jnp
import optax
import pytest
from arrays import f32

import meshpar as mp
from meshpar._src.compat.jax import staged
from meshpar._src.lower import shard_map

MESH = "data=4, model=2"
LAYOUT = "batch: data; mlp: model; embed: data"
DIMS = {"*/up": "embed mlp", "*/down": "mlp embed", "x": "batch embed"}
OPTIMIZER = optax.adamw(1e-2)


def layers(number):
    return [{"up": f32(16, 32), "down": f32(32, 16)} for _ in range(number)]


def train(params, opt_state, x):
    """A step of layers with literals, weak types, booleans, bfloat16, dropout, and a loop that reads outer values."""

    def loss(params):
        y, key = x, jax.random.key(0)
        for k, p in enumerate(params):
            keep = jax.random.bernoulli(jax.random.fold_in(key, k), 0.9, y.shape)
            y = y + jnp.where(keep, jnp.tanh(y @ p["up"]) @ p["down"] / 0.9, 0.0)
            y = y + (y.astype(jnp.bfloat16) * jnp.bfloat16(0.5)).astype(y.dtype)
        scale = 1.0 + jnp.abs(y)
        y, _ = jax.lax.scan(lambda c, i: (c * 0.5 + jnp.sin(c) / scale * i, None), y, jnp.arange(3.0))
        return jnp.square(y).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def lowered():
    params = layers(4)
    args = params, jax.eval_shape(OPTIMIZER.init, params), f32(8, 16)
    return mp.jit(train, mesh=mp.mesh(MESH), layout=LAYOUT, dims=DIMS, lowering="shard_map").lower(*args)


@pytest.mark.parametrize("debug_info", [False, True])
def test_the_program_is_the_one_that_jax_traces(debug_info, monkeypatch):
    added, texts = [], []
    for stage in (lambda *args: added.append(staged(*args)) or added[-1], lambda *_: None):
        monkeypatch.setattr(shard_map, "staged", stage)
        texts.append(lowered().as_text(debug_info=debug_info))
    assert sum(x is not None for x in added) > 100
    assert texts[0] == texts[1]


def test_an_operand_of_an_outer_trace_is_left_to_jax():
    eqn = jax.make_jaxpr(lambda x, y: x + y)(f32(4), f32(4)).eqns[0]
    aval = eqn.outvars[0].aval
    results = []

    def outer(x, y):
        def inner(z):
            results.append(staged(eqn, [z, y], {}, aval, eqn))
            results.append(staged(eqn, [z, z], {}, aval, eqn))
            return results[-1]

        return jax.lax.map(inner, x)

    jaxpr = jax.make_jaxpr(outer)(f32(3, 4), f32(4))
    assert results[0] is None
    assert results[1].aval == aval
    assert "add" in str(jaxpr)


def test_an_equation_outside_of_any_trace_is_left_to_jax():
    eqn = jax.make_jaxpr(lambda x: -x)(f32(4)).eqns[0]
    assert staged(eqn, [jnp.ones(4)], {}, eqn.outvars[0].aval, eqn) is None
