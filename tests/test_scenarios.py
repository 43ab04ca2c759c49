"""Methods of distributed training as a user writes them in JAX: equal to NumPy in float64 under layouts and both lowerings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from same_results import assert_same_under

import meshpar as mp

MESH = "data=4, model=2"
TOLERANCE = 2e-6
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def assert_same(fn, *args, layouts, dims, expected, tolerance=TOLERANCE):
    """``fn`` has the expected results under each layout, by both lowerings and on one device."""
    assert_same_under([(MESH, x) for x in layouts], fn, *args, expected=expected, tolerance=tolerance, dims=dims)


def sent(fn, *args, layout, dims):
    """Operations and bytes that a device sends."""
    plan = mp.plan(fn, *args, mesh=MESH, layout=layout, dims=dims)
    return {c.op for c in plan.collectives}, sum(c.total_bytes for c in plan.collectives)


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


def test_a_shard_map_of_the_user_inside_the_step():
    """A sum over an axis that the user wrote, between matmuls that the layout partitions."""
    x, w = normal(8, 16), normal(16, 32)
    mesh = mp.mesh(MESH)

    def centered(h):
        return h - lax.pmean(h.mean(0), "data")

    def fn(x, w):
        h = jax.shard_map(centered, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x @ w)
        return jnp.tanh(h).sum(0)

    y, v = float64(x, w)
    h = y @ v
    expected = np.tanh(h - h.mean(0)).sum(0)
    for layout in ("batch: data", "batch: data; mlp: model"):
        for lowering in ("shard_map", "jit"):
            got = mp.jit(fn, mesh=mesh, layout=layout, lowering=lowering, dims={"x": "batch embed", "w": "embed mlp"})(
                x, w
            )
            np.testing.assert_allclose(got, expected, atol=1e-5)


def test_layers_split_over_both_axes():
    """DistBelief's partitions of one layer: its inputs over one axis and its outputs over the other."""
    x, up, down = normal(8, 32), normal(32, 64) / 8, normal(64, 32) / 8
    y, u, d = float64(x, up, down)
    dims = {"x": "batch embed", "up": "embed mlp", "down": "mlp embed"}

    def fn(x, up, down):
        return jnp.maximum(x @ up, 0) @ down

    expected = np.maximum(y @ u, 0) @ d
    layouts = ["embed: data; mlp: model", "mlp: data+model", "batch: model; embed: data"]
    assert_same(fn, x, up, down, layouts=layouts, dims=dims, expected=expected)


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


def test_a_table_over_all_devices_sends_only_the_rows_that_are_read_and_written():
    table, ids, target = normal(512, 16), RNG.integers(0, 512, 12), normal(12, 16)
    dims = {"table": "row embed", "ids": "batch", "target": "batch embed"}

    def fn(table, ids, target):
        loss, gradient = jax.value_and_grad(lambda t: jnp.square(t[ids] - target).sum())(table)
        return table - 0.1 * gradient, loss

    t, y = float64(table, target)
    new = t.copy()
    np.subtract.at(new, ids, 0.2 * (t[ids] - y))
    expected = (new, np.square(t[ids] - y).sum())
    layouts = ["row: model+data", "row: model; batch: data"]
    assert_same(fn, table, ids, target, layouts=layouts, dims=dims, expected=expected, tolerance=1e-6)
    _, number = sent(fn, table, ids, target, layout="row: model+data", dims=dims)
    assert 0 < number < table.nbytes / 8


def test_contrastive_pairs_over_the_batch():
    """SimCLR's loss, whose similarities are of all pairs of examples, and its gradient."""
    x, w = normal(16, 12), normal(12, 8)
    dims = {"x": "batch embed", "w": "embed mlp"}

    def loss(w, x):
        z = x @ w
        z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        pairs = jnp.concatenate([z[1::2], z[::2]], 0), jnp.concatenate([z[::2], z[1::2]], 0)
        scores = pairs[0] @ pairs[1].T / 0.5
        return jnp.mean(jax.nn.logsumexp(scores, -1) - jnp.diagonal(scores))

    def in_float64(w, x):
        z = x @ w
        z = z / np.linalg.norm(z, axis=-1, keepdims=True)
        a, b = np.concatenate([z[1::2], z[::2]]), np.concatenate([z[::2], z[1::2]])
        scores = a @ b.T / 0.5
        return np.mean(np.log(np.exp(scores).sum(-1)) - np.diagonal(scores))

    v, y = float64(w, x)
    gradient = np.zeros_like(v)
    for i in np.ndindex(*v.shape):
        step = np.zeros_like(v)
        step[i] = 1e-5
        gradient[i] = (in_float64(v + step, y) - in_float64(v - step, y)) / 2e-5
    fn = jax.value_and_grad(loss)
    layouts = ["batch: data", "batch: data; mlp: model"]
    assert_same(fn, w, x, layouts=layouts, dims=dims, expected=(in_float64(v, y), gradient))


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


