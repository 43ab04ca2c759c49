"""Slices: parsing their names, their devices, and the torus dimensions that each mesh axis runs along.

The stages of a mesh axis are computed from the coordinates of its devices, or from the name of a slice that is not attached.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from ...errors import MeshError, TorusWarning
from ..compat.compile_only_devices import device_mesh, gpu_topology, is_compile_only, tpu_topology, unknown_options
from ..compat.jax import user_stacklevel
from ..dims import near
from ..layout import AnyMesh
from ..units import mesh_text
from .chips import CHIPS, Chip, chip_of_kind

_TOPOLOGY = re.compile(r"\s*(?:(\d{1,9})\s*x\s*)?([A-Za-z]\w*):(\d{1,9}(?:x\d{1,9})*)\s*\Z")
_ACCELERATOR = re.compile(r"\s*(?:(\d{1,9})\s*x\s*)?([A-Za-z]\w*)-(\d{1,9})\s*\Z")
_PLACES = ("x", "y", "z", "core", "slice")
MAX_LARGER = 14
"""Number of :func:`larger_topologies`."""


# -- text and slices


class Topology(NamedTuple):
    """Slices of one shape, connected by DCN; for GPUs, hosts.

    Attributes:
      slices: number of slices or hosts.
      kind: name of the chip in the chip table.
      chips: chips of one slice along each torus dimension; for GPUs, (their number,).
    """

    slices: int
    kind: str
    chips: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        """The entry of the chip table."""
        return CHIPS[self.kind]

    @property
    def devices(self) -> int:
        """The number of JAX devices."""
        return self.slices * math.prod(self.chips) * self.chip.devices

    def __str__(self) -> str:
        text = f"{self.kind}:{_times(self.chips)}"
        return text if self.slices == 1 else f"{self.slices}x {text}"


def parse_topology(text: str) -> Topology:
    """``"2x v5e:16x16"`` → ``Topology(2, "v5e", (16, 16))``: slices, kind, chips along each dim of the torus.

    For GPUs, ``"2x h200:8"`` → ``Topology(2, "h200", (8,))``: hosts, kind, GPUs. An accelerator type of a cloud means the squarest
    slice of that size: ``"v5litepod-8"`` is ``v5e:2x4``, and ``"v5p-128"``, which counts TensorCores, is ``v5p:4x4x4``.

    Raises:
      MeshError: the kind or slice does not exist; the error lists those that do, nearest first.
    """
    m = _ACCELERATOR.match(text)
    if m is not None:
        chip = next((c for c in CHIPS.values() if m[2].lower() in c.accelerators), None)
        if chip is None:
            raise _unknown_chip(text, m[2])
        return _accelerator(text, int(m[1] or 1), chip, m[2], int(m[3]))
    m = _TOPOLOGY.match(text)
    if m is None or m[2] not in CHIPS:
        raise _unknown_chip(text, "" if m is None else m[2])
    slices, chip, chips = int(m[1] or 1), CHIPS[m[2]], tuple(int(n) for n in m[3].split("x"))
    if slices and chip.exists(chips):
        return Topology(slices, chip.name, chips)
    want = len(chip.torus) or 1
    if len(chips) != want:
        have = f"a {chip.name} slice has {want} torus dimensions"
        why = f"{f'{chip.name} GPUs have one size, their number' if chip.switch else have}, not {_times(chips)}"
    elif not slices:
        why = "it has 0 slices"
    elif chip.switch:
        why = f"more than {chip.switch} GPUs must be a multiple of {chip.switch} (full hosts)"
    else:
        why = f"there is no {chip.name} slice of {_times(chips)} chips"
    near = [str(Topology(max(1, slices), chip.name, s)) for s in _nearest(chip, chips)]
    raise MeshError(
        f"topology {text!r} does not exist: {why}", fixes=[f"the nearest: {', '.join(near)}", *_known(chip)]
    )


def larger_topologies(topology: str) -> list[Topology]:
    """The topologies with 2, 4, 8, … times the devices that exist: larger slices, then several of the largest."""
    where, factors = parse_topology(topology), [2**k for k in range(1, MAX_LARGER + 1)]
    counts = (n * math.prod(where.chips) for n in factors)
    shapes = [(n,) if where.chip.switch else next(iter(where.chip.shapes(n)), None) for n in counts]
    larger = [where._replace(chips=shape) for shape in shapes if shape is not None]
    largest = (larger or [where])[-1]
    return [*larger, *(largest._replace(slices=n * where.slices) for n in factors)][:MAX_LARGER]


def device_count(topology: str) -> int:
    """The number of JAX devices of a topology.

    Raises:
      MeshError: the text is not a topology.
    """
    return parse_topology(topology).devices


def chip_of(where: AnyMesh | Sequence[Any] | str) -> Chip | None:
    """The chip of a topology text (``"v5p:8x8x8"``, ``"4x h100:8"``), a mesh or a list of devices; None: not known (CPUs).

    Raises:
      MeshError: the text is not a topology.
    """
    if isinstance(where, str):
        return parse_topology(where).chip
    if isinstance(where, Mesh):
        where = list(where.devices.flat)
    elif not isinstance(where, Sequence):
        return None
    return chip_of_kind(str(getattr(where[0], "device_kind", ""))) if len(where) else None


def _accelerator(text: str, slices: int, chip: Chip, name: str, number: int) -> Topology:
    """The topology for an accelerator type of a cloud, such as ``v5litepod-8``."""
    chips, remainder = divmod(number, chip.counted)
    shapes = chip.shapes(chips) if slices and not remainder else []
    if shapes:
        return Topology(slices, chip.name, shapes[0])
    what = "TensorCores" if chip.counted == 2 else "chips"
    sizes = sorted({math.prod(s) * chip.counted for s in chip.shapes()}, key=lambda n: (abs(n - number), n))[:3]
    fixes = [f"the nearest: {', '.join(f'{name}-{n}' for n in sorted(sizes))}", *_known(chip)]
    raise MeshError(f"topology {text!r} does not exist: there is no {chip.name} slice of {number} {what}", fixes=fixes)


def _nearest(chip: Chip, chips: Sequence[int]) -> list[tuple[int, ...]]:
    """At most three existing slice shapes nearest to ``chips`` in number, then in the sides."""
    number = max(1, math.prod(chips))
    if chip.switch:
        below = number // chip.switch * chip.switch
        return [(n,) for n in (below, below + chip.switch) if n]

    def distance(shape: tuple[int, ...]) -> tuple[float, float]:
        sides = zip(sorted(shape, reverse=True), sorted(chips, reverse=True), strict=False)
        return abs(math.log(math.prod(shape) / number)), sum(abs(math.log(a / max(1, b))) for a, b in sides)

    return sorted(chip.shapes(), key=distance)[:3]


def _unknown_chip(text: str, name: str) -> MeshError:
    detail = f": there is no chip {name!r}" if name and name not in CHIPS else ""
    m = re.fullmatch(r"(?:(\d{1,9}) ?x? ?)?([a-z]\w*?)(?:[x\-: ](\d[\dx]{0,19}))?", text.strip().lower())
    similar = []
    if m and (size := m[3] or m[1]):  # h100x8, 8xh100, 4 h100:8, h1000:8
        slices, sides = int(m[1]) if m[3] and m[1] else 1, tuple(map(int, re.findall(r"\d+", size)))
        for chip in map(CHIPS.get, near(m[2], CHIPS, 0.8)[:1]):
            assert chip is not None
            shape = sides if chip.switch or sides[1:] else next(iter(chip.shapes(*sides)), sides)
            meant = [f'did you mean "{Topology(slices, chip.name, shape)}"?'] * chip.exists(shape)
            hosts = Topology(sides[0], chip.name, (chip.switch or 0,))  # 4x h100
            similar = meant + [f'{hosts.slices} hosts are "{hosts}"'] * bool(chip.switch and not m[3])
    return MeshError(f"topology {text!r} is not known{detail}", fixes=[*similar, *_known()])


def _known(only: Chip | None = None) -> list[str]:
    """Lines for error messages: the topologies of one chip, or of all chips of the table."""
    chips = list(CHIPS.values()) if only is None else [only]
    groups: dict[str, list[str]] = {}
    for c in chips:
        cubes = f", and larger ones whose sides are multiples of {c.cube}" if c.cube else ""
        hosts = f"up to {c.switch} GPUs in a host, or a multiple of {c.switch}" if c.switch else ""
        groups.setdefault(hosts or ", ".join(map(_times, c.slices)) + cubes, []).append(c.name)
    out = [f"{', '.join(names)}: {shapes}" for shapes, names in groups.items()]
    if only is None:
        clouds = [f"{c.accelerators[0]}-{math.prod(c.slices[-1]) * c.counted}" for c in chips if c.accelerators]
        out += [f"accelerator types: {', '.join(clouds)}", 'several slices or hosts: "2x v6e:16x16", "2x h200:8"']
    return out


def _times(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))


# -- devices that are not attached


def topology_devices(topology: str) -> tuple[Any, ...]:
    """The compile-only devices of a topology, from its compiler; the same objects in every call.

    Raises:
      MeshError: the topology is unknown, the chip has no compiler, or the compiler is not installed.
    """
    return _described(parse_topology(topology))


@functools.cache
def _described(topology: Topology) -> tuple[Any, ...]:
    """:func:`topology_devices` of a parsed topology; cached."""
    slices, kind, chips = topology
    chip = topology.chip
    if not chip.target:
        compiled = [c.name for c in CHIPS.values() if c.target]
        raise MeshError(
            f"topology {topology}: no compiler for {kind} chips; they can only be planned for",
            fixes=[
                'plan without devices: mp.plan(…, mesh="data=8", topology=…)',
                f"chips to compile for: {', '.join(compiled)}",
            ],
        )
    if chip.switch:
        _need_cuda_plugin()
        hosts, each = slices * max(1, chips[0] // chip.switch), min(chips[0], chip.switch)
        # XLA's description of the GPU, in protobuf text format
        target = (Path(__file__).parent / "targets" / f"{chip.target}.txtpb").read_text()
        return tuple(gpu_topology(target, hosts, each))
    rings = (*chip.rings(chips), False, False)[:3]
    try:
        return tuple(tpu_topology(chip.target, chips, slices, rings, chip.target_config))
    except jax.errors.JaxRuntimeError as error:
        raise MeshError(
            f"topology {str(topology)!r} does not exist: {str(error).splitlines()[0]}", fixes=_known(chip)
        ) from None


def _need_cuda_plugin() -> None:
    """Raise MeshError if JAX's CUDA plugin is not installed."""
    if any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return
    version = jax.__version__
    fix = f"pip install jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}   # no GPU is needed"
    raise MeshError("a GPU topology needs JAX's CUDA plugin, which is not installed", fixes=[fix])


