"""Causes of collectives: each once, without a dim that loses an axis to itself, in the names that users know."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from arrays import f32
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
    (lambda x: x.max(), ((8, 16),), "x: batch seq", "batch: data; seq: model"),
    (lambda x, s: x * s, ((32, 16, 128), (128,)), "x: batch seq embed; s: embed", "batch: data; embed: data", "data=4"),
    (lambda x, w: jnp.split(x @ w, 3, -1), ((8, 4, 16), (16, 96)), "x: batch seq embed; w: embed heads",
     "batch: data; heads: model"),
    (lambda x, w: jnp.sort(x @ w), ((8, 4, 16), (16, 96)), "x: batch seq embed; w: embed heads", "batch: data; heads: model"),
]  # fmt: skip
WORDED = [
    (0, "collective-permute", r"`height: model` splits `height`, and the convolution works along it: .*"),
    (1, "all-reduce", r"each device has only a part of the sum \(`(?:height: model` splits `height|batch: data` splits `batch)`, "
     r"`(?:batch: data` splits `batch|height: model` splits `height)`\), so the parts are added up on every device"),
    (3, "all-gather", r"another `seq` already takes `model`, so each device first fetches all of `seq`, which `seq: model` splits"),
    (5, "collective-permute", r"mp.rename makes its result with `model` on `expert`, but the layout stores it with `model` on "
     r"`embed`"),
    (7, "all-reduce", r".*only a part of the sum \(`batch: data` splits `batch`, `seq: model` splits `seq`\).*"),
    (8, "all-reduce", r".*so the results are combined on every device"),
    (9, "all-gather", r"`batch` already takes `data`, so each device first fetches all of `embed`, which `embed: data` splits"),
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


@pytest.mark.parametrize(("case", "kind", "wording"), WORDED)
def test_the_cause_names_the_rules_and_the_op(case, kind, wording):
    found = [cause for op, cause, _ in causes(*CASES[case]) if op == kind]
    assert found
    assert all(re.fullmatch(wording, cause) for cause in found), found
