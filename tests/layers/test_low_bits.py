"""Optimizer state in 8 bits: rounding, memory, sharding, and the same training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replica_simulations as simulations

import meshpar as mp

W = (64, 128)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["embed: data", "mlp: data"])
@pytest.mark.parametrize("lowering", ["shard_map", "jit"])
@pytest.mark.usefixtures("x64")
@pytest.mark.fast_cases(4)
def test_adam_with_rounded_moments_equals_the_simulation(dtype, lowering, layout):
    tx = mp.low_bits(optax.adam(1e-2, b1=0.9, b2=0.99), dtype)

    def step(w, g, state):
        updates, state = tx.update(g, state, w)
        return w + updates, state

    run = mp.jit(step, mesh=mp.mesh("data=4, model=2"), layout=layout, dims={"[wg]": "embed mlp"}, lowering=lowering)
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
    state = mp.low_bits(optax.adam(1e-3)).init(jnp.zeros(W))
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == 64 * 128 * 2 * 33 / 32 + 4  # and the count
    assert state.codes[0].nu.dtype == jnp.uint8


def test_small_arrays_and_other_leaves_are_stored_as_they_are():
    state = mp.low_bits(optax.adam(1e-3)).init({"w": jnp.zeros(W), "b": jnp.zeros(64)})
    assert state.codes[0].mu["b"].dtype == jnp.float32
    assert state.codes[0].count.dtype == jnp.int32
    assert state.exponents[0].mu["b"] is None


def test_codes_and_exponents_are_sharded_like_the_weight():
    tx = mp.low_bits(optax.adam(1e-3))

    def step(w, g, state):
        updates, state = tx.update(g, state, w)
        return w + updates, state

    w = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    plan = mp.plan(
        step, w, w, jax.eval_shape(tx.init, w), mesh=mp.mesh("data=4, model=2"), layout="embed: data; mlp: model",
        dims={"[wg]": "embed mlp", "state/*/[mn]u": "embed mlp"},
    )  # fmt: skip
    assert not plan.collectives
    specs = {tuple(x.spec) for x in plan.inputs if x.path.endswith("u")}
    assert specs == {("data", "model")}


def test_second_moments_above_zero_do_not_become_zero():
    tx = mp.low_bits(optax.scale_by_adam(), min_size=0)
    g = jnp.zeros((1, 32)).at[0, 0].set(1.0).at[0, 1].set(1e-4)
    updates, state = tx.update(g, tx.init(g))
    assert int(state.codes.nu[0, 1]) == 1
    assert int(state.codes.nu[0, 2]) == 0
    updates, _ = tx.update(g, state)
    assert np.isfinite(updates).all()
    assert np.abs(updates).max() < 2


def test_infinities_become_nan():
    tx = mp.low_bits(optax.trace(0.9), min_size=0)
    g = jnp.ones((2, 64)).at[0, 3].set(jnp.inf)
    _, state = tx.update(g, tx.init(g))
    again, _ = tx.update(jnp.ones((2, 64)), state)
    assert np.isnan(again[0, :32]).all()
    assert np.isfinite(again[0, 32:]).all()
    assert np.isfinite(again[1]).all()


@pytest.mark.parametrize(("kw", "words"), [({"dtype": "int4"}, "'int4'"), ({"block": 0}, "block=0")])
def test_bad_input(kw, words):
    with pytest.raises(mp.errors.UnsupportedError, match=words):
        mp.low_bits(optax.sgd(0.1), **kw)