def refused_options(mesh: AnyMesh, values: Mapping[str, Any]) -> dict[str, str]:
    """Compiler options that the compiler of a mesh's devices rejects → its message; empty for a mesh without devices."""
    if not isinstance(mesh, Mesh):
        return {}
    first = mesh.devices.flat[0]
    return unknown_options(first if is_compile_only(first) else mesh.local_devices[0], values)


def topology_of(devices: Sequence[Any]) -> str | None:
    """The topology of compile-only devices as text, ``"2x v5e:16x16"``; None for attached devices."""
    first = devices[0]
    if not is_compile_only(first):
        return None
    devices = first.client.devices()  # a mesh may use only some of them
    chip = chip_of_kind(first.device_kind)
    if chip is None:
        return None
    if chip.switch:
        hosts = len({d.process_index for d in devices})
        each = len(devices) // hosts
        several = hosts > 1 and each < chip.switch
        return str(Topology(hosts, chip.name, (each,)) if several else Topology(1, chip.name, (len(devices),)))
    sides = [max(c) + 1 for c in zip(*(d.coords for d in devices), strict=True)]
    slices = len({getattr(d, "slice_index", None) for d in devices})
    return str(Topology(slices, chip.name, tuple(sides[: len(chip.torus)])))


# -- axes on the torus


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a mesh axis that runs along one dimension of the slice.

    Attributes:
      size: number of devices.
      dim: ``x``, ``y``, ``z`` (torus dimensions), ``core`` (of one chip), ``switch`` (GPUs on one NVSwitch), ``slice`` (over
        DCN, all or some of its devices), or ``""``: not known.
      wraps: it is a ring; a line otherwise.
      stride: distance between neighbours along the dimension, in chips; also the number of groups that share each link.
      fills: for devices that are no run along one dimension but fill a box (JAX maps ``data=16`` to a v5e:4x4 like a snake): the
        stages of the box. Collectives other than rings run over these, since the order of devices does not matter to them.
      cells: for each device its index in the box, row-major; alike in all groups up to reflections, else ``()``.
    """

    size: int
    dim: str = ""
    wraps: bool = False
    stride: int = 1
    fills: tuple[Stage, ...] = ()
    cells: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[Stage, ...]:
        """The stages of the box that its devices fill; the stage itself, if they fill none."""
        return self.fills or (self,)

    @property
    def between(self) -> bool:
        """Whether it connects slices or nodes, all or some of its devices: over DCN."""
        return self.dim == "slice"

    @property
    def on_torus(self) -> bool:
        """Whether it runs along a torus dimension, which it may share with other groups, or is not known."""
        return self.dim not in ("switch", "slice", "core")

    @property
    def line(self) -> bool:
        """Whether a ring over this stage returns over the links of a line (never for two devices)."""
        return self.on_torus and not self.wraps and self.size > 2


Torus = dict[str, tuple[Stage, ...]]
"""axis → its stages, major to minor; their sizes multiply to the axis' size."""


