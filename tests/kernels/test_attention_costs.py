"""What attention costs and how K/V travel, against counting by hand: pairs in sight, who meets whom, bytes, the choice."""

import itertools
import re

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar_kernels import attention_costs
from meshpar_kernels.attention import Machine, api, masks, ring
from meshpar_kernels.attention.context import Context
from meshpar_kernels.attention.costs import _pairs, costs, sends
from meshpar_kernels.attention.flash import Softmax
from meshpar_kernels.attention.masks import Mask

MASKS = [Mask(c, w) for c, w in itertools.product((False, True), (None, 1, 3, 8, 9, 17, 100))]
LENGTHS = [(4, 4), (4, 8), (8, 2)]  # of queries and keys on a device


def order(total, zigzag):
    return np.arange(total) if zigzag == 1 else oracle.zigzag_order(total, zigzag)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_pairs_in_sight_and_devices_seen(devices):
    for mask, (q_len, k_len), zigzag in itertools.product(MASKS, LENGTHS, {1, devices}):
        total = q_len * devices, k_len * devices
        seen = oracle.visible(*total, causal=mask.causal, window=mask.window)[0]
        seen = seen[order(total[0], zigzag)][:, order(total[1], zigzag)]
        by_device = seen.reshape(devices, q_len, devices, k_len)
        case = f"{mask} {q_len} {k_len} {zigzag}"
        assert masks.visible_pairs(mask, devices, *total, zigzag) == tuple(by_device.sum((1, 2, 3)).tolist()), case
        met = by_device.any((1, 3))
        offsets = sorted({(i - j) % devices for i, j in zip(*np.nonzero(met), strict=True)})
        assert list(masks.devices_seen(mask, devices, q_len, k_len, zigzag)) == offsets, case


