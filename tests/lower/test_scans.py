"""Ops that work along a split dim: running sums, top-k, places of extrema, losses over a split vocabulary."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import meshpar as mp
from meshpar.verify.hlo import collectives

RNG = np.random.default_rng(1)
MESHES = {"data=4, model=2": "seq: data", "data=2, model=2, idle=2": "seq: data+model"}
LOWERINGS = ["shard_map", "jit"]


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


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


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("mesh", MESHES)
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


def test_what_is_no_number_stays_where_it_is():
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
    """It is made of slices: those that do not divide are gathered, and named; first elements come from who has them."""
    x = normal(2, 16, 3)

    def step(x):
        return lax.associative_scan(lambda a, b: a * 0.5 + b, x, axis=1)

    for lowering in LOWERINGS:
        run = mp.jit(
            step, mesh=mp.mesh("data=4, model=2"), layout="seq: data", dims={"x": "batch seq embed"}, lowering=lowering
        )
        np.testing.assert_allclose(run(x), step(x), rtol=1e-6)
    plan = run.plan(x)
    gathers = [c for c in plan.collectives if c.op == "all-gather"]
    assert {c.cause for c in gathers} == {"slice needs all of `seq`, which `seq: data` splits"}
    row = 2 * 3 * 4
    assert sorted(c.bytes for c in gathers) == [
        3 / 4 * n * row for n in (4, 4, 8, 8, 16)
    ]  # once a value, not once a slice
    assert {(c.op, c.bytes) for c in plan.collectives if c not in gathers} == {("all-reduce", 2 * row * 3 / 4)}


def choices(x, bits):
    """Integer results, which must be equal to the last bit."""
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


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_top_k_and_places_are_those_of_the_whole(lowering):
    x = normal(6, 32)
    x[1, 7], x[1, 20], x[2] = np.nan, np.nan, 1.0
    x[3, ::2], x[3, 1::2], x[4, 9] = 0.0, -0.0, -np.inf
    bits = RNG.integers(-128, 127, (6, 32)).astype(np.int8)
    dims = {"x": "batch seq", "bits": "batch seq"}
    want = jax.jit(choices)(x, bits)
    for mesh, layout in MESHES.items():
        got = mp.jit(choices, mesh=mp.mesh(mesh), layout=layout, dims=dims, lowering=lowering)(x, bits)
        for name in want:
            for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
                assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), name


def test_gradient_of_top_k():
    x = normal(4, 32)

    def step(x):
        return jax.grad(lambda x: (lax.top_k(x, 5)[0] ** 2).sum())(x)

    for lowering in LOWERINGS:
        run = mp.jit(
            step, mesh=mp.mesh("data=4, model=2"), layout="seq: data", dims={"x": "batch seq"}, lowering=lowering
        )
        np.testing.assert_allclose(run(x), step(x), rtol=1e-6)


def sent(fn, *args, layout="seq: data", dims="batch seq", mesh="data=4, model=2"):
    dims = dims if isinstance(dims, dict) else {"x": dims}
    run = mp.jit(fn, mesh=mp.mesh(mesh), layout=layout, dims=dims, lowering="shard_map")
    plan = run.plan(*args)
    planned, found = Counter(), Counter()
    for c in plan.collectives:
        planned[c.op, c.bytes] += c.count
    for c in collectives(run.lower(*args).compile().as_text()):
        found[c.op, c.bytes] += c.count
    assert planned == found
    return plan, found


GATHER = 6 * 4 * 3  # bytes that a device sends when the others get one float32[6] from it, or four bytes a row


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: lax.cumsum(x, 1), {("all-gather", GATHER): 1}),
        (lambda x: lax.cumlogsumexp(x, 1, reverse=True), {("all-gather", GATHER): 1}),
        (lambda x: lax.top_k(x, 3), {("all-gather", 3 * GATHER): 2}),  # values, and places
        (lambda x: lax.top_k(x, 4), {("all-gather", 8 * GATHER): 1}),  # candidates would be as much as all values
        (lambda x: jnp.argmax(x, 1), {("all-gather", GATHER): 2}),
        (lambda x: jnp.argmax(x > 0, 1), {("all-gather", GATHER / 4): 1, ("all-gather", GATHER): 1}),
        (lambda x: jnp.sort(x, 1), {("all-gather", 8 * GATHER): 1}),
    ],
)
def test_sends_totals_and_candidates(fn, expected):
    _, found = sent(fn, normal(6, 32))
    assert found == expected


def test_what_is_gathered_is_named():
    plan, _ = sent(lambda x: jnp.sort(x, 1), normal(6, 32))
    (gather,) = plan.collectives
    assert gather.cause == "sort needs all of `seq`, which `seq: data` splits"
    plan, _ = sent(lambda x: lax.cumsum(x, 1), normal(6, 32))
    (gather,) = plan.collectives
    assert gather.cause == "`data` splits a dim that cumsum works along: the total of every block"


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


def test_what_is_made_from_no_data_is_made_whole():
    """Nothing is sent for a running count of ones."""
    plan, found = sent(lambda x: x + jnp.cumsum(jnp.ones(32)), normal(6, 32))
    assert not found
    assert not plan.collectives