def joined(stages: Iterable[Stage]) -> list[tuple[Stage, int]]:
    """(stage, number of given stages it is merged from): adjacent stages of one dimension are merged, stages of size 1 removed."""
    out: list[tuple[Stage, int]] = []
    for stage in stages:
        if stage.size == 1:
            continue
        if out and out[-1][0].dim == stage.dim != "" and out[-1][0].stride == stage.stride * stage.size:
            major, count = out.pop()
            out.append((Stage(major.size * stage.size, major.dim, major.wraps, stage.stride), count + 1))
        else:
            out.append((stage, 1))
    return out


def merged(stages: Iterable[Stage]) -> list[Stage]:
    """The stages, with nested stages of one torus dimension merged into one, and stages of size 1 removed."""
    out: list[Stage] = []
    for stage in stages:
        if stage.size == 1:
            continue
        same = next((i for i, s in enumerate(out) if s.dim == stage.dim != ""), None)
        if same is None:
            out.append(stage)
            continue
        minor, major = sorted((out[same], stage), key=lambda s: s.stride)
        if not major.on_torus or major.stride == minor.stride * minor.size:
            out[same] = Stage(minor.size * major.size, major.dim, major.wraps, minor.stride)
        else:
            out.append(stage)
    return out


def major_stage(torus: Torus, axes: Sequence[str]) -> tuple[list[Stage], int]:
    """([stage that a ring over mesh axes runs around], number of the axes' stages that it is merged from).

    The stage is the first of their merged stages, if the axes are in the order of the mesh (permutes number devices in this order),
    else the first stage. The list is empty if all axes have size 1.
    """
    order = list(torus)
    split = [a for a in axes if any(s.size > 1 for s in torus[a])]
    in_order = [order.index(a) for a in split] == sorted(order.index(a) for a in split)
    stages = [s for a in split for s in torus[a] if s.size > 1]
    major = joined(stages if in_order else stages[:1])[:1]
    return [s for s, _ in major], sum(n for _, n in major)


