"""Causes of collectives: each once, without a dim that loses an axis to itself, in the names that users know."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from arrays import f32
from flax import linen as nn
from jax import lax

import meshpar as mp


@functools.cache
def causes(fn, shapes, dims, layout, mesh="data=2, model=4"):
    names = dict(pair.split(": ") for pair in dims.split("; "))
    args = [f32(*shape) for shape in shapes]
    plan = mp.plan(fn, *args, mesh=mesh, layout=layout, dims=names)
    return [(c.op, c.cause, c.dims) for c in plan.collectives]


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loss(x, w):
    return jax.grad(lambda w: jnp.sum(conv(x, w) ** 2))(w)


def rename(x):
    return mp.rename(mp.named(x, "choice embed"), choice="expert")


CASES = [
    (conv, ((8, 16, 16, 4), (3, 3, 4, 8)), "x: batch height width in; w: _ _ in out", "height: model; batch: data"),
    (loss, ((8, 16, 16, 4), (3, 3, 4, 8)), "x: batch height width in; w: _ _ in out", "height: model; batch: data"),
    (lambda x: jnp.split(x, 2, 1), ((8, 24),), "x: batch mlp", "mlp: model; batch: data"),
    (lambda x: jnp.einsum("bqd,bkd->bqk", x, x), ((8, 16, 4),), "x: batch seq d", "batch: data; seq: model"),
    (lambda x: jnp.cumsum(x, 1), ((8, 16),), "x: batch seq", "batch: data; seq: model"),
    (rename, ((8, 16),), "x: _ _", "choice: model; expert: data; embed: model"),
    (lambda x: x.reshape(4, 2, 16).reshape(8, 16).T, ((8, 16),), "x: batch seq", "batch: data; seq: model"),
    (lambda x: x.sum(), ((8, 16),), "x: batch seq", "batch: data; seq: model"),
    (lambda x, w: jnp.split(x @ w, 3, -1), ((8, 4, 16), (16, 96)), "x: batch seq embed; w: embed heads",
     "batch: data; heads: model"),
    (lambda x, w: jnp.sort(x @ w), ((8, 4, 16), (16, 96)), "x: batch seq embed; w: embed heads", "batch: data; heads: model"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_causes_are_sentences(case):
    for _, cause, dims in causes(*case):
        clauses = re.split(r"; | and ", cause)
        assert len(clauses) == len(set(clauses)), cause
        other = re.search(r"(?<!another )`(\w+)` already takes .*, which `(\w+)\?*: \S+` splits", cause)
        assert other is None or other[1] != other[2], cause
        assert not re.search(r" so$|rename_dims|dot_general|this \w+ of", cause), cause
        assert "×" not in dims, dims
        assert set(re.findall(r"`(\w+\?*: \S+)`", cause)) <= set(case[3].split("; ")), cause
        for owner, axis in re.findall(r"`(\w+)` already takes `(\w+)`", cause):
            assert f"{owner}: {axis}" in case[3], cause


def test_an_axis_of_one_device_is_no_cause():
    """A rule list for many meshes names axes that this mesh has with size 1."""
    found = causes(
        lambda x, w: (x @ w).sum(),
        ((8, 16), (16, 32)),
        "x: batch embed; w: embed mlp",
        "batch: data+expert; embed: model+expert; mlp: one",
        "data=2, model=4, expert=1, one=1",
    )
    assert {op for op, _, _ in found} == {"all-reduce"}
    assert not [
        cause for _, cause, _ in found if "expert" in cause.replace("data+expert", "").replace("model+expert", "")
    ]
    assert not [cause for _, cause, _ in found if "`mlp" in cause]


def test_a_conv_and_its_halo():
    found = causes(*CASES[0])
    permutes = [(cause, dims) for op, cause, dims in found if op == "collective-permute"]
    assert permutes
    for cause, dims in permutes:
        assert cause.startswith("`height: model` splits `height`, and the convolution works along it: ")
        assert dims == "batch height width in"


def test_a_gradient_that_is_partial_over_two_dims():
    (cause,) = {cause for op, cause, _ in causes(*CASES[1]) if op == "all-reduce"}
    splits = re.search(
        r"^each device has only a part of the sum \((.+)\), so the parts are added up on every device$", cause
    )
    assert splits is not None
    assert set(splits[1].split(", ")) == {"`batch: data` splits `batch`", "`height: model` splits `height`"}


def test_two_dims_of_one_name():
    (cause,) = {cause for op, cause, _ in causes(*CASES[3]) if op == "all-gather"}
    assert (
        cause
        == "another `seq` already takes `model`, so each device first fetches all of `seq`, which `seq: model` splits"
    )


def test_a_renamed_dim_is_stored_with_another_axis():
    found = causes(*CASES[5])
    assert [(op, dims) for op, _, dims in found] == [("collective-permute", "expert embed")]
    assert (
        found[0][1]
        == "mp.rename makes its result with `model` on `expert`, but the layout stores it with `model` on `embed`"
    )


def test_a_reduction():
    (cause,) = {cause for _, cause, _ in causes(*CASES[7])}
    assert "only a part of the sum (`batch: data` splits `batch`, `seq: model` splits `seq`)" in cause
    assert causes(lambda x: x.max(), *CASES[7][1:])[0][1].endswith("so the results are combined on every device")


def test_a_table_that_is_gathered_for_the_reads_of_a_loop():
    def loss_of(params, tokens):
        return jnp.mean((params["embedding"][tokens] @ params["out"]) ** 2)

    params = {"embedding": jnp.ones((64, 16)), "out": jnp.ones((16, 16))}
    dims = {"*/embedding": "vocab embed", "*/out": "embed out", "tokens": "batch seq"}

    def causes(fn):
        how = {"mesh": "data=4, model=2", "layout": "batch: data; vocab: model", "dims": dims}
        plan = mp.plan(fn, params, jnp.zeros((32, 16), int), **how)
        return {c.op: c.cause for c in plan.collectives if "`vocab: model`" in c.cause}

    def accumulated(params, tokens):
        return mp.train.accumulate_gradients(jax.value_and_grad(loss_of), 4)(params, tokens)

    assert causes(accumulated) == {
        "all-gather": "the lookup reads rows of `vocab` several times, so each device first fetches all of `vocab`, which "
        "`vocab: model` splits: adding up the rows of each read sends more"
    }
    assert "all-reduce" in causes(lambda params, tokens: loss_of(params, tokens))


def test_a_vector_that_an_elementwise_op_needs_in_full():
    shapes, dims = ((32, 16, 128), (128,)), "x: batch seq embed; s: embed"
    ((_, cause, _),) = causes(lambda x, s: x * s, shapes, dims, "batch: data; embed: data", "data=4")
    assert (
        cause == "`batch` already takes `data`, so each device first fetches all of `embed`, which `embed: data` splits"
    )


def test_the_module_of_a_collective():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, name="out")(nn.Dense(32, name="up")(x))

    model = Block()
    x = jnp.ones((8, 16))
    params = model.init(jax.random.key(0), x)
    plan = mp.plan(
        jax.grad(lambda p, x: model.apply(p, x).mean()), params, x, mesh="data=4, model=2", layout="batch: data; mlp: model",
        dims={"*/up/kernel": "embed mlp", "*/out/kernel": "mlp out", "x": "batch embed"},
    )  # fmt: skip
    assert "Block/up" in {c.module for c in plan.collectives}
