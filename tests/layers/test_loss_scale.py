"""Loss scales: gradients that float16 cannot represent, skipped steps, scans; the noise scale of known gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp


def loss_of(w, x):
    return jnp.mean((x @ w).astype(jnp.float32)) * 1e-7


def test_scaled_gradients_do_not_vanish_in_float16():
    w, x = jnp.ones((8, 4), jnp.float16), jnp.ones((4, 8), jnp.float16)
    assert not np.asarray(jax.grad(loss_of)(w, x)).any()
    scale = mp.train.LossScale(2.0**15)
    gradients, finite = scale.unscale(jax.grad(lambda w: scale(loss_of(w, x)))(w))
    assert gradients.dtype == jnp.float32
    assert bool(finite)
    np.testing.assert_allclose(gradients, np.full((8, 4), 1e-7 / 4), rtol=0.01)


def test_leaves_that_are_no_floats():
    scale, p = mp.train.LossScale(4.0), {"w": jnp.ones(3), "n": jnp.arange(3)}
    assert scale((0.5, {"tokens": 3})) == (2.0, {"tokens": 3})
    grads = jax.grad(lambda p: scale(p["w"].sum()), allow_int=True)(p)
    unscaled, finite = scale.unscale(grads)
    assert bool(finite)
    np.testing.assert_array_equal(unscaled["w"], np.ones(3))
    assert unscaled["n"].dtype == jax.dtypes.float0


@pytest.mark.parametrize(("lowering", "layout"), [("jit", "batch: data"), ("shard_map", "batch: data; embed: model")])
def test_steps_in_a_scan_equal_the_simulation(lowering, layout):
    """Growth after two finite steps, a skipped step with half the scale, under a layout."""
    xs = np.random.default_rng(0).normal(size=(7, 8, 4)).astype(np.float32)
    xs[3, 5, 2] = np.inf

    def train(w, scale, xs):
        def step(carry, x):
            w, scale = carry
            gradients, finite = scale.unscale(jax.grad(lambda w: scale((x @ w).mean()))(w))
            return (scale.select(finite, w - 0.1 * gradients, w), scale.adjust(finite)), scale.scale

        return jax.lax.scan(step, (w, scale), xs)

    dims = {"w": "embed", "xs": "_ batch embed"}
    run = mp.jit(train, mesh="data=4, model=2", layout=layout, dims=dims, lowering=lowering)
    (w, scale), used = run(jnp.ones(4), mp.train.LossScale(8.0, period=2), xs)
    want, size, good, sizes = np.ones(4), 8.0, 0, []
    for x in xs:
        sizes.append(size)
        if not np.isfinite(x).all():
            size, good = size / 2, 0
            continue
        want, good = want - 0.1 * x.mean(0), good + 1
        if good == 2:
            size, good = size * 2, 0
    np.testing.assert_allclose(w, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(used, sizes)
    assert (float(scale.scale), int(scale.steps), int(scale.skipped)) == (size, good, 1)


def test_the_scale_stays_within_its_bounds():
    scale = mp.train.LossScale(2.0, period=1, largest=4.0)
    for finite, want in [(True, 4.0), (True, 4.0), (False, 2.0), (False, 1.0), (False, 1.0)]:
        scale = scale.adjust(jnp.array(finite))
        assert float(scale.scale) == want
    assert int(scale.skipped) == 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: mp.train.LossScale(scale=0.0), "scale=0"),
        (lambda g: mp.train.LossScale(factor=1.0), "factor=1"),
        (lambda g: mp.train.LossScale(period=0), "period=0"),
        (lambda g: mp.train.noise_scale(g, g, batch=(8, 8)), r"batch=\(8, 8\)"),
        (lambda g: mp.train.noise_scale({"a": g}, {"b": g}, batch=(1, 8)), "different structures"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(mp.errors.UnsupportedError, match=words):
        call(jnp.ones(3))


@pytest.mark.parametrize(("lowering", "layout"), [("jit", "embed: data"), ("shard_map", "replica: data")])
def test_the_noise_scale_estimates_the_moments_of_the_gradient(lowering, layout):
    """2,000 replicas, of 4 examples each with known mean and variance."""
    rng = np.random.default_rng(0)
    mean = np.array([[1.0, -2.0], [0.5, 0.0], [0, 0], [0, 3]])
    small = mean + rng.normal(size=(2000, 4, 2)) * 3 / np.sqrt(4)
    small = small.astype(np.float32)

    def estimate(small):
        return mp.train.noise_scale({"w": small}, {"w": small.mean(0)}, batch=(4, 8000))

    run = mp.jit(estimate, mesh=mp.mesh("data=4"), layout=layout, dims={"small": "replica embed _"}, lowering=lowering)
    got = run(small)
    flat = np.float64(small).reshape(2000, -1)
    of_small, of_large = (flat**2).sum(1).mean(), (flat.mean(0) ** 2).sum()
    np.testing.assert_allclose(got.squared_norm, (8000 * of_large - 4 * of_small) / 7996, rtol=1e-5)
    np.testing.assert_allclose(got.variance, (of_small - of_large) / (1 / 4 - 1 / 8000), rtol=1e-5)
    np.testing.assert_allclose(got.squared_norm, (mean**2).sum(), rtol=0.05)
    np.testing.assert_allclose(got.variance, 9 * mean.size, rtol=0.05)
    np.testing.assert_allclose(got.batch, got.variance / got.squared_norm, rtol=1e-6)