def test_positions_are_those_of_the_order():
    for devices, zigzag in ((4, 4), (2, 4), (8, 2), (4, 1)):
        context = Context(("ring",), devices, Softmax(Mask(), 1.0), zigzag)
        found = [context.positions(i, 16 // devices * 2) for i in range(devices)]
        np.testing.assert_array_equal(np.concatenate(found), order(32, zigzag))


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_every_key_in_sight_arrives_once_and_no_farther_than_needed(devices, both_ways):
    """A simulation of the streams, hop by hop, as the legs have them."""
    for mask, each, zigzag in itertools.product(MASKS, (4, 8), (1, devices)):
        c = Context(("ring",), devices, Softmax(mask, 1.0), zigzag, both_ways)
        moving = ring.streams(c, each, each)
        case = f"{mask} {each} {zigzag} {moving}"
        together = sum(s.high - s.low for s in moving) == each
        met = np.zeros((devices, devices * each), int)  # by device: how often it meets each key
        for i in range(devices):
            met[i, i * each : (i + 1) * each] += not together
        for leg in ring.legs(moving, 0 if together else 1):
            for t in range(leg.first, leg.first + leg.count):
                for i, n in itertools.product(range(devices), leg.block_indices):
                    s = moving[n]
                    source = (i - s.step * t) % devices
                    met[i, source * each + s.low : source * each + s.high] += 1
        assert met.max() <= 1, case
        total = devices * each
        seen = oracle.visible(total, total, causal=mask.causal, window=mask.window)[0]
        seen = seen[order(total, zigzag)][:, order(total, zigzag)].reshape(devices, each, total).any(1)
        assert (met >= seen).all(), case
        if mask.causal and mask.window is not None and zigzag == 1:  # only those before, as far as the window reaches
            hops = min(devices - 1, -(-(mask.window - 1) // each))
            sent = sum(s.hops * (s.high - s.low) for s in moving)
            assert sent <= hops * each, case


def shapes(tokens, devices, heads=32, kv_heads=8, dtype=jnp.bfloat16, batch=1):
    return [jax.ShapeDtypeStruct((batch, tokens // devices, n, 128), dtype) for n in (heads, kv_heads, kv_heads)]


def test_bytes_and_flops_by_hand():
    tokens, devices = 65536, 8
    costs = attention_costs(*shapes(tokens, devices), devices, causal=True, zigzag=devices)
    keys = tokens // devices * 8 * 128  # elements of K, or of V, on a device
    queries = 4 * keys
    # K and V twice in bfloat16, their gradients once in float32, seven times each
    assert costs.of["ring"].bytes_sent == 7 * 2 * keys * (2 + 2 + 4)
    assert costs.of["gathered"].bytes_sent == 7 * 2 * keys * (2 + 2 + 4)
    rows = queries // 128
    there = queries * 2 * 2 + 2 * keys * 2 + rows * 4
    back = queries * 2 * 3 + 2 * keys * 2 * 2 + 2 * rows * 4
    assert costs.of["ulysses"].bytes_sent == (there + back) * 7 / 8
    pairs = tokens * (tokens + 1) / 2 / devices
    for cost in (costs.of[name] for name in ("ring", "gathered", "ulysses")):
        assert cost.flops == pytest.approx(14 * pairs * 32 * 128, rel=1e-3)
    # all K and V in bfloat16 and all their gradients in float32; two K/V blocks, and four of gradients, of a device
    more = costs.of["gathered"].memory - costs.of["ring"].memory
    assert more == 2 * keys * (devices * 6 - 2 * 2 - 4 * 4) - queries * 4
    # in order, the last device sees everything
    uneven = attention_costs(*shapes(tokens, devices), devices, causal=True, balance=False)
    assert uneven.of["ring"].flops == pytest.approx(14 * (2 - 1 / 8) * pairs * 32 * 128, rel=1e-3)
    assert uneven.of["ulysses"].flops == pytest.approx(14 * pairs * 32 * 128, rel=1e-3)


def test_a_balanced_ring_by_hand():
    """Half of the queries and results of a device are sent twice; every device has the mean of the work."""
    tokens, devices = 65536, 8
    found = attention_costs(*shapes(tokens, devices), devices, causal=True)
    plain = attention_costs(*shapes(tokens, devices), devices, causal=True, balance=False).of["ring"]
    ring, half, rows = found.of["ring"], tokens // devices * 32 * 128, tokens // devices // 2 * 32
    # queries and results there and back; queries, gradients of results and of queries; log-sum-exps twice, sums
    assert ring.bytes_sent - plain.bytes_sent == 2 * half + 3 * half + 3 * rows * 4
    pairs = tokens * (tokens + 1) / 2
    assert ring.flops == pytest.approx(14 * pairs / devices * 32 * 128, rel=1e-9)
    assert ring.seconds < 0.6 * plain.seconds
    swaps = [s for s in ring.forward if "mirrored" in s.why or "back" in s.why]
    assert [(s.step, s.shape[1], s.hidden > 0) for s in swaps] == [(2, 4096, True), (2, 4096, False), (2, 4096, False)]


@pytest.mark.parametrize("devices", [2, 4, 6])
def test_pairs_of_a_balanced_ring(devices):
    """Counted in the mask: the first half of a device's queries, and the second half of the mirrored device's."""
    for mask in MASKS:
        total, c = 8 * devices, Context(("ring",), devices, Softmax(mask, 1.0), balanced=True)
        seen = (
            oracle.visible(total, total, causal=mask.causal, window=mask.window)[0].sum(1).reshape(devices, 2, 4).sum(2)
        )
        x = jax.ShapeDtypeStruct((1, 8, 1, 1), jnp.float32)
        assert _pairs(c, x, x) == (seen[:, 0] + seen[::-1, 1]).tolist(), mask


@pytest.mark.parametrize(
    ("options", "tokens", "is_balanced"),
    [
        ({"causal": True}, 65536, True),
        ({"causal": True}, 256, False),  # latency
        ({"causal": True}, 65544 - 8 * 4, False),  # an odd number on each device
        ({"causal": True, "zigzag": 8}, 65536, False),
        ({"causal": True, "window": 512}, 65536, False),  # every device sees as many
        ({"causal": True, "window": 60000}, 65536, True),
        ({}, 65536, False),
    ],
)
def test_when_a_ring_is_balanced(options, tokens, is_balanced):
    ring = attention_costs(*shapes(tokens, 8), 8, **options).of["ring"]
    assert any("mirrored" in s.why for s in ring.forward) == is_balanced


def test_heads_are_exchanged_over_the_last_axes_inside_of_a_ring():
    """8 heads over 4·2·4 devices: over 4 of them, over the last axis, since 8 do not divide over 32; K and V go round 8."""
    q, k, v = shapes(65536, 32, 8, 4)
    sizes = {"x": 4, "y": 2, "z": 4}
    found = attention_costs(q, k, v, sizes, causal=True, balance=False).of
    assert "8 heads do not divide over 32" in found["ulysses"].refused
    assert "ring+ulysses" not in attention_costs(q, k, v, 32).of  # of one axis
    mixed = found["ring+ulysses"]
    stages = {"all-to-all": (("y", "z"), 8), "collective-permute": (("x",), 4)}
    assert {s.op: s.stage for s in mixed.forward} == stages
    assert all(s.stage == stages[s.op] for s in (*mixed.forward, *mixed.backward))
    queries, keys = q.size * 2, k.size * 2 * 2  # bytes; each head of K and V is sent to two devices
    rows = q.size // 128 * 4
    there = (2 * queries + 2 * keys + rows) * 7 / 8 + 3 * 2 * keys
    assert sum(s.bytes(32) for s in mixed.forward) == there
    assert mixed.flops == pytest.approx(found["ring"].flops * (2 - 1 / 4) / (2 - 1 / 32), rel=1e-3)


def test_gathered_gradients_are_scattered_axis_by_axis():
    """Over three axes in three steps, each on what is left; together the bytes of one over all, on rings as well."""
    x = api.Operands(*shapes(65536, 8))

    def back(axes, scatter=None):
        options = api.Options(strategy="gathered", scatter=scatter)
        return sends(api.plan(x, axes, options).context, "gathered", *x[:3], segments=0)[1]

    many, one = {"x": 2, "y": 1, "z": 4}, {"x": 8}
    scattered = [(s.stage, s.shape[1]) for s in back(many, "xla") if s.op == "reduce-scatter"]
    assert scattered[::2] == scattered[1::2] == [((("x",), 2), 65536), ((("y",), 1), 32768), ((("z",), 4), 32768)]
    hops = [(s.stage, s.shape[1], s.times) for s in back(many) if s.op == "collective-permute"]
    assert hops[::2] == hops[1::2] == [((("x",), 2), 32768, 1), ((("y",), 1), 32768, 0), ((("z",), 4), 8192, 3)]
    assert not [s for s in back(many) if s.op == "reduce-scatter"]
    forms = back(many), back(many, "xla"), back(one), back(one, "ring")
    assert len({sum(s.bytes(8) for s in form) for form in forms}) == 1


def test_rings_of_gradients_hold_blocks_in_flight():
    """Two blocks that leave and two that arrive, of the first axis, of one gradient in float32."""
    x = api.Operands(*shapes(65536, 8))
    keys = 4 * 65536 * 8 * 128

    def memory(axes, scatter=None):
        options = api.Options(strategy="gathered", scatter=scatter)
        return costs(api.plan(x, axes, options).context, *x[:3]).of["gathered"].memory

    one = memory({"x": 8})
    assert memory({"x": 2, "y": 4}) - one == keys
    assert memory({"x": 8}, "ring") - one == keys / 2
    assert memory({"x": 2, "y": 4}, "xla") == one


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "machine", "strategy", "says"),
    [
        (32768, 24, 8, None, "gathered", "24 heads do not divide over 16 devices; ring pays from 256K tokens, or 8K a"),
        (131072, 32, 8, None, "ring", "ring takes the least time"),
        (262144, 24, 8, None, "ring", "gathered needs .* GiB, above 2 GiB"),
        (131072, 24, 8, Machine(memory=float(1 << 30)), "ring", "ring is left"),
        (524288, 24, 8, Machine(memory=float(1 << 40)), "ring", "ring takes the least time"),
        (1 << 23, 32, 8, None, "ulysses", "none stays within 2 GiB in addition .*; ulysses needs the least"),
        (32768, 32, 8, Machine(latency=1.0, memory=float(1 << 40)), "gathered", "gathered takes the least time"),
    ],
)
def test_the_choice_and_its_reason(tokens, heads, kv_heads, machine, strategy, says):
    costs = attention_costs(*shapes(tokens, 16, heads, kv_heads), 16, causal=True, zigzag=16, machine=machine)
    assert costs.strategy == strategy, costs.reason
    assert re.search(says, costs.reason), costs.reason
    if heads % 16:
        assert costs.of["ulysses"].refused is not None
