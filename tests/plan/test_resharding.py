"""Reshardings: devices are simulated in NumPy, and every shard arrives; what single moves send, by hand."""

import itertools
import math
import random

import numpy as np
import pytest
from all_specs import specs_of

from meshpar._src.lower.collectives import permutation
from meshpar._src.plan.resharding import reshard, reshard_bytes

MESHES = {
    "2x2": {"a": 2, "b": 2},
    "4x2": {"a": 4, "b": 2},
    "2x3": {"a": 2, "b": 3},
    "2x2x2": {"a": 2, "b": 2, "c": 2},
    "2x4x2": {"a": 2, "b": 4, "c": 2},
}


class Devices:
    """Every device's part of an array, moved as the moves say: by the definition of each collective, on whole groups."""

    def __init__(self, array, spec, sizes):
        self.array, self.sizes = array, sizes
        self.places = [dict(zip(sizes, k, strict=True)) for k in itertools.product(*map(range, sizes.values()))]
        self.parts = [self.part(array, spec, place) for place in self.places]
        self.sent = [0] * len(self.places)

    def number(self, axes, place):
        """The place along some axes, the first one major."""
        number = 0
        for a in axes:
            number = number * self.sizes[a] + place[a]
        return number

    def part(self, array, spec, place):
        for dim, axes in enumerate(spec):
            n = math.prod(self.sizes[a] for a in axes)
            array = np.split(array, n, dim)[self.number(axes, place)]
        return array

    def group(self, axes, place):
        """The devices that differ from one in these axes alone, in their order along them."""
        mine = [k for k, p in enumerate(self.places) if all(p[a] == place[a] for a in self.sizes if a not in axes)]
        return sorted(mine, key=lambda k: self.number(axes, self.places[k]))

    def make(self, move):
        gains = [i for i in move.dims if len(move.after[i]) > len(move.before[i])]
        loses = [i for i in move.dims if len(move.after[i]) < len(move.before[i])]
        new = []
        for k, place in enumerate(self.places):
            group, x = self.group(move.axes, place), self.parts[k]
            me = group.index(k)
            assert len(group) == move.group
            if move.op == "slice":
                (dim,) = gains
                x = np.split(x, len(group), dim)[me]
            elif move.op == "all-gather":
                (dim,) = loses
                self.sent[k] += (len(group) - 1) * x.nbytes  # around a ring
                x = np.concatenate([self.parts[g] for g in group], dim)
            elif move.op == "all-to-all":
                (to,), (of,) = gains, loses
                self.sent[k] += sum(p.nbytes for i, p in enumerate(np.split(x, len(group), to)) if i != me)
                x = np.concatenate([np.split(self.parts[g], len(group), to)[me] for g in group], of)
            else:  # one part arrives in each permute; every element is in exactly one of them
                self.sent[k] += x.nbytes
                wanted = self.part(self.array, move.after, place)
                pairs = [permutation(move, self.sizes, turn) for turn in range(move.times)]
                senders = [self.parts[group[next(s for s, t in some if t == me)]] for some in pairs]
                parts = [np.intersect1d(part, wanted) for part in senders]
                assert {p.size * move.times for p in parts} == {wanted.size}
                assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(wanted, None))
                x = wanted
            new.append(x)
        self.parts = new


def assert_arrives(have, need, shape, sizes, bounded=True):
    x = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    devices = Devices(x, have, sizes)
    moves = reshard(have, need, shape, sizes)
    whole = max(devices.part(x, spec, devices.places[0]).size for spec in (have, need))
    for move in moves:
        devices.make(move)
        assert not bounded or all(part.size <= whole for part in devices.parts), f"{have} → {need}: {moves}"
    for place, part in zip(devices.places, devices.parts, strict=True):
        np.testing.assert_array_equal(part, devices.part(x, need, place), err_msg=f"{have} → {need}")
    assert set(devices.sent) == {reshard_bytes(have, need, shape, 4, sizes)}, (have, need)
    return moves


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_shard_arrives_and_the_bytes_are_near_the_least_possible(mesh, rank):
    """A device has to receive the elements of its new shard that it does not have. It sends at most a new shard, or twice that
    where the numbers of shards are not multiples of each other or the parts are more than 8."""
    sizes, nested = MESHES[mesh], 3 not in MESHES[mesh].values()
    shape = (16, 32, 16)[:rank] if nested else (36, 12, 6)[:rank]
    pairs = list(itertools.product(specs_of(rank, sizes), repeat=2))
    made, least = set(), 0
    for have, need in random.Random(rank).sample(pairs, min(len(pairs), 60)):
        moves = assert_arrives(have, need, shape, sizes)
        made |= {m.op for m in moves}
        assert [m.before for m in moves[1:]] == [m.after for m in moves[:-1]]
        sent, (shard, missing) = reshard_bytes(have, need, shape, 1, sizes), bounds(have, need, shape, sizes)
        assert missing <= sent <= shard * (1 if nested and math.prod(sizes.values()) <= 8 else 2), (have, need)
        least += sent == missing
    assert least
    assert made == {"slice", "all-gather", "collective-permute"} | ({"all-to-all"} if rank > 1 else set())


def bounds(have, need, shape, sizes):
    """(elements of a new shard, how many of them a device does not have: the mean over the devices)."""
    x = np.arange(math.prod(shape)).reshape(shape)
    devices = Devices(x, have, sizes)
    new = [devices.part(x, need, place) for place in devices.places]
    missing = [np.setdiff1d(n, old).size for n, old in zip(new, devices.parts, strict=True)]
    return new[0].size, sum(missing) / len(new)


