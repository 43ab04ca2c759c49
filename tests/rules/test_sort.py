"""Sorting and selection along a split dim: bitwise equal to the unsharded run, and only candidates are sent."""

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

import meshpar as mp

RNG = np.random.default_rng(1)
MESHES = {"data=4, model=2": "seq: data", "data=2, model=2, idle=2": "seq: data+model"}


normal = functools.partial(arrays.normal, RNG)


def choices(x, bits):
    """Integer results, which must be bitwise equal."""
    return {
        "top 3": lax.top_k(x, 3),
        "top 8, more than a block has": lax.top_k(x, 8),
        "all": lax.top_k(x, 32),
        "of few values": lax.top_k(jnp.round(x), 3),
        "of bytes": lax.top_k(bits, 3),
        "along the first dim": lax.top_k(x.T, 2),
        "argmax": jnp.argmax(x, 1),
        "argmin": jnp.argmin(x, 1),
        "argmax of few values": jnp.argmax(jnp.round(x), 1),
        "argmin of booleans": jnp.argmin(x > 0, 1),
        "argmax of bytes": jnp.argmax(bits, 1, keepdims=True),
        "xor": lax.reduce_xor_p.bind(bits, axes=(1,)),
        "or": lax.reduce_or_p.bind(bits, axes=(1,)),
        "sorted": jnp.sort(x, 1),
        "order": jnp.argsort(jnp.round(x), 1, descending=True),
        "two keys": lax.sort((jnp.round(x), bits), dimension=1, num_keys=2),
    }


@pytest.mark.parametrize(("mesh", "lowering"), covering.each(MESHES, ["shard_map", "jit"]))
def test_top_k_and_argmax_equal_the_unsharded_run(mesh, lowering):
    x = normal(6, 32)
    x[1, 7], x[1, 20], x[2] = np.nan, np.nan, 1.0
    x[3, ::2], x[3, 1::2], x[4, 9] = 0.0, -0.0, -np.inf
    bits = RNG.integers(-128, 127, (6, 32)).astype(np.int8)
    dims = {"x": "batch seq", "bits": "batch seq"}
    options = {"mesh": mesh, "layout": MESHES[mesh], "dims": dims}
    assert_as_unsharded(choices, x, bits, lowerings=[lowering], rtol=0, atol=0, **options)


def test_gradient_of_top_k():
    step = jax.grad(lambda x: (lax.top_k(x, 5)[0] ** 2).sum())
    options = {"mesh": "data=4, model=2", "layout": "seq: data", "dims": {"x": "batch seq"}}
    assert_as_unsharded(step, normal(4, 32), rtol=1e-6, atol=0, **options)


GATHER = 6 * 4 * 3  # bytes that a device sends when the others get one float32[6] from it, or four bytes a row


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: lax.top_k(x, 3), {("all-gather", 3 * GATHER): 2}),  # values, and places
        (lambda x: lax.top_k(x, 4), {("all-gather", 8 * GATHER): 1}),  # candidates would be as much as all values
        (lambda x: jnp.argmax(x, 1), {("all-gather", GATHER): 2}),
        (lambda x: jnp.argmax(x > 0, 1), {("all-gather", GATHER / 4): 1, ("all-gather", GATHER): 1}),
        (lambda x: jnp.sort(x, 1), {("all-gather", 8 * GATHER): 1}),
    ],
)
def test_sends_candidates(fn, expected):
    _, planned, found = planned_and_compiled(fn, normal(6, 32), layout="seq: data", dims={"x": "batch seq"})
    assert planned == found == expected


def test_results_that_nobody_reads_are_not_resharded():
    """An argsort makes the sorted array and its bits as well."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    step = mp.jit(lambda x: jnp.argsort(jnp.round(x), 1), mesh="data=4", layout="cols: data", dims={"x": "_ cols"},
                  lowering="shard_map")  # fmt: skip
    assert [c.op for c in step.plan(x).collectives] == ["all-to-all", "all-to-all"]
    np.testing.assert_array_equal(step(x), jnp.argsort(jnp.round(x), 1))
