"""Cumulative sums along a split dim: equal to the unsharded run, and only totals of shards are sent."""

import functools

import arrays
import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives_of import planned_and_compiled
from jax import lax

import meshpar as mp

RNG = np.random.default_rng(1)
MESHES = {"data=4, model=2": "seq: data", "data=2, model=2, idle=2": "seq: data+model"}
LOWERINGS = ["shard_map", "jit"]


normal = functools.partial(arrays.normal, RNG)


def with_gradient(fn):
    def run(x):
        weights = jnp.cos(jnp.arange(x.size, dtype=np.float32)).reshape(x.shape)
        y, back = jax.vjp(lambda x: fn(x, axis=1), x)
        return y, *back(weights)

    return run


RUNNING = {
    "cumsum": with_gradient(lax.cumsum),
    "cumsum, reversed": with_gradient(lambda x, axis: lax.cumsum(x, axis, reverse=True)),
    "cumprod": with_gradient(lax.cumprod),  # an associative scan, differentiated
    "cumlogsumexp": lambda x: (lax.cumlogsumexp(x, 1), lax.cumlogsumexp(x, 1, reverse=True)),
    "integers": lambda x: jnp.cumsum((x * 10).astype(np.int32), 1),
    "twice": lambda x: lax.cumsum(x, 1) + lax.cumsum(x, 1, reverse=True),
}


@pytest.mark.parametrize(("mesh", "lowering"), covering.each(MESHES, LOWERINGS))
def test_running_sums(mesh, lowering):
    """Several in one program, on a mesh with an idle axis too: XLA's partitioner is wrong about some of them."""
    x = normal(2, 8, 2)

    def step(x):
        return {name: fn(x) for name, fn in RUNNING.items()}

    run = mp.jit(step, mesh=mp.mesh(mesh), layout=MESHES[mesh], dims={"x": "batch seq embed"}, lowering=lowering)
    want, got = jax.jit(step)(x), run(x)
    for name in RUNNING:
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=name)


def test_nan_and_infinities():
    x = normal(2, 16, 3)
    x[0, 5, 1] = np.nan
    x[1, 3, 2], x[1, 9, 0] = -np.inf, np.inf

    def step(x):
        ops = lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp
        return [op(x, axis=1, reverse=reverse) for op in ops for reverse in (False, True)]

    run = mp.jit(
        step, mesh=mp.mesh("data=4, model=2"), layout="seq: data", dims={"x": "batch seq embed"}, lowering="shard_map"
    )
    for a, b in zip(run(x), jax.jit(step)(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_an_associative_scan_of_the_users():
    """It consists of slices. One indivisible slice is all-gathered, with a cause; the others exchange single rows."""
    x = normal(2, 16, 3)

    def step(x):
        return lax.associative_scan(lambda a, b: a * 0.5 + b, x, axis=1)

    for lowering in LOWERINGS:
        run = mp.jit(
            step, mesh=mp.mesh("data=4, model=2"), layout="seq: data", dims={"x": "batch seq embed"}, lowering=lowering
        )
        np.testing.assert_allclose(run(x), jax.jit(step)(x), rtol=1e-6)
    plan = run.plan(x)
    gathers = [c for c in plan.collectives if c.op == "all-gather"]
    assert {c.cause for c in gathers} == {"slice needs all of `seq`, which `seq: data` splits"}
    row = 2 * 3 * 4
    assert [c.bytes for c in gathers] == [3 / 4 * 4 * row]
    assert {(c.op, c.bytes) for c in plan.collectives if c not in gathers} == {
        ("all-reduce", 2 * row * 3 / 4), ("collective-permute", row),
    }  # fmt: skip
    assert plan.bytes_sent <= 400


def sent(fn, x):
    plan, planned, compiled = planned_and_compiled(fn, x, layout="seq: data", dims={"x": "batch seq"})
    assert planned == compiled
    return plan, compiled


GATHER = 6 * 4 * 3  # bytes that a device sends when the others get one float32[6] from it


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: lax.cumsum(x, 1), {("all-gather", GATHER): 1}),
        (lambda x: lax.cumlogsumexp(x, 1, reverse=True), {("all-gather", GATHER): 1}),
    ],
)
def test_sends_totals(fn, expected):
    _, found = sent(fn, normal(6, 32))
    assert found == expected


def test_constants_are_computed_unsharded():
    """Nothing is sent for the cumulative sum of ones."""
    plan, found = sent(lambda x: x + jnp.cumsum(jnp.ones(32)), normal(6, 32))
    assert not found
    assert not plan.collectives
