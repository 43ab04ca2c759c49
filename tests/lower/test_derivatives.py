"""Derivatives of the lowered function, taken from outside, equal the derivatives of the function; custom derivatives included."""

import functools
import inspect

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp

pytestmark = pytest.mark.filterwarnings("ignore::meshpar.errors.JoinWarning")  # square weights, applied again

RNG = np.random.default_rng(0)
MESH = "data=2, model=2, idle=2"
DIMS = {"w": "embed mlp", "v": "mlp embed", "x": "batch embed"}
LAYOUTS = ["batch: data; mlp: model; embed: data", "batch: data; embed: model", "batch: data+model"]


def exact(*shape):
    """Small multiples of a fourth, so that there are ties and zeros."""
    return (RNG.integers(-4, 5, shape) / 4).astype(np.float32)


W, V, X = exact(8, 8), exact(8, 8), exact(8, 8)


def assert_derivatives(fn, *args, layouts=LAYOUTS, dims=DIMS, mesh=MESH, forward=True, tolerance=1e-5, **options):
    """Assert that ``jax.vjp`` with fixed cotangents and ``jax.jvp`` agree for the lowered function and the function."""
    tangents = tuple(jnp.asarray(RNG.normal(size=x.shape), x.dtype) for x in args)

    def backward(f, *args):
        out, back = jax.vjp(f, *args)
        return out, back(jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape), out))

    def derivatives(f):
        ways = [backward, lambda f, *args: jax.jvp(f, args, tangents)] if forward else [backward]
        return jax.jit(lambda *args: [way(f, *args) for way in ways])(*args)

    expected, names = derivatives(fn), inspect.signature(fn).parameters
    for layout in layouts:
        own = {name: dims[name] for name in names}
        run = mp.jit(fn, mesh=mesh, layout=layout, dims=own, lowering="shard_map", **options)
        assert_same(derivatives(run), expected, tolerance)


def assert_same(found, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, atol=tolerance * max(1.0, np.abs(b).max()))


# -- the ways to ask for them


def loss(w, x):
    return (jax.checkpoint(lambda w: jnp.tanh(x @ w))(w) ** 2).mean()


LOSS = {"layout": "batch: data; mlp: model; embed: data", "dims": {"w": "embed mlp", "x": "batch embed"}}


@functools.cache
def sharded_loss():
    return sharded(loss)


def sharded(fn, **options):
    return mp.jit(fn, mesh=MESH, lowering="shard_map", **{**LOSS, **options})


@pytest.mark.parametrize(
    "ask",
    [
        jax.grad,
        lambda f: jax.jit(jax.value_and_grad(jax.jit(f), (0, 1))),
        lambda f: jax.grad(lambda w, x: f(jnp.sin(w), x * 2) + f(w, x) ** 2),
        lambda f: jax.grad(lambda w, x: (jax.grad(f)(w, x) ** 2).sum()),
        jax.jacfwd,
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: lambda w, x: jax.lax.scan(lambda c, _: (c - 0.1 * jax.grad(f)(c, x), f(c, x)), w, None, length=3),
        lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w, w - 1]), x),  # an ensemble
    ],
    ids=["grad", "both arguments, jit", "inside", "grad of grad", "jacfwd", "checkpoint", "loop", "vmap"],
)
def test_it_is_differentiated_as_any_function(ask):
    assert_same(ask(sharded_loss())(W, X), jax.jit(ask(loss))(W, X))


def test_the_result_keeps_its_type():
    assert sharded_loss()(W, X).weak_type == jax.jit(loss)(W, X).weak_type


# -- rewritten programs, which compute values that their results do not depend on


def normed(h, w):
    h = h @ w + h
    return h / jnp.sqrt((h**2).sum(-1, keepdims=True))


def pipeline(p, x):
    def microbatch(total, rows):
        return total + (lax.scan(lambda h, w: (normed(h, w), None), rows, p)[0] ** 3).mean(), None

    return lax.scan(microbatch, 0.0, x.reshape(4, -1, 4))[0]


def volatility(x):
    return jnp.log(x[1:] / x[:-1]).std()


def test_layers_of_a_pipeline_that_are_not_differentiable_at_zero():
    p, x = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((4, 4, 4), (16, 4)))
    dims = {"p": "layers embed _", "x": "batch embed"}
    run = mp.jit(pipeline, mesh="stage=2, x=4", layout="layers: stage", dims=dims)
    assert run.plan(p, x).pipelines
    assert_same(jax.value_and_grad(run, (0, 1))(p, x), jax.jit(jax.value_and_grad(pipeline, (0, 1)))(p, x))


@pytest.mark.parametrize(
    ("lowering", "ask"),
    covering.each(
        ["shard_map", "jit"],
        [
            lambda f: jax.jit(jax.grad(f)),
            lambda f: lambda x: jax.jvp(f, (x,), (x,)),
            lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
            lambda f: jax.grad(lambda x: f(jnp.exp(x)) ** 2),
        ],
    ),
    ids=["jit", "jvp", "vmap", "within"],
)
def test_padded_rows_of_functions_that_are_not_differentiable_at_zero(ask, lowering):
    x = jnp.asarray(RNG.uniform(0.5, 2.0, (8, 4)), jnp.float32)
    run = mp.jit(volatility, mesh=MESH, layout="batch: data", dims={"x": "batch embed"}, lowering=lowering)
    assert any("is padded to" in note for note in run.plan(x).notes)
    assert_same(ask(run)(x), jax.jit(ask(volatility))(x))


