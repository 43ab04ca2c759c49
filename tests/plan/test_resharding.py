"""Reshardings: devices are simulated in NumPy, and every shard arrives; what single moves send, by hand."""

import itertools
import math
import random

import numpy as np
import pytest
from all_specs import specs_of

from meshpar.lower.collectives import permutation
from meshpar.plan.resharding import reshard, reshard_bytes

MESHES = {"2x2": {"a": 2, "b": 2}, "4x2": {"a": 4, "b": 2}, "2x2x2": {"a": 2, "b": 2, "c": 2}}


class Devices:
    """Every device's part of an array, moved as the moves say: by the definition of each collective, on whole groups."""

    def __init__(self, array, spec, sizes):
        self.sizes = sizes
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
            else:
                source = {t: s for s, t in permutation(move, self.sizes)}
                self.sent[k] += x.nbytes
                x = self.parts[group[source[me]]]
            new.append(x)
        self.parts = new


def assert_arrives(have, need, shape, sizes):
    x = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    devices = Devices(x, have, sizes)
    moves = reshard(have, need, sizes)
    for move in moves:
        devices.make(move)
    for place, part in zip(devices.places, devices.parts, strict=True):
        np.testing.assert_array_equal(part, devices.part(x, need, place), err_msg=f"{have} → {need}")
    assert set(devices.sent) == {reshard_bytes(have, need, shape, 4, sizes)}, (have, need)
    return moves


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_shard_arrives_and_so_many_bytes_are_sent(mesh, rank):
    sizes = MESHES[mesh]
    pairs = list(itertools.product(specs_of(rank, sizes), repeat=2))
    made = set()
    for have, need in random.Random(rank).sample(pairs, min(len(pairs), 400)):
        moves = assert_arrives(have, need, (8, 16, 8)[:rank], sizes)
        made |= {m.op for m in moves}
        assert [m.before for m in moves[1:]] == [m.after for m in moves[:-1]]
    assert made == {"slice", "all-gather", "collective-permute"} | ({"all-to-all"} if rank > 1 else set())


def gathered(have, need, shape, sizes):
    """Elements that each device sends where every dim that changes is gathered, and cut anew."""
    sent, local = 0, math.prod(shape) // math.prod(sizes[a] for entry in have for a in entry)
    for h, n in zip(have, need, strict=True):
        same = next((k for k, (x, y) in enumerate(zip(h, n, strict=False)) if x != y), min(len(h), len(n)))
        group = math.prod(sizes[a] for a in h[same:])
        sent += local * (group - 1)
        local *= group
    return sent


@pytest.mark.parametrize("mesh", MESHES)
def test_never_sends_more_than_gathering_what_changes(mesh):
    sizes, shape = MESHES[mesh], (8, 16)
    pairs = list(itertools.product(specs_of(2, sizes), repeat=2))
    sent = [(reshard_bytes(h, n, shape, 1, sizes), gathered(h, n, shape, sizes)) for h, n in pairs]
    assert all(mine <= all_ for mine, all_ in sent)
    assert sum(mine < all_ for mine, all_ in sent) > len(pairs) / 4


S = 8 * 16  # elements of the arrays below


@pytest.mark.parametrize(
    ("have", "need", "moves", "sent"),
    [
        ("a -", "- a", ["all-to-all"], S / 2 / 2),  # an axis goes to another dim
        ("a -", "b -", ["all-gather", "slice"], S / 2),  # a dim goes from one axis to another: no less in a permute
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
    found = reshard(have, need, sizes)
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
        for move in reshard(have, need, sizes):
            if move.op == "collective-permute":
                sources, targets = zip(*permutation(move, sizes), strict=True)
                assert sorted(sources) == sorted(targets) == list(range(move.group))
                assert any(s != t for s, t in zip(sources, targets, strict=True))
                seen += 1
    assert seen
    (swap,) = reshard((("a",), ("b",)), (("b",), ("a",)), {"a": 2, "b": 2})
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
    assert reshard((("one", "a"), ()), (("a",), ("one",)), sizes) == ()
    assert [m.op for m in reshard((("one", "a"), ()), ((), ("a", "one")), sizes)] == ["all-to-all"]
