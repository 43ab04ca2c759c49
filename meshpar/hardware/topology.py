"""How the axes of a mesh lie on the torus of a slice: read from the coordinates of its devices, or worked out for a slice
that is only named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ..compat.devices import device_mesh
from ..errors import MeshError
from ..layout import AnyMesh
from ..mesh import GPUS_PER_HOST, TPU_KINDS, wraps

_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}
_PLACES = ("x", "y", "z", "core", "slice")


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a mesh axis that runs along one dimension of the slice.

    Attributes:
      size: how many devices.
      dim: ``x``, ``y``, ``z`` (torus dimensions), ``core`` (of one chip), ``switch`` (GPUs on one NVSwitch), ``slice`` (over
        DCN), or ``""``: not known.
      wraps: whether it is a ring; a line otherwise.
      stride: how many places its neighbours are apart; so many groups share each link.
    """

    size: int
    dim: str = ""
    wraps: bool = False
    stride: int = 1


Torus = dict[str, tuple[Stage, ...]]
"""axis → its stages, major to minor; their sizes multiply to the axis' size."""


def torus_of(mesh: AnyMesh) -> Torus:
    """The stages of every axis of a mesh.

    An axis that jumps about (a permuted or ragged set of devices), and every axis of a mesh whose devices have no coordinates
    (CPUs, an abstract mesh), is one stage of which nothing more is known. GPUs of one process are taken to share a switch.
    """
    if not isinstance(mesh, Mesh):
        return _unknown(mesh.shape)
    devices = mesh.devices
    if getattr(devices.flat[0], "coords", None) is None:
        if devices.flat[0].platform in ("gpu", "cuda"):
            first = devices.flat[0].process_index
            return switched(dict(mesh.shape), sum(d.process_index == first for d in devices.flat))
        return _unknown(mesh.shape)
    return _stages(devices, mesh.axis_names)


def torus_of_slices(sizes: Mapping[str, int], slices: int, kind: str, chips: Sequence[int], devices: int = 1) -> Torus:
    """The stages of every axis of a mesh over slices that are only named, assigned as :func:`meshpar.mesh` would.

    Args:
      sizes: axis → size.
      slices, kind, chips: of the topology.
      devices: JAX devices of a chip.

    Raises:
      MeshError: the axes do not multiply to the number of devices.
    """
    text = ", ".join(f"{a}={n}" for a, n in sizes.items())
    total = slices * math.prod(chips) * devices
    if math.prod(sizes.values()) != total:
        raise MeshError(
            f"mesh ({text}) has {math.prod(sizes.values())} devices, but the topology has {total}",
            fixes=["make the sizes multiply to that number, or write -1 for one of them"],
        )
    if kind not in TPU_KINDS:
        return switched(sizes, min(math.prod(chips), GPUS_PER_HOST))
    return _stages(
        device_mesh(tuple(sizes.values()), _places(slices, kind, chips, devices), slices, text), tuple(sizes)
    )


