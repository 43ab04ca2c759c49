"""Experts whose grouped matmuls have operands in 8 bits, by ``mp.train.Precision``."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scaled_simulation import EXPERT, expert_gradients

import meshpar as mp
from meshpar.errors import DivisibilityError, UnsupportedError

BLOCK = {"float8": 128, "mxfp8": 32}
"""Format → elements with a common scale."""
DIMS = {
    "*/kernel": "embed router",
    "*/down": "expert mlp embed",
    "*/{gate,up}": "expert embed mlp",
    "x": "batch seq embed",
}
LAYOUTS = [
    "batch: data; expert: data; embed: model",
    "batch: data; embed: data; expert: model",
    "batch: data; mlp: model; embed: data",
    "batch: data+model; expert: data+model",
]


def case():
    r = np.random.default_rng(3)
    shapes = {"kernel": (256, 4), "gate": (4, 256, 256), "up": (4, 256, 256), "down": (4, 256, 256)}
    params = {k: (r.normal(size=s) / 16).astype(np.float32) for k, s in shapes.items()}
    return params, r.normal(size=(4, 8, 256)).astype(np.float32)


def mean_square(params, x, **options):
    experts = {k: params[k] for k in EXPERT}
    y, _ = mp.layers.moe(x, params["kernel"], experts, k=2, execution=mp.layers.MoEExecution(**options))
    return jnp.square(y).mean()


def sgd(name, **options):
    def loss(params, x):
        return mean_square(params, x, **options)

    gradient = jax.grad(mp.train.Precision(name, reduce="float32", keep="kernel")(loss))

    def step(params, x):
        return jax.tree.map(lambda p, g: p - 8.0 * g, params, gradient(params, x))

    return step


def simulated(block, params, x, steps=3):
    for _ in range(steps):
        g = expert_gradients(block, params, x.reshape(-1, x.shape[-1]))
        params = {k: p - np.float32(8.0) * g[k] for k, p in params.items()}
    return params


def difference(params, first, wanted):
    """The largest of the relative differences of two updates."""
    norm = np.linalg.norm
    return max(norm(params[k] - wanted[k]) / norm(wanted[k] - first[k]) for k in wanted)


@pytest.fixture(scope="module")
def wanted():
    return {name: simulated(block, *case()) for name, block in {**BLOCK, "bfloat16": None}.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name", "lowering"), covering.each(LAYOUTS, list(BLOCK), ["shard_map", "jit"]))
def test_three_steps_equal_the_simulation(wanted, layout, name, lowering):
    params, x = case()
    run = mp.jit(sgd(name), mesh=mp.mesh("data=2, model=2"), layout=layout, dims=DIMS, lowering=lowering)
    new = params
    for _ in range(3):
        new = run(new, x)
    new = jax.tree.map(np.asarray, new)
    # partial gradients of the devices are rounded to bfloat16
    assert difference(new, params, wanted[name]) < 3e-3
    assert difference(new, params, wanted["bfloat16"]) > 0.02


def planned(policy, params, **how):
    how = {"mesh": "data=2", "layout": "batch: data; embed: data", "dims": DIMS, **how}
    return mp.plan(jax.grad(policy(mean_square)), params, case()[1], **how)


@pytest.mark.parametrize("name", BLOCK)
def test_codes_and_scales_are_gathered(name):
    params, _ = case()
    sent = [
        sum(c.bytes for c in planned(policy, params).collectives if c.op == "all-gather")
        for policy in (mp.train.Precision(keep="kernel"), mp.train.Precision(name, keep="kernel"))
    ]
    assert sent[1] <= 0.51 * sent[0]


def test_sizes_shards_and_matrices_that_are_kept():
    params, x = case()
    odd = {"up": params["up"][..., :64], "gate": params["gate"][..., :64], "down": params["down"][:, :64]}
    with pytest.raises(
        DivisibilityError,
        match=r"\[4, 256, 64\] of a matmul of `gate` has 256 contracted and 64 other(?s:.)*blocks of 128",
    ):
        jax.eval_shape(mp.train.Precision("float8", keep="kernel")(mean_square), params | odd, x)
    jax.eval_shape(mp.train.Precision("mxfp8", keep="kernel")(mean_square), params | odd, x)
    with pytest.raises(
        DivisibilityError, match=r"blocks of 128 elements of `embed`.*data=4 shards its 256 elements into 64"
    ):
        planned(mp.train.Precision("float8", keep="kernel"), params, mesh="data=4")
    with pytest.raises(
        UnsupportedError, match=r"some matrices of the same experts are quantized, and others are not: gate, up"
    ):
        planned(mp.train.Precision("mxfp8", keep="kernel, down"), params)
    for policy in (
        mp.train.Precision("mxfp8", keep="kernel, gate, up, down"),
        mp.train.Precision("nvfp4", keep="kernel"),
    ):
        with pytest.raises(UnsupportedError, match="no matmul of a weight"):
            planned(policy, params)
