"""Equal halo exchanges of one array: sent once in the lowered program, before any pass of XLA, and planned once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp

RNG = np.random.default_rng(0)
X, W, V = (jnp.asarray(RNG.normal(size=n), jnp.float32) for n in [(2, 16, 8, 3), (3, 3, 3, 3), (2, 3, 3, 3)])


def conv(x, w, **options):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def one_side_alike(x, w, v):
    """A kernel of 3 rows reads one row before and one after; one of 2 rows reads the row after."""
    return conv(x, w) + conv(x, v)


def other_values(x, w, v):
    return conv(x, w) + conv(x + 1, w)


def in_a_loop(x, w, v):
    """The body reads the same windows as the op before the loop, whose elements it does not use."""
    return lax.scan(lambda y, k: (y + conv(x, w) * k, conv(x, w).sum()), conv(x, w), jnp.arange(3.0))


def recomputed(x, w, v):
    """A recomputation receives its elements anew: those of the forward pass are not saved."""
    layer = jax.checkpoint(lambda x, w: jnp.sin(conv(jnp.sin(x), w)))
    return jax.grad(lambda w: (layer(x, w) ** 2).sum())(w)


def branches(x, w, v):
    return conv(x, w), lax.cond(x[0, 0, 0, 0] > 0, lambda: conv(x, w), lambda: 2 * conv(x, w))


ROWS = {"mesh": "data=4, model=2", "layout": "height: data", "dims": {"x": "_ height width _"}}


@pytest.mark.parametrize(
    ("fn", "permutes"),
    [(one_side_alike, 2), (other_values, 4), (in_a_loop, 2 + 2), (recomputed, 2 + 2), (branches, 2 + 2 + 2)],
)
@pytest.mark.filterwarnings("ignore::meshpar.errors.ReplicatedWarning")
def test_halos_of_rows(fn, permutes):
    step = mp.jit(fn, lowering="shard_map", **ROWS)
    traced = str(step.trace(X, W, V).jaxpr)
    assert traced.count("ppermute[") == permutes
    planned = [c for c in step.plan(X, W, V).collectives if c.op == "collective-permute"]
    assert len(planned) == permutes
    assert all(c.bytes == 2 * 8 * 3 * 4 for c in planned)
    for got, want in zip(jax.tree.leaves(step(X, W, V)), jax.tree.leaves(fn(X, W, V)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