def switched(sizes: Mapping[str, int], domain: int) -> Torus:
    """The stages of axes over nodes of GPUs on a switch: the minor axes fill a node, what is left goes between nodes."""
    out: Torus = {}
    left = domain
    for axis, n in reversed(list(sizes.items())):
        inner = math.gcd(n, left)
        left //= inner
        if inner != n:
            left = 1
        stages = [Stage(n // inner, "slice")] * (n != inner) + [Stage(inner, "switch")] * (inner > 1)
        out[axis] = tuple(stages) or (Stage(1),)
    return {axis: out[axis] for axis in sizes}


@dataclass(frozen=True, slots=True)
class _Chip:
    """Stands for a device of a slice that is not here: what the assignment of mesh axes looks at."""

    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    device_kind: str
    id: int
    platform: str = "tpu"
    process_index: int = 0


def _places(slices: int, kind: str, chips: Sequence[int], devices: int) -> list[_Chip]:
    name = next(text for text, k in _KINDS.items() if k == kind)
    x, y, z = (*chips, 1)[:3]
    at = [(s, k, j, i, c) for s in range(slices) for k in range(z) for j in range(y) for i in range(x)
          for c in range(devices)]  # fmt: skip
    return [_Chip((i, j, k), c, s, name, n) for n, (s, k, j, i, c) in enumerate(at)]


def _unknown(sizes: Mapping[str, int]) -> Torus:
    return {axis: (Stage(n),) for axis, n in sizes.items()}


def _stages(devices: np.ndarray, axes: Sequence[str]) -> Torus:
    first = devices.flat[0]
    places = np.array([_place(d) for d in devices.flat]).reshape(*devices.shape, len(_PLACES))
    extent = places.reshape(-1, len(_PLACES)).max(0) + 1
    kind = _KINDS.get(first.device_kind)
    rings = wraps(kind, [int(n) for n in extent[: 2 if kind in ("v5e", "v6e") else 3]]) if kind else (False,) * 3
    rings = (*rings, False, False)
    out: Torus = {}
    for k, axis in enumerate(axes):
        line = places[tuple(slice(None) if i == k else 0 for i in range(devices.ndim))]
        runs = _runs(line)
        rest = np.moveaxis(places, k, 0)
        if runs is None or not np.array_equal(rest - rest[:1], np.broadcast_to(
            (line - line[:1]).reshape(-1, *(1,) * (devices.ndim - 1), len(_PLACES)), rest.shape)):  # fmt: skip
            out[axis] = (Stage(devices.shape[k]),)
        else:
            out[axis] = tuple(
                Stage(n, _PLACES[d], bool(rings[d] and n * stride == extent[d]), stride) for n, d, stride in runs
            )
    return out


def _place(device: Any) -> tuple[int, ...]:
    coords = (*device.coords, 0, 0)[:3]
    return (*coords, getattr(device, "core_on_chip", None) or 0, getattr(device, "slice_index", None) or 0)


def _runs(line: np.ndarray) -> list[tuple[int, int, int]] | None:
    """(length, dimension, stride) of the runs, major to minor, of places that differ in one coordinate; None: there are none."""
    out: list[tuple[int, int, int]] = []
    while len(line) > 1:
        moved = np.flatnonzero(line[1] != line[0])
        if len(moved) != 1:
            return None
        d = int(moved[0])
        n = 1
        while n < len(line) and np.array_equal(np.delete(line[n], d), np.delete(line[0], d)):
            n += 1
        blocks = line[: len(line) // n * n].reshape(-1, n, line.shape[1])
        if len(line) % n or not np.array_equal(
            blocks - blocks[:, :1], np.broadcast_to(blocks[0] - blocks[0, :1], blocks.shape)
        ):
            return None
        out.append((n, d, abs(int(line[1, d] - line[0, d]))))
        line = line[::n]
    return out[::-1] or [(1, 0, 1)]


class Places:
    """The places of devices on their slice, by number.

    Attributes:
      at: [devices, 5]: coordinates, core, slice.
      extent: sides of the slice; ``rings``: which of them wrap.
    """

    def __init__(self, at: np.ndarray, rings: Sequence[bool]):
        self.at, self.rings = at, tuple(rings)
        self.extent = at.max(0) + 1

    @classmethod
    def of(cls, devices: np.ndarray) -> Places:
        """The places of devices that have coordinates.

        Raises:
          MeshError: these have none.
        """
        first = devices.flat[0]
        kind = _KINDS.get(getattr(first, "device_kind", ""))
        if kind is None or getattr(first, "coords", None) is None:
            raise MeshError(f"devices of kind {getattr(first, 'device_kind', '?')!r} have no places on a torus")
        at = np.array([_place(d) for d in devices.flat])
        extent = at.max(0) + 1
        rings = wraps(kind, [int(n) for n in extent[: 2 if kind in ("v5e", "v6e") else 3]])
        return cls(at, (*rings, *(False,) * (len(_PLACES) - len(rings))))

    def stages(self, members: Sequence[int]) -> list[Stage]:
        """The stages of a group of devices: one for each dimension along which they differ."""
        found = []
        for d, name in enumerate(_PLACES):
            along = np.unique(self.at[list(members), d])
            if len(along) > 1:
                stride = int(np.diff(along).min())
                whole = bool(self.rings[d]) and len(along) * stride == self.extent[d]
                found.append(Stage(len(along), name, whole, stride))
        return found

    def hop(self, pair: Sequence[int]) -> tuple[Stage, int]:
        """(the stage along which two devices are neighbours, how many links are between them)."""
        a, b = (self.at[n] for n in pair[:2])
        steps = np.abs(a - b)
        rings = np.array(self.rings)
        steps = np.where(rings, np.minimum(steps, self.extent - steps), steps)
        d = int(np.argmax(steps))
        ring = bool(self.rings[d])
        return Stage(max(2, int(self.extent[d])), _PLACES[d], ring), max(1, int(steps.sum()))
