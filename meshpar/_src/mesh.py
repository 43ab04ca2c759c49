"""Meshes of local devices, of virtual CPU devices, and of TPU slices and GPU hosts that are not attached."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from ..errors import IdleDevicesWarning, LayoutSyntaxError, MeshError
from .compat.compile_only_devices import device_mesh as ordered_devices
from .compat.coordination import DEVICES, ELASTIC, process_count
from .compat.jax import mesh_in_context, user_stacklevel, with_auto_axes
from .dims import NAME
from .hardware.topology import check_fills, parse_topology, topology_devices
from .layout import AnyMesh
from .units import mesh_text

_AXIS = re.compile(r"([^=:]*)[=:]\s*(-?\d{1,9})\s*\Z")


MeshSizes = str | Mapping[str, int]
"""Axes and sizes of a mesh: ``"data=4, model=2"``, as in Mesh-TensorFlow ``"data:4;model:2"``, or ``{"data": 4, "model": 2}``. One
size may be -1."""

MeshLike = AnyMesh | MeshSizes


def parse_mesh(spec: MeshSizes | Sequence[int], names: Sequence[str] | None = None) -> dict[str, int]:
    """The axes and sizes of a mesh, as a dictionary: given ``"data=4, model=2"``, returns ``{"data": 4, "model": 2}``.

    Args:
      spec: text, a mapping, or the sizes alone, ``(4, 2)``. One size may be -1: the rest of the devices.
      names: the axes, if ``spec`` has the sizes alone.

    Raises:
      LayoutSyntaxError: an invalid axis name or size, an axis that is given twice, or two sizes of -1.
    """
    sizes: dict[str, int] = {}
    for axis, size in _axes_and_sizes(spec, names):
        valid = isinstance(size, int | np.integer) and not isinstance(size, bool) and (size > 0 or size == -1)
        if axis in sizes or not valid or not isinstance(axis, str) or not NAME.match(axis):
            why = "is given twice" if axis in sizes else "is not `axis=size`"
            raise LayoutSyntaxError(
                f"mesh {spec!r}: {f'{axis}={size}'.strip('=')!r} {why}",
                fixes=['write `mp.mesh("data=4, model=2")`; one size may be -1, which fills'],
            )
        sizes[axis] = int(size)
    if list(sizes.values()).count(-1) > 1:
        raise LayoutSyntaxError(f"mesh {spec!r}: only one axis may be -1", fixes=["give the sizes of all axes but one"])
    return sizes


def _axes_and_sizes(spec: Any, names: Sequence[str] | None) -> Iterator[tuple[Any, Any]]:
    """Pairs (axis, size), unchecked: the size of a part of a text that is not ``axis=integer`` is ``""``.

    Raises:
      LayoutSyntaxError: a value of another type, or another number of sizes than of axes.
    """
    if isinstance(spec, str) and names is None:
        for part in re.split("[,;]", spec):
            m = _AXIS.match(part)
            yield (part.strip(), "") if m is None else (m[1].strip(), int(m[2]))
    elif isinstance(spec, Mapping) and names is None:
        yield from spec.items()
    elif isinstance(spec, Sequence) and not isinstance(spec, str) and names is not None:
        axes = names.replace(",", " ").split() if isinstance(names, str) else list(names)
        if len(axes) != len(spec):
            raise LayoutSyntaxError(
                f"mesh {tuple(spec)}: {len(spec)} sizes, but {len(axes)} axes: {', '.join(map(str, axes))}",
                fixes=['one name for each size: mp.mesh((4, 2), ("data", "model"))'],
            )
        yield from zip(axes, spec, strict=True)
    else:
        raise LayoutSyntaxError(
            f"mesh {spec!r}{'' if names is None else f', {names!r}'}: not text, a mapping, or sizes with the names of the axes",
            fixes=[
                'mp.mesh("data=4, model=2")',
                'mp.mesh({"data": 4, "model": 2})',
                'mp.mesh((4, 2), ("data", "model"))',
            ],
        )


def context_mesh(topology: str | None = None) -> AnyMesh:
    """The mesh of the innermost ``jax.set_mesh``, or the abstract mesh of ``jax.sharding.use_abstract_mesh``.

    Args:
      topology: the topology that the call was given, for the error.

    Raises:
      MeshError: this thread is in neither.
    """
    mesh = mesh_in_context()
    if mesh.empty:
        known, axes = "", 'mesh="data=4, model=2"'
        if topology is not None:
            known = f"; topology {topology!r} has {parse_topology(topology).devices} devices, but no axes"
            axes = 'mesh="data=-1", one axis over all of them'
        fixes = [axes, "or with jax.set_mesh(mesh): around the call"]
        raise MeshError(f"no mesh is given, and none is set{known}", fixes=fixes)
    return mesh


def mesh(
    spec: MeshSizes | Sequence[int],
    names: Sequence[str] | None = None,
    *,
    topology: str | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A ``jax.sharding.Mesh`` with Auto axes: ``mp.mesh("data=4, model=2")``.

    Args:
      spec: axes and sizes, as text, ``"data=4, model=2"`` or ``"data:4;model:2"``, or as a mapping, ``{"data": 4, "model": 2}``; or
        the sizes alone, ``(4, 2)``. One size may be -1: the rest of the devices. Under ``meshpar launch --elastic AXIS`` this axis
        has the number of slices that are left, unless ``topology`` or ``devices`` is given.
      names: the axes, if ``spec`` has the sizes alone: ``("data", "model")``.
      topology: devices that are not here: a TPU slice, ``"v5e:16x16"``, or several, ``"2x v5e:16x16"`` (joined by DCN, which the
        first axes cross: ``"slice=2, data=256"``), or GPUs, ``"h200:8"``; clouds' names too, ``"v5litepod-8"``, ``"v5p-128"``
        (TensorCores). It needs the compiler's package (``libtpu``, or JAX's CUDA plugin), no hardware.
      devices: default: all devices, of every process, of which the first ``prod(sizes)`` are used. Live TPU slices are laid
        out as ``topology`` lays out the same slices.

    Raises:
      LayoutSyntaxError: ``spec`` or ``names`` that describe no mesh.
      MeshError: more devices asked for than there are, a slice that the mesh does not fill, or a process none of whose
        devices would be in it.

    Example:
      >>> dict(mp.mesh("data=4, model=2").shape)
      {'data': 4, 'model': 2}
      >>> dict(mp.mesh({"data": -1, "model": 2}).shape)
      {'data': 4, 'model': 2}
    """
    sizes = parse_mesh(spec, names)
    text = mesh_text(sizes)
    if topology is not None:
        where = parse_topology(topology)
        fill_mesh(sizes, where.devices)
        check_fills(sizes, where)
        # of GPUs, hosts first: the last axes share one host's NVLink
        return _mesh_of(list(topology_devices(topology)), sizes, 0 if where.chip.switch else where.slices, text)
    every = devices is None
    axis, _, left = os.environ.get(ELASTIC, "").partition("=")
    if every and axis in sizes and left.isdecimal():  # `meshpar launch --elastic`: an index for each slice that is left
        sizes[axis] = int(left)
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
    idle = sorted({d.process_index for d in devices} - {d.process_index for d in devices[:need]})
    if every and idle:
        raise MeshError(
            f"mesh ({text}) has {need} of {len(devices)} devices, and none of process{'es' * (len(idle) > 1)} "
            f"{', '.join(map(str, idle))}, which would have nothing to run",
            fixes=[
                "use all of them: write -1 for one size",
                f"or start fewer processes: {need} devices belong to {len({d.process_index for d in devices[:need]})}",
            ],
        )
    if every and need < len(devices) and (devices[0].platform != "cpu" or process_count() > 1):
        text = (
            f"mesh ({text}) has {need} of {len(devices)} devices, and the others are idle. Write -1 for one size to use all, "
            f"or devices=jax.devices()[:{need}] if this is meant"
        )
        warnings.warn(text, IdleDevicesWarning, stacklevel=user_stacklevel())
    slices = 0
    if need == len(devices) and devices[0].platform == "tpu":
        devices.sort(key=lambda d: d.id)  # as a described slice lists them: both cores of a chip side by side
        slices = len({getattr(d, "slice_index", 0) for d in devices})
    return _mesh_of(devices[:need], sizes, slices, text)


