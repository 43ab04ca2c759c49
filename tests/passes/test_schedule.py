"""Which products of a backward pass wait for which: in the plan, in the program made of it, and that numbers stay."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import bf16, f32, normal
from dependencies import bodies
from lowered import jaxpr_of

import meshpar as mp
from meshpar._src.hardware.compiler import compiler_model
from meshpar._src.plan.plan import Plan
from meshpar._src.plan.steps import Barrier, Loop
from meshpar._src.plan.verify import verify

WIDTH, HIDDEN, LAYERS, BATCH = 2048, 4096, 4, 8192  # operands of a product are above 16 MiB on each of 8 devices
DIMS = {"*/up": "embed mlp", "*/down": "mlp embed", "x": "batch embed"}
STACKED = {"*/up": "layers embed mlp", "*/down": "layers mlp embed", "x": "batch embed"}
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


def scanned(params, x):
    def loss(params):
        def layer(y, w):
            return mlp(y, *(w[k].astype(jnp.bfloat16) for k in ("up", "down"))).astype(y.dtype), None

        y, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)
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


def test_what_a_kernel_makes_small_is_made_with_the_rest():
    """A large result cannot be used while the small one waits: else its operands would be held until then."""

    @mp.kernel_rule("batch embed! -> batch embed!, batch")
    def kernel(x):
        return x * 2, x.sum(-1)

    x = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    run = mp.jit(kernel, mesh=mp.mesh("data=8"), layout="batch: data", dims={"x": "batch embed"}, lowering="shard_map")
    made = jaxpr_of(run.plan(x), mp.mesh("data=8"))
    (body,) = [b for b in bodies(made) if any(e.primitive.name == "optimization_barrier" for e in b.eqns)]
    (barrier,) = [e for e in body.eqns if e.primitive.name == "optimization_barrier"]
    assert {v.aval.shape for v in barrier.invars} == {(8, 16), (8,)}
    y, total = run(x)
    np.testing.assert_array_equal(y, 2 * x)
    np.testing.assert_allclose(total, x.sum(-1), rtol=1e-6)


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


@pytest.mark.parametrize(("topology", "held"), [("v5e:2x4", True), ("v6e:2x4", False)])
def test_no_barrier_holds_what_hides_reductions_on_the_sparse_cores_in_a_loop(topology, held):
    plan = mp.plan(scanned, *args_of(True), mesh="data=8", topology=topology, layout=FSDP, dims=STACKED, overlap="xla")
    loops = [step for step in plan.body.all_steps if isinstance(step, Loop)]
    inside = [step for loop in loops for step in loop.body.all_steps if isinstance(step, Barrier) and step.after]
    assert bool(inside) == held


def test_a_barrier_is_not_on_an_array_that_a_matmul_pads():
    """The gradient of ``logits[:, :-1]`` is padded in the kernels of both matmuls that read it; behind a barrier it is an array."""

    def step(w, x):
        def loss(w):
            y = jnp.tanh(x @ w["up"])
            return (jax.nn.softmax((y @ w["head"])[:, :-1].astype(jnp.float32)) ** 2).mean()

        return jax.grad(loss)(w)

    w, dims = {"up": bf16(2048, 2048), "head": bf16(2048, 8192)}, {"w/up": "in embed", "w/head": "embed vocab"}
    how = {"topology": "v5e:2x4", "mesh": "data=8", "layout": "batch: data; embed: data", "overlap": "xla"}
    plan = mp.plan(step, w, bf16(16, 512, 2048), **how, dims={**dims, "x": "batch seq in"})
    held = [s for s in plan.body.all_steps if isinstance(s, Barrier) and s.after and s.op.name == "dot_general"]
    assert [s.value.shape for b in held for s in b.sources] == [
        (16, 512, 2048)
    ]  # the other operand of the head's gradient