@pytest.mark.parametrize(("sizes", "most"), [({"a": 32, "b": 8}, 1), ({"a": 256, "b": 2}, 2)])
def test_axes_of_large_meshes_change_places_by_exchanges(sizes, most):
    """Of all specs of a matrix; many permutes of small parts are replaced with all-to-alls, which send up to twice the shard."""
    shape = (512, 512)
    for have, need in itertools.product(specs_of(2, sizes), repeat=2):
        moves = reshard(have, need, shape, sizes)
        shards = [math.prod(shape) / math.prod(sizes[a] for e in s for a in e) for s in (have, need)]
        swapped = have == need[::-1] and have[0] and have[1]
        assert reshard_bytes(have, need, shape, 1, sizes) <= shards[1] * (most if swapped else 2)
        between = [math.prod(shape) / math.prod(sizes[a] for e in m.after for a in e) for m in moves]
        assert all(n <= max(shards) for n in between)
        assert sum(m.times for m in moves) <= 10


def test_a_dim_between_the_moves_that_would_not_divide_is_gathered():
    """A dim of 4 cannot be split over both axes, not even between two moves."""
    sizes, shape = {"a": 4, "b": 2}, (4, 4)
    moves = assert_arrives((("a",), ("b",)), (("b",), ()), shape, sizes, bounded=False)
    assert all(math.prod(sizes[a] for a in e) <= 4 for m in moves for e in m.after)


S = 8 * 16  # elements of the arrays below


@pytest.mark.parametrize(
    ("have", "need", "moves", "sent"),
    [
        ("a -", "- a", ["all-to-all"], S / 2 / 2),  # an axis goes to another dim
        ("a -", "b -", ["collective-permute"], S / 2),  # one axis for another: an all-gather sends as much
        ("a b", "b a", ["collective-permute"], S / 4),  # two dims swap their axes
        ("ab -", "ba -", ["collective-permute"], S / 4),  # the same axes, the other way round
        ("a b", "ab -", ["all-to-all"], S / 4 / 2),  # two dims' axes merge on one
        ("ab -", "- ab", ["all-to-all"], S / 4 * 3 / 4),  # two axes at once: one by one would send S/4
        ("- -", "a b", ["slice", "slice"], 0),
        ("a -", "a b", ["slice"], 0),
        ("ab -", "a -", ["all-gather"], S / 4),
        ("ab -", "- -", ["all-gather"], S / 4 * 3),
        ("a -", "- b", ["slice", "all-gather"], S / 4),  # cut first: the gathered pieces are half as large
        ("a b", "a b", [], 0),
    ],
)
def test_single_reshardings(have, need, moves, sent):
    sizes = MESHES["2x2"]
    have, need = (tuple(tuple(e.strip("-")) for e in spec.split()) for spec in (have, need))
    found = reshard(have, need, (8, 16), sizes)
    assert [m.op for m in found] == moves
    assert reshard_bytes(have, need, (8, 16), 4, sizes) == 4 * sent


def test_shards_that_keep_their_shape_are_exchanged_once():
    """Around a circle of dims no axis can go straight to its place: each device sends its shard to another one."""
    for axes in ("abc", "abcd"):
        sizes = dict.fromkeys(axes, 2)
        have, need = tuple((a,) for a in axes), tuple((a,) for a in axes[1:] + axes[0])
        (move,) = assert_arrives(have, need, (4,) * len(axes), sizes)
        assert move.op == "collective-permute"


def test_a_permute_is_a_bijection_in_which_shards_at_home_stay():
    sizes = {"a": 2, "b": 2, "c": 2}
    seen = 0
    for have, need in list(itertools.product(specs_of(2, "abc"), repeat=2))[::5]:
        for move in reshard(have, need, (8, 16), sizes):
            if move.op == "collective-permute":
                sources, targets = zip(*permutation(move, sizes), strict=True)
                assert sorted(sources) == sorted(targets) == list(range(move.group))
                assert any(s != t for s, t in zip(sources, targets, strict=True))
                seen += 1
    assert seen
    (swap,) = reshard((("a",), ("b",)), (("b",), ("a",)), (8, 16), {"a": 2, "b": 2})
    assert permutation(swap, {"a": 2, "b": 2}) == [(0, 0), (1, 2), (2, 1), (3, 3)]


def test_several_axes_go_in_one_all_to_all():
    sizes = {"a": 2, "b": 2, "c": 2}
    (move,) = assert_arrives((("a", "b", "c"), ()), (("a",), ("b", "c")), (8, 16), sizes)
    assert (move.op, move.axes, move.group, move.dims) == ("all-to-all", ("b", "c"), 4, (0, 1))


def test_a_dim_that_does_not_divide_counts_as_padded():
    # four shards of 2 rows
    assert reshard_bytes((("a",),), (("b",),), (5,), 4, {"a": 4, "b": 4}) == 2 * 4


def test_axes_of_size_1_say_nothing():
    sizes = {"a": 2, "one": 1}
    assert reshard((("one", "a"), ()), (("a",), ("one",)), (8, 16), sizes) == ()
    assert [m.op for m in reshard((("one", "a"), ()), ((), ("a", "one")), (8, 16), sizes)] == ["all-to-all"]