def _mesh_of(devices: Sequence[Any], sizes: Mapping[str, int], slices: int, text: str) -> Mesh:
    """The mesh of these sizes with Auto axes.

    Args:
      slices: the devices are ordered to suit the links of so many TPU slices; 0: they stay in their order.
      text: the mesh as the user wrote it, for errors.
    """
    shape, given = tuple(sizes.values()), np.asarray(devices, dtype=object)
    array = ordered_devices(shape, devices, slices, text) if slices else given.reshape(shape)
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def device_mesh(mesh: MeshLike | None) -> AnyMesh:
    """The mesh that ``mesh=`` of :func:`meshpar.jit` describes: axes and sizes are a mesh with Auto axes over this program's
    devices; None is the mesh of the context (:func:`mesh.context_mesh`).

    Raises:
      LayoutSyntaxError, MeshError: none, or one with Manual axes.
    """
    if isinstance(mesh, str | Mapping):
        return _make_mesh(mesh)
    return checked_mesh(context_mesh() if mesh is None else mesh)


def checked_mesh(mesh: AnyMesh) -> AnyMesh:
    """The mesh itself.

    Raises:
      MeshError: no mesh, or one with Manual axes.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        fix = 'mp.mesh("data=4, model=2"), or the text alone: "data=4, model=2"'
        raise MeshError(f"mesh={mesh!r} is no mesh", fixes=[fix])
    if AxisType.Manual in getattr(mesh, "axis_types", ()):
        raise MeshError(
            "a mesh with Manual axes is one inside a shard_map, where everything is placed by hand",
            fixes=["call mp.jit's function outside of the shard_map"],
        )
    return mesh


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """The mesh with Auto axes over the same devices; the axes of ``jax.make_mesh`` are Explicit by default.

    Raises:
      MeshError: as :func:`checked_mesh`.
    """
    return with_auto_axes(checked_mesh(mesh))


def is_context(mesh: AnyMesh) -> bool:
    """Whether ``mesh`` is the mesh of ``jax.set_mesh`` around this call, or no mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return True
    context = mesh_in_context()
    return context in (mesh, mesh.abstract_mesh)