def major_of(torus: Torus, axes: Sequence[str]) -> list[Stage]:
    """[The stage that a ring over mesh axes runs around]; empty if all axes have size 1."""
    return major_stage(torus, axes)[0]


def devices_of(torus: Torus, axes: Sequence[str]) -> int:
    """The number of devices of a ring over mesh axes."""
    return math.prod(s.size for s in major_of(torus, axes))


@functools.lru_cache(maxsize=1024)
def ring_order(stages: tuple[Stage, ...]) -> tuple[int, ...]:
    """The devices of some stages in the order of a ring whose steps, the last one to the first one too, cross one link at most.

    It is the order of the devices if that is such a ring, else a cycle through the grid of chips. The devices of one chip are
    consecutive.

    Args:
      stages: of all axes of the ring, the first major.

    Returns:
      Numbers of devices, the first stage major; empty if the grid has no cycle (a line, an odd number of chips), or if the stages
      are unknown or no part of a torus.

    Example:
      >>> ring_order((Stage(2, "x"), Stage(4, "y")))
      (0, 1, 2, 3, 7, 6, 5, 4)
    """
    stages = tuple(s for s in stages if s.size > 1)
    if not stages or any(s.dim in ("switch", "slice") or not (s.dim or s.cells) for s in stages):
        return ()
    cells = np.zeros(1, int)
    for s in stages:
        cells = np.add.outer(cells * s.size, s.cells or range(s.size)).reshape(-1)
    parts = [p for s in stages for p in s.parts]
    index = np.unravel_index(cells, [p.size for p in parts])
    chips = [(p, at) for p, at in zip(parts, index, strict=True) if p.on_torus and p.size > 1]
    sides = [p.size for p, _ in chips]

    def is_ring(order: np.ndarray) -> bool:
        steps = [abs(at[order] - np.roll(at[order], 1)) for _, at in chips]
        links = [np.minimum(n, p.size - n) if p.wraps else n for (p, _), n in zip(chips, steps, strict=True)]
        return bool((np.sum(links, 0) <= 1).all())

    orders = [np.arange(len(cells))]
    if (cycle := _cycle(sides)) is not None:
        visited = np.argsort(cycle)  # chip → its index in the cycle
        orders.append(np.argsort(visited[np.ravel_multi_index([at for _, at in chips], sides)], kind="stable"))
    return next((tuple(order.tolist()) for order in orders if is_ring(order)), ())


