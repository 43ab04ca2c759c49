"""Layers that cannot be a pipeline: every error names the tensor, the dim, the axis, the rule, the line and the fix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import meshpar as mp
from meshpar.errors import MeshparError

LAYERS, EMBED = 8, 8
DIMS = {"params/w": "layers embed _", "x": "batch _"}


def layer(h, w):
    return jnp.tanh(h @ w), None


def printing(h, w):
    jax.debug.print("{}", h.sum())
    return layer(h, w)


def loss_of(body):
    return lambda params, x: jnp.mean(jax.lax.scan(body, x, params["w"])[0] ** 2)


def accumulating(body, microbatches=4):
    return mp.train.accumulate_gradients(jax.grad(loss_of(body)), microbatches)


def chained(params, x):
    """Each microbatch begins with the weights that the one before has updated."""

    def one(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss_of(layer))(params, x)), None

    return jax.lax.scan(one, params, x.reshape(4, -1, EMBED))[0]


def offloading(h, w):
    """A layer whose residual is in host memory."""
    names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["h"]}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        **names, offload_src="device", offload_dst="pinned_host"
    )
    return jax.checkpoint(lambda h, w: layer(checkpoint_name(jnp.sin(h), "h"), w), policy=policy)(h, w)


def hosted(params, x):
    """Layers that read a stack in host memory."""
    mask = jax.device_put(params["w"] * 0.5, jax.memory.Space.Host)

    def masked(h, ws):
        w, m = ws
        return layer(h, w * jax.device_put(m, jax.memory.Space.Device))

    loss = lambda params, x: jnp.mean(jax.lax.scan(masked, x, (params["w"], mask))[0] ** 2)  # noqa: E731
    return mp.train.accumulate_gradients(jax.grad(loss), 4)(params, x)


def selecting(h, w):
    """A layer that writes an array in host memory row by row."""
    device, host = jax.memory.Space.Device, jax.memory.Space.Host

    def double(i, rows):
        row = jax.device_put(jax.lax.dynamic_index_in_dim(rows, i, 0, False), device)
        return jax.lax.dynamic_update_index_in_dim(rows, jax.device_put(2 * row, host), i, 0)

    rows = jax.lax.fori_loop(0, EMBED, double, jax.device_put(jax.lax.stop_gradient(w), host))
    return layer(h, w + jax.device_put(rows, device))


CASES = {
    "layers that the stages do not divide": (accumulating(layer), "stage=3", "layers: stage", ["of size 8", "stage=3"], "6 or 9"),
    "rounds that do not divide": (accumulating(layer), "stage=2", "layers: stage*3", ["8 layers", "2 stages of 3"],
     "8 layers in 2 stages allow 1, 2 or 4 rounds; make the number of layers a multiple of 6: 6"),
    "microbatches in rounds": (accumulating(layer, 2), "stage=4", "layers: stage*2", ["2 microbatches", "4 stages in 2 rounds"],
     "a multiple of 4: 4"),
    "a chain of microbatches": (chained, "stage=2", "layers: stage", ["iteration before"], "accumulate_gradients"),
    "residuals in host memory": (accumulating(offloading), "stage=2", "layers: stage", ["float32<host>"], "saves in device memory"),
    "rounds of a stack in host memory": (hosted, "stage=2", "layers: stage*2", ["an operand float32<host>[8,8,8]"], "one round"),
    "rows of a host array": (accumulating(selecting), "stage=2", "layers: stage", ["select rows of an array"], "device_put"),
    "side effects": (accumulating(printing), "stage=2", "layers: stage", ["side effects"], "jax.debug.print"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_facts_and_the_fix(name):
    step, mesh, layout, texts, fix = CASES[name]
    params, x = {"w": np.ones((LAYERS, EMBED, EMBED), np.float32)}, np.ones((16, EMBED), np.float32)
    with pytest.raises(MeshparError) as caught:
        mp.plan(lambda params, x: step(params, x), params, x, mesh=mesh, layout=layout, dims=DIMS)
    error = caught.value
    assert (error.path, error.dim, error.axis, error.rule) == ("params/w", "layers", "stage", layout)
    assert error.shape == (LAYERS, EMBED, EMBED)
    assert (error.dims or "").startswith("layers embed")
    assert "test_errors.py" in (error.source or "") or "stages do not divide" in name  # an error about the argument
    assert all(text in error.headline for text in texts)
    assert fix in "; ".join(error.fixes)


@pytest.mark.parametrize("schedule", ["1f1b-overlap", "zb"])
def test_a_stack_in_host_memory(schedule):
    """With one round, each stage reads its own slice of it."""
    w = np.eye(LAYERS, EMBED * EMBED, dtype=np.float32).reshape(LAYERS, EMBED, EMBED)
    args = {"w": w}, np.ones((16, EMBED), np.float32)
    step = mp.jit(hosted, mesh="stage=2, data=2", layout="batch: data; layers: stage", dims=DIMS, schedule=schedule)
    assert step.plan(*args).pipeline is not None
    np.testing.assert_allclose(step(*args)["w"], jax.jit(hosted)(*args)["w"], rtol=1e-5, atol=1e-7)
