"""Derivatives of the function that the lowering returns: through every barrier, and where functions have their own."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp
from meshpar.lower import LOWERINGS

pytestmark = pytest.mark.filterwarnings("ignore::meshpar.errors.JoinWarning")  # square weights, applied again

RNG = np.random.default_rng(0)
MESH = "data=2, model=2, idle=2"
DIMS = {"w": "embed mlp", "v": "mlp embed", "x": "batch embed"}
LAYOUTS = ["batch: data; mlp: model; embed: data", "batch: data; embed: model", "batch: data+model"]


def exact(*shape):
    """Small multiples of a fourth, so that there are ties and zeros."""
    return (RNG.integers(-4, 5, shape) / 4).astype(np.float32)


W, V, X = exact(8, 8), exact(8, 8), exact(8, 8)


def assert_derivatives(fn, *args, layout, dims, mesh=MESH, forward=True, holds=None, tolerance=1e-5, **options):
    """``jax.grad``, ``jax.vjp`` along random cotangents and ``jax.jvp`` of the lowered function are those of the function.

    ``holds``: a primitive that the lowered function must have, else it would not be seen that the test tests nothing.
    """
    made = mp.mesh(mesh)
    run = mp.jit(fn, mesh=made, layout=layout, dims=dims, lowering="shard_map", **options)
    if holds is not None:
        lowered, *_ = LOWERINGS["shard_map"](run.plan(*args), made)
        assert holds in str(jax.make_jaxpr(lowered)(*args))
    tangents = tuple(jnp.asarray(RNG.normal(size=x.shape), x.dtype) for x in args)

    def backward(f, *args):
        out, back = jax.vjp(f, *args)
        return out, back(jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape), out))

    ways = [backward, lambda f, *args: jax.jvp(f, args, tangents)] if forward else [backward]
    for way in ways:
        for found, expected in zip(*(jax.tree.leaves(way(f, *args)) for f in (run, fn)), strict=True):
            found, expected = np.asarray(found), np.asarray(expected)
            np.testing.assert_allclose(found, expected, atol=tolerance * max(1.0, np.abs(expected).max()))


# -- barriers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_through_a_barrier_of_the_program(layout):
    def f(w, x):
        y, z = lax.optimization_barrier((x @ w, jnp.sin(w)))
        return jnp.tanh(y) @ z

    assert_derivatives(f, W, X, layout=layout, dims={k: DIMS[k] for k in "wx"}, holds="optimization_barrier")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_through_rematerialised_bodies(layout):
    block = jax.checkpoint(lambda w, v, x: jnp.tanh(x @ w) @ v)
    saved = jax.checkpoint(lambda w, v, x: jnp.sin(x @ w) @ v, policy=jax.checkpoint_policies.dots_saveable)

    def f(w, v, x):
        return (block(w, v, saved(w, v, x)) ** 2).sum()

    assert_derivatives(f, W, V, X, layout=layout, dims=DIMS, holds="prevent_cse")


def test_through_gradients_inside_of_rematerialised_bodies():
    """Behind the barrier of a body that was differentiated already: a second derivative."""

    def f(w, v, x):
        block = jax.checkpoint(lambda w: ((jnp.tanh(x @ w) @ v) ** 2).mean())
        return (jax.grad(block)(w) ** 2).sum()

    for layout in LAYOUTS:
        assert_derivatives(f, W, V, X, layout=layout, dims=DIMS, holds="optimization_barrier", tolerance=3e-5)


def test_through_a_loop_that_rounds_its_slices():
    def f(w, x):
        def layer(y, w):
            rounded = lax.stop_gradient(w.astype(jnp.bfloat16)).astype(w.dtype)  # which is exact
            return jnp.tanh(y @ (w * rounded)), y

        return lax.scan(layer, x, w)

    w, dims = exact(3, 8, 8), {"w": "_ embed mlp", "x": "batch embed"}
    for layout in LAYOUTS:
        assert_derivatives(f, w, X, layout=layout, dims=dims, holds="bitcast_convert_type")


def test_through_loops_that_wait_for_each_other():
    def f(w, v, x):
        y, before = lax.scan(lambda y, _: (jnp.tanh(y @ w), y.sum()), x, None, length=2)
        return lax.scan(lambda y, _: (jnp.sin(y @ v), y), y, None, length=2), before

    for layout in LAYOUTS:
        assert_derivatives(f, W, V, X, layout=layout, dims=DIMS, holds="optimization_barrier")


def test_through_sums_that_are_cut_where_they_are_sent(monkeypatch):
    monkeypatch.setattr(sys.modules["meshpar.lower.shard_map"], "LARGE", 1)

    def f(w, x):
        g = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
        return lax.scan(lambda y, _: (jnp.tanh(y @ g), None), x, None, length=2)[0]

    dims = {k: DIMS[k] for k in "wx"}
    assert_derivatives(f, W, X, layout=LAYOUTS[0], dims=dims, holds="optimization_barrier")


def test_through_products_in_order(monkeypatch):
    monkeypatch.setattr(sys.modules["meshpar.passes.schedule"], "LARGE", 1)

    def f(w, v, x):
        return jax.grad(lambda p: (jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) ** 2).sum())((w, v))

    made = mp.jit(f, mesh=mp.mesh(MESH), layout=LAYOUTS[0], dims=DIMS, lowering="shard_map")
    assert made.plan(W, V, X).order.after
    assert_derivatives(f, W, V, X, layout=LAYOUTS[0], dims=DIMS, holds="optimization_barrier", tolerance=3e-5)


def test_through_rings():
    """In reverse: what arrives on a ring is given its derivative by hand."""

    def f(w, v, x):
        return jnp.tanh(x @ w) @ v

    dims = {"w": "embed mlp", "v": "mlp embed", "x": "seq embed"}
    assert_derivatives(
        f, W, V, X, layout="mlp: model; seq: model", dims=dims, mesh="data=2, model=4", forward=False,
        overlap="ring", holds="ppermute",
    )  # fmt: skip


def test_through_a_kernel_with_a_small_result():
    @jax.custom_vjp
    def scaled(x):
        return x * 2, x.sum(1)

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (2 * g[0] + g[1][:, None],))
    kernel = mp.kernel_rule("rows cols! -> rows cols!, rows")(scaled)

    def f(x):
        y, total = kernel(x)
        return jnp.tanh(y) * total[:, None]

    x = exact(8, 16)
    assert_derivatives(f, x, layout="batch: data", dims={"x": "batch _"}, forward=False, holds="optimization_barrier")


# -- extrema


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_extremum_over_a_split_dim_shares_its_cotangent_among_ties(layout):
    def f(w, x):
        y = x @ jnp.round(w)
        return y.max(0), y.min((0, 1)), y.max(1).T, jax.nn.softmax(y, 0), jax.nn.logsumexp(y, 1), abs(y).max()

    assert_derivatives(f, W, X, layout=layout, dims={k: DIMS[k] for k in "wx"}, holds="pm")


def test_an_extremum_that_is_settled_after_a_view_of_it():
    def f(x):
        y = x.max(0).reshape(2, 4)
        z, w = lax.optimization_barrier((x.min(0), x[0]))
        return mp.named(y, "rows _").T, jnp.stack([z, w]), jnp.tanh(y).sum()

    x = exact(8, 8)
    assert_derivatives(f, x, layout="batch: data", dims={"x": "batch _"}, holds="pmax")


def test_an_extremum_that_leaves_a_rematerialised_body_is_settled_in_it():
    def f(x):
        def body(c, row):
            return c * 0.5, (row.max(0), c)

        _, (high, kept) = lax.scan(jax.checkpoint(body), x, x)
        return high * kept.sum((1, 2)), jax.checkpoint(lambda x: x.min(1) * 2)(x)

    x = exact(8, 8)
    assert_derivatives(f, x, layout="embed: data+model", dims={"x": "rows embed"}, holds="remat")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_running_extremum_over_a_split_dim_shares_its_cotangent_as_the_whole_one_does(reverse):
    def f(x):
        y = jnp.concatenate([x, x])
        return lax.cummax(y, 0, reverse=reverse), lax.cummin(y, 1)

    assert_derivatives(f, exact(8, 8), layout="batch: data+model", dims={"x": "batch _"}, holds="cummax")


def test_the_derivative_of_a_transform_that_is_scattered():
    """XLA's CPU compiler refuses a transform that a reduce-scatter of the last dim follows."""

    def f(x):
        return (abs(jnp.fft.fft(x) + 1.5j) * jnp.arange(8.0),)

    assert_derivatives(
        f, exact(8, 8), layout="b: data+model", dims={"x": "_ b"}, mesh="data=2, model=4", forward=False, holds="fft"
    )


