"""Source and target on the same devices: their meshes as one mesh of prime axes, and a sharding as parts of dims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ..layout import AnyMesh, Spec


def devices_of(mesh: AnyMesh) -> tuple[Any, ...]:
    """The devices of a mesh in its order; of an abstract mesh, their numbers."""
    return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else tuple(range(mesh.size))


@dataclass(frozen=True, slots=True)
class Factored:
    """Two meshes over the same devices as one mesh, whose axes have prime sizes.

    Attributes:
      sizes: axis → its size, in the order of the source's devices.
      source, target: axis of that mesh → its axes here, major to minor.
    """

    sizes: Mapping[str, int]
    source: Mapping[str, tuple[str, ...]]
    target: Mapping[str, tuple[str, ...]]


def primes(n: int) -> Iterator[int]:
    """The prime factors of a number, ascending."""
    p = 2
    while n > 1:
        while n % p == 0:
            yield p
            n //= p
        p += 1


@lru_cache(maxsize=256)
def factored(source: AnyMesh, target: AnyMesh) -> Factored | None:
    """The common prime axes of two meshes; None: other devices, or an order of devices that no such axes describe.

    Given ``data=8`` and ``replica=2, model=4`` over the same devices in the same order: ``data.0=2, data.1=2, data.2=2``, of
    which ``replica`` has the first one, and ``model`` the others.
    """
    position = {d: k for k, d in enumerate(devices_of(target))}
    at = [position.get(d, -1) for d in devices_of(source)]
    if len(at) != len(position) or -1 in at or at[:1] != [0]:
        return None
    sizes: dict[str, int] = {}
    strides: dict[str, int] = {}  # in the order of the target's devices
    found: dict[str, tuple[str, ...]] = {}
    stride, number = len(at), np.zeros(len(at), int)
    for axis, size in source.shape.items():
        factors = list(primes(size))
        found[axis] = tuple(axis if len(factors) == 1 else f"{axis}.{k}" for k in range(len(factors)))
        for name, n in zip(found[axis], factors, strict=True):
            stride //= n
            sizes[name], strides[name] = n, at[stride]
            number += np.arange(len(at)) // stride % n * strides[name]
    if not np.array_equal(number, at):
        return None
    names, stride = sorted(sizes, key=lambda name: -strides[name]), target.size
    of: dict[str, tuple[str, ...]] = {}
    for axis, size in target.shape.items():
        inner = stride // size
        of[axis] = tuple(n for n in names if inner <= strides[n] and strides[n] * sizes[n] <= stride)
        if math.prod(sizes[n] for n in of[axis]) != size:  # a prime axis is in two axes of the target
            return None
        stride = inner
    return Factored(sizes, found, of)


@dataclass(frozen=True, slots=True)
class Parts:
    """The dims of an array cut into parts, each sharded over at most one prime axis on either side.

    Attributes:
      sizes: of the parts; parts of one dim are major to minor.
      have, need: prime axis → the number of its part, before and after.
    """

    sizes: tuple[int, ...]
    have: Mapping[str, int]
    need: Mapping[str, int]

    def local(self, placed: Mapping[str, int]) -> list[int]:
        """The sizes of the parts on a device, of which ``placed`` are sharded."""
        return [1 if k in placed.values() else n for k, n in enumerate(self.sizes)]


def parts_of(shape: Sequence[int], have: Spec, need: Spec, mesh: Factored) -> Parts | None:
    """The parts of an array under two specs; None: no parts fit both (3 shards of a dim before, 2 after).

    Given a dim of 32 sharded over x (4) before, and over y (2) after: parts of 2, 2 and 8.
    """
    sizes: list[int] = []
    where: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for n, *entries in zip(shape, have, need, strict=True):
        before, after = (
            [name for axis in entry for name in of[axis]]
            for entry, of in zip(entries, (mesh.source, mesh.target), strict=True)
        )
        ends = [list(itertools.accumulate((mesh.sizes[a] for a in axes), int.__mul__)) for axes in (before, after)]
        bounds = sorted({1, *ends[0], *ends[1], n})
        if any(b % a for a, b in itertools.pairwise(bounds)):
            return None
        first = len(sizes)
        for axes, stops, out in zip((before, after), ends, where, strict=True):
            out.update((axis, first + bounds.index(stop) - 1) for axis, stop in zip(axes, stops, strict=True))
        sizes += [b // a for a, b in itertools.pairwise(bounds)]
    return Parts(tuple(sizes), *where)
