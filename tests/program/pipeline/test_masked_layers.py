"""Layers that the stages do not divide: with an optional rule, some layers of the last stages are masked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.errors import DivisibilityError

LAYERS, EMBED, MLP, ROWS = 7, 8, 16, 16
DIMS = {"*/up": "layers embed mlp", "*/down": "layers mlp embed", "*/shared": "embed _", "x": "batch embed"}
LAYOUT = "batch: data; layers?: stage"


def loss(params, x, reverse=False):
    """Carries of all kinds: activations, an auxiliary loss and a counter; dropout; a weight that all layers share."""

    def layer(carry, w):
        (h, aux, count), (up, down, key) = carry, w
        z = jnp.tanh(h @ up) / (0.1 + jnp.sum(up**2))  # not finite if the weights are zeros and 0.1 is left out
        kept = jnp.where(jax.random.bernoulli(key, 0.8, z.shape), z, 0)
        h = h + kept @ down + jnp.tanh(h @ params["shared"]) + 0.1 * count
        return (h, aux + jnp.mean(z**2), count + 1), jnp.mean(h)

    keys = jax.random.split(jax.random.key(0), LAYERS)
    start = x, jnp.zeros(()), jnp.zeros((), jnp.int32)
    (h, aux, _), means = jax.lax.scan(layer, start, (params["up"], params["down"], keys), reverse=reverse)
    return jnp.mean(h**2) + aux + jnp.sum(means * jnp.arange(LAYERS))


def step_of(reverse=False, microbatches=8):
    gradient = jax.value_and_grad(lambda params, x: loss(params, x, reverse))

    def step(params, x):
        value, gradients = mp.train.accumulate_gradients(gradient, microbatches)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def arguments():
    r = np.random.default_rng(0)
    shapes = {"up": (LAYERS, EMBED, MLP), "down": (LAYERS, MLP, EMBED), "shared": (EMBED, EMBED)}
    return {name: r.normal(size=shape) / 4 for name, shape in shapes.items()}, r.normal(size=(ROWS, EMBED))


def plan_of(step, mesh="stage=4, data=2", layout=LAYOUT, **options):
    return mp.plan(step, *arguments(), mesh=mesh, layout=layout, dims=DIMS, **options)


@pytest.mark.parametrize(
    ("schedule", "rounds", "reverse", "lowering"), [("zb", 1, False, "jit"), ("1f1b-overlap", 2, True, "shard_map")]
)
def test_no_number_changes(schedule, rounds, reverse, lowering, x64):
    step, args = step_of(reverse, microbatches=4), arguments()
    how = {"mesh": "stage=4, data=2", "layout": f"{LAYOUT}*{rounds}; embed: data; mlp: stage", "dims": DIMS}
    sharded = mp.jit(step, schedule=schedule, lowering=lowering, gather="step", **how)
    pipeline = sharded.plan(*args).pipeline
    assert (pipeline.layers, pipeline.masked, pipeline.rounds) == (LAYERS, 1, rounds)
    for a, b in zip(jax.tree.leaves(sharded(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_weights_stored_over_the_stages_by_another_dim():
    """They are moved to their stage, and their gradients back, by all-to-alls: no device has the weights of all stages."""
    moves = [c for c in plan_of(step_of(), layout=f"{LAYOUT}; mlp: stage").collectives if c.axes == ("stage",)]
    assert {c.count for c in moves if c.op == "all-to-all"} == {1}
    assert not [c for c in moves if c.op == "all-gather" and c.bytes > ROWS * EMBED * 4]
    replicated = plan_of(step_of())
    assert not [c for c in replicated.collectives if c.op == "all-to-all"]
    (note,) = [n for n in replicated.notes if "1 masked layer " in n]
    assert "14.3%" in note
    assert "7 stages divide 7" in note


def test_the_cost_decides():
    """Of 2 microbatches, 4 stages run 5 slots of 2 layers, and 6 stages 7 slots of 2; without stages, a device runs 14 layers."""
    layout = "layers?: stage"
    assert plan_of(step_of(microbatches=2), mesh="stage=4", layout=layout).pipeline is not None
    assert plan_of(step_of(microbatches=2), mesh="stage=6", layout=layout).pipeline is None


def test_a_rule_that_is_not_optional_is_refused_with_the_numbers():
    with pytest.raises(DivisibilityError) as error:
        plan_of(step_of(), layout="batch: data; layers: stage")
    assert any("`layers` of 4 or 8" in fix for fix in error.value.fixes)
    assert any("1 masked layer," in fix and "14.3%" in fix for fix in error.value.fixes)