def _cycle(sides: Sequence[int]) -> list[int] | None:
    """A cycle through the neighbours of a grid, as indices in its row-major order; None: it has no even side, or is a line.

    Each row of the even side is passed back and forth from its second cell on, and the first cells lead back to the first row.
    """
    even = next((k for k, n in enumerate(sides) if n % 2 == 0), None)
    if even is None or len(sides) < 2:
        return None
    row: list[tuple[int, ...]] = [()]
    for n in (*sides[:even], *sides[even + 1 :]):
        row = [(*cell, i) for k, cell in enumerate(row) for i in (range(n) if k % 2 == 0 else reversed(range(n)))]
    cells = [(0, row[0]), *((i, cell) for i in range(sides[even]) for cell in (row[1:] if i % 2 == 0 else row[:0:-1]))]
    cells += [(i, row[0]) for i in range(sides[even] - 1, 0, -1)]
    return [int(np.ravel_multi_index((*cell[:even], i, *cell[even:]), sides)) for i, cell in cells]


def torus_of(mesh: AnyMesh) -> Torus:
    """The stages of every axis of a mesh.

    An axis whose devices are no runs along torus dimensions (permuted devices), and every axis of a mesh whose devices have no
    coordinates (CPUs, an abstract mesh), is one stage with ``dim=""``. GPUs of one process are assumed to share a switch.
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


def torus_of_slices(sizes: Mapping[str, int], topology: Topology | str) -> Torus:
    """The stages of every axis of a mesh over slices that are not attached, with the devices that :func:`meshpar.mesh` assigns.

    Args:
      sizes: axis → size.
      topology: the slices, or their name.

    Raises:
      MeshError: the text is not a topology, or the sizes do not multiply to its number of devices.
    """
    return torus_of(described_mesh(sizes, topology))


def described_mesh(sizes: Mapping[str, int], topology: Topology | str) -> Mesh:
    """A mesh over slices that are not attached, with the devices that :func:`meshpar.mesh` assigns, to plan only: it needs no
    compiler.

    Raises:
      MeshError: the text is not a topology, or the sizes do not multiply to its number of devices.
    """
    where = parse_topology(topology) if isinstance(topology, str) else topology
    check_fills(sizes, where)
    shape, places = tuple(sizes.values()), _places(where)
    if where.chip.switch:
        return Mesh(np.array(places).reshape(shape), tuple(sizes))
    return Mesh(device_mesh(shape, places, where.slices, mesh_text(sizes)), tuple(sizes))


def check_fills(sizes: Mapping[str, int], topology: Topology) -> None:
    """Raise MeshError if the sizes of mesh axes do not multiply to the number of devices of a topology."""
    have = math.prod(sizes.values())
    if have != topology.devices:
        text = f"mesh ({mesh_text(sizes)}) has {have} devices, but {topology} has {topology.devices}"
        left, filled = topology.devices, dict(sizes)
        for axis, n in reversed([*sizes.items()]):  # minor axes keep their sizes, where these divide
            if left % n:
                filled[axis] = 1
            left //= filled[axis]
        fills = [a for a in sizes if filled[a] != sizes[a]] or [*sizes]
        filled[fills[0]] *= left
        fix = f'make the sizes multiply to {topology.devices}: mesh="{mesh_text(filled)}", or write -1 for one of them'
        raise MeshError(text, fixes=[fix])


def switched(sizes: Mapping[str, int], domain: int) -> Torus:
    """The stages of axes over nodes of ``domain`` GPUs on a switch: minor axes fill a node, major ones connect nodes."""
    out: Torus = {}
    remaining = domain
    for axis, n in reversed(list(sizes.items())):
        inner = math.gcd(n, remaining)
        remaining //= inner
        # this axis connects nodes, and so do all axes that are major to it
        if inner != n:
            remaining = 1
        stages = [Stage(n // inner, "slice")] * (n != inner) + [Stage(inner, "switch")] * (inner > 1)
        out[axis] = tuple(stages) or (Stage(1),)
    return {axis: out[axis] for axis in sizes}


@dataclass(frozen=True, slots=True)
class _Device:
    """A device of a slice that is not attached, with the attributes that the assignment of mesh axes reads."""

    coords: tuple[int, int, int] | None
    core_on_chip: int
    slice_index: int
    device_kind: str
    id: int
    platform: str = "tpu"
    process_index: int = 0


def _places(topology: Topology) -> list[_Device]:
    """The devices of slices that are not attached, in the order of their ids."""
    chip = topology.chip
    if chip.switch:
        host = min(topology.chips[0], chip.switch)
        return [_Device(None, 0, 0, chip.kinds[0], n, "gpu", n // host) for n in range(topology.devices)]
    x, y, z = (*topology.chips, 1, 1)[:3]
    at = itertools.product(*map(range, (topology.slices, z, y, x, chip.devices)))
    return [_Device((i, j, k), c, s, chip.kinds[0], n) for n, (s, k, j, i, c) in enumerate(at)]


def _rings(chip: Chip, extent: Sequence[int]) -> tuple[bool, ...]:
    """For each of :data:`_PLACES`, whether it is a ring, given the sides of the box of devices."""
    rings = chip.rings([int(n) for n in extent[: len(chip.torus)]])
    return (*rings, *(False,) * (len(_PLACES) - len(rings)))


def _unknown(sizes: Mapping[str, int]) -> Torus:
    return {axis: (Stage(n),) for axis, n in sizes.items()}


def _stages(devices: np.ndarray, axes: Sequence[str]) -> Torus:
    """The stages of every mesh axis, from the coordinates of an array of devices."""
    first = devices.flat[0]
    places = np.array([_place(d) for d in devices.flat]).reshape(*devices.shape, len(_PLACES))
    extent = places.reshape(-1, len(_PLACES)).max(0) + 1
    chip = chip_of_kind(first.device_kind)
    if chip is None:
        warnings.warn(
            f"devices of kind {first.device_kind!r} are not in the chip table (hardware/chips.py): every axis is treated "
            "as a line, none as a ring, and the plan has no seconds",
            TorusWarning,
            stacklevel=user_stacklevel(),
        )
    rings = (False,) * len(_PLACES) if chip is None else _rings(chip, extent)
    out: Torus = {}
    for k, axis in enumerate(axes):
        line = places[tuple(slice(None) if i == k else 0 for i in range(devices.ndim))]
        runs = _runs(line)
        rest = np.moveaxis(places, k, 0)
        steps = (line - line[:1]).reshape(-1, *(1,) * (devices.ndim - 1), len(_PLACES))
        if runs is None or not np.array_equal(rest - rest[:1], np.broadcast_to(steps, rest.shape)):
            groups = np.moveaxis(rest.reshape(len(rest), -1, len(_PLACES)), 1, 0)
            box, *others = {tuple(_box(group, extent, rings)) for group in groups}
            full = not others and math.prod(s.size for s in box) == len(rest)
            between = any(s.between for found in (box, *others) for s in found)
            cells = _cells(groups) if full else ()
            out[axis] = (Stage(len(rest), "slice" if between else "", fills=box if full else (), cells=cells),)
        else:
            out[axis] = tuple(_along(d, n, stride, extent, rings) for n, d, stride in runs)
    return out


def _cells(groups: np.ndarray) -> tuple[int, ...]:
    """:attr:`Stage.cells` of groups of devices that fill equal boxes; their positions are [groups, devices, 5]."""
    found = set()
    for group in groups:
        index = [np.unique(at, return_inverse=True)[1] for at in group.T]
        index = [at if 2 * at[0] <= at.max() else at.max() - at for at in index]  # reflected
        found.add(tuple(np.ravel_multi_index(index, [at.max() + 1 for at in index]).tolist()))
    return found.pop() if len(found) == 1 else ()


def _along(d: int, n: int, stride: int, extent: Sequence[int], rings: Sequence[bool]) -> Stage:
    """The stage of ``n`` devices along dimension ``d`` of :data:`_PLACES`: a ring if they fill a dimension that is one."""
    return Stage(n, _PLACES[d], bool(rings[d] and n * stride == extent[d]), stride)


def _box(places: np.ndarray, extent: Sequence[int], rings: Sequence[bool]) -> list[Stage]:
    """The stages of a mesh axis: one for each dimension of the slice along which its devices differ."""
    at = [np.unique(places[:, d]) for d in range(len(_PLACES))]
    return [_along(d, len(x), int(np.diff(x).min()), extent, rings) for d, x in enumerate(at) if len(x) > 1]


def _place(device: Any) -> tuple[int, ...]:
    coords = (*device.coords, 0, 0)[:3]
    return (*coords, getattr(device, "core_on_chip", None) or 0, getattr(device, "slice_index", None) or 0)


def _runs(line: np.ndarray) -> list[tuple[int, int, int]] | None:
    """(length, dimension, stride) of the runs along one coordinate that places consist of, major to minor; None: no such runs."""
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
    """The positions of devices in their slice, by device number.

    Attributes:
      at: [devices, 5]: coordinates, core, slice.
      extent: sides of the slice; rings: for each side, whether it is a ring.
    """

    def __init__(self, at: np.ndarray, rings: Sequence[bool]):
        self.at, self.rings = at, tuple(rings)
        self.extent = at.max(0) + 1

    @classmethod
    def of(cls, devices: np.ndarray) -> Places:
        """The positions of devices that have coordinates.

        Raises:
          MeshError: the devices have no coordinates.
        """
        first = devices.flat[0]
        chip = chip_of_kind(getattr(first, "device_kind", ""))
        if chip is None or getattr(first, "coords", None) is None:
            text = f"devices of kind {getattr(first, 'device_kind', '?')!r} have no coordinates on a torus"
            raise MeshError(text, fixes=['leave topology out, or give an abstract mesh with it: topology="v5e:4x4"'])
        at = np.array([_place(d) for d in devices.flat])
        return cls(at, _rings(chip, at.max(0) + 1))

    def stages(self, members: Sequence[int]) -> list[Stage]:
        """The stages of a group of devices: one for each dimension along which they differ."""
        return _box(self.at[list(members)], self.extent, self.rings)

    def hop(self, pair: Sequence[int]) -> tuple[Stage, int]:
        """(stage along which two devices are neighbours, number of links between them)."""
        a, b = (self.at[n] for n in pair[:2])
        steps = np.abs(a - b)
        rings = np.array(self.rings)
        steps = np.where(rings, np.minimum(steps, self.extent - steps), steps)
        d = int(np.argmax(steps))
        ring = bool(self.rings[d])
        return Stage(max(2, int(self.extent[d])), _PLACES[d], ring), max(1, int(steps.sum()))

    def links(self, members: Sequence[int], pairs: Sequence[tuple[int, int]] = ()) -> frozenset[tuple[str, int]]:
        """The links that a collective uses: (dimension, direction 1 or -1).

        Args:
          members: devices of a group; it uses both directions of every dimension along which they differ.
          pairs: (source, target) of a permute: each takes the shorter direction around a ring. On a line, the end sends to the
            beginning over the links of the opposite direction, which are then occupied.
        """
        if not pairs:
            return frozenset((s.dim, way) for s in self.stages(members) for way in (1, -1)) if members else frozenset()
        a, b = (self.at[[pair[k] for pair in pairs]] for k in (0, 1))
        ahead = b - a
        back = np.array(self.rings) & (2 * np.abs(ahead) > self.extent)
        ways = np.where(back, -np.sign(ahead), np.sign(ahead))
        return frozenset((name, way) for d, name in enumerate(_PLACES) for way in (1, -1) if (ways[:, d] == way).any())
