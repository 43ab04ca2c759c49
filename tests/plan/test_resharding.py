"""Relayouts: never more bytes than the greedy steps, as few as a search through all specs finds, and what single ones send."""

import itertools
import math
from fractions import Fraction

import pytest
from all_specs import specs_of

from meshpar.plan.collectives import wire_bytes
from meshpar.plan.resharding import axis_size, part_of, relayout, relayout_bytes, shard, whole_axes


def greedy(have, need):
    """The steps that meshpar took before: an axis exchanged where it can go straight to its place, the rest gathered and cut."""
    steps = []
    now = [list(axes) for axes in have]
    place = {a: i for i, axes in enumerate(need) for a in axes}
    for i in range(len(now)):
        for a in [a for a in now[i] if a in place and place[a] != i]:
            j = place[a]
            if now[i][-1] == a and tuple(now[j]) == need[j][: len(now[j])] and need[j].index(a) == len(now[j]):
                now[i].remove(a)
                now[j].append(a)
                steps.append(("all-to-all", (a,), tuple(map(tuple, now))))
    for i, want in enumerate(need):
        keep = 0
        while keep < len(now[i]) and keep < len(want) and now[i][keep] == want[keep]:
            keep += 1
        gone = now[i][keep:]
        if gone:
            now[i] = now[i][:keep]
            steps.append(("all-gather", tuple(gone), tuple(map(tuple, now))))
    return steps


def greedy_bytes(have, need, shape, sizes):
    total, spec = 0.0, have
    for op, axes, after in greedy(have, need):
        volume = math.prod(shard(shape, after if op == "all-gather" else spec, sizes))
        total += wire_bytes(op, volume, math.prod(sizes[a] for a in axes))
        spec = after
    return total


MESHES = {"2x2": {"a": 2, "b": 2}, "4x2": {"a": 4, "b": 2}, "2x2x2": {"a": 2, "b": 2, "c": 2}}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_never_sends_more_than_the_greedy_steps(mesh, rank):
    sizes = MESHES[mesh]
    specs = specs_of(rank, sizes)
    pairs = list(itertools.product(specs, specs))
    if len(pairs) > 5000:
        pairs = pairs[::7]
    shape = (8,) * rank
    fewer = 0
    for have, need in pairs:
        sent, before = relayout_bytes(have, need, shape, 1, sizes), greedy_bytes(have, need, shape, sizes)
        assert sent <= before, (have, need)
        fewer += sent < before
    assert fewer >= len(pairs) // 5


@pytest.mark.parametrize("mesh", MESHES)
def test_every_step_is_one_move_and_they_lead_there(mesh):
    sizes = MESHES[mesh]
    for have, need in itertools.product(specs_of(2, sizes), repeat=2):
        steps = relayout(have, need, (8, 16), sizes)
        assert [s.before for s in steps[1:]] == [s.after for s in steps[:-1]]
        if steps:
            assert (merged(steps[0].before), merged(steps[-1].after)) == (have, need)
        for step in steps:
            assert moves(step, sizes) == step.op
            for entry, n in zip(step.after, (8, 16), strict=True):
                assert n % math.prod(axis_size(a, sizes) for a in entry) == 0


def merged(spec):
    """A spec in which the two halves of an axis are the axis."""
    assert all(entry.count(a) == 1 for entry in spec for a in entry)
    return tuple(whole_axes(entry) for entry in spec)


