"""Exposed communication of small scheduled programs: asynchronous pairs, shared links, loops, synchronous collectives."""

import numpy as np
import pytest

from meshpar._src.hardware.chips import CHIPS
from meshpar._src.hardware.topology import Places
from meshpar._src.verify.exposed import exposed

CHIP = CHIPS["v5e"]
RATE = 4.5e10 * 0.8  # bytes/s of a link one way, as the table has it
MB = 4 * 1024 * 1024  # of f32[1024,1024]
UP, DOWN = "{{0,1},{1,2},{2,3},{3,0}}", "{{1,0},{2,1},{3,2},{0,3}}"


def places(n=4, ring=True):
    at = np.zeros((n, 5), int)
    at[:, 0] = range(n)
    return Places(at, (ring, False, False, False, False))


def program(body, extra=""):
    return f"""HloModule m, is_scheduled=true, num_partitions=4
{extra}
%product (a: f32[1024,1024]) -> f32[1024,1024] {{
  %a = f32[1024,1024] parameter(0)
  ROOT %c = f32[1024,1024] convolution(%a, %a), dim_labels=bf_io->bf
}}

ENTRY %main (x: f32[1024,1024]) -> f32[1024,1024] {{
  %x = f32[1024,1024] parameter(0)
{body}
}}
"""


def start(name, pairs=UP):
    shape, attributes = "(f32[1024,1024], f32[1024,1024], u32[], u32[])", f"channel_id=1, source_target_pairs={pairs}"
    return f"  %{name} = {shape} collective-permute-start(%x), {attributes}\n"


def done(name, of):
    return f"  %{name} = f32[1024,1024] collective-permute-done(%{of})\n"


def compute(name, cycles):
    attributes = f'kind=kOutput, calls=%product, backend_config={{"estimated_cycles":"{cycles}"}}'
    return f"  %{name} = f32[1024,1024] fusion(%x), {attributes}\n"


ROOT = "  ROOT %r = f32[1024,1024] add(%x, %x)\n"
HOP = MB / RATE


def test_what_is_computed_between_start_and_end_hides_the_wire():
    cycles = 60_000  # 40 µs at 1.5 GHz; a hop takes 116.5
    found = exposed(program(start("s") + compute("p", cycles) + done("d", "s") + ROOT), CHIP, places())
    assert found.compute == pytest.approx(4e-5)
    assert found.sent == pytest.approx(HOP)
    assert found.seconds == pytest.approx(HOP - 4e-5)
    assert found.matmul_cycles == cycles
    assert found.by_kind == {"collective-permute (async)": found.seconds}
    assert found.schedule == pytest.approx(HOP)
    # more compute than wire: nothing is exposed; none between: all of it
    assert exposed(program(start("s") + compute("p", 600_000) + done("d", "s") + ROOT), CHIP, places()).seconds == 0
    late = exposed(program(start("s") + done("d", "s") + compute("p", cycles) + ROOT), CHIP, places())
    assert late.seconds == pytest.approx(HOP)


def test_permutes_in_two_directions_overlap_and_in_one_direction_do_not():
    ways = [(start("a") + start("b", pairs) + done("c", "a") + done("d", "b") + ROOT) for pairs in (DOWN, UP)]
    both, same = (exposed(program(body), CHIP, places()).seconds for body in ways)
    assert both == pytest.approx(HOP)
    assert same == pytest.approx(2 * HOP)


def test_synchronous_collectives_count_in_full():
    body = (
        "  %g = f32[4096,1024] all-gather(%x), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}, "
        "use_global_device_ids=true\n" + compute("p", 600_000) + ROOT
    )
    found = exposed(program(body), CHIP, places())
    assert found.seconds == pytest.approx(4 * MB * 3 / 4 / (2 * RATE))
    assert found.by_kind == {"all-gather": found.seconds}
    line = exposed(program(body), CHIP, places(ring=False))
    assert line.seconds == pytest.approx(2 * found.seconds)


LOOP = """
%body (s: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
  %s = (s32[], f32[1024,1024]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1024,1024] get-tuple-element(%s), index=1
START  %one = s32[] constant(1)
  %n = s32[] add(%i, %one)
PRODUCTDONE  ROOT %t = (s32[], f32[1024,1024]) tuple(%n, %d)
}

%cond (s: (s32[], f32[1024,1024])) -> pred[] {
  %s = (s32[], f32[1024,1024]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %end = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %end), direction=LT
}
"""


