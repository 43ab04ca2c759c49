"""Equal layers of a program that is not scanned share rules and decisions, and are planned as if they did not."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from arrays import f32

import meshpar as mp
from meshpar._src.plan import planner
from meshpar._src.plan.text import plan_steps

MESH = "data=4, model=2"
LAYOUT = "batch: data; mlp, heads: model; embed: data"
LAYERS = 3
PARAMS = [{"up": f32(16, 32), "down": f32(32, 16), "qkv": f32(16, 4, 8), "out": f32(4, 8, 16)} for _ in range(LAYERS)]
DIMS = {
    "*/up": "embed mlp",
    "*/down": "mlp embed",
    "*/qkv": "embed heads head_dim",
    "*/out": "heads head_dim embed",
    "x": "batch seq embed",
}
X = f32(8, 8, 16)


def layer(p, x):
    q = jnp.einsum("bse,ehd->bshd", x, p["qkv"])
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, q))
    x = x + jnp.einsum("bhst,bthd,hde->bse", weights, q, p["out"])
    return x + jnp.cumsum(jax.nn.gelu(x @ p["up"]), axis=1) @ p["down"]


def step(params, x):
    def loss(params):
        y = x
        for p in params:
            y = layer(p, y)
        return (y * y).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def planned(fn=step, args=(PARAMS, X), dims=DIMS, layout=""):
    return mp.plan(fn, *args, mesh=MESH, layout=layout, dims=dims, topology="v5e:2x4")


def count_decisions(monkeypatch):
    """A list to which the op of each new decision is added."""
    decided, decide = [], planner.decide
    monkeypatch.setattr(planner, "decide", lambda op, *args: decided.append(op) or decide(op, *args))
    return decided


def test_shared_decisions_make_the_plan_that_separate_ones_make(monkeypatch):
    traced = planned()

    def described(layout, program):
        plan = replace(traced, program=program).replan(layout=layout)
        return plan_steps(plan), plan.to_json()

    for layout in (LAYOUT, "batch: data; seq: model; embed: data+model"):
        shared = described(layout, replace(traced.program))  # without the caches of earlier plans
        replanned = described(layout, traced.program)
        with monkeypatch.context() as patched:
            patched.setattr(planner._Planner, "key", lambda _, op, operands: op)
            assert shared == described(layout, replace(traced.program)) == replanned


def test_another_layer_needs_few_new_decisions(monkeypatch):
    decided, numbers = count_decisions(monkeypatch), []
    for layers in (LAYERS + 1, LAYERS):
        decided.clear()
        plan = planned(args=(PARAMS[:1] * layers, X), layout=LAYOUT)
        numbers.append(len(decided))
    ops = [op for op in plan.program.root.walk() if not op.frames]
    assert numbers[1] < len(ops) / 2
    assert numbers[0] - numbers[1] <= len(ops) / LAYERS / 4