def moves(step, sizes):
    """What single move leads from one spec of a step to the next, judged by the specs alone."""
    gains = [b[len(a) :] for a, b in zip(step.before, step.after, strict=True) if b[: len(a)] == a]
    loses = [a[len(b) :] for a, b in zip(step.before, step.after, strict=True) if a[: len(b)] == b]
    gained, lost = (tuple(a for axes in some for a in axes) for some in (gains, loses))
    counts = [[math.prod(axis_size(a, sizes) for a in entry) for entry in spec] for spec in (step.before, step.after)]
    assert step.group == math.prod(axis_size(a, sizes) for a in step.axes)
    if counts[0] == counts[1]:
        return "collective-permute"
    assert all(a[: len(b)] == b or b[: len(a)] == a for a, b in zip(step.before, step.after, strict=True))
    held = {a for entry in step.before for a in entry}
    if not gained:
        assert lost == step.axes
        return "all-gather"
    if not lost:
        assert gained == step.axes
        assert not held & set(gained)
        return "slice"
    assert set(gained) == set(lost) == set(step.axes)
    return "all-to-all"


@pytest.mark.parametrize("rank", [1, 2])
def test_as_few_bytes_as_the_shortest_of_all_paths(rank):
    """Floyd and Warshall's algorithm over all specs, with a move between two of them judged by itself."""
    sizes, shape = MESHES["2x2x2"], (16,) * rank
    specs = specs_of(rank, sizes)
    far = [[one_move(a, b, shape, sizes) for b in specs] for a in specs]
    for k in range(len(specs)):
        through = far[k]
        for row in far:
            first = row[k]
            if first < math.inf:
                row[:] = [min(d, first + rest) for d, rest in zip(row, through, strict=True)]
    for have, row in zip(specs, far, strict=True):
        for need, least in zip(specs, row, strict=True):
            assert relayout_bytes(have, need, shape, 1, sizes) == least, (have, need)


def one_move(have, need, shape, sizes):
    """Elements that a device sends in one move between two specs; infinite where none leads there."""
    volume = Fraction(math.prod(shape), math.prod(sizes[a] for entry in have for a in entry))
    if have == need:
        return 0
    counts = [[math.prod(sizes[a] for a in entry) for entry in spec] for spec in (have, need)]
    if counts[0] == counts[1]:
        return volume
    if not all(a[: len(b)] == b or b[: len(a)] == a for a, b in zip(have, need, strict=True)):
        return math.inf
    held, wanted = ({a for entry in spec for a in entry} for spec in (have, need))
    lost = [a[len(b) :] for a, b in zip(have, need, strict=True) if len(a) > len(b)]
    group = math.prod(sizes[a] for axes in lost for a in axes)
    if held < wanted and not lost:
        return 0
    if wanted < held and len(lost) == 1:
        return volume * (group - 1)
    return volume * (group - 1) / group if held == wanted else math.inf


S = 8 * 16  # elements of the arrays below


@pytest.mark.parametrize(
    ("have", "need", "steps", "sent"),
    [
        ("a -", "- a", ["all-to-all"], S / 2 / 2),  # a dim lets an axis go to another dim
        ("a -", "b -", ["collective-permute"], S / 2),  # a dim goes from one axis to another
        ("a b", "b a", ["collective-permute"], S / 4),  # two dims swap their axes
        ("ab -", "ba -", ["collective-permute"], S / 4),  # the same axes, the other way round
        ("a b", "ab -", ["all-to-all"], S / 4 / 2),  # two dims' axes merge on one
        ("ab -", "- ab", ["all-to-all"], S / 4 * 3 / 4),  # two axes at once: one by one would send S/4
        ("ab -", "b -", ["collective-permute", "all-gather"], S / 4 + S / 4),  # the major axis goes
        ("- -", "a b", ["slice", "slice"], 0),
        ("a -", "a b", ["slice"], 0),
        ("ab -", "a -", ["all-gather"], S / 4),
        ("a -", "- b", ["slice", "all-gather"], S / 4),  # cut first: the gathered pieces are half as large
        ("a b", "a b", [], 0),
    ],
)
def test_single_relayouts(have, need, steps, sent):
    sizes = MESHES["2x2"]
    have, need = (tuple(tuple(e.strip("-")) for e in spec.split()) for spec in (have, need))
    found = relayout(have, need, (8, 16), sizes)
    assert [s.op for s in found] == steps
    assert relayout_bytes(have, need, (8, 16), 4, sizes) == 4 * sent


