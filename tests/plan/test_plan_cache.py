"""A plan of a program that was planned before is that of a program that was not, whatever was planned in between."""

import itertools
import random

import jax
import jax.numpy as jnp
from arrays import f32

import meshpar as mp
from meshpar._src.plan.text import plan_steps

MESH = "data=4, model=4"
MEGATRON = "batch: data; mlp, vocab: model; embed: data"
ZERO_1 = "opt.embed?: data; vocab?: model; batch: data"
CASES = [
    (MEGATRON, MESH, "off"),
    (MEGATRON, "model=4, data=4", "auto"),
    (ZERO_1, "data=8, model=2", "off"),
    (ZERO_1, MESH, "auto"),
    ("embed?: model+data; params.mlp?: data; batch: data", MESH, "auto"),
]
"""Layouts, meshes and modes."""
DIMS = {"*/table": "vocab embed", "*/up": "layers embed mlp", "*/down": "layers mlp embed", "tokens": "batch seq"}


def loss_of(params, tokens):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["table"][tokens], {k: params[k] for k in ("up", "down")})
    return jnp.mean(jax.nn.log_softmax(x @ params["table"].T) ** 2)


def step(params, opt_state, tokens):
    """Gradients in two microbatches, whose sums a loop carries unreduced, and momentum."""
    _, gradients = mp.train.accumulate_gradients(jax.value_and_grad(loss_of), 2)(params, tokens)
    opt_state = jax.tree.map(lambda m, g: 0.9 * m + g, opt_state, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, opt_state), opt_state


def traced():
    params = {"table": f32(32, 16), "up": f32(2, 16, 32), "down": f32(2, 32, 16)}
    how = {"mesh": MESH, "topology": "v5e:4x4", "layout": "batch: data", "dims": DIMS}
    return mp.plan(step, params, params, jax.ShapeDtypeStruct((16, 8), int), **how, donate_argnums=(0, 1))


def figures(plan, layout, mesh, overlap):
    """Steps, notes, memory, seconds, decisions and what is held and sent, of a replan."""
    plan = plan.replan(layout=layout, mesh=mesh, topology="v5e:4x4", overlap=overlap)
    records = (*plan.overlaps, *plan.inputs, *plan.outputs, *plan.collectives)
    return plan_steps(plan), plan.notes, plan.memory.to_dict(), plan.time.to_dict(), [r.to_dict() for r in records]


def test_a_replan_is_the_plan_of_a_program_traced_anew():
    """Golden plans (``test_golden.py``), of which most are replans, show it for models of examples/."""
    plan = traced()
    fresh = {case: figures(traced(), *case) for case in CASES}
    again = CASES * 2
    random.Random(1).shuffle(again)
    for case in again:
        assert figures(plan, *case) == fresh[case], case
    assert all(a != b for a, b in itertools.combinations(fresh.values(), 2))
