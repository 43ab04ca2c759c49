"""The α-β choice: its figures against the simulator and against sums by hand, and that it takes what is fastest."""

import math

import pytest
from collective_simulator import simulate

from meshpar_kernels.collectives import Axis, choose
from meshpar_kernels.collectives.choose import ring_profile
from meshpar_kernels.collectives.schedule_table import table_of

V5E = [Axis(16, True, 45.0, 1e-6), Axis(16, True, 45.0, 1e-6)]
MIB = 2.0**20


@pytest.mark.parametrize(
    ("sizes", "wraps"), [((4, 4), True), ((3, 5), True), ((4,), False), ((2, 3, 4), True), ((3, 4), False)]
)
def test_rings_cost_what_the_simulator_counts(sizes, wraps):
    rings = (wraps,) * len(sizes)
    axes = [(n, wraps, 10.0, 2e-6) for n in sizes]
    volume = 1e9
    for kind, rounds in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        table = table_of(kind, sizes, rings)
        want = simulate(table, sizes, rings).seconds(volume / table.slots, [(n, w, g * 1e9, s) for n, w, g, s in axes])
        found = choose(kind, volume, axes).seconds
        assert found["ring"] == pytest.approx(want)
        busiest = sum(max(load.values()) for load in ring_profile(sizes, rings))
        assert found["ring"] >= rounds * busiest * volume / table.slots / 10e9


def test_figures_by_hand():
    """256 MiB over a 16×16 torus: all four links of a device take (A-1)/A of it."""
    volume = 256 * MIB
    each = volume * 255 / 256 / (4 * 45e9)
    gather = choose("all_gather", volume, V5E).seconds
    assert gather["native"] == pytest.approx(each + 16e-6)
    staged = volume * 15 / 16 / 90e9 + volume / 16 * 15 / 16 / 90e9 + 16e-6
    assert gather["staged"] == pytest.approx(staged)
    scatter = choose("reduce_scatter", volume, V5E).seconds
    assert scatter["native"] == pytest.approx(2 * gather["native"])
    # one axis: XLA keeps it a reduce-scatter
    one = choose("reduce_scatter", volume, V5E[:1]).seconds
    assert one["native"] == pytest.approx(one["staged"])


def test_large_scatters_over_a_torus_go_in_rings_small_ones_in_few_steps():
    large = choose("reduce_scatter", 256 * MIB, V5E)
    assert large.algorithm in ("ring", "pallas")
    assert large.seconds["native"] > 1.8 * large.seconds["ring"]
    assert large.seconds["staged"] > 1.6 * large.seconds["ring"]
    assert large.refused["small"] == "it is for an all-reduce of at most 4 MiB"
    small = choose("all_reduce", 4096, [(8, True, 45.0, 1e-6)])
    assert small.algorithm == "small"
    assert small.seconds["small"] == pytest.approx(4e-6 + 10 * 4096 / 45e9)  # 4 + 3 + 2 + 1 arrays over each link
    assert choose("all_gather", 256 * MIB, V5E, hbm=810.0).algorithm == "native"  # copies around permutes cost too
    assert "ring" in large.reason
    assert "256 MiB over 16×16" in large.reason


def test_between_slices_the_array_is_cut_first():
    axes = [Axis(2, False, 3.0, 1e-5, outer=True), *V5E]
    found = choose("reduce_scatter", 256 * MIB, axes)
    assert found.refused.keys() == {"ring", "pallas", "small"}
    assert found.algorithm == "hierarchical"
    inside = sum(256 * MIB / n * 15 / 16 / 90e9 + 8e-6 for n in (1, 16))
    across = 256 * MIB / 256 / 2 / 3e9 + 1e-5
    assert found.seconds["hierarchical"] == pytest.approx(inside + across)
    assert found.seconds["staged"] > 256 * MIB / 2 / 3e9  # major axis first: all of it crosses


def test_nothing_to_send():
    assert set(choose("all_gather", 0, V5E).seconds.values()) == {0.0}
    assert choose("all_reduce", 1e9, [(1, True, 45.0, 1e-6)]).reason == "nothing is sent"
    assert math.isfinite(choose("all_gather", 1e9, [(2, True, 45.0, 0.0)]).seconds["ring"])


def test_bad_input():
    with pytest.raises(ValueError, match="no collective 'gather'"):
        choose("gather", 1, V5E)
    with pytest.raises(ValueError, match="no algorithm 'fast'"):
        choose("all_gather", 1, V5E, candidates=["fast"])
    with pytest.raises(ValueError, match="cannot be negative"):
        choose("all_gather", -1, V5E)
    with pytest.raises(ValueError, match=r"none of hierarchical can run: .*no axis is an outer one"):
        choose("all_gather", 1, V5E, candidates=["hierarchical"])
