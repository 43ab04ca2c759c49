"""mp.cross_entropy: values and gradients against NumPy in float64, and under layouts that split tokens, vocabulary and weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.errors import UnsupportedError

BATCH, SEQ, EMBED, VOCAB = 4, 8, 16, 24
RNG = np.random.default_rng(0)
HIDDEN = RNG.standard_normal((BATCH, SEQ, EMBED)).astype(np.float32)
KERNEL = RNG.standard_normal((EMBED, VOCAB)).astype(np.float32)
LABELS = RNG.integers(0, VOCAB, (BATCH, SEQ)).astype(np.int32)
LABELS[0, :3] = -100
MASK = RNG.random((BATCH, SEQ)) < 0.7


def reference(hidden, kernel, labels, weights, z):
    """(loss, by hidden, by kernel) in float64."""
    logits = np.einsum("bse,ev->bsv", hidden.astype(np.float64), kernel.astype(np.float64))
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    onehot = labels[..., None] == np.arange(kernel.shape[1])
    weights = weights / weights.sum()
    loss = (weights * (log_z - (onehot * logits).sum(-1) + z * log_z**2)).sum()
    d = weights[..., None] * (np.exp(logits - log_z[..., None]) * (1 + 2 * z * log_z)[..., None] - onehot)
    return loss, np.einsum("bsv,ev->bse", d, kernel), np.einsum("bse,bsv->ev", hidden, d)


OPTIONS = {
    "plain": ({}, np.ones((BATCH, SEQ))),
    "ignored": ({"ignore": -100, "z_loss": 0.01}, LABELS != -100),
    "masked": ({"ignore": -100, "mask": MASK}, (LABELS != -100) & MASK),
}


@pytest.mark.parametrize("chunks", [1, 4, 6])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_those_of_float64(name, chunks):
    options, weights = OPTIONS[name]

    def of_pair(x, w):
        return 3 * mp.cross_entropy((x, w), LABELS, chunks=chunks, **options)

    def of_logits(x, w):
        return 3 * mp.cross_entropy(x @ w, LABELS, **options)

    loss, *gradients = reference(HIDDEN, KERNEL, LABELS, weights, options.get("z_loss", 0.0))
    for fn in (of_pair, of_logits):
        found, grads = jax.value_and_grad(fn, (0, 1))(HIDDEN, KERNEL)
        assert fn(HIDDEN, KERNEL) == pytest.approx(3 * loss, rel=1e-5)
        assert found == pytest.approx(3 * loss, rel=1e-5)
        for a, b in zip(grads, gradients, strict=True):
            np.testing.assert_allclose(a, 3 * b, rtol=1e-4, atol=1e-6)


def test_bfloat16_sums_in_float32_and_gives_gradients_like_its_arguments():
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (HIDDEN, KERNEL))
    loss, *gradients = reference(*(np.asarray(a, np.float32) for a in (x, w)), LABELS, np.ones((BATCH, SEQ)), 0.0)
    found, grads = jax.value_and_grad(lambda x, w: mp.cross_entropy((x, w), LABELS, chunks=4), (0, 1))(x, w)
    assert found.dtype == jnp.float32
    assert found == pytest.approx(loss, rel=1e-5)
    for a, b in zip(grads, gradients, strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.abs(np.asarray(a, np.float32) - b).max() < 0.02 * np.abs(b).max()


def test_without_a_token_that_counts_it_is_zero():
    loss, grad = jax.value_and_grad(lambda x: mp.cross_entropy((x, KERNEL), LABELS * 0 - 1, ignore=-1))(HIDDEN)
    assert loss == 0
    assert not np.asarray(grad).any()


DIMS = {"x": "batch seq embed", "w": "embed vocab", "labels": "batch seq"}


def step(x, w, labels):
    return jax.value_and_grad(
        lambda x, w: mp.cross_entropy((x, w), labels, ignore=-100, z_loss=1e-3, chunks=2), (0, 1)
    )(x, w)


def test_logits_are_made_once_and_never_whole():
    plan = mp.plan(step, HIDDEN, KERNEL, LABELS, mesh="data=1", layout="batch: data", dims=DIMS)
    ops = list(plan.program.root.walk())
    assert sum(op.name == "dot_general" for op in ops) == 3  # logits, and the two gradients
    largest = max(np.prod(v.shape) for op in ops for v in op.outs if VOCAB in v.shape and EMBED not in v.shape)
    assert largest == BATCH * SEQ * VOCAB / 2


@pytest.mark.parametrize(
    "layout",
    [
        "batch: data; vocab: model",
        "batch: data; embed: data; vocab: model",
        "batch: data; embed: data",
        "seq: data; embed: model",
    ],
)
def test_no_layout_changes_it(layout):
    mp.check(
        step, HIDDEN, KERNEL, LABELS, layouts=layout, mesh="data=2, model=4", dims=DIMS, lowerings=("jit", "shard_map")
    )


@pytest.mark.parametrize(
    "args",
    [
        ((HIDDEN, KERNEL.T), LABELS),
        (HIDDEN, LABELS[:, :4]),
        (HIDDEN, LABELS.astype(np.float32)),
    ],
)
def test_what_does_not_fit_is_refused(args):
    with pytest.raises(UnsupportedError, match="cross_entropy"):
        mp.cross_entropy(*args)
