"""Bytes that an op sends, against the formulas: V·(n-1)/n for a gather or reduce-scatter, twice that for an all-reduce."""

import pytest
from arrays import f32

import meshpar as mp
from meshpar._src.plan.collectives import split_reduction
from meshpar._src.plan.traffic import op_bytes, partial_axes, reduction_bytes

SIZES = {"data": 4, "model": 2}
D, M = ("data",), ("model",)


@pytest.fixture(scope="module")
def dot():
    dims = {"x": "rows inner", "w": "inner outer"}
    plan = mp.plan(lambda x, w: x @ w, f32(16, 8), f32(8, 32), dims=dims, layout="", mesh="data=4, model=2")
    (op,) = (o for o in plan.program.root.walk() if o.name == "dot_general")
    return op


def axes_of(op, rows=(), inner=(), outer=()):
    """The axes of a matmul's factors, in the order of its rule."""
    by_factor = {op.rule.ins[0][0][0]: rows, op.rule.ins[0][1][0]: inner, op.rule.ins[1][1][0]: outer}
    return [by_factor[f] for f in range(len(op.rule.sizes))]


def test_a_result_is_partial_over_the_axes_of_contracted_factors(dot):
    assert partial_axes(dot, axes_of(dot, rows=D, inner=M), SIZES) == ([M], "sum")
    assert partial_axes(dot, axes_of(dot, rows=D, outer=M), SIZES) == ([()], "sum")
    assert partial_axes(dot, axes_of(dot, inner=("model", "data")), SIZES)[0] == [("data", "model")]  # mesh order


@pytest.mark.parametrize(
    ("rows", "inner", "specs", "stored", "sent"),
    [
        (D, (), [(D, ()), ((), ())], (D, ()), 0),
        (D, (), [(D, ()), ((), D)], (D, ()), 8 * 32 * 4 * 3 / 4),  # the weight is gathered
        ((), M, [((), M), (M, ())], ((), ()), 2 * 16 * 32 * 4 / 2),  # the result is all-reduced
        ((), M, [((), M), (M, ())], ((), M), 16 * 32 * 4 / 2),  # or reduce-scattered
        (D, (), [(D, ()), ((), ())], ((), ()), 16 * 32 * 4 * 3 / 4),  # the result is gathered
        # the result is all-reduced over model, and data moves from its rows to its columns
        (D, M, [(D, M), (M, ())], ((), D), 2 * 16 / 4 * 32 * 4 / 2 + 16 / 4 * 32 * 4 * 3 / 4),
    ],
)
def test_bytes_of_a_matmul(dot, rows, inner, specs, stored, sent):
    assert op_bytes(dot, axes_of(dot, rows, inner), specs, [stored], SIZES) == sent


def test_a_reduction_scatters_first_and_all_reduces_the_shard(dot):
    (value,) = dot.outs  # 2048 bytes
    assert reduction_bytes(value, ((), ()), (D, ()), (*D, *M), "sum", SIZES) == 2048 * 3 / 4 + 2 * (2048 / 4) / 2
    assert reduction_bytes(value, ((), ()), (D, ()), D, "max", SIZES) == 2 * 2048 * 3 / 4  # a maximum is not scattered


@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")])
def test_a_sum_is_reduce_scattered_over_the_axes_of_one_dim_in_any_order(axes):
    assert split_reduction(((), ()), (axes, ()), ("data", "model"), "sum") == ({0: axes}, ())
    assert split_reduction((axes[:1], ()), (axes, ()), axes[1:], "sum") == ({0: axes[1:]}, ())
    assert split_reduction(((), ()), ((*axes, "other"), ()), axes[1:], "sum") == ({}, axes[1:])  # behind another axis
    assert split_reduction(((), ()), (axes, ()), ("data", "model"), "max") == ({}, ("data", "model"))
