"""Meshes: local devices, CPU stand-ins, and TPU slices and GPU hosts that are not here."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ._compat_pods import DEVICES, process_count
from .errors import LayoutSyntaxError, MeshError

_AXIS = re.compile(r"\s*([A-Za-z_][\w\-]*)\s*=\s*(-?\d+)\s*\Z")
_TOPOLOGY = re.compile(r"\s*(?:(\d+)\s*x\s+)?([A-Za-z]\w*):(\d+(?:x\d+)*)\s*\Z")
TPU_KINDS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPU_KINDS = ("h100", "h200", "b200")
GPUS_PER_HOST = 8
_FLAT = ("v5e", "v6e")
_KIND_OF = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
_SLICES = [
    "v5e and v6e: 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16",
    "v4, v5p and tpu7x: 2x2x1, 2x2x2, 2x2x4, 2x4x4, and all whose sides are multiples of 4, 4x4x4 and up",
    f"{', '.join(GPU_KINDS)}: a number of GPUs, up to {GPUS_PER_HOST} in a host, or a multiple of {GPUS_PER_HOST}: h200:8, h200:16",
    'several slices or hosts: "2x v6e:16x16", "2x h200:8"',
]


def parse_mesh(text: str) -> dict[str, int]:
    """``"data=4, model=2"`` → ``{"data": 4, "model": 2}``; one size may be -1."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        m = _AXIS.match(part)
        if m is None or m[1] in sizes or int(m[2]) == 0 or int(m[2]) < -1:
            why = "stands twice" if m and m[1] in sizes else "is not `axis=size`"
            raise LayoutSyntaxError(
                f"mesh {text!r}: {part.strip()!r} {why}",
                fixes=['write `mp.mesh("data=4, model=2")`; one size may be -1, which fills'],
            )
        sizes[m[1]] = int(m[2])
    if list(sizes.values()).count(-1) > 1:
        raise LayoutSyntaxError(f"mesh {text!r}: only one axis may be -1")
    return sizes


def mesh(text: str, *, topology: str | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A plain ``jax.sharding.Mesh`` with Auto axes.

    Args:
      text: axes and sizes, ``"data=4, model=2"``; -1 takes what is left of the devices.
      topology: devices that are not here: a TPU slice, ``"v5e:16x16"``, or several, ``"2x v5e:16x16"`` (joined by DCN: the first
        axes), or GPUs, ``"h200:8"``. It needs the compiler's package (``libtpu``, or JAX's CUDA plugin), no hardware.
      devices: default: all devices, of every process, of which the first ``prod(sizes)`` are used. Live TPU slices are laid
        out as ``topology`` lays out the same slices.

    Raises:
      LayoutSyntaxError: text that is no mesh.
      MeshError: more devices asked for than there are, a slice that the mesh does not fill, or a process none of whose
        devices would be in it.
    """
    sizes = parse_mesh(text)
    if topology is not None:
        return _topology_mesh(text, sizes, topology)
    every = devices is None
    devices = list(jax.devices() if devices is None else devices)
    fill_mesh(sizes, len(devices))
    need = math.prod(sizes.values())
    if need > len(devices):
        kind = devices[0].platform if devices else "no"
        raise MeshError(
            f"mesh ({text}) needs {need} devices, but there {'is' if len(devices) == 1 else 'are'} {len(devices)} ({kind})",
            fixes=[
                f"call mp.virtual_devices({need}) before the first use of a device, for {need} CPU stand-ins",
                f"use a smaller mesh: the sizes must multiply to at most {len(devices)}",
            ],
        )
    shape = tuple(sizes.values())
    idle = sorted({d.process_index for d in devices} - {d.process_index for d in devices[:need]})
    if every and idle:
        raise MeshError(
            f"mesh ({text}) has {need} of {len(devices)} devices, and none of process{'es' * (len(idle) > 1)} "
            f"{', '.join(map(str, idle))}, which would have nothing to run",
            fixes=[
                "use all of them: write -1 for one size",
                f"or start fewer processes: {need} devices are those of {len({d.process_index for d in devices[:need]})}",
            ],
        )
    if need == len(devices) and devices[0].platform == "tpu":
        from ._compat_devices import device_mesh

        devices.sort(key=lambda d: d.id)  # as a described slice lists them: both cores of a chip side by side
        array = device_mesh(shape, devices, len({getattr(d, "slice_index", 0) for d in devices}), text)
    else:
        array = np.asarray(devices[:need], dtype=object).reshape(shape)
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def fill_mesh(sizes: dict[str, int], total: int) -> None:
    """Replace the size -1 by what is left of ``total`` devices.

    Raises:
      MeshError: the other sizes do not divide it.
    """
    for axis, size in sizes.items():
        if size == -1:
            rest = math.prod(n for n in sizes.values() if n != -1)
            if total % rest:
                raise MeshError(
                    f"mesh axis `{axis}=-1` cannot be filled: {total} devices do not divide by {rest}",
                    axis=axis,
                )
            sizes[axis] = max(1, total // rest)


def virtual_devices(count: int) -> None:
    """Give JAX this many CPU devices, to run sharded programs on one machine.

    It concerns only the CPU: GPUs and TPUs stay as they are. Call it before the first use of a device. In several processes
    (after :func:`meshpar.distributed`) it is the number of all of them together; where the launcher has given each its devices,
    those stay.

    Raises:
      MeshError: JAX has already made its devices, and there are fewer CPU devices than that; or the processes do not divide it.
    """
    processes = process_count()
    if processes > 1:
        if os.environ.get(DEVICES):
            return
        if count % processes:
            raise MeshError(f"virtual_devices({count}): {processes} processes do not divide it")
        count //= processes
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        have = len(jax.devices("cpu"))
        if have < count:
            raise MeshError(
                f"virtual_devices({count}) came too late: JAX has made its {have} CPU device{'s' * (have != 1)} already",
                fixes=["call mp.virtual_devices before anything that touches a device (jax.devices(), jnp.ones, …)"],
            ) from None


def parse_topology(text: str) -> tuple[int, str, tuple[int, ...]]:
    """``"2x v5e:16x16"`` → ``(2, "v5e", (16, 16))``: slices, kind, chips along each torus dimension.

    Of GPUs, ``"2x h200:8"`` → ``(2, "h200", (8,))``: hosts, kind, GPUs.

    Raises:
      MeshError: no such kind, or no such slice of it; the error lists those that exist.
    """
    m = _TOPOLOGY.match(text)
    if m is None or m[2] not in TPU_KINDS + GPU_KINDS:
        raise MeshError(f"topology {text!r} is not known", fixes=_SLICES)
    slices, kind, chips = int(m[1] or 1), m[2], tuple(int(n) for n in m[3].split("x"))
    if kind in GPU_KINDS:
        good = len(chips) == 1 and chips[0] > 0 and (chips[0] <= GPUS_PER_HOST or chips[0] % GPUS_PER_HOST == 0)
        if not good:
            raise MeshError(f"topology {text!r} is not one that exists", fixes=_SLICES)
        return slices, kind, chips
    want = 2 if kind in _FLAT else 3
    if len(chips) != want:
        raise MeshError(
            f"topology {text!r}: a {kind} slice has {want} torus dimensions, not {len(chips)}", fixes=_SLICES
        )
    if min(*chips, slices) < 1 or (kind in _FLAT and max(chips) > 16):
        raise MeshError(f"topology {text!r} is not one that exists", fixes=_SLICES)
    return slices, kind, chips


def wraps(kind: str, chips: Sequence[int]) -> tuple[bool, bool, bool]:
    """Which torus dimensions of a slice close to a ring (the compiler must be told, or it takes rings for lines)."""
    if kind in _FLAT:
        return (*(n == 16 for n in chips), False)  # type: ignore[return-value]
    full = all(n % 4 == 0 for n in chips)
    return (full, full, full)


def gpu_target(kind: str) -> str:
    """XLA's description of a GPU, as protobuf text."""
    return (Path(__file__).parent / "verify" / "targets" / f"{kind}.txtpb").read_text()


