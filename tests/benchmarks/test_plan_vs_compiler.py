"""Comparison of plans with compiled programs: equality, merged collectives, stages of the torus, rank correlation."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.plan.collectives import Collective
from meshpar._src.verify.hlo import HloCollective
from plan_vs_compiler import (
    differences,
    planned_sends,
    rank_correlation,
    ranks,
    stage_bytes,
)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def planned(layout="rows: data; inner: model", **kwargs):
    how = {"mesh": "data=4, model=4", "topology": "v5e:4x4", **kwargs}
    return mp.plan(lambda a, b: a @ b, array(64, 32), array(32, 16), layout=layout,
                   dims={"a": "rows inner", "b": "inner columns"}, **how)  # fmt: skip


def found(op, members, size, count):
    return HloCollective(op, len(members), members, "", size, count, False, "x", "", "")


SUM = 2 * 4 * (64 // 4 * 16) * 3 / 4  # bytes of the collective of `planned`: an all-reduce of f32[16, 16] over model


def test_a_program_that_sends_what_the_plan_lists_has_no_differences():
    assert planned_sends(planned()) == {("all-reduce", ("model",), SUM, False): 1}
    assert differences(planned(), [found("all-reduce", (0, 1, 2, 3), SUM, 1)]) == []


@pytest.mark.parametrize(
    ("members", "size", "count"), [((0, 4, 8, 12), SUM, 1), ((0, 1, 2, 3), SUM / 2, 1), ((0, 1, 2, 3), SUM, 2)]
)
def test_other_axes_sizes_and_counts_differ(members, size, count):
    got = differences(planned(), [found("all-reduce", members, size, count)])
    assert got
    assert not any(d.merged for d in got)


def volumes_of(volume, sizes):
    """Bytes that a device sends in each stage of a reduce-scatter: each has what the ones before it left."""
    sent = []
    for size in sizes:
        sent.append(volume * (size - 1) / size)
        volume /= size
    return sent


def test_a_staged_reduce_scatter_is_one_for_each_torus_dimension():
    plan = planned("columns: data", mesh="data=16", topology="v5p:2x2x4")
    sizes = [s.size for s in plan.torus["data"]]
    assert sorted(sizes) == [2, 2, 4]
    like = ("data",), "x", "rows", (64, 16), "float32"
    expected = volumes_of(4 * 64 * 16, sizes)
    assert sum(expected) == 4 * 64 * 16 * 15 / 16
    assert stage_bytes(Collective("reduce-scatter", *like, sum(expected), 1, "", algorithm="staged"), plan) == expected
    # what a ring over the first torus dimension leaves runs over the others
    expected = volumes_of(4 * 64 * 16 / sizes[0], sizes[1:])
    rest = Collective("reduce-scatter", *like, sum(expected), 1, "", algorithm="staged", first=1)
    assert stage_bytes(rest, plan) == pytest.approx(expected)
    hop = Collective("collective-permute", *like, 512.0, 6, "", algorithm="ring")
    gather = Collective("all-gather", *like, sum(expected), 1, "", first=1)
    sent = planned_sends(SimpleNamespace(collectives=(hop, rest, gather), sizes=plan.sizes, torus=plan.torus))
    assert sent["collective-permute", (), 512.0, False] == 6
    assert sent["all-gather", (), round(sum(expected), 1), False] == 1  # over a part of the axis
    assert all(axes == () for _, axes, _, _ in sent)


def test_rank_correlation_by_hand():
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]
    assert rank_correlation([1, 2, 3], [10, 200, 3000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)  # 1 - 6·2 / (4·15)
    assert math.isnan(rank_correlation([1], [1]))
    with pytest.raises(ValueError, match="2 and 1 values"):
        rank_correlation([1, 2], [1])
