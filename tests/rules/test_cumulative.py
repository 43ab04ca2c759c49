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
from same_results import assert_as_unsharded

RNG = np.random.default_rng(1)
MESHES = {"data=4, model=2": "seq: data", "data=2, model=2, idle=2": "seq: data+model"}
OPTIONS = {"mesh": "data=4, model=2", "layout": "seq: data", "dims": {"x": "batch seq embed"}}


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


@pytest.mark.parametrize(("mesh", "lowering"), covering.each(MESHES, ["shard_map", "jit"]))
def test_running_sums(mesh, lowering):
    """Several in one program, on a mesh with an idle axis too: XLA's partitioner is wrong about some of them."""
    x = normal(2, 8, 2)

    def step(x):
        return {name: fn(x) for name, fn in RUNNING.items()}

    options = {"mesh": mesh, "layout": MESHES[mesh], "dims": {"x": "batch seq embed"}}
    assert_as_unsharded(step, x, lowerings=[lowering], **options)


def test_nan_and_infinities():
    x = normal(2, 16, 3)
    x[0, 5, 1] = np.nan
    x[1, 3, 2], x[1, 9, 0] = -np.inf, np.inf

    def step(x):
        ops = lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp
        return [op(x, axis=1, reverse=reverse) for op in ops for reverse in (False, True)]

    assert_as_unsharded(step, x, lowerings=["shard_map"], **OPTIONS)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: lax.cumsum(x, 1), {("all-gather", 3 * 6 * 4): 1}),
        (lambda x: lax.cumlogsumexp(x, 1, reverse=True), {("all-gather", 3 * 6 * 4): 1}),
        (lambda x: x + jnp.cumsum(jnp.ones(32)), {}),  # which is computed unsharded
    ],
)
def test_sends_one_total_of_each_row_and_shard(fn, expected):
    _, planned, found = planned_and_compiled(fn, normal(6, 32), layout="seq: data", dims={"x": "batch seq"})
    assert planned == found == expected
