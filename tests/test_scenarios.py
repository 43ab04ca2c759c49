"""Methods of distributed training as a user writes them in JAX: equal to NumPy in float64 under layouts and both lowerings."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from same_results import assert_same_under

MESH = "data=4, model=2"
TOLERANCE = 2e-6
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def assert_same(fn, *args, layouts, dims, expected, tolerance=TOLERANCE):
    """``fn`` has the expected results under each layout, by both lowerings and on one device."""
    assert_same_under([(MESH, x) for x in layouts], fn, *args, expected=expected, tolerance=tolerance, dims=dims)


def float64(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def test_code_of_one_replica_with_permutes_and_gathers():
    """Each replica adds what its left neighbour has, and takes its own row of the sum over all: TF-Replicator's primitives."""
    x = normal(8, 4, 16)

    def replica(x):
        left = lax.ppermute(x, "r", [(i, (i + 1) % 8) for i in range(8)])
        every = lax.all_gather(x, "r")
        return x + left, every.max(0), lax.psum(x.sum(), "r")

    (y,) = float64(x)
    expected = (y + np.roll(y, 1, 0), np.broadcast_to(y.max(0), y.shape), np.full(8, y.sum()))
    fn = jax.vmap(replica, axis_name="r")
    dims = {"x": "replica row embed"}
    assert_same(
        fn, x, layouts=["replica: data", "replica: data; embed: model"], dims=dims, expected=expected, tolerance=1e-5
    )


def test_one_layer_of_a_cnn_has_a_layout_of_its_own():
    """OptCNN: the first convolution is split by height, the second by its filters, by a rule for its path."""
    x, c1, c2 = normal(4, 8, 8, 3), normal(3, 3, 3, 8) / 4, normal(3, 3, 8, 16) / 8

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def fn(params, x):
        return conv(jnp.maximum(conv(x, params["c1"]), 0), params["c2"])

    def conv_in_float64(x, w):
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return sum(padded[:, i : i + 8, j : j + 8] @ w[i, j] for i in range(3) for j in range(3))

    y, v, w = float64(x, c1, c2)
    expected = conv_in_float64(np.maximum(conv_in_float64(y, v), 0), w)
    dims = {"*c1": "_ _ _ f1", "*c2": "_ _ f1 f2", "x": "batch height width _"}
    layouts = ["height: model", '"*/c2".f2: model; height: model; batch: data']
    assert_same(fn, {"c1": c1, "c2": c2}, x, layouts=layouts, dims=dims, expected=expected)


def test_gradients_that_are_some_steps_old():
    """Hogwild's staleness as a ring of gradients: each update takes the gradient of three steps before."""
    w, x = normal(16, 8) / 4, normal(8, 16)
    dims = {"w": "embed mlp", "x": "batch embed", "ring": "age embed mlp"}
    delay, steps, rate = 3, 7, 0.05

    def fn(w, ring, x):
        def step(carry, n):
            w, ring = carry
            g = jax.grad(lambda w: jnp.square(jnp.sin(x @ w)).mean())(w)
            old = ring[n % delay]
            return (w - rate * old, ring.at[n % delay].set(g)), None

        return lax.scan(step, (w, ring), jnp.arange(steps))[0][0]

    v, y = float64(w, x)
    gradients = [np.zeros_like(v)] * delay
    for n in range(steps):
        h = y @ v
        gradients.append(y.T @ (2 * np.sin(h) * np.cos(h)) / h.size)
        v = v - rate * gradients[n]
    ring = np.zeros((delay, *w.shape), np.float32)
    layouts = ["batch: data", "batch: data; mlp: model; embed: data"]
    assert_same(fn, w, ring, x, layouts=layouts, dims=dims, expected=v)
