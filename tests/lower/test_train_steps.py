"""Train steps as people write them, unedited: the numbers of the unsharded run under both lowerings, warnings being errors."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import lowered
import numpy as np
import optax
import pytest
from flax import nnx
from same_results import assert_as_unsharded

import meshpar as mp
from meshpar._src.verify.hlo import collectives

RNG = np.random.default_rng(0)
MESH = "data=4, model=2"
LAYOUT = "batch: data; mlp: model; embed: data"
X, Y = (RNG.normal(size=(8, 16)).astype(np.float32) for _ in range(2))

same = functools.partial(lowered.same, meshes=[MESH], lowerings=("shard_map", "jit"), layout=LAYOUT)


def normal(*shape):
    return (RNG.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)


def close(a, b, tolerance=1e-4):
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=tolerance, atol=tolerance), a, b)


# -- Flax


def test_scanned_layers_of_nnx_without_metadata():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(x)))

    def made():
        layers = nnx.split_rngs(splits=3)(nnx.vmap(Layer))(nnx.Rngs(0))
        return layers, nnx.Optimizer(layers, optax.adamw(1e-3), wrt=nnx.Param)

    def step(layers, optimizer, x, y):
        def loss(layers):
            z = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)
            return jnp.mean((z - y) ** 2)

        value, grads = nnx.value_and_grad(loss)(layers)
        optimizer.update(layers, grads)
        return value

    dims = {"layers/up/kernel*": "_ embed mlp", "layers/down/kernel*": "_ mlp embed", "x": "batch embed"}
    mine, theirs = made(), made()
    run, alone = mp.jit(step, mesh=MESH, layout=LAYOUT, dims=dims, lowering="shard_map"), nnx.jit(step)
    for _ in range(2):
        close(run(*mine, X, Y), alone(*theirs, X, Y))
    close(nnx.state(mine[0]), nnx.state(theirs[0]), 1e-3)
    assert mine[0].up.kernel[...].sharding.spec == jax.P(None, "data", "model")


# -- plain JAX


WEIGHTS = {"up": normal(16, 32), "down": normal(32, 16)}
WEIGHT_DIMS = {"up": "embed mlp", "down": "mlp embed"}


def loss_of(p, x, y):
    return jnp.mean((jax.nn.gelu(x @ p["up"]) @ p["down"] - y) ** 2)


def test_bfloat16_with_averaged_weights_and_clipping():
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))  # the length of an update is 0.1

    def step(state, x, y):
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (state["params"], x, y))
        loss, grads = jax.value_and_grad(loss_of)(*half)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = jax.tree.map(lambda e, p: 0.99 * e + 0.01 * p, state["ema"], params)
        finite = jnp.isfinite(loss)
        new = {"params": params, "ema": ema, "opt": opt}
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)

    state = {"params": WEIGHTS, "ema": WEIGHTS, "opt": tx.init(WEIGHTS)}
    dims = {f"state/params/{k}": v for k, v in WEIGHT_DIMS.items()} | {"x": "batch embed"}
    assert_as_unsharded(step, state, X, Y, mesh=MESH, layout=LAYOUT, dims=dims, rtol=0, atol=1e-4)


def test_lbfgs_with_a_line_search():
    """A loop of unknown length, with conditionals, in which the loss is computed."""
    tx = optax.lbfgs(memory_size=3)

    def step(params, state, x, y):
        loss = lambda p: loss_of(p, x, y)  # noqa: E731
        value, grad = optax.value_and_grad_from_state(loss)(params, state=state)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(params, updates), state, value

    def trained(step):
        params, state, losses = WEIGHTS, tx.init(WEIGHTS), []
        for _ in range(5):
            params, state, value = step(params, state, X, Y)
            losses.append(float(value))
        return losses, params

    dims = {f"params/{k}": v for k, v in WEIGHT_DIMS.items()} | {"x": "batch embed", "y": "batch embed"}
    losses, params = trained(mp.jit(step, mesh=MESH, layout=LAYOUT, dims=dims, lowering="shard_map"))
    want = trained(jax.jit(step))
    assert losses[-1] < 0.5 * losses[0]
    close((losses, params), want, 1e-3)


# -- Equinox


def test_an_equinox_module():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))
    tx = optax.adamw(1e-3)

    def step(model, opt, x, y):
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
        updates, opt = tx.update(grads, opt, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt, loss

    opt = tx.init(eqx.filter(model, eqx.is_array))
    dims = {"model/layers/0/weight": "mlp embed", "model/layers/2/weight": "embed mlp", "x": "batch embed"}
    run = mp.jit(step, mesh=MESH, layout=LAYOUT, dims=dims, lowering="jit")
    arrays = functools.partial(eqx.filter, filter_spec=eqx.is_array)
    close(arrays(run(model, opt, X, Y)), arrays(eqx.filter_jit(step)(model, opt, X, Y)), 1e-3)


# -- loops over a batch, samples, pooling


def halved(x):
    return jax.vmap(lambda r: jax.lax.while_loop(lambda c: c.sum() > 0.1, lambda c: c * 0.5, jnp.abs(r)))(x)


def iterated(x, w):
    """Fixed points by row, of weights that the loop closes over; a loop in a loop, counts that differ by row."""

    def row(r):
        def go(c):
            inner = jax.lax.while_loop(lambda d: d[0] < 2, lambda d: (d[0] + 1, d[1] * 0.9), (0, c[1]))[1]
            return c[0] + 1, jnp.tanh(inner @ w) + r

        return jax.lax.while_loop(lambda c: (c[0] < 6) & (jnp.abs(c[1]).max() < 3), go, (0, r))

    return jax.jit(jax.vmap(row))(x)


def solved(x, w):
    """Conjugate gradients by row: a loop within a linear solve."""
    return jax.vmap(lambda r: jax.scipy.sparse.linalg.cg(w @ w.T + 3 * jnp.eye(16), r, maxiter=3)[0])(x)


def test_loops_of_which_every_row_ends_by_itself():
    def step(x, w):
        return halved(x), iterated(x, w), solved(x, w)

    layouts = ["batch: data; embed: model", "batch: data+model"]
    same(step, X, normal(16, 16), dims={"x": "batch embed"}, layout=layouts)


def test_samples_do_not_depend_on_the_layout():
    def draws(key, a):
        of_rows = jax.vmap(jax.random.gamma)(jax.random.split(key, 8), a)
        return jax.random.gamma(key, a), of_rows

    same(draws, jax.random.key(0), np.exp(X), dims={"a": "batch embed"}, layout="batch: data; embed: model")


@pytest.mark.parametrize(
    "fn",
    [
        jax.grad(lambda x: jnp.sum(nn.max_pool(x, (2, 2), (2, 2)) ** 3)),
        lambda x: jax.lax.top_k(x, 2),
        lambda x: x[jnp.arange(8), :, :, 1],
    ],
)
def test_xla_gathers_no_batch(fn):
    x = normal(8, 4, 4, 3)
    run = mp.jit(fn, mesh="data=8", layout="batch: data", dims={"x": "batch _ _ _"}, lowering="jit")
    assert not run.plan(x).collectives
    assert not collectives(run.lower(x).compile().as_text())
    close(run(x), fn(x))
