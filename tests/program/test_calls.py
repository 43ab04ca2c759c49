"""A function sends the same under every kind of call, and calls keep their derivatives."""

import sys

import covering
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp
from meshpar._src.rules import PRIMITIVES, having
from meshpar._src.verify.hlo import collectives

WHERE = {"mesh": "data=4", "layout": "batch: data", "dims": {"x": "batch _"}}
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def stencil(x):
    return jnp.concatenate([x[1:] - x[:-1], x[:1]])


def expected(x):
    return np.concatenate([x[1:] - x[:-1], x[:1]])


def custom_jvp(fn, scale=1.0):
    function = jax.custom_jvp(fn)
    function.defjvp(lambda p, t: (function(*p), scale * jax.jvp(fn, p, t)[1]))
    return function


def custom_vjp(fn, scale=1.0):
    function = jax.custom_vjp(fn)
    function.defvjp(lambda x: (function(x), x), lambda x, g: (scale * jax.vjp(fn, x)[1](g)[0],))
    return function


def composite(fn):
    return lax.composite(fn, "test.function")


def solve(fn):
    return lambda x: lax.custom_linear_solve(lambda y: y, x, lambda _, b: fn(b), lambda _, b: b)


KINDS = {
    "jit": jax.jit,
    "remat2": jax.checkpoint,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "composite": composite,
    "custom_linear_solve": solve,
    "closed_call": None,  # JAX makes it when it differentiates a checkpoint
    "call": None,  # of jax.extend
    "nested": lambda fn: jax.jit(custom_jvp(jax.checkpoint(composite(custom_vjp(fn))))),
}
"""Primitive → what makes a call of it; None: no function of JAX's does."""


def test_all_kinds_are_known():
    assert having(lambda p: p.call) == set(KINDS) - {"nested"}


@pytest.mark.parametrize(
    ("kind", "lowering"), covering.each([None, *(k for k, make in KINDS.items() if make)], ["shard_map", "jit"])
)
def test_a_function_sends_the_same_under_every_kind_of_call(kind, lowering):
    """Two halos of one row: from the next device, and from the first one to the last."""
    function = stencil if kind is None else KINDS[kind](stencil)
    step = mp.jit(function, lowering=lowering, **WHERE)
    np.testing.assert_array_equal(step(X), expected(X))
    sent = sum(c.bytes for c in collectives(step.lower(X).compile().as_text()))
    assert step.plan(X).bytes_sent == sent == 2 * X[0].nbytes


@pytest.mark.parametrize(("kind", "lowering"), [(custom_jvp, "jit"), (custom_vjp, "shard_map")])
def test_a_call_with_slices_keeps_its_own_derivative(kind, lowering):
    """The rule returns three times the derivative of the body, which the derivative of the lowered function has to be too."""
    function = kind(stencil, 3.0)
    step = mp.jit(function, lowering=lowering, **WHERE)
    ours = jax.grad(lambda x: (step(x) ** 2).sum())(X)
    d = 6 * expected(X)
    by_hand = np.concatenate([[d[-1]], d[:-1]]) - np.concatenate([d[:-1], [0 * d[0]]])
    np.testing.assert_allclose(ours, by_hand, rtol=1e-5, atol=1e-5)


NEWER, OLDER = {"log2", "one_minus_square", "polynomial"}, {"call", "closed_call"}
"""Primitives that JAX 0.12 has and 0.10 lacks, and the reverse."""


def known_primitives():
    """Those in the variables of JAX's modules."""
    import jax.experimental.pallas.tpu
    import jax.scipy.linalg

    modules = [vars(module) for name, module in [*sys.modules.items()] if name.startswith(("jax", "meshpar"))]
    return {p.name for names in modules for p in names.values() if isinstance(p, jax.extend.core.Primitive)}


def test_registered_primitives_exist():
    assert set(PRIMITIVES) <= known_primitives() | NEWER | OLDER
