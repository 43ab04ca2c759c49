"""mp.layers.cross_entropy: values and gradients against NumPy in float64, under layouts that split tokens, vocabulary, weights."""

import functools

import covering
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


def reference(hidden, kernel, labels, weights, z, smoothing=0.0):
    """(loss, by hidden, by kernel) in float64."""
    logits = np.einsum("bse,ev->bsv", hidden.astype(np.float64), kernel.astype(np.float64))
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    onehot = (1 - smoothing) * (labels[..., None] == np.arange(kernel.shape[1])) + smoothing / kernel.shape[1]
    weights = weights / weights.sum()
    loss = (weights * (log_z - (onehot * logits).sum(-1) + z * log_z**2)).sum()
    d = weights[..., None] * (np.exp(logits - log_z[..., None]) * (1 + 2 * z * log_z)[..., None] - onehot)
    return loss, np.einsum("bsv,ev->bse", d, kernel), np.einsum("bse,bsv->ev", hidden, d)


OPTIONS = {
    "plain": ({}, np.ones((BATCH, SEQ))),
    "ignored": ({"ignore": -100, "z_loss": 0.01}, LABELS != -100),
    "masked": ({"ignore": -100, "mask": MASK}, (LABELS != -100) & MASK),
    "smoothed": ({"ignore": -100, "label_smoothing": 0.1, "z_loss": 0.01}, LABELS != -100),
}


@pytest.mark.parametrize(
    ("name", "over", "chunks"),
    [
        *((name, None, None) for name in OPTIONS),  # of logits
        *covering.each(OPTIONS, ["vocab", "tokens"], [1, 4, 10, None]),
        ("ignored", "vocab", 4),
        ("smoothed", "vocab", 10),
        ("masked", "tokens", 1),
    ],
)
def test_values_and_gradients_are_those_of_float64(name, over, chunks):
    options, weights = OPTIONS[name]

    def fn(x, w):
        if over is None:
            return 3 * mp.layers.cross_entropy(x @ w, LABELS, **options)
        return 3 * mp.layers.cross_entropy((x, w), LABELS, over=over, chunks=chunks, **options)

    z, smoothing = options.get("z_loss", 0.0), options.get("label_smoothing", 0.0)
    loss, *gradients = reference(HIDDEN, KERNEL, LABELS, weights, z, smoothing)
    found, grads = jax.jit(jax.value_and_grad(fn, (0, 1)))(HIDDEN, KERNEL)
    assert jax.jit(fn)(HIDDEN, KERNEL) == pytest.approx(3 * loss, rel=1e-5)
    assert found == pytest.approx(3 * loss, rel=1e-5)
    for a, b in zip(grads, gradients, strict=True):
        np.testing.assert_allclose(a, 3 * b, rtol=1e-4, atol=1e-6)


@functools.partial(jax.jit, static_argnames=("over", "chunks"))
def gradient_of(x, w, labels, **options):
    return jax.value_and_grad(lambda x, w: mp.layers.cross_entropy((x, w), labels, **options), (0, 1))(x, w)