def test_idle_axes_share_the_work():
    have, need = (("a", "b"), ()), (("b",), ("a",))
    assert relayout_bytes(have, need, (64, 64), 1, {"a": 2, "b": 2}) == 64 * 64 / 4 * (3 / 4 + 1 / 2)
    # cut in two by the idle axis, two dims can swap shards of half the size, which are gathered at the end
    for idle in (2, 4):
        sizes = {"a": 2, "b": 2, "idle": idle}
        steps = relayout(have, need, (64, 64), sizes)
        assert [s.op for s in steps] == ["slice", "collective-permute", "all-gather"]
        assert relayout_bytes(have, need, (64, 64), 1, sizes) == 64 * 64 / 4 * (1 / 2 + 1 / 2)


def test_an_axis_may_move_in_parts():
    sizes = {"a": 4, "b": 2}
    steps = relayout((("a",), ("b",)), (("b",), ("a",)), (64, 64), sizes)
    assert {part_of(a) for s in steps for a in s.axes if part_of(a)} == {("a", 1, 2), ("a", 2, 2)}
    assert all(whole_axes(s.axes) in {("a",), ("a", "b"), ("b", "a")} for s in steps)
    # whole axes: 3/4 or 1/2 to bring both to one dim, 1 to swap them there, and the other of the two to take one back
    assert relayout_bytes((("a",), ("b",)), (("b",), ("a",)), (64, 64), 1, sizes) == 64 * 64 / 8 * (1 + 1 / 2)


def test_what_does_not_divide_is_not_cut():
    sizes = {"a": 2, "b": 2}
    # dim 1 cannot take an axis, so the exchange of the two axes over it is no way
    steps = relayout((("a", "b"), ()), (("b", "a"), ()), (8, 3), sizes)
    assert [s.op for s in steps] == ["collective-permute"]
    # a spec that does not divide counts as padded: shards of 3 rows
    assert relayout_bytes((("a",),), (("b",),), (5,), 4, sizes) == 3 * 4


def test_axes_of_size_1_say_nothing():
    sizes = {"a": 2, "one": 1}
    assert relayout((("one", "a"), ()), (("a",), ("one",)), (8, 8), sizes) == ()
    assert [s.op for s in relayout((("one", "a"), ()), ((), ("a", "one")), (8, 8), sizes)] == ["all-to-all"]


def test_thousands_of_devices():
    sizes = {"pod": 4, "data": 16, "seq": 16, "model": 4}
    have, need = (("pod", "data"), ("seq",), ("model",)), (("seq", "pod"), ("model",), ("data",))
    steps = relayout(have, need, (4096, 4096, 4096), sizes)
    volume = 4096**3 // 4096
    assert relayout_bytes(have, need, (4096, 4096, 4096), 1, sizes) < 3 * volume
    assert math.inf > greedy_bytes(have, need, (4096, 4096, 4096), sizes) > 100 * volume
    assert steps[0].before == have


@pytest.mark.parametrize("axes", ["abcde", "abcdef"])
def test_many_axes_and_many_dims(axes):
    """More ways than a search can look at: still no more than the greedy steps, and far less where a search finds its way."""
    sizes, n = dict.fromkeys(axes, 2), len(axes)
    shift = tuple((a,) for a in axes), tuple((a,) for a in axes[1:] + axes[0])
    apart = (*shift[0], (), ()), ((), (), *shift[1])
    spread = ((tuple(axes), *((),) * (n - 1))), tuple((a,) for a in reversed(axes))
    for have, need in (shift, apart, spread):
        shape = (64,) * len(have)
        assert relayout_bytes(have, need, shape, 1, sizes) <= greedy_bytes(have, need, shape, sizes)
    assert [s.op for s in relayout(*shift, (64,) * n, sizes)] == ["collective-permute"]
    assert relayout_bytes(*spread, (64,) * n, 1, sizes) < 2 * 64**n / 2**n
