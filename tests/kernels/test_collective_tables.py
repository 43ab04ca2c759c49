"""Schedules in the simulator: right data, no slot lost, links and steps as the formulas have them."""

import math

import pytest
from collective_simulator import simulate

from meshpar_kernels.collectives.schedule_table import gather_table, hops_along, table_of

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
SIZES = [(2,), (3,), (4,), (5,), (7,), (8,), (2, 2), (2, 4), (3, 4), (4, 4), (2, 3, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_is_right(kind):
    """The simulator raises otherwise. On tori, and on meshes without wrap-around."""
    for sizes in SIZES:
        for wraps in (True, False):
            rings = (wraps,) * len(sizes)
            trace = simulate(table_of(kind, sizes, rings), sizes, rings)
            assert len(trace.loads) > 0


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_steps_and_bytes_of_rings(n):
    """A bidirectional ring: half as many steps as there are other ranks; each link carries the blocks of half the ring."""
    both = simulate(table_of("all_gather", (n,), (True,)))
    assert len(both.loads) == math.ceil((n - 1) / 2)
    forward = [slots for (_, _, direction), slots in both.per_link().items() if direction == 1]
    assert forward == [math.ceil((n - 1) / 2)] * n


def test_a_line_never_uses_the_link_that_is_not_there():
    """On the wrap-around of a line a send would cross all its links; so none has more than one hop."""
    trace = simulate(table_of("all_gather", (6,), (False,)), (6,), (False,))
    assert len(trace.loads) == 5
    assert set(trace.hops) == {1}
    assert simulate(table_of("all_gather", (6,), (True,)), (6,), (False,)).hops[0] == 5


@pytest.mark.parametrize(("sizes", "directions"), [((4, 4), 4), ((3, 3), 4), ((4, 4, 4), 6)])
def test_colours_use_all_links_in_every_step_of_a_cube(sizes, directions):
    """Every torus dimension, both directions, from the first step on; and evenly but for the longer half of even rings."""
    for kind in ("all_gather", "reduce_scatter"):
        trace = simulate(table_of(kind, sizes, (True,) * len(sizes)))
        links = math.prod(sizes) * directions
        assert len(trace.per_link()) == links
        odd = sizes[0] % 2
        busy = [len(load) for load in trace.loads]
        assert max(busy) == links
        assert set(busy) == ({links} if odd else {links, links // 2})
        totals = set(trace.per_link().values())
        assert len(totals) == (1 if odd else 2)
        plain = gather_table(sizes, ["ring"] * len(sizes))
        assert max(len(load) for load in simulate(plain).loads) == links // len(sizes)


def test_seconds_are_latency_and_the_busiest_link():
    table = table_of("all_gather", (4,), (True,))
    assert simulate(table).seconds(2e6, [(4, True, 1e9, 1e-6)]) == pytest.approx(2 * (1e-6 + 2e-3))
    # on a line, a message over the missing wrap-around link crosses all three others
    assert max(simulate(table, (4,), (False,)).hops) == 3


def test_bad_input():
    with pytest.raises(ValueError, match="no collective 'all_to_all'"):
        table_of("all_to_all", (4,), (True,))
    with pytest.raises(ValueError, match="sizes must be at least 1"):
        gather_table((0,), ["ring"])
    with pytest.raises(ValueError, match="orders over them"):
        gather_table((2, 2), ["ring", "ring"], [(0, 0)])
    with pytest.raises(ValueError, match="no form 'star'"):
        hops_along(4, "star")
