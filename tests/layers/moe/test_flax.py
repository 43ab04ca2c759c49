"""The Flax layers: the same numbers as `moe`, metadata that a layout can use, and a bias that balances."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import meshpar as mp
from meshpar._src.layers.moe import linen as moe_linen
from meshpar._src.layers.moe import moe
from meshpar._src.layers.moe import nnx as moe_nnx

B, S, H, E, M = 8, 4, 8, 8, 16
X = np.random.default_rng(0).normal(size=(B, S, H)).astype("f")
LIMITED = {"expert_groups": 4, "top_groups": 2, "scale": 2.5}


def layer(**changed):
    with nnx.use_eager_sharding(False):
        return moe_nnx.MoE(H, M, E, 2, rngs=nnx.Rngs(0), **{"shared": 1, "router_options": LIMITED, **changed})


def train_step(model, optimizer, x):
    def loss(model):
        y, aux = model(x)
        return ((y - 2 * x) ** 2).mean() + 1e-2 * aux.losses["balance"], aux

    (value, aux), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    model.rebalance(aux.load, 0.05)
    return value, aux.load, aux.dropped


@pytest.mark.slow
def test_nnx_trains_alike_under_a_layout():
    results = []
    for sharded in (False, True):
        model = layer()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        step = nnx.jit(train_step)
        if sharded:
            layout = "batch: data; expert: data; mlp: model; embed: data"
            dims = {"x": "batch seq embed"}
            step = mp.jit(train_step, mesh="data=4, model=2", dims=dims, layout=layout, lowering="shard_map")
            held = {h.path: h.spec for h in step.plan(model, optimizer, X).inputs}
            assert tuple(held["model/gate"]) == ("data", None, "model")
            assert tuple(held["model/shared_down"]) == ("model", "data")
            assert not any(held["model/bias"])
        seen = [[np.asarray(v) for v in step(model, optimizer, X)] for _ in range(3)]
        results.append((seen, np.asarray(model.bias[...]), np.asarray(model.down[...])))
    (a, bias_a, down_a), (b, bias_b, down_b) = results
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
        np.testing.assert_array_equal(one[1], other[1])
    np.testing.assert_array_equal(bias_a, bias_b)
    assert abs(bias_a).max() > 0.04
    np.testing.assert_allclose(down_a, down_b, rtol=1e-4, atol=1e-6)
    assert a[-1][0] < a[0][0]


def test_linen_is_nnx_with_the_same_weights():
    theirs = layer()
    model = moe_linen.MoE(mlp=M, experts=E, k=2, shared=1, router_options=LIMITED, bias_rate=0.05)
    boxed = jax.jit(model.init)(jax.random.key(0), X)
    assert boxed["params"]["gate"].names == ("expert", "embed", "mlp")
    assert boxed["params"]["router_kernel"].names == ("embed", "router")
    variables = nn.unbox(boxed)
    same = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")
    names = {"router_kernel": "router", **{name: name for name in same}}
    assert set(variables["params"]) == set(names)
    params = {mine: getattr(theirs, other)[...] for mine, other in names.items()}
    assert {n: p.shape for n, p in params.items()} == {n: p.shape for n, p in variables["params"].items()}
    (y, aux), state = jax.jit(lambda v: model.apply(v, X, mutable=["moe"]))({"params": params, "moe": variables["moe"]})
    want, want_aux = jax.jit(lambda x: theirs(x))(X)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(aux.load, want_aux.load)
    theirs.rebalance(want_aux.load, 0.05)
    np.testing.assert_array_equal(nn.unbox(state)["moe"]["bias"], theirs.bias[...])


def test_a_router_with_weights_of_its_own_and_random_numbers():
    model = moe_linen.MoE(mlp=M, experts=E, k=2, router="noisy_top_k")
    variables = nn.unbox(jax.jit(model.init)(jax.random.key(0), X))
    variables["params"]["router_noise"] = jnp.ones((H, E))
    run = jax.jit(lambda key: model.apply(variables, X, None, key))
    y, _ = run(None)
    p = variables["params"]
    weights = {"kernel": p["router_kernel"], "noise": p["router_noise"]}
    experts = {n: p[n] for n in ("gate", "up", "down")}
    want, _ = jax.jit(lambda x: moe(x, weights, experts, router="noisy_top_k", k=2))(X)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(run(jax.random.key(1))[0], y)
    with nnx.use_eager_sharding(False):
        again = moe_nnx.MoE(H, M, E, 2, router="noisy_top_k", rngs=nnx.Rngs(0))
    again.gate[...], again.up[...], again.down[...] = p["gate"], p["up"], p["down"]
    again.router[...], again.noise[...] = p["router_kernel"], p["router_noise"]
    np.testing.assert_allclose(jax.jit(lambda x: again(x)[0])(X), y, rtol=1e-5, atol=1e-6)
