"""Which products of a backward pass wait for which: in the plan, in the program made of it, and that numbers stay."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import f32, normal

import meshpar as mp
from meshpar._src.hardware.compiler_constants import compiler_model
from meshpar._src.plan.plan import Plan
from meshpar._src.plan.steps import Barrier
from meshpar._src.plan.verify import verify

WIDTH, HIDDEN, LAYERS, BATCH = 2048, 4096, 4, 8192  # operands of a product are above 16 MiB on each of 8 devices
DIMS = {"*/up": "embed mlp", "*/down": "mlp embed", "x": "batch embed"}
FSDP = "batch: data; embed: data"


def mlp(x, up, down):
    return x + jnp.tanh(x @ up) @ down


def unrolled(params, x):
    def loss(params):
        y = x
        for layer in params:
            y = mlp(y, layer["up"], layer["down"])
        return (y * y).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def args_of(stack, array=f32, width=WIDTH, hidden=HIDDEN, layers=LAYERS, batch=BATCH):
    if stack:
        return {"up": array(layers, width, hidden), "down": array(layers, hidden, width)}, array(batch, width)
    return [{"up": array(width, hidden), "down": array(hidden, width)} for _ in range(layers)], array(batch, width)


def waiting(plan):
    """(a product, what it waits for), in the order of the plan."""
    return [
        (step.op, [s.value for s in step.after])
        for step in plan.body.all_steps
        if isinstance(step, Barrier) and step.after and step.op.name == "dot_general"
    ]


@pytest.mark.parametrize("layout", [FSDP, "batch: data"])
def test_numbers_stay(layout, monkeypatch):
    """Of small arrays, which the compiler is told to be large."""
    monkeypatch.setattr(Plan, "compiler", replace(compiler_model(None), large_buffer_bytes=1))
    rng = np.random.default_rng(0)
    args = args_of(False, lambda *shape: normal(rng, *shape) / np.float32(shape[-1]) ** 0.5, 8, 16, layers=3, batch=16)
    run = mp.jit(unrolled, mesh=mp.mesh("data=8"), layout=layout, dims=DIMS, lowering="shard_map", overlap="off")
    assert waiting(run.plan(*args))
    for a, b in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(jax.jit(unrolled)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_calls_that_return_their_operand():
    """``jnp.hstack`` calls ``atleast_1d``, which returns what it is given: the call does not make that value."""

    def fn(x, w):
        return jnp.concatenate([x, 2 * x], 0), jnp.hstack([x, x @ w])

    rng = np.random.default_rng(0)
    x, w = normal(rng, 8, 4), normal(rng, 4, 4)
    step = mp.jit(fn, mesh="data=4, model=2", layout="batch: data", dims={"x": "batch embed"})
    verify(step.plan(x, w))
    for ours, theirs in zip(step(x, w), fn(x, w), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
