"""Collectives in loops, against counts and bytes derived by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from arrays import f32
from jax import lax

import meshpar as mp
from meshpar._src.program.primitives import add_row_p


def stacked(xs, w):
    return lax.scan(lambda carry, x: (carry, x @ w), 0.0, xs)[1]


def nested(xs, w):
    return lax.scan(lambda carry, x: (carry, stacked(x, w)), 0.0, xs)[1]


ALL_REDUCED = 2 * (2 - 1) / 2 * 8 * 16 * 4
"""Bytes of the partial result of one matmul, [8, 16] on two devices."""


@pytest.mark.parametrize(
    ("fn", "lengths", "layout", "collective"),
    [
        (stacked, (3,), "in: model", ("all-reduce", 3, ALL_REDUCED)),  # in each iteration
        # of the outer loop, for all of the inner one
        (nested, (5, 3), "in: model", ("all-reduce", 5, 3 * ALL_REDUCED)),
        # else the partial results are stacked
        (nested, (5, 3), "in, out: model", ("reduce-scatter", 5 * 3, ALL_REDUCED / 2)),
    ],
)
def test_stacked_partial_results_of_an_inner_loop_are_reduced_together(fn, lengths, layout, collective):
    dims = {"xs": f"{'_ ' * len(lengths)} batch in", "w": "in out"}
    plan = mp.plan(fn, f32(*lengths, 8, 4), f32(4, 16), mesh="model=2", layout=layout, dims=dims, overlap="off")
    assert [(c.op, c.count, c.bytes) for c in plan.collectives] == [collective]


@pytest.mark.parametrize(
    ("layout", "sent"),
    [
        ("in: model", [("all-reduce", 1, 3 * ALL_REDUCED)]),
        ("in, out: model", [("reduce-scatter", 5 * 3, ALL_REDUCED / 2)]),
    ],
)
def test_rows_that_an_inner_loop_adds_to_a_carry_are_reduced_after_the_outer_loop(layout, sent):
    """Unless their layout shards them further: then no device has room for the unsharded carry."""

    def add(total, operands):
        xs, w = operands

        def row(total, operands):
            return add_row_p.bind(total, operands[0] @ w, operands[1], jnp.ones(8, bool), late=False), None

        return lax.scan(row, total, (xs, jnp.arange(3, dtype=np.int32)))[0], None

    def fn(xs, ws):
        return lax.scan(add, jnp.zeros((3, 8, 16)), (xs, ws))[0]

    r = np.random.default_rng(0)
    xs, ws = r.normal(size=(5, 3, 8, 4)).astype(np.float32), r.normal(size=(5, 4, 16)).astype(np.float32)
    dims = {"xs": "_ _ batch in", "ws": "_ in out"}
    sharded = mp.jit(fn, mesh=mp.mesh("model=2, _=-1"), layout=layout, dims=dims)
    plan = sharded.plan(xs, ws)
    assert [(c.op, c.count, c.bytes) for c in plan.collectives if c.axes == ("model",)] == sent
    np.testing.assert_allclose(sharded(xs, ws), np.einsum("tlbi,tio->lbo", xs, ws), rtol=1e-4, atol=1e-5)