_make_mesh = mesh  # for functions with a parameter `mesh`


def fill_mesh(sizes: dict[str, int], total: int) -> None:
    """Replace the size -1 by the remaining number of ``total`` devices.

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
                    fixes=[f"sizes of the other axes whose product divides {total}"],
                )
            sizes[axis] = max(1, total // rest)


def virtual_devices(count: int) -> None:
    """Give JAX this many CPU devices, to run sharded programs on one machine.

    It concerns only the CPU: GPUs and TPUs stay as they are. Call it before the first use of a device. In several processes
    (after :func:`meshpar.distributed`) it is the number of all of them together; where the launcher has given each its devices,
    those stay.

    Raises:
      MeshError: JAX has already made its devices, and there are fewer CPU devices than that; or the processes do not divide it.

    Example:
      >>> mp.virtual_devices(8)
      >>> jax.device_count("cpu")
      8
    """
    processes = process_count()
    if processes > 1:
        if os.environ.get(DEVICES):
            return
        if count % processes:
            raise MeshError(
                f"mp.virtual_devices({count}): {processes} processes do not divide it",
                fixes=[f"a multiple of {processes}"],
            )
        count //= processes
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        have = len(jax.devices("cpu"))
        if have < count:
            raise MeshError(
                f"mp.virtual_devices({count}) came too late: JAX has made its {have} CPU device{'s' * (have != 1)} already",
                fixes=["call mp.virtual_devices before anything that touches a device (jax.devices(), jnp.ones, …)"],
            ) from None


def planned_mesh(mesh: MeshLike | None, topology: str | None) -> AnyMesh:
    """The mesh to plan on: axes and sizes become an abstract mesh, where a size of -1 needs a topology; None: the mesh of the
    context (:func:`context_mesh`).

    Raises:
      LayoutSyntaxError: text that is no mesh.
      MeshError: a mesh that does not fill the topology, or a topology together with a mesh of devices.
    """
    mesh = context_mesh(topology) if mesh is None else mesh
    if isinstance(mesh, Mesh) and topology is not None:
        raise MeshError(
            f"topology {topology!r} with a mesh of devices, which have a topology",
            fixes=["leave it out, or give the mesh as text"],
        )
    where = None if topology is None else parse_topology(topology)
    if isinstance(mesh, str | Mapping):
        sizes = parse_mesh(mesh)
        if -1 in sizes.values():
            if where is None:
                raise MeshError(
                    f"mesh ({mesh_text(sizes)}): -1 needs a topology to fill",
                    fixes=['topology="v5e:4x4", or the size of that axis'],
                )
            fill_mesh(sizes, where.devices)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    if where is not None:
        check_fills(dict(mesh.shape), where)
    return mesh