@pytest.mark.parametrize("over", ["vocab", "tokens"])
def test_bfloat16_sums_in_float32_and_gives_gradients_like_its_arguments(over):
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (HIDDEN, KERNEL))
    loss, *gradients = reference(*(np.asarray(a, np.float32) for a in (x, w)), LABELS, np.ones((BATCH, SEQ)), 0.0)
    found, grads = gradient_of(x, w, LABELS, over=over, chunks=4)
    assert found.dtype == jnp.float32
    assert found == pytest.approx(loss, rel=1e-5)
    for a, b in zip(grads, gradients, strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.abs(np.asarray(a, np.float32) - b).max() < 0.02 * np.abs(b).max()


def test_without_a_token_that_counts_it_is_zero():
    loss, (grad, _) = gradient_of(HIDDEN, KERNEL, LABELS * 0 - 1, ignore=-1)
    assert loss == 0
    assert not np.asarray(grad).any()


@pytest.mark.parametrize("scale", [60, -60])
def test_logits_of_different_magnitude_neither_overflow_nor_lose_the_label(scale):
    """The maximum comes in the last chunk, or in the first; a sure label has the gradient of one that is sure."""
    kernel = np.zeros((EMBED, VOCAB), np.float32)
    kernel[0] = scale * np.arange(VOCAB) / VOCAB
    hidden, labels = np.eye(1, EMBED, dtype=np.float32)[None], np.array([[VOCAB - 1 if scale > 0 else 0]])
    loss, *gradients = reference(hidden, kernel, labels, np.ones((1, 1)), 0.0)
    found, grads = gradient_of(hidden, kernel, labels, chunks=4)
    assert found == pytest.approx(loss, abs=1e-5)
    for a, b in zip(grads, gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-3)  # log Z is 60: so much is a rounding of it


DIMS = {"x": "batch seq embed", "w": "embed vocab", "labels": "batch seq"}


def step_over(over):
    def step(x, w, labels):
        def loss(x, w):
            options = {"ignore": -100, "z_loss": 1e-3, "label_smoothing": 0.1, "over": over, "chunks": 2}
            return mp.layers.cross_entropy((x, w), labels, **options)

        return jax.value_and_grad(loss, (0, 1))(x, w)

    return step


@pytest.mark.parametrize("over", ["vocab", "tokens"])
def test_logits_are_computed_once_and_never_in_one_array(over):
    x, w = (jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in (HIDDEN, KERNEL))
    step = functools.partial(gradient_of, over=over, chunks=2)
    plan = mp.plan(step, x, w, LABELS, mesh="data=1", layout="batch: data", dims=DIMS)
    ops = list(plan.program.root.walk())
    assert sum(op.name == "dot_general" and len(op.outs[0].shape) > 1 for op in ops) == 3  # logits, and two gradients
    made = [(v.shape, v.aval.dtype) for op in ops if not op.frames for v in op.outs if len(v.shape) > 2]
    largest = max(np.prod(shape) for shape, dtype in made if dtype == jnp.float32 and EMBED not in shape)
    assert largest == BATCH * SEQ * VOCAB / 2


def test_chunks_of_the_vocabulary_are_gathered_and_scattered_separately():
    options = {"mesh": "data=4", "layout": "batch: data; embed: data", "dims": DIMS}
    plan = mp.plan(step_over("vocab"), HIDDEN, KERNEL, LABELS, **options)
    sent = {(c.op, c.bytes, c.count) for c in plan.collectives if c.bytes > 500}
    chunk = KERNEL.nbytes / 2 * 3 / 4
    assert sent == {("all-gather", chunk, 2), ("reduce-scatter", chunk, 2)}


@pytest.mark.parametrize(
    ("layout", "over", "lowering"),
    [
        ("batch: data; embed: data; vocab: model", "vocab", "shard_map"),
        ("seq: data; embed: model", "vocab", "jit"),
        ("batch: data; vocab: model; seq: model; embed: data", "tokens", "shard_map"),
    ],
)
def test_no_layout_changes_it_or_gathers_a_split_vocabulary(layout, over, lowering):
    options = {"layout": layout, "mesh": "data=2, model=4", "dims": DIMS}
    mp.check(step_over(over), HIDDEN, KERNEL, LABELS, **options, lowerings=(lowering,))
    plan = mp.plan(step_over(over), HIDDEN, KERNEL, LABELS, **options)
    gathers = [c for c in plan.collectives if c.op == "all-gather" and "model" in c.axes and "vocab" in c.dims]
    assert not gathers or "vocab: model" not in layout


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (((HIDDEN, KERNEL.T), LABELS), {}),
        ((HIDDEN, LABELS[:, :4]), {}),
        ((HIDDEN, LABELS.astype(np.float32)), {}),
        (((HIDDEN, KERNEL), LABELS), {"over": "words"}),
    ],
)
def test_what_does_not_fit_is_refused(args, options):
    with pytest.raises(UnsupportedError, match="cross_entropy"):
        mp.layers.cross_entropy(*args, **options)
