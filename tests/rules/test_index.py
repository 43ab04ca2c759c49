"""Lookups along a dim that is split: an embedding, the logits of the targets."""

import functools
from collections import Counter

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives_of import planned_and_compiled

import meshpar as mp

RNG = np.random.default_rng(1)
LOWERINGS = ["shard_map", "jit"]


normal = functools.partial(arrays.normal, RNG)


def loss(p, tokens):
    x = p["table"][tokens]
    logits = jnp.tanh(x) @ p["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean() - picked.mean()


def test_losses_and_lookups_over_a_split_vocabulary_stay_split():
    p = {"table": normal(32, 8), "head": normal(8, 32)}
    tokens = RNG.integers(0, 32, (4, 6)).astype(np.int32)
    dims = {"p/table": "vocab embed", "p/head": "embed vocab", "tokens": "batch seq"}
    step = jax.value_and_grad(loss)
    want = jax.jit(step)(p, tokens)
    for lowering in LOWERINGS:
        run = mp.jit(
            step, mesh=mp.mesh("data=4, model=2"), layout="batch: model; vocab: data", dims=dims, lowering=lowering
        )
        for a, b in zip(jax.tree.leaves(run(p, tokens)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    plan = run.plan(p, tokens)
    assert Counter(c.op for c in plan.collectives if c.axes == ("data",)).keys() == {"all-reduce"}
    assert not any("vocab" in c.dims and "data" in c.axes for c in plan.collectives)


def definitions(a, q, x):
    """Functions that newer JAX keeps as one primitive with a definition, and spells out when it lowers."""
    rows, columns = jnp.nonzero(x > 0, size=12, fill_value=-1)
    return {
        "left": jnp.searchsorted(a, q),
        "right, by sorting": jnp.searchsorted(a, q, side="right", method="sort"),
        "batch": jax.vmap(jnp.searchsorted)(jnp.stack([a, a + 1]), q[:2]),
        "nonzero": (rows, columns),
        "frexp": jnp.frexp(x),
        "ldexp": jnp.ldexp(x, jnp.int32(3)),
    }


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("layout", ["rows: data; columns: model", "bins: data; columns: model", "rows: data+model"])
def test_primitives_that_hold_a_definition(layout, lowering):
    a, q, x = np.sort(normal(16)), normal(8, 4), normal(8, 4)
    q[0], q[1, 0] = a[3], np.nan
    run = mp.jit(
        definitions,
        mesh=mp.mesh("data=4, model=2"),
        layout=layout,
        dims={"a": "bins", "q": "rows columns", "x": "rows columns"},
        lowering=lowering,
    )
    got = run(a, q, x)
    assert np.array_equal(got["left"], np.searchsorted(a, q))
    assert np.array_equal(got["right, by sorting"], np.searchsorted(a, q, side="right"))
    assert np.array_equal(got["batch"], [np.searchsorted(a, q[0]), np.searchsorted(a + 1, q[1])])
    for ours, theirs in zip(got["nonzero"], np.nonzero(x > 0), strict=True):
        assert np.array_equal(ours, np.concatenate([theirs, np.full(12, -1)])[:12])
    for ours, theirs in zip(got["frexp"], np.frexp(x), strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(got["ldexp"], np.ldexp(x, 3))


def test_a_search_gathers_the_sorted_array_once():
    a, q = np.sort(normal(16)), normal(8, 4)
    layout = "bins: data; columns: model"
    dims = {"a": "bins", "v": "rows columns"}
    _, planned, compiled = planned_and_compiled(jnp.searchsorted, a, q, layout=layout, dims=dims)
    assert planned == compiled == {("all-gather", 16 * 4 * 3 / 4): 1}
