"""Rules whose axes do not divide a dim of intermediate values: the warning, its bytes and the mesh that it proposes."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from arrays import f32

import meshpar as mp

HEADS, HEAD_DIM, EMBED = 4, 32, 128
DIMS = {"w/*": "embed heads", "x": "batch seq embed"}
LAYOUT = "batch: data; heads: model"


def attention(w, x):
    """Scores of attention with fused kernels ``[embed, heads * head_dim]``."""
    q, k = ((x @ w[name]).reshape(*x.shape[:2], HEADS, HEAD_DIM) for name in "qk")
    return jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))


def arguments(batch=8, seq=128):
    kernel = f32(EMBED, HEADS * HEAD_DIM)
    return {"q": kernel, "k": kernel}, f32(batch, seq, EMBED)


def warnings_of(mesh, layout=LAYOUT, **sizes):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = mp.plan(attention, *arguments(**sizes), mesh=mesh, layout=layout, dims=DIMS)
    return plan, [str(w.message) for w in said if w.category is mp.errors.IndivisibleWarning]


@pytest.mark.parametrize(("mesh", "proposed"), [("data=1, model=8", "data=2, model=4"), ("model=8", "model=4")])
def test_more_shards_than_heads_warn_with_the_bytes_and_a_mesh_that_divides(mesh, proposed):
    layout = LAYOUT if "data" in mesh else "heads: model"
    plan, (said,) = warnings_of(mesh, layout)
    scores = 2 * 8 * HEADS * 128 * 128 * 4 * 7 / 8  # an all-reduce of the scores: they contract the sharded head_dim
    assert plan.bytes_sent >= scores
    assert f'mesh="{proposed}"' in said
    assert f"`heads` of size {HEADS} does not divide over model=8" in said
    assert f"`heads` a multiple of {8}" in said
    better, none = warnings_of(proposed, layout)
    assert none == []
    assert better.bytes_sent < plan.bytes_sent / 2
    (note,) = (n for n in plan.notes if "does not divide" in n)
    assert re.search(r"`heads: model` does not divide `heads` of 4, .*; model of 2 or 4 divides it", note)


@pytest.mark.parametrize(("seq", "mesh", "shifts"), [(127, "model=8", True), (125, "data=2, model=4", False)])
def test_a_dim_that_labels_made_shorter_by_one_says_how_to_keep_it(seq, mesh, shifts):
    def next_token(w, x):
        return attention(w, x[:, :seq]).sum()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mp.plan(jax.grad(next_token), *arguments(), mesh=mesh, layout="seq: model", dims=DIMS)
    (text,) = [str(w.message) for w in said if w.category is mp.errors.IndivisibleWarning]
    assert ("jnp.roll" in text) == shifts


def test_no_warning_where_little_is_sent():
    plan, said = warnings_of("data=1, model=8", batch=2, seq=16)
    assert said == []
    assert any("does not divide" in n for n in plan.notes)


def test_a_step_warns_once():
    step = mp.jit(attention, mesh="data=1, model=8", layout=LAYOUT, dims=DIMS)
    w, x = (jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), a) for a in arguments())
    with pytest.warns(mp.errors.IndivisibleWarning) as said:
        step(w, x)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(w, x)


@pytest.mark.parametrize(("microbatches", "warns"), [(2, False), (4, True), (8, True)])
def test_microbatches_with_fewer_rows_than_devices(microbatches, warns):
    def loss(w, x):
        return jnp.square(x @ w).mean()

    def step(w, x):
        value, gradient = mp.train.accumulate_gradients(jax.value_and_grad(loss), microbatches)(w, x)
        return w - 0.1 * gradient, value

    dims = {"x": "batch _", "w": "embed _"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mp.plan(step, f32(16, 16), f32(16, 16), mesh="data=8", layout="batch: data; embed: data", dims=dims)
    rows = 16 // microbatches
    if warns:
        (text,) = [str(w.message) for w in said if w.category is mp.errors.IndivisibleWarning]
        assert f"`batch` of 16 is divided into {microbatches} microbatches of {rows}" in text
        assert "at most 2 microbatches" in text
        assert f"make `batch` a multiple of {microbatches * 8}" in text
    else:
        assert not said
