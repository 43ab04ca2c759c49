"""Moves between random shardings: exact, no byte more than needed, and within the planned memory."""

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
        masks = {}
        for device, index in sharding.devices_indices_map(shape).items():
            masks[device] = np.zeros(shape, bool)
            masks[device][index] = True
        return masks

    has = elements(source)
    none = np.zeros(shape, bool)
    return max((mask & ~has.get(d, none)).sum() for d, mask in elements(target).items())


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


SHAPE = (24, 24, 24)


def planned(source, target):
    return mp.move({"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}, source={"w": source}, target={"w": target})


@pytest.mark.parametrize("disjoint", [False, True])
def test_100_random_pairs_receive_no_byte_more_than_needed(disjoint):
    for source, target in pairs(100, disjoint):
        move = planned(source, target)
        assert move.bytes_received == 4 * needed(source, target, SHAPE), (source, target)
        if len(source.device_set) == len(target.device_set) == 8:
            assert move.bytes_sent <= 1.05 * move.bytes_received


@pytest.mark.parametrize("disjoint", [False, True])
def test_random_pairs_are_exact(disjoint):
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    for source, target in pairs(4 if disjoint else 12, disjoint):
        y = planned(source, target)({"w": jax.device_put(x, source)})["w"]
        assert y.sharding.is_equivalent_to(target, 3)
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])


def test_the_bits_of_narrow_floats_stay():
    """Also those of NaNs, which differ."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    x = bits.view(jnp.bfloat16)
    mesh = mp.mesh("a=8")
    source, target = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("a",), (None, "a")))
    move = mp.move({"w": x}, source={"w": source}, target={"w": target}, donate=True)
    y = move({"w": jax.device_put(x, source)})["w"]
    np.testing.assert_array_equal(np.asarray(y).view(np.uint16), bits)
