"""Collectives in loops, against counts and bytes derived by hand."""

import pytest
from arrays import f32
from jax import lax

import meshpar as mp


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
        (
            nested,
            (5, 3),
            "in: model",
            ("all-reduce", 5, 3 * ALL_REDUCED),
        ),  # of the outer loop, for all of the inner one
        (
            nested,
            (5, 3),
            "in, out: model",
            ("reduce-scatter", 5 * 3, ALL_REDUCED / 2),
        ),  # else the partial results are stacked
    ],
)
def test_stacked_partial_results_of_an_inner_loop_are_reduced_together(fn, lengths, layout, collective):
    dims = {"xs": f"{'_ ' * len(lengths)} batch in", "w": "in out"}
    plan = mp.plan(fn, f32(*lengths, 8, 4), f32(4, 16), mesh="model=2", layout=layout, dims=dims, overlap="off")
    assert [(c.op, c.count, c.bytes) for c in plan.collectives] == [collective]
