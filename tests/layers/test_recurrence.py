"""Recurrences that scale and add: equal to ``lax.scan``, along a sharded dim, and refusals of other steps."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from jax import lax

import meshpar as mp
from meshpar._src.verify.hlo import collectives

RNG = np.random.default_rng(0)
CHUNKS, CHUNK, BATCH, HEADS, SIZE = 8, 4, 2, 2, 8
Q, K, V = (jnp.asarray(normal(RNG, BATCH, CHUNKS * CHUNK, HEADS, SIZE) / 3) for _ in range(3))
DECAY = jnp.asarray(RNG.uniform(0.8, 1, (BATCH, CHUNKS * CHUNK, HEADS)), jnp.float32)
STATE = BATCH * HEADS * SIZE * SIZE * 4


def chunks(x):
    return x.reshape(BATCH, CHUNKS, CHUNK, *x.shape[2:]).swapaxes(0, 1)


def linear_attention(scan, q, k, v, decay):
    """Gated linear attention by chunks: the decay of a chunk is one number for each row and head."""

    def step(state, x):
        q, k, v, decay = x
        log = jnp.cumsum(jnp.log(decay), 1)
        q, k, end = q * jnp.exp(log)[..., None], k * jnp.exp(-log)[..., None], jnp.exp(log[:, -1])
        scores = jnp.einsum("bshd,bthd->bhst", q, k) * jnp.tril(jnp.ones((CHUNK, CHUNK)))
        y = jnp.einsum("bhst,bthe->bshe", scores, v) + jnp.einsum("bshd,bhde->bshe", q, state)
        return end[..., None, None] * (state + jnp.einsum("bthd,bthe->bhde", k, v)), y

    last, y = scan(step, jnp.zeros((BATCH, HEADS, SIZE, SIZE)), tuple(map(chunks, (q, k, v, decay))))
    return last, y.swapaxes(0, 1).reshape(v.shape)


def without_decay(scan, q, k, v, decay):
    """Linear attention, and the number of tokens, which a mask stops to count in a second array of the state."""

    def step(states, x):
        (state, count), (q, k, v, decay) = states, x
        y = jnp.einsum("bshd,bhde->bshe", q, state) / (1 + count)[:, None, None, None]
        more = jnp.where(decay[:, 0, 0] > 0.9, count + CHUNK, -count / 2)
        return (state - jnp.einsum("bthd,bthe->bhde", k, v), more), y

    first = jnp.ones((BATCH, HEADS, SIZE, SIZE)), jnp.ones(BATCH)
    (last, count), y = scan(step, first, tuple(map(chunks, (q, k, v, decay))))
    return last, count, y.swapaxes(0, 1).reshape(v.shape)


def state_space(scan, q, k, v, decay):
    """A selective state space, one token a step: each element of the state decays by itself."""

    def step(state, x):
        q, k, v, decay = x
        new = jax.nn.sigmoid(k)[..., None] * state * decay[..., None, None] + (k[..., None] * v[..., None, :])
        return new, jnp.einsum("bhd,bhde->bhe", q, new)

    by_token = (x.swapaxes(0, 1) for x in (q, k, v, decay))
    last, y = scan(step, jnp.zeros((BATCH, HEADS, SIZE, SIZE)), tuple(by_token))
    return last, y.swapaxes(0, 1)


DIMS = {"[qkv]": "batch seq heads _", "decay": "batch seq heads"}
MODELS = [linear_attention, without_decay, state_space]
LAYOUTS = [("context=8", "seq: context"), ("context=4, model=2", "seq: context; heads: model")]


def of(model, scan):
    return lambda q, k, v, decay: model(scan, q, k, v, decay)


@pytest.mark.parametrize(("model", "how", "lowering"), covering.pairs(MODELS, LAYOUTS, ["shard_map", "jit"]))
def test_values_and_gradients_are_those_of_a_scan(model, how, lowering):
    mesh, layout = how

    def with_gradients(scan):
        def run(q, k, v, decay):
            out, pull = jax.vjp(of(model, scan), q, k, v, decay)
            return out, pull(jax.tree.map(jnp.cos, out))

        return run

    step = mp.jit(with_gradients(mp.layers.recurrence), mesh=mesh, layout=layout, dims=DIMS, lowering=lowering)
    args = Q, K, V, DECAY
    got, want = step(*args), jax.jit(with_gradients(lax.scan))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("lowering", ["shard_map", "jit"])
def test_devices_gather_one_state_of_each_other_device(lowering):
    how = {"mesh": "context=8", "layout": "seq: context", "dims": DIMS}
    args, sizes = (Q, K, V, DECAY), {}
    for name, model, decay in (("linear", linear_attention, 4 * BATCH * HEADS), ("space", state_space, STATE // SIZE)):
        step = mp.jit(of(model, mp.layers.recurrence), lowering=lowering, **how)
        plan = step.plan(*args)
        sizes[name] = plan.bytes_sent
        assert plan.bytes_sent == 7 * (STATE + decay)
        assert plan.bytes_sent == sum(c.bytes * c.count for c in collectives(step.lower(*args).compile().as_text()))
    assert sizes["linear"] < mp.plan(of(linear_attention, lax.scan), *args, **how).bytes_sent


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda h, x: (jnp.tanh(h) + x, h), "`tanh` at .*test_recurrence.py"),
        (lambda h, x: (x[:, None] * (h @ jnp.ones((3, 3))), h), "`dot_general`"),
        (lambda h, x: (h * h.sum(), h), "`reduce_sum`"),
        (lambda h, x: (h * h, h), "`mul`"),
        (lambda h, x: (x[:, None] / h, h), "`div`"),
        (lambda h, x: (jnp.where(h > 0, h, x[:, None]), h), "`gt`"),
        (lambda h, x: (jax.jit(lambda h: h[::-1])(h), h), "`rev`"),
        (lambda h, x: (h[:2], h), "other shapes"),
        (lambda h, x: ((h, h), h), "another structure"),
    ],
)
def test_other_steps_are_refused(step, message):
    with pytest.raises(mp.errors.UnsupportedError, match=message):
        mp.layers.recurrence(step, jnp.ones((3, 3)), jnp.ones((5, 3)))


def test_an_array_of_the_state_in_another_one_is_refused():
    with pytest.raises(mp.errors.UnsupportedError, match="another array of the state"):
        mp.layers.recurrence(lambda h, x: ((h[1], h[0]), x), (jnp.ones(3), jnp.ones(3)), jnp.ones((5, 3)))


@pytest.mark.parametrize("xs", [(), jnp.ones((0, 3)), (jnp.ones(3), jnp.ones(4)), 1.0])
def test_xs_has_one_leading_dim(xs):
    with pytest.raises(mp.errors.UnsupportedError, match="leading dim"):
        mp.layers.recurrence(lambda h, x: (h, h), jnp.ones(3), xs)