# -- functions with derivatives of their own


@jax.custom_vjp
def rounded(x):
    return jnp.round(x)


def _not_of_shards(x, g):
    """Of the whole arrays: a norm, which no shard knows."""
    return (g * jnp.sign(x) + 3 * g / jnp.maximum(1, jnp.sqrt((g * g).sum())),)


rounded.defvjp(lambda x: (jnp.round(x), x), _not_of_shards)


@jax.custom_vjp
def backwards(x):
    return x


backwards.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))


@jax.custom_jvp
def product(x, w):
    return jnp.tanh(x @ w)


@product.defjvp
def _(primals, tangents):
    (x, w), (tx, tw) = primals, tangents
    return product(x, w), (tx @ w) * 2 + x @ tw * 0.5


@jax.custom_vjp
def chosen(x, which):
    return x[which]


chosen.defvjp(
    lambda x, which: (x[which], (x, which)), lambda kept, g: (jnp.zeros_like(kept[0]).at[kept[1]].add(3 * g), None)
)


def straight_through(w, x):
    return rounded(x @ w * 3) * x[:, :1]


def turned(w, x):
    y = x @ w
    return jnp.tanh(backwards(y)) + y, w.sum()


def of_two(w, x):
    return product(x, w) ** 2


def by_index(w, x):
    return chosen(x, jnp.array([3, 0, 3])) @ w