@functools.cache
def topology_devices(topology: str) -> tuple[Any, ...]:
    """The devices of a topology that is not here, as its compiler describes them; the same ones for every call.

    Raises:
      MeshError: an unknown topology, or a compiler that is not installed; it says the command that installs it.
    """
    from ._compat_devices import gpu_topology, tpu_topology

    slices, kind, chips = parse_topology(topology)
    if kind in GPU_KINDS:
        _need_cuda_plugin()
        hosts, each = slices * max(1, chips[0] // GPUS_PER_HOST), min(chips[0], GPUS_PER_HOST)
        return tuple(gpu_topology(gpu_target(kind), hosts, each))
    try:
        return tuple(tpu_topology(kind, chips, slices, wraps(kind, chips)))
    except jax.errors.JaxRuntimeError as error:
        raise MeshError(
            f"topology {topology!r} is not one that exists: {str(error).splitlines()[0]}", fixes=_SLICES
        ) from None


def _need_cuda_plugin() -> None:
    if any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return
    version = jax.__version__
    raise MeshError(
        "a GPU topology needs JAX's CUDA plugin, which is not installed",
        fixes=[f"pip install jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}   # no GPU is needed"],
    )


def topology_of(devices: Sequence[Any]) -> str | None:
    """The text of the topology that devices which are not here belong to, ``"2x v5e:16x16"``; None for devices that are here."""
    from ._compat_devices import is_compile_only

    first = devices[0]
    if not is_compile_only(first):
        return None
    devices = first.client.devices()  # all of them, of which a mesh may use some
    if first.platform != "tpu":
        kind = next((k for k in GPU_KINDS if k.upper() in first.device_kind), None)
        hosts = len({d.process_index for d in devices})
        each = len(devices) // hosts
        if kind is None:
            return None
        return f"{hosts}x {kind}:{each}" if hosts > 1 and each < GPUS_PER_HOST else f"{kind}:{len(devices)}"
    kind = _KIND_OF.get(first.device_kind)
    if kind is None:
        return None
    sides = [max(c) + 1 for c in zip(*(d.coords for d in devices), strict=True)]
    slices = len({getattr(d, "slice_index", None) for d in devices})
    chips = "x".join(map(str, sides[:2] if kind in _FLAT else sides))
    return f"{slices}x {kind}:{chips}" if slices > 1 else f"{kind}:{chips}"


def _topology_mesh(text: str, sizes: dict[str, int], topology: str) -> Mesh:
    from ._compat_devices import device_mesh

    slices, kind, chips = parse_topology(topology)
    total = slices * math.prod(chips) * (2 if kind == "tpu7x" else 1)
    fill_mesh(sizes, total)
    if math.prod(sizes.values()) != total:
        raise MeshError(
            f"mesh ({text}) has {math.prod(sizes.values())} devices, but {topology} has {total}",
            fixes=["make the sizes multiply to that number, or write -1 for one of them"],
        )
    devices = list(topology_devices(topology))
    shape = tuple(sizes.values())
    if kind in GPU_KINDS:
        array = np.asarray(devices, dtype=object).reshape(shape)  # hosts first: the last axes share one host's NVLink
    else:
        array = device_mesh(shape, devices, slices, text)
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