def test_a_mask_is_stored_in_place_of_an_activation():
    """Gist: the backward pass of a ReLU needs one bit of each element, which a custom derivative saves."""

    @jax.custom_vjp
    def relu(x):
        return jnp.maximum(x, 0)

    relu.defvjp(lambda x: (jnp.maximum(x, 0), x > 0), lambda mask, g: (jnp.where(mask, g, 0),))
    x, w = normal(8, 16), normal(16, 32)

    def fn(w, x):
        return jax.grad(lambda w: (relu(x @ w) ** 2).sum())(w)

    v, y = float64(w, x)
    expected = y.T @ (2 * np.maximum(y @ v, 0))
    layouts = ["batch: data", "batch: data; mlp: model"]
    assert_same(fn, w, x, layouts=layouts, dims={"w": "embed mlp", "x": "batch embed"}, expected=expected)


@pytest.mark.parametrize("alive", [(1, 1, 1, 1), (1, 0, 1, 1)])
def test_workers_that_are_late_are_left_out_of_the_mean(alive):
    """Backup workers (Chen et al., 2016): the mean of the gradients of the replicas that arrived, in one all-reduce."""
    w, x, weights = normal(16, 8), normal(4, 8, 16), np.array(alive, np.float32)
    dims = {"w": "embed mlp", "x": "replica batch embed", "weights": "replica"}

    def fn(w, x, weights):
        gradients = jax.vmap(jax.grad(lambda w, x: jnp.square(x @ w).mean()), (None, 0))(w, x)
        return w - 0.1 * jnp.einsum("r,rij->ij", weights / weights.sum(), gradients)

    v, y, a = float64(w, x, weights)
    gradients = np.stack([2 * b.T @ (b @ v) / (8 * 8) for b in y])
    expected = v - 0.1 * gradients[a > 0].mean(0)
    layouts = ["replica: data", "replica: data; mlp: model"]
    assert_same(fn, w, x, weights, layouts=layouts, dims=dims, expected=expected)
    operations, _ = sent(fn, w, x, weights, layout=layouts[0], dims=dims)
    assert operations == {"all-reduce"}


def test_a_training_with_one_bit_adam_is_that_of_its_equations():
    """1-bit Adam (Tang et al., 2021): after the warm-up the variance is frozen, and signs of the momentum are exchanged."""
    w, x = normal(8, 4), normal(4, 6, 8, 8)
    dims = {"w": "embed mlp", "x": "replica step batch embed"}
    rate, decay = 0.05, 0.9

    def loss(w, x):
        return jnp.square(x @ w).mean()

    def fn(w, x):
        def exchanged(local, error):
            corrected = local + error
            scale = jnp.abs(corrected).mean((1, 2), keepdims=True)
            code = jnp.where(corrected >= 0, scale, -scale)
            return code.mean(0), corrected - code

        variance = jax.vmap(jax.grad(loss), (None, 0))(w, x[:, 0]).mean(0) ** 2 + 1e-3

        def step(carry, batch):
            w, momentum, error = carry
            g = jax.vmap(jax.grad(loss), (None, 0))(w, batch)
            momentum, error = exchanged(decay * momentum + (1 - decay) * g, error)
            return (w - rate * momentum / jnp.sqrt(variance), momentum, error), None

        start = (w, jnp.zeros_like(w), jnp.zeros((x.shape[0], *w.shape)))
        return lax.scan(step, start, jnp.moveaxis(x, 1, 0)[1:])[0][0]

    v, y = float64(w, x)

    def gradients(v, batch):
        return np.stack([2 * b.T @ (b @ v) / (8 * 4) for b in batch])

    variance = gradients(v, y[:, 0]).mean(0) ** 2 + 1e-3
    momentum, error = np.zeros_like(v), np.zeros((4, *v.shape))
    for n in range(1, 6):
        corrected = decay * momentum + (1 - decay) * gradients(v, y[:, n]) + error
        scale = np.abs(corrected).mean((1, 2), keepdims=True)
        code = np.where(corrected >= 0, scale, -scale)
        momentum, error = code.mean(0), corrected - code
        v = v - rate * momentum / np.sqrt(variance)
    layouts = ["replica: data", "replica: data; mlp: model"]
    assert_same(fn, w, x, layouts=layouts, dims=dims, expected=v, tolerance=1e-5)
