"""Names of traced programs: the dims of optimizer state that is smaller than its parameter, suggestions for patterns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar._src.cost.flops import model_flops
from meshpar._src.entry.tracing import _dims_like, _similar_pattern

NAMES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("shape", "param_shape", "dims"),
    [
        ((8, 16), (8, 16), ("a", "b")),  # a moment of Adam
        ((8, 8), (8, 8), ("a", "b")),
        ((8,), (8, 16), ("a",)),  # the factored moments of Adafactor
        ((16,), (8, 16), ("b",)),
        ((8, 4), (8, 2, 4), ("a", "c")),
        ((1, 16), (8, 16), (None, "b")),  # of SM3
        ((8, 1), (8, 16), ("a", None)),
        ((1, 1), (8, 16), (None, None)),
        ((16, 8), (8, 16), None),  # of the parameter's rank, and no part of it
        ((4, 16), (8, 16), None),  # blocks
        ((8,), (8, 8), None),  # rows or columns
        ((1,), (8, 16), None),  # what Adafactor stores for a moment that is not factored
        ((), (8, 16), None),
        ((8, 16, 2), (8, 16), None),
    ],
)
def test_dims_of_optimizer_state_by_the_sizes_of_its_parameter(shape, param_shape, dims):
    assert _dims_like(shape, param_shape, NAMES[: len(param_shape)]) == dims


@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (8, 8), (4, 8, 8), (8, 4, 8), (16, 4, 8)])
def test_dims_of_the_factored_moments_of_optax(shape):
    """By optax itself: a gradient whose rows are zero but for one has that pattern in one of the two moments."""
    optimizer, params = optax.adafactor(1e-3, min_dim_size_to_factor=2), {"w": jnp.ones(shape)}
    update = jax.jit(lambda gradient: optimizer.update({"w": gradient}, optimizer.init(params), params)[1][0])
    for k, name in enumerate(NAMES[: len(shape)]):
        along = [1] * len(shape)
        along[k] = shape[k]
        state = update(jnp.broadcast_to((jnp.arange(shape[k]) + 1.0).reshape(along), shape))
        for moment in ("v_row", "v_col"):
            array = getattr(state, moment)["w"]
            dims = _dims_like(array.shape, shape, NAMES[: len(shape)], f"opt/0/{moment}/w")
            varies = [bool(np.ptp(array, axis=i).any()) for i in range(array.ndim)]
            assert varies == [d == name for d in dims]


@pytest.mark.parametrize(
    ("pattern", "suggested"),
    [
        ("kernel", "*/kernel"),  # a pattern matches a complete path
        ("mlp/*", "*/mlp/*"),
        ("*/kernal", "*/kernel"),
        ("*state*/mlp/kernal", "*state*/mlp/kernel"),
        ("*/mpl/kernel", "*/mlp/kernel"),
        ("state/mlp/kernels", "state/mlp/kernel"),
        ("x/y/z/unrelated", None),
    ],
)
def test_a_pattern_is_suggested_for_one_that_matches_nothing(pattern, suggested):
    found = _similar_pattern(pattern, ["state/mlp/kernel", "state/mlp/bias", "batch"], [])
    if suggested is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"did you mean {suggested!r}")


def test_no_pattern_for_optimizer_state_is_suggested():
    params, x = {"w": jnp.ones((16, 32))}, jnp.ones((8, 16))
    state, dims = optax.adam(1e-3).init(params), {"x": "batch _", "*/mu_w": "_ mlp"}
    with pytest.raises(mp.errors.PatternError) as error:
        mp.plan(lambda w, state, x: x @ w["w"], params, state, x, mesh="data=8", layout="batch: data", dims=dims)
    assert "did you mean '*/w'?" in str(error.value)


SHAPES = {"x": (8, 16), "w": (16, 32), "v": (16, 32)}
PATTERNS = {"x": "batch embed", "w": "embed mlp", "v": "embed mlp"}


def plan_of(fn, *names, **options):
    args = [jnp.ones(SHAPES[n]) for n in names]
    dims = {n: PATTERNS[n] for n in names}
    return mp.plan(fn, *args, mesh="data=4, model=2", layout="batch: data; embed: model", dims=dims, **options)


def test_unread_results_of_a_loop():
    def loop(x, w, v):
        def body(carry, _):
            h, unread = carry
            return (jnp.tanh(h @ w @ w.T), unread + h @ v), jnp.sum(h @ v)

        (h, _), _ = jax.lax.scan(body, (x, jnp.zeros((8, 32))), None, length=3)
        return h

    plan = plan_of(loop, "x", "w", "v")
    assert model_flops(plan) == 3 * 2 * (2 * 8 * 16 * 32)
    assert all("v" not in c.tensor for c in plan.collectives)
    run = mp.jit(loop, mesh="data=4, model=2", layout="batch: data; embed: model", dims=PATTERNS)
    args = [jnp.full(s, 0.1) for s in SHAPES.values()]
    np.testing.assert_allclose(run(*args), loop(*args), rtol=1e-5)


def test_effects_are_not_removed(capfd):
    def step(x):
        jax.debug.print("sum {}", jnp.sum(x))
        return x

    out = mp.jit(step, mesh="data=8", layout="batch: data", dims={"x": "batch embed"})(jnp.ones((8, 16)))
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert "sum 128.0" in capfd.readouterr().out


def test_names_from_computations_that_nothing_reads_are_inferred():
    """A result of a size that does not divide is no error, as its name was not given."""

    def step(x, w):
        del w
        unread = jnp.sum(x[1:])
        del unread
        return jnp.ones((7, 16)) + x[1:]

    plan = plan_of(step, "x", "w")
    assert plan.program.outputs[0].annotation is None
    run = mp.jit(step, mesh="data=4, model=2", layout="batch: data", dims={"x": "batch embed", "w": "embed mlp"})
    np.testing.assert_array_equal(run(jnp.ones((8, 16)), jnp.ones((16, 32))), 2.0)


def tree_of(**leaves):
    return {"model": leaves}


def doubled(model, x):
    return x * 2 if model["model"]["flag"] else x


NEEDS = {
    "a bool": (doubled, tree_of(flag=True), "model/model/flag", "eqx.partition(model, eqx.is_array)"),
    "an int": (lambda model, x: sum(x for _ in range(model["n"])), {"n": 3}, "model/n", "eqx.field(static=True)"),
    "a shape": (lambda model, x: x * jnp.ones(model["n"]), {"n": 4}, "model/n", "n: … = eqx.field(static=True)"),
    "an argument": (lambda model, x: x if model else -x, True, "model", "static_argnames='model'"),
    "a list": (lambda model, x: x @ model["w"], {"w": [[1.0] * 4] * 4}, "model/w", "np.asarray"),
    "a list in an op of JAX": (lambda model, x: jnp.dot(x, model), [1.0, 2.0, 3.0, 4.0], "model", "np.asarray"),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_leaf_whose_value_the_step_needs_is_named(name):
    fn, model, path, fix = NEEDS[name]
    step = mp.jit(fn, mesh="data=8", layout="batch: data", dims={"x": "batch _"})
    with pytest.raises(mp.errors.UnsupportedError, match=f"^{path}: ") as e:
        step(model, jnp.ones((8, 4)))
    assert fix in str(e.value)
    assert "test_tracing.py" in str(e.value)