def in_a_loop(w, x):
    def body(c, a):
        return c + jax.nn.relu(a @ w).sum() * 0.1 + backwards(rounded(a * 2)).sum(), a

    return lax.scan(body, 0.0, x.reshape(4, -1, x.shape[1]))


def at_zero(w, x):
    y = jnp.concatenate([x @ w, jnp.zeros_like(x)], 1)
    return jax.nn.relu(y), jax.nn.softplus(y), jax.nn.log_sigmoid(y), jax.nn.relu6(y), jax.nn.silu(y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("fn", "forward"),
    [
        (straight_through, False),
        (turned, False),
        (of_two, True),
        (by_index, False),
        (in_a_loop, False),
        (at_zero, True),
    ],
)
def test_a_function_with_its_own_derivative_keeps_it(fn, forward, layout):
    assert_derivatives(fn, W, X, layout=layout, dims={k: DIMS[k] for k in "wx"}, forward=forward)


def test_a_derivative_of_its_own_is_planned_for_the_shards():
    """A softmax has one, and needs nothing from other devices along the dims that it maps over."""

    def f(x):
        return jax.nn.softmax(x, 1)

    run = mp.jit(f, mesh=mp.mesh(MESH), layout="batch: data+model", dims={"x": "batch embed"}, lowering="shard_map")
    text = str(jax.make_jaxpr(lambda x, t: jax.jvp(run, (x,), (t,)))(X, X))
    assert not any(kind in text for kind in ("psum", "pmax", "all_gather", "all_to_all", "ppermute"))