def test_loops_multiply():
    loop = LOOP.replace("START", start("s1")).replace("PRODUCT", compute("p", 60_000)).replace("DONE", done("d", "s1"))
    body = """  %zero = s32[] constant(0)
  %t0 = (s32[], f32[1024,1024]) tuple(%zero, %x)
  %w = (s32[], f32[1024,1024]) while(%t0), condition=%cond, body=%body
  ROOT %r = f32[1024,1024] get-tuple-element(%w), index=1
"""
    found = exposed(program(body, loop), CHIP, places())
    assert found.seconds == pytest.approx(5 * (HOP - 4e-5))
    assert found.matmul_cycles == 300_000
    assert found.in_loops == found.seconds


ASYNC = """
%gather_start (x: f32[1024,1024]) -> (f32[1024,1024], f32[4096,1024]) {
  %x = f32[1024,1024] parameter(0)
  %g = f32[4096,1024] all-gather(%x), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}, GLOBAL={chain_id="7"}
  %c = u32[] custom-call(), custom_call_target="AsyncCollectiveStart"
  ROOT %t = (f32[1024,1024], f32[4096,1024]) tuple(%x, %g)
}

%beside (x: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024] parameter(0)
  %g = f32[4096,1024] all-gather(%x), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}, GLOBAL={chain_id="7"}
  ROOT %p = f32[1024,1024] convolution(%x, %x), dim_labels=bf_io->bf
}

%gather_done (x: (f32[1024,1024], f32[4096,1024])) -> f32[4096,1024] {
  %x = (f32[1024,1024], f32[4096,1024]) parameter(0)
  ROOT %g = f32[4096,1024] get-tuple-element(%x), index=1
}
"""


def test_a_gather_spread_over_fusions_is_counted_once_from_its_start_to_its_end():
    body = (
        "  %async-collective-start.1 = (f32[1024,1024], f32[4096,1024]) fusion(%x), kind=kCustom, calls=%gather_start\n"
        '  %p = f32[1024,1024] fusion(%x), kind=kCustom, calls=%beside, backend_config={"estimated_cycles":"60000"}\n'
        "  %async-collective-done.1 = f32[4096,1024] fusion(%async-collective-start.1), kind=kCustom, calls=%gather_done\n"
        + ROOT
    )
    text = ASYNC.replace("GLOBAL", "use_global_device_ids=true, frontend_attributes")
    found = exposed(program(body, text), CHIP, places())
    assert found.sent == pytest.approx(4 * MB * 3 / 4 / (2 * RATE))
    assert found.seconds == pytest.approx(found.sent - 4e-5)
    assert found.matmul_cycles == 60_000


def test_collectives_of_several_kinds_share_the_links_that_both_need():
    gather = (
        "  %g = (f32[1024,1024], f32[4096,1024]) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}\n"
    )
    full_bytes = 4 * MB * 3 / 4 / (2 * RATE)
    ends = done("d", "s") + "  %e = f32[4096,1024] all-gather-done(%g)\n" + ROOT
    found = exposed(program(start("s") + gather + ends), CHIP, places())
    assert found.sent == pytest.approx(full_bytes + HOP)
    assert found.seconds == pytest.approx(full_bytes + HOP)
    assert found.by_kind["collective-permute (async)"] == pytest.approx(2 * HOP)  # at half the rate
    # of devices that differ along another dimension, none
    square = np.zeros((4, 5), int)
    square[:, :2] = [(0, 0), (1, 0), (0, 1), (1, 1)]
    separate = program(start("s", "{{0,1},{1,0},{2,3},{3,2}}") + gather.replace("0,1,2,3", "0,2},{1,3") + ends)
    found = exposed(separate, CHIP, Places(square, (False,) * 5))
    assert found.sent == pytest.approx(3 * HOP)
    assert found.seconds == pytest.approx(2 * HOP)


def test_a_chip_without_a_clock_is_refused():
    with pytest.raises(ValueError, match="the clock of h200 is not known"):
        exposed(program(ROOT), CHIPS["h200"], places())
