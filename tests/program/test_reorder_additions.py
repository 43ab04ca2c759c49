"""Cotangents from matmuls are added to each other first, so that they are reduced once."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.ad import add_jaxvals

import meshpar as mp
from meshpar._src.compat.jax import equations
from meshpar._src.program.reorder_additions import with_matmuls_added_first

EMBED, BATCH, LAYERS = 16, 8, 3
RNG = np.random.default_rng(0)


def parameters(*lead):
    return {k: RNG.normal(size=(*lead, EMBED, EMBED)) / 4 for k in ("q", "k", "v", "o")}


def block(p, h):
    """A post-norm residual block: ``h`` is read by the residual and by three matmuls."""
    y = jnp.sin(h @ p["q"]) + jnp.einsum("be,ef->bf", h, p["k"]) ** 2 + jnp.sin(jnp.matmul(h, p["v"]))
    return jnp.tanh(h + y @ p["o"])


def unrolled(p, x):
    for k in range(LAYERS):
        x = block(jax.tree.map(lambda w, k=k: w[k], p), x)
    return x


def scanned(p, x):
    return jax.lax.scan(lambda h, p: (block(p, h), None), x, p)[0]


def rematerialized(p, x):
    return jax.lax.scan(jax.checkpoint(lambda h, p: (block(p, h), None)), x, p)[0]


def branched(p, x):
    return jax.lax.cond(x[0, 0] > 100, lambda: x, lambda: unrolled(p, x))


def gradient(model):
    """(parameters, input) → the gradients of both."""

    def step(p, x):
        return jax.grad(lambda p, x: jnp.mean(model(p, jnp.cos(x)) ** 2), argnums=(0, 1))(p, x)

    return step


def chain(*terms):
    """``((terms[0] + terms[1]) + terms[2]) + …`` with the primitive of transposed programs."""
    total, *rest = terms
    for term in rest:
        total = add_jaxvals(total, term)
    return total


def additions(closed):
    return [e for e in closed.jaxpr.eqns if e.primitive.name == "add_any"]


@pytest.mark.parametrize(
    ("model", "passes", "lowering"),
    [(unrolled, 2, "jit"), (scanned, 2, "shard_map"), (rematerialized, 3, "shard_map"), (branched, 2, "jit")],
)
def test_each_block_is_reduced_once_in_each_pass(model, passes, lowering):
    """The passes are forward, backward, and the recomputed forward pass of a rematerialized layer."""
    with jax.enable_x64(True):
        args = parameters(LAYERS), RNG.normal(size=(BATCH, EMBED))
        dims = {"p/[qkv]": "layers embed heads", "p/o": "layers heads embed", "x": "batch embed"}
        step = gradient(model)
        sharded = mp.jit(step, mesh="data=4, model=2", layout="batch: data; heads: model", dims=dims, lowering=lowering)
        over_model = [c for c in sharded.plan(*args).collectives if "model" in c.axes]
        assert {c.op for c in over_model} == {"all-reduce"}
        assert sum(c.count for c in over_model) == passes * LAYERS
        for got, expected in zip(jax.tree.leaves(sharded(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [4, 1100])
def test_a_long_chain(length):
    """Every second term is a matmul. Both lists of terms are added in order, then to each other."""
    with jax.enable_x64(True):
        x, w = RNG.normal(size=(4, 4)), RNG.normal(size=(4, 4))

        def fn(x, w):
            return chain(*[(x * k) @ w if k % 2 else jnp.sin(x + k) for k in range(length)])

        before = jax.make_jaxpr(fn)(x, w)
        after = with_matmuls_added_first(before)
        assert len(additions(after)) == length - 1
        matmuls = {e.outvars[0] for e in after.jaxpr.eqns if e.primitive.name == "dot_general"}
        for e in additions(after):
            if all(v in matmuls for v in e.invars):
                matmuls.add(e.outvars[0])
        mixed = [e for e in additions(after) if sum(v in matmuls for v in e.invars) == 1]
        assert [e.outvars for e in mixed] == [after.jaxpr.outvars]
        np.testing.assert_allclose(jaxpr_as_fun(after)(x, w)[0], fn(x, w), rtol=0, atol=1e-12 * length)
        assert with_matmuls_added_first(after) is after


def two_results(x, w):
    partial = chain(x, x @ w)
    return chain(partial, w @ x), partial


def two_readers(x, w):
    partial = chain(x, x @ w)
    return chain(partial, w @ x) + jnp.sin(partial)


def user_sum(x, w):
    return x + x @ w + w @ x


def one_matmul(x, w):
    return chain(x, x @ w, jnp.sin(x))


def matmuls_first(x, w):
    return chain(x @ w, w @ x, x, jnp.sin(x))


def scalars(x, w):
    return chain(x[0, 0], x[0] @ w[0])


@pytest.mark.parametrize(
    ("fn", "inside"),
    covering.each([two_results, two_readers, user_sum, one_matmul, matmuls_first, scalars], [False, True]),
)
def test_other_sums_are_left_as_they_are(fn, inside):
    x = jnp.ones((4, 4))
    looped = jax.jit(lambda x, w: jax.lax.map(lambda w: fn(x, w), jnp.stack([w, w])))
    closed = jax.make_jaxpr(looped if inside else fn)(x, x)
    assert any(e.primitive.name in ("add_any", "add") for e in equations(closed))
    assert with_matmuls_added_first(closed) is closed
