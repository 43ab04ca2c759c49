"""Lemmas: a program of devices that is proven equals the function on 8 devices, and is not proven with other specs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.sharding import PartitionSpec as P

from meshpar._src.verify.prove import prove_program

RNG = np.random.default_rng(0)


def own(index, n):
    """(an index in the device's block of ``n`` rows, whether it is there)."""
    local = index - lax.axis_index("data") * n
    return local, (local >= 0) & (local < n)


def rows_of(table, shift=0):
    """Rows of a table that is sharded over `data`, as a partial sum."""
    local, mine = own(SLOTS + shift, table.shape[0])
    rows = table.at[jnp.where(mine, local, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return lax.psum(jnp.where(mine[:, None], rows, 0.0), "data")


def written_to(cache, new, shift: int | np.ndarray = 0):
    """A cache that is sharded over `data` along its slots, with rows at some of them."""
    local, mine = own(SLOTS + shift, cache.shape[0])
    return cache.at[jnp.where(mine, local, cache.shape[0])].set(new, mode="drop", wrap_negative_indices=False)


def bits_of(x, step=2):
    """The bits of the device's rows, which begin at ``step`` times its index, of [8, 4]."""
    row = jnp.arange(2, dtype=jnp.uint32) + lax.axis_index("data").astype(jnp.uint32) * np.uint32(step)
    count = row[:, None] * np.uint32(4) + jnp.arange(4, dtype=jnp.uint32)
    words = jax.random.key_data(jax.random.key(3))
    high, low = threefry2x32_p.bind(words[0], words[1], jnp.zeros_like(count), count)
    return x + (high ^ low).astype(jnp.float32)


def scan_of(x, w, reduce=lambda x: x):
    def body(carry, row):
        carry = jnp.tanh(carry + reduce(row @ w))
        return carry, carry * 2

    return lax.scan(body, jnp.zeros(w.shape[1], x.dtype), x)


SLOTS = np.array([3, 15, 0, 9], np.int32)
psum = functools.partial(lax.psum, axis_name="data")
gather = functools.partial(lax.all_gather, axis_name="data", tiled=True)
SWAPPED = [(j * 4 + i, i * 2 + j) for i in range(4) for j in range(2)]
CASES = {
    "elementwise": (lambda x: jnp.exp(x) * 2 + x, None, [P("data")], P("data"), [(8, 4)], P()),
    "contraction": (lambda x, w: x @ w, lambda x, w: psum(x @ w), [P(None, "data"), P("data")], P(), [(4, 8), (8, 6)], P("data")),
    "scatter of a sum": (
        lambda x, w: x @ w, lambda x, w: lax.psum_scatter(x @ w, "data", scatter_dimension=0, tiled=True),
        [P(None, "data"), P("data")], P("data"), [(8, 8), (8, 6)], P(None),
    ),
    "maximum": (lambda x: jnp.max(x, 0), lambda x: lax.pmax(jnp.max(x, 0), "data"), [P("data")], P(), [(8, 4)], P("data")),
    "gather": (lambda x: jnp.cumsum(x, 0), lambda x: jnp.cumsum(gather(x), 0), [P("data")], P(), [(8, 4)], P("data")),
    "all-to-all": (
        lambda x: jnp.sort(x, 0), lambda x: jnp.sort(lax.all_to_all(x, "data", 1, 0, tiled=True), 0),
        [P("data")], P(None, "data"), [(8, 8)], P("data"),
    ),
    "iota": (
        lambda x: x * jnp.arange(8).astype(jnp.float32)[:, None],
        lambda x: x * (jnp.arange(2) + lax.axis_index("data") * 2).astype(jnp.float32)[:, None],
        [P("data")], P("data"), [(8, 4)], P(),
    ),
    "block": (
        lambda x: jnp.exp(x), lambda x: lax.dynamic_slice_in_dim(jnp.exp(x), lax.axis_index("data") * 2, 2, 0),
        [P()], P("data"), [(8, 4)], P(),
    ),
    "reshape": (lambda x: x.reshape(2, 4, 3), lambda x: x.reshape(-1, 4, 3), [P("model")], P("model"), [(8, 3)], P(None, "model")),
    "permutation": (
        lambda x: x + 1, lambda x: lax.ppermute(x, ("data", "model"), SWAPPED) + 1,
        [P(("data", "model"))], P(("model", "data")), [(8, 4)], P(("data", "model")),
    ),
    "rows of a table": (
        lambda x: x.at[SLOTS].get(mode="promise_in_bounds", wrap_negative_indices=False), rows_of,
        [P("data")], P(), [(16, 3)], P("data"),
    ),
    "slots of a cache": (
        lambda x, new: x.at[SLOTS].set(new, mode="drop", wrap_negative_indices=False), written_to,
        [P("data"), P()], P("data"), [(16, 3), (4, 3)], P(),
    ),
    "random bits": (
        lambda x: x + jax.random.bits(jax.random.key(3), (8, 4)).astype(jnp.float32), bits_of,
        [P("data")], P("data"), [(8, 4)], P(),
    ),
    "scan": (scan_of, lambda x, w: scan_of(x, w, psum), [P(None, "data"), P("data")], P(), [(5, 8), (8, 6)], P("data")),
}  # fmt: skip
WRONG = {
    "rows of a table": [lambda x: rows_of(x, 1)],
    "slots of a cache": [
        lambda x, new: written_to(x, new, 1),
        lambda x, new: written_to(x, new, np.arange(4, dtype=np.int32)),
    ],
    "random bits": [lambda x: bits_of(x, 1), lambda x: bits_of(x, 0)],
    "block": [lambda x: jnp.exp(x)[:2]],
    "iota": [lambda x: x * jnp.arange(2).astype(jnp.float32)[:, None]],
    "maximum": [lambda x: jnp.max(x, 0), lambda x: psum(jnp.max(x, 0)), lambda x: -lax.pmax(-jnp.max(x, 0), "data")],
    "contraction": [lambda x, w: lax.pmax(x @ w, "data"), lambda x, w: x @ w, lambda x, w: psum(x @ w) * 2],
}
"""Local forms that compute something else."""


def programs(name, out=None, local=None):
    """(the function, its sharded form, arguments)."""
    written, right, ins, outs, shapes, _ = CASES[name]
    local = local or right
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    where = {"mesh": mesh, "in_specs": tuple(ins), "out_specs": outs if out is None else out, "check_vma": False}
    args = [jnp.asarray(RNG.integers(-3, 4, s), jnp.float32) for s in shapes]
    return written, jax.shard_map(local or written, **where), args


def proof_of(written, sharded, args):
    return prove_program(jax.make_jaxpr(written)(*args), jax.make_jaxpr(sharded)(*args))


@pytest.mark.parametrize("name", CASES)
def test_a_proven_program_equals_the_function(name):
    written, sharded, args = programs(name)
    assert proof_of(written, sharded, args).proven
    for found, wanted in zip(jax.tree.leaves(jax.jit(sharded)(*args)), jax.tree.leaves(written(*args)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("scan",)])
def test_a_program_with_other_specs_is_not_proven(name):
    written, *_, wrong = CASES[name]
    _, sharded, args = programs(name, wrong)
    try:
        proof = proof_of(written, sharded, args)
    except (ValueError, AssertionError):  # shapes that JAX rejects
        return
    assert not proof.proven


@pytest.mark.parametrize(("name", "local"), [(name, local) for name, locals in WRONG.items() for local in locals])
def test_a_local_form_that_computes_something_else_is_not_proven(name, local):
    written, sharded, args = programs(name, local=local)
    assert not np.array_equal(jax.jit(sharded)(*args), written(*args))
    assert not proof_of(written, sharded, args).proven


def test_the_cause_has_the_op_the_reason_and_the_line():
    where = {"mesh": jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), "check_vma": False}
    local = jax.shard_map(lambda x: jnp.tanh(x.sum(0)), in_specs=P("data"), out_specs=P(), **where)
    proof = proof_of(lambda x: jnp.tanh(x.sum(0)), local, [jnp.ones((8, 4))])
    assert proof.status == "refused"
    (cause,) = proof.failed
    assert (cause.op, cause.refused) == ("tanh", True)
    assert "partial over data" in cause.reason
    assert "test_lemmas.py" in cause.line


def test_a_result_that_is_another_value_is_a_cause_without_equations():
    where = {"mesh": jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), "check_vma": False}
    local = jax.shard_map(lambda x: jnp.sin(x), in_specs=P("data"), out_specs=P("data"), **where)
    proof = proof_of(jnp.cos, local, [jnp.ones((8, 4))])
    assert (proof.status, proof.share) == ("not verified", 1.0)
    assert proof.failed == {proof.results[0].cause: 0}
    assert "is not the value of the function as written: it has sin(" in str(proof)
    assert "in place of cos(" in str(proof)


def test_an_op_with_a_body_is_no_call():
    """A reduction by a function of its own has no lemma, in spite of its jaxpr."""
    mean = lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a * 2 + b, (0,))  # noqa: E731
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    local = jax.shard_map(mean, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    proof = proof_of(mean, local, [jnp.ones(8)])
    assert proof.status == "not verified"
    assert {c.reason for c in proof.failed if "as written" not in c.reason} == {"no lemma"}
