"""``mp.train.offload``: the updates and states of the wrapped transformation, moments in host memory, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from same_results import assert_close

import meshpar as mp
from meshpar.errors import UnsupportedError

LAYERS = 3
RNG = np.random.default_rng(0)
STACKS = {k: 0.3 * RNG.standard_normal((LAYERS, *s), np.float32) for k, s in {"up": (8, 16), "down": (16, 8)}.items()}
PARAMS = {"layers": STACKS, "embed": RNG.standard_normal((16, 8), np.float32), "scale": np.float32(1)}
X = RNG.integers(0, 16, (8, 4))
DIMS = {"*/up": "layers embed mlp", "*/down": "layers mlp embed", "*embed": "vocab embed", "x": "batch seq"}
LAYOUT = "batch: data; embed: data; mlp: model"


def loss_of(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, params["embed"][x] * params["scale"], params["layers"])[0] ** 2)


def train_step(tx):
    def step(params, state, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def trained(step, tx, steps=3):
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    for _ in range(steps):
        params, state, _ = step(params, state, X)
    return params, state


@pytest.mark.parametrize(
    ("tx", "layers", "lowering"),
    [(optax.adamw(1e-2), LAYERS, "shard_map"), (optax.sgd(1e-2, momentum=0.9), None, "jit")],
    ids=["adamw in a loop", "momentum in sequence"],
)
def test_it_trains_as_the_transformation_alone(tx, layers, lowering):
    offloaded = mp.train.offload(tx, layers=layers)
    options = {"layout": LAYOUT, "dims": DIMS, "lowering": lowering, "donate_argnums": (0, 1)}
    step = mp.jit(train_step(offloaded), mesh="data=4, model=2", **options)
    ours, expected = trained(step, offloaded), trained(jax.jit(train_step(tx)), tx)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    assert_close(ours, expected, rtol=1e-4, atol=2e-5)
    _, state = ours
    assert all((x.sharding.memory_kind == "pinned_host") == (x.ndim > 0) for x in jax.tree.leaves(state))


def test_the_plan_has_the_copies_of_each_layer():
    layers = 16
    shapes = {"up": (layers, 64, 128), "down": (layers, 128, 64)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    how = {"mesh": "data=4", "layout": "batch?, embed: data"}
    dims = {"*up": "layers embed mlp", "*down": "layers mlp embed"}

    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ w["up"]) @ w["down"], None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    def planned(tx):
        def step(weights, state, x):
            updates, state = tx.update(jax.grad(loss)(weights, x), state)
            return optax.apply_updates(weights, updates), state

        state = mp.init(tx.init, **how, dims=dims).abstract(weights)
        named = {**dims, "x": "batch embed"}
        return state, mp.plan(step, weights, state, x, **how, dims=named, donate_argnums=(0, 1))

    _, alone = planned(optax.adam(1e-2))
    state, plan = planned(mp.train.offload(optax.adam(1e-2), layers=layers))
    assert state[0].mu["up"].sharding.memory_kind == "pinned_host"
    moments = 2 * 2 * layers * 64 * 128 * 4 / 4
    for to in ("host", "device"):
        assert sum(t.total_bytes for t in plan.transfers if t.to == to) == moments
    assert plan.bytes_sent == alone.bytes_sent
    assert alone.memory.peak - plan.memory.peak > 0.6 * moments
    assert moments <= plan.memory.host <= 1.2 * moments


@pytest.mark.parametrize(
    ("tx", "layers", "text"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), None, "depends on other parameters"),
        (optax.lamb(1e-3), LAYERS, "reduce_sum is not elementwise"),
        (optax.adam(1e-3), 7, "no parameter has 7 layers"),
    ],
)
def test_what_would_not_be_exact_is_refused(tx, layers, text):
    offloaded = mp.train.offload(tx, layers=layers)
    with pytest.raises(UnsupportedError, match=text):
        offloaded.update(PARAMS, offloaded.init(PARAMS), PARAMS)


def test_transformations_of_single_parameters_in_sequence():
    """LAMB reduces over each parameter, which an update in sequence leaves as a whole."""
    tx = optax.lamb(1e-2)
    offloaded = mp.train.offload(tx)
    ours, _ = jax.jit(offloaded.update)(PARAMS, offloaded.init(PARAMS), PARAMS)
    expected, _ = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, expected)
