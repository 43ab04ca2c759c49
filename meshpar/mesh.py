"""Meshes: local devices, CPU stand-ins, and TPU slices that are not here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from .errors import LayoutSyntaxError, MeshError

_AXIS = re.compile(r"\s*([A-Za-z_][\w\-]*)\s*=\s*(-?\d+)\s*\Z")
_TOPOLOGY = re.compile(r"\s*(?:(\d+)\s*x\s+)?([A-Za-z]\w*):(\d+(?:x\d+)*)\s*\Z")
TPU_KINDS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
_FLAT = ("v5e", "v6e")


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
      topology: a TPU slice that is not here, e.g. ``"v5e:16x16"`` or ``"2x v5e:16x16"`` (slices joined by DCN:
        the first axes); needs the ``libtpu`` package, no TPU.
      devices: default: all local devices, of which the first ``prod(sizes)`` are used.

    Raises:
      LayoutSyntaxError: text that is no mesh.
      MeshError: more devices asked for than there are, or a slice that the mesh does not fill.
    """
    sizes = parse_mesh(text)
    if topology is not None:
        return _topology_mesh(text, sizes, topology)
    devices = list(jax.devices() if devices is None else devices)
    _fill(sizes, len(devices))
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
    if need == len(devices) and devices[0].platform == "tpu":
        array = jax.make_mesh(shape, tuple(sizes), devices=devices).devices
    else:
        array = np.asarray(devices[:need], dtype=object).reshape(shape)
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _fill(sizes: dict[str, int], total: int) -> None:
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

    It concerns only the CPU: GPUs and TPUs stay as they are. Call it before the first use of a device.

    Raises:
      MeshError: JAX has already made its devices, and there are fewer CPU devices than that.
    """
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
    """``"2x v5e:16x16"`` → ``(2, "v5e", (16, 16))``: slices, kind, chips along each torus dimension."""
    m = _TOPOLOGY.match(text)
    if m is None or m[2] not in TPU_KINDS:
        raise MeshError(
            f"topology {text!r} is not known",
            fixes=[
                f'write `kind:AxB` or `kind:AxBxC`, kinds {", ".join(TPU_KINDS)}: "v5e:16x16", "v5p:4x4x8", "2x v6e:16x16"'
            ],
        )
    chips = tuple(int(n) for n in m[3].split("x"))
    want = 2 if m[2] in _FLAT else 3
    if len(chips) != want:
        raise MeshError(f"topology {text!r}: a {m[2]} slice has {want} torus dimensions, not {len(chips)}")
    return int(m[1] or 1), m[2], chips


def wraps(kind: str, chips: Sequence[int]) -> tuple[bool, bool, bool]:
    """Which torus dimensions of a slice close to a ring (the compiler must be told, or it takes rings for lines)."""
    if kind in _FLAT:
        return (*(n == 16 for n in chips), False)  # type: ignore[return-value]
    full = all(n % 4 == 0 for n in chips)
    return (full, full, full)


def _topology_mesh(text: str, sizes: dict[str, int], topology: str) -> Mesh:
    from ._compat import device_mesh, tpu_topology

    slices, kind, chips = parse_topology(topology)
    devices = tpu_topology(kind, chips, slices, wraps(kind, chips))
    _fill(sizes, len(devices))
    if math.prod(sizes.values()) != len(devices):
        raise MeshError(
            f"mesh ({text}) has {math.prod(sizes.values())} devices, but {topology} has {len(devices)}",
            fixes=["make the sizes multiply to that number, or write -1 for one of them"],
        )
    shape = tuple(sizes.values())
    array = device_mesh(shape, devices, slices, text)
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
