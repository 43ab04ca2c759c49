"""Moves between random shardings: exact, no byte more than needed, and within the planned memory."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshpar as mp

SIZES = [(8,), (2, 4), (4, 2), (2, 2, 2), (4,), (2, 2), (2,), (6,), (3, 2), (2, 3), (1, 8)]


def random_sharding(draw, sizes, devices, rank):
    """A sharding over some axes of a mesh of random devices."""
    axes = [f"a{k}" for k in range(len(sizes))]
    mesh = Mesh(np.array(devices[: int(np.prod(sizes))]).reshape(sizes), axes)
    entries = [[] for _ in range(rank)]
    for axis in draw.sample(axes, len(axes)):
        if (at := draw.randrange(rank + 1)) < rank:
            entries[at].append(axis)
    return NamedSharding(mesh, PartitionSpec(*(tuple(e) or None for e in entries)))


def needed(source, target, shape):
    """The largest number of elements that a device of the target needs and does not have."""

    def elements(sharding):
        return {
            d: set(itertools.product(*(range(*i.indices(n)) for i, n in zip(index, shape, strict=True))))
            for d, index in sharding.devices_indices_map(shape).items()
        }

    has = elements(source)
    return max(len(need - has.get(d, set())) for d, need in elements(target).items())


def pairs(count, disjoint):
    draw = random.Random(7 + disjoint)
    out = []
    while len(out) < count:
        sizes = draw.choice(SIZES), draw.choice(SIZES)
        devices = jax.devices()
        first = draw.sample(devices, 8) if draw.random() < 0.3 else devices
        second = draw.sample(devices, 8) if draw.random() < 0.3 else devices
        if disjoint and all(np.prod(s) <= 4 for s in sizes):
            first, second = devices[:4], devices[4:]
        elif disjoint:
            continue
        out.append([random_sharding(draw, s, d, 3) for s, d in zip(sizes, (first, second), strict=True)])
    return out


@pytest.mark.parametrize("disjoint", [False, True])
def test_random_pairs_are_exact_and_receive_no_byte_more_than_needed(disjoint):
    shape = (24, 24, 24)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for source, target in pairs(20 if disjoint else 80, disjoint):
        move = mp.move({"w": jax.ShapeDtypeStruct(shape, jnp.float32)}, source={"w": source}, target={"w": target})
        y = move({"w": jax.device_put(x, source)})["w"]
        assert y.sharding.is_equivalent_to(target, 3)
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])
        assert move.bytes_received == 4 * needed(source, target, shape), (source, target)
        if source.device_set == target.device_set and len(source.device_set) == 8:
            assert move.bytes_sent <= 1.05 * move.bytes_received or move.collectives[0].op == "collective-permute"
