"""Optimizer state in 8 bits: rounding, memory, sharding, and the same training."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import replica_simulations as simulations

import meshpar as mp
from meshpar._src.layers.eight_bit_optimizer_state import MOMENTS

W = (64, 128)


def step_of(tx):
    def step(w, g, state):
        updates, state = tx.update(g, state, w)
        return w + updates, state

    return step


@pytest.mark.parametrize(
    ("dtype", "lowering", "layout"), [("int8", "shard_map", "embed: data"), ("float8_e4m3fn", "jit", "mlp: data")]
)
@pytest.mark.usefixtures("x64")
def test_adam_with_rounded_moments_equals_the_simulation(dtype, lowering, layout):
    tx = mp.train.low_bits(optax.adam(1e-2, b1=0.9, b2=0.99), dtype)
    run = mp.jit(
        step_of(tx), mesh=mp.mesh("data=4, model=2"), layout=layout, dims={"[wg]": "embed mlp"}, lowering=lowering
    )
    rng = np.random.default_rng(0)
    w = jnp.zeros(W)
    state, want, m, v = tx.init(w), np.zeros(W), np.zeros(W), np.zeros(W)
    for n in range(1, 4):
        g = rng.normal(size=W) * np.exp(rng.normal(size=W))
        w, state = run(w, g, state)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        want = want - 1e-2 * (m / (1 - 0.9**n)) / (np.sqrt(v / (1 - 0.99**n)) + 1e-8)
        np.testing.assert_allclose(w, want, rtol=1e-6, atol=1e-6)
        m, v = simulations.eight_bits(m, dtype, 32), simulations.eight_bits(v, dtype, 32, root=True)


def test_state_takes_two_bytes_and_an_exponent_per_block():
    """Small arrays and other leaves are stored as they are."""
    state = mp.train.low_bits(optax.adam(1e-3)).init({"w": jnp.zeros(W), "b": jnp.zeros(64)})
    small = 4 + 2 * 64 * 4  # the count, and both moments of `b`
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == 64 * 128 * 2 * 33 / 32 + small
    codes = state.codes[0]
    assert [x.dtype for x in (codes.nu["w"], codes.mu["b"], codes.count)] == [jnp.uint8, jnp.float32, jnp.int32]
    assert state.exponents[0].mu["b"] is None


def test_codes_and_exponents_are_sharded_like_the_weight(mesh):
    tx, w = mp.train.low_bits(optax.adam(1e-3)), jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    dims = {"[wg]": "embed mlp", "state/*/[mn]u": "embed mlp"}
    state = jax.eval_shape(tx.init, w)
    plan = mp.plan(step_of(tx), w, w, state, mesh=mesh, layout="embed: data; mlp: model", dims=dims)
    assert not plan.collectives
    assert {tuple(x.spec) for x in plan.inputs if x.path.endswith("u")} == {("data", "model")}


def test_second_moments_above_zero_do_not_become_zero():
    tx = mp.train.low_bits(optax.scale_by_adam(), min_size=0)
    g, update = jnp.zeros((1, 32)).at[0, :2].set(np.array([1.0, 1e-4])), jax.jit(tx.update)
    _, state = update(g, tx.init(g))
    assert state.codes.nu[0, 1:3].tolist() == [1, 0]
    updates, _ = update(g, state)
    assert np.isfinite(updates).all()
    assert np.abs(updates).max() < 2


def test_infinities_become_nan():
    tx, ones = mp.train.low_bits(optax.trace(0.9), min_size=0), jnp.ones((2, 64))
    update = jax.jit(tx.update)
    _, state = update(ones.at[0, 3].set(jnp.inf), tx.init(ones))
    again, _ = update(ones, state)
    assert np.isnan(again[0, :32]).all()
    assert np.isfinite(again[0, 32:]).all()
    assert np.isfinite(again[1]).all()


@pytest.mark.parametrize(("kw", "words"), [({"dtype": "int4"}, "'int4'"), ({"block": 0}, "block=0")])
def test_bad_input(kw, words):
    with pytest.raises(mp.errors.UnsupportedError, match=words):
        mp.train.low_bits(optax.sgd(0.1), **kw)


SENSITIVE = {"lion": 0.1, "signum": 0.2, "sophia": 0.2}
"""Largest relative differences of optimizers that amplify rounding: by a sign, or by numbers that are nearly zero."""
OF_OPTAX = "adabelief adadelta adafactor adagrad adam adan amsgrad lion novograd rmsprop signum sm3 yogi"
OF_CONTRIB = "ademamix dadapt_adamw momo momo_adam muon prodigy schedule_free_adamw simplified_ademamix sophia"
OPTIMIZERS = {
    **{name: getattr(optax, name) for name in OF_OPTAX.split()},
    **{name: getattr(optax.contrib, name) for name in OF_CONTRIB.split()},
    "sgd": lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
    "lbfgs": lambda rate: optax.lbfgs(rate, linesearch=None),
    "masked": lambda rate: optax.masked(optax.adam(rate), {"params": True, "nu": False}),
    "injected": lambda rate: optax.inject_hyperparams(optax.adam)(rate),
    "parts": lambda rate: optax.partition(
        {"a": optax.adam(rate), "b": optax.sgd(rate, momentum=0.9)}, {"params": "a", "nu": "b"}
    ),
}
"""Of the optimizers with equal moments one, and states of other structures."""
FEW = ("adam", "sgd", "adan", "sm3", "prodigy", "schedule_free_adamw", "parts")


def optimizer(name):
    return OPTIMIZERS[name](1e-2)


@pytest.mark.filterwarnings("ignore:mp.train.low_bits stores no array")
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS])
def test_an_optimizer_against_its_float32_state(name):
    """Also under parameters with the names of moments, which decide nothing."""
    rng = np.random.default_rng(0)
    nu, v = (jnp.asarray(rng.normal(size=(64, n)), jnp.float32) for n in (128, 64))
    params = {"params": {"v": v}, "nu": nu}
    noise = [jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params) for _ in range(6)]

    def loss(p, g):
        return sum(jnp.sum(x**2 / 2 + x * y) for x, y in zip(jax.tree.leaves(p), jax.tree.leaves(g), strict=True))

    def updates(tx):
        tx = optax.with_extra_args_support(tx)
        p, state, out = params, tx.init(params), []

        @jax.jit
        def update(g, state, p):
            value, gradient = jax.value_and_grad(loss)(p, g)
            extra = {"obj_fn": lambda p: loss(p, g)} if name == "sophia" else {}
            return tx.update(gradient, state, p, value=value, **extra)

        for g in noise:
            u, state = update(g, state, p)
            p = optax.apply_updates(p, u)
            out.append(u)
        return out[-1]

    low = updates(mp.train.low_bits(optimizer(name), min_size=64))
    for got, want in zip(jax.tree.leaves(low), jax.tree.leaves(updates(optimizer(name))), strict=True):
        assert np.linalg.norm(got - want) <= SENSITIVE.get(name, 0.03) * np.linalg.norm(want)


def test_the_optimizers_of_that_table_have_every_known_moment():
    seen = set()

    def visit(node):
        for path, child in jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node):
            if path:
                seen.add((type(node), getattr(path[0], "name", None)))
                visit(child)

    for name in OPTIMIZERS:
        visit(jax.eval_shape(optimizer(name).init, {"params": jnp.zeros(W), "nu": jnp.zeros(W)}))
    assert set(MOMENTS) <= seen


class Custom(NamedTuple):
    nu: Any


def test_states_of_unknown_types_are_stored_as_they_are_unless_they_are_listed():
    tx = optax.GradientTransformation(lambda p: Custom(p), lambda g, s, p=None: (g, Custom(g)))
    with pytest.warns(UserWarning, match=r"\.nu.*\n.*moments="):
        state = mp.train.low_bits(tx).init({"v": jnp.ones(W)})
    assert state.codes.nu["v"].dtype == jnp.float32
    listed = mp.train.low_bits(tx, moments={**MOMENTS, (Custom, "nu"): "signed"}).init({"v": -jnp.ones(W)})
    assert listed.codes.nu["v"].dtype == jnp.int8
