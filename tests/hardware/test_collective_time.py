"""The time of collectives: formulas against hand arithmetic, and the rules of thumb that follow from them."""

import pytest

from meshpar._src.hardware.chips import CHIPS
from meshpar._src.hardware.collective_time import seconds_of
from meshpar._src.hardware.topology import Stage, merged

V5P, V5E, TPU7X, H100 = (CHIPS[name].ideal() for name in ("v5p", "v5e", "tpu7x", "h100"))
V5P_AXIS = 2 * 9e10  # bytes/s both ways over one torus dimension
BIG = 1e12  # bytes: far from the latency


def ring(n, dim="x"):
    return Stage(n, dim, True)


def line(n, dim="x"):
    return Stage(n, dim, False)


XY, XYZ = [ring(4, "x"), ring(16, "y")], [ring(8, "x"), ring(8, "y"), ring(16, "z")]
CORE, SWITCH = Stage(2, "core", False), Stage(8, "switch")
SLICES, SWITCHES = [Stage(4, "slice"), ring(16, "x"), ring(16, "y")], [Stage(4, "slice"), SWITCH]
RING_8 = BIG * 7 / 8 / V5P_AXIS
XY_STAGED = BIG * 63 / 64 / V5P_AXIS  # one dimension after the other: the bytes of one ring of 64
LINKS, CORES = BIG * 3 / 4 / 9.5e10, 6 * 9.5e10  # a ring of four chips, and the link of its devices
ACROSS_SLICES, WITHIN_SLICES = BIG / 256 * 3 / 4 / 3.1e9, BIG * 255 / 256 / (2 * 2 * 4.5e10)
ACROSS_SWITCHES, SWITCHED = BIG / 8 * 3 / 4 / 5e10, BIG * 7 / 8 / 4.5e11
CASES = {  # name → (algorithm if not native, and operation; stages; chip; seconds of BIG bytes)
    "a ring sends both ways": ("all-gather", [ring(8)], V5P, RING_8),
    "a scatter on a ring": ("reduce-scatter", [ring(8)], V5P, RING_8),
    "links reach a part of their rate": ("all-gather", [ring(8)], CHIPS["v5p"], RING_8 / 0.8),
    "a line takes twice as long": ("all-gather", [line(8)], V5P, 2 * RING_8),
    "axes together add their links": ("all-gather", XYZ, V5P, BIG * 1023 / 1024 / (3 * V5P_AXIS)),
    "interleaved groups share links": ("all-gather", [Stage(4, "x", True, stride=4)], V5P, 4 * BIG * 3 / 4 / V5P_AXIS),
    "staged": ("staged reduce-scatter", XY, V5P, XY_STAGED),
    "both dimensions at once": ("reduce-scatter", XY, V5P, XY_STAGED / 2),
    "an all-reduce is two scatters": ("all-reduce", XY, V5P, XY_STAGED),
    "a staged all-reduce too": ("staged all-reduce", XY, V5P, 2 * XY_STAGED),
    "an all-to-all is a quarter of an all-gather on a ring": ("all-to-all", [ring(16)], V5P, BIG / V5P_AXIS / 4),
    "and half of one on a line": ("all-to-all", [line(16)], V5P, BIG / V5P_AXIS / 2),
    # V·max(A, B) / (4·A·B·W): each half of the slice sends a quarter of V through A rings
    "the longer dimension holds an all-to-all up": ("all-to-all", XY, V5P, BIG * 16 / (4 * 64 * V5P_AXIS)),
    "a permute uses one link one way": ("collective-permute", [ring(8)], V5P, BIG / 9e10),
    "also on a line": ("collective-permute", [line(8)], V5P, BIG / 9e10),
    "a group of one sends nothing": ("all-reduce", [Stage(1)], V5P, 0.0),
    "only what the slice has reduced leaves it": ("all-reduce", SLICES, V5E, 2 * (WITHIN_SLICES + ACROSS_SLICES)),
    "the two devices of a chip share its links": ("all-gather", [ring(4)], TPU7X, LINKS),
    "the cores of a chip": ("all-gather", [CORE], TPU7X, BIG / 2 / CORES),
    # in one stage, the torus carries what remains after the cores of a chip; in two, all of it
    "torus and cores": ("reduce-scatter", [ring(4), CORE], TPU7X, BIG / 2 / CORES + LINKS / 2),
    "staged on torus and cores": ("staged reduce-scatter", [ring(4), CORE], TPU7X, LINKS + BIG / 4 / 2 / CORES),
    "a switch": ("all-gather", [SWITCH], H100, SWITCHED),
    "an all-to-all on a switch": ("all-to-all", [SWITCH], H100, SWITCHED / 8),
    "several switches": ("reduce-scatter", SWITCHES, H100, SWITCHED + ACROSS_SWITCHES),
}


@pytest.mark.parametrize(("what", "stages", "chip", "seconds"), CASES.values(), ids=CASES)
def test_seconds_by_hand(what, stages, chip, seconds):
    algorithm, _, op = what.rpartition(" ")
    assert seconds_of(op, BIG, stages, chip, algorithm or "native") == pytest.approx(seconds)


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "all-to-all"])
def test_devices_that_fill_a_box_send_over_all_its_links_in_whatever_order_they_stand(kind):
    box = (line(4, "x"), line(4, "y"))
    jumps = Stage(16, fills=box)
    for volume in (1.0, BIG):  # latency, and traffic
        assert seconds_of(kind, volume, [jumps], V5E) == seconds_of(kind, volume, box, V5E)
    for algorithm in ("ring", "native"):  # blocks go from one to the next
        hop = seconds_of("collective-permute", BIG, [jumps], V5E, algorithm)
        assert hop == seconds_of("collective-permute", BIG, [Stage(16)], V5E)


def test_a_small_message_takes_its_hops():
    assert seconds_of("all-gather", 1.0, [ring(16)], V5P) == pytest.approx(8e-6)
    assert seconds_of("all-gather", 1.0, [line(16)], V5P) == pytest.approx(15e-6)
    assert seconds_of("all-gather", 1.0, [ring(16, "x"), ring(8, "y")], V5P) == pytest.approx(12e-6)


def test_stages_of_one_dimension_are_one_ring_where_they_nest():
    nested = [Stage(4, "x", True, 4), Stage(16, "y", True), Stage(4, "x", False, 1)]
    assert merged(nested) == [Stage(16, "x", True, 1), Stage(16, "y", True)]
    two_stages = [Stage(2, "x", False, 8), Stage(4, "x", False, 1)]
    assert merged(two_stages) == two_stages
