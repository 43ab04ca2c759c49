"""Train steps as people write them, unedited: the numbers of the unsharded run under both lowerings, warnings being errors."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import lowered
import numpy as np
import optax
import pytest

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


# -- plain JAX


WEIGHTS = {"up": normal(16, 32), "down": normal(32, 16)}
WEIGHT_DIMS = {"up": "embed mlp", "down": "mlp embed"}


def loss_of(p, x, y):
    return jnp.mean((jax.nn.gelu(x @ p["up"]) @ p["down"] - y) ** 2)


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