@pytest.mark.parametrize("rewritten", [False, True])
def test_integers_and_auxiliary_results_are_passed_by(rewritten):
    def f(x, n):
        y = jnp.log(x[1:] / x[:-1]) if rewritten else x[n]
        return y.std(), (y > 0, n + 1)

    x, n = jnp.asarray(RNG.uniform(0.5, 2.0, (8, 4)), jnp.float32), RNG.integers(0, 8, (8,))
    run = mp.jit(f, mesh=MESH, layout="batch: data", dims={"x": "batch embed", "n": "batch"})
    assert bool(run.plan(x, n).program.original) == rewritten
    assert_same(jax.value_and_grad(run, has_aux=True)(x, n), jax.value_and_grad(f, has_aux=True)(x, n))


def test_a_result_of_a_rewritten_program_that_does_not_divide():
    def f(x):
        return volatility(x) * jnp.sin(x[2:5])

    x = jnp.asarray(RNG.uniform(0.5, 2.0, (8, 4)), jnp.float32)
    run = mp.jit(f, mesh=MESH, layout="batch: data", dims={"x": "batch embed"})
    assert run.plan(x).program.original
    assert_same(jax.grad(lambda x: run(x).sum())(x), jax.grad(lambda x: f(x).sum())(x))


# -- barriers


def test_through_rematerialised_bodies():
    block = jax.checkpoint(lambda w, v, x: jnp.tanh(x @ w) @ v)
    saved = jax.checkpoint(lambda w, v, x: jnp.sin(x @ w) @ v, policy=jax.checkpoint_policies.dots_saveable)

    def f(w, v, x):
        return (block(w, v, saved(w, v, x)) ** 2).sum()

    assert_derivatives(f, W, V, X)


# -- extrema


def test_an_extremum_over_a_split_dim_shares_its_cotangent_among_ties():
    def f(w, x):
        y = x @ jnp.round(w)
        return y.max(0), y.min((0, 1)), y.max(1).T, jax.nn.softmax(y, 0), jax.nn.logsumexp(y, 1), abs(y).max()

    assert_derivatives(f, W, X)


def test_an_extremum_that_leaves_a_rematerialised_body_is_reduced_in_it():
    def f(x):
        def body(c, row):
            return c * 0.5, (row.max(0), c)

        _, (high, kept) = lax.scan(jax.checkpoint(body), x, x)
        return high * kept.sum((1, 2)), jax.checkpoint(lambda x: x.min(1) * 2)(x)

    assert_derivatives(f, exact(8, 8), layouts=["embed: data+model"], dims={"x": "rows embed"})


@pytest.mark.slow
def test_the_cotangent_of_a_running_extremum_over_a_sharded_dim():
    def f(x):
        y = jnp.concatenate([x, x])
        return lax.cummax(y, 0, reverse=True), lax.cummin(y, 1)

    assert_derivatives(f, exact(8, 8), layouts=["batch: data+model"], dims={"x": "batch _"})


def test_the_derivative_of_a_transform_that_is_scattered():
    """XLA's CPU compiler refuses a transform that a reduce-scatter of the last dim follows."""

    def f(x):
        return (abs(jnp.fft.fft(x) + 1.5j) * jnp.arange(8.0),)

    options = {"layouts": ["b: data+model"], "mesh": "data=2, model=4"}
    assert_derivatives(f, exact(8, 8), dims={"x": "_ b"}, forward=False, **options)


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


@pytest.mark.parametrize(
    ("fn", "forward", "layout"),
    [
        (straight_through, False, LAYOUTS[0]),
        (turned, False, LAYOUTS[1]),
        (of_two, True, LAYOUTS[2]),
        (by_index, False, LAYOUTS[1]),
        (in_a_loop, False, LAYOUTS[2]),
        (at_zero, True, LAYOUTS[0]),
    ],
)
@pytest.mark.filterwarnings("ignore:`batch` of 8 is divided into 4 microbatches:meshpar.errors.IndivisibleWarning")
def test_a_function_with_its_own_derivative_keeps_it(fn, forward, layout):
    assert_derivatives(fn, W, X, layouts=[layout], forward=forward)


def test_lookups_differentiated_from_outside():
    """A value read by one device may be sent as bits; its derivative is the derivative of the numbers."""
    x, i = jnp.arange(1.0, 9.0), jnp.int32(3)

    def step(x, i):
        rows = x[jnp.stack([i, i + 1])], lax.dynamic_slice(x, (i,), (2,)), lax.dynamic_update_slice(x * 2, x[:1], (i,))
        return x[:1], x[3], x[i], *rows, x.at[i].set(x[0]), x.astype(jnp.bfloat16)[i].astype(jnp.float32)

    def loss(of):
        return lambda x: sum((jnp.sin(y) * (k + 1)).sum() for k, y in enumerate(of(x, i)))

    def both_ways(f):
        return jax.jit(lambda x: (jax.grad(loss(f))(x), jax.jvp(lambda x: f(x, i), (x,), (jnp.cos(x),))[1]))(x)

    want = both_ways(step)
    for lowering in ("shard_map", "jit"):
        run = mp.jit(step, mesh="data=4, idle=2", layout="rows: data", dims={"x": "rows"}, lowering=lowering)
        assert_same(both_ways(run), want, 1e-6)
